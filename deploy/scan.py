"""What a model holds for us: one ConvLayer per convolution, a summary, and one verdict."""

from __future__ import annotations

from sparsedeploy.layer import ConvLayer, Dim
from sparsedeploy.record import Document, Record


class Summary(Record):
    """The model as a whole. MACs are dense multiply-adds for one image, over 2-D convolutions of known shape."""

    convolutions: int
    eligible: int
    macs: int
    eligible_macs_share: float
    """Share of all convolution MACs in eligible layers, 0..1."""
    gain_cap: float | None
    """Amdahl: the end-to-end gain if eligible layers took no time and the rest its share of MACs; None is no cap."""
    sparsity_by_macs: float
    """Zeros of all constant convolution weights, weighted by MACs, 0..1."""
    sparsity_by_weights: float


class Scan(Document):
    """The answer of `sparsedeploy scan`; `--json` prints exactly this."""

    model: str
    model_hash: str
    opset: int
    ir_version: int
    inputs: dict[str, tuple[Dim, ...]]
    """Shapes used, open dims resolved."""
    batch: int
    target: str
    layers: tuple[ConvLayer, ...]
    summary: Summary
    notes: tuple[str, ...]
    """What was done to read it: masks folded, functions inlined."""
    hints: tuple[str, ...]
    verdict: str
    next_command: str

"""What a model holds for us: one ConvLayer per convolution, a summary, and one verdict."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterable

from sparsedeploy.devices import Device
from sparsedeploy.layer import ConvLayer, Dim
from sparsedeploy.reading import DUST, Reading
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


def scan(reading: Reading, device: Device) -> Scan:
    """The record of a reading; verdict and next command are filled in by plan.judge."""
    layers, model = reading.layers, reading.model
    return Scan(
        model=model.path.name,
        model_hash=reading.model_hash,
        opset=model.opset(),
        ir_version=model.proto.ir_version,
        inputs=dict(reading.inputs),
        batch=reading.batch,
        target=device.name,
        layers=layers,
        summary=summarise(layers),
        notes=tuple(model.notes),
        hints=_hints(layers, device),
        verdict="",
        next_command="",
    )


def summarise(layers: Iterable[ConvLayer]) -> Summary:
    """Totals over a model's convolutions."""
    layers = tuple(layers)
    macs = sum(layer.macs for layer in layers)
    eligible_macs = sum(layer.macs for layer in layers if layer.eligible)
    share = eligible_macs / macs if macs else 0.0
    counted = [layer for layer in layers if layer.zeros]
    weights = sum(layer.zeros.total for layer in counted if layer.zeros)
    weighed = sum(layer.macs for layer in counted)
    return Summary(
        convolutions=len(layers),
        eligible=sum(layer.eligible for layer in layers),
        macs=macs,
        eligible_macs_share=share,
        gain_cap=1 / (1 - share) if share < 1 else None,
        sparsity_by_macs=sum(layer.macs * layer.sparsity for layer in counted) / weighed if weighed else 0.0,
        sparsity_by_weights=1 - sum(layer.zeros.nnz for layer in counted if layer.zeros) / weights if weights else 0.0,
    )


def _hints(layers: tuple[ConvLayer, ...], device: Device) -> tuple[str, ...]:
    counted = [layer for layer in layers if layer.zeros and layer.geometry]
    if not counted:
        return ()
    zeros = sum(layer.zeros.total - layer.zeros.nnz for layer in counted if layer.zeros)
    total = sum(layer.zeros.total for layer in counted if layer.zeros)
    hints = []
    dust = [layer for layer in counted if layer.zeros and layer.zeros.near_zero > 0.01 * layer.zeros.total]
    if dust:
        count = sum(layer.zeros.near_zero for layer in dust if layer.zeros)
        hints.append(
            f"{count:,} weights in {len(dust)} layers are not zero but below {DUST:g} of their layer's largest: "
            "were they meant to be pruned? Set them to exactly 0 and scan again."
        )
    elif zeros < 0.01 * total:
        odd = sum(layer.geometry.oc % 8 != 0 for layer in counted[:-1] if layer.geometry)
        if odd > len(counted) / 4:
            hints.append(
                f"channel-pruned, weights dense: {odd} layers have a channel count that is no multiple of 8; "
                "that network is already small, and there are no zeros for us."
            )
        elif zeros == 0:
            hints.append("0 % zeros: was the pruned checkpoint lost (masks kept in code, not applied at export)?")
    two_four = [layer for layer in counted if layer.zeros and layer.zeros.two_four and 0.45 < layer.sparsity < 0.6]
    if two_four:
        where = (
            f"{device.name} runs it on tensor cores: build dense with `trtexec --sparsity=enable` and compare"
            if device.sparse_24
            else f"2:4 has no hardware on {device.name}"
        )
        hints.append(f"{len(two_four)} layers are exactly 2:4 along the input channels: {where}.")
    return tuple(hints)


def to_csv(scan: Scan) -> str:
    """One row per convolution, for spreadsheets."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(
        [
            "name",
            "op",
            "dtype",
            "oc",
            "ic",
            "kh",
            "kw",
            "stride_h",
            "stride_w",
            "pad_top",
            "pad_left",
            "pad_bottom",
            "pad_right",
            "dilation_h",
            "dilation_w",
            "group",
            "h",
            "w",
            "oh",
            "ow",
            "macs",
            "nnz",
            "sparsity",
            "nnz_min",
            "nnz_median",
            "nnz_max",
            "empty_filters",
            "empty_inputs",
            "near_zero",
            "two_four",
            "two_four_permuted",
            "epilogue",
            "eligible",
            "reason",
        ]
    )
    for layer in scan.layers:
        g, z = layer.geometry, layer.zeros
        shape = (
            (g.oc, g.ic, g.kh, g.kw, *g.stride, *g.pads, *g.dilation, g.group, g.h, g.w, g.oh, g.ow)
            if g
            else ("",) * 17
        )
        counts = (
            (
                z.nnz,
                f"{z.sparsity:.6f}",
                *z.nnz_per_channel,
                z.empty_filters,
                z.empty_inputs,
                z.near_zero,
                int(z.two_four),
                int(z.two_four_permuted),
            )
            if z
            else ("",) * 10
        )
        why = "; ".join(reason.text for reason in layer.ineligible)
        writer.writerow(
            (
                layer.name,
                layer.op,
                layer.dtype,
                *shape,
                layer.macs,
                *counts,
                layer.epilogue.describe(),
                int(layer.eligible),
                why,
            )
        )
    return text.getvalue()

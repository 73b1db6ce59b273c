"""Dense or sparse, per layer, with the numbers and the reason: an editable file between `scan` and `convert`."""

from __future__ import annotations

from sparsedeploy.layer import Precision
from sparsedeploy.record import Document, Record

DENSE = "dense"


class Predicted(Record):
    """Predicted times of one layer at the plan's batch, microseconds."""

    us_dense: float
    us_sparse: float
    kernel: str
    """The kernel that us_sparse is for."""
    bound: str
    """What binds the sparse kernel: compute, memory, l2, shared, fetch, launch."""
    source: str
    """Where the efficiencies come from."""


class Measured(Record):
    """Measured times of one layer on the device, microseconds, medians."""

    us_dense: float
    us_sparse: float
    spread_us: float


class LayerPlan(Record):
    """The decision for one convolution."""

    name: str
    choice: str
    """`dense` or the name of a kernel."""
    config: dict[str, int] = {}
    predicted: Predicted | None = None
    measured: Measured | None = None
    crossover: float | None = None
    """Sparsity above which the predicted sparse kernel is faster than dense; None: at no sparsity, or unknown."""
    roofline_crossover: float | None = None
    """The same by the roofline's bounds alone: no kernel can pay below it against a dense kernel at its bound."""
    sparsity: float = 0.0
    reason: str = ""


class Plan(Document):
    """The answer of planning. Edit `choice` and pass the file to `convert --plan`."""

    model: str
    model_hash: str
    target: str
    precision: Precision
    batch: int
    layers: tuple[LayerPlan, ...]

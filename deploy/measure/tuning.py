"""What tuning leaves behind: every measurement and every choice, as the file tune.json."""

from __future__ import annotations

from sparsedeploy import __version__
from sparsedeploy.layer import Geometry, Precision
from sparsedeploy.measure.results import LayerTime
from sparsedeploy.measure.statistics import Ratio
from sparsedeploy.plan import DENSE
from sparsedeploy.profile import Fit
from sparsedeploy.record import Document, Record
from sparsedeploy.runtime import Arithmetic

CONDITIONS = (
    "median of replays of one CUDA graph of the whole network with an event before and after every layer, less what the events "
    "add to the network's time; random inputs, activations as the network makes them"
)


class Attempt(Record):
    """One kernel and configuration tried for a layer."""

    kernel: str
    config: dict[str, int]
    predicted_us: float
    us: float | None = None
    """In the layer's place; None where it was not built or not right."""
    spread_us: float = 0.0
    error: float | None = None
    """Largest error as a share of the layer's largest output."""
    build_s: float = 0.0
    problem: str = ""


class TunedLayer(Record):
    """What was measured of one layer and decided. Microseconds, in the layer's place in the network."""

    name: str
    geometry: Geometry | None
    epilogue: str
    nnz: int
    sparsity: float
    us_dense: float | None = None
    spread_us: float = 0.0
    """Of the noisier of the two times."""
    attempts: tuple[Attempt, ...] = ()
    like: str = ""
    """The layer whose attempts chose for this one, where it is another."""
    kernel: str = ""
    config: dict[str, int] = {}
    """Of the fastest sparse form; empty where none ran."""
    us_sparse: float | None = None
    choice: str = DENSE
    crossover: float | None = None
    """Sparsity at which the sparse form would take as long as the dense one, on the line through two measured sparsities."""
    crossover_how: str = ""
    """interpolated, extrapolated, or why there is none."""
    roofline_crossover: float | None = None
    reason: str


class Step(Record):
    """One whole-model comparison, in turns in one process."""

    what: str
    ratio: Ratio
    """Time of what was there before over time of what is tried."""
    taken: bool


class Tuning(Document):
    """The content of tune.json: every measurement behind the choices."""

    version: str = __version__
    model: str
    model_hash: str
    target: str
    gpu: str
    sm: int
    versions: dict[str, str]
    precision: Precision
    arithmetic: Arithmetic
    batch: int
    conditions: str = CONDITIONS
    layers: tuple[TunedLayer, ...]
    steps: tuple[Step, ...]
    dense_ms: float
    tuned_ms: float
    """Medians of the last comparison; the same where everything stayed dense."""
    speedup: Ratio | None
    """Dense over sparse of the last comparison; None where there was nothing to compare."""
    sparse_layers: int
    verdict: str
    fits: tuple[Fit, ...]
    notes: tuple[str, ...] = ()
    seconds: dict[str, float] = {}
    """Where the time went."""

    def layer_times(self) -> tuple[LayerTime, ...]:
        """What the waterfall of a bench draws: every layer dense, and as it was chosen."""
        return tuple(
            LayerTime(name=each.name, dense_us=each.us_dense, sparse_us=each.us_sparse, sparse=True)
            if each.choice != DENSE and each.us_sparse is not None
            else LayerTime(name=each.name, dense_us=each.us_dense, sparse_us=each.us_dense, sparse=False)
            for each in self.layers
            if each.us_dense is not None
        )

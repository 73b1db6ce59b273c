"""The content of results.json: what a bench measured, on what, how, and whether it may be believed."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Literal

from sparsedeploy import __version__
from sparsedeploy.errors import InputError
from sparsedeploy.layer import Precision
from sparsedeploy.measure.gpu_state import GpuState
from sparsedeploy.measure.statistics import Distribution, Ratio
from sparsedeploy.record import Document, Record
from sparsedeploy.runtime import Arithmetic, RunnerName
from sparsedeploy.verify import OutputCheck

RESULTS = "results.json"
Which = Literal["dense", "sparse"]
Metric = Literal["gpu_compute", "wall", "latency", "throughput"]


class Limits(Record):
    """What makes a bench INVALID."""

    rounds_cv: float = 0.05
    """Coefficient of variation of the medians of the rounds."""
    drift: float = 0.05
    """By what share the second half of the rounds may differ from the first, either way."""
    clock_drop: float = 0.05
    """By what share the GPU's clock may be lower in the second half, and between its fastest and slowest round."""
    samples: int = 64
    utilisation: int = 10
    """Per cent that the GPU may be busy before the bench begins."""


class Settings(Record):
    """How it was measured; durations are of each variant at each batch."""

    batches: tuple[int, ...]
    runners: tuple[RunnerName, ...]
    arithmetics: tuple[Arithmetic, ...]
    duration_s: float
    warmup_s: float
    rounds: int
    seed: int
    limits: Limits = Limits()


class Machine(Record):
    """Where it was measured; None for what is not known."""

    gpu: str
    sm: int
    """Compute capability times ten."""
    sm_count: int
    memory_bytes: int | None = None
    driver: str | None = None
    system: str
    python: str
    versions: dict[str, str] = {}
    """Of the libraries that ran, by name."""


class Timing(Record):
    """One variant: a model in one runner, one arithmetic, with or without a CUDA graph. Words as trtexec has them."""

    name: str
    model: Which
    runner: RunnerName
    arithmetic: Arithmetic
    graph: bool
    device: str
    sparse_layers: int
    device_clock: bool
    """Whether gpu_compute is by the device's clock; else it is the host's."""
    outputs: tuple[OutputCheck, ...]
    """Its outputs against ONNX Runtime on the CPU on the dense model, checked before and after it was timed: the worse."""
    load_s: float
    """To load the model, for the first session of a runner."""
    first_ms: float
    """The first inference, before any warm-up."""
    gpu_compute: Distribution
    """GPU Compute Time: the inference alone, inputs and outputs on the device."""
    wall: Distribution
    """The same by the host's clock, from the enqueue until it was done."""
    enqueue: Distribution
    """Enqueue Time: until the host was free again."""
    latency: Distribution
    """Latency: from inputs on the host to outputs on the host, by the host's clock; holds the three parts."""
    h2d: Distribution
    d2h: Distribution
    throughput: float
    """Inferences a second where none waits for the one before; times the batch, images a second."""
    rounds_ms: tuple[float, ...]
    """Median gpu_compute of each round: what intervals come from."""
    interval_ms: tuple[float, float]
    """95 % interval of the geometric mean of rounds_ms."""
    rounds_cv: float
    notes: tuple[str, ...] = ()


class LeftOut(Record):
    """A variant that has no time, and why."""

    name: str
    reason: str


class LayerTime(Record):
    """One step of the network in both models, in its place there: microseconds."""

    name: str
    dense_us: float
    """In the baseline."""
    sparse_us: float
    """In the sparse model, where it may have stayed dense."""
    sparse: bool
    """Whether the bundle runs it sparse."""


class Speedup(Record):
    """How many times faster the sparse variant is than a dense one, paired by rounds."""

    dense: str
    sparse: str
    metric: Metric
    ratio: Ratio


class Case(Record):
    """All variants at one batch."""

    batch: int
    inputs: dict[str, tuple[int, ...]]
    timings: tuple[Timing, ...]
    left_out: tuple[LeftOut, ...] = ()
    baseline: str
    """The fastest dense variant of the bundle's own precision: what the headline compares with."""
    best: str
    """The fastest sparse variant."""
    speedups: tuple[Speedup, ...]
    layers: tuple[LayerTime, ...] = ()
    """Of baseline and best, where the runner or `tune` timed single layers."""
    reasons: tuple[str, ...] = ()
    """Why it is INVALID; empty when it is VALID."""
    notes: tuple[str, ...] = ()
    before: GpuState | None = None
    after: GpuState | None = None
    clocks_mhz: tuple[int | None, ...] = ()
    """The GPU's clock at the end of each round."""

    @property
    def valid(self) -> bool:
        """Whether nothing speaks against the times."""
        return not self.reasons

    def timing(self, name: str) -> Timing:
        """A variant by its name."""
        return next(timing for timing in self.timings if timing.name == name)

    @property
    def headline(self) -> Speedup:
        """Best sparse against best dense of the same precision, GPU Compute Time."""
        return next(
            speedup for speedup in self.speedups if (speedup.dense, speedup.metric) == (self.baseline, "gpu_compute")
        )


class SweepLayer(Record):
    """One layer at one point of a sweep, predicted: microseconds."""

    name: str
    sparsity: float
    dense_us: float | None
    sparse_us: float | None
    crossover: float | None
    """Sparsity above which its sparse kernel is predicted faster; None: at none, or not known."""
    sparse: bool


class SweepPoint(Record):
    """The model pruned to one sparsity, converted and measured."""

    asked: float
    sparsity: float
    """Share of zeros of all pruned weights."""
    sparse_layers: int
    predicted: float | None
    """Predicted dense over planned time of all convolutions, not measured."""
    cases: tuple[Case, ...] = ()
    """Empty where nothing was converted at this sparsity."""
    layers: tuple[SweepLayer, ...] = ()
    note: str = ""


class Results(Document):
    """The content of results.json."""

    TITLE = "the results.json of a bench"

    tool: str = "sparsedeploy"
    version: str = __version__
    commit: str | None = None
    """Of sparsedeploy's source where it runs from a checkout; `+` when files were changed."""
    made: str
    """UTC, ISO 8601."""
    model: str
    model_hash: str
    target: str
    precision: Precision
    hashes: dict[str, str] = {}
    """SHA-256 of the measured files by name in the bundle."""
    kernels: dict[str, int] = {}
    """Sparse layers by kernel."""
    settings: Settings
    machine: Machine
    cases: tuple[Case, ...] = ()
    sweep: tuple[SweepPoint, ...] = ()

    @property
    def every_case(self) -> tuple[Case, ...]:
        """Those of the model itself and of the sweep."""
        return (*self.cases, *(case for point in self.sweep for case in point.cases))

    @property
    def valid(self) -> bool:
        """Whether every case is."""
        return all(case.valid for case in self.every_case)


def read_results(path: Path) -> Results:
    """A results.json; also found in a bundle's folder. Raises InputError."""
    file = path / RESULTS if path.is_dir() else path
    try:
        results = Results.from_json(file.read_bytes(), file)
    except OSError as error:
        raise InputError(
            f"{file}: {error.strerror}. Make one with `sparsedeploy bench BUNDLE`, or `sparsedeploy bench BUNDLE -o FILE`."
        ) from error
    for case in results.every_case:
        if damage := _damage(case):
            raise InputError(
                f"{file}: batch {case.batch}: {damage}. The file is damaged: copy it again, or measure again with `sparsedeploy "
                "bench`."
            )
    return results


def _damage(case: Case) -> str:
    """What keeps a case from being compared, "" where nothing does: a gate that met a NaN would pass."""
    names = {timing.name for timing in case.timings}
    for role, name in (("baseline", case.baseline), ("best", case.best)):
        if name not in names:
            return f"{role} names the variant {name!r}, which has no times"
    if not any((each.dense, each.metric) == (case.baseline, "gpu_compute") for each in case.speedups):
        return f"there is no speed-up over {case.baseline!r}"
    numbers: dict[str, tuple[float, ...]] = {
        f"speed-up over {each.dense!r}": (each.ratio.estimate,) for each in case.speedups
    }
    for timing in case.timings:
        found = timing.gpu_compute
        held = (
            found.min_ms,
            found.median_ms,
            found.mean_ms,
            found.p90_ms,
            found.p95_ms,
            found.p99_ms,
            timing.throughput,
        )
        numbers[f"times of {timing.name!r}"] = tuple(value for value in held if value is not None)
    wrong = ((what, value) for what, values in numbers.items() for value in values if not 0 < value < math.inf)
    return next((f"{what}: {value:g}, needed numbers above zero" for what, value in wrong), "")

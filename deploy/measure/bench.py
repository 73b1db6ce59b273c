"""`bench`: a bundle's dense and sparse model side by side on this machine's GPU; checked first, timed in turns, judged.

What is compared: the fastest sparse variant with the fastest dense one of the same precision. Dense variants of a looser
precision (TF32, fp16 beside fp32) are timed and shown too: a reader may allow their rounding.
"""

from __future__ import annotations

import contextlib
import platform
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime, timezone
from importlib import metadata
from pathlib import Path
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from sparsedeploy import bundle, runtime
from sparsedeploy.bundle import Manifest
from sparsedeploy.converters.graph import Model
from sparsedeploy.converters.load import load
from sparsedeploy.converters.rewrite import read_nodes
from sparsedeploy.errors import CheckFailed, InputError, MachineError, SparseDeployError
from sparsedeploy.gpu import Gpu, closest, first_gpu
from sparsedeploy.measure.gpu_state import SEVERE, GpuState, Nvml, Probe, probe
from sparsedeploy.measure.results import (
    Case,
    LayerTime,
    LeftOut,
    Limits,
    Machine,
    Metric,
    Results,
    Settings,
    Speedup,
    Timing,
    Which,
)
from sparsedeploy.measure.statistics import describe, halves_differ, mean_interval, paired_ratio, variation
from sparsedeploy.measure.timing import Clock, Samples, Schedule, measure
from sparsedeploy.plan import DENSE, Plan
from sparsedeploy.plugins.node import SparseConv
from sparsedeploy.runtime import Arithmetic, Runner, RunnerName, Session
from sparsedeploy.verify import (
    FP16_TOLERANCE,
    FP32_TOLERANCE,
    OutputCheck,
    compare,
    random_feeds,
    range_one,
    run_file,
    tolerance_for,
)

Array = NDArray[np.generic]
Loader = Callable[[Path, RunnerName, Arithmetic], Runner]
T = TypeVar("T", bound=str)

RUNNERS: tuple[RunnerName, ...] = ("torch", "tensorrt", "tensorrt_rtx", "onnxruntime")
ARITHMETICS: tuple[Arithmetic, ...] = ("fp32", "tf32", "fp16")
_DENSE: dict[str, tuple[Arithmetic, ...]] = {"fp32": ("fp32", "tf32", "fp16"), "fp16": ("fp16",)}
"""Dense baselines by the bundle's precision, its own first."""
_PACKAGES = ("numpy", "onnx", "onnxruntime", "onnxruntime-gpu", "torch", "tensorrt", "tensorrt_rtx")
FEWEST_ROUNDS = 10


@dataclass(frozen=True)
class Request:
    """What to measure, and how."""

    bundle: Path
    runners: tuple[RunnerName, ...] = ()
    """(): those that this machine has. A named one that cannot run is an error."""
    batches: tuple[int, ...] = ()
    """(): the batch that the bundle was converted for."""
    arithmetics: tuple[Arithmetic, ...] = ()
    """Of the dense baselines; (): the bundle's own and all looser ones."""
    schedule: Schedule = field(default_factory=Schedule)
    seed: int = 0
    limits: Limits = field(default_factory=Limits)
    tell: Callable[[str], None] = lambda stage: None


@dataclass(frozen=True)
class Tools:
    """The machine as bench sees it."""

    load: Loader
    gpu: Gpu | None
    probe: Probe
    clock: Clock = time.perf_counter_ns


def tools_here() -> Tools:
    """Those of this machine."""
    return Tools(_load_here, first_gpu(), probe())


def _load_here(model: Path, name: RunnerName, arithmetic: Arithmetic) -> Runner:
    return runtime.load(model, name, arithmetic)


@dataclass
class _Loaded:
    """A model in a runner."""

    which: Which
    arithmetic: Arithmetic
    runner: Runner
    load_s: float
    notes: tuple[str, ...]
    """The runner's when it was loaded; what sessions add is about their shapes."""

    def name(self, graph: bool) -> str:
        return _name(self.which, self.arithmetic, self.runner.name, graph)


def _name(which: Which, arithmetic: Arithmetic, runner: RunnerName, graph: bool = False) -> str:
    return f"{which} {arithmetic}, {runner}{', graph' if graph else ''}"


@dataclass
class _Subject:
    """The bundle opened for a bench."""

    folder: Path
    manifest: Manifest
    dense: Model
    nodes: tuple[SparseConv, ...]
    loaded: list[_Loaded] = field(default_factory=list)
    left_out: list[LeftOut] = field(default_factory=list)

    def file(self, which: Which) -> Path:
        return self.folder / (bundle.SPARSE_MODEL if which == "sparse" else bundle.DENSE_MODEL)


def bench(request: Request, tools: Tools | None = None) -> Results:
    """Measure a bundle; nothing is written.

    Raises InputError for a bundle without sparse layers or a batch it does not take, MachineError where this machine
    cannot run both models on a GPU, CheckFailed where an output is wrong: no time is then returned. A bench that is
    INVALID is returned and says so.
    """
    manifest = bundle.read_manifest(request.bundle)
    _refuse(request, manifest)
    tools = tools or tools_here()
    if tools.gpu is None:
        raise MachineError(_no_gpu(request.bundle))
    bundle.check_hashes(request.bundle)
    request.tell("loading the models")
    before = tools.probe.read()  # while the GPU is still nobody's
    nodes = tuple(read_nodes(load(request.bundle / bundle.SPARSE_MODEL)).values())
    subject = _Subject(request.bundle, manifest, load(request.bundle / bundle.DENSE_MODEL), nodes)
    shapes = {batch: _shapes(subject, batch) for batch in request.batches or (manifest.batch,)}
    try:
        _load_all(request, subject, tools)
        cases = tuple(_case(request, subject, tools, batch, sizes, before) for batch, sizes in shapes.items())
        return _results(request, subject, tools, tools.gpu, cases)
    finally:
        for loaded in subject.loaded:
            loaded.runner.close()


def _refuse(request: Request, manifest: Manifest) -> None:
    if not manifest.sparse_layers:
        raise InputError(
            f"{request.bundle}: nothing was converted in this bundle, so there is no sparse model to measure. report.html "
            "says why; `sparsedeploy convert MODEL --layer '*=sparse'` forces every eligible layer."
        )
    if not manifest.executable:
        raise InputError(f"{request.bundle}: its sparse nodes carry no code to run. Convert the model again.")
    if request.arithmetics and manifest.precision not in request.arithmetics:
        raise InputError(
            f"--precision {','.join(request.arithmetics)}: the bundle is {manifest.precision}, and its sparse model is held "
            f"against dense of the same precision. Name {manifest.precision} too, or convert with --precision "
            f"{request.arithmetics[-1].replace('tf32', 'fp32')}."
        )


def _no_gpu(folder: Path) -> str:
    return (
        f"{folder}: bench needs an NVIDIA GPU, and this machine shows none (no driver, or none that CUDA may see). The sparse "
        "kernels are CUDA code; on a CPU both models would run dense, and their times would say nothing. Copy the folder "
        f"to the device and run `sparsedeploy bench {folder.name}` there. Here, `sparsedeploy verify` proves that it is right "
        "and report.html has the predicted times."
    )


def _shapes(subject: _Subject, batch: int) -> dict[str, tuple[int, ...]]:
    """Input shapes at a batch; raises InputError where the model has another one fixed."""
    sizes, opened = dict(subject.manifest.inputs), False
    for value in subject.dense.graph.inputs():
        dims = value.type.tensor_type.shape.dim
        if dims and dims[0].dim_value < 1:
            sizes[value.name], opened = (batch, *sizes[value.name][1:]), True
    if not opened and batch != subject.manifest.batch:
        raise InputError(
            f"--batch {batch}: the model's inputs are fixed at batch {subject.manifest.batch}. Leave --batch out, or export the "
            "model with an open batch dimension and convert it again."
        )
    return sizes


def _load_all(request: Request, subject: _Subject, tools: Tools) -> None:
    own = subject.manifest.precision
    wanted = request.arithmetics or _DENSE[own]
    variants: list[tuple[Which, Arithmetic]] = [("sparse", own), *(("dense", each) for each in wanted)]
    for runner in request.runners or RUNNERS:
        for which, arithmetic in variants:
            must = runner in request.runners and arithmetic == own
            _load_or_leave(subject, tools, which, runner, arithmetic, must)
    for which in ("sparse", "dense"):
        if not any(entry.which == which and entry.arithmetic == own for entry in subject.loaded):
            reasons = [entry for entry in subject.left_out if entry.name.startswith(f"{which} {own}")]
            raise MachineError(
                f"{request.bundle}: no runner on this machine runs the {which} model in {own} on the GPU. "
                + " ".join(f"{entry.name}: {entry.reason}" for entry in reasons)
            )


def _load_or_leave(
    subject: _Subject, tools: Tools, which: Which, runner: RunnerName, arithmetic: Arithmetic, must: bool
) -> None:
    try:
        _load(subject, tools, which, runner, arithmetic)
    except SparseDeployError as error:
        if must:
            raise
        subject.left_out.append(LeftOut(name=_name(which, arithmetic, runner), reason=str(error)))


def _load(subject: _Subject, tools: Tools, which: Which, name: RunnerName, arithmetic: Arithmetic) -> None:
    start = tools.clock()
    runner = tools.load(subject.file(which), name, arithmetic)
    reason = ""
    if runner.device == "cpu":
        reason = "it runs on the CPU here"
    elif which == "sparse" and not runner.sparse_layers:
        reason = "it runs the sparse layers dense"
    if reason:
        runner.close()
        subject.left_out.append(LeftOut(name=_name(which, arithmetic, name), reason=reason))
        return
    subject.loaded.append(_Loaded(which, arithmetic, runner, (tools.clock() - start) / 1e9, tuple(runner.notes)))


@dataclass
class _Variant:
    """A session that is timed."""

    loaded: _Loaded
    graph: bool
    session: Session
    feeds: dict[str, Array] = field(default_factory=dict)
    outputs: tuple[OutputCheck, ...] = ()
    known_notes: int = 0
    """How many notes the runner had before this case."""

    def notes(self) -> tuple[str, ...]:
        """The runner's own notes and those about this case's shapes."""
        return (*self.loaded.notes, *tuple(self.loaded.runner.notes)[self.known_notes :])


@dataclass(frozen=True)
class _Expected:
    """Inputs and what ONNX Runtime makes of them."""

    feeds: dict[str, Array]
    outputs: dict[str, Array]
    bounded: frozenset[str]


def _case(
    request: Request,
    subject: _Subject,
    tools: Tools,
    batch: int,
    shapes: dict[str, tuple[int, ...]],
    untouched: GpuState | None,
) -> Case:
    request.tell(f"batch {batch}: reference")
    first, second = (_expected(subject, shapes, request.seed + i) for i in (0, 1))
    variants: dict[str, _Variant] = {}
    left_out = list(subject.left_out)
    try:
        request.tell(f"batch {batch}: checking outputs")
        _open(subject, shapes, first, variants, left_out)
        request.tell(f"batch {batch}: measuring {len(variants)} variants, {request.schedule.duration_s:g} s each")
        states: list[GpuState | None] = []
        samples = measure(
            {name: variant.session for name, variant in variants.items()},
            {name: variant.feeds for name, variant in variants.items()},
            request.schedule,
            tools.clock,
            lambda: states.append(tools.probe.read()),
        )
        # Other inputs than were timed: a graph that replays what it once read would pass with the same.
        for variant in variants.values():
            outputs = _check(subject, variant, second)
            _require(subject, variant, outputs, batch)
            variant.outputs = _worse(variant.outputs, outputs)
        timings = tuple(_timing(name, variant, samples[name]) for name, variant in variants.items())
        pair = _headline_pair(timings, subject.manifest.precision)
        steps = [_steps(variants[timing.name].session) for timing in pair]
    finally:
        for variant in variants.values():
            variant.session.close()
    layers = tuple(_layers(*steps)) if all(steps) else _planned_layers(subject, batch)
    around = _Surroundings(
        batch, shapes, left_out, untouched, states, layers, (*_foreign(subject, tools, batch), *_rounded(subject))
    )
    return _judged(request, pair, timings, samples, around)


def _expected(subject: _Subject, shapes: dict[str, tuple[int, ...]], seed: int) -> _Expected:
    feeds = random_feeds(subject.dense, shapes, seed)
    try:
        outputs = run_file(subject.file("dense"), feeds)
    except RuntimeError as error:
        raise CheckFailed(
            f"{subject.file('dense')}: ONNX Runtime, the reference that outputs are checked against, cannot run it ({error}). "
            "No time is printed of outputs that nothing checked."
        ) from error
    return _Expected(feeds, outputs, range_one(subject.dense))


def _open(
    subject: _Subject,
    shapes: dict[str, tuple[int, ...]],
    expected: _Expected,
    variants: dict[str, _Variant],
    left_out: list[LeftOut],
) -> None:
    """A checked session for every model with and without a CUDA graph, added to `variants`."""
    for loaded in subject.loaded:
        known_notes = len(loaded.runner.notes)
        for graph in (False, True):
            name = loaded.name(graph)
            try:
                session = loaded.runner.session(shapes, graph)
            except SparseDeployError as error:
                if not graph and loaded.arithmetic == subject.manifest.precision:
                    raise
                left_out.append(LeftOut(name=name, reason=str(error)))
                continue
            if graph and not session.graph:
                session.close()
                left_out.append(LeftOut(name=name, reason="this runner captures no CUDA graph of it"))
                continue
            variant = variants[name] = _Variant(loaded, graph, session, known_notes=known_notes)
            variant.feeds = _typed(loaded.runner, expected.feeds)
            variant.outputs = _check(subject, variant, expected)
            if loaded.which == "dense" and loaded.arithmetic != subject.manifest.precision and not _passed(variant):
                session.close()
                del variants[name]
                worst = min(variant.outputs, key=lambda output: output.margin)
                left_out.append(LeftOut(name=name, reason=f"its outputs are wrong: {_words(worst)}"))
            else:
                batch = max((size[0] for size in shapes.values() if size), default=1)
                _require(subject, variant, variant.outputs, batch)


def _typed(runner: Runner, feeds: Mapping[str, Array]) -> dict[str, Array]:
    types = {binding.name: binding.dtype for binding in runner.inputs}
    return {name: np.ascontiguousarray(value.astype(types.get(name, value.dtype))) for name, value in feeds.items()}


def _check(subject: _Subject, variant: _Variant, expected: _Expected) -> tuple[OutputCheck, ...]:
    session, loaded = variant.session, variant.loaded
    session.upload(_typed(loaded.runner, expected.feeds))
    session.enqueue()
    session.wait()
    tolerance = tolerance_for(subject.nodes if loaded.which == "sparse" else (), loaded.arithmetic)
    if loaded.arithmetic != "fp32":
        tolerance = FP16_TOLERANCE  # tf32 has fp16's mantissa
    return compare(expected.outputs, session.download(), tolerance, expected.bounded)


def _passed(variant: _Variant) -> bool:
    return all(output.passed for output in variant.outputs)


def _words(output: OutputCheck) -> str:
    what = output.problem or f"off by {output.max_abs:.3g}, allowed {output.tolerance:g} of {output.largest:.3g}"
    return f"output {output.name}: {what}"


def _require(subject: _Subject, variant: _Variant, outputs: Sequence[OutputCheck], batch: int) -> None:
    for output in outputs:
        if not output.passed:
            name = variant.loaded.name(variant.graph)
            raise CheckFailed(
                f"{subject.folder}: at batch {batch}, {name} differs from ONNX Runtime on the CPU: {_words(output)}. No time "
                "is printed of a wrong result. Run `sparsedeploy verify` to see whether the bundle is right; if it is, the "
                "runner is not: choose another with --runners, and report this."
            )


def _worse(before: Sequence[OutputCheck], after: Sequence[OutputCheck]) -> tuple[OutputCheck, ...]:
    return tuple(min(pair, key=lambda output: output.margin) for pair in zip(before, after, strict=True))


def _timing(name: str, variant: _Variant, samples: Samples) -> Timing:
    rounds = _medians(samples.gpu_ms)
    runner = variant.loaded.runner
    return Timing(
        name=name, model=variant.loaded.which, runner=runner.name, arithmetic=variant.loaded.arithmetic,
        graph=variant.graph, device=runner.device, sparse_layers=runner.sparse_layers,
        device_clock=variant.session.device_clock, outputs=variant.outputs, load_s=variant.loaded.load_s,
        first_ms=samples.first_ms, gpu_compute=describe(_all(samples.gpu_ms)), wall=describe(_all(samples.wall_ms)),
        enqueue=describe(_all(samples.enqueue_ms)), latency=describe(_all(samples.latency_ms)),
        h2d=describe(_all(samples.h2d_ms)), d2h=describe(_all(samples.d2h_ms)),
        throughput=float(np.median(samples.per_second)), rounds_ms=rounds, interval_ms=mean_interval(rounds),
        rounds_cv=variation(rounds), notes=variant.notes(),
    )  # fmt: skip


def _all(rounds: Sequence[Sequence[float]]) -> list[float]:
    return [sample for each in rounds for sample in each]


def _medians(rounds: Sequence[Sequence[float]]) -> tuple[float, ...]:
    return tuple(float(np.median(each)) for each in rounds)


@dataclass(frozen=True)
class _Surroundings:
    """What belongs to a case besides its times."""

    batch: int
    shapes: dict[str, tuple[int, ...]]
    left_out: list[LeftOut]
    untouched: GpuState | None
    """The GPU before bench loaded anything."""
    states: list[GpuState | None]
    """After each round."""
    layers: tuple[LayerTime, ...]
    told: tuple[str, ...]
    """What is to be told of the bundle."""


def _headline_pair(timings: Sequence[Timing], own: Arithmetic) -> tuple[Timing, Timing]:
    """The fastest dense variant of the bundle's precision, and the fastest sparse one."""
    dense = [timing for timing in timings if (timing.model, timing.arithmetic) == ("dense", own)]
    return min(dense, key=_median), min((timing for timing in timings if timing.model == "sparse"), key=_median)


def _judged(
    request: Request,
    pair: tuple[Timing, Timing],
    timings: tuple[Timing, ...],
    samples: Mapping[str, Samples],
    around: _Surroundings,
) -> Case:
    baseline, best = pair
    dense = [timing for timing in timings if timing.model == "dense"]
    sparse = [timing for timing in timings if timing.model == "sparse"]
    speedups = [
        _speedup(baseline, best, metric, samples) for metric in ("gpu_compute", "wall", "latency", "throughput")
    ]
    speedups += [_speedup(timing, best, "gpu_compute", samples) for timing in dense if timing is not baseline]
    speedups += [_speedup(baseline, timing, "gpu_compute", samples) for timing in sparse if timing is not best]
    return Case(
        batch=around.batch, inputs=around.shapes, timings=timings, left_out=tuple(around.left_out),
        baseline=baseline.name, best=best.name, speedups=tuple(speedups),
        reasons=judge(pair, around.untouched, around.states, request.limits),
        notes=(*around.told, *_notes(baseline, best, around.states)), layers=around.layers, before=around.untouched,
        after=around.states[-1] if around.states else None,
        clocks_mhz=tuple(state.sm_mhz if state else None for state in around.states),
    )  # fmt: skip


def _foreign(subject: _Subject, tools: Tools, batch: int) -> tuple[str, ...]:
    """That the bundle's layers and kernels were chosen for another GPU or batch."""
    notes, manifest = [], subject.manifest
    row = closest(tools.gpu) if tools.gpu else None
    if row is None or row.name != manifest.target:
        notes.append(
            f"converted for {manifest.target}, measured on another GPU: its layers and kernels were not chosen for this one"
        )
    if batch != manifest.batch:
        notes.append(
            f"converted for batch {manifest.batch}: `sparsedeploy convert --batch {batch}` chooses layers and kernels for this one"
        )
    return tuple(notes)


def _rounded(subject: _Subject) -> tuple[str, ...]:
    if subject.manifest.precision != "fp32":
        return ()
    layers = [node for node in subject.nodes if tolerance_for((node,), "fp32") > FP32_TOLERANCE]
    if not layers:
        return ()
    kernels = ", ".join(sorted({node.kernel for node in layers}))
    return (
        f"{len(layers)} of {len(subject.nodes)} sparse layers ({kernels}) carry their weights rounded to fp16, as many bits as TF32 "
        "keeps of weights and inputs: dense tf32 is as accurate a rival",
    )


def _median(timing: Timing) -> float:
    return timing.gpu_compute.median_ms


def _speedup(dense: Timing, sparse: Timing, metric: Metric, samples: Mapping[str, Samples]) -> Speedup:
    a, b = samples[dense.name], samples[sparse.name]
    if metric == "throughput":
        ratio = paired_ratio(b.per_second, a.per_second)
    else:
        name = {"gpu_compute": "gpu_ms", "wall": "wall_ms", "latency": "latency_ms"}[metric]
        ratio = paired_ratio(_medians(getattr(a, name)), _medians(getattr(b, name)))
    return Speedup(dense=dense.name, sparse=sparse.name, metric=metric, ratio=ratio)


def judge(
    pair: Sequence[Timing], untouched: GpuState | None, states: Sequence[GpuState | None], limits: Limits
) -> tuple[str, ...]:
    """Why times are not to be believed, in words with numbers; () where nothing speaks against them.

    `pair` are the two variants of the headline, `untouched` the GPU before anything was loaded, `states` after each round.
    """
    reasons = []
    for timing in pair:
        if timing.gpu_compute.count < limits.samples or len(timing.rounds_ms) < FEWEST_ROUNDS:
            reasons.append(
                f"too few samples: {timing.name} has {timing.gpu_compute.count} in {len(timing.rounds_ms)} rounds, needed "
                f"{limits.samples} in {FEWEST_ROUNDS}; measure longer with --duration"
            )
        if timing.rounds_cv > limits.rounds_cv:
            reasons.append(
                f"unsteady: medians of rounds of {timing.name} vary by {timing.rounds_cv:.1%} (coefficient of variation), "
                f"allowed {limits.rounds_cv:.0%}"
            )
        if abs(drift := halves_differ(timing.rounds_ms)) > limits.drift:
            reasons.append(f"drift: the second half of {timing.name} took {drift:+.1%}, allowed {limits.drift:.0%}")
        if timing.device_clock and timing.gpu_compute.median_ms > 1.05 * timing.wall.median_ms:
            reasons.append(
                f"clocks disagree: {timing.name} takes {timing.gpu_compute.median_ms:.4g} ms by the device's clock and "
                f"{timing.wall.median_ms:.4g} ms by the host's"
            )
    return (*reasons, *_clock_reasons(states, limits), *_company(untouched, states, limits))


def _clock_reasons(states: Sequence[GpuState | None], limits: Limits) -> list[str]:
    known = [state for state in states if state]
    clocks = [state.sm_mhz for state in known if state.sm_mhz]
    reasons = []
    if held := sorted({reason for state in known for reason in state.throttle} & SEVERE):
        reasons.append(f"throttled: {', '.join(held)}; let it cool, or check its power supply")
    if len(clocks) > 1:
        drop = -halves_differ(clocks)
        if drop > limits.clock_drop:
            reasons.append(f"clock drop: {drop:.1%} lower in the second half ({max(clocks)} to {min(clocks)} MHz)")
        elif min(clocks) < (1 - limits.clock_drop) * max(clocks):
            reasons.append(f"clock moved between {min(clocks)} and {max(clocks)} MHz; allowed {limits.clock_drop:.0%}")
    return reasons


def _company(untouched: GpuState | None, states: Sequence[GpuState | None], limits: Limits) -> list[str]:
    if untouched is None:
        return []
    reasons = []
    if untouched.processes:
        reasons.append(f"another process on the GPU: {untouched.processes} were there before bench began")
    elif untouched.utilisation is not None and untouched.utilisation > limits.utilisation:
        reasons.append(f"another process on the GPU: it was {untouched.utilisation} % busy before bench began")
    counts = [state.processes for state in states if state and state.processes is not None]
    # One more is ourselves, where the driver numbers processes otherwise than we are numbered.
    if untouched.processes is not None and counts and max(counts) > untouched.processes + 1:
        reasons.append(f"another process on the GPU: {max(counts)} while measuring, {untouched.processes} before")
    return reasons


def _notes(baseline: Timing, best: Timing, states: Sequence[GpuState | None]) -> tuple[str, ...]:
    notes = [
        f"{timing.name}: Enqueue Time is {timing.enqueue.median_ms / timing.gpu_compute.median_ms:.0%} of GPU Compute Time: the "
        "host, not the GPU, sets its pace"
        for timing in (baseline, best)
        if timing.enqueue.median_ms > 0.8 * timing.gpu_compute.median_ms
    ]
    if any(state and "software power cap" in state.throttle for state in states):
        notes.append("the GPU ran at its power cap")
    if all(state is None for state in states):
        notes.append("clocks and temperature are not known here: NVML is missing")
    return tuple(notes)


def _results(request: Request, subject: _Subject, tools: Tools, gpu: Gpu, cases: tuple[Case, ...]) -> Results:
    manifest = subject.manifest
    names = (bundle.DENSE_MODEL, bundle.SPARSE_MODEL)
    kernels = [node.kernel for node in subject.nodes]
    runners = tuple(dict.fromkeys(entry.runner.name for entry in subject.loaded))
    return Results(
        commit=commit(),
        made=datetime.now(timezone.utc).replace(microsecond=0).isoformat(),
        model=manifest.model,
        model_hash=manifest.model_hash,
        target=manifest.target,
        precision=manifest.precision,
        hashes={name: value for name, value in manifest.files.items() if name.removesuffix(".data") in names},
        kernels={name: kernels.count(name) for name in sorted(set(kernels))},
        settings=Settings(
            batches=tuple(case.batch for case in cases),
            runners=runners,
            arithmetics=tuple(dict.fromkeys(entry.arithmetic for entry in subject.loaded)),
            duration_s=request.schedule.duration_s,
            warmup_s=request.schedule.warmup_s,
            rounds=request.schedule.rounds,
            seed=request.seed,
            limits=request.limits,
        ),
        machine=machine(gpu, tools.probe),
        cases=cases,
    )


def machine(gpu: Gpu, source: Probe) -> Machine:
    """What is known of this machine."""
    software = source.software() if isinstance(source, Nvml) else None
    versions = {}
    for package in _PACKAGES:
        with contextlib.suppress(metadata.PackageNotFoundError):
            versions[package] = metadata.version(package)
    return Machine(
        gpu=gpu.name, sm=gpu.sm, sm_count=gpu.sm_count, memory_bytes=software.memory_bytes if software else None,
        driver=(software.driver or None) if software else None, system=platform.platform(),
        python=platform.python_version(), versions=versions,
    )  # fmt: skip


def _steps(session: Session) -> list[tuple[str, str, float]]:
    """Label, form and microseconds of a session's steps in their place in the network; [] where it cannot tell."""
    tell = getattr(session, "step_times", None)
    return list(tell()) if tell else []


def _layers(dense: list[tuple[str, str, float]], sparse: list[tuple[str, str, float]]) -> Iterator[LayerTime]:
    """The steps of both models by label, in the dense model's order; what only one has counts nothing in the other."""
    totals: list[dict[str, float]] = [{}, {}]
    for total, steps in zip(totals, (dense, sparse), strict=True):
        for label, _, us in steps:
            total[label] = total.get(label, 0.0) + us
    forms = {label for label, form, _ in sparse if form.startswith("sparse ")}
    for label in dict.fromkeys((*totals[0], *totals[1])):
        yield LayerTime(
            name=label, dense_us=totals[0].get(label, 0.0), sparse_us=totals[1].get(label, 0.0), sparse=label in forms
        )


def _planned_layers(subject: _Subject, batch: int) -> tuple[LayerTime, ...]:
    """What `tune` measured, where it was at this batch."""
    path = subject.folder / bundle.PLAN
    plan = Plan.from_json(path.read_bytes(), path)
    if plan.batch != batch:
        return ()
    return tuple(
        LayerTime(
            name=entry.name, dense_us=entry.measured.us_dense,
            sparse_us=entry.measured.us_dense if entry.choice == DENSE else entry.measured.us_sparse,
            sparse=entry.choice != DENSE,
        )
        for entry in plan.layers
        if entry.measured
    )  # fmt: skip


def commit() -> str | None:
    """The commit of the checkout that sparsedeploy runs from, with `+` when its files were changed; None when installed."""
    folder = Path(__file__).resolve().parents[2]
    if not (folder / ".git").exists():
        return None
    try:
        done = [
            subprocess.run(["git", "-C", folder, *words], capture_output=True, text=True, check=True, timeout=10).stdout
            for words in (("rev-parse", "HEAD"), ("status", "--porcelain", "--untracked-files=no"))
        ]
    except (OSError, subprocess.SubprocessError):
        return None
    return done[0].strip() + ("+" if done[1].strip() else "")


def parse_request(request: Request, runners: str | None, batches: str | None, precisions: str | None) -> Request:
    """The request with comma-separated words of the command line; raises InputError naming the option."""
    if runners:
        request = replace(request, runners=_words_of("--runners", runners, RUNNERS))
    if precisions:
        request = replace(request, arithmetics=_words_of("--precision", precisions, ARITHMETICS))
    if batches:
        sizes = [int(text) if text.strip().isascii() and text.strip().isdigit() else 0 for text in batches.split(",")]
        if not all(1 <= size <= 65535 for size in sizes):
            raise InputError(f"--batch {batches}: needed numbers from 1 to 65535 with commas between, as in 1,8,32.")
        request = replace(request, batches=tuple(dict.fromkeys(sizes)))
    return request


def _words_of(option: str, text: str, known: tuple[T, ...]) -> tuple[T, ...]:
    given = list(dict.fromkeys(part.strip() for part in text.split(",")))
    if strange := [part for part in given if part not in known]:
        raise InputError(f"{option} {text}: {strange[0]!r} is none of {', '.join(known)}.")
    return tuple(word for word in known if word in given)

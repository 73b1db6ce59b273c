"""Choose dense or sparse, kernel and configuration of every layer by measuring on this machine's GPU.

Layers are timed in their place: a CUDA graph of the whole network, events around each layer, one candidate of every layer
exchanged at a time. So code is as cold, caches are as warm and neighbours are as real as in an inference, and what a sparse
node costs besides its kernel (fusion lost, copies between layouts) is in its time. Layers of one shape and about as many
nonzeros share their candidates: one of them is measured with all, the others are built with the winner and timed with it.

Times of layers choose; the whole model decides. Sparse layers are dropped one by one, least useful first, while that makes
the model faster, and where the rest does not beat the dense model at its best, everything stays dense.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from sparsedeploy import __version__
from sparsedeploy.converters.fuse import find_units
from sparsedeploy.converters.graph import Model
from sparsedeploy.converters.precision import to_fp16
from sparsedeploy.converters.prune import smallest
from sparsedeploy.converters.shapes import infer_shapes
from sparsedeploy.devices import Device
from sparsedeploy.errors import MachineError
from sparsedeploy.gpu import closest, first_gpu
from sparsedeploy.layer import ConvLayer, Geometry, Precision
from sparsedeploy.measure.candidate_build import Builder, Builders, Job, Made, Option, Search
from sparsedeploy.measure.selection import crossing, drop_useless, grouped, held, nnz_of, pays, race
from sparsedeploy.measure.stage import Stage, Timed
from sparsedeploy.measure.statistics import Ratio
from sparsedeploy.measure.timing import Schedule, measure
from sparsedeploy.measure.tuning import CONDITIONS, Attempt, Step, TunedLayer, Tuning
from sparsedeploy.plan import DENSE, LayerPlan, Measured, Plan, Predicted
from sparsedeploy.plugins import KERNELS
from sparsedeploy.plugins.kernel import BuildOptions, Built, Floats
from sparsedeploy.plugins.node import SparseConv
from sparsedeploy.profile import DensePoint, DeviceProfile, SparsePoint
from sparsedeploy.reading import Reading, count_zeros, read
from sparsedeploy.roofline import crossover as roofline_crossover
from sparsedeploy.roofline import dense_us, format_us
from sparsedeploy.runtime import Arithmetic
from sparsedeploy.verify import random_feeds, tolerance_for

ROUNDED = 20.0
"""An error so many times another kernel's comes from rounded weights, not from the order of sums."""
LEAST_SPARSITY = 0.2
"""Layers with fewer zeros are not tried unless they are small: they would cost the most to compile."""
SMALL_LAYER = 20_000
"""Nonzeros up to which a layer is tried whatever its sparsity: generated code may beat a library's kernel for a first
convolution of three channels even without zeros. Only a measurement can say."""


_RACE = Schedule(duration_s=0.3, warmup_s=0.05, rounds=12)
_FINAL = Schedule(duration_s=1.0, warmup_s=0.2, rounds=20)


@dataclass(frozen=True)
class Settings:
    """How much to try."""

    per_kernel: int = 3
    """Configurations of each kernel that are built and timed."""
    kernels: tuple[str, ...] = ()
    """Names; empty: every kernel."""
    hopeless: float = 4.0
    """Candidates predicted to take so many times the fastest one's time are not built: predictions are seldom that wrong."""
    beyond_dense: float = math.inf
    """Candidates predicted to take so many times the layer's measured dense time are not built."""
    compile_s: float = 60.0
    """What building one candidate may take."""
    workers: int | None = None
    """Processes that build; None: one per core."""
    replays: int = 30
    crossover: bool = True
    """Also time every layer's fastest with half its nonzeros."""
    patience: int | None = None
    """Stop dropping layers after so many drops in a row that did not help; None: try each."""
    race: Schedule = _RACE
    """Of two models that differ in one layer."""
    final: Schedule = _FINAL
    ceilings: bool = False
    tell: Callable[[str], None] = lambda stage: None


_BEYOND = 1.25
"""Of 58 candidates timed in their places on an H200 none took less than 0.89 of its prediction, half took 1.2 or more."""
QUICK = Settings(
    per_kernel=2,
    hopeless=2.0,
    beyond_dense=_BEYOND,
    compile_s=20.0,
    crossover=False,
    patience=3,
    final=Schedule(0.5, 0.1, 16),
)
"""Choices in well under a minute, for benchmarks over many models."""


@dataclass(frozen=True)
class Subject:
    """What is tuned."""

    model: str
    model_hash: str
    layers: tuple[ConvLayer, ...]
    weight: Callable[[str], tuple[Floats, Floats | None]]
    device: Device
    precision: Precision
    arithmetic: Arithmetic
    batch: int
    plan: Plan | None = None
    """What was planned before: its predictions and crossovers are kept."""


@dataclass(frozen=True)
class Tuned:
    """The outcome."""

    tuning: Tuning
    plan: Plan
    built: dict[str, Built]
    """The nodes of the sparse layers, cubins included, by layer."""
    profile: DeviceProfile

    @property
    def nodes(self) -> dict[str, SparseConv]:
        """The sparse layers' nodes."""
        return {name: item.node for name, item in self.built.items()}


# --- tuning -------------------------------------------------------------------------------------------------------


@dataclass
class _Tried:
    """A candidate on its way: built, checked, timed."""

    option: Option
    made: Made
    error: float | None = None
    time: Timed | None = None
    problem: str = ""

    @property
    def node(self) -> SparseConv | None:
        return self.made.built.node if self.made.built and not self.problem else None

    def attempt(self) -> Attempt:
        return Attempt(
            kernel=self.option.kernel, config=self.option.config, predicted_us=self.option.prediction.us,
            us=self.time.us if self.time else None, spread_us=self.time.spread_us if self.time else 0.0, error=self.error,
            build_s=round(self.made.seconds, 3), problem=self.problem or self.made.why,
        )  # fmt: skip


class _Tuner:
    """One run: the state that the stages of it share."""

    def __init__(self, stage: Stage, subject: Subject, builder: Builder, settings: Settings) -> None:
        self.stage, self.subject, self.builder, self.settings = stage, subject, builder, settings
        self.options = BuildOptions(subject.precision, subject.batch, (subject.device.sm,), assemble=True)
        self.seconds: dict[str, float] = {}
        self.notes: list[str] = []
        self.dense: dict[str, Timed] = {}
        self.groups: list[list[ConvLayer]] = []
        self.tried: dict[str, list[_Tried]] = {}
        """By the first layer of each group."""
        self.made: dict[tuple[str, str, tuple[tuple[str, int], ...]], Made] = {}
        """By layer, kernel and configuration."""
        self.winners: dict[str, _Tried] = {}
        """By layer: the fastest that is right and pays, built for that layer."""
        self.reasons: dict[str, str] = {}
        self.ruled_out: dict[str, str] = {}
        """Why nothing was built, by the first layer of each group."""
        self.crossovers: dict[str, tuple[float | None, str]] = {}
        self.extra: list[SparsePoint] = []

    @contextmanager
    def _clock(self, stage: str, words: str) -> Iterator[None]:
        self.settings.tell(words)
        started = time.perf_counter()
        try:
            yield
        finally:
            self.seconds[stage] = round(self.seconds.get(stage, 0.0) + time.perf_counter() - started, 3)

    def run(self) -> Tuned:
        self._measure_dense()
        self._choose_layers()
        self._try_candidates()
        self._build_members()
        times = self._time_winners()
        chosen = [name for name, won in self.winners.items() if pays(self.dense[name], times[name])]
        for name in self.winners:
            if name not in chosen:
                self.reasons[name] = "within the noise of the dense time"
        if self.settings.crossover:
            self._second_sparsity()
        return self._decide(chosen, times)

    # -- stages

    def _measure_dense(self) -> None:
        with self._clock("measure_s", "timing dense layers"):
            self.dense = self.stage.layer_times({}, self.settings.replays)

    def _choose_layers(self) -> None:
        taken = []
        for layer in self.subject.layers:
            if not layer.eligible:
                self.reasons[layer.name] = "; ".join(dict.fromkeys(reason.text for reason in layer.ineligible))
            elif layer.name not in self.dense:
                self.reasons[layer.name] = "it has no step of its own in the runner"
            elif layer.sparsity < LEAST_SPARSITY and nnz_of(layer) > SMALL_LAYER:
                self.reasons[layer.name] = f"{layer.sparsity:.1%} zeros, not tried below {LEAST_SPARSITY:.0%}"
            else:
                taken.append(layer)
        self.groups = grouped(taken)

    def _try_candidates(self) -> None:
        heads = [group[0] for group in self.groups]
        found = self._search({layer.name: self.settings.kernels for layer in heads}, self.settings.hopeless)
        pairs = [(layer, option) for layer, options in zip(heads, found, strict=True) for option in options]
        # Members with what is predicted to win, beside the candidates: a second round of compilers would wait for the slowest again.
        ahead = [
            (layer, min(options, key=lambda option: option.prediction.us))
            for group, options in zip(self.groups, found, strict=True)
            for layer in group[1:]
            if options
        ]
        self._keep_tries(pairs, self._build([*pairs, *ahead]))
        self._try_slower(heads)
        with self._clock("measure_s", "timing candidates"):
            for name, tried in self.tried.items():
                for candidate in tried:
                    self._check(name, candidate)
            self._time_in_rounds()
            # Once more, so that a clock that moved meanwhile shows as spread.
            again = self.stage.layer_times({}, self.settings.replays)
        self.dense = {name: first.with_repeat(again[name]) for name, first in self.dense.items()}

    def _search(self, asked: Mapping[str, tuple[str, ...]], hopeless: float) -> list[tuple[Option, ...]]:
        """For layers by name, among their kernels."""
        s, per_kernel = self.subject, self.settings.per_kernel
        layers = {layer.name: layer for layer in s.layers}
        with self._clock("search_s", f"choosing configurations for {len(asked)} layers"):
            found = self.builder.search(
                [Search(layers[name], s.device, s.precision, s.batch, per_kernel, kernels, hopeless) for name, kernels in asked.items()]
            )  # fmt: skip
        return [self._promising(name, options) for name, options in zip(asked, found, strict=True)]

    def _promising(self, name: str, options: tuple[Option, ...]) -> tuple[Option, ...]:
        """Without those that are predicted far slower than the layer was measured dense."""
        limit = self.settings.beyond_dense * self.dense[name].us
        kept = tuple(option for option in options if option.prediction.us <= limit)
        if options and not kept:
            best = min(options, key=lambda option: option.prediction.us)
            self.ruled_out[name] = (
                f"not built: predicted {format_us(best.prediction.us)} us sparse ({best.kernel}) against {format_us(self.dense[name].us)} us "
                "measured dense"
            )
        return kept

    def _keep_tries(self, pairs: Sequence[tuple[ConvLayer, Option]], made: Sequence[Made]) -> None:
        for (layer, option), each in zip(pairs, made, strict=False):
            self.tried.setdefault(layer.name, []).append(_Tried(option, each))

    def _try_slower(self, heads: Sequence[ConvLayer]) -> None:
        """Where nothing promising was built, what was left out as hopeless may still be faster than dense."""
        offered = self.settings.kernels or tuple(kernel.name for kernel in KERNELS)
        asked = {}
        for layer in heads:
            tried = self.tried.get(layer.name, [])
            others = tuple(name for name in offered if name not in {each.option.kernel for each in tried})
            if tried and others and not any(each.made.built for each in tried):
                asked[layer.name] = others
        if not asked:
            return
        found = dict(zip(asked, self._search(asked, math.inf), strict=True))
        pairs = [(layer, option) for layer in heads for option in found.get(layer.name, ())]
        self._keep_tries(pairs, self._build(pairs))

    def _build(self, pairs: Sequence[tuple[ConvLayer, Option]]) -> list[Made]:
        """Every pair, in order; what was built before is not built again."""
        keys = [(layer.name, option.kernel, tuple(sorted(option.config.items()))) for layer, option in pairs]
        missing = {key: pair for key, pair in zip(keys, pairs, strict=True) if key not in self.made}
        jobs = [
            Job(layer, *self.subject.weight(layer.name), option.kernel, option.config, self.subject.device, self.options)
            for layer, option in missing.values()
        ]  # fmt: skip
        if jobs:
            with self._clock("build_s", f"building {len(jobs)} kernels"):
                self.made.update(zip(missing, self.builder.build(jobs), strict=True))
        return [self.made[key] for key in keys]

    def _check(self, name: str, candidate: _Tried, weight: Floats | None = None) -> None:
        """Hold the candidate against float64 before anything times it."""
        if candidate.made.built is None:
            return
        own, bias = self.subject.weight(name)
        node = candidate.made.built.node
        dtypes = [layer.dtype for layer in self.subject.layers if layer.name == name]
        allowed = tolerance_for([node], self.subject.precision, dtypes)
        try:
            candidate.error = self.stage.error(name, node, own if weight is None else weight, bias)
        except MachineError as error:
            candidate.problem = f"did not run: {error}"
            return
        if not candidate.error <= allowed:
            candidate.problem = f"wrong: off by {candidate.error:.2g} of the largest output, allowed {allowed:g}"
            self.notes.append(f"{name}: {node.kernel} {candidate.option.config} is {candidate.problem}; not used")

    def _time_in_rounds(self) -> None:
        """The k-th candidate of every group at once: as many passes as the group with most candidates has."""
        runnable = {name: [each for each in tried if each.node] for name, tried in self.tried.items()}
        for number in range(max((len(each) for each in runnable.values()), default=0)):
            now = {name: each[number] for name, each in runnable.items() if number < len(each)}
            times = self.stage.layer_times(
                {name: each.node for name, each in now.items() if each.node}, self.settings.replays
            )
            for name, each in now.items():
                each.time = times[name]

    def _build_members(self) -> None:
        """Winners for the whole group: the first has its own already, the others are built with its configuration."""
        waiting: list[tuple[ConvLayer, list[_Tried]]] = []
        for group in self.groups:
            head = group[0].name
            ranked = sorted((each for each in self.tried.get(head, []) if each.time), key=_us)
            paying = _exact_first([each for each in ranked if each.time and pays(self.dense[head], each.time)])
            for layer in group:
                if not paying:
                    self.reasons[layer.name] = self._why_none(head, ranked)
            if paying:
                self.winners[head] = paying[0]
                waiting += [(layer, paying) for layer in group[1:]]
        for place in range(2):  # the runner-up where the winner cannot carry a member's weights
            now = [(layer, paying) for layer, paying in waiting if place < len(paying)]
            made = self._build([(layer, paying[place].option) for layer, paying in now])
            waiting = []
            for (layer, paying), each in zip(now, made, strict=True):
                candidate = _Tried(paying[place].option, each)
                self._check(layer.name, candidate)
                if candidate.node:
                    self.winners[layer.name] = candidate
                else:
                    self.reasons[layer.name] = candidate.problem or f"{candidate.option.kernel} {each.why}"
                    waiting.append((layer, paying))

    def _why_none(self, head: str, ranked: Sequence[_Tried]) -> str:
        if ranked and ranked[0].time:
            best = ranked[0]
            return (
                f"measured {format_us(_us(best))} us sparse ({best.option.kernel}) against {format_us(self.dense[head].us)} us "
                "dense: not faster beyond the noise"
            )
        tried = self.tried.get(head, [])
        return (
            "; ".join(f"{each.option.kernel} {each.problem or each.made.why}" for each in tried)
            or self.ruled_out.get(head)
            or "no kernel supports it"
        )

    def _time_winners(self) -> dict[str, Timed]:
        if not self.winners:
            return {}
        with self._clock("measure_s", "timing the chosen layers together"):
            nodes = {name: each.node for name, each in self.winners.items() if each.node}
            return self.stage.layer_times(nodes, self.settings.replays)

    def _second_sparsity(self) -> None:
        """Every group's fastest with half its nonzeros (the smallest imposed to be zero): the line that the crossover is on.
        Where nothing pays yet, it tells how far to prune.
        """
        pairs, weights, fastest = [], {}, {}
        for group in self.groups:
            head = group[0]
            best = self.winners.get(head.name) or self._fastest(head.name)
            if best is not None and nnz_of(head) >= 2:
                fastest[head.name] = best
                weights[head.name] = _halved(self.subject.weight(head.name)[0])
                zeros = count_zeros(weights[head.name], head.geometry.group if head.geometry else 1)
                pairs.append((head.model_copy(update={"zeros": zeros}), best.option))
        jobs = [
            Job(layer, weights[layer.name], self.subject.weight(layer.name)[1], option.kernel, option.config, self.subject.device, self.options)
            for layer, option in pairs
        ]  # fmt: skip
        with self._clock("build_s", f"building {len(jobs)} kernels with half the nonzeros"):
            made = self.builder.build(jobs)
        halves = {layer.name: _Tried(option, each) for (layer, option), each in zip(pairs, made, strict=True)}
        with self._clock("measure_s", "timing a second sparsity"):
            for name, each in halves.items():
                self._check(name, each, weights[name])
            nodes = {name: each.node for name, each in halves.items() if each.node}
            times = self.stage.layer_times(nodes, self.settings.replays) if nodes else {}
        layers = {layer.name: layer for layer, _ in pairs}
        for group in self.groups:
            name = group[0].name
            best = fastest.get(name)
            if best is None or best.time is None or halves[name].node is None:
                continue
            far = (layers[name].sparsity, times[name].us)
            found = crossing(self.dense[name].us, (group[0].sparsity, best.time.us), far)
            self.crossovers.update({layer.name: found for layer in group})
            self.extra.append(self._point(layers[name], best.option, times[name], predicted=False))

    def _fastest(self, name: str) -> _Tried | None:
        """Of what was tried and timed, whether it pays or not."""
        return min((each for each in self.tried.get(name, []) if each.time), key=_us, default=None)

    def _decide(self, chosen: Sequence[str], times: Mapping[str, Timed]) -> Tuned:
        stage, settings = self.stage, self.settings
        nodes = {name: node for name in chosen if (node := self.winners[name].node)}
        steps: list[Step] = []
        speedup, dense_ms, sparse_ms = None, 0.0, 0.0
        with self._clock("confirm_s", "confirming with the whole model"):
            if nodes:
                order = sorted(nodes, key=lambda name: self.dense[name].us - times[name].us)
                dropped = drop_useless(stage, nodes, order, settings.race, settings.patience)
                nodes, steps = dropped.kept, dropped.steps
            with held(stage, {}) as dense:
                if nodes:
                    with held(stage, nodes) as sparse:
                        speedup, dense_ms, sparse_ms = race(dense, sparse, stage.feeds, settings.final)
                else:
                    samples = measure({"dense": dense}, {"dense": stage.feeds}, settings.race)
                    dense_ms = float(np.median([ms for turn in samples["dense"].gpu_ms for ms in turn]))
        for step in steps:
            if step.taken:
                name = step.what.removesuffix(" dense again")
                self.reasons[name] = f"the whole model is {1 - 1 / step.ratio.estimate:.1%} faster with it dense"
        wins = speedup is not None and speedup.low > 1
        if nodes and not wins:
            assert speedup is not None
            for name in nodes:
                self.reasons[name] = (
                    f"the whole model is not faster sparse ({_words(speedup)} of the dense model's speed)"
                )
        kept = nodes if wins else {}
        verdict = self._verdict(kept, nodes, speedup, dense_ms, sparse_ms)
        if speedup is not None:
            steps.append(Step(what=f"{len(nodes)} layers sparse instead of all dense", ratio=speedup, taken=wins))
        profile = self._profile(times)
        layers = tuple(self._layer(layer, times, set(kept)) for layer in self.subject.layers)
        s = self.subject
        tuning = Tuning(
            model=s.model, model_hash=s.model_hash, target=s.device.name, gpu=stage.gpu, sm=stage.sm, versions=dict(stage.versions),
            precision=s.precision, arithmetic=s.arithmetic, batch=s.batch, layers=layers, steps=tuple(steps), dense_ms=dense_ms,
            tuned_ms=sparse_ms if kept else dense_ms, speedup=speedup, sparse_layers=len(kept), verdict=verdict,
            fits=profile.fits(), notes=tuple(self.notes), seconds=self.seconds,
        )  # fmt: skip
        built = {name: item for name in kept if (item := self.winners[name].made.built)}
        return Tuned(tuning, self._plan(layers), built, profile)

    def _verdict(
        self, kept: Mapping[str, SparseConv], nodes: Mapping[str, SparseConv], speedup: Ratio | None, dense_ms: float, sparse_ms: float
    ) -> str:  # fmt: skip
        s, where = self.subject, f"on {self.stage.gpu} ({self.subject.precision}, batch {self.subject.batch})"
        strongest = f"{s.arithmetic} dense by PyTorch and cuDNN in their fastest layout and forms"
        if kept and speedup is not None:
            return (
                f"{len(kept)} of {len(s.layers)} convolutions sparse: {dense_ms:.4g} ms dense, {sparse_ms:.4g} ms tuned {where}, "
                f"{_words(speedup)} faster; measured in turns in one process against {strongest}"
            )
        if nodes and speedup is not None:
            return (
                f"all dense: {len(nodes)} layers measured faster sparse, but the whole model does not: {dense_ms:.4g} ms dense, "
                f"{sparse_ms:.4g} ms sparse {where}, {_words(speedup)}; never slower than dense is kept by staying dense"
            )
        return f"all dense: no layer measured faster sparse {where}; the dense model takes {dense_ms:.4g} ms"

    # -- records

    def _layer(self, layer: ConvLayer, times: Mapping[str, Timed], kept: set[str]) -> TunedLayer:
        s, name = self.subject, layer.name
        head = next((group[0].name for group in self.groups if any(each.name == name for each in group)), "")
        won, dense = self.winners.get(name), self.dense.get(name)
        sparse = times.get(name) if won else None
        tried = self.tried.get(name, [])
        if sparse is None:  # nothing pays: the fastest that was tried, to show by how much
            won = self._fastest(name)
            sparse = won.time if won else None
        found, how = self.crossovers.get(name, (None, ""))
        reason = self.reasons.get(name, "")
        if name in kept and dense and sparse and won:
            reason = (
                f"measured {format_us(sparse.us)} us sparse ({won.option.kernel}) against {format_us(dense.us)} us dense in its "
                f"place on {self.stage.gpu}"
            )
        elif found is not None and found > layer.sparsity and reason:
            reason += f"; on the line through two measured sparsities it pays above {found:.1%} zeros"
        roofline = roofline_crossover(layer.geometry, s.device, s.precision, s.batch) if layer.geometry else None
        return TunedLayer(
            name=name, geometry=layer.geometry, epilogue=layer.epilogue.describe(), nnz=nnz_of(layer), sparsity=layer.sparsity,
            us_dense=dense.us if dense else None, spread_us=max((each.spread_us for each in (dense, sparse) if each), default=0.0),
            attempts=tuple(each.attempt() for each in tried), like="" if head == name else head,
            kernel=won.option.kernel if won else "", config=won.option.config if won else {},
            us_sparse=sparse.us if sparse else None, choice=won.option.kernel if won and name in kept else DENSE,
            crossover=found, crossover_how=how, roofline_crossover=roofline, reason=reason,
        )  # fmt: skip

    def _plan(self, layers: Sequence[TunedLayer]) -> Plan:
        s = self.subject
        before = {entry.name: entry for entry in s.plan.layers} if s.plan else {}
        entries = [self._entry(layer, before.get(layer.name)) for layer in layers]
        return Plan(
            model=s.model, model_hash=s.model_hash, target=s.device.name, precision=s.precision, batch=s.batch, layers=tuple(entries)
        )  # fmt: skip

    def _entry(self, layer: TunedLayer, before: LayerPlan | None) -> LayerPlan:
        s, won = self.subject, self.winners.get(layer.name)
        predicted = before.predicted if before else None
        if won is not None and layer.geometry is not None:
            p = won.option.prediction
            known = predicted.us_dense if predicted else dense_us(layer.geometry, s.device, s.precision, s.batch).us
            predicted = Predicted(
                us_dense=known, us_sparse=p.us, kernel=won.option.kernel, bound=p.bound, source=p.source
            )
        measured = None
        if layer.us_dense is not None and layer.us_sparse is not None:
            measured = Measured(
                us_dense=layer.us_dense, us_sparse=layer.us_sparse, spread_us=layer.spread_us, kernel=layer.kernel, gpu=self.stage.gpu
            )  # fmt: skip
        return LayerPlan(
            name=layer.name, choice=layer.choice, config=layer.config if layer.choice != DENSE else {}, predicted=predicted,
            measured=measured, crossover=before.crossover if before else None, roofline_crossover=layer.roofline_crossover,
            measured_crossover=layer.crossover, sparsity=layer.sparsity, reason=layer.reason,
        )  # fmt: skip

    def _point(self, layer: ConvLayer, option: Option, timed: Timed, predicted: bool = True) -> SparsePoint:
        s = self.subject
        assert layer.geometry is not None
        return SparsePoint(
            geometry=layer.geometry, precision=s.precision, batch=s.batch, residual=layer.epilogue.residual != "none",
            nnz=nnz_of(layer), kernel=option.kernel, config=option.config, us=timed.us, spread_us=timed.spread_us,
            predicted_us=option.prediction.us if predicted else None,
        )  # fmt: skip

    def _profile(self, times: Mapping[str, Timed]) -> DeviceProfile:
        s = self.subject
        dense: dict[tuple[Geometry, bool], DensePoint] = {}
        for layer in s.layers:
            key = (layer.geometry, layer.epilogue.residual != "none")
            if layer.geometry is None or layer.name not in self.dense or key in dense:
                continue
            timed = self.dense[layer.name]
            dense[(layer.geometry, key[1])] = DensePoint(
                geometry=layer.geometry, arithmetic=s.arithmetic, batch=s.batch, residual=key[1], us=timed.us, spread_us=timed.spread_us,
                predicted_us=dense_us(layer.geometry, s.device, s.precision, s.batch).us,
            )  # fmt: skip
        layers = {layer.name: layer for layer in s.layers}
        sparse = [
            self._point(layers[name], each.option, each.time)
            for name, tried in self.tried.items()
            for each in tried
            if each.time
        ]
        sparse += [
            self._point(layers[name], each.option, times[name])
            for name, each in self.winners.items()
            if name not in self.tried and name in times
        ]
        unique = {
            (p.geometry, p.residual, p.nnz, p.kernel, tuple(sorted(p.config.items()))): p
            for p in (*sparse, *self.extra)
        }
        return DeviceProfile(
            target=s.device.name, gpu=self.stage.gpu, sm=self.stage.sm, sm_count=self.stage.sm_count,
            versions={"sparsedeploy": __version__, **self.stage.versions}, conditions=CONDITIONS,
            ceilings=self.stage.ceilings() if self.settings.ceilings else {}, dense=tuple(dense.values()), sparse=tuple(unique.values()),
        )  # fmt: skip


def _us(tried: _Tried) -> float:
    assert tried.time is not None
    return tried.time.us


def _exact_first(ranked: Sequence[_Tried]) -> list[_Tried]:
    """Fastest first; but of those as fast as the fastest within the noise, what rounds no weights before what does."""
    alike = [each for each in ranked if not (each.time and ranked[0].time and pays(each.time, ranked[0].time))]
    least = min((each.error or 0.0 for each in alike), default=0.0)
    alike.sort(key=lambda each: ((each.error or 0.0) > ROUNDED * least, _us(each)))
    return [*alike, *(each for each in ranked if not any(each is other for other in alike))]


def _halved(weight: Floats) -> Floats:
    """The weight with the smaller half of its nonzeros set to zero."""
    flat = np.abs(weight).ravel()
    zeros = int(np.count_nonzero(flat == 0))
    gone = smallest(flat, zeros + (flat.size - zeros) // 2)
    return np.where(gone.reshape(weight.shape), np.float32(0), weight)


def _words(ratio: Ratio) -> str:
    return f"{ratio.estimate:.3g}x [{ratio.low:.3g}, {ratio.high:.3g}]"


def tune_on(stage: Stage, subject: Subject, builder: Builder, settings: Settings) -> Tuned:
    """Tune on a stage that is open: measure, choose, confirm. Raises MachineError when its GPU is not the target's kind."""
    if stage.sm != subject.device.sm:
        raise MachineError(
            f"{subject.model}: is to be tuned for {subject.device.name} (sm_{subject.device.sm}), and the GPU here is {stage.gpu} "
            f"(sm_{stage.sm}). Run tune on that device, or convert again with a --target of this GPU's architecture."
        )
    return _Tuner(stage, subject, builder, settings).run()


def tune(
    model: Path,
    device: Device | None = None,
    precision: Precision = "fp32",
    batch: int | None = None,
    shapes: Mapping[str, tuple[int, ...]] | None = None,
    arithmetic: Arithmetic | None = None,
    settings: Settings = QUICK,
) -> Tuned:
    """Tune a model file on this machine's GPU, without a bundle.

    `device` None is the row closest to the GPU here; `arithmetic` is that of the dense layers (None: the precision's own,
    so TF32 off for fp32). Raises MachineError without GPU, PyTorch or compiler, InputError for a model that cannot be read.
    """
    target = device or gpu_device()
    reading = read(model, target, precision, shapes or {}, batch)
    return tune_reading(reading, target, precision, arithmetic or precision, settings)


def tune_reading(
    reading: Reading,
    device: Device,
    precision: Precision,
    arithmetic: Arithmetic,
    settings: Settings,
    plan: Plan | None = None,
) -> Tuned:
    """Tune a model that was read, on this machine's GPU."""
    settings.tell("opening the model")
    refuse_without_compiler()
    stage = stage_of(reading, precision, arithmetic)
    try:
        subject = Subject(
            reading.model.path.name, reading.model_hash, reading.layers, reading.weight, device, precision, arithmetic,
            reading.batch, plan,
        )  # fmt: skip
        with Builders(settings.compile_s, settings.workers) as builder:
            return tune_on(stage, subject, builder, settings)
    except RuntimeError as error:
        if type(error).__name__ != "OutOfMemoryError":  # PyTorch's, which is not imported here
            raise
        raise MachineError(
            f"{reading.model.path.name}: the GPU's memory did not suffice at batch {reading.batch}: {error}. End what else runs on "
            "it, or convert for a smaller --batch and tune that."
        ) from error
    finally:
        stage.close()


def gpu_device() -> Device:
    """The device row closest to this machine's GPU; raises MachineError where there is no GPU, or none that we know."""
    gpu = first_gpu()
    if gpu is None:
        raise MachineError(
            "tune measures on a GPU, and this machine has none that its driver shows. Run it on the device; `scan --profile FILE` "
            "plans here with what was measured there."
        )
    device = closest(gpu)
    if device is None:
        raise MachineError(
            f"{gpu.name} (sm_{gpu.sm}): no device of that architecture is known to this version, so no kernels can be built for it."
        )
    return device


def refuse_without_compiler() -> None:
    """Raise MachineError where candidates could not be assembled: timing a driver's own compiler is not tuning."""
    from sparsedeploy.plugins.assemble import ptxas_path

    ptxas_path()


def stage_of(reading: Reading, precision: Precision, arithmetic: Arithmetic) -> Stage:
    """The reading's graph on the GPU, at its input shapes."""
    gpu_device()
    try:
        from sparsedeploy.measure.torch_stage import open_stage
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] != "torch":
            raise
        raise MachineError(
            "tune measures with PyTorch, which is not installed in this Python environment. Install a build for this machine's "
            "CUDA (`pip install torch`; on Jetson, NVIDIA's wheel), and run tune again."
        ) from error
    model = Model(type(reading.model.proto)(), reading.model.path)
    model.proto.CopyFrom(reading.model.proto)
    if precision == "fp16":
        to_fp16(model)
    # fp16 may have renamed values, but neither the convolutions nor their order.
    units = find_units(model, infer_shapes(model, reading.inputs))
    if len(units) != len(reading.unit_of):
        raise AssertionError(f"{len(reading.unit_of)} convolutions were read, {len(units)} are left")
    feeds = random_feeds(model, reading.inputs)
    return open_stage(
        model, dict(zip(reading.unit_of, units, strict=True)), reading.inputs, arithmetic, feeds, precision
    )

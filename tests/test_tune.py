"""Choosing by measurement, on a stage whose times are written down: noise, sharing, dropping, falling back, records."""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import pytest

from sparsedeploy.devices import find
from sparsedeploy.errors import MachineError
from sparsedeploy.layer import ConvLayer, Epilogue, Geometry
from sparsedeploy.measure.candidate_build import Job, Made, Option, Search
from sparsedeploy.measure.selection import crossing, drop_useless, grouped, pays, race
from sparsedeploy.measure.stage import Timed
from sparsedeploy.measure.timing import Schedule, measure
from sparsedeploy.measure.tune import QUICK, Settings, Subject, Tuned, tune_on
from sparsedeploy.measure.tuning import Tuning
from sparsedeploy.plan import DENSE
from sparsedeploy.plugins.kernel import Built, Prediction
from sparsedeploy.plugins.node import SparseConv
from sparsedeploy.profile import DeviceProfile
from sparsedeploy.reading import count_zeros

H200 = find("h200")
RACE = Schedule(duration_s=0.002, warmup_s=0.0, rounds=6)
SETTINGS = replace(QUICK, race=RACE, final=RACE, patience=None)
DENSE_US = 30.0


def weight_of(name: str, shape: Sequence[int] = (16, 16, 3, 3), sparsity: float = 0.9) -> np.ndarray[Any, Any]:
    rng = np.random.default_rng(sum(map(ord, name)))
    weight = rng.normal(size=tuple(shape)).astype(np.float32)
    weight.ravel()[rng.permutation(weight.size)[: round(weight.size * sparsity)]] = 0.0
    return weight


def layer(name: str, side: int = 14, sparsity: float = 0.9, residual: bool = False) -> ConvLayer:
    weight = weight_of(name, sparsity=sparsity)
    return ConvLayer(
        name=name, weight=f"{name}.w", dtype="fp32", shape=weight.shape, zeros=count_zeros(weight, 1),
        geometry=Geometry(oc=16, ic=16, kh=3, kw=3, h=side, w=side, pads=(1, 1, 1, 1)),
        epilogue=Epilogue(activation="relu", residual="before_activation" if residual else "none"),
    )  # fmt: skip


def node_of(name: str, kernel: str, config: Mapping[str, int], nnz: int = 0) -> SparseConv:
    geometry = Geometry(oc=16, ic=16, kh=3, kw=3, h=14, w=14, pads=(1, 1, 1, 1))
    parameters = (config.get("size", 0), nnz)
    return SparseConv(name, kernel, geometry, Epilogue(), "fp32", (np.zeros(1, np.int32),), parameters)


@dataclass
class FakeSession:
    """The whole network on a clock of its own."""

    us: float
    noise: Callable[[], float] = lambda: 0.0
    now: float = 0.0
    closed: bool = False
    device_clock: bool = True
    graph: bool = True

    def upload(self, feeds: Any) -> None:
        pass

    def enqueue(self) -> None:
        assert not self.closed
        self.now += self.us * (1 + self.noise())

    def wait(self) -> None:
        pass

    def download(self) -> dict[str, Any]:
        return {}

    def mark(self) -> object:
        return self.now

    def elapsed_us(self, start: Any, end: Any) -> float:
        return float(end - start)

    def close(self) -> None:
        self.closed = True


@dataclass
class FakeStage:
    """Times by (layer, kernel, size), with spreads; the whole model is the layers' sum plus what a sparse layer costs it."""

    layers: Sequence[str]
    sparse_us: Mapping[tuple[str, str, int], float]
    dense_us: Mapping[str, float] = field(default_factory=dict)
    spread: float = 0.2
    hidden_us: Mapping[str, float] = field(default_factory=dict)
    """What a sparse layer costs the whole model beyond its own time."""
    wrong: frozenset[str] = frozenset()
    """Kernels whose results are wrong."""
    rounding: frozenset[str] = frozenset()
    """Kernels that round weights."""
    noise: float = 0.0
    sm: int = 90
    gpu: str = "Fake GPU"
    sm_count: int = 132
    passes: list[dict[str, str]] = field(default_factory=list)
    sessions: list[FakeSession] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.versions = {"torch": "0"}
        self.feeds: dict[str, Any] = {}
        self.rng = np.random.default_rng(0)

    def _us(self, name: str, node: SparseConv | None) -> float:
        if node is None:
            return self.dense_us.get(name, DENSE_US)
        us = self.sparse_us.get(
            (name, node.kernel, node.parameters[0]), self.sparse_us.get(("*", node.kernel, node.parameters[0]))
        )
        assert us is not None, (name, node.kernel, node.parameters)
        return us + 0.01 * node.parameters[1]

    def layer_times(self, nodes: Mapping[str, SparseConv], replays: int) -> dict[str, Timed]:
        self.passes.append({name: node.kernel for name, node in nodes.items()})
        return {name: Timed(self._us(name, nodes.get(name)), self.spread) for name in self.layers}

    def error(self, name: str, node: SparseConv, weight: Any, bias: Any) -> float:
        assert np.count_nonzero(weight) == node.parameters[1] or node.parameters[1] == 0
        return float("inf") if node.kernel in self.wrong else 1e-4 if node.kernel in self.rounding else 1e-7

    def session(self, nodes: Mapping[str, SparseConv]) -> FakeSession:
        total = 50.0 + sum(
            self._us(name, nodes.get(name)) + (self.hidden_us.get(name, 0.0) if name in nodes else 0.0)
            for name in self.layers
        )
        self.sessions.append(FakeSession(total, lambda: float(self.rng.normal()) * self.noise))
        return self.sessions[-1]

    def ceilings(self) -> dict[str, float]:
        return {"copy_gbs": 4200.0}

    def close(self) -> None:
        pass


@dataclass
class FakeBuilder:
    """Offers what it is told; nonzeros show in the time by 0.01 us each."""

    options: tuple[tuple[str, int], ...] = (("packed", 0), ("baked", 1), ("baked", 2))
    refuses: Callable[[Job], str] = lambda job: ""
    slow: frozenset[str] = frozenset()
    """Kernels predicted to be hopeless."""
    jobs: list[Job] = field(default_factory=list)
    rounds: list[Sequence[Job]] = field(default_factory=list)

    def search(self, asked: Sequence[Search]) -> list[tuple[Option, ...]]:
        return [
            tuple(
                Option(kernel, {"size": size}, Prediction(us=5.0, bound="compute", source="a model"))
                for kernel, size in self.options
                if kernel in (each.kernels or (kernel,)) and (each.hopeless == math.inf or kernel not in self.slow)
            )
            for each in asked
        ]  # fmt: skip

    def build(self, jobs: Sequence[Job]) -> list[Made]:
        self.jobs += jobs
        self.rounds.append(jobs)
        made = []
        for job in jobs:
            why = self.refuses(job)
            node = node_of(job.layer.name, job.kernel, job.config, int(np.count_nonzero(job.weight)))
            made.append(Made(None, why) if why else Made(Built(node), "", 0.1))
        return made


def subject(layers: Sequence[ConvLayer]) -> Subject:
    sparsities = {each.name: each.sparsity for each in layers}
    weights = {name: weight_of(name, sparsity=sparsity) for name, sparsity in sparsities.items()}
    return Subject("m.onnx", "0" * 64, tuple(layers), lambda name: (weights[name], None), H200, "fp32", "fp32", 1)


def tuned(
    stage: FakeStage, layers: Sequence[ConvLayer], builder: FakeBuilder | None = None, settings: Settings = SETTINGS
) -> Tuned:
    return tune_on(stage, subject(layers), builder or FakeBuilder(), settings)


TIMES = {("*", "packed", 0): 12.0, ("*", "baked", 1): 6.0, ("*", "baked", 2): 4.0}


# --- choosing -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("dense", "sparse", "wins"),
    [
        (Timed(10, 0.1), Timed(9, 0.1), True),
        (Timed(10, 0.1), Timed(9.95, 0.1), False),
        (Timed(10, 1.5), Timed(9, 0.1), False),
        (Timed(10, 0.1), Timed(9, 1.5), False),
        (Timed(10, 0.0), Timed(10, 0.0), False),
        (Timed(9, 0.1), Timed(10, 0.1), False),
    ],
)
def test_sparse_pays_only_beyond_the_spread(dense: Timed, sparse: Timed, wins: bool) -> None:
    assert pays(dense, sparse) == wins


def test_a_repeat_that_differs_is_spread() -> None:
    both = Timed(10, 0.1).with_repeat(Timed(12, 0.2))
    assert (both.us, both.spread_us) == (11, 1.0)
    assert Timed.of([1.0, 2.0, 3.0, 4.0, 100.0]).us == 3.0


def test_layers_of_one_shape_and_similar_zeros_share() -> None:
    like = [layer("a"), layer("b"), layer("c")]
    other = [layer("d", side=7), layer("e", sparsity=0.5), layer("f", residual=True)]
    groups = grouped([*like, *other])
    assert sorted(sorted(each.name for each in group) for group in groups) == [["a", "b", "c"], ["d"], ["e"], ["f"]]


@pytest.mark.parametrize(
    ("dense", "here", "far", "found", "how"),
    [
        (15.0, (0.9, 10.0), (0.8, 20.0), 0.85, "interpolated"),
        (30.0, (0.9, 10.0), (0.8, 20.0), 0.7, "extrapolated"),
        (200.0, (0.9, 10.0), (0.8, 20.0), 0.0, "extrapolated"),
        (5.0, (0.9, 10.0), (0.95, 8.0), None, "slower at any sparsity"),
        (5.0, (0.9, 4.0), (0.95, 4.0), 0.0, "nonzeros do not show"),
        (3.0, (0.9, 4.0), (0.95, 4.5), None, "slower at any sparsity"),
    ],
)
def test_crossing(
    dense: float, here: tuple[float, float], far: tuple[float, float], found: float | None, how: str
) -> None:
    sparsity, words = crossing(dense, here, far)
    assert words == how
    assert sparsity == (found if found is None else pytest.approx(found))


def test_the_fastest_candidate_wins_and_members_get_it() -> None:
    layers = [layer("a"), layer("b")]
    stage, builder = FakeStage(["a", "b"], TIMES), FakeBuilder()
    result = tuned(stage, layers, builder)
    assert [(entry.choice, entry.config) for entry in result.plan.layers] == [("baked", {"size": 2})] * 2
    # Three candidates for one of them; for the other what was predicted fastest, and the winner's.
    assert len(builder.jobs) == 5
    assert set(result.nodes) == {"a", "b"}
    assert result.tuning.sparse_layers == 2
    assert result.tuning.speedup is not None
    assert result.tuning.speedup.low > 1
    assert "faster" in result.tuning.verdict
    assert {each.like for each in result.tuning.layers} in ({"", "a"}, {"", "b"})


def test_measured_times_are_in_the_plan_and_for_the_waterfall() -> None:
    result = tuned(FakeStage(["a"], TIMES), [layer("a")])
    measured = result.plan.layers[0].measured
    assert measured is not None
    nnz = layer("a").zeros.nnz  # type: ignore[union-attr]
    assert (measured.us_dense, measured.us_sparse, measured.kernel) == (DENSE_US, 4.0 + 0.01 * nnz, "baked")
    assert measured.gpu == "Fake GPU"
    assert "measured" in result.plan.layers[0].reason
    (bar,) = result.tuning.layer_times()
    assert (bar.name, bar.dense_us, bar.sparse) == ("a", DENSE_US, True)


def test_within_the_noise_stays_dense() -> None:
    close = dict.fromkeys(TIMES, DENSE_US - 2.5)
    stage = FakeStage(["a"], close, spread=3.0)
    result = tuned(stage, [layer("a")])
    assert result.plan.layers[0].choice == DENSE
    assert "not faster beyond the noise" in result.plan.layers[0].reason
    assert result.tuning.verdict.startswith("all dense: no layer measured faster")
    assert result.tuning.speedup is None
    assert result.plan.layers[0].measured is not None  # what was measured is kept: it says by how little


@pytest.mark.parametrize(("packed", "wins"), [(9.9, "baked"), (9.0, "packed")])
def test_of_equally_fast_kernels_the_one_that_rounds_nothing_wins(packed: float, wins: str) -> None:
    times = {("*", "packed", 0): packed, ("*", "baked", 1): 10.0, ("*", "baked", 2): 10.1}
    stage = FakeStage(["a"], times, spread=0.2, rounding=frozenset({"packed"}))
    assert tuned(stage, [layer("a")]).plan.layers[0].choice == wins


def test_a_wrong_kernel_is_not_timed_and_not_used() -> None:
    stage = FakeStage(["a"], TIMES, wrong=frozenset({"baked"}))
    result = tuned(stage, [layer("a")])
    assert result.plan.layers[0].choice == "packed"
    assert all("baked" not in each.values() for each in stage.passes)
    problems = [attempt.problem for attempt in result.tuning.layers[0].attempts if attempt.kernel == "baked"]
    assert all(text.startswith("wrong") for text in problems)
    assert len(problems) == 2
    assert any("wrong" in note for note in result.tuning.notes)


def test_a_right_prediction_builds_everything_in_one_round() -> None:
    builder = FakeBuilder(options=(("baked", 2), ("packed", 0)))
    result = tuned(FakeStage(["a", "b"], TIMES), [layer("a"), layer("b")], builder)
    assert [entry.choice for entry in result.plan.layers] == ["baked", "baked"]
    assert [len(each) for each in builder.rounds] == [3]


def test_what_was_not_compiled_in_time_is_skipped_with_the_reason() -> None:
    builder = FakeBuilder(refuses=lambda job: "was not compiled within 5 s" if job.kernel == "baked" else "")
    result = tuned(FakeStage(["a"], TIMES), [layer("a")], builder)
    assert result.plan.layers[0].choice == "packed"
    assert {attempt.problem for attempt in result.tuning.layers[0].attempts} == {"", "was not compiled within 5 s"}


def test_a_kernel_predicted_hopeless_is_built_where_nothing_else_was() -> None:
    refuses = lambda job: "was not compiled within 5 s" if (job.layer.name, job.kernel) == ("b", "baked") else ""  # noqa: E731
    builder = FakeBuilder(refuses=refuses, slow=frozenset({"packed"}))
    layers = [layer("a"), layer("b", side=7)]
    result = tuned(FakeStage(["a", "b"], TIMES), layers, builder)
    assert {entry.name: entry.choice for entry in result.plan.layers} == {"a": "baked", "b": "packed"}
    assert [job.layer.name for job in builder.jobs if job.kernel == "packed"] == ["b"]


def test_a_member_whose_weights_do_not_fit_takes_the_runner_up() -> None:
    layers = [layer("a"), layer("b"), layer("c")]
    head = grouped(layers)[0][0].name
    member = next(each.name for each in layers if each.name != head)
    refuses = lambda job: "cannot carry the weights" if job.layer.name == member and job.config["size"] == 2 else ""  # noqa: E731
    result = tuned(FakeStage(["a", "b", "c"], TIMES), layers, FakeBuilder(refuses=refuses))
    configs = {entry.name: entry.config for entry in result.plan.layers}
    assert configs.pop(member) == {"size": 1}
    assert set(map(str, configs.values())) == {str({"size": 2})}


def test_layers_that_cannot_or_need_not_run_sparse_say_why(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sparsedeploy.measure.tune.SMALL_LAYER", 1000)
    full = layer("full", sparsity=0.05)
    stage = FakeStage(["a", "full"], TIMES)
    result = tuned(stage, [layer("a"), full, layer("unseen")])
    reasons = {entry.name: entry.reason for entry in result.plan.layers}
    assert "zeros, not tried below" in reasons["full"]
    assert "no step of its own" in reasons["unseen"]


def test_a_small_layer_is_tried_whatever_its_sparsity() -> None:
    result = tuned(FakeStage(["first"], TIMES), [layer("first", sparsity=0.0)])
    assert result.plan.layers[0].choice != DENSE


# --- the whole model ----------------------------------------------------------------------------------------------


def test_a_layer_that_costs_the_model_more_than_it_saves_is_dropped() -> None:
    layers = [layer("a", side=14), layer("b", side=7)]
    stage = FakeStage(["a", "b"], TIMES, hidden_us={"b": 40.0})
    result = tuned(stage, layers)
    choices = {entry.name: entry.choice for entry in result.plan.layers}
    assert choices == {"a": "baked", "b": DENSE}
    taken = [step for step in result.tuning.steps if step.taken]
    assert [step.what for step in taken] == ["b dense again", "1 layers sparse instead of all dense"]
    assert "faster with it dense" in {entry.name: entry.reason for entry in result.plan.layers}["b"]
    assert all(session.closed for session in stage.sessions)


def test_dropping_goes_on_until_no_drop_helps() -> None:
    names = ["a", "b", "c", "d"]
    stage = FakeStage(names, TIMES, hidden_us={"b": 40.0, "d": 40.0})
    nodes = {name: node_of(name, "baked", {"size": 2}) for name in names}
    state = drop_useless(stage, nodes, names, RACE)
    assert set(state.kept) == {"a", "c"}
    # Second round: neither of the two left helps.
    assert [step.taken for step in state.steps] == [False, True, False, True, False, False]


def test_patience_ends_a_round() -> None:
    names = ["a", "b", "c", "d"]
    stage = FakeStage(names, TIMES, hidden_us={"d": 40.0})
    nodes = {name: node_of(name, "baked", {"size": 2}) for name in names}
    assert set(drop_useless(stage, nodes, names, RACE, patience=2).kept) == set(names)


def test_never_slower_falls_back_to_all_dense_with_the_evidence() -> None:
    # Each drop alone costs more than it brings, since the penalty stays while any layer is sparse.
    class Jealous(FakeStage):
        def session(self, nodes: Mapping[str, SparseConv]) -> FakeSession:
            session = super().session(nodes)
            session.us += 100.0 if nodes else 0.0
            return session

    stage = Jealous(["a", "b"], TIMES)
    result = tuned(stage, [layer("a"), layer("b", side=7)])
    assert all(entry.choice == DENSE for entry in result.plan.layers)
    assert not result.built
    tuning = result.tuning
    assert tuning.verdict.startswith("all dense: 2 layers measured faster sparse, but the whole model does not")
    assert tuning.speedup is not None
    assert tuning.speedup.high < 1
    assert tuning.tuned_ms == tuning.dense_ms
    assert not tuning.steps[-1].taken
    assert all("the whole model is not faster sparse" in entry.reason for entry in result.plan.layers)


@pytest.fixture
def steady_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    """A host clock that moves a microsecond a look: every run takes the same number of samples, so the same noise."""
    ticks = itertools.count(step=1000)
    steady = functools.partial(measure, clock=lambda: next(ticks))
    monkeypatch.setattr("sparsedeploy.measure.selection.measure", steady)


@pytest.mark.usefixtures("steady_clock")
def test_a_gain_that_noise_hides_is_no_gain() -> None:
    stage = FakeStage(["a"], dict.fromkeys(TIMES, DENSE_US - 1.0), spread=0.1, noise=0.4)
    nnz_us = 0.01 * layer("a").zeros.nnz  # type: ignore[union-attr]
    stage.sparse_us = dict.fromkeys(TIMES, DENSE_US - 1.0 - nnz_us)
    result = tuned(stage, [layer("a")])
    assert result.tuning.speedup is not None
    assert not result.tuning.speedup.differs
    assert result.plan.layers[0].choice == DENSE


def test_race_says_how_many_times_faster_the_tried_is() -> None:
    ratio, before, after = race(FakeSession(200.0), FakeSession(100.0), {}, RACE)
    assert ratio.estimate == pytest.approx(2.0)
    assert (before, after) == (pytest.approx(0.2), pytest.approx(0.1))


def test_another_device_is_refused() -> None:
    with pytest.raises(MachineError, match=r"sm_90.*GPU here is Fake GPU \(sm_80\)"):
        tuned(FakeStage(["a"], TIMES, sm=80), [layer("a")])


# --- records ------------------------------------------------------------------------------------------------------


def test_crossover_by_a_second_sparsity() -> None:
    result = tuned(FakeStage(["a"], TIMES), [layer("a")], settings=replace(SETTINGS, crossover=True))
    found = result.tuning.layers[0]
    # 4 + 0.01 nnz us: 30 us at 2600 nonzeros, more than the 2304 weights there are.
    assert (found.crossover, found.crossover_how) == (0.0, "extrapolated")
    slow = dict.fromkeys(TIMES, 22.0)
    result = tuned(FakeStage(["a"], slow), [layer("a")], settings=replace(SETTINGS, crossover=True))
    found = result.tuning.layers[0]
    # 30 = 22 + 0.01 nnz at nnz = 800 of 2304.
    assert found.crossover == pytest.approx(1 - 800 / 2304, abs=0.01)
    assert result.plan.layers[0].measured_crossover == found.crossover
    assert found.roofline_crossover is not None
    assert {point.nnz for point in result.profile.sparse} == {230, 115}


def test_profile_holds_every_time_and_the_models_error() -> None:
    result = tuned(
        FakeStage(["a", "b"], TIMES), [layer("a"), layer("b", side=7)], settings=replace(SETTINGS, ceilings=True)
    )
    profile = result.profile
    assert (profile.gpu, profile.target, profile.sm) == ("Fake GPU", "h200", 90)
    assert {(point.kernel, point.config["size"]) for point in profile.sparse} == {
        ("packed", 0),
        ("baked", 1),
        ("baked", 2),
    }
    assert len(profile.dense) == 2
    assert profile.ceilings == {"copy_gbs": 4200.0}
    fits = {fit.kernel: fit for fit in result.tuning.fits}
    assert set(fits) == {"dense", "packed", "baked"}
    assert fits["packed"].points == 2
    assert DeviceProfile.from_json(profile.to_json(), "x") == profile


def test_tuning_is_a_document_that_comes_back() -> None:
    tuning = tuned(FakeStage(["a"], TIMES), [layer("a")]).tuning
    assert Tuning.from_json(tuning.to_json(), "tune.json") == tuning


def test_what_is_predicted_far_beyond_the_measured_dense_time_is_not_built() -> None:
    builder = FakeBuilder()  # predicts 5 us
    stage = FakeStage(["fast", "slow"], TIMES, dense_us={"fast": 3.0, "slow": 4.5})
    result = tuned(stage, [layer("fast"), layer("slow", side=7)], builder)
    assert {job.layer.name for job in builder.jobs} == {"slow"}
    fast, slow = result.tuning.layers
    assert fast.reason == "not built: predicted 5 us sparse (packed) against 3 us measured dense"
    assert (fast.choice, fast.attempts) == (DENSE, ())
    assert len(slow.attempts) == 3
    thorough = FakeBuilder()
    tuned(stage, [layer("fast"), layer("slow", side=7)], thorough, replace(SETTINGS, beyond_dense=math.inf))
    assert {job.layer.name for job in thorough.jobs} == {"fast", "slow"}
    assert Settings().beyond_dense == math.inf


def test_where_nothing_pays_yet_it_is_measured_how_far_to_prune() -> None:
    # 14 = 12 + 0.01 nnz at nnz = 200 of 2304; the layer has 230.
    stage = FakeStage(["a"], {("*", "packed", 0): 12.0}, dense_us={"a": 14.0})
    builder = FakeBuilder((("packed", 0),))
    result = tuned(stage, [layer("a")], builder, replace(SETTINGS, crossover=True))
    found = result.tuning.layers[0]
    assert found.choice == DENSE
    assert found.crossover == pytest.approx(1 - 200 / 2304, abs=0.001)
    assert found.crossover_how == "interpolated"
    assert found.reason.endswith(
        "not faster beyond the noise; on the line through two measured sparsities it pays above 91.3% zeros"
    )
    never = FakeStage(["a"], {("*", "packed", 0): 12.0}, dense_us={"a": 11.0})
    found = tuned(never, [layer("a")], FakeBuilder((("packed", 0),)), replace(SETTINGS, crossover=True)).tuning.layers[
        0
    ]
    assert (found.crossover, found.crossover_how) == (None, "slower at any sparsity")

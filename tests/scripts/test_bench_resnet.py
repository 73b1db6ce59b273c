"""Table and pictures of the benchmark of whole networks, from rows made by hand."""

from __future__ import annotations

import importlib.util
import itertools
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest

from sparsedeploy.devices import find
from sparsedeploy.errors import InputError
from sparsedeploy.layer import Epilogue
from sparsedeploy.measure.candidate_build import Made, Option
from sparsedeploy.measure.results import Machine
from sparsedeploy.measure.stage import Timed
from sparsedeploy.measure.statistics import Ratio, describe
from sparsedeploy.measure.timing import Schedule
from sparsedeploy.plugins.assemble import assemble
from sparsedeploy.plugins.kernel import Built, Prediction
from sparsedeploy.plugins.node import SparseConv
from sparsedeploy.runtime import Binding
from sparsedeploy.verify import run_file

SCRIPT = Path(__file__).resolve().parents[2] / "scripts" / "bench_resnet.py"


@pytest.fixture(scope="module")
def script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("bench_resnet", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["bench_resnet"] = module  # dataclasses and records look their module up
    spec.loader.exec_module(module)
    return module


def document(script: ModuleType, sms: tuple[int, ...] = (132,)) -> object:
    def row(sparsity: float, batch: int, count: int, fp32: bool) -> object:
        dense = tuple(
            script.Dense(arithmetic=name, gpu=describe([ms, ms, ms]), error=1e-6, notes=())
            for name, ms in (("fp32", 4.0), ("tf32", 2.0), ("fp16", 1.0))
        )
        ratio = Ratio(estimate=4.0, low=3.5, high=4.5, pairs=16)
        layer = script.Layer(name="conv", choice="csr", sparsity=sparsity, us_dense=30.0, us_sparse=8.0)
        sparse = script.Sparse(
            precision="fp32", gpu=describe([1.0 - sparsity / 2]), error=0.0, allowed=1e-4,
            ratios={"fp32": ratio, "tf32": ratio, "fp16": ratio}, kernels={"csr": 1}, layers=(layer,), tune_s=1.0,
        )  # fmt: skip
        return script.Row(
            network="resnet18", recipe="uniform", sparsity=sparsity, batch=batch, sms=count, dense=dense,
            sparse=(sparse,) if fp32 else (), problems=() if fp32 else ("sparse fp32: too slow",),
        )  # fmt: skip

    machine = Machine(gpu="NVIDIA Test", sm=90, sm_count=132, system="Linux", python="3.11")
    rows = tuple(row(s, n, count, s < 0.95) for count in sms for s in (0.9, 0.8, 0.95) for n in (1, 32))
    return script.Networks(
        made="2026-01-01", commit=None, command="run", machine=machine, schedule={"rounds": 16}, rows=rows
    )


def test_the_table_says_what_was_measured_and_what_was_not(script: ModuleType) -> None:
    text = script.table(document(script))
    rows = [line for line in text.splitlines() if line.startswith("| resnet18")]
    assert len(rows) == 6
    assert "| resnet18 | 90% | 1 | 4.000 / 2.000 / 1.000 | 0.550 | **4.00** [3.50, 4.50] | – | – |" in rows
    assert "| resnet18 | 95% | 1 | 4.000 / 2.000 / 1.000 | – | – | – | – |" in rows


def test_a_baseline_that_was_left_out_leaves_a_gap(script: ModuleType, tmp_path: Path) -> None:
    made = document(script)
    row = made.rows[0]  # type: ignore[attr-defined]
    sparse = row.sparse[0].model_copy(update={"ratios": {"tf32": row.sparse[0].ratios["tf32"]}})
    row = row.model_copy(update={"dense": row.dense[1:], "sparse": (sparse,), "problems": ("dense fp32: off",)})
    alone = made.model_copy(update={"rows": (row,)})  # type: ignore[attr-defined]
    assert "| resnet18 | 90% | 1 | – / 2.000 / 1.000 | 0.550 | – | – | – |" in script.table(alone)
    assert len(script.draw(alone, tmp_path, "gap")) == 1


def test_few_sms_have_a_table_and_a_picture_of_their_own(script: ModuleType, tmp_path: Path) -> None:
    both = document(script, (132, 16))
    assert (
        "NVIDIA Test, 16 of 132 SMs (a CUDA green context; L2 cache, memory and clocks are the whole GPU's)"
        in script.table(both)
    )
    assert [path.name for path in script.draw(both, tmp_path, "nets")] == ["nets.png", "nets_16sms.png"]
    assert all(path.stat().st_size > 5000 for path in tmp_path.iterdir())


def test_the_document_survives_its_file(script: ModuleType, tmp_path: Path) -> None:
    made = document(script)
    file = tmp_path / "nets.json"
    file.write_text(made.to_json(), "utf-8")  # type: ignore[attr-defined]
    assert script.Networks.from_json(file.read_bytes(), file) == made


def test_units_go_through_the_cheapest_question_first(script: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    arguments = ["bench_resnet.py", "run", "--out", "x.json", "--networks", "resnet18", "resnet50", "--sparsities", "0.9", "--batches", "1", "32"]  # fmt: skip
    monkeypatch.setattr(sys, "argv", arguments)
    found = script.units(script.parse())
    assert [(unit.network, unit.batch) for unit in found] == [
        ("resnet18", 1), ("resnet18", 32), ("resnet50", 1), ("resnet50", 32)
    ]  # fmt: skip


def test_only_runs_of_one_commit_are_merged(script: ModuleType) -> None:
    one = document(script)
    later = one.model_copy(update={"rows": one.rows[:1], "command": "again"})  # type: ignore[attr-defined]
    merged = script.merge([one, later])
    assert merged.rows == one.rows  # type: ignore[attr-defined]
    assert merged.command == "run; again"
    with pytest.raises(InputError, match="different commits"):
        script.merge([one, later.model_copy(update={"commit": "other"})])


def test_committed_results_can_be_read(script: ModuleType) -> None:
    file = SCRIPT.parent / "results" / "networks_h200.json"
    text = script.table(script.Networks.from_json(file.read_bytes(), file))
    assert "resnet18" in text


# --- a row, on a GPU that is not there ----------------------------------------------------------------------------


class FakeSession:
    """Right answers, and times by its own clock."""

    device_clock, graph, now = True, True, 0.0
    known: dict[Any, dict[str, Any]] = {}

    def __init__(self, path: Path, us: float, error: float) -> None:
        self.path, self.us, self.error = path, us, error

    def upload(self, feeds: Mapping[str, Any]) -> None:
        self.feeds = {name: np.asarray(value, np.float32) for name, value in feeds.items()}

    def enqueue(self) -> None:
        self.now += self.us

    def wait(self) -> None:
        time.sleep(1e-6)

    def download(self) -> dict[str, Any]:
        key = (self.path, float(self.feeds["input"].sum()))
        if key not in self.known:
            self.known[key] = run_file(self.path, self.feeds)
        return {name: value * (1 + self.error) for name, value in self.known[key].items()}

    def mark(self) -> float:
        return self.now

    def elapsed_us(self, start: Any, end: Any) -> float:
        return float(end - start)

    def close(self) -> None:
        pass


class FakeRunner:
    """A dense network."""

    def __init__(self, path: Path, arithmetic: str, us: float, error: float = 0.0) -> None:
        self.path, self.arithmetic, self.us, self.error = path, arithmetic, us, error
        self.notes: tuple[str, ...] = ()
        self.inputs = (Binding("input", ("N", 3, 224, 224), "float32"),)

    def session(self, shapes: Any, graph: bool) -> FakeSession:
        return FakeSession(self.path, self.us, self.error)


class FakeStage:
    """Every layer takes 20 us dense and 5 sparse; the whole model 1000 and 250."""

    gpu, sm, sm_count, versions = "Fake", 90, 132, {"torch": "0"}
    feeds: Mapping[str, Any] = {"input": np.zeros((1, 3, 224, 224), np.float32)}

    def __init__(self, path: Path, names: Sequence[str]) -> None:
        self.path, self.names, self.dense, self.closed = path, names, FakeRunner(path, "fp32", 1000.0), False

    def layer_times(self, nodes: Mapping[str, SparseConv], replays: int) -> dict[str, Timed]:
        return {name: Timed(5.0 if name in nodes else 20.0, 0.1) for name in self.names}

    def error(self, layer: str, node: SparseConv, weight: Any, bias: Any) -> float:
        return 1e-7

    def session(self, nodes: Mapping[str, SparseConv]) -> FakeSession:
        return FakeSession(self.path, 250.0 if nodes else 1000.0, 1e-6)

    def ceilings(self) -> dict[str, float]:
        return {}

    def close(self) -> None:
        self.closed = True


class FakeBuilders:
    """csr for every layer, built from nothing."""

    def __init__(self, *_: object) -> None:
        self.jobs: list[Any] = []

    def __enter__(self) -> FakeBuilders:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def search(self, asked: Sequence[Any]) -> list[tuple[Option, ...]]:
        return [(Option("csr", {}, Prediction(us=4.0, bound="compute", source="a model")),) for _ in asked]

    def build(self, jobs: Sequence[Any]) -> list[Made]:
        built = []
        for job in jobs:
            node = SparseConv(
                job.layer.name, "csr", job.layer.geometry, Epilogue(), "fp32", (np.zeros(1, np.int32),), ()
            )
            built.append(Made(Built(node)))
        return built


@pytest.fixture
def pretended(script: ModuleType, monkeypatch: pytest.MonkeyPatch) -> list[FakeStage]:
    """The script on a fake GPU; the stages that it opened."""
    stages: list[FakeStage] = []
    loaded = itertools.count()

    def stage_of(reading: Any, *_: object) -> FakeStage:
        stages.append(FakeStage(reading.model.path, [layer.name for layer in reading.layers]))
        return stages[-1]

    def runner(bench: Any, unit: Any, path: Path, arithmetic: str) -> tuple[FakeRunner, Path]:
        next(loaded)
        assert arithmetic != "fp32"  # that of the stage serves
        return FakeRunner(path, arithmetic, 400.0, 0.01), path

    monkeypatch.setattr(script, "stage_of", stage_of)
    monkeypatch.setattr(script, "Builders", FakeBuilders)
    monkeypatch.setattr(script, "gpu_device", lambda: find("h200"))
    monkeypatch.setattr(script.Bench, "_runner", runner)
    brief = Schedule(0.01, 0.0, 4)
    monkeypatch.setattr(script, "SCHEDULE", brief)
    monkeypatch.setattr(script, "QUICK", script.replace(script.QUICK, race=brief, final=brief, patience=1))
    return stages


@pytest.mark.parametrize("network", ["mobilenet_v1", "resnet18"])
def test_a_row_is_checked_measured_and_put_together(
    script: ModuleType, pretended: list[FakeStage], tmp_path: Path, network: str
) -> None:
    row = script.Bench(tmp_path, script.QUICK, 132).row(script.Unit(network, True, 0.9, 1, ("fp32",)))
    assert row.problems == ()
    assert [each.arithmetic for each in row.dense] == ["fp32", "tf32", "fp16"]
    (sparse,) = row.sparse
    assert sparse.ratios["fp32"].estimate == pytest.approx(4.0, rel=1e-3)
    assert sparse.ratios["tf32"].estimate == pytest.approx(1.6, rel=1e-3)
    assert sparse.kernels["csr"] == len(sparse.layers) == {"mobilenet_v1": 27, "resnet18": 20}[network]
    assert sparse.error == pytest.approx(1e-6, rel=0.5)
    assert all(stage.closed for stage in pretended)


def test_a_sparse_network_that_is_wrong_has_no_time(
    script: ModuleType, pretended: list[FakeStage], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        FakeStage, "session", lambda self, nodes: FakeSession(self.path, 250.0 if nodes else 1000.0, 0.02)
    )
    row = script.Bench(tmp_path, script.QUICK, 132).row(script.Unit("resnet18", True, 0.9, 1, ("fp32",)))
    assert row.sparse == ()
    assert row.problems == ("sparse fp32: off by 0.02 of the largest output, allowed 0.0001",)


@pytest.mark.parametrize(("asked", "ran", "holds"), [(16, 16, True), (12, 16, True), (16, 132, False), (16, 8, False)])
def test_rows_of_few_sms_say_on_how_many_a_kernel_ran(
    script: ModuleType, monkeypatch: pytest.MonkeyPatch, asked: int, ran: int, holds: bool
) -> None:
    alive = []

    class Context:
        def __del__(self) -> None:
            alive.clear()

        @staticmethod
        def create(sms: int, device: int) -> Context:
            assert sms == asked
            alive.append(sms)
            return Context()

        def set_context(self) -> None:
            pass

    fake: Any = ModuleType("torch")
    fake.zeros = lambda *_, **__: None
    contexts: Any = ModuleType("torch.cuda.green_contexts")
    contexts.GreenContext = Context
    for name, module in (
        ("torch", fake),
        ("torch.cuda", ModuleType("torch.cuda")),
        ("torch.cuda.green_contexts", contexts),
    ):
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.setattr("bench_device.sms_in_use", lambda: ran)
    if holds:
        assert script.confine(asked) == ran
        assert alive == [asked]
    else:
        with pytest.raises(SystemExit, match=f"asked for {asked} SMs, and a kernel ran on {ran}"):
            script.confine(asked)
    assert script.confine(0) == 0


def test_the_kernel_that_marks_sms_can_be_assembled() -> None:
    from bench_device import SMS_PTX

    assert [set(assemble(SMS_PTX, sm).usage) for sm in (75, 90)] == [{"mark"}, {"mark"}]

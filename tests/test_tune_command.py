"""`tune BUNDLE` with a pretended GPU: real bundles, real kernels built, times that are written down."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import onnx
import pytest
from onnx import helper
from small_models import model_of, sparse_weight
from typer.testing import CliRunner

from sparsedeploy import bundle
from sparsedeploy.cli import app
from sparsedeploy.convert import Request, convert
from sparsedeploy.devices import Device, find
from sparsedeploy.errors import MachineError
from sparsedeploy.gpu import Gpu
from sparsedeploy.layer import Geometry
from sparsedeploy.measure import tune, tune_command
from sparsedeploy.measure.candidate_build import Job, Made, Option, Search, build_one, search
from sparsedeploy.measure.stage import Timed
from sparsedeploy.measure.timing import Schedule
from sparsedeploy.measure.tune import Settings, Subject, Tuned, tune_on
from sparsedeploy.measure.tune_command import crossover_lines
from sparsedeploy.measure.tuning import TunedLayer, Tuning
from sparsedeploy.plan import DENSE, Plan
from sparsedeploy.plugins.node import SparseConv
from sparsedeploy.profile import load_profile
from sparsedeploy.reading import Reading

A100 = find("a100")
RACE = Schedule(duration_s=0.002, warmup_s=0.0, rounds=4)


class Session:
    """A network of a fixed time."""

    device_clock = True
    graph = True

    def __init__(self, us: float) -> None:
        self.us, self.now = us, 0.0

    def upload(self, feeds: Any) -> None:
        """Nothing to copy."""

    def enqueue(self) -> None:
        self.now += self.us

    def wait(self) -> None:
        """Nothing runs."""

    def download(self) -> dict[str, Any]:
        return {}

    def mark(self) -> float:
        return self.now

    def elapsed_us(self, start: float, end: float) -> float:
        return end - start

    def close(self) -> None:
        """Nothing is held."""


class Stage:
    """Dense layers take 100 us; sparse ones what their kernel takes, and what one costs the model besides."""

    gpu, sm, sm_count = "Pretended A100", 80, 108
    versions: dict[str, str] = {"torch": "0"}
    feeds: dict[str, Any] = {}

    def __init__(self, names: Sequence[str], kernels: Mapping[str, float], hidden: float = 0.0) -> None:
        self.names, self.kernels, self.hidden = names, kernels, hidden

    def layer_times(self, nodes: Mapping[str, SparseConv], replays: int) -> dict[str, Timed]:
        return {name: Timed(self.kernels[nodes[name].kernel] if name in nodes else 100.0, 0.1) for name in self.names}

    def error(self, layer: str, node: SparseConv, weight: Any, bias: Any) -> float:
        return 0.0

    def session(self, nodes: Mapping[str, SparseConv]) -> Session:
        times = self.layer_times(nodes, 1)
        return Session(sum(timed.us for timed in times.values()) + self.hidden * len(nodes))

    def ceilings(self) -> dict[str, float]:
        return {}

    def close(self) -> None:
        """Nothing is held."""


class Here:
    """Builds in this process."""

    def build(self, jobs: Sequence[Job]) -> list[Made]:
        return [build_one(job) for job in jobs]

    def search(self, asked: Sequence[Search]) -> list[tuple[Option, ...]]:
        return [search(each) for each in asked]


def pretend(monkeypatch: pytest.MonkeyPatch, kernels: Mapping[str, float], hidden: float = 0.0, sm: int = 80) -> None:
    gpu = Gpu("Pretended A100", sm, 108)
    monkeypatch.setattr(tune, "first_gpu", lambda: gpu)
    monkeypatch.setattr(tune_command, "first_gpu", lambda: gpu)

    def tuned(
        reading: Reading, device: Device, precision: Any, arithmetic: Any, settings: Settings, plan: Plan | None = None
    ) -> Tuned:
        subject = Subject(
            reading.model.path.name, reading.model_hash, reading.layers, reading.weight, device, precision, arithmetic,
            reading.batch, plan,
        )  # fmt: skip
        stage = Stage([layer.name for layer in reading.layers], kernels, hidden)
        return tune_on(stage, subject, Here(), replace(settings, race=RACE, final=RACE, per_kernel=1))

    monkeypatch.setattr(tune_command, "tune_reading", tuned)


def made(tmp_path: Path, layers: tuple[str, ...] = ("*=dense",)) -> Path:
    nodes = [
        helper.make_node("Conv", ["x", "w1"], ["a"], "one", pads=[1, 1, 1, 1]),
        helper.make_node("Relu", ["a"], ["r"], "relu"),
        helper.make_node("Conv", ["r", "w2"], ["y"], "two", pads=[1, 1, 1, 1]),
    ]
    constants = {"w1": sparse_weight((16, 16, 3, 3)), "w2": sparse_weight((16, 16, 3, 3), 0.9, 1)}
    model = tmp_path / "model.onnx"
    onnx.save_model(model_of(nodes, constants, {"x": [1, 16, 8, 8]}, ["y"]), model)
    return convert(Request(model, A100, tmp_path / "out", layers=layers)).out


def run(*words: str) -> Any:
    return CliRunner().invoke(app, ["tune", *words, "--no-engine"])


FAST = {"packed": 20.0, "csr": 10.0, "baked": 30.0}


def test_the_bundle_is_rewritten_with_the_winners(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out = made(tmp_path)
    assert not (out / bundle.SPARSE_MODEL).exists()
    pretend(monkeypatch, FAST)
    result = run(str(out))
    assert result.exit_code == 0, result.output
    plan = Plan.from_json((out / bundle.PLAN).read_bytes(), "plan")
    assert [entry.choice for entry in plan.layers] == ["csr", "csr"]
    measured = plan.layers[0].measured
    assert measured is not None
    assert (measured.us_dense, measured.us_sparse, measured.gpu) == (100.0, 10.0, "Pretended A100")
    assert all("measured 10 us sparse (csr) against 100 us dense" in entry.reason for entry in plan.layers)
    tuning = Tuning.from_json((out / tune_command.TUNING).read_bytes(), "tune.json")
    assert tuning.sparse_layers == 2
    manifest = bundle.read_manifest(out)
    assert manifest.evidence.device
    assert manifest.sparse_layers == 2
    assert bundle.check_hashes(out) == len(manifest.files)
    text = " ".join(result.output.split())
    assert "whole model, 2 layers sparse instead of all dense: 10.000x" in text
    assert "verified: 2 sparse nodes read back" in text
    assert "cost model of csr (fp32): mean |ln(measured / predicted)|" in text
    assert CliRunner().invoke(app, ["verify", str(out)]).exit_code == 0


def test_the_plan_can_be_converted_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out = made(tmp_path)
    pretend(monkeypatch, FAST)
    assert run(str(out)).exit_code == 0
    plan, again = out / bundle.PLAN, tmp_path / "again"
    words = ["convert", str(tmp_path / "model.onnx"), "--plan", str(plan), "-o", str(again), "--no-engine"]
    result = CliRunner().invoke(app, words)
    assert result.exit_code == 0, result.output
    before, after = (Plan.from_json((folder / bundle.PLAN).read_bytes(), "plan") for folder in (out, again))
    assert [entry.choice for entry in after.layers] == ["csr", "csr"]
    assert [entry.measured for entry in after.layers] == [entry.measured for entry in before.layers]
    assert [entry.measured_crossover for entry in after.layers] == [entry.measured_crossover for entry in before.layers]


def test_json_is_the_record(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out = made(tmp_path)
    pretend(monkeypatch, FAST)
    result = run(str(out), "--json")
    assert result.stdout == (out / tune_command.TUNING).read_text("utf-8")


def test_a_bundle_that_is_not_faster_becomes_all_dense(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out = made(tmp_path, ("*=csr",))
    assert bundle.read_manifest(out).sparse_layers == 2
    pretend(monkeypatch, FAST, hidden=500.0)
    result = run(str(out))
    assert result.exit_code == 0, result.output
    plan = Plan.from_json((out / bundle.PLAN).read_bytes(), "plan")
    assert {entry.choice for entry in plan.layers} == {DENSE}
    assert not (out / bundle.SPARSE_MODEL).exists()
    assert not bundle.read_manifest(out).evidence.device
    assert "never slower than dense" in " ".join(result.output.split())


def test_a_profile_is_saved_and_added_to(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out, file = made(tmp_path), tmp_path / "a100.json"
    pretend(monkeypatch, FAST)
    assert run(str(out), "--save-profile", str(file), "--kernel", "csr").exit_code == 0
    assert {point.kernel for point in load_profile(file, A100).sparse} == {"csr"}
    assert run(str(out), "--save-profile", str(file), "--kernel", "packed").exit_code == 0
    assert {point.kernel for point in load_profile(file, A100).sparse} == {"csr", "packed"}
    result = CliRunner().invoke(app, ["scan", str(tmp_path / "model.onnx"), "-t", "a100", "--profile", str(file)])
    assert "Predicted from a measured profile" in " ".join(result.output.split())


def test_without_the_original_the_bundles_dense_model_is_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out = made(tmp_path)
    before = bundle.read_manifest(out)
    (tmp_path / "model.onnx").unlink()
    pretend(monkeypatch, FAST)
    result = run(str(out))
    assert result.exit_code == 0, result.output
    assert "model.onnx is not here" in " ".join(result.output.split())
    after = bundle.read_manifest(out)
    assert (after.model, after.model_hash) == (before.model, before.model_hash)
    assert CliRunner().invoke(app, ["verify", str(out)]).exit_code == 0


@pytest.mark.parametrize(
    ("words", "code", "message"),
    [
        (["--kernel", "fastest"], 2, "no such kernel"),
        (["--arithmetic", "fp16"], 2, "its dense layers compute in fp32 or tf32"),
        (["--model", "nowhere.onnx"], 2, "no such file"),
    ],
)
def test_what_does_not_fit_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, words: list[str], code: int, message: str
) -> None:
    out = made(tmp_path)
    pretend(monkeypatch, FAST)
    before = bundle.hashes(out)
    result = run(str(out), *words)
    assert (result.exit_code, message in " ".join(result.output.split())) == (code, True), result.output
    assert bundle.hashes(out) == before


def test_another_gpu_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out = made(tmp_path)
    pretend(monkeypatch, FAST, sm=90)
    result = run(str(out))
    assert result.exit_code == 3
    assert "was made for a100 (sm_80), and the GPU here is Pretended A100 (sm_90)" in " ".join(result.output.split())


def test_without_a_gpu_it_says_what_it_needs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tune, "first_gpu", lambda: None)
    out = made(tmp_path)
    result = run(str(out))
    assert result.exit_code == 3
    assert "tune measures on a GPU, and this machine has none" in " ".join(result.output.split())


def test_no_bundle(tmp_path: Path) -> None:
    assert run(str(tmp_path)).exit_code == 2


def test_without_torch_it_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import builtins

    real = builtins.__import__

    def without(name: str, *args: Any, **kwargs: Any) -> Any:
        if name == "sparsedeploy.measure.torch_stage":
            raise ModuleNotFoundError("No module named 'torch'", name="torch")
        return real(name, *args, **kwargs)

    made(tmp_path)
    monkeypatch.setattr(tune, "first_gpu", lambda: Gpu("Pretended A100", 80, 108))
    monkeypatch.setattr(tune, "refuse_without_compiler", lambda: None)
    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(MachineError, match="PyTorch, which is not installed"):
        tune.tune(tmp_path / "model.onnx", A100)


def test_an_unknown_kernel_is_told_with_those_there_are(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pretend(monkeypatch, FAST)
    result = run(str(made(tmp_path)), "--kernel", "bakde")
    assert result.exit_code == 2
    assert "--kernel bakde: no such kernel. This version has packed, csr, baked." in " ".join(result.output.split())


def test_the_rooflines_error_is_printed_beside_what_was_measured() -> None:
    geometry = Geometry(oc=16, ic=16, kh=3, kw=3, h=8, w=8, pads=(1, 1, 1, 1))

    def row(name: str, measured: float | None, roofline: float | None, like: str = "") -> TunedLayer:
        return TunedLayer(
            name=name, geometry=geometry, epilogue="", nnz=10, sparsity=0.9, crossover=measured, roofline_crossover=roofline,
            like=like, reason="",
        )  # fmt: skip

    layers = (row("a", 0.8, 0.9), row("b", 0.7, 0.4), row("c", 0.7, 0.4, "b"), row("d", None, 0.5), row("e", 0.5, None))
    tuning = Tuning.model_construct(layers=layers)
    assert crossover_lines(tuning) == [
        "roofline's crossovers: off by 20.0 points of sparsity on average over 2 layers that differ; worst b: measured 70.0 %, "
        "roofline 40.0 %"
    ]
    assert crossover_lines(Tuning.model_construct(layers=layers[3:])) == []

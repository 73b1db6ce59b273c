"""Table and pictures of the benchmark of whole networks, from rows made by hand."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest

from sparsedeploy.errors import InputError
from sparsedeploy.measure.results import Machine
from sparsedeploy.measure.statistics import Ratio, describe

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
    assert "NVIDIA Test, 16 of its SMs" in script.table(both)
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

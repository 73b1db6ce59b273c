"""The benchmark's work list, building and record, with a stand-in for the GPU."""

from __future__ import annotations

import lzma
import pickle
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import bench_kernels
import numpy as np
import pytest
from bench_kernels import Case, Job, Run, bounds_of, cases, jobs, make, run, weight_of
from bench_results import LAB_PAPER, read
from bench_samples import DENSE_US, StandIn
from conftest import SHARED

from sparsedeploy.devices import find
from sparsedeploy.errors import InputError
from sparsedeploy.models.shapes import work
from sparsedeploy.plugins import kernel_named

ALL = ["baked", "packed", "csr"]


def small(name: str, n: int = 2, sparsity: float = 0.9) -> Case:
    """A shape for tests as a case."""
    (entry,) = work(f"small/{name}")
    return Case(f"small/{name}", entry.geometry, sparsity, n)


def test_targets_hold_every_layer_that_the_table_asks_for() -> None:
    found = cases(["targets"])
    keys = {(case.name, case.sparsity, case.n) for case in found}
    for layer in ("64@56", "128@28", "256@14", "512@7"):
        for sparsity in (0.9, 0.95):
            for n in (1, 32):
                assert (f"resnet50_3x3/{layer}", sparsity, n) in keys
    assert ("paper/32-64@256", 0.9, 32) in keys
    assert sum(case.name.startswith("resnet50_1x1/") for case in found) == len(work("resnet50_1x1"))
    assert len(found) == len(keys)


def test_the_paper_grid_is_whole_and_starts_with_both_ends() -> None:
    found = cases(["paper"])
    assert len(found) == 9 * 5
    assert {case.sparsity for case in found} == {0.90, 0.92, 0.94, 0.96, 0.98}
    assert {case.sparsity for case in found[:18]} <= {0.9, 0.98, 0.94}


def test_a_case_in_two_lists_is_measured_once() -> None:
    assert len(cases(["targets", "targets"])) == len(cases(["targets"]))


def test_an_unknown_list_is_refused_in_words() -> None:
    with pytest.raises(InputError, match="no such list; there are targets, paper"):
        cases(["everything"])


def test_large_layers_get_one_configuration_of_baked() -> None:
    found = {
        case.geometry.oc: made for case, made in jobs(cases(["resnet"]), ALL, ("fp32",), 2) if case.sparsity == 0.9
    }
    ranks = {oc: [job.rank for job in made if job.kernel == "baked"] for oc, made in found.items()}
    assert ranks == {64: [0, 1], 128: [0, 1], 256: [0], 512: [0]}
    assert [job.kernel for job in found[64]][-2:] == ["baked", "baked"]


@pytest.mark.skipif(SHARED is None or not (SHARED / "data/pruned_filters").is_dir(), reason="no trained filters here")
def test_trained_filters_are_cases_with_their_own_weights() -> None:
    assert SHARED is not None
    found = cases(["real"], SHARED / "data/pruned_filters")
    (case,) = [case for case in found if case.name == "real/resnet50_3x3_90 bg2 128@28" and case.n == 1]
    weight = weight_of(case)
    assert weight.shape == case.geometry.weight_shape == (128, 128, 3, 3)
    assert case.sparsity == pytest.approx(0.9098)
    assert np.array_equal(weight, weight.astype(np.float16))
    (pointwise,) = [case for case in found if "pw02" in case.name and case.n == 1]
    assert pointwise.geometry.weight_shape == (128, 128, 1, 1)


def test_random_weights_are_fp16_values_and_the_same_every_time() -> None:
    case = small("plain")
    weight = weight_of(case)
    assert np.array_equal(weight, weight.astype(np.float16))
    assert np.count_nonzero(weight) == pytest.approx(0.1 * weight.size, abs=1)
    weight_of.cache_clear()
    assert np.array_equal(weight, weight_of(case))


def test_a_run_checks_times_and_records_every_kernel(tmp_path: Path) -> None:
    bench, out = StandIn(), tmp_path / "kernels.json"
    listed = list(jobs([small("map7"), small("map7", 3)], ALL, ("fp32", "fp16"), 1))
    measured = Run(bench, out, "a test", "abc", cold=True, cudnn=True)
    with ThreadPoolExecutor(1) as pool:
        run(listed, bench, measured, pool, 300)
    results = read(out)
    rows = {(row.kernel, row.precision, row.n) for row in results.rows}
    assert rows == {(kernel, precision, n) for kernel in ALL for precision in ("fp32", "fp16") for n in (2, 3)}
    assert not results.missing
    assert {(row.n, row.precision, row.us) for row in results.dense} == {
        (n, name, us) for n in (2, 3) for name, us in DENSE_US.items()
    }
    assert all(
        row.cold_us == 6.0 and row.us == 4.0 and row.registers > 0 and row.code_bytes > 500 for row in results.rows
    )
    assert all({"fma", "memory", "shared"} <= set(row.bounds_us) for row in results.rows)
    assert all("fetch" in row.bounds_us for row in results.rows if row.kernel == "baked")
    assert results.commit == "abc"
    assert len(results.source_sha256) == 64


def test_a_wrong_result_is_no_row(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    bench, out = StandIn(wrong="csr"), tmp_path / "kernels.json"
    measured = Run(bench, out, "a test", "", cold=False, cudnn=True)
    with ThreadPoolExecutor(1) as pool:
        run(list(jobs([small("plain")], ["csr", "packed"], ("fp32",), 1)), bench, measured, pool, 300)
    results = read(out)
    assert [row.kernel for row in results.rows] == ["packed"]
    assert ["relative error" in entry.why for entry in results.missing] == [True]
    assert "FAILED csr fp32" in capsys.readouterr().out


def test_what_the_limit_leaves_out_is_listed(tmp_path: Path) -> None:
    bench, out = StandIn(), tmp_path / "kernels.json"
    measured = Run(bench, out, "a test", "", cold=False, cudnn=True)
    with ThreadPoolExecutor(1) as pool:
        run(list(jobs([small("plain")], ["packed"], ("fp32", "fp16"), 1)), bench, measured, pool, 0.0)
    results = read(out)
    assert not results.rows
    assert [entry.what for entry in results.missing] == [
        f"packed {precision} #0 small/plain 0.9 N=2" for precision in ("fp32", "fp16")
    ]


def test_names_of_one_shape_share_the_dense_time(tmp_path: Path) -> None:
    bench, case = StandIn(), small("plain")
    measured = Run(bench, tmp_path / "kernels.json", "a test", "", cold=False, cudnn=True)
    for name in ("small/plain", "real/other", "small/plain"):
        measured.measure_dense(case._replace(name=name))
    assert bench.dense_calls == 1
    assert [row.case for row in measured.results().dense] == ["small/plain"] * 3 + ["real/other"] * 3


def test_a_kernel_that_cannot_take_a_layer_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sparsedeploy.plugins.baked.MAX_NNZ", 10)
    made = make(Job(small("plain"), "baked", "fp32", 0))
    assert made.node is None
    assert "nonzeros" in made.why


def test_bounds_are_counted_from_the_layer() -> None:
    (entry,) = work("resnet50_3x3/64@56")
    job = Job(Case("resnet50_3x3/64@56", entry.geometry, 0.9, 32), "packed", "fp32", 0)
    bounds = bounds_of(job, {}, 3686, find("h200"))
    assert bounds["fma"] == pytest.approx(3686 * 56 * 56 * 32 / (132 * 128 * 1.98e3), rel=1e-3)
    assert bounds["memory"] == pytest.approx(2 * 64 * 56 * 56 * 32 * 4 / 4.2e6, rel=1e-3)
    assert bounds["shared"] == pytest.approx(4 * bounds["fma"], rel=1e-3)
    half = bounds_of(job._replace(precision="fp16"), {}, 3686, find("h200"))
    assert half["fma"] == pytest.approx(bounds["fma"] / 2, rel=1e-3)


def test_the_paper_kernel_is_built_as_published_on_its_layers() -> None:
    ((_, made),) = jobs(cases(["resnet"])[:1], ALL, ("fp32",), 1)
    assert LAB_PAPER not in {job.kernel for job in made}
    paper = [case for case in cases(["paper"]) if case.geometry.oc == 40 and case.sparsity == 0.9]
    ((_, made),) = jobs(paper, ALL, ("fp32",), 1)
    assert [job.kernel for job in made] == [LAB_PAPER, "packed", "csr", "baked"]
    built = make(made[0])
    assert built.node is not None
    assert [op.entry for op in built.node.plan[0].ops] == ["paper"]
    weight, _ = kernel_named("packed").unpack(replace(built.node, plan=(), images=()))
    assert np.array_equal(weight, weight_of(paper[0]))


def test_texts_compiled_beforehand_stand_in_for_nvrtc(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SPARSEDEPLOY_CACHE", str(tmp_path / "cache"))
    job = Job(small("map7"), "packed", "fp32", 0)
    texts = bench_kernels.compile_only(job)
    assert len(texts) == 1
    assert not (tmp_path / "cache").exists()  # nothing that was not assembled is kept
    file = tmp_path / "texts.xz"
    file.write_bytes(lzma.compress(pickle.dumps(texts)))
    for name in ("_run_nvrtc", "nvrtc_version"):  # put back after the test
        monkeypatch.setattr(bench_kernels.compiler, name, getattr(bench_kernels.compiler, name))
    bench_kernels.use_texts(file)
    assert make(job).node is not None
    other = make(job._replace(kernel="csr"))
    assert other.node is None
    assert "prepare it again" in other.why


def test_the_list_needs_no_gpu(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        sys, "argv", ["bench_kernels.py", "list", "--cases", "small", "--also", "paper", "--only", "N="]
    )
    assert bench_kernels.main() == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "small/plain 0.9 N=2: 12 rows"
    assert len(lines) == 3 + 45
    assert lines[-1].endswith(": 5 rows")


def test_nothing_to_measure_is_refused(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["bench_kernels.py", "list", "--only", "no such layer"])
    assert bench_kernels.main() == 2
    assert "leaves no case" in capsys.readouterr().err

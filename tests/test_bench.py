"""bench on a machine that is not there: every variant checked, timed in turns, judged, written all or nothing."""

from __future__ import annotations

import json
import math
import re
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from fake_runner import CALM, H200, Bench
from small_models import network, saved
from typer.testing import CliRunner

from sparsedeploy import bundle
from sparsedeploy.cli import app
from sparsedeploy.convert import Request as Conversion
from sparsedeploy.convert import convert
from sparsedeploy.devices import find
from sparsedeploy.errors import CheckFailed, InputError, MachineError
from sparsedeploy.gpu import Gpu
from sparsedeploy.measure.bench import Request, bench, judge, parse_request
from sparsedeploy.measure.bench_command import Asked, Said, run
from sparsedeploy.measure.bench_files import save_in_bundle
from sparsedeploy.measure.bench_report import BEGIN, END, headline, remarks, table
from sparsedeploy.measure.gpu_state import GpuState
from sparsedeploy.measure.results import Limits, Results, Timing, read_results
from sparsedeploy.measure.statistics import describe, mean_interval, variation
from sparsedeploy.measure.timing import Schedule
from sparsedeploy.plan import Measured, Plan


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A bundle for the H200 with three csr layers."""
    folder = tmp_path_factory.mktemp("bench")
    model = saved(network(), folder)
    convert(Conversion(model, find("h200"), folder / "out", layers=("*=csr",)))
    return folder / "out"


@pytest.fixture
def out(made: Path, tmp_path: Path) -> Path:
    """A copy of it, to write into."""
    return Path(shutil.copytree(made, tmp_path / "out"))


QUICK = Schedule(duration_s=0.1, warmup_s=0.0, rounds=20)


def measured(folder: Path, fake: Bench | None = None, **changes: Any) -> Results:
    fake = fake or Bench()
    found = bench(replace(Request(folder, schedule=QUICK), **changes), fake.tools())
    assert fake.open_sessions == 0
    assert fake.open_runners == 0
    return found


def command(folder: Path, fake: Bench | None = None, **changes: Any) -> Said:
    asked = replace(Asked(folder, duration_s=0.1, warmup_s=0.0), **changes)
    return run(asked, lambda stage: None, (fake or Bench()).tools())


def contents(folder: Path) -> dict[str, bytes]:
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_sparse_is_held_against_the_fastest_dense_of_its_precision(made: Path) -> None:
    found = measured(made)
    case = found.cases[0]
    assert {timing.name for timing in case.timings} == {
        f"{which}, torch{graph}"
        for which in ("dense fp32", "dense tf32", "dense fp16", "sparse fp32")
        for graph in ("", ", graph")
    }
    assert (case.baseline, case.best) == ("dense fp32, torch, graph", "sparse fp32, torch, graph")
    assert case.valid, case.reasons
    ratio = case.headline.ratio
    assert ratio.low <= ratio.estimate <= ratio.high
    assert ratio.estimate == pytest.approx(4.0, rel=0.02)  # 1000 us and 250 us, each with some noise
    assert ratio.pairs == QUICK.rounds
    looser = {speedup.dense: speedup.ratio.estimate for speedup in case.speedups if speedup.metric == "gpu_compute"}
    assert looser["dense fp16, torch, graph"] == pytest.approx(1.2, rel=0.03)
    assert "no graph" not in headline(case)
    assert headline(case).endswith("VALID")
    assert "against dense tf32, torch" in " ".join(remarks(case))


def test_an_fp16_bundle_is_held_against_dense_fp16(tmp_path: Path) -> None:
    request = Conversion(saved(network(), tmp_path), find("h200"), tmp_path / "out", "fp16", layers=("*=packed",))
    convert(request)
    case = measured(tmp_path / "out").cases[0]
    assert (case.baseline, case.best) == ("dense fp16, torch, graph", "sparse fp16, torch, graph")
    assert {timing.arithmetic for timing in case.timings} == {"fp16"}
    assert case.headline.ratio.estimate == pytest.approx(1.5, rel=0.02)
    assert not any("rounded to fp16" in note for note in case.notes)


def test_packed_weights_in_an_fp32_bundle_are_told(tmp_path: Path) -> None:
    convert(Conversion(saved(network(), tmp_path), find("h200"), tmp_path / "out", layers=("*=packed",)))
    case = measured(tmp_path / "out").cases[0]
    assert any(note.startswith("3 of 3 sparse layers (packed) carry their weights rounded") for note in case.notes)
    assert {output.tolerance for output in case.timing(case.best).outputs} == {1e-2}
    assert {output.tolerance for output in case.timing(case.baseline).outputs} == {1e-4}


def test_the_parts_are_those_of_the_fake_machine(made: Path) -> None:
    """Copies 80 us and 20, launches 120 us and 10, 30 us of gaps without a graph, 2 us to wait: what the clock was moved by is what is reported."""
    case = measured(made, Bench(noise=0.0)).cases[0]
    plain, graph = case.timing("sparse fp32, torch"), case.timing("sparse fp32, torch, graph")
    assert plain.enqueue.median_ms == pytest.approx(0.120)
    assert graph.enqueue.median_ms == pytest.approx(0.010)
    for timing, gpu in ((plain, 0.280), (graph, 0.250)):
        assert timing.gpu_compute.median_ms == pytest.approx(gpu)
        assert timing.wall.median_ms == pytest.approx(gpu + 0.002)
        assert timing.h2d.median_ms == pytest.approx(0.080)
        assert timing.d2h.median_ms == pytest.approx(0.022)
        assert timing.latency.median_ms == pytest.approx(0.080 + gpu + 0.002 + 0.022)
        assert timing.throughput == pytest.approx(1e3 / gpu, rel=0.02)
        assert timing.gpu_compute.cv == pytest.approx(0, abs=1e-9)
        assert timing.load_s == pytest.approx(0.5)
    latency = next(speedup for speedup in case.speedups if speedup.metric == "latency")
    assert latency.ratio.estimate == pytest.approx((0.080 + 1.002 + 0.022) / (0.080 + 0.252 + 0.022), rel=1e-6)


def test_few_samples_say_na_not_a_number(made: Path) -> None:
    case = measured(made, schedule=Schedule(0.05, 0.0, 20)).cases[0]  # four a round at the least
    dense = case.timing("dense fp32, torch, graph").gpu_compute
    assert dense.count == 80
    assert (dense.p90_ms is not None, dense.p95_ms, dense.p99_ms) == (True, None, None)
    row = next(row for row in table(case) if row[0] == "dense fp32, torch, graph")
    assert row[5:7] == ("n/a", "n/a")
    assert any("p95 130, p99 662" in text for text in remarks(case))


def test_batches_are_cases_and_their_inputs_grow(made: Path) -> None:
    found = measured(made, batches=(1, 8))
    assert [(case.batch, case.inputs["x"][0]) for case in found.cases] == [(1, 1), (8, 8)]
    assert found.settings.batches == (1, 8)
    assert found.cases[1].timing("dense fp32, torch").gpu_compute.median_ms > 4.0
    assert [any("convert --batch 8" in note for note in case.notes) for case in found.cases] == [False, True]
    shapes = ["shapes 1x16x8x8", "shapes 8x16x8x8"]
    for case, own in zip(found.cases, shapes, strict=True):
        assert {timing.notes for timing in case.timings} == {("PyTorch 0.0 (fake)", own)}


# --- wrong results have no times ---------------------------------------------------------------------------------


def set_nan(outputs: dict[str, Any]) -> None:
    for value in outputs.values():
        value.flat[0] = np.nan


def add(share: float) -> Any:
    def change(outputs: dict[str, Any]) -> None:
        for value in outputs.values():
            value.flat[0] += share * np.abs(value).max()

    return change


@pytest.mark.parametrize("change", [set_nan, add(2e-4)], ids=["nan", "twice the tolerance"])
@pytest.mark.parametrize("where", [("sparse", "fp32"), ("dense", "fp32")])
def test_a_wrong_output_is_no_bench(out: Path, change: Any, where: tuple[str, str]) -> None:
    before = contents(out)
    fake = Bench(spoil=lambda which, arithmetic, outputs: change(outputs) if (which, arithmetic) == where else None)
    with pytest.raises(CheckFailed, match=rf"{where[0]} fp32, torch differs from ONNX Runtime.*No time"):
        command(out, fake)
    assert contents(out) == before
    assert fake.open_sessions == 0
    assert fake.open_runners == 0


def test_a_looser_dense_that_is_wrong_is_left_out_with_its_error(made: Path) -> None:
    fake = Bench(spoil=lambda which, arithmetic, outputs: set_nan(outputs) if arithmetic == "fp16" else None)
    case = measured(made, fake).cases[0]
    assert not [timing for timing in case.timings if timing.arithmetic == "fp16"]
    assert [entry.name for entry in case.left_out if "NaN" in entry.reason] == [
        "dense fp16, torch",
        "dense fp16, torch, graph",
    ]


def test_tf32_may_round_as_its_mantissa_does_and_fp32_may_not(made: Path) -> None:
    fake = Bench(spoil=lambda which, arithmetic, outputs: add(2e-3)(outputs) if arithmetic == "tf32" else None)
    assert "dense tf32, torch" in {timing.name for timing in measured(made, fake).cases[0].timings}


def test_a_graph_that_answers_for_other_inputs_is_caught(made: Path) -> None:
    with pytest.raises(CheckFailed, match="graph differs"):
        measured(made, Bench(stale=True))


# --- what cannot be measured ---------------------------------------------------------------------------------------


def test_without_a_gpu_it_says_what_to_do(out: Path) -> None:
    with pytest.raises(MachineError, match=r"needs an NVIDIA GPU.*sparse kernels are CUDA code.*Copy the folder"):
        bench(Request(out), Bench().tools(gpu=None))
    result = CliRunner().invoke(app, ["bench", str(out)])
    assert result.exit_code == 3
    assert "Traceback" not in result.output
    assert result.stdout == ""


def test_no_runner_names_what_each_lacks(made: Path) -> None:
    fake = Bench(missing=("torch", "tensorrt", "tensorrt_rtx", "onnxruntime"))
    with pytest.raises(MachineError, match=r"no runner on this machine runs the sparse model.*torch is not installed"):
        measured(made, fake)
    with pytest.raises(MachineError, match="torch is not installed"):
        measured(made, fake, runners=("torch",))


def test_runners_that_run_dense_or_on_the_cpu_are_no_sparse_ones(made: Path) -> None:
    fake = Bench(missing=("tensorrt", "tensorrt_rtx"))
    load = fake.load

    def loaded(model: Path, name: Any, arithmetic: Any) -> Any:
        runner = load(model, name, arithmetic)
        if name == "onnxruntime":
            runner.sparse_layers = 0
        return runner

    tools = replace(fake.tools(), load=loaded)
    case = bench(Request(made, schedule=QUICK), tools).cases[0]
    assert any("runs the sparse layers dense" in entry.reason for entry in case.left_out)
    assert "dense fp32, onnxruntime" in {timing.name for timing in case.timings}


def test_bundles_and_options_that_make_no_sense_are_refused(made: Path, tmp_path: Path) -> None:
    dense = saved(network(sparsity=0.0), tmp_path)
    convert(Conversion(dense, find("h200"), tmp_path / "dense"))
    with pytest.raises(InputError, match="nothing was converted"):
        measured(tmp_path / "dense")
    with pytest.raises(InputError, match="the bundle is fp32"):
        measured(made, arithmetics=("fp16",))
    for words in (("cudnn", None, None), (None, "0", None), (None, "1,x", None), (None, None, "int8")):
        with pytest.raises(InputError, match=r"--(runners|batch|precision)"):
            parse_request(Request(made), *words)
    parsed = parse_request(Request(made), "torch", "8,1,8", "fp16,fp32")
    assert (parsed.runners, parsed.batches, parsed.arithmetics) == (("torch",), (8, 1), ("fp32", "fp16"))
    with pytest.raises(InputError, match="no bundle here"):
        command(tmp_path)
    with pytest.raises(InputError, match="is no folder"):
        command(dense)
    with pytest.raises(InputError, match="no such file or folder"):
        command(tmp_path / "absent")
    with pytest.raises(InputError, match="no such file or folder"):
        command(tmp_path / "absent.onnx", sweep="0.9")
    with pytest.raises(InputError, match="belong to --compare"):
        command(made, fail_if=("p90_ms>+5%",))


def test_a_fixed_batch_is_refused_in_words(tmp_path: Path) -> None:
    model = network()
    model.graph.input[0].type.tensor_type.shape.dim[0].dim_value = 2
    convert(Conversion(saved(model, tmp_path), find("h200"), tmp_path / "out", layers=("*=csr",)))
    with pytest.raises(InputError, match="fixed at batch 2"):
        measured(tmp_path / "out", batches=(1,))


def test_changed_files_are_not_measured(out: Path) -> None:
    (out / bundle.PLAN).write_text((out / bundle.PLAN).read_text() + " ")
    with pytest.raises(CheckFailed, match=r"plan\.json was changed"):
        measured(out)


# --- VALID or INVALID ----------------------------------------------------------------------------------------------


def timing(rounds: list[float], count: int = 200, name: str = "dense fp32, torch", wall: float = 1.01) -> Timing:
    times = describe([value for value in rounds for _ in range(max(1, count // len(rounds)))][:count])
    host = describe([value * wall for value in rounds])
    return Timing(
        name=name, model="dense", runner="torch", arithmetic="fp32", graph=False, device="cuda:0", sparse_layers=0,
        device_clock=True, outputs=(), load_s=0.0, first_ms=1.0, gpu_compute=times, wall=host, enqueue=host, latency=host,
        h2d=host, d2h=host, throughput=1.0, rounds_ms=tuple(rounds), interval_ms=mean_interval(rounds),
        rounds_cv=variation(rounds),
    )  # fmt: skip


STEADY = [1.0, 1.01] * 10
HOT = CALM.model_copy(update={"throttle": ("software thermal slowdown",)})


def clocks(*values: int) -> list[GpuState | None]:
    return [CALM.model_copy(update={"sm_mhz": value}) for value in values]


def busy(**changes: Any) -> GpuState:
    return CALM.model_copy(update=changes)


@pytest.mark.parametrize(
    ("found", "before", "states", "reason"),
    [
        (timing(STEADY), CALM, [CALM] * 20, None),
        (timing(STEADY), None, [None] * 20, None),
        (timing(STEADY), CALM, clocks(*[1980, 1900] * 10), None),
        (timing(STEADY), CALM, [busy(processes=1)] * 20, None),
        (timing(STEADY), CALM, [busy(throttle=("software power cap",))] * 20, None),
        (timing(STEADY, count=60), CALM, [CALM], "too few samples: .* has 60 in 20 rounds, needed 64"),
        (timing(STEADY[:8]), CALM, [CALM], "too few samples: .* in 8 rounds"),
        (timing([1.0, 1.3] * 10), CALM, [CALM], r"unsteady: .* vary by 13\.\d%.*allowed 5%"),
        (timing([1.0] * 10 + [1.07] * 10), CALM, [CALM], r"drift: the second half .* took \+7\.0%"),
        (timing([1.07] * 10 + [1.0] * 10), CALM, [CALM], r"drift: .* -6\.5%"),
        (timing(STEADY, wall=0.8), CALM, [CALM], "clocks disagree"),
        (timing(STEADY), CALM, [CALM, HOT], "throttled: software thermal slowdown"),
        (timing(STEADY), CALM, clocks(*[1980] * 10, *[1755] * 10), r"clock drop: 11\.4% lower .*1980 to 1755 MHz"),
        (timing(STEADY), CALM, clocks(*[1980] * 10, 1200, *[1980] * 9), "clock moved between 1200 and 1980 MHz"),
        (timing(STEADY), busy(processes=2), [CALM], "another process on the GPU: 2 were there"),
        (timing(STEADY), busy(utilisation=60), [CALM], "another process on the GPU: it was 60 % busy"),
        (timing(STEADY), CALM, [busy(processes=2)], "another process on the GPU: 2 while measuring, 0 before"),
    ],
)  # fmt: skip
def test_each_reason(found: Timing, before: GpuState | None, states: list[GpuState | None], reason: str | None) -> None:
    reasons = judge((found,), before, states, Limits())
    if reason is None:
        assert reasons == ()
    else:
        assert len(reasons) == 1
        assert re.match(reason, reasons[0]), reasons


def test_an_invalid_bench_is_printed_exits_1_and_leaves_the_bundle(out: Path, tmp_path: Path) -> None:
    before = contents(out)
    slower = Bench(drift=lambda seconds: 1 + seconds / 4)
    said = command(out, slower)
    assert said.failed.startswith("bench: INVALID: ")
    assert "drift" in said.failed
    assert any(isinstance(part, str) and "INVALID: " in part for part in said.parts)
    assert contents(out) == before
    kept = command(out, Bench(drift=lambda seconds: 1 + seconds / 4), out=tmp_path / "kept.json")
    assert kept.failed
    assert not read_results(tmp_path / "kept.json").valid
    assert contents(out) == before


def test_invalid_reaches_the_exit_code(out: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake = Bench(state=lambda seconds: HOT)
    monkeypatch.setattr("sparsedeploy.measure.bench.tools_here", fake.tools)
    words = ["bench", str(out), "--duration", "0.1", "--warmup", "0"]
    result = CliRunner().invoke(app, words)
    assert result.exit_code == 1
    assert "INVALID: throttled" in result.stdout
    assert "INVALID: throttled" in result.stderr
    fine = Bench()
    monkeypatch.setattr("sparsedeploy.measure.bench.tools_here", fine.tools)
    result = CliRunner().invoke(app, [*words, "--json"])
    assert result.exit_code == 0, result.stderr
    assert Results.from_json(result.stdout, "stdout").valid
    shown = CliRunner().invoke(app, words)
    assert "batch 1: sparse is 4" in shown.stdout
    assert "dense tf32, torch, graph" in shown.stdout
    assert "written: " in shown.stdout


# --- results.json and the report --------------------------------------------------------------------------------


def test_results_are_written_drawn_and_known_to_the_manifest(out: Path) -> None:
    said = command(out, Bench(steps=True), batch="1,2")
    assert not said.failed
    text = (out / "results.json").read_text()
    found = Results.from_json(text, "results.json")
    assert found == said.record == read_results(out)
    assert found.to_json() == text
    assert json.loads(text)["schema"] == 1
    manifest = bundle.read_manifest(out)
    assert manifest.evidence.device  # an H200's bundle ran on an H200
    assert found.hashes["model.sparse.onnx"] == manifest.files["model.sparse.onnx"]
    assert found.kernels == {"csr": 3}
    assert found.machine.gpu == H200.name
    assert set(found.machine.versions) >= {"numpy", "onnx", "onnxruntime"}
    assert bundle.check_hashes(out) == len(manifest.files)
    assert not [name for name in contents(out) if "partial" in name]
    page = (out / "report.html").read_text()
    assert page.count(BEGIN) == page.count(END) == 1
    part = page[page.index(BEGIN) : page.index(END)]
    assert part.count("<svg") == 2 * 2 * 3, "bars, waterfall and roofline, wide and narrow, at two batches"
    assert "Fake H200" in part
    again = command(out, Bench(steps=True))
    assert not again.failed
    page = (out / "report.html").read_text()
    assert page.count(BEGIN) == 1
    assert page[page.index(BEGIN) : page.index(END)].count("<svg") == 2 * 3, "the earlier part is replaced"
    bundle.check_hashes(out)


def test_steps_become_layers(made: Path) -> None:
    layers = measured(made, Bench(steps=True)).cases[0].layers
    assert [(layer.name, layer.dense_us, layer.sparse_us, layer.sparse) for layer in layers] == [
        ("c1", 500.0, 60.0, True), ("c2", 400.0, 90.0, True), ("gap", 100.0, 100.0, False),
    ]  # fmt: skip
    assert measured(made).cases[0].layers == ()


def test_layers_that_tune_measured_are_drawn_at_their_batch(out: Path) -> None:
    path = out / bundle.PLAN
    plan = Plan.from_json(path.read_bytes(), path)
    times = Measured(us_dense=50.0, us_sparse=20.0, spread_us=1.0)
    entries = (plan.layers[0].model_copy(update={"measured": times}), *plan.layers[1:])
    path.write_text(plan.model_copy(update={"layers": entries}).to_json())
    bundle.add_to_manifest(out, bundle.read_manifest(out), (bundle.PLAN,))
    cases = measured(out, batches=(1, 2)).cases
    assert [len(case.layers) for case in cases] == [1, 0]
    assert (cases[0].layers[0].dense_us, cases[0].layers[0].sparse_us) == (50.0, 20.0)


def test_a_failure_while_writing_leaves_the_bundle_as_it_was(out: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    results = measured(out)
    before = contents(out)

    def broken(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(bundle, "add_to_manifest", broken)
    with pytest.raises(MachineError, match=r"No space left on device.*as it was"):
        save_in_bundle(out, results)
    assert contents(out) == before


def test_a_report_without_the_place_is_left_alone(out: Path) -> None:
    report = out / bundle.REPORT
    report.write_text(report.read_text().replace(BEGIN, "").replace(END, ""))
    bundle.add_to_manifest(out, bundle.read_manifest(out), (bundle.REPORT,))
    before = report.read_bytes()
    said = command(out)
    assert any("older sparsedeploy" in str(part) for part in said.parts)
    assert report.read_bytes() == before
    bundle.check_hashes(out)


def test_a_file_of_ones_own_has_a_page_beside_it(out: Path, tmp_path: Path) -> None:
    before = contents(out)
    command(out, out=tmp_path / "new" / "a.json")
    page = (tmp_path / "new" / "a.html").read_text()
    assert page.startswith("<!DOCTYPE html>")
    assert "model.onnx on Fake H200" in page
    assert contents(out) == before
    with pytest.raises(InputError, match="is a folder"):
        command(out, out=tmp_path)


def test_another_gpu_than_the_target_is_told_and_proves_nothing_of_it(out: Path) -> None:
    said = run(
        Asked(out, duration_s=0.1, warmup_s=0.0), lambda stage: None, Bench().tools(Gpu("A100-SXM4-80GB", 80, 108))
    )
    assert not said.failed
    assert any("converted for h200, measured on another GPU" in str(part) for part in said.parts)
    assert not bundle.read_manifest(out).evidence.device


def test_what_the_same_reason_left_out_is_one_line(made: Path) -> None:
    lines = [text for text in remarks(measured(made).cases[0]) if text.startswith("left out")]
    assert len(lines) == 3
    assert lines[0] == "left out: all in tensorrt: tensorrt is not installed. Install it."


def test_words_say_slower_and_no_difference(made: Path) -> None:
    slow = Bench()
    slow.us["sparse", "fp32"] = 1500.0
    assert "sparse is slower, 0.66" in headline(measured(made, slow).cases[0])
    assert "is faster still" in headline(measured(made, slow).cases[0])
    assert "is faster still" not in headline(measured(made).cases[0])
    same = Bench()
    same.us["sparse", "fp32"] = 1000.0
    said = headline(measured(made, same).cases[0])
    assert "no difference between sparse and dense was shown" in said
    assert math.isclose(measured(made, same).cases[0].headline.ratio.estimate, 1.0, rel_tol=0.01)

"""bench --compare: rows, the gate's grammar, what is refused, exit codes."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from sparsedeploy.cli import app
from sparsedeploy.errors import InputError
from sparsedeploy.measure.compare import METRICS, Comparison, compare_results, parse_condition
from sparsedeploy.measure.results import Case, Machine, Results, Settings, Speedup, Timing, read_results
from sparsedeploy.measure.statistics import describe, mean_interval, paired_ratio, variation

NAMES = ("a.json", "b.json")


def timing(which: Any, ms: float, count: int) -> Timing:
    rounds = [ms * (1 + 0.001 * (i % 3)) for i in range(20)]
    times = describe([rounds[i % 20] * (1 + 0.02 * (i % 10 == 9)) for i in range(count)])
    return Timing(
        name=f"{which} fp32, torch, graph", model=which, runner="torch", arithmetic="fp32", graph=True, device="cuda:0",
        sparse_layers=3 if which == "sparse" else 0, device_clock=True, outputs=(), load_s=1.0, first_ms=9.0,
        gpu_compute=times, wall=times, enqueue=times, latency=times, h2d=times, d2h=times, throughput=1e3 / ms,
        rounds_ms=tuple(rounds), interval_ms=mean_interval(rounds), rounds_cv=variation(rounds),
    )  # fmt: skip


def results(
    sparse_ms: float = 1.0, dense_ms: float = 4.0, count: int = 1000, batches: tuple[int, ...] = (1,), **changes: Any
) -> Results:
    dense, sparse = timing("dense", dense_ms, count), timing("sparse", sparse_ms, count)
    # A ratio of exactly proportional rounds would have an interval of no width.
    other = [value * (1 + 0.002 * (i % 2)) for i, value in enumerate(sparse.rounds_ms)]
    ratio = paired_ratio(dense.rounds_ms, other)
    cases = tuple(
        Case(
            batch=batch, inputs={"x": (batch, 3, 8, 8)}, timings=(dense, sparse), baseline=dense.name, best=sparse.name,
            speedups=(Speedup(dense=dense.name, sparse=sparse.name, metric="gpu_compute", ratio=ratio),),
            reasons=changes.get("reasons", ()),
        )
        for batch in batches
    )  # fmt: skip
    return Results(
        made="2026-11-30T00:00:00+00:00", model="m.onnx", model_hash=changes.get("model_hash", "c0ffee"), target="h200",
        precision=changes.get("precision", "fp32"),
        settings=Settings(
            batches=batches, runners=("torch",), arithmetics=("fp32",), duration_s=changes.get("duration_s", 2.0),
            warmup_s=0.5, rounds=20, seed=0,
        ),
        machine=Machine(
            gpu=changes.get("gpu", "H200"), sm=90, sm_count=132, driver=changes.get("driver", "580.1"), system="Linux",
            python="3.12", versions={"torch": "2.11"},
        ),
        cases=cases,
    )  # fmt: skip


def failed(text: str, a: Results, b: Results) -> tuple[str, ...]:
    return compare_results(a, b, NAMES, [parse_condition(text)]).failed


@pytest.mark.parametrize(
    ("text", "fails"),
    [
        ("p90_ms>+5%", True), ("p90_ms > +10.5%", False), ("p90_ms>5%", True), ("sparse.p90_ms>+5%", True),
        ("dense.p90_ms>+5%", False), ("median_ms>+0.05", True), ("median_ms>+0.2", False), ("median_ms>1.05", True),
        ("median_ms>2", False), ("speedup<3.9", True), ("speedup<3", False), ("speedup<-5%", True), ("speedup<-20%", False),
        ("throughput<-5%", True), ("throughput<=900", False), ("throughput<=950", True), ("min_ms>=+9%", True),
        ("p99_ms>+5%", True),
    ],
)  # fmt: skip
def test_conditions_on_ten_per_cent_slower(text: str, fails: bool) -> None:
    found = failed(text, results(1.0), results(1.1))
    assert bool(found) == fails
    if fails:
        assert text.strip() in found[0]
        assert "batch 1" in found[0]


@pytest.mark.parametrize(
    "text",
    ["", "p90", "p90_ms", "p90_ms>", "p90_ms=5%", "p80_ms>5%", "p90_ms>+5 percent", "dense.speedup<3", "gpu.p90_ms>1", "p90_ms>++5%", "p90_ms>1e3", "p90_ms>nan"],
)  # fmt: skip
def test_conditions_that_are_none_show_the_grammar(text: str) -> None:
    with pytest.raises(InputError, match=r"--fail-if .*p90_ms>\+5%"):
        parse_condition(text)


def test_every_metric_can_be_held() -> None:
    for metric in METRICS:
        assert not failed(f"{metric}>+50%", results(), results())


def test_a_gate_that_cannot_be_judged_does_not_pass() -> None:
    with pytest.raises(InputError, match=r"b\.json has too few samples at batch 1 for p99_ms: 662"):
        failed("p99_ms>+5%", results(), results(count=600))
    with pytest.raises(InputError, match=r"a\.json has too few samples"):
        failed("p99_ms>+5%", results(count=600), results())
    assert not failed("p99_ms>9", results(count=600), results())  # only the second's own number is needed


def test_an_invalid_result_fails_a_gate_and_only_a_gate() -> None:
    invalid = results(reasons=("throttled: power brake",))
    assert failed("p90_ms>+5%", results(), invalid) == ("b.json: INVALID at batch 1: throttled: power brake",)
    assert compare_results(results(), invalid, NAMES).failed == ()


def test_rows_have_changes_and_say_whether_a_difference_was_shown() -> None:
    found = compare_results(results(1.0), results(1.1), NAMES)
    rows = {(row.which, row.metric): row for row in found.rows}
    median = rows["sparse", "median_ms"]
    assert median.change == pytest.approx(0.1, rel=1e-6)
    assert median.shown is True
    assert rows["dense", "median_ms"].shown is False
    assert rows["dense", "median_ms"].change == 0.0
    assert rows["sparse", "speedup"].shown is True
    assert rows["sparse", "p90_ms"].shown is None
    assert rows["sparse", "speedup"].a == pytest.approx(4.0, rel=0.01)
    short = compare_results(results(), results(count=100), NAMES)
    assert next(row for row in short.rows if row.metric == "p99_ms").b is None
    assert Comparison.from_json(found.to_json(), "x") == found


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"gpu": "A100"}, "device: H200 and A100"),
        ({"precision": "fp16"}, "precision: fp32 and fp16"),
        ({"duration_s": 1.0}, "duration: 2 s and 1 s"),
    ],
)
def test_other_devices_and_settings_are_refused_unless_told(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(InputError, match=rf"not measured alike: {words}.*--anyway"):
        compare_results(results(), results(**changes), NAMES)
    found = compare_results(results(), results(**changes), NAMES, anyway=True)
    assert words in found.differences


def test_what_need_not_be_alike_is_said() -> None:
    found = compare_results(results(), results(driver="590.0", model_hash="beef"), NAMES)
    assert found.differences == ("model: m.onnx c0ffee and m.onnx beef", "driver: 580.1 and 590.0")
    assert compare_results(results(), results(), NAMES).differences == ()


def test_batches_are_matched_and_none_in_both_is_refused() -> None:
    found = compare_results(results(batches=(1, 8)), results(batches=(8, 32)), NAMES)
    assert {row.batch for row in found.rows} == {8}
    with pytest.raises(InputError, match=r"batches 1, b\.json has 32"):
        compare_results(results(), results(batches=(32,)), NAMES)


def test_the_command(tmp_path: Path) -> None:
    a, b = tmp_path / "a.json", tmp_path / "b.json"
    a.write_text(results(1.0).to_json())
    b.write_text(results(1.1).to_json())
    assert read_results(a) == results(1.0)

    def call(*words: str) -> Any:
        return CliRunner().invoke(app, ["bench", "--compare", str(a), str(b), *words])

    shown = call()
    assert shown.exit_code == 0, shown.stderr
    assert "+10.0%" in shown.stdout
    assert "apart" in shown.stdout
    assert "overlap: no difference shown" in shown.stdout
    assert call("--fail-if", "p90_ms>+15%").exit_code == 0
    bad = call("--fail-if", "p90_ms>+5%", "--fail-if", "speedup<2")
    assert bad.exit_code == 1
    assert "p90_ms>+5%: sparse p90_ms at batch 1 went from 1" in bad.stderr
    assert "speedup<2" not in bad.stderr
    record = call("--json", "--fail-if", "p90_ms>+5%")
    assert record.exit_code == 1
    assert len(Comparison.from_json(record.stdout, "stdout").failed) == 1
    assert call("--fail-if", "nonsense").exit_code == 2
    assert CliRunner().invoke(app, ["bench", str(tmp_path), "--compare", str(a), str(b)]).exit_code == 2
    a.write_text(results(gpu="A100").to_json())
    assert call().exit_code == 2
    told = call("--anyway")
    assert told.exit_code == 0
    assert "differs: device: A100 and H200" in told.stdout
    a.write_text("{}")
    assert call().exit_code == 2
    a.unlink()
    assert call().exit_code == 2
    assert CliRunner().invoke(app, ["bench", str(tmp_path), "--fail-if", "p90_ms>+5%"]).exit_code == 2


@pytest.mark.parametrize(
    ("pattern", "instead", "told"),
    [
        (r'"p90_ms": [\d.]+', '"p90_ms": NaN', "times of 'dense fp32.*': nan"),
        (r'"median_ms": [\d.]+', '"median_ms": 0.0', "times of 'dense fp32.*': 0"),
        (r'"estimate": [\d.]+', '"estimate": 0.0', "speed-up over 'dense fp32.*': 0"),
        (r'"best": "[^"]+"', '"best": "nobody"', "best names the variant 'nobody'"),
        (r'"metric": "gpu_compute"', '"metric": "wall"', "no speed-up over 'dense fp32"),
    ],
)
def test_numbers_that_cannot_be_judged_are_refused(tmp_path: Path, pattern: str, instead: str, told: str) -> None:
    text, path = results().to_json(), tmp_path / "results.json"
    path.write_text(text, "utf-8")
    assert read_results(path) == results()
    path.write_text(re.sub(pattern, instead, text), "utf-8")
    with pytest.raises(InputError, match=told):
        read_results(path)

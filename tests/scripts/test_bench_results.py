"""The table of targets against rows whose answers are known."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
from bench_results import RESNET, Results, Table, prediction_error, read, regret, summary, targets, to_profile, to_text
from bench_samples import dense_rows, paper_results, results, row

from sparsedeploy.devices import find
from sparsedeploy.errors import InputError
from sparsedeploy.models.shapes import work


def resnet(fp32_us: float, cold_us: float | None = 20.0) -> Results:
    """All four layers at 90 %, N=32: cuDNN fp32 takes 100 us, ours the same `fp32_us` everywhere."""
    rows, dense = [], []
    for case in RESNET:
        (entry,) = work(case)
        rows.append(row(case, entry.geometry, 32, 0.9, fp32_us, cold_us=cold_us))
        rows.append(row(case, entry.geometry, 32, 0.9, 2 * fp32_us, kernel="csr"))
        dense += dense_rows(case, entry.geometry, 32, {"fp32": 100.0, "tf32": 30.0, "fp16": 20.0})
    return results(rows, dense)


@pytest.mark.parametrize(("us", "verdict"), [(10.0, "aim reached"), (12.0, "reached"), (15.0, "missed")])
def test_the_first_target_is_a_geometric_mean_over_the_best_kernel(us: float, verdict: str) -> None:
    first = targets(resnet(us))[0]
    assert first.value == pytest.approx(100 / us)
    assert first.verdict == verdict
    assert "512@7" in first.detail


def test_what_was_not_measured_is_not_reached() -> None:
    found = targets(resnet(10.0))
    assert [target.verdict for target in found[1:]] == ["not measured"] * (len(found) - 1)
    assert all(math.isnan(target.value) for target in found[1:])


def test_cold_times_are_held_against_cold_times() -> None:
    assert targets(resnet(10.0), cold=True)[0].value == pytest.approx(101 / 20)
    assert math.isnan(targets(resnet(10.0, cold_us=None), cold=True)[0].value) is False  # csr's cold time stands
    table = Table(resnet(10.0, cold_us=None), cold=True)
    best = table.best(RESNET[0], 32, 0.9)
    assert best is not None
    assert best.kernel == "csr"


@pytest.mark.parametrize(("us", "verdict"), [(3.0, "aim reached"), (3.7, "reached"), (4.3, "missed")])
def test_microseconds_are_better_when_less(us: float, verdict: str) -> None:
    (entry,) = work("resnet50_3x3/64@56")
    case = "real/resnet50_3x3_90 bg1 64@56"
    found = results([row(case, entry.geometry, 1, 0.9098, us)], dense_rows(case, entry.geometry, 1, {"fp32": 17.0}))
    (target,) = [target for target in targets(found) if "real filters 64@56" in target.work]
    assert (target.value, target.verdict) == (us, verdict)
    assert f"{17 / us:.1f}x" in target.detail


def test_the_summary_names_every_layer_and_what_runs_it() -> None:
    text = summary(resnet(10.0))
    assert "| fp32 / cuDNN fp32, 90 %, geomean of four, N=32 | 7x | 10x | 10.00x | aim reached |" in text
    line = next(line for line in text.splitlines() if line.startswith("| resnet50_3x3/64@56 | 90.0% | 32 "))
    assert "10.00 (20.00) | baked | 5.0 fma | 10.00" in line
    assert "100.0 / 30.0 / 20.0" in line
    assert "nan" not in text


def test_predictions_are_compared_with_measurements() -> None:
    (entry,) = work("resnet50_3x3/64@56")
    rows = [row(RESNET[0], entry.geometry, 32, 0.9, us, predicted_us=10.0) for us in (10.0, 20.0)]
    error, bias, count = prediction_error(rows)
    assert count == 2
    assert error == pytest.approx(math.log(2) / 2)
    assert bias == pytest.approx(math.sqrt(2))
    assert prediction_error([])[2] == 0
    rows.append(row(RESNET[0], entry.geometry, 32, 0.9, 1.0, predicted_us=10.0, rank=1))
    assert "| baked fp32 | 0.35 | 1.41 | 2 |" in summary(results(rows, []))


def test_choosing_by_a_wrong_prediction_costs_what_was_measured() -> None:
    (entry,) = work("resnet50_3x3/64@56")
    promised = row(RESNET[0], entry.geometry, 32, 0.9, 12.0, predicted_us=5.0)
    faster = row(RESNET[0], entry.geometry, 32, 0.9, 10.0, predicted_us=6.0, kernel="packed")
    assert regret(results([promised, faster], [])) == (pytest.approx(1.2), 1)


def test_cold_times_make_a_profile_for_planning() -> None:
    profile = to_profile(resnet(10.0), find("h200"))
    assert {point.us for point in profile.sparse if point.kernel == "baked"} == {20.0}
    assert {point.us for point in profile.dense if point.arithmetic == "fp32"} == {101.0}
    with pytest.raises(InputError, match="not a100"):
        to_profile(resnet(10.0), find("a100"))


def test_a_profile_needs_cold_times() -> None:
    warm = paper_results()
    bare = warm.model_copy(
        update={
            "rows": tuple(entry.model_copy(update={"cold_us": None}) for entry in warm.rows),
            "dense": tuple(entry.model_copy(update={"cold_us": None}) for entry in warm.dense),
        }
    )
    with pytest.raises(InputError, match="no cold time"):
        to_profile(bare, find("h200"))


def test_the_file_is_the_record_a_row_a_line(tmp_path: Path) -> None:
    found, path = paper_results(), tmp_path / "kernels.json"
    path.write_text(to_text(found))
    assert read(path) == found
    assert sum(line.startswith('  {"case"') for line in path.read_text().splitlines()) == len(found.rows) + len(
        found.dense
    )

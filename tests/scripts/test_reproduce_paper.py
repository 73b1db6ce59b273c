"""The paper's figures from results: what is drawn is what was measured, and nothing else is drawn."""

from __future__ import annotations

from pathlib import Path

import pytest
from bench_results import LAB_PAPER
from bench_samples import paper_results, results
from reproduce_paper import draw, lines, main, points

from sparsedeploy.devices import find
from sparsedeploy.errors import InputError


def test_every_point_is_a_row_of_the_file() -> None:
    found = paper_results()
    drawn = points(found, "32-")
    assert len(drawn) == 6 * 5
    for point in drawn:
        mine = [row for row in found.rows if (row.geometry.oc, row.n, row.sparsity) == (point.oc, 32, point.sparsity)]
        assert point.us == min(row.us for row in mine)
        assert point.paper_us == pytest.approx(8 * point.us)
    assert set(lines(drawn)) == {48, 64, 80, 96, 112, 128}
    assert {len(line) for line in lines(points(found, "16-")).values()} == {5}


def test_the_paper_kernel_is_never_ours() -> None:
    found = paper_results()
    fast = [row.model_copy(update={"us": 0.1}) if row.kernel == LAB_PAPER else row for row in found.rows]
    drawn = points(found.model_copy(update={"rows": tuple(fast)}), "32-")
    assert {point.paper_us for point in drawn} == {0.1}
    assert [point.us for point in drawn] == [point.us for point in points(found, "32-")]


def test_a_row_without_cudnn_is_not_drawn() -> None:
    found = paper_results()
    partial = found.model_copy(update={"dense": tuple(row for row in found.dense if row.geometry.oc == 64)})
    assert set(lines(points(partial, "32-"))) == {64}


def test_pictures_are_the_same_bytes_and_say_what_was_measured(tmp_path: Path) -> None:
    file = tmp_path / "kernels.json"
    file.write_text(paper_results().to_json())
    assert main([str(file), "--out", str(tmp_path / "a")]) == 0
    assert main([str(file), "--out", str(tmp_path / "b")]) == 0
    names = [f"paper_figure_{number}" for number in ("5_speedup", "6_time", "7_roofline")]
    for name in names:
        first, second = ((tmp_path / folder / f"{name}.svg").read_bytes() for folder in "ab")
        assert first == second
        text = first.decode()
        assert "measured on an NVIDIA H200" in text
        assert "128 output channels" in text


def test_an_unknown_device_has_no_datasheet_roof() -> None:
    assert b"datasheet" in draw(paper_results(), find("h200"))["paper_figure_7_roofline.svg"]
    assert b"datasheet" not in draw(paper_results(), None)["paper_figure_7_roofline.svg"]


def test_nothing_is_drawn_without_measurements(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(InputError, match="nothing to draw"):
        draw(results([], []), None)
    with pytest.raises(InputError, match="nothing to draw"):
        draw(paper_results("fp16"), None)
    assert main([str(tmp_path / "none.json")]) == 2
    assert "nothing is drawn without measurements" in capsys.readouterr().err
    broken = tmp_path / "broken.json"
    broken.write_text('{"schema": 1}')
    assert main([str(broken)]) == 2
    assert "Field required" in capsys.readouterr().err
    assert not list(tmp_path.glob("*.svg"))

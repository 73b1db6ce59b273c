"""What if it were pruned further: zeros imposed in memory, and every word says so."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import helper
from small_models import model_of, sparse_weight
from typer.testing import CliRunner

from sparsedeploy.cli import app
from sparsedeploy.devices import find
from sparsedeploy.errors import InputError
from sparsedeploy.reading import Reading, read
from sparsedeploy.scan import scan
from sparsedeploy.whatif import LADDER, WhatIf, impose, parse_sparsity, parts, what_if

NANO = find("jetson-nano")


def write(path: Path) -> Path:
    """Two convolutions, 50 and 97 % zeros, and one of computed weight."""
    nodes = [
        helper.make_node("Conv", ["x", "w1"], ["a"], "half", pads=[1, 1, 1, 1]),
        helper.make_node("Conv", ["a", "w2"], ["b"], "sparse", pads=[1, 1, 1, 1]),
        helper.make_node("Conv", ["b", "w3"], ["y"], "computed", pads=[1, 1, 1, 1]),
    ]
    constants = {"w1": sparse_weight((32, 32, 3, 3), 0.5), "w2": sparse_weight((32, 32, 3, 3), 0.97, 1)}
    model = model_of(nodes, constants, {"x": [1, 32, 28, 28], "w3": [8, 32, 3, 3]}, ["y"])
    onnx.save_model(model, path)
    return path


@pytest.fixture
def reading(tmp_path: Path) -> Reading:
    return read(write(tmp_path / "model.onnx"), NANO, "fp32")


def found(reading: Reading, sparsity: float = 0.95) -> WhatIf:
    return what_if(reading, scan(reading, NANO), NANO, "fp32", sparsity)


def test_imposing_raises_each_eligible_layer_and_lowers_none(reading: Reading) -> None:
    before = {layer.name: layer.sparsity for layer in reading.layers}
    after = {layer.name: layer for layer in impose(reading, 0.9)}
    assert after["half"].sparsity == pytest.approx(0.9, abs=1e-3)
    assert after["sparse"].sparsity == before["sparse"]
    assert after["computed"].zeros is None
    assert {layer.name: layer.sparsity for layer in reading.layers} == before  # in memory only
    assert np.count_nonzero(reading.weight("half")[0]) == reading.layers[0].zeros.nnz  # type: ignore[union-attr]


def test_small_first_layers_and_groups_keep_their_weights(tmp_path: Path) -> None:
    nodes = [
        helper.make_node("Conv", ["x", "w1"], ["a"], "first"),
        helper.make_node("Conv", ["a", "w2"], ["y"], "grouped", group=2),
    ]
    constants = {"w1": sparse_weight((16, 3, 3, 3), 0.5), "w2": sparse_weight((16, 8, 3, 3), 0.5)}
    onnx.save_model(model_of(nodes, constants, {"x": [1, 3, 16, 16]}, ["y"]), tmp_path / "m.onnx")
    reading = read(tmp_path / "m.onnx", NANO, "fp32")
    assert all(layer.eligible for layer in reading.layers)
    assert impose(reading, 0.95) == reading.layers


def test_channels_are_counted_anew(reading: Reading) -> None:
    zeros = impose(reading, 0.99)[0].zeros
    assert zeros is not None
    assert zeros.nnz_per_channel[0] <= zeros.nnz_per_channel[1] <= zeros.nnz_per_channel[2] < 40
    assert zeros.nnz == round(32 * 32 * 9 * 0.01)


def test_everything_says_imposed(reading: Reading) -> None:
    record = found(reading)
    assert record.scan.verdict.startswith("imposed, not the model's own")
    assert "accuracy nobody knows" in record.scan.verdict
    assert any("imposed" in note for note in record.scan.notes)
    assert "imposed" in record.note
    lines = [part for part in parts(record) if isinstance(part, str)]
    assert sum("imposed" in line for line in lines) >= 2
    flags = {layer.name: layer.imposed for layer in record.points[-1].layers}
    assert flags == {"half": True, "sparse": True}
    assert {layer.name: layer.imposed for layer in record.own.layers} == {"half": False, "sparse": False}


def test_points_rise_to_the_ladder_and_the_one_asked_for(reading: Reading) -> None:
    record = found(reading, 0.93)
    assert [point.asked for point in record.points] == sorted({*LADDER, 0.93})
    times = [point.planned_us for point in record.points]
    assert times == sorted(times, reverse=True)
    assert record.own.planned_us >= times[0]


def test_advice_names_what_pays(reading: Reading) -> None:
    record = found(reading)
    advice = {each.name: each for each in record.advice}
    assert set(advice) == {"half", "sparse"}
    half = advice["half"]
    assert half.prune_to in {*LADDER, 0.95}
    assert half.saves_us > 0
    now = {layer.name: layer for layer in record.own.layers}["half"]
    then = {layer.name: layer for point in record.points if point.asked == half.prune_to for layer in point.layers}[
        "half"
    ]
    assert half.saves_us == pytest.approx((now.us_planned or 0) - (then.us_planned or 0))
    assert record.advice[0].saves_us >= record.advice[1].saves_us


@pytest.mark.parametrize("text", ["1", "1.5", "-0.1", "nan", "x", ""])
def test_bad_shares(text: str) -> None:
    with pytest.raises(InputError, match="needed a share of zeros"):
        parse_sparsity(text)


def test_nothing_eligible(tmp_path: Path) -> None:
    node = helper.make_node("Conv", ["x", "w"], ["y"], "c")
    onnx.save_model(model_of([node], {}, {"x": [1, 8, 8, 8], "w": [8, 8, 3, 3]}, ["y"]), tmp_path / "m.onnx")
    with pytest.raises(InputError, match="no convolution could run sparse"):
        found(read(tmp_path / "m.onnx", NANO, "fp32"))


def test_command_line(tmp_path: Path) -> None:
    model = str(write(tmp_path / "model.onnx"))
    result = CliRunner().invoke(app, ["scan", model, "-t", "jetson-nano", "--impose-sparsity", "0.95"])
    assert result.exit_code == 0, result.output
    assert "imposed 95%" in result.output
    assert "prune to" in result.output
    result = CliRunner().invoke(app, ["scan", model, "-t", "jetson-nano", "--impose-sparsity", "0.95", "--json"])
    record = WhatIf.from_json(result.stdout, "stdout")
    assert record.imposed_sparsity == json.loads(result.stdout)["imposed_sparsity"] == 0.95
    result = CliRunner().invoke(
        app, ["scan", model, "--impose-sparsity", "0.95", "--save-plan", str(tmp_path / "p.json")]
    )
    assert result.exit_code == 2
    assert not (tmp_path / "p.json").exists()


def test_the_next_command_names_the_model_as_it_was_typed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path / "model.onnx")
    monkeypatch.chdir(tmp_path)
    result = CliRunner().invoke(app, ["scan", "model.onnx", "-t", "jetson-nano", "--impose-sparsity", "0.95"])
    assert "Next: sparsedeploy prune model.onnx --method" in result.output

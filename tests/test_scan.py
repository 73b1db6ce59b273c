"""What scan says: the record itself as JSON, rows as CSV, one hint where it fits, shares and caps that add up."""

from __future__ import annotations

import csv
import io
import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import helper
from small_models import model_of, network, one_conv, saved, sparse_weight
from typer.testing import CliRunner

from sparsedeploy.cli import app
from sparsedeploy.devices import find
from sparsedeploy.layer import ConvLayer
from sparsedeploy.plan import judge, make_plan
from sparsedeploy.reading import read
from sparsedeploy.scan import Scan, scan, summarise, to_csv

NANO, A100 = find("jetson-nano"), find("a100")


def scanned(model: onnx.ModelProto, folder: Path, device: str = "a100") -> Scan:
    """The finished scan of a model, verdict included."""
    path, row = saved(model, folder), find(device)
    found = scan(read(path, row), row)
    return judge(found, make_plan(found, row, "fp32"), str(path))


def test_json_is_the_record(tmp_path: Path) -> None:
    path = saved(network(), tmp_path)
    result = CliRunner().invoke(app, ["scan", str(path), "--target", "a100", "--json"])
    assert result.exit_code == 0
    record = Scan.from_json(result.stdout, "stdout")
    assert record == scanned(network(), tmp_path)
    assert result.stdout == record.to_json()
    assert json.loads(result.stdout)["schema"] == 1


def test_csv_has_a_row_per_convolution(tmp_path: Path) -> None:
    y = helper.make_node("ConvTranspose", ["cr"], ["up"], 'up, "quoted"')
    proto = network()
    y.input.append("w1")
    proto.graph.node.append(y)
    proto.graph.output.append(helper.make_tensor_value_info("up", 1, None))
    found = scanned(proto, tmp_path)
    rows = list(csv.DictReader(io.StringIO(to_csv(found))))
    assert [row["name"] for row in rows] == ["c1", "c2", "c3", 'up, "quoted"']
    for row, layer in zip(rows, found.layers, strict=True):
        assert row["macs"] == str(layer.macs)
        assert bool(int(row["eligible"])) == layer.eligible
        assert layer.zeros is not None
        assert int(row["nnz"]) == layer.zeros.nnz
        assert float(row["sparsity"]) == pytest.approx(layer.sparsity, abs=1e-6)
        assert None not in row
        assert None not in row.values()
    assert rows[0]["epilogue"] == "bias+relu"
    assert rows[3]["reason"] == "ConvTranspose"
    csv_file = tmp_path / "rows.csv"
    assert CliRunner().invoke(app, ["scan", str(tmp_path / "model.onnx"), "--csv", str(csv_file)]).exit_code == 0
    assert csv_file.read_text() == to_csv(found)


def test_summary_adds_up(tmp_path: Path) -> None:
    found = scanned(network(), tmp_path)
    macs = [16 * 16 * 9 * 64, 16 * 16 * 9 * 64, 16 * 16 * 9 * 16]
    assert [layer.macs for layer in found.layers] == macs
    zeros = [layer.sparsity for layer in found.layers]
    assert found.summary.macs == sum(macs)
    assert found.summary.sparsity_by_macs == pytest.approx(np.average(zeros, weights=macs))
    assert found.summary.sparsity_by_weights == pytest.approx(np.mean(zeros))
    assert (found.summary.eligible, found.summary.eligible_macs_share, found.summary.gain_cap) == (3, 1.0, None)


def test_amdahl_caps_the_gain(tmp_path: Path) -> None:
    layers = read(saved(network(), tmp_path), A100).layers
    kept = layers[0].model_copy(update={"ineligible": (read_reason(tmp_path),)})
    summary = summarise((kept, *layers[1:]))
    share = 1 - kept.macs / sum(layer.macs for layer in layers)
    assert summary.eligible_macs_share == pytest.approx(share)
    assert summary.gain_cap == pytest.approx(1 / (1 - share))
    assert summarise(()).gain_cap == 1.0
    assert summarise(()).sparsity_by_macs == 0.0


def read_reason(folder: Path) -> object:
    """Some reason that a real layer has."""
    node = helper.make_node("ConvTranspose", ["x", "w"], ["y"], "up")
    proto = model_of([node], {"w": sparse_weight((4, 4, 3, 3))}, {"x": [1, 4, 8, 8]}, ["y"])
    layer: ConvLayer = read(saved(proto, folder, "up.onnx"), A100).layers[0]
    return layer.ineligible[0]


def test_hint_for_a_dense_file(tmp_path: Path) -> None:
    (hint,) = scanned(network(sparsity=0.0), tmp_path).hints
    assert hint.startswith("0 % zeros: was the pruned checkpoint lost")
    assert scanned(network(), tmp_path).hints == ()


def test_hint_for_dust(tmp_path: Path) -> None:
    weight = sparse_weight((16, 16, 3, 3), 0.0)
    weight[np.random.default_rng(0).random(weight.shape) < 0.8] *= 1e-9
    (hint,) = scanned(one_conv(weight, pads=[1] * 4), tmp_path).hints
    dust = np.count_nonzero(np.abs(weight) < 1e-6 * np.abs(weight).max())
    assert hint.startswith(f"{dust:,} weights in 1 layers are not zero but below 1e-06")


def test_hint_for_channel_pruning(tmp_path: Path) -> None:
    weights = {f"w{i}": sparse_weight((13, 13, 3, 3), 0.0, i) for i in range(3)}
    nodes = [helper.make_node("Conv", [f"v{i}", f"w{i}"], [f"v{i + 1}"], f"c{i}", pads=[1] * 4) for i in range(3)]
    (hint,) = scanned(model_of(nodes, weights, {"v0": [1, 13, 8, 8]}, ["v3"]), tmp_path).hints
    assert hint.startswith("channel-pruned, weights dense: 2 layers")


@pytest.mark.parametrize(
    ("device", "text"), [("a100", "--sparsity=enable"), ("jetson-nano", "no hardware on jetson-nano")]
)
def test_hint_for_two_four(device: str, text: str, tmp_path: Path) -> None:
    weight = sparse_weight((8, 8, 3, 3), 0.0)
    weight[:, ::2] = 0
    (hint,) = scanned(one_conv(weight, pads=[1] * 4), tmp_path, device).hints
    assert text in hint


@pytest.mark.parametrize(
    ("sparsity", "device", "verdict", "command"),
    [
        (0.0, "jetson-nano", "nothing to convert: 0 % zeros (eligible layers hold 100.0% of all convolution MACs).",
         "sparsedeploy prune {path} --sparsity 0.9"),
        (0.2, "a100", "nothing to convert: no layer is predicted to be faster sparse on a100",
         "sparsedeploy convert {path} --target a100 --layer '*=sparse'"),
        (0.99, "jetson-nano", "convert: ", "sparsedeploy convert {path} --target jetson-nano"),
    ],
)  # fmt: skip
def test_verdicts(sparsity: float, device: str, verdict: str, command: str, tmp_path: Path) -> None:
    found = scanned(network(sparsity=sparsity, channels=64, size=28), tmp_path, device)
    assert found.verdict.startswith(verdict)
    assert found.next_command == command.format(path=tmp_path / "model.onnx")


def test_the_printed_next_command_runs(tmp_path: Path) -> None:
    """Word for word in a shell, with a space and a quote in the name and a shape that the model leaves open."""
    folder = tmp_path / "it's here"
    folder.mkdir()
    proto = network(sparsity=0.5)
    for axis, name in ((2, "h"), (3, "w")):
        proto.graph.input[0].type.tensor_type.shape.dim[axis].dim_param = name
    path = saved(proto, folder, "my model.onnx")
    result = CliRunner().invoke(app, ["scan", str(path), "--target", "a100", "--shape", "x=1x16x8x8"])
    assert result.exit_code == 0, result.output
    command = result.stdout.splitlines()[-1].removeprefix("Next: ")
    assert command.startswith("sparsedeploy convert ")
    command = command.replace("sparsedeploy", f"{sys.executable} -m sparsedeploy.cli", 1)
    done = subprocess.run(command, shell=True, capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert (folder / "my model.sparsedeploy" / "manifest.json").is_file()


def test_scan_needs_no_runtime_and_no_plots(tmp_path: Path) -> None:
    """They cost a second to import; a scan of an ordinary model must not."""
    path = saved(network(), tmp_path)
    code = (
        "import sys; from typer.testing import CliRunner; from sparsedeploy.cli import app\n"
        f"assert CliRunner().invoke(app, ['scan', {str(path)!r}]).exit_code == 0\n"
        "print([name for name in ('onnxruntime', 'matplotlib', 'jinja2', 'torch') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_table_and_target_line(tmp_path: Path) -> None:
    path = saved(network(), tmp_path)
    lines = CliRunner().invoke(app, ["scan", str(path), "--target", "a100"]).stdout.splitlines()
    assert lines[0] == "target a100: A100 (sm_80)"
    assert lines[1] == "model.onnx: opset 17, IR 8, x 1x16x8x8"
    assert [line.split()[0] for line in lines[3:6]] == ["c1", "c2", "c3"]
    assert "eligible 3 of 3 convolutions, 100.0% of 0.33 MMAC per image" in "\n".join(lines)
    guessed = CliRunner().invoke(app, ["scan", str(path)]).stdout.splitlines()[0]
    assert "--target changes it" in guessed
    assert "jetson-nano" in guessed

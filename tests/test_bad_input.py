"""What users get wrong: one paragraph, the right exit code, nothing half-written, never a traceback."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper
from typer.testing import CliRunner, Result

from sparsedeploy.cli import app

ROOT_CANNOT_BE_REFUSED = os.geteuid() == 0 if hasattr(os, "geteuid") else True


def conv_model(weight: np.ndarray | None = None, height: int | str = 8) -> onnx.ModelProto:
    """One 3x3 convolution, of 8 to 4 channels unless a weight is given."""
    if weight is None:
        weight = np.random.default_rng(0).standard_normal((4, 8, 3, 3)).astype(np.float32)
        weight[:, ::2] = 0
    x = helper.make_tensor_value_info("x", TensorProto.FLOAT, ["N", weight.shape[1], height, 8])
    y = helper.make_tensor_value_info("y", TensorProto.FLOAT, None)
    node = helper.make_node("Conv", ["x", "w"], ["y"], "conv", pads=[1, 1, 1, 1])
    graph = helper.make_graph([node], "g", [x], [y], [numpy_helper.from_array(weight, "w")])
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 13)], ir_version=8)


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A small valid model on disk."""
    path = tmp_path / "model.onnx"
    onnx.save(conv_model(), path)
    return path


def call(*words: object) -> Result:
    """Run a command in this process."""
    return CliRunner().invoke(app, [str(word) for word in words])


def refused(result: Result, code: int, *texts: str) -> None:
    """One paragraph that names what it should, the exit code, and no traceback."""
    assert result.exit_code == code, result.output
    message = result.stderr
    assert "Traceback" not in message
    assert message.strip().count("\n\n") == 0
    flat = " ".join(message.split())
    for text in texts:
        assert text in flat, flat


def test_not_there(tmp_path: Path) -> None:
    refused(call("convert", tmp_path / "no.onnx"), 2, "no.onnx")


def test_folder_as_model(tmp_path: Path) -> None:
    refused(call("scan", tmp_path), 2, str(tmp_path.name))


@pytest.mark.parametrize("content", [b"\x08", b"hello, this is no model", b"\x89PNG\r\n\x1a\n" + bytes(100)])
def test_not_onnx(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "m.onnx"
    path.write_bytes(content)
    refused(call("scan", path), 2, "m.onnx", "ONNX")


def test_empty_file(tmp_path: Path) -> None:
    (tmp_path / "m.onnx").touch()
    refused(call("scan", tmp_path / "m.onnx"), 2, "m.onnx", "empty")


def test_truncated(model: Path) -> None:
    model.write_bytes(model.read_bytes()[:-100])
    refused(call("convert", model), 2, "model.onnx")
    assert list(model.parent.iterdir()) == [model]


def test_missing_external_data(tmp_path: Path) -> None:
    proto = conv_model()
    path = tmp_path / "m.onnx"
    onnx.save(proto, path, save_as_external_data=True, location="weights.bin", size_threshold=0)
    (tmp_path / "weights.bin").unlink()
    refused(call("convert", path), 2, "weights.bin", "w")


def test_nan_weights(tmp_path: Path) -> None:
    weight = np.zeros((4, 8, 3, 3), np.float32)
    weight[1, 2, 0, 0] = np.nan
    onnx.save(conv_model(weight), tmp_path / "m.onnx")
    refused(call("convert", tmp_path / "m.onnx"), 2, "conv", "NaN")


def test_no_convolutions(tmp_path: Path) -> None:
    x = helper.make_tensor_value_info("x", TensorProto.FLOAT, [1, 4])
    y = helper.make_tensor_value_info("y", TensorProto.FLOAT, [1, 4])
    graph = helper.make_graph([helper.make_node("Relu", ["x"], ["y"])], "g", [x], [y])
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 13)], ir_version=8), tmp_path / "m.onnx")
    for command in ("scan", "convert"):
        refused(call(command, tmp_path / "m.onnx"), 2, "no convolution")


def test_unknown_target_lists_the_known(model: Path) -> None:
    refused(call("convert", model, "--target", "v100"), 2, "v100", "jetson-nano")


def test_unknown_precision(model: Path) -> None:
    refused(call("convert", model, "--precision", "int8"), 2, "int8", "fp16")


def test_open_shape_is_asked_for(tmp_path: Path) -> None:
    onnx.save(conv_model(height="height"), tmp_path / "m.onnx")
    refused(call("convert", tmp_path / "m.onnx"), 2, "--shape", "x=", "height")


@pytest.mark.parametrize("shape", ["x", "x=", "x=1x3", "x=axb", "nope=1x8x8x8", "x=1x9x8x8", "x=0x8x8x8"])
def test_bad_shape(model: Path, shape: str) -> None:
    refused(call("convert", model, "--shape", shape), 2)


@pytest.mark.parametrize("choice", ["conv", "conv=fast", "nope=sparse", "=sparse"])
def test_bad_layer_choice(model: Path, choice: str) -> None:
    refused(call("convert", model, "--layer", choice), 2, "--layer")


def test_batch_contradicts_a_fixed_one(tmp_path: Path) -> None:
    proto = conv_model()
    proto.graph.input[0].type.tensor_type.shape.dim[0].dim_value = 4
    onnx.save(proto, tmp_path / "m.onnx")
    refused(call("convert", tmp_path / "m.onnx", "--batch", 2), 2, "4")


def test_output_is_someone_elses(model: Path, tmp_path: Path) -> None:
    theirs = tmp_path / "theirs"
    theirs.mkdir()
    (theirs / "thesis.tex").write_text("years of work")
    refused(call("convert", model, "-o", theirs), 2, "theirs")
    assert [path.name for path in theirs.iterdir()] == ["thesis.tex"]


def test_output_is_a_file(model: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    refused(call("convert", model, "-o", tmp_path / "file"), 2, "file")


def test_output_under_a_file_cannot_be_written(model: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    refused(call("convert", model, "-o", tmp_path / "file" / "out"), 3, "cannot be written")


@pytest.mark.skipif(ROOT_CANNOT_BE_REFUSED, reason="root may write anywhere")
def test_output_without_permission(model: Path, tmp_path: Path) -> None:
    locked = tmp_path / "locked"
    locked.mkdir(mode=0o500)
    refused(call("convert", model, "-o", locked / "out"), 3, "cannot be written")


def test_failed_conversion_keeps_the_old_bundle(model: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    assert call("convert", model, "-o", out).exit_code == 0
    before = {path.name: path.read_bytes() for path in out.iterdir()}
    assert call("convert", model, "-o", out, "--layer", "nope=sparse").exit_code == 2
    assert {path.name: path.read_bytes() for path in out.iterdir()} == before
    assert sorted(path.name for path in tmp_path.iterdir()) == ["model.onnx", "out"]


@pytest.mark.parametrize("content", [b"", b"no archive"])
def test_bad_verification_input(model: Path, tmp_path: Path, content: bytes) -> None:
    (tmp_path / "x.npz").write_bytes(content)
    refused(call("convert", model, "--input", tmp_path / "x.npz"), 2, "x.npz")
    assert not (tmp_path / "model.sparsedeploy").exists()


def test_verification_input_of_wrong_name_or_shape(model: Path, tmp_path: Path) -> None:
    np.savez(tmp_path / "name.npz", y=np.zeros((1, 8, 8, 8), np.float32))
    np.savez(tmp_path / "shape.npz", x=np.zeros((1, 8, 9, 8), np.float32))
    refused(call("convert", model, "--input", tmp_path / "name.npz"), 2, "'x'")
    refused(call("convert", model, "--input", tmp_path / "shape.npz"), 2, "9")


def test_plan_with_a_wrong_field_names_its_path(model: Path, tmp_path: Path) -> None:
    plan = tmp_path / "plan.json"
    assert call("scan", model, "--save-plan", plan).exit_code == 0
    text = plan.read_text()
    plan.write_text(text.replace('"choice": "dense"', '"choice": "fast"'))
    refused(call("convert", model, "--plan", plan), 2, "layers.0.choice", "fast")
    plan.write_text(text.replace('"choice": "dense"', '"choice": 3'))
    refused(call("convert", model, "--plan", plan), 2, "layers.0.choice")
    plan.write_text(text.replace('"sparsity"', '"sparsety"'))
    refused(call("convert", model, "--plan", plan), 2, "layers.0.sparsety")
    plan.write_text("{")
    refused(call("convert", model, "--plan", plan), 2, "plan.json")
    refused(call("convert", model, "--plan", tmp_path / "no.json"), 2, "no.json")


def test_verify_of_no_bundle(tmp_path: Path) -> None:
    refused(call("verify", tmp_path), 2, "manifest.json", "convert")


def test_verify_names_what_changed(model: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    assert call("convert", model, "-o", out, "--layer", "*=sparse").exit_code == 0
    assert call("verify", out).exit_code == 0
    assert call("verify", out, "--hashes-only").exit_code == 0
    (out / "plan.json").write_text("{}")
    refused(call("verify", out, "--hashes-only"), 1, "plan.json")
    (out / "plan.json").unlink()
    refused(call("verify", out), 1, "plan.json", "missing")


@pytest.mark.parametrize("sparsity", ["1", "-0.1", "nan", "many", "2:4"])
def test_prune_bad_sparsity(model: Path, tmp_path: Path, sparsity: str) -> None:
    refused(call("prune", model, f"--sparsity={sparsity}", "-o", tmp_path / "p.onnx"), 2, "--sparsity")
    assert not (tmp_path / "p.onnx").exists()


def test_prune_bad_layer_and_output(model: Path, tmp_path: Path) -> None:
    refused(call("prune", model, "--sparsity", "0.5", "--layers", "nope*", "-o", tmp_path / "p.onnx"), 2, "nope*")
    refused(call("prune", model, "--sparsity", "0.5", "-o", model), 2, "itself")
    refused(call("prune", model, "--sparsity", "0.5", "-o", tmp_path), 2, "folder")


def test_unknown_option_is_usage(model: Path) -> None:
    result = call("convert", model, "--fast")
    assert result.exit_code == 2
    assert "--fast" in result.output + result.stderr


def test_interrupt_leaves_nothing(tmp_path: Path) -> None:
    """Ctrl-C while the bundle is being written: exit code 130, one line, no folder and no temporary one."""
    weight = np.random.default_rng(0).standard_normal((512, 512, 3, 3)).astype(np.float32)
    onnx.save(conv_model(weight), tmp_path / "m.onnx")
    process = subprocess.Popen(
        [sys.executable, "-m", "sparsedeploy.cli", "convert", "m.onnx", "-o", "out", "--layer", "*=sparse"],
        cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    deadline = time.monotonic() + 60
    while not list(tmp_path.glob(".out.*")) and process.poll() is None and time.monotonic() < deadline:
        time.sleep(0.005)
    process.send_signal(signal.SIGINT)
    _, stderr = process.communicate(timeout=60)
    assert process.returncode == 130, stderr
    assert stderr.split() == ["sparsedeploy:", "Interrupted.", "Nothing", "half-written", "was", "left", "behind."]
    assert [path.name for path in tmp_path.iterdir()] == ["m.onnx"]

"""The command `run`: inputs of every kind, outputs written and described, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from onnx import TensorProto, helper, numpy_helper
from small_models import network, saved
from typer.testing import CliRunner

from sparsedeploy.cli import app
from sparsedeploy.convert import Request, convert
from sparsedeploy.devices import find
from sparsedeploy.verify import run_file

CPU = ("--runner", "onnxruntime", "--device", "cpu")


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A bundle with three sparse layers."""
    folder = tmp_path_factory.mktemp("made")
    convert(Request(saved(network(), folder), find("h200"), folder / "out", layers=("*=csr",)))
    return folder / "out"


@pytest.fixture
def classifier(tmp_path: Path) -> Path:
    """Mean colour of a picture [N, 3, 8, 8] as three logits."""
    nodes = [helper.make_node("GlobalAveragePool", ["x"], ["p"]), helper.make_node("Flatten", ["p"], ["y"])]
    graph = helper.make_graph(
        nodes, "g", [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["N", 3, 8, 8])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, ["N", 3])],
    )  # fmt: skip
    return saved(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8), tmp_path)


def said(*words: object, code: int = 0) -> str:
    result = CliRunner().invoke(app, ["run", *map(str, words)])
    assert result.exit_code == code, result.output
    return " ".join((result.stdout if code == 0 else result.stderr).split())


def x_of(batch: int, dtype: str = "float32") -> Any:
    return np.random.default_rng(batch).random((batch, 16, 8, 8)).astype(dtype)


@pytest.mark.parametrize("dtype", ["float32", "float64", "float16"])
def test_arrays_in_and_out(made: Path, tmp_path: Path, dtype: str) -> None:
    x = x_of(3, dtype)
    np.savez(tmp_path / "x.npz", x=x)
    text = said(made, "--input", tmp_path / "x.npz", "-o", tmp_path / "y.npz", *CPU)
    assert "onnxruntime, fp32, cpu, ran dense" in text
    assert "the 3 sparse layers were unpacked" in text
    assert "y: float32 3x10" in text
    assert f"outputs written to {tmp_path / 'y.npz'}" in text
    expected = run_file(made / "model.dense.onnx", {"x": x.astype(np.float32)})["y"]
    with np.load(tmp_path / "y.npz") as written:
        np.testing.assert_allclose(written["y"], expected, atol=1e-4 * np.abs(expected).max())
    assert not list(tmp_path.glob("*partial*")), "nothing half-written stays"


def test_one_array_for_one_input_needs_no_name(made: Path, tmp_path: Path) -> None:
    np.save(tmp_path / "x.npy", x_of(1))
    np.savez(tmp_path / "x.npz", other=x_of(1))
    records = [json.loads(said(made, "--input", tmp_path / name, *CPU, "--json")) for name in ("x.npy", "x.npz")]
    assert records[0]["outputs"] == records[1]["outputs"]
    assert records[0]["sparse_layers"] == 0
    assert records[0]["outputs"][0]["shape"] == [1, 10]


def test_random_numbers(made: Path) -> None:
    text = said(made, "--batch", 4, "--seed", 7, *CPU)
    assert "on random numbers in 0..1, seed 7" in text
    assert "y: float32 4x10" in text


def test_a_picture(classifier: Path, tmp_path: Path) -> None:
    image = pytest.importorskip("PIL.Image")
    image.fromarray(np.full((9, 9, 3), (0, 255, 0), np.uint8)).save(tmp_path / "green.png")
    (tmp_path / "labels.txt").write_text("red\ngreen\nblue\n")
    text = said(classifier, "--image", tmp_path / "green.png", "--labels", tmp_path / "labels.txt", "--top", 2, *CPU)
    assert "best classes: green (1) " in text
    again = said(classifier, "--image", tmp_path / "green.png", *CPU)
    assert "best classes: 1 " in again
    two = said(classifier, "--image", tmp_path / "green.png", "--image", tmp_path / "green.png", *CPU)
    assert "best classes of picture 2: 1 " in two
    (tmp_path / "labels.txt").write_text("red\n")
    text = said(classifier, "--image", tmp_path / "green.png", "--labels", tmp_path / "labels.txt", *CPU, code=2)
    assert "1 lines for 3 classes" in text


def test_nan_is_told(tmp_path: Path) -> None:
    node = helper.make_node("Add", ["x", "n"], ["y"])
    graph = helper.make_graph(
        [node], "g", [helper.make_tensor_value_info("x", TensorProto.FLOAT, [2])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, [2])],
        [numpy_helper.from_array(np.array([np.nan, 1], np.float32), "n")],
    )  # fmt: skip
    path = saved(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8), tmp_path)
    assert "1 elements are NaN or infinite" in said(path, *CPU)


@pytest.mark.parametrize(
    ("words", "told", "code"),
    [
        (("--input", "absent.npz"), "absent.npz: no such file", 2),
        (("--input", "."), "is a folder", 2),
        (("--input", "text.npz"), "not a readable .npz file", 2),
        (("--input", "two.npz"), "no array named 'x'; it holds a, b", 2),
        (("--input", "shape.npz"), "x is 1x16x8x9, the model takes", 2),
        (("--input", "text_array.npz"), "x holds <U1, the model takes float32", 2),
        (("--input", "shape.npz", "--image", "cat.jpg"), "both name the inputs", 2),
        (("-o", "y.txt"), "outputs are written as .npz", 2),
        (("-o", "absent/y.npz"), "cannot be written", 3),
        (("--runner", "tflite"), "no such runner; this version has tensorrt, tensorrt_rtx, torch, onnxruntime", 2),
        (("--device", "gpu"), "--device gpu: needed cpu, cuda or cuda:0", 2),
        (("--precision", "int8"), "needed fp32, tf32 or fp16", 2),
        (("--precision", "fp16"), "compute in fp32 and fp16 was asked for", 2),
        (("--labels", "absent.txt"), "cannot be read", 2),
        (("--image", "cat.jpg"), "no batch of colour pictures", 2),
    ],
)  # fmt: skip
def test_what_is_refused(
    made: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, words: tuple[str, ...], told: str, code: int
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "text.npz").write_text("no archive")
    np.savez(tmp_path / "two.npz", a=x_of(1), b=x_of(1))
    np.savez(tmp_path / "shape.npz", x=np.zeros((1, 16, 8, 9), np.float32))
    np.savez(tmp_path / "text_array.npz", x=np.full((1, 16, 8, 8), "a"))
    options = CPU[:2] if "--device" in words else () if "--runner" in words else CPU
    assert told in said(made, *words, *options, code=code)


def test_what_the_torch_runner_is_refused(made: Path) -> None:
    pytest.importorskip("torch")
    torch = ("--runner", "torch", "--device")
    assert "needed cpu, cuda or cuda:0" in said(made, *torch, "gpu", code=2)
    assert "tf32: it is an arithmetic of GPUs" in said(made, *torch, "cpu", "--precision", "tf32", code=3)


def test_what_there_is_not(tmp_path: Path) -> None:
    assert "no such file or folder" in said(tmp_path / "absent", *CPU, code=2)
    assert "no bundle here" in said(tmp_path, *CPU, code=2)


def test_sizes_that_nothing_says(tmp_path: Path) -> None:
    graph = helper.make_graph(
        [helper.make_node("Relu", ["x"], ["y"])], "g", [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["N", "L"])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, ["N", "L"])],
    )  # fmt: skip
    path = saved(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8), tmp_path)
    assert "its size L is open" in said(path, *CPU, code=2)

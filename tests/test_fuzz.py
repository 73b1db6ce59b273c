"""Damaged files: bytes flipped and files cut a few hundred times. Never a traceback, never a hang, never half a folder."""

from __future__ import annotations

import threading
from pathlib import Path

import numpy as np
import onnx
import pytest
from conftest import SHARED
from onnx import TensorProto, helper, numpy_helper
from typer.testing import CliRunner

from sparsedeploy.cli import app

ROUNDS = 60
"""Per seed file and way of damage."""


def seed_model() -> bytes:
    """Mask, BatchNorm, residual, activation and a Constant node in under 3 kB: most of what the passes look at."""
    rng = np.random.default_rng(1)
    weight = rng.standard_normal((4, 4, 3, 3)).astype(np.float32)
    tensors = {
        "w0": weight,
        "mask": (rng.random(weight.shape) < 0.3).astype(np.float32),
        "w2": np.where(rng.random(weight.shape) < 0.3, weight, 0).astype(np.float32),
        **{name: np.ones(4, np.float32) for name in ("scale", "shift", "mean", "var")},
    }
    nodes = [
        helper.make_node("Mul", ["w0", "mask"], ["w1"]),
        helper.make_node("Conv", ["x", "w1"], ["c1"], "c1", pads=[1, 1, 1, 1]),
        helper.make_node("BatchNormalization", ["c1", "scale", "shift", "mean", "var"], ["b1"]),
        helper.make_node("Relu", ["b1"], ["r1"]),
        helper.make_node("Conv", ["r1", "w2"], ["c2"], "c2", auto_pad="SAME_UPPER"),
        helper.make_node("Add", ["c2", "r1"], ["a2"]),
        helper.make_node("Constant", [], ["low"], value=numpy_helper.from_array(np.float32(0))),
        helper.make_node("Constant", [], ["high"], value=numpy_helper.from_array(np.float32(6))),
        helper.make_node("Clip", ["a2", "low", "high"], ["y"]),
    ]
    x = helper.make_tensor_value_info("x", TensorProto.FLOAT, ["N", 4, 6, 6])
    y = helper.make_tensor_value_info("y", TensorProto.FLOAT, ["N", 4, 6, 6])
    graph = helper.make_graph(nodes, "g", [x], [y], [numpy_helper.from_array(v, k) for k, v in tensors.items()])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    onnx.checker.check_model(model)
    return bytes(model.SerializeToString())


def seeds() -> dict[str, bytes]:
    """Files to damage: ours, and small real ones where they are at hand."""
    found = {"ours": seed_model()}
    if SHARED is not None:
        for name in ("cases/21_depthwise.onnx", "models/onnx_light/light_squeezenet.onnx"):
            if (SHARED / name).is_file():
                found[name] = (SHARED / name).read_bytes()
    return found


def damage(data: bytes, rng: np.random.Generator, way: str) -> bytes:
    """Cut the file somewhere, or change one to eight bytes, mostly where structure is."""
    if way == "cut":
        return data[: int(rng.integers(0, len(data)))]
    out = bytearray(data)
    for _ in range(int(rng.integers(1, 9))):
        at = int(rng.integers(0, len(out)))
        out[at] = int(rng.integers(0, 256)) if way == "byte" else out[at] ^ (1 << int(rng.integers(0, 8)))
    return bytes(out)


@pytest.mark.parametrize("way", ["cut", "byte", "bit"])
@pytest.mark.parametrize("name", seeds())
def test_damaged_files(name: str, way: str, tmp_path: Path) -> None:
    rng, data, runner = np.random.default_rng(len(name) + len(way)), seeds()[name], CliRunner()
    path, out = tmp_path / "m.onnx", tmp_path / "out"
    rounds = ROUNDS if name == "ours" else ROUNDS // 4
    for i in range(rounds):
        path.write_bytes(damage(data, rng, way))
        (tmp_path / "last.onnx").write_bytes(path.read_bytes())
        watchdog = threading.Timer(60, lambda: pytest.exit(f"hang: {name} {way} round {i}"))  # noqa: B023
        watchdog.start()
        result = runner.invoke(app, ["convert", str(path), "-o", str(out), "--layer", "*=sparse", "-t", "jetson-nano"])
        watchdog.cancel()
        context = f"{name} {way} round {i}: exit {result.exit_code}\n{result.output}\n{result.stderr}"
        assert result.exit_code in (0, 1, 2, 3), context
        assert "Traceback" not in result.output + result.stderr, context
        left = {entry.name for entry in tmp_path.iterdir()}
        assert left <= {"m.onnx", "last.onnx", "out"}, context
        assert ("out" in left) == (result.exit_code == 0), context
        if "out" in left:
            for entry in out.iterdir():
                entry.unlink()
            out.rmdir()

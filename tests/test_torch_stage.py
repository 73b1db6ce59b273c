"""The stage on PyTorch: exchanged layers compute what dense ones do (on the CPU), and the whole path (on a GPU)."""

from __future__ import annotations

import types
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from small_models import model_of, sparse_weight

from sparsedeploy.converters.graph import Model
from sparsedeploy.devices import find
from sparsedeploy.gpu import Gpu, first_gpu
from sparsedeploy.layer import ConvLayer
from sparsedeploy.plugins import kernel_named
from sparsedeploy.plugins.kernel import BuildOptions
from sparsedeploy.plugins.node import SparseConv
from sparsedeploy.reading import Reading, read
from sparsedeploy.verify import FP32_TOLERANCE, random_feeds

torch = pytest.importorskip("torch")
from sparsedeploy.measure import torch_stage, tune  # noqa: E402
from sparsedeploy.runners.torch_runner import load_torch  # noqa: E402

H200 = find("h200")


def block(path: Path, channels: int = 16, side: int = 10) -> Reading:
    """Two 3x3 convolutions and a 1x1 shortcut, whose bare bias the torch runner would pass on to the addition."""
    from onnx import helper

    rng = np.random.default_rng(0)
    shapes = {"w1": (channels, channels, 3, 3), "w2": (channels, channels, 3, 3), "w3": (channels, channels, 1, 1)}
    constants: dict[str, Any] = {
        name: sparse_weight(shape, 0.8, seed) for seed, (name, shape) in enumerate(shapes.items())
    }
    constants |= {f"b{k}": rng.normal(size=channels).astype(np.float32) for k in (1, 2, 3)}
    nodes = [
        helper.make_node("Conv", ["x", "w1", "b1"], ["a"], "one", pads=[1, 1, 1, 1]),
        helper.make_node("Relu", ["a"], ["r"], "relu"),
        helper.make_node("Conv", ["r", "w2", "b2"], ["c"], "two", pads=[1, 1, 1, 1]),
        helper.make_node("Conv", ["x", "w3", "b3"], ["s"], "shortcut"),
        helper.make_node("Add", ["c", "s"], ["sum"], "add"),
        helper.make_node("Relu", ["sum"], ["y"], "last"),
    ]
    onnx.save_model(model_of(nodes, constants, {"x": [2, channels, side, side]}, ["y"]), path)
    return read(path, H200, "fp32")


def layer(reading: Reading, name: str) -> ConvLayer:
    return next(each for each in reading.layers if each.name == name)


def node(reading: Reading, name: str, archs: tuple[int, ...] = (90,)) -> SparseConv:
    options = BuildOptions("fp32", 2, archs)
    return kernel_named("baked").build(layer(reading, name), *reading.weight(name), H200, {}, options).node


def copied(model: Model) -> Model:
    made = Model(type(model.proto)(), model.path)
    made.proto.CopyFrom(model.proto)
    return made


class Unpacked:
    """Runs a node by its unpacked weights in float64: host.Runner without a GPU."""

    def __init__(self, sparse: SparseConv, device: int = 0) -> None:
        self.node = sparse
        weight, bias = kernel_named(sparse.kernel).unpack(sparse)
        self.weight, self.bias = (
            torch.from_numpy(weight).double(),
            None if bias is None else torch.from_numpy(bias).double(),
        )

    def reserve(self, n: int, dtype: str) -> None:
        """Nothing to reserve."""

    def run(self, x: Any, residual: Any, out: Any, stream: Any) -> None:
        y = torch_stage._conv64(x, self.weight, self.bias, self.node.geometry)
        out.copy_(torch_stage._finish64(y, None if residual is None else residual.double(), self.node.epilogue))

    def close(self) -> None:
        """Nothing is held."""


@pytest.fixture
def on_cpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Reading, torch_stage.TorchStage]:
    reading = block(tmp_path / "block.onnx")
    monkeypatch.setattr(torch_stage, "host", types.SimpleNamespace(Runner=Unpacked))
    stream = types.SimpleNamespace(synchronize=lambda: None)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device=None: stream)
    monkeypatch.setattr(torch_stage, "_ready", lambda: None)
    dense, mixed = (load_torch(copied(reading.model), "fp32", "cpu") for _ in range(2))
    feeds = random_feeds(reading.model, reading.inputs)
    # Units belong to the model that was copied; outputs have the same names.
    stage = torch_stage.TorchStage(dense, mixed, Gpu("a CPU", 90, 1), reading.unit_of, reading.inputs, feeds, "fp32")
    return reading, stage


def output(stage: torch_stage.TorchStage, nodes: dict[str, SparseConv]) -> Any:
    feeds = {name: torch.from_numpy(value) for name, value in stage.feeds.items()}
    with torch.no_grad():
        return stage._variant(nodes)(feeds)["y"].numpy()


@pytest.mark.parametrize("names", [["one"], ["two"], ["shortcut"], ["one", "two", "shortcut"]])
def test_exchanged_layers_leave_the_output(on_cpu: tuple[Reading, torch_stage.TorchStage], names: list[str]) -> None:
    reading, stage = on_cpu
    expected = output(stage, {})
    found = output(stage, {name: node(reading, name) for name in names})
    assert np.abs(found - expected).max() <= FP32_TOLERANCE * np.abs(expected).max()
    forms = {step.outputs[0]: step.form for step in stage._variant({name: node(reading, name) for name in names}).steps}
    assert [forms[reading.unit_of[name].output] for name in names] == ["sparse baked"] * len(names)


def test_the_error_of_a_right_node_is_rounding_and_of_a_wrong_one_is_not(
    on_cpu: tuple[Reading, torch_stage.TorchStage], monkeypatch: pytest.MonkeyPatch
) -> None:
    reading, stage = on_cpu
    for name in ("one", "two", "shortcut"):
        weight, bias = reading.weight(name)
        assert stage.error(name, node(reading, name), weight, bias) < 1e-6
        assert stage.error(name, node(reading, name), weight * np.float32(1.01), bias) > 1e-3
    wrong = node(reading, "one")
    monkeypatch.setattr(Unpacked, "run", lambda *_: None)  # nothing is written
    assert stage.error("one", wrong, *reading.weight("one")) == float("inf")


@pytest.mark.parametrize("image", [0, 1])
def test_an_image_that_was_not_written_is_an_error_wherever_it_is(
    on_cpu: tuple[Reading, torch_stage.TorchStage], monkeypatch: pytest.MonkeyPatch, image: int
) -> None:
    reading, stage = on_cpu
    right = Unpacked.run

    def forgets(self: Unpacked, x: Any, residual: Any, out: Any, stream: Any) -> None:
        right(self, x, residual, out, stream)
        out[image] = float("nan")

    monkeypatch.setattr(torch_stage, "_IMAGES", 1)
    monkeypatch.setattr(Unpacked, "run", forgets)
    assert stage.error("one", node(reading, "one"), *reading.weight("one")) == float("inf")


@pytest.mark.gpu
def test_tune_on_this_gpu(tmp_path: Path) -> None:
    gpu = first_gpu()
    assert gpu is not None
    block(tmp_path / "block.onnx", channels=64, side=28)
    result = tune.tune(tmp_path / "block.onnx", settings=tune.Settings(per_kernel=1, compile_s=60, crossover=True))
    tuning = result.tuning
    assert tuning.gpu == gpu.name
    attempts = [attempt for each in tuning.layers for attempt in each.attempts]
    assert attempts
    assert all(attempt.error is None or attempt.error < 1e-2 for attempt in attempts)
    assert all(each.us_dense is not None and each.us_dense > 0 for each in tuning.layers)
    assert len(result.nodes) == tuning.sparse_layers
    if tuning.sparse_layers:
        assert tuning.speedup is not None
        assert tuning.speedup.low > 1

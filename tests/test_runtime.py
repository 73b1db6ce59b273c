"""Loading a bundle, a model or an engine into the runner that is here, and ONNX Runtime as a runner."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
import pytest
from small_models import network, saved

from sparsedeploy import runtime
from sparsedeploy.convert import Request, convert
from sparsedeploy.devices import find
from sparsedeploy.errors import InputError, MachineError
from sparsedeploy.gpu import Gpu
from sparsedeploy.runners import onnxruntime_runner
from sparsedeploy.verify import run_file

HAS_CUDA = "CUDAExecutionProvider" in onnxruntime.get_available_providers()


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A bundle with three sparse layers, exact weights."""
    folder = tmp_path_factory.mktemp("made")
    convert(Request(saved(network(), folder), find("h200"), folder / "out", layers=("*=csr",)))
    return folder / "out"


def x_of(batch: int) -> Any:
    return np.random.default_rng(batch).random((batch, 16, 8, 8), np.float32)


def test_a_bundle_on_the_cpu_runs_dense_says_so_and_is_right(made: Path) -> None:
    runner = runtime.load(made, device="cpu")
    assert (runner.name, runner.device, runner.arithmetic, runner.sparse_layers) == ("onnxruntime", "cpu", "fp32", 0)
    assert any(note.startswith("ran dense: the 3 sparse layers were unpacked") for note in runner.notes)
    assert [(entry.name, entry.shape[1:], entry.dtype) for entry in runner.inputs] == [("x", (16, 8, 8), "float32")]
    for batch in (1, 3):
        x = x_of(batch)
        expected = run_file(made / "model.dense.onnx", {"x": x})["y"]
        np.testing.assert_allclose(runner.run({"x": x})["y"], expected, atol=1e-4 * np.abs(expected).max())
    runner.close()


def test_a_session_of_onnxruntime(made: Path) -> None:
    runner = runtime.load(made, "onnxruntime", device="cpu")
    session = runner.session({"x": (2, 16, 8, 8)})
    assert (session.device_clock, session.graph) == (False, False)
    with pytest.raises(InputError, match="enqueue before download"):
        session.download()
    for seed in (4, 5):
        x = x_of(seed)[:2]
        session.upload({"x": x})
        start = session.mark()
        session.enqueue()
        session.wait()
        assert session.elapsed_us(start, session.mark()) > 0
        expected = run_file(made / "model.dense.onnx", {"x": x})["y"]
        np.testing.assert_allclose(session.download()["y"], expected, atol=1e-4 * np.abs(expected).max())
    with pytest.raises(InputError, match="the session takes"):
        session.upload({"x": x_of(3)})
    session.close()
    with pytest.raises(MachineError, match="captures no CUDA graph"):
        runner.session({"x": (2, 16, 8, 8)}, graph=True)
    with pytest.raises(InputError, match="2x16x8x9 was given for input 'x', needed"):
        runner.session({"x": (2, 16, 8, 9)})


def test_what_onnxruntime_refuses(made: Path) -> None:
    runner = runtime.load(made, "onnxruntime", device="cpu")
    with pytest.raises(InputError, match="no array for input 'x'"):
        runner.run({})
    with pytest.raises(InputError, match="could not run it on these inputs"):
        runner.run({"x": np.zeros((1, 3, 8, 8), np.float32)})
    with pytest.raises(InputError, match="takes numpy arrays"):
        runner.run({"x": [1.0]})
    with pytest.raises(InputError, match="compute in fp32 and fp16 was asked for"):
        runtime.load(made, "onnxruntime", "fp16", "cpu")
    with pytest.raises(MachineError, match="tf32 is an arithmetic of GPUs"):
        runtime.load(made / "model.dense.onnx", "onnxruntime", "tf32", "cpu")


@pytest.mark.skipif(HAS_CUDA, reason="this ONNX Runtime has CUDA")
def test_a_gpu_that_onnxruntime_does_not_know(made: Path) -> None:
    with pytest.raises(MachineError, match="has no CUDA provider"):
        runtime.load(made, "onnxruntime", device="cuda:0")


def test_fp16_of_a_dense_model(made: Path) -> None:
    x = x_of(2)
    expected = run_file(made / "model.dense.onnx", {"x": x})["y"]
    got = runtime.load(made / "model.dense.onnx", "onnxruntime", "fp16", "cpu").run({"x": x})["y"]
    assert got.dtype == np.float32
    assert 0 < np.abs(got - expected).max() <= 1e-2 * np.abs(expected).max()


def test_a_model_that_onnxruntime_cannot_load(tmp_path: Path) -> None:
    model = network()
    model.graph.node[1].op_type = "NoSuchOperator"
    model.graph.node[1].domain = "nobody"
    model.opset_import.add(domain="nobody", version=1)
    with pytest.raises(InputError, match=r"ONNX Runtime .* cannot load it"):
        runtime.load(saved(model, tmp_path), "onnxruntime", device="cpu")


def test_what_cannot_be_loaded(made: Path, tmp_path: Path) -> None:
    with pytest.raises(InputError, match="no such file or folder"):
        runtime.load(tmp_path / "nothing")
    with pytest.raises(InputError, match="no bundle here"):
        runtime.load(tmp_path)
    with pytest.raises(InputError, match="no such runner"):
        runtime.load(made, "tflite")  # type: ignore[arg-type]


@pytest.mark.skipif(importlib.util.find_spec("torch") is not None, reason="PyTorch is installed")
def test_torch_that_is_not_installed(made: Path) -> None:
    with pytest.raises(MachineError, match="needs PyTorch, which is not installed"):
        runtime.load(made, "torch")


def test_damaged_weights_are_told_in_words(made: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def unreadable(name: str) -> Any:
        raise ValueError("table of another kind")

    monkeypatch.setattr(runtime, "kernel_named", unreadable)
    with pytest.raises(
        InputError, match=r"weights of layer c1 cannot be read from its csr node \(table of another kind\)"
    ):
        runtime.load(made, "onnxruntime", device="cpu")


def test_where_nothing_runs_every_reason_is_told(made: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runtime, "first_gpu", lambda: Gpu("H200", 90, 132))

    def broken(*_: Any) -> Any:
        raise MachineError("broken here.")

    monkeypatch.setattr(runtime, "_load_named", broken)
    with pytest.raises(MachineError, match=r"onnxruntime: broken here|broken here\."):
        runtime.load(made)


class Provider:
    """An InferenceSession that claims the CUDA provider failed to start."""

    def __init__(self, *_: Any, **__: Any) -> None: ...

    def get_providers(self) -> list[str]:
        return ["CPUExecutionProvider"]


def test_a_cuda_provider_that_does_not_start(made: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(onnxruntime_runner.ort, "get_available_providers", lambda: ["CUDAExecutionProvider"])
    monkeypatch.setattr(onnxruntime_runner.ort, "InferenceSession", Provider)
    with pytest.raises(MachineError, match="did not start on this machine"):
        runtime.load(made, "onnxruntime")

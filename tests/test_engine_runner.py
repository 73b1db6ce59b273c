"""Engines as runners, on a GPU and a TensorRT that are not there: buffers, copies, graphs, arrays where they lie, freeing."""

from __future__ import annotations

import ctypes
import importlib
import shutil
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from small_models import network, saved
from test_engine import ELF, install_fakes

from sparsedeploy import runtime
from sparsedeploy.convert import Request, convert
from sparsedeploy.devices import find
from sparsedeploy.engines import engine
from sparsedeploy.engines.engine import Build, build_engine
from sparsedeploy.errors import InputError, MachineError
from sparsedeploy.gpu import Gpu
from sparsedeploy.runners import engine_runner
from sparsedeploy.runners.cuda_stream import DeviceBuffer, view
from sparsedeploy.runners.engine_runner import EngineRunner
from sparsedeploy.verify import run_file

A100 = Gpu("A100", 80, 108)


class FakeCuda:
    """Host memory that plays the device's; every handle must be given back once."""

    def __init__(self) -> None:
        self.memory: dict[int, Any] = {}
        self.live: list[str] = []
        self.graphs: dict[int, Callable[[], None]] = {}
        self.now = 0.0
        self.capturing = False
        self.elsewhere: list[Callable[[], None]] = []
        """What other streams have yet to do."""

    def activate(self) -> None:
        pass

    def alloc(self, size: int) -> int:
        raw = np.full(max(size, 1) + 256, 0xA5, np.uint8)
        address = -(-raw.ctypes.data // 256) * 256
        self.memory[address] = raw
        return address

    def free(self, address: int) -> None:
        del self.memory[address]

    def pinned(self, size: int) -> NDArray[np.uint8]:
        self.live.append("pinned")
        return np.zeros(size, np.uint8)

    def unpin(self, memory: NDArray[np.uint8]) -> None:
        self.live.remove("pinned")

    def stream(self) -> int:
        self.live.append("stream")
        return 77

    def end_stream(self, stream: int) -> None:
        assert stream == 77
        self.live.remove("stream")

    def copy_in(self, address: int, source: NDArray[np.uint8], stream: int) -> None:
        ctypes.memmove(address, source.ctypes.data, source.nbytes)

    def copy_out(self, target: NDArray[np.uint8], address: int, stream: int) -> None:
        ctypes.memmove(target.ctypes.data, address, target.nbytes)

    def wait(self, stream: int) -> None:
        assert stream == 77

    def wait_for_all(self) -> None:
        while self.elsewhere:
            self.elsewhere.pop(0)()

    def event(self, stream: int) -> int:
        self.live.append("event")
        self.now += 5.0
        return int(self.now)

    def elapsed_us(self, start: int, end: int) -> float:
        return float(end - start)

    def end_event(self, event: int) -> None:
        self.live.remove("event")

    def capture(self, stream: int, work: Callable[[], None]) -> int:
        self.live.append("graph")
        self.capturing = True
        work()
        self.capturing = False
        self.graphs[1] = work
        return 1

    def launch_graph(self, graph: int, stream: int) -> None:
        self.graphs[graph]()

    def end_graph(self, graph: int) -> None:
        self.live.remove("graph")


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A bundle with a sparse and a dense engine of TensorRT, batches 1 to 16."""
    folder = tmp_path_factory.mktemp("made")
    convert(Request(saved(network(), folder), find("a100"), folder / "out", layers=("*=sparse",)))
    (folder / "libsparse.so").write_bytes(ELF)
    with pytest.MonkeyPatch.context() as patch:
        install_fakes(patch, folder)
        patch.setattr(engine, "first_gpu", lambda: A100)
        build_engine(folder / "out", Build("tensorrt", plugin=folder / "libsparse.so", batch=(1, 4, 16)))
        build_engine(folder / "out", Build("tensorrt", which="dense", tf32=True, batch=(1, 4, 16)))
    return folder / "out"


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> FakeCuda:
    """The fake GPU, driver and TensorRT in this process."""
    install_fakes(monkeypatch, tmp_path)
    for name in ("fake_trt", "tensorrt_rtx_bindings", "tensorrt"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    cuda = FakeCuda()
    monkeypatch.setattr(engine, "_libraries", {})
    monkeypatch.setattr(engine, "first_gpu", lambda: A100)
    monkeypatch.setattr(runtime, "first_gpu", lambda: A100)
    monkeypatch.setattr(engine_runner, "cuda", lambda: cuda)
    return cuda


def read(address: int, shape: tuple[int, ...]) -> NDArray[np.float32]:
    raw = (ctypes.c_float * int(np.prod(shape))).from_address(address)
    return np.ctypeslib.as_array(raw).reshape(shape)


@pytest.fixture
def runner(made: Path, gpu: FakeCuda) -> Iterator[EngineRunner]:
    """The sparse engine; the fake TensorRT computes with ONNX Runtime, in the buffers it is given."""
    loaded: Any = runtime.load(made, "tensorrt")
    fake: Any = importlib.import_module("fake_trt")

    def execute(tensors: dict[str, tuple[int, tuple[int, ...]]]) -> None:
        if not gpu.capturing:
            x = np.array(read(*tensors["x"]))
            read(*tensors["y"])[...] = run_file(made / "model.dense.onnx", {"x": x})["y"]

    fake.EXECUTE = execute
    yield loaded
    loaded.close()


def x_of(batch: int, seed: int = 0) -> NDArray[np.float32]:
    return np.random.default_rng(seed).random((batch, 16, 8, 8), np.float32)


def test_what_an_engine_says_of_itself(runner: EngineRunner) -> None:
    assert (runner.name, runner.arithmetic, runner.device, runner.sparse_layers) == ("tensorrt", "fp32", "cuda:0", 3)
    assert [(entry.name, entry.shape, entry.dtype) for entry in runner.inputs] == [("x", ("N", 16, 8, 8), "float32")]
    assert runner.outputs[0].shape == ("N", 10)
    assert runner.notes[0] == "TensorRT 10.14.1.48"


@pytest.mark.parametrize("graph", [False, True])
def test_a_session(runner: EngineRunner, made: Path, gpu: FakeCuda, graph: bool) -> None:
    session = runner.session({"x": (2, 16, 8, 8)}, graph)
    assert (session.device_clock, session.graph) == (True, graph)
    for seed in (1, 2):
        x = x_of(2, seed)
        session.upload({"x": x})
        start = session.mark()
        session.enqueue()
        assert session.elapsed_us(start, session.mark()) == 5.0
        expected = run_file(made / "model.dense.onnx", {"x": x})
        np.testing.assert_array_equal(session.download()["y"], expected["y"])
    with pytest.raises(InputError, match=r"'x' is \[3, 16, 8, 8\], the session takes \[2, 16, 8, 8\]"):
        session.upload({"x": x_of(3)})
    del start
    session.close()
    session.close()
    assert gpu.live == []
    assert gpu.memory == {}


def test_a_session_that_cannot_be_made_leaves_nothing(runner: EngineRunner, gpu: FakeCuda) -> None:
    with pytest.raises(InputError, match="the engine was built for"):
        runner.session({"x": (17, 16, 8, 8)})
    assert gpu.live == []
    assert gpu.memory == {}


def test_running_host_arrays(runner: EngineRunner, made: Path) -> None:
    for batch in (1, 3, 1):
        x = x_of(batch, batch)
        np.testing.assert_array_equal(runner.run({"x": x})["y"], run_file(made / "model.dense.onnx", {"x": x})["y"])
    with pytest.raises(InputError, match="no array for input 'x'"):
        runner.run({})


def test_running_device_arrays(runner: EngineRunner, made: Path, gpu: FakeCuda) -> None:
    x = x_of(2)
    array = DeviceBuffer(gpu, x.shape, "float32")
    gpu.copy_in(array.address, x.reshape(-1).view(np.uint8), 77)
    output = runner.run({"x": array})["y"]
    fake: Any = importlib.import_module("fake_trt")
    assert fake.CALLS[-1]["tensors"]["x"][0] == array.address, "read where it lies"
    address, shape, dtype = view(output, "y")
    assert (shape, dtype) == ((2, 10), np.float32)
    np.testing.assert_array_equal(read(address, shape), run_file(made / "model.dense.onnx", {"x": x})["y"])
    with pytest.raises(InputError, match=r"'x' is float16 \[2, 16, 8, 8\] on the device"):
        runner.run({"x": DeviceBuffer(gpu, x.shape, "float16")})


def test_an_array_that_another_stream_still_makes_is_waited_for(
    runner: EngineRunner, made: Path, gpu: FakeCuda
) -> None:
    x = x_of(2)
    array = DeviceBuffer(gpu, x.shape, "float32")
    gpu.elsewhere.append(lambda: gpu.copy_in(array.address, x.reshape(-1).view(np.uint8), 0))
    address, shape, _ = view(runner.run({"x": array})["y"], "y")
    np.testing.assert_array_equal(read(address, shape), run_file(made / "model.dense.onnx", {"x": x})["y"])


class Strided:
    """A device array whose rows do not follow one another."""

    shape = (2, 2)
    __cuda_array_interface__ = {"shape": (2, 2), "typestr": "<f4", "data": (0, False), "strides": (16, 4), "version": 3}


def test_arrays_that_cannot_be_used() -> None:
    with pytest.raises(InputError, match="not contiguous"):
        view(Strided(), "x")
    with pytest.raises(InputError, match="is a list, needed an array"):
        view([1], "x")


def expect_no_plugin() -> None:
    """The fake wants a plugin library before any engine; a dense one needs none."""
    fake: Any = importlib.import_module("fake_trt")
    fake._registry.libraries.append("another engine's")


@pytest.mark.parametrize(
    ("which", "arithmetic", "words"),
    [
        ("sparse", "fp16", "was built for fp32, fp16 was asked for"),
        ("sparse", "tf32", "was built for fp32, tf32 was asked for.*--tf32"),
        ("dense", "fp32", "was built for tf32, fp32 was asked for"),
    ],
)
def test_an_engine_of_another_arithmetic(made: Path, gpu: FakeCuda, which: str, arithmetic: Any, words: str) -> None:
    expect_no_plugin()
    with pytest.raises(InputError, match=words):
        runtime.load(made / f"model.{which}.onnx", "tensorrt", arithmetic)


def test_a_bundle_runs_its_engine_where_there_is_one(made: Path, gpu: FakeCuda) -> None:
    assert runtime.load(made).name == "tensorrt"
    expect_no_plugin()
    dense = runtime.load(made / "model.dense.onnx", arithmetic="tf32")
    assert (dense.name, dense.sparse_layers) == ("tensorrt", 0)
    by_path = runtime.load(made / "model.tensorrt.sm80.engine")
    assert by_path.sparse_layers == 3


def test_no_engine_for_this_gpu(made: Path, gpu: FakeCuda, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(runtime, "first_gpu", lambda: Gpu("H200", 90, 132))
    with pytest.raises(MachineError, match=r"no engine of TensorRT for this GPU \(sm_90\).*model.tensorrt.sm80.engine"):
        runtime.load(made, "tensorrt")
    monkeypatch.setattr(runtime, "first_gpu", lambda: A100)
    bare = Path(shutil.copytree(made, tmp_path / "bare"))
    (bare / "model.tensorrt.sm80.engine").unlink()
    with pytest.raises(MachineError, match=r"it holds none\. Build one with `sparsedeploy build"):
        runtime.load(bare, "tensorrt")
    monkeypatch.setattr(runtime, "first_gpu", lambda: None)
    with pytest.raises(MachineError, match="this machine shows none"):
        runtime.load(made, "tensorrt")

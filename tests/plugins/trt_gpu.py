"""A plugin library on a real GPU: the host as a shared library, memory and streams from the driver by ctypes."""

from __future__ import annotations

import ctypes
import json
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from gpu_cases import Prepared, element
from numpy.typing import NDArray
from trt_native import node_file

from sparsedeploy.layer import ELEMENT_BYTES
from sparsedeploy.plugins import host
from sparsedeploy.plugins.host import CudaDriver, DeviceArray, Runner, cuda_driver
from sparsedeploy.plugins.launch import Launch, choose


class _Place(ctypes.Structure):
    _fields_ = (
        ("inputs", ctypes.POINTER(ctypes.c_void_p)), ("output", ctypes.c_void_p), ("workspace", ctypes.c_void_p),
        ("stream", ctypes.c_void_p), ("step", ctypes.c_int64),
    )  # fmt: skip


class Plugin:
    """The host (host.cpp as a shared library) and the plugin that it drives, on one device."""

    def __init__(self, library: Path, plugin: Path, device: int = 0) -> None:
        self.driver: CudaDriver = cuda_driver()
        self.device = device
        self.driver.activate(device)
        self.cuda = ctypes.CDLL("libcuda.so.1")
        self.host = ctypes.CDLL(str(library))
        self.host.hostAnswer.restype = ctypes.c_char_p
        self.host.hostNanoseconds.restype = ctypes.c_double
        self.host.driverNanoseconds.restype = ctypes.c_double
        assert self.host.hostOpen(str(plugin).encode()) == 0

    def ask(self, line: str) -> dict[str, Any]:
        """One command of host.cpp."""
        said: dict[str, Any] = json.loads(self.host.hostAnswer(line.encode()))
        return said

    def stream(self) -> int:
        """A new stream of its device that does not wait for the default one."""
        self.driver.activate(self.device)
        handle = ctypes.c_void_p()
        assert self.cuda.cuStreamCreate(ctypes.byref(handle), 1) == 0
        return handle.value or 0

    def synchronize(self) -> None:
        assert self.cuda.cuCtxSynchronize() == 0

    def free_bytes(self) -> int:
        """Free memory of the device."""
        free, total = ctypes.c_size_t(), ctypes.c_size_t()
        assert self.cuda.cuMemGetInfo_v2(ctypes.byref(free), ctypes.byref(total)) == 0
        return free.value

    def graph(self, stream: int, record: Callable[[], None]) -> Callable[[], None]:
        """What launches the graph of what `record` does on the stream."""
        graph, runnable, handle = ctypes.c_void_p(), ctypes.c_void_p(), ctypes.c_void_p(stream)
        assert self.cuda.cuStreamBeginCapture_v2(handle, 0) == 0  # global mode: an allocation would fail the capture
        record()
        assert self.cuda.cuStreamEndCapture(handle, ctypes.byref(graph)) == 0
        assert self.cuda.cuGraphInstantiateWithFlags(ctypes.byref(runnable), graph, ctypes.c_ulonglong(0)) == 0

        def launch() -> None:
            assert self.cuda.cuGraphLaunch(runnable, handle) == 0

        return launch


class Layer:
    """One node attached once, with its constants, input and residual on the device."""

    def __init__(self, plugin: Plugin, folder: Path, case: Prepared) -> None:
        self.plugin, self.case, self.node, self.dtype, self.n = plugin, case, case.node, case.dtype, len(case.x)
        g = self.node.geometry
        activations = [case.x] if case.residual is None else [case.x, case.residual]
        self._arrays = [DeviceArray(plugin.driver, a.shape, case.dtype).upload(a) for a in activations]
        for table in self.node.constants:
            array = DeviceArray(plugin.driver, (max(table.size, 1),), "fp32")
            plugin.driver.upload(array.address, np.ascontiguousarray(table).tobytes())
            self._arrays.append(array)
        self.inputs = (ctypes.c_void_p * len(self._arrays))(*[array.address for array in self._arrays])
        shapes = [f"N,{g.ic},{g.h},{g.w}", *([f"N,{g.oc},{g.oh},{g.ow}"] if case.residual is not None else [])]
        shapes += [str(max(table.size, 1)) for table in self.node.constants]
        self.tensors = f"tensors {';'.join(shapes)}|N,{g.oc},{g.oh},{g.ow}"
        self.use()
        self.made = self._object(f"create {node_file(folder / 'node', self.node)}")
        assert plugin.ask(f"configure {self.made} {self.dtype} 1 {self.n}")["status"] == 0
        self.workspace_bytes = plugin.ask(f"workspace {self.made} {self.dtype} {self.n}")["bytes"]
        self.attached = self.attach()

    def _object(self, command: str) -> int:
        said = self.plugin.ask(command)["object"]
        assert said is not None, command
        return int(said)

    def use(self) -> None:
        """Make this layer's shapes and type the host's, its device this thread's."""
        self.plugin.driver.activate(self.plugin.device)
        self.plugin.ask(self.tensors)
        self.plugin.ask(f"type {self.dtype}")

    def attach(self) -> int:
        """One more execution context."""
        attached = self._object(f"attach {self.made}")
        assert self.plugin.ask(f"change {attached} {self.dtype} {self.n}")["status"] == 0
        return attached

    def place(self, stream: int, runs: int = 1) -> tuple[_Place, DeviceArray]:
        """Outputs of that many runs (filled with NaN) and a workspace of its own on a stream."""
        self.use()
        g, driver = self.node.geometry, self.plugin.driver
        shape = (self.n, g.oc, g.oh, g.ow)
        size = int(np.prod(shape)) * ELEMENT_BYTES[self.dtype]
        # All bits set is NaN in both types. Workspace is never assumed zeroed.
        output = DeviceArray(driver, (runs, *shape), self.dtype)
        room = DeviceArray(driver, (self.workspace_bytes // 4 + 1,), "fp32")
        for array, count in ((output, runs * size), (room, self.workspace_bytes)):
            status = self.plugin.cuda.cuMemsetD8_v2(
                ctypes.c_uint64(array.address), ctypes.c_ubyte(255), ctypes.c_size_t(count)
            )
            assert status == 0
        self.plugin.synchronize()
        self._arrays += [room, output]
        return _Place(self.inputs, output.address, room.address, stream, size if runs > 1 else 0), output

    def enqueue(self, place: _Place, times: int = 1) -> None:
        """As often on the place's stream."""
        self.use()
        assert self.plugin.host.hostEnqueue(self.attached, ctypes.c_int64(self.n), ctypes.byref(place), times) == 0

    def run(self, stream: int = 0) -> NDArray[Any]:
        """The output, in the layer's type."""
        place, output = self.place(stream)
        self.enqueue(place)
        return output.numpy()[0]

    def captured(self) -> NDArray[Any]:
        """The output of a graph captured right after one run, launched twice."""
        stream = self.plugin.stream()
        self.run(stream)
        place, output = self.place(stream)
        launch = self.plugin.graph(stream, lambda: self.enqueue(place))
        launch()
        launch()
        return output.numpy()[0]

    def threaded(self, threads: int, contexts: int, runs: int) -> list[NDArray[Any]]:
        """The outputs [runs, N, ...] of every context; each thread takes turns between its own, each with a stream."""
        self.use()
        count = threads * contexts
        objects = [self.attach() for _ in range(count)]
        places, outputs = zip(*[self.place(self.plugin.stream(), runs) for _ in range(count)], strict=True)
        context = ctypes.c_void_p()
        assert self.plugin.cuda.cuCtxGetCurrent(ctypes.byref(context)) == 0
        failures = self.plugin.host.hostThreads(
            (ctypes.c_int * count)(*objects), ctypes.c_int64(self.n), (_Place * count)(*places), count, threads, runs,
            self.plugin.cuda.cuCtxSetCurrent, context,
        )  # fmt: skip
        assert failures == 0
        found = [output.numpy() for output in outputs]
        for number in objects:
            self.plugin.ask(f"destroy {number}")
        return found

    def host_us(self, times: int = 100) -> float:
        """Host time of one enqueue, launcher and driver, while the queue has room: the least of 20 tries."""
        self.use()
        place, _ = self.place(self.plugin.stream())
        tries = []
        for _ in range(20):
            self.plugin.synchronize()
            spent = self.plugin.host.hostNanoseconds(self.attached, ctypes.c_int64(self.n), ctypes.byref(place), times)
            assert spent >= 0
            tries.append(spent / 1000)
        self.plugin.synchronize()
        return min(tries)

    def close(self) -> None:
        """Destroy the plugin objects."""
        self.plugin.synchronize()
        for number in (self.attached, self.made):
            self.plugin.ask(f"destroy {number}")


class Bare:
    """The same launches from plugins/host.py: the kernels without any launcher."""

    def __init__(self, plugin: Plugin, case: Prepared) -> None:
        plugin.driver.activate(plugin.device)
        self.plugin, self.case, self.n = plugin, case, len(case.x)
        self.runner = Runner(case.node, plugin.device, plugin.driver)
        self.runner.reserve(self.n, case.dtype)
        self._x = self.runner.empty(self.n, case.dtype, "input").upload(case.x)
        self._residual = None
        if case.residual is not None:
            self._residual = self.runner.empty(self.n, case.dtype).upload(case.residual)
        self._out = self.runner.empty(self.n, case.dtype)

    def enqueue(self, stream: int) -> None:
        """Once in stream order."""
        self.runner.run(self._x, residual=self._residual, out=self._out, stream=stream)

    def launches(self) -> int:
        """Kernels of one run."""
        variant = choose(self.case.node.plan, self.case.dtype, self.n)
        assert variant is not None
        return sum(isinstance(op, Launch) for op in variant.ops)

    def driver_us(self, times: int = 100) -> float:
        """Host time of the driver's calls for one run, the same launches with the same attributes: the least of 20 tries."""
        calls: list[tuple[int, host.Call]] = []
        stream = self.plugin.stream()
        recorder = _Recorder(self.plugin.driver, calls)
        self.runner._driver = recorder  # type: ignore[assignment]
        self.enqueue(stream)
        self.runner._driver = self.plugin.driver
        return sum(self._one_us(function, call, stream, times) for function, call in calls)

    def _one_us(self, function: int, call: host.Call, stream: int, times: int) -> float:
        cells = [(ctypes.c_uint64 if size == 8 else ctypes.c_int32)(value) for value, size in call.values]
        pointers = (ctypes.c_void_p * len(cells))(*[ctypes.addressof(cell) for cell in cells])
        attributes = host._attributes(call)
        config = host._Config(
            host._Dim(*call.grid), host._Dim(*call.block), call.shared_bytes, stream, attributes, len(attributes)
        )
        tries = []
        for _ in range(20):
            self.plugin.synchronize()
            spent = self.plugin.host.driverNanoseconds(
                self.plugin.cuda.cuLaunchKernelEx, ctypes.byref(config), ctypes.c_void_p(function), pointers, times
            )
            assert spent >= 0
            tries.append(spent / 1000)
        self.plugin.synchronize()
        return min(tries)


class _Recorder:
    """A driver that also keeps what is launched."""

    def __init__(self, driver: CudaDriver, calls: list[tuple[int, host.Call]]) -> None:
        self._driver, self._calls = driver, calls

    def __getattr__(self, name: str) -> Any:
        return getattr(self._driver, name)

    def launch(self, function: int, call: host.Call, stream: int) -> None:
        self._calls.append((function, call))
        self._driver.launch(function, call, stream)


def compared_us(
    plugin: Plugin, first: Callable[[int], None], second: Callable[[int], None], runs: int, tries: int = 9
) -> tuple[float, float]:
    """Microseconds of one run of both, medians: each a graph of `runs` runs, measured in turn after a warm-up by time."""
    stream = plugin.stream()
    launches = []
    for record in (first, second):
        record(stream)  # what is loaded on first use must not be in the graph
        plugin.synchronize()
        launches.append(plugin.graph(stream, lambda record=record: [record(stream) for _ in range(runs)]))  # type: ignore[misc]
    found: tuple[list[float], list[float]] = ([], [])
    until = time.perf_counter() + 0.1
    while time.perf_counter() < until:
        for launch in launches:
            launch()
        plugin.synchronize()
    for _ in range(tries):
        for launch, times in zip(launches, found, strict=True):
            started = time.perf_counter()
            launch()
            plugin.synchronize()
            times.append(1e6 * (time.perf_counter() - started) / runs)
    return statistics.median(found[0]), statistics.median(found[1])


def bit_equal(arrays: Sequence[NDArray[Any]]) -> bool:
    """Whether all hold the same bytes."""
    return len({array.tobytes() for array in arrays}) == 1


def same_bits(arrays: Sequence[NDArray[Any]], expected: NDArray[Any]) -> bool:
    """Whether every [runs, ...] of the arrays holds the bytes of `expected`, run for run."""
    words = np.uint32 if element_bytes(expected) == 4 else np.uint16
    return all(bool((array.view(words) == expected.view(words)).all()) for array in arrays)


def element_bytes(array: NDArray[Any]) -> int:
    """Bytes of one element."""
    return int(array.dtype.itemsize)


__all__ = ["Bare", "Layer", "Plugin", "bit_equal", "compared_us", "element", "same_bits"]

"""A plugin library on a real GPU: the host as a shared library, memory and streams from the driver by ctypes."""

from __future__ import annotations

import ctypes
import json
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from trt_native import node_file

from sparsedeploy.layer import ELEMENT_BYTES, Precision
from sparsedeploy.plugins.host import CudaDriver, DeviceArray, cuda_driver
from sparsedeploy.plugins.node import SparseConv


class _Place(ctypes.Structure):
    _fields_ = (
        ("inputs", ctypes.POINTER(ctypes.c_void_p)), ("output", ctypes.c_void_p), ("workspace", ctypes.c_void_p),
        ("stream", ctypes.c_void_p),
    )  # fmt: skip


class Plugin:
    """The host (host.cpp as a shared library) and the plugin that it drives, on device 0."""

    def __init__(self, host: Path, plugin: Path) -> None:
        self.driver: CudaDriver = cuda_driver()
        self.driver.activate(0)
        self.cuda = ctypes.CDLL("libcuda.so.1")
        self.host = ctypes.CDLL(str(host))
        self.host.hostAnswer.restype = ctypes.c_char_p
        assert self.host.hostOpen(str(plugin).encode()) == 0

    def ask(self, line: str) -> dict[str, Any]:
        """One command of host.cpp."""
        said: dict[str, Any] = json.loads(self.host.hostAnswer(line.encode()))
        return said

    def stream(self) -> int:
        """A new stream that does not wait for the default one."""
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


class Layer:
    """One node attached once, with its constants, input and residual on the device."""

    def __init__(
        self,
        plugin: Plugin,
        folder: Path,
        node: SparseConv,
        x: NDArray[np.float64],
        residual: NDArray[np.float64] | None,
        dtype: Precision,
    ) -> None:
        self.plugin, self.node, self.dtype, self.n = plugin, node, dtype, len(x)
        g = node.geometry
        activations = [x] if residual is None else [x, residual]
        self._arrays = [DeviceArray(plugin.driver, a.shape, dtype).upload(a) for a in activations]
        for table in node.constants:
            array = DeviceArray(plugin.driver, (max(table.size, 1),), "fp32")
            plugin.driver.upload(array.address, np.ascontiguousarray(table).tobytes())
            self._arrays.append(array)
        self.inputs = (ctypes.c_void_p * len(self._arrays))(*[array.address for array in self._arrays])
        shapes = [f"N,{g.ic},{g.h},{g.w}", *([f"N,{g.oc},{g.oh},{g.ow}"] if residual is not None else [])]
        shapes += [str(max(table.size, 1)) for table in node.constants]
        self.tensors = f"tensors {';'.join(shapes)}|N,{g.oc},{g.oh},{g.ow}"
        self.use()
        self.made = self._object(f"create {node_file(folder / 'node', node)}")
        assert plugin.ask(f"configure {self.made} {dtype} 1 {self.n}")["status"] == 0
        self.workspace_bytes = plugin.ask(f"workspace {self.made} {dtype} {self.n}")["bytes"]
        self.attached = self.attach()

    def _object(self, command: str) -> int:
        said = self.plugin.ask(command)["object"]
        assert said is not None, command
        return int(said)

    def use(self) -> None:
        """Make this layer's shapes and type the host's."""
        self.plugin.ask(self.tensors)
        self.plugin.ask(f"type {self.dtype}")

    def attach(self) -> int:
        """One more execution context."""
        attached = self._object(f"attach {self.made}")
        assert self.plugin.ask(f"change {attached} {self.dtype} {self.n}")["status"] == 0
        return attached

    def place(self, stream: int) -> tuple[_Place, DeviceArray]:
        """Output (filled with NaN) and workspace of its own on a stream."""
        g = self.node.geometry
        output = DeviceArray(self.plugin.driver, (self.n, g.oc, g.oh, g.ow), self.dtype)
        output.upload(np.full((1, 1, 1, 1), np.nan))
        # Workspace is never assumed zeroed.
        room = DeviceArray(self.plugin.driver, (self.workspace_bytes // 4 + 1,), "fp32").upload(np.full(1, np.nan))
        self._arrays.append(room)
        return _Place(self.inputs, output.address, room.address, stream), output

    def run(self, stream: int = 0, times: int = 1) -> NDArray[Any]:
        """The output of `times` runs, in the layer's type."""
        self.use()
        place, output = self.place(stream)
        assert self.plugin.host.hostEnqueue(self.attached, ctypes.c_int64(self.n), ctypes.byref(place), times) == 0
        return output.numpy()

    def captured(self) -> NDArray[Any]:
        """The output of a graph captured right after one run, launched twice."""
        cuda, stream = self.plugin.cuda, self.plugin.stream()
        self.run(stream)
        place, output = self.place(stream)
        graph, runnable = ctypes.c_void_p(), ctypes.c_void_p()
        handle = ctypes.c_void_p(stream)
        assert cuda.cuStreamBeginCapture_v2(handle, 0) == 0  # global mode: an allocation would fail the capture
        failures = self.plugin.host.hostEnqueue(self.attached, ctypes.c_int64(self.n), ctypes.byref(place), 1)
        assert cuda.cuStreamEndCapture(handle, ctypes.byref(graph)) == 0
        assert failures == 0
        assert cuda.cuGraphInstantiateWithFlags(ctypes.byref(runnable), graph, ctypes.c_ulonglong(0)) == 0
        for _ in range(2):
            assert cuda.cuGraphLaunch(runnable, handle) == 0
        return output.numpy()

    def threaded(self, threads: int, runs: int) -> list[NDArray[Any]]:
        """The outputs of that many threads, each on a stream and an execution context of its own."""
        self.use()
        objects = [self.attach() for _ in range(threads)]
        places, outputs = zip(*[self.place(self.plugin.stream()) for _ in range(threads)], strict=True)
        context = ctypes.c_void_p()
        assert self.plugin.cuda.cuCtxGetCurrent(ctypes.byref(context)) == 0
        failures = self.plugin.host.hostThreads(
            (ctypes.c_int * threads)(*objects), ctypes.c_int64(self.n), (_Place * threads)(*places), threads, runs,
            self.plugin.cuda.cuCtxSetCurrent, context,
        )  # fmt: skip
        assert failures == 0
        return [output.numpy() for output in outputs]

    def us(self, times: int = 200) -> float:
        """Wall time of one run when `times` are queued."""
        self.use()
        place, _ = self.place(self.plugin.stream())
        best = float("inf")
        for _ in range(5):
            self.plugin.synchronize()
            started = time.perf_counter()
            self.plugin.host.hostEnqueue(self.attached, ctypes.c_int64(self.n), ctypes.byref(place), times)
            self.plugin.synchronize()
            best = min(best, time.perf_counter() - started)
        return 1e6 * best / times

    def close(self) -> None:
        """Destroy the plugin objects."""
        for number in (self.attached, self.made):
            self.plugin.ask(f"destroy {number}")


def within(
    y: NDArray[Any], expected: NDArray[np.float64], magnitudes: NDArray[np.float64], dtype: Precision
) -> NDArray[np.bool_]:
    """Per element: 8 roundings of the size of the sum of magnitudes, as the kernels' own tests hold; NaN never is."""
    rounding = 2.0**-11 if dtype == "fp16" else 2.0**-24
    fit: NDArray[np.bool_] = np.abs(y.astype(np.float64) - expected) <= 8 * rounding * magnitudes + 1e-7
    return fit


def bit_equal(arrays: Sequence[NDArray[Any]]) -> bool:
    """Whether all hold the same bytes."""
    return len({array.tobytes() for array in arrays}) == 1


def element(dtype: Precision) -> type[np.float32] | type[np.float16]:
    """Numpy's type."""
    return np.float32 if ELEMENT_BYTES[dtype] == 4 else np.float16

"""Streams, events, CUDA graphs, copies and buffers of one GPU through its driver alone: for engines, which bring none of their own.

Like plugins.host, by ctypes on libcuda.so.1, in the device's primary context.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from functools import cache
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from sparsedeploy.errors import InputError, MachineError
from sparsedeploy.plugins.host import cuda_driver

ALIGNMENT = 256
"""What cuMemAlloc guarantees and TensorRT asks for."""


class Cuda(Protocol):
    """What a session needs of a GPU; handles are integers."""

    def alloc(self, size: int) -> int:
        """Device memory."""

    def free(self, address: int) -> None:
        """Undo `alloc`."""

    def pinned(self, size: int) -> NDArray[np.uint8]:
        """Host memory that the device copies from and to directly; freed with `unpin`."""

    def unpin(self, memory: NDArray[np.uint8]) -> None:
        """Undo `pinned`."""

    def stream(self) -> int:
        """A new stream that does not wait for the default one."""

    def end_stream(self, stream: int) -> None:
        """Undo `stream`."""

    def copy_in(self, address: int, source: NDArray[np.uint8], stream: int) -> None:
        """Host to device, in stream order."""

    def copy_out(self, target: NDArray[np.uint8], address: int, stream: int) -> None:
        """Device to host, in stream order."""

    def wait(self, stream: int) -> None:
        """Until everything in the stream is done."""

    def wait_for_all(self) -> None:
        """Until everything in every stream is done: a stream of ours does not wait for what makes a caller's array."""

    def event(self, stream: int) -> int:
        """Record a new event; freed with `end_event`."""

    def elapsed_us(self, start: int, end: int) -> float:
        """Microseconds between two events, after waiting for the second."""

    def end_event(self, event: int) -> None:
        """Undo `event`."""

    def capture(self, stream: int, work: Callable[[], None]) -> int:
        """A CUDA graph of what `work` puts into the stream, ready to launch."""

    def launch_graph(self, graph: int, stream: int) -> None:
        """Launch a captured graph in stream order."""

    def end_graph(self, graph: int) -> None:
        """Undo `capture`."""

    def activate(self) -> None:
        """Make the device's primary context current for this thread."""


_NON_BLOCKING = 1
_THREAD_LOCAL = 1
_EVENT_DEFAULT = 0


class DriverCuda:
    """`Cuda` by the driver of this machine; raises MachineError with its words when a call fails."""

    def __init__(self, device: int = 0) -> None:
        self._driver = cuda_driver()
        self._device = device
        self._lib = ctypes.CDLL("libcuda.so.1")
        self.activate()

    def activate(self) -> None:
        """Make the primary context current."""
        self._driver.activate(self._device)

    def _call(self, name: str, *arguments: Any) -> None:
        status = getattr(self._lib, name)(*arguments)
        if status != 0:
            text = ctypes.c_char_p()
            self._lib.cuGetErrorString(status, ctypes.byref(text))
            words = text.value.decode() if text.value else "unknown error"
            raise MachineError(
                f"{name} failed: {words} (CUDA error {status}). Check the GPU with nvidia-smi and run again."
            )

    def alloc(self, size: int) -> int:
        """Device memory."""
        return self._driver.alloc(max(size, 1))

    def free(self, address: int) -> None:
        """Undo `alloc`."""
        self._driver.free(address)

    def pinned(self, size: int) -> NDArray[np.uint8]:
        """Page-locked host memory."""
        address = ctypes.c_void_p()
        self._call("cuMemHostAlloc", ctypes.byref(address), ctypes.c_size_t(max(size, 1)), ctypes.c_uint(0))
        buffer = (ctypes.c_ubyte * max(size, 1)).from_address(int(address.value or 0))
        return np.ctypeslib.as_array(buffer)[:size]

    def unpin(self, memory: NDArray[np.uint8]) -> None:
        """Undo `pinned`."""
        self._call("cuMemFreeHost", ctypes.c_void_p(memory.ctypes.data))

    def stream(self) -> int:
        """A non-blocking stream."""
        made = ctypes.c_void_p()
        self._call("cuStreamCreate", ctypes.byref(made), ctypes.c_uint(_NON_BLOCKING))
        return int(made.value or 0)

    def end_stream(self, stream: int) -> None:
        """Undo `stream`."""
        self._call("cuStreamDestroy_v2", ctypes.c_void_p(stream))

    def copy_in(self, address: int, source: NDArray[np.uint8], stream: int) -> None:
        """Host to device."""
        pointer, size = ctypes.c_void_p(source.ctypes.data), ctypes.c_size_t(source.nbytes)
        self._call("cuMemcpyHtoDAsync_v2", ctypes.c_uint64(address), pointer, size, ctypes.c_void_p(stream))

    def copy_out(self, target: NDArray[np.uint8], address: int, stream: int) -> None:
        """Device to host."""
        pointer, size = ctypes.c_void_p(target.ctypes.data), ctypes.c_size_t(target.nbytes)
        self._call("cuMemcpyDtoHAsync_v2", pointer, ctypes.c_uint64(address), size, ctypes.c_void_p(stream))

    def wait(self, stream: int) -> None:
        """Until the stream is done."""
        self._call("cuStreamSynchronize", ctypes.c_void_p(stream))

    def wait_for_all(self) -> None:
        """Until everything in every stream of the context is done."""
        self._call("cuCtxSynchronize")

    def event(self, stream: int) -> int:
        """A new timing event, recorded."""
        made = ctypes.c_void_p()
        self._call("cuEventCreate", ctypes.byref(made), ctypes.c_uint(_EVENT_DEFAULT))
        self._call("cuEventRecord", made, ctypes.c_void_p(stream))
        return int(made.value or 0)

    def elapsed_us(self, start: int, end: int) -> float:
        """Microseconds between two events."""
        self._call("cuEventSynchronize", ctypes.c_void_p(end))
        found = ctypes.c_float()
        self._call("cuEventElapsedTime", ctypes.byref(found), ctypes.c_void_p(start), ctypes.c_void_p(end))
        return 1e3 * float(found.value)

    def end_event(self, event: int) -> None:
        """Undo `event`."""
        self._call("cuEventDestroy_v2", ctypes.c_void_p(event))

    def capture(self, stream: int, work: Callable[[], None]) -> int:
        """Capture, instantiate, and drop the template."""
        template, ready = ctypes.c_void_p(), ctypes.c_void_p()
        self._call("cuStreamBeginCapture_v2", ctypes.c_void_p(stream), ctypes.c_int(_THREAD_LOCAL))
        try:
            work()
        finally:
            self._call("cuStreamEndCapture", ctypes.c_void_p(stream), ctypes.byref(template))
        try:
            self._call("cuGraphInstantiateWithFlags", ctypes.byref(ready), template, ctypes.c_ulonglong(0))
        finally:
            self._call("cuGraphDestroy", template)
        return int(ready.value or 0)

    def launch_graph(self, graph: int, stream: int) -> None:
        """Launch a graph."""
        self._call("cuGraphLaunch", ctypes.c_void_p(graph), ctypes.c_void_p(stream))

    def end_graph(self, graph: int) -> None:
        """Undo `capture`."""
        self._call("cuGraphExecDestroy", ctypes.c_void_p(graph))


@cache
def cuda() -> DriverCuda:
    """The first GPU of this machine; raises MachineError where there is none."""
    return DriverCuda()


class Event:
    """A recorded CUDA event, freed with the object."""

    def __init__(self, cuda: Cuda, stream: int) -> None:
        self._cuda, self.handle = cuda, cuda.event(stream)

    def __del__(self) -> None:
        handle, self.handle = getattr(self, "handle", 0), 0
        if handle:
            self._cuda.end_event(handle)


class DeviceBuffer:
    """A C-contiguous array on the device of any numpy type, which torch, CuPy and PyCUDA read where it lies."""

    def __init__(self, cuda: Cuda, shape: tuple[int, ...], dtype: str) -> None:
        self._cuda, self.shape, self.dtype = cuda, tuple(shape), np.dtype(dtype)
        self.nbytes = int(np.prod(self.shape, dtype=np.int64)) * self.dtype.itemsize
        self.address = cuda.alloc(self.nbytes)

    def __del__(self) -> None:
        address, self.address = getattr(self, "address", 0), 0
        if address:
            self._cuda.free(address)

    @property
    def __cuda_array_interface__(self) -> dict[str, object]:
        """Version 3 of numba's protocol; the work on it is done when it is handed out."""
        return {
            "shape": self.shape, "typestr": self.dtype.str, "data": (self.address, False), "strides": None, "version": 3,
        }  # fmt: skip


def view(array: Any, name: str) -> tuple[int, tuple[int, ...], np.dtype[Any]]:
    """Address, shape and type of an array on the device; raises InputError for others and for strided ones."""
    found = getattr(array, "__cuda_array_interface__", None)
    if found is None:
        raise InputError(
            f"input {name!r} is a {type(array).__name__}, needed an array: numpy on the host, or on the device torch, CuPy or "
            "PyCUDA (anything with __cuda_array_interface__)."
        )
    shape, dtype, strides = tuple(found["shape"]), np.dtype(found["typestr"]), found.get("strides")
    if strides is not None:
        expected = dtype.itemsize
        for size, step in zip(reversed(shape), reversed(strides), strict=True):
            if size != 1 and step != expected:
                raise InputError(f"input {name!r} is not contiguous in memory. Make it so before the call.")
            expected *= size
    return int(found["data"][0]), shape, dtype

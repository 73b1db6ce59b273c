"""The few driver calls that a launch needs, by ctypes: for scripts that launch cubins which belong to no node."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any


class _Attribute(ctypes.Structure):
    _fields_ = [("id", ctypes.c_int), ("pad", ctypes.c_int), ("value", ctypes.c_uint32 * 16)]


class _Config(ctypes.Structure):
    _fields_ = [
        ("grid", ctypes.c_uint * 3), ("block", ctypes.c_uint * 3), ("shared", ctypes.c_uint), ("stream", ctypes.c_void_p),
        ("attributes", ctypes.POINTER(_Attribute)), ("count", ctypes.c_uint),
    ]  # fmt: skip


class Driver:
    """The few driver calls that a launch needs."""

    def __init__(self) -> None:
        self.cuda = ctypes.CDLL("libcuda.so.1")

    def check(self, status: int, what: str) -> None:
        """Raise on an error code."""
        if status:
            text = ctypes.c_char_p()
            self.cuda.cuGetErrorString(status, ctypes.byref(text))
            raise RuntimeError(f"{what}: {text.value.decode() if text.value else status}")

    def load(self, image: bytes) -> ctypes.c_void_p:
        """A module."""
        module = ctypes.c_void_p()
        self.check(self.cuda.cuModuleLoadData(ctypes.byref(module), image), "cuModuleLoadData")
        return module

    def function(self, module: ctypes.c_void_p, entry: str, shared: int) -> ctypes.c_void_p:
        """An entry, allowed to use `shared` bytes of dynamic shared memory."""
        function = ctypes.c_void_p()
        self.check(self.cuda.cuModuleGetFunction(ctypes.byref(function), module, entry.encode()), entry)
        if shared > 48 * 1024:
            self.check(self.cuda.cuFuncSetAttribute(function, 8, ctypes.c_int(shared)), "dynamic shared memory")
        return function

    def clusters(self, function: ctypes.c_void_p, op: dict[str, Any]) -> int:
        """Clusters of a launch that the device runs at once."""
        attribute = _Attribute()
        attribute.id = 4
        attribute.value[0], attribute.value[1], attribute.value[2] = op["cluster"], 1, 1
        grid = (ctypes.c_uint * 3)(op["cluster"] * 1024, 1, 1)
        config = _Config(grid, (ctypes.c_uint * 3)(*op["block"]), op["shared"], None, ctypes.pointer(attribute), 1)
        count = ctypes.c_int()
        self.check(
            self.cuda.cuOccupancyMaxActiveClusters(ctypes.byref(count), function, ctypes.byref(config)), "occupancy"
        )
        return count.value

    def launch(
        self, function: ctypes.c_void_p, op: dict[str, Any], grid: Sequence[int], values: Sequence[Any], stream: int
    ) -> None:
        """Launch on a stream; values are ctypes numbers."""
        attributes = (_Attribute * 2)()
        count = 0
        if op["cluster"] > 1:
            attributes[count].id = 4
            attributes[count].value[0], attributes[count].value[1], attributes[count].value[2] = op["cluster"], 1, 1
            count += 1
        if op.get("dependent"):
            attributes[count].id, attributes[count].value[0] = 6, 1
            count += 1
        config = _Config(
            (ctypes.c_uint * 3)(*grid), (ctypes.c_uint * 3)(*op["block"]), op["shared"], stream, attributes, count
        )
        pointers = (ctypes.c_void_p * len(values))(*[ctypes.addressof(value) for value in values])
        self.check(self.cuda.cuLaunchKernelEx(ctypes.byref(config), function, pointers, None), "launch")

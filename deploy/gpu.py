"""Which GPU this machine has, asked of the driver library alone: no CUDA toolkit, no torch."""

from __future__ import annotations

import ctypes
from typing import NamedTuple

from sparsedeploy.devices import DEVICES, Device

_SM_COUNT, _MAJOR, _MINOR = 16, 75, 76  # CUdevice_attribute, cuda.h


class Gpu(NamedTuple):
    """The first CUDA device."""

    name: str
    sm: int
    """Compute capability times ten."""
    sm_count: int


def first_gpu() -> Gpu | None:
    """The first GPU that the driver shows; None without a driver or a GPU."""
    try:
        cuda = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return None
    device = ctypes.c_int()
    if cuda.cuInit(0) != 0 or cuda.cuDeviceGet(ctypes.byref(device), 0) != 0:
        return None
    name = ctypes.create_string_buffer(128)
    cuda.cuDeviceGetName(name, 128, device)
    values = []
    for key in (_MAJOR, _MINOR, _SM_COUNT):
        value = ctypes.c_int()
        if cuda.cuDeviceGetAttribute(ctypes.byref(value), key, device) != 0:
            return None
        values.append(value.value)
    return Gpu(name.value.decode("utf-8", "replace"), 10 * values[0] + values[1], values[2])


def closest(gpu: Gpu) -> Device | None:
    """The device row for a GPU: same compute capability, closest number of SMs; None when we have no such row."""
    rows = [device for device in DEVICES if device.sm == gpu.sm]
    return min(rows, key=lambda device: abs(device.sm_count - gpu.sm_count), default=None)

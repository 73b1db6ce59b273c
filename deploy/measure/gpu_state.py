"""Clocks, temperature and company of the GPU, from NVML through ctypes: quick enough to ask between two rounds of a bench."""

from __future__ import annotations

import contextlib
import ctypes
import os
from typing import Any, NamedTuple, Protocol

from sparsedeploy.record import Record

_SM_CLOCK, _MEMORY_CLOCK, _GPU_TEMPERATURE, _TOO_SMALL = 1, 2, 0, 7  # nvml.h
_THROTTLE = {
    0x004: "software power cap", 0x008: "hardware slowdown", 0x020: "software thermal slowdown",
    0x040: "hardware thermal slowdown", 0x080: "power brake",
}  # fmt: skip
SEVERE = frozenset({"hardware slowdown", "software thermal slowdown", "hardware thermal slowdown", "power brake"})
"""Reasons that make times not the GPU's own; a power cap alone is how a large GPU runs, unless the clock falls."""


class GpuState(Record):
    """The GPU at one moment; None for what it does not tell."""

    sm_mhz: int | None = None
    memory_mhz: int | None = None
    temperature_c: int | None = None
    power_w: float | None = None
    utilisation: int | None = None
    """Per cent of the last sample period in which a kernel ran."""
    processes: int | None = None
    """Processes with a CUDA context on it."""
    throttle: tuple[str, ...] = ()
    """Why its clocks are held down."""


class Probe(Protocol):
    """Where states come from."""

    def read(self) -> GpuState | None:
        """The state now; None on a machine without NVML (Jetson before JetPack 6)."""


class NoProbe:
    """A machine that tells nothing."""

    def read(self) -> GpuState | None:
        """Nothing is known."""
        return None


class _Utilisation(ctypes.Structure):
    _fields_ = [("gpu", ctypes.c_uint), ("memory", ctypes.c_uint)]


class _Process(ctypes.Structure):
    _fields_ = [
        ("pid", ctypes.c_uint), ("memory", ctypes.c_ulonglong), ("instance", ctypes.c_uint), ("compute", ctypes.c_uint)
    ]  # fmt: skip


class Software(NamedTuple):
    """What NVML knows of the installation."""

    driver: str
    memory_bytes: int | None


class Nvml:
    """NVML's view of the first CUDA device; raises OSError without the library or such a device."""

    def __init__(self) -> None:
        self._nvml = ctypes.CDLL("libnvidia-ml.so.1")
        if self._nvml.nvmlInit_v2() != 0:
            raise OSError("NVML does not start")
        self._device = ctypes.c_void_p()
        bus = _bus_id()
        # By bus: NVML counts all devices, CUDA those that CUDA_VISIBLE_DEVICES leaves, in an order of its own.
        found = (
            self._nvml.nvmlDeviceGetHandleByPciBusId_v2(bus, ctypes.byref(self._device))
            if bus
            else self._nvml.nvmlDeviceGetHandleByIndex_v2(0, ctypes.byref(self._device))
        )
        if found != 0:
            raise OSError("NVML does not know the CUDA device")

    def read(self) -> GpuState:
        """The state now."""
        power = self._number("nvmlDeviceGetPowerUsage")
        rates = _Utilisation()
        busy = self._call("nvmlDeviceGetUtilizationRates", ctypes.byref(rates))
        return GpuState(
            sm_mhz=self._number("nvmlDeviceGetClockInfo", _SM_CLOCK),
            memory_mhz=self._number("nvmlDeviceGetClockInfo", _MEMORY_CLOCK),
            temperature_c=self._number("nvmlDeviceGetTemperature", _GPU_TEMPERATURE),
            power_w=None if power is None else power / 1e3,
            utilisation=rates.gpu if busy else None,
            processes=self._processes(),
            throttle=self._throttle(),
        )

    def software(self) -> Software:
        """Driver version and memory of the device."""
        text = ctypes.create_string_buffer(96)
        known = self._nvml.nvmlSystemGetDriverVersion(text, 96) == 0
        memory = (ctypes.c_ulonglong * 3)()
        sized = self._call("nvmlDeviceGetMemoryInfo", memory)
        return Software(text.value.decode("ascii", "replace") if known else "", memory[0] if sized else None)

    def _call(self, name: str, *arguments: Any) -> bool:
        function = getattr(self._nvml, name, None)
        return function is not None and function(self._device, *arguments) == 0

    def _number(self, name: str, *arguments: int) -> int | None:
        value = ctypes.c_uint()
        return value.value if self._call(name, *arguments, ctypes.byref(value)) else None

    def _throttle(self) -> tuple[str, ...]:
        bits = ctypes.c_ulonglong()
        if not self._call("nvmlDeviceGetCurrentClocksThrottleReasons", ctypes.byref(bits)):
            return ()
        return tuple(text for bit, text in _THROTTLE.items() if bits.value & bit)

    def _processes(self) -> int | None:
        """Others' contexts; our own process is left out where its number means the same inside and outside a container."""
        function = getattr(self._nvml, "nvmlDeviceGetComputeRunningProcesses_v3", None)
        if function is None:
            return None
        found, count = (_Process * 64)(), ctypes.c_uint(64)
        status = function(self._device, ctypes.byref(count), found)
        if status == _TOO_SMALL:
            return count.value
        return sum(entry.pid != os.getpid() for entry in found[: count.value]) if status == 0 else None


def _bus_id() -> bytes:
    """PCI address of CUDA's first device; empty where the driver is not there."""
    with contextlib.suppress(OSError):
        cuda = ctypes.CDLL("libcuda.so.1")
        device, text = ctypes.c_int(), ctypes.create_string_buffer(32)
        if (
            cuda.cuInit(0) == 0
            and cuda.cuDeviceGet(ctypes.byref(device), 0) == 0
            and cuda.cuDeviceGetPCIBusId(text, 32, device) == 0
        ):
            return text.value
    return b""


def probe() -> Probe:
    """NVML where it is there, else a probe that knows nothing."""
    try:
        return Nvml()
    except OSError:
        return NoProbe()

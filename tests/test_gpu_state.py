"""NVML through a library that is not there: what is read, what is None, and whose processes are counted."""

from __future__ import annotations

import ctypes
import os
from typing import Any

import pytest

from sparsedeploy.measure import gpu_state
from sparsedeploy.measure.gpu_state import GpuState, NoProbe, Nvml, probe


class FakeNvml:
    """Functions of libnvidia-ml.so.1 and libcuda.so.1 by name; what is not here, an old library lacks."""

    def __init__(self, **replaced: Any) -> None:
        self.asked: list[bytes] = []
        self.pids = [4242]
        functions = {
            "nvmlInit_v2": lambda: 0,
            "nvmlDeviceGetHandleByPciBusId_v2": self.by_bus,
            "nvmlDeviceGetHandleByIndex_v2": lambda index, device: 0,
            "nvmlDeviceGetClockInfo": lambda device, kind, out: self.put(out, {1: 1755, 2: 3201}[kind]),
            "nvmlDeviceGetTemperature": lambda device, kind, out: self.put(out, 41),
            "nvmlDeviceGetPowerUsage": lambda device, out: self.put(out, 312_500),
            "nvmlDeviceGetUtilizationRates": self.rates,
            "nvmlDeviceGetCurrentClocksThrottleReasons": lambda device, out: self.put(out, 0x44 | 0x1),
            "nvmlDeviceGetComputeRunningProcesses_v3": self.processes,
            "nvmlSystemGetDriverVersion": self.driver,
            "nvmlDeviceGetMemoryInfo": self.memory,
            "cuInit": lambda flags: 0,
            "cuDeviceGet": lambda device, index: 0,
            "cuDeviceGetPCIBusId": self.bus,
            **replaced,
        }
        for name, function in functions.items():
            if function is not None:
                setattr(self, name, function)

    def put(self, out: Any, value: int) -> int:
        out._obj.value = value
        return 0

    def by_bus(self, bus: bytes, device: Any) -> int:
        self.asked.append(bus)
        return 0

    def bus(self, text: Any, length: int, device: Any) -> int:
        text.value = b"0000:1b:00.0"
        return 0

    def rates(self, device: Any, out: Any) -> int:
        out._obj.gpu, out._obj.memory = 7, 3
        return 0

    def processes(self, device: Any, count: Any, entries: Any) -> int:
        for entry, pid in zip(entries, self.pids, strict=False):
            entry.pid = pid
        count._obj.value = len(self.pids)
        return 0

    def driver(self, text: Any, length: int) -> int:
        text.value = b"580.95"
        return 0

    def memory(self, device: Any, sizes: Any) -> int:
        sizes[0] = 150 << 30
        return 0


def with_library(monkeypatch: pytest.MonkeyPatch, library: Any) -> None:
    def opened(name: str) -> Any:
        if library is None:
            raise OSError(f"{name}: cannot open shared object file")
        return library

    monkeypatch.setattr(ctypes, "CDLL", opened)


def test_everything_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    library = FakeNvml()
    with_library(monkeypatch, library)
    found = Nvml()
    assert library.asked == [b"0000:1b:00.0"]
    assert found.read() == GpuState(
        sm_mhz=1755, memory_mhz=3201, temperature_c=41, power_w=312.5, utilisation=7, processes=1,
        throttle=("software power cap", "hardware thermal slowdown"),
    )  # fmt: skip
    assert found.software() == ("580.95", 150 << 30)
    assert set(found.read().throttle) & gpu_state.SEVERE == {"hardware thermal slowdown"}


def test_our_own_process_is_not_company(monkeypatch: pytest.MonkeyPatch) -> None:
    library = FakeNvml()
    library.pids = [4242, os.getpid(), 4243]
    with_library(monkeypatch, library)
    assert Nvml().read().processes == 2


def test_what_a_device_does_not_tell_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuses(*_: Any) -> int:
        return 3  # NVML_ERROR_NOT_SUPPORTED

    names = [name for name in vars(FakeNvml()) if name.startswith("nvmlDeviceGet") and "Handle" not in name]
    with_library(monkeypatch, FakeNvml(**dict.fromkeys(names, refuses)))
    assert Nvml().read() == GpuState()
    with_library(monkeypatch, FakeNvml(**dict.fromkeys(names, None)))  # an older library lacks the functions
    assert Nvml().read() == GpuState()
    assert Nvml().software() == ("580.95", None)


def test_more_processes_than_there_is_room_for(monkeypatch: pytest.MonkeyPatch) -> None:
    def too_many(device: Any, count: Any, entries: Any) -> int:
        count._obj.value = 70
        return 7

    with_library(monkeypatch, FakeNvml(nvmlDeviceGetComputeRunningProcesses_v3=too_many))
    assert Nvml().read().processes == 70


def test_without_the_library_nothing_is_known(monkeypatch: pytest.MonkeyPatch) -> None:
    with_library(monkeypatch, None)
    found = probe()
    assert isinstance(found, NoProbe)
    assert found.read() is None
    with_library(monkeypatch, FakeNvml(nvmlInit_v2=lambda: 9))
    assert isinstance(probe(), NoProbe)
    with_library(monkeypatch, FakeNvml(nvmlDeviceGetHandleByPciBusId_v2=lambda bus, device: 6))
    assert isinstance(probe(), NoProbe)

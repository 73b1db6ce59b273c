"""The GPU of this machine, asked of a driver that is not here: missing, broken, and one that answers."""

from __future__ import annotations

import ctypes
from typing import Any

import pytest

from sparsedeploy import gpu
from sparsedeploy.devices import DEVICES
from sparsedeploy.gpu import Gpu, closest, first_gpu


class Driver:
    """libcuda.so.1 as far as it is used."""

    def __init__(self, init: int = 0, count: int = 1, attribute: int = 0) -> None:
        self.init, self.count, self.attribute = init, count, attribute

    def cuInit(self, flags: int) -> int:  # noqa: N802
        return self.init

    def cuDeviceGet(self, device: Any, ordinal: int) -> int:  # noqa: N802
        return 0 if ordinal < self.count else 101

    def cuDeviceGetName(self, name: Any, size: int, device: Any) -> int:  # noqa: N802
        name.value = b"NVIDIA A100-SXM4-80GB"
        return 0

    def cuDeviceGetAttribute(self, value: Any, key: int, device: Any) -> int:  # noqa: N802
        value._obj.value = {16: 108, 75: 8, 76: 0}[key]
        return self.attribute


def with_driver(monkeypatch: pytest.MonkeyPatch, driver: Driver | None) -> Gpu | None:
    def load(name: str) -> Driver:
        assert name == "libcuda.so.1"
        if driver is None:
            raise OSError("libcuda.so.1: cannot open shared object file")
        return driver

    monkeypatch.setattr(ctypes, "CDLL", load)
    return first_gpu()


def test_no_driver(monkeypatch: pytest.MonkeyPatch) -> None:
    assert with_driver(monkeypatch, None) is None


@pytest.mark.parametrize("driver", [Driver(init=100), Driver(count=0), Driver(attribute=1)])
def test_a_driver_without_a_gpu(driver: Driver, monkeypatch: pytest.MonkeyPatch) -> None:
    assert with_driver(monkeypatch, driver) is None


def test_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    found = with_driver(monkeypatch, Driver())
    assert found == Gpu("NVIDIA A100-SXM4-80GB", 80, 108)
    row = closest(found)
    assert row is not None
    assert row.name == "a100"


def test_every_device_is_closest_to_itself() -> None:
    for device in DEVICES:
        found = closest(Gpu("itself", device.sm, device.sm_count))
        assert found is not None
        assert (found.sm, found.sm_count) == (device.sm, device.sm_count)


def test_the_number_of_sms_decides_between_equals() -> None:
    for sm in {device.sm for device in DEVICES}:
        rows = sorted(device.sm_count for device in DEVICES if device.sm == sm)
        found = closest(Gpu("larger than all", sm, rows[-1] + 100))
        assert found is not None
        assert found.sm_count == rows[-1]


def test_an_unknown_architecture_has_no_row() -> None:
    assert closest(Gpu("a Fermi", 20, 16)) is None


def test_this_machine_answers_without_raising() -> None:
    found = gpu.first_gpu()
    assert found is None or (found.sm >= 50 and found.sm_count > 0)

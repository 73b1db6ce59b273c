"""The device table: names, ceilings, and throughput curves that predictions can stand on."""

from __future__ import annotations

import re
from itertools import pairwise

import pytest

from sparsedeploy.devices import DEFAULT, DEVICES, Device, Throughput, find
from sparsedeploy.errors import InputError

each_device = pytest.mark.parametrize("device", DEVICES, ids=lambda device: device.name)


def test_names_are_unique_and_found_in_any_case() -> None:
    assert len({device.name for device in DEVICES}) == len(DEVICES)
    for device in DEVICES:
        assert find(device.name.upper()) is device
    assert find(DEFAULT).name == "a100"


def test_unknown_device_is_an_input_error_that_lists_the_known() -> None:
    with pytest.raises(InputError) as caught:
        find("gameboy")
    text = str(caught.value)
    assert "gameboy" in text
    assert all(device.name in text for device in DEVICES)
    assert "\n" not in text


@each_device
def test_ceilings_are_positive_and_consistent(device: Device) -> None:
    assert min(device.fp32_tflops, device.bandwidth_gbs, device.l2_mb, device.shared_kb_per_block) > 0
    assert device.peak_tflops("fp16") >= device.peak_tflops("fp32") == device.fp32_tflops
    for precision in ("fp32", "fp16"):
        ridge_time = device.peak_tflops(precision) * 1e12 / (device.bandwidth_gbs * 1e9)
        assert device.ridge_point(precision) == pytest.approx(ridge_time)
    assert device.tensorrt
    assert all(re.search(r"\d+\.\d+", release) for release in device.tensorrt)
    assert device.sparse_24 == (device.sm >= 80)


@each_device
def test_sparse_throughput_passes_through_its_points(device: Device) -> None:
    for sparsity, tflops in device.throughput.sparse_points:
        assert device.throughput.sparse_tflops(sparsity) == pytest.approx(tflops)
        assert tflops < device.fp32_tflops


@each_device
def test_more_zeros_never_take_longer(device: Device) -> None:
    densities = [i / 1000 for i in range(1, 1001)]
    times = [density / device.throughput.sparse_tflops(1 - density) for density in densities]
    assert all(fewer <= more for fewer, more in pairwise(times))
    assert times[0] > 0


@each_device
def test_sparse_throughput_is_finite_without_nonzeros(device: Device) -> None:
    assert 0 < device.throughput.sparse_tflops(1.0) < device.fp32_tflops


def test_time_between_the_points_is_linear_in_density() -> None:
    curve = Throughput(source="test", dense_tflops={"fp32": 1.0}, sparse_points=((0.9, 2.0), (0.98, 0.8)))
    middle = (0.1 / 2.0 + 0.02 / 0.8) / 2
    assert 0.06 / curve.sparse_tflops(0.94) == pytest.approx(middle)


def test_every_throughput_names_its_source() -> None:
    for device in DEVICES:
        assert re.search(r"published|measured|scaled", device.throughput.source), device.name

"""The roofline against counts by enumeration, hand-computed values, limits, and the ridge points the paper prints.

The printed digits of the paper's Tables 1 to 3 were not at hand: no test here claims to reproduce them.
"""

from __future__ import annotations

import subprocess
import sys
from itertools import product
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sparsedeploy.devices import DEVICES, Device, find
from sparsedeploy.layer import ELEMENT_BYTES, Geometry, Precision
from sparsedeploy.roofline import (
    Work,
    best_dense_bound,
    bound_us,
    crossover,
    dense_us,
    dense_work,
    gain_limit,
    has_winograd,
    sparse_work,
    winograd_work,
)

SCRIPT = Path(__file__).resolve().parents[1] / "scripts" / "reproduce_tables.py"


def same(oc: int, ic: int, size: int, k: int = 3) -> Geometry:
    pad = k // 2
    return Geometry(oc=oc, ic=ic, kh=k, kw=k, h=size, w=size, pads=(pad, pad, pad, pad))


ODD = Geometry(oc=6, ic=4, kh=3, kw=2, h=7, w=9, stride=(2, 1), pads=(1, 0, 0, 1), dilation=(1, 2), group=2)

geometries = st.builds(
    lambda oc, ic, k, h, w, stride: Geometry(
        oc=oc, ic=ic, kh=k, kw=k, h=h, w=w, stride=(stride, stride), pads=(k // 2, k // 2, k // 2, k // 2)
    ),
    st.integers(1, 512),
    st.integers(1, 512),
    st.sampled_from([1, 3, 5, 7]),
    st.integers(1, 256),
    st.integers(1, 256),
    st.sampled_from([1, 2]),
)


@pytest.mark.parametrize("precision", ["fp32", "fp16"])
@pytest.mark.parametrize("geometry", [same(5, 3, 6), ODD], ids=["same", "odd"])
def test_dense_work_equals_an_enumeration_of_taps_and_elements(geometry: Geometry, precision: Precision) -> None:
    batch = 3
    oc, ic, kh, kw = geometry.weight_shape
    rows = range(-geometry.pads[0], geometry.h + geometry.pads[2] - geometry.dilation[0] * (kh - 1), geometry.stride[0])
    cols = range(-geometry.pads[1], geometry.w + geometry.pads[3] - geometry.dilation[1] * (kw - 1), geometry.stride[1])
    taps = sum(1 for _ in product(range(batch), range(oc), rows, cols, range(ic), range(kh), range(kw)))
    elements = batch * (geometry.ic * geometry.h * geometry.w + oc * len(rows) * len(cols)) + oc * ic * kh * kw
    work = dense_work(geometry, batch, precision)
    assert work.flops == 2 * taps
    assert work.bytes == ELEMENT_BYTES[precision] * elements


def test_hand_computed_work_of_the_papers_layer() -> None:
    """IC=32, OC=64, 256x256, N=32, 3x3: in and out are 64 MiB of fp32 per 8 channels."""
    geometry = same(64, 32, 256)
    dense = dense_work(geometry, 32, "fp32")
    assert dense.flops == 77_309_411_328
    assert dense.bytes == 268_435_456 + 536_870_912 + 73_728
    assert dense.intensity == pytest.approx(95.9912, abs=5e-5)
    winograd = winograd_work(geometry, 32, "fp32")
    assert winograd == Work(flops=38_654_705_664, bytes=dense.bytes)
    sparse = sparse_work(geometry, 1843, 32, "fp32")
    assert sparse.flops == 2 * 1843 * 65_536 * 32
    assert sparse.bytes == 268_435_456 + 536_870_912 + 4 * 1843
    assert sparse.intensity == pytest.approx(9.59887, abs=5e-5)


def test_packed_word_stays_four_bytes_in_fp16() -> None:
    full, half = (sparse_work(same(8, 8, 16), 100, 1, precision) for precision in ("fp32", "fp16"))
    assert full.flops == half.flops
    assert full.bytes - half.bytes == 2 * (8 * 256 + 8 * 256)


def test_sparse_work_without_zeros_is_dense_work_in_fp32() -> None:
    weights = ODD.oc * (ODD.ic // ODD.group) * ODD.kh * ODD.kw
    assert sparse_work(ODD, weights, 2, "fp32") == dense_work(ODD, 2, "fp32")


def test_csr_words_are_counted_when_asked() -> None:
    packed, csr = (sparse_work(ODD, 10, 1, "fp32", bytes_per_nonzero=size) for size in (4, 8))
    assert csr.bytes - packed.bytes == 40


@pytest.mark.parametrize(
    "change",
    [{"kh": 1}, {"kw": 5}, {"stride": (2, 2)}, {"stride": (1, 2)}, {"dilation": (2, 2)}, {"group": 4}],
    ids=str,
)
def test_winograd_only_for_plain_3x3(change: dict[str, object]) -> None:
    plain = same(8, 8, 16)
    assert has_winograd(plain)
    other = plain.model_copy(update=change)
    assert winograd_work(other, 1, "fp32") is None
    assert best_dense_bound(other, find("a100"), "fp32", 1) == bound_us(dense_work(other, 1, "fp32"), 19.5, 2000)


def test_bound_takes_the_slower_resource() -> None:
    assert bound_us(Work(flops=2e6, bytes=1e3), 1.0, 1.0) == (2.0, "compute")
    assert bound_us(Work(flops=1e6, bytes=3e3), 1.0, 1.0) == (3.0, "memory")
    assert bound_us(Work(flops=1e6, bytes=1e3), 1.0, 1.0).resource == "compute"


@pytest.mark.parametrize("device", DEVICES, ids=lambda device: device.name)
def test_resource_changes_at_the_ridge_point(device: Device) -> None:
    for precision in ("fp32", "fp16"):
        ridge = device.ridge_point(precision)
        sides = [
            bound_us(Work(flops=ridge * factor * 1e6, bytes=1e6), device.peak_tflops(precision), device.bandwidth_gbs)
            for factor in (0.999, 1.001)
        ]
        assert [side.resource for side in sides] == ["memory", "compute"]


def test_dense_prediction_uses_the_throughput_and_respects_bandwidth() -> None:
    nano = find("jetson-nano")
    compute = dense_us(same(48, 48, 64), nano, "fp32", 1)
    assert compute.us == pytest.approx(2 * 48 * 48 * 9 * 4096 / 0.115e6)
    assert compute.resource == "compute"
    thin = same(8, 2, 64, k=1)
    memory = dense_us(thin, nano, "fp32", 1)
    assert memory.us == pytest.approx(4 * (10 * 4096 + 16) / 25.6e3)
    assert memory.resource == "memory"


@settings(max_examples=200, deadline=None)
@given(
    geometries,
    st.sampled_from(DEVICES),
    st.sampled_from(["fp32", "fp16"]),
    st.integers(1, 64),
    st.floats(1.0, 4.0),
    st.sampled_from([4, 6, 8]),
)
def test_at_the_crossover_both_bounds_are_equal(
    geometry: Geometry, device: Device, precision: Precision, batch: int, reduction: float, word: int
) -> None:
    """Found by evaluating the bounds themselves, not the closed form under test."""
    weights = geometry.oc * geometry.ic * geometry.kh * geometry.kw
    dense = best_dense_bound(geometry, device, precision, batch, reduction).us
    found = crossover(geometry, device, precision, batch, reduction, word)

    def sparse(nnz: float) -> float:
        work = sparse_work(geometry, nnz, batch, precision, word)
        return bound_us(work, device.peak_tflops(precision), device.bandwidth_gbs).us

    if found is None:
        assert sparse(min(1, weights)) > dense * (1 - 1e-9)
    elif found == 0:
        assert sparse(weights) <= dense * (1 + 1e-9)
    else:
        nnz = weights * (1 - found)
        assert sparse(min(nnz, weights)) == pytest.approx(dense, rel=1e-9)
        assert sparse(min(weights, nnz * 1.01)) > dense * (1 - 1e-9)
        assert sparse(nnz * 0.99) <= dense * (1 + 1e-9)


@pytest.mark.parametrize("bandwidth", [1500.0, 2000.0])
@pytest.mark.parametrize(("reduction", "expected"), [(1.5, 1 / 3), (2.0, 0.5), (2.25, 5 / 9)])
def test_compute_bound_crossover_is_one_minus_one_over_reduction(
    bandwidth: float, reduction: float, expected: float
) -> None:
    a100 = find("a100").model_copy(update={"bandwidth_gbs": bandwidth})
    assert crossover(same(128, 128, 256), a100, "fp32", 32, reduction) == pytest.approx(expected, abs=1e-12)


def test_memory_bound_crossover_is_set_by_the_word() -> None:
    """A 1x1 with few channels on an Orin Nano (ridge 73.5) is memory-bound dense or sparse."""
    thin, device = same(8, 8, 64, k=1), find("orin-nano")
    assert best_dense_bound(thin, device, "fp32", 1).resource == "memory"
    assert crossover(thin, device, "fp32", 1) == pytest.approx(0, abs=1e-9)
    assert crossover(thin, device, "fp16", 1) == pytest.approx(0.5, abs=1e-9)
    assert crossover(thin, device, "fp32", 1, bytes_per_nonzero=8) == pytest.approx(0.5, abs=1e-9)


def test_winograd_that_becomes_memory_bound_lowers_the_crossover() -> None:
    """Direct over the ridge, Winograd under it: sparse need only leave the compute roof, at 1 - ridge / intensity."""
    device, geometry = find("orin-nano"), same(44, 44, 128)
    intensity = dense_work(geometry, 64, "fp32").intensity
    ridge = device.ridge_point()
    assert ridge < intensity < 2 * ridge
    assert crossover(geometry, device, "fp32", 64) == pytest.approx(1 - ridge / intensity, rel=1e-3)


def test_no_crossover_where_not_one_nonzero_fits() -> None:
    """One fp16 weight is two bytes, one packed word four."""
    lone = Geometry(oc=1, ic=1, kh=1, kw=1, h=4, w=4)
    assert crossover(lone, find("orin-nano"), "fp16", 1) is None
    assert crossover(lone, find("orin-nano"), "fp32", 1) == pytest.approx(0, abs=1e-9)


def test_crossover_rises_with_the_reduction() -> None:
    values = [crossover(same(64, 64, 56), find("a100"), "fp32", 32, reduction) or 0 for reduction in (1, 1.5, 2, 2.25)]
    assert values == sorted(values)
    assert values[0] < values[-1]


@pytest.mark.parametrize(
    ("device", "ridge"), [("a100", "9.75"), ("agx-orin", "25.98"), ("orin-nano", "73.53"), ("jetson-nano", "9.22")]
)
def test_ridge_points_to_the_printed_digit(device: str, ridge: str) -> None:
    assert f"{find(device).ridge_point():.2f}" == ridge


def test_gain_limit_is_intensity_over_reduction_and_ridge() -> None:
    nano = find("jetson-nano")
    geometry = same(24, 24, 256)
    # 2 * 9 * 24 * 24 / (4 * (24 + 24)) = 54 FLOP/byte; over 2 * 9.21875, weight bytes apart.
    assert gain_limit(geometry, nano, "fp32", 32) == pytest.approx(54 / (2 * 9.21875), rel=1e-4)
    assert gain_limit(same(48, 24, 256), nano, "fp32", 32) == pytest.approx(
        gain_limit(same(32, 32, 256), nano, "fp32", 32), rel=1e-4
    )
    memory_bound = gain_limit(same(8, 8, 64, k=1), find("orin-nano"), "fp32", 1)
    assert memory_bound == pytest.approx(1, rel=1e-2)


@settings(max_examples=100, deadline=None)
@given(geometries, st.sampled_from(DEVICES), st.floats(0, 1))
def test_no_sparsity_gains_more_than_the_limit(geometry: Geometry, device: Device, density: float) -> None:
    weights = geometry.oc * geometry.ic * geometry.kh * geometry.kw
    work = sparse_work(geometry, density * weights, 1, "fp32")
    gain = (
        best_dense_bound(geometry, device, "fp32", 1).us / bound_us(work, device.fp32_tflops, device.bandwidth_gbs).us
    )
    assert gain <= gain_limit(geometry, device, "fp32", 1) * (1 + 1e-9)


def test_wrong_arguments_are_refused() -> None:
    geometry = same(4, 4, 8)
    with pytest.raises(ValueError, match=r"nnz must be 0\.\.144"):
        sparse_work(geometry, 145, 1, "fp32")
    with pytest.raises(ValueError, match="nnz"):
        sparse_work(geometry, float("nan"), 1, "fp32")
    with pytest.raises(ValueError, match="batch 0"):
        dense_work(geometry, 0, "fp32")
    with pytest.raises(ValueError, match="output 0x0"):
        dense_work(Geometry(oc=1, ic=1, kh=3, kw=3, h=2, w=2), 1, "fp32")
    with pytest.raises(ValueError, match="reduction"):
        winograd_work(geometry, 1, "fp32", 0)


def test_script_prints_the_grids_of_these_formulas() -> None:
    command = [sys.executable, str(SCRIPT), "--oc", "24,48", "--ic", "24,32"]
    text = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    lines = [line.split() for line in text.splitlines()]
    assert ["64", "95.99", "48.00", "9.60", "7.68", "5.76", "3.84", "1.92"] in lines
    assert lines.count(["24", "50.0", "50.0"]) == 2
    assert ["24", "2.93", "3.35"] in lines
    assert "not at hand" in text

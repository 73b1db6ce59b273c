"""The cost model: monotone where it must be, near what was measured on the H200, never for a block that does not fit."""

from __future__ import annotations

from dataclasses import replace

import pytest

from sparsedeploy.devices import DEVICES, find
from sparsedeploy.layer import Geometry, Precision
from sparsedeploy.plugins.baked.choose import estimate, ranked
from sparsedeploy.plugins.baked.schedule import Combine, Schedule
from sparsedeploy.plugins.cost import H200, Work, ceilings, predict, resident, slots, time_us

BASE = Work(
    blocks=262, threads=384, registers=80, shared_bytes=50_000, instructions=4880, heaviest=4900, loads=575, pieces=1,
    fill_bytes=35e6, read_bytes=25.7e6, write_bytes=25.7e6,
)  # fmt: skip


@pytest.mark.parametrize(
    ("field", "factor"),
    [
        ("blocks", 2),
        ("heaviest", 2),
        ("loads", 8),
        ("fill_bytes", 8),
        ("write_bytes", 4),
        ("pieces", 16),
        ("threads", 2),
    ],
)
def test_more_work_never_takes_less_time(field: str, factor: int) -> None:
    more = replace(BASE, **{field: int(getattr(BASE, field) * factor)})
    assert time_us(more, H200)[0] >= time_us(BASE, H200)[0]


def test_registers_and_shared_memory_limit_the_blocks_of_an_sm() -> None:
    assert resident(BASE, H200) == 2
    assert resident(replace(BASE, registers=168), H200) == 1
    assert resident(replace(BASE, shared_bytes=200_000), H200) == 1
    assert resident(replace(BASE, shared_bytes=300_000), H200) == 0
    assert predict(replace(BASE, shared_bytes=300_000), H200).us > 1e8
    # 25 warps put 7 on one scheduler: 72 registers each, not 80.
    assert resident(replace(BASE, threads=800, registers=72), H200) == 1
    assert resident(replace(BASE, threads=800, registers=80), H200) == 0


def test_clusters_leave_some_sms_idle() -> None:
    # Read off an H200: 66 clusters of 2, 30 of 4, 15 of 8, one block to an SM.
    assert [slots(1, size, H200) for size in (1, 2, 4, 8)] == [132, 132, 120, 120]


MEASURED: tuple[tuple[int, int, int, dict[str, object], float], ...] = (
    # channels, side, N, schedule, us measured on an H200 (90 % zeros, fp32)
    (64, 56, 32, {"pixels": 384, "min_blocks": 2}, 23.9),
    (64, 56, 32, {"pixels": 768}, 24.7),
    (128, 28, 32, {"pixels": 768, "splits": 2, "combine": "cluster"}, 27.1),
    (128, 28, 32, {"pixels": 384}, 35.4),
    (128, 28, 1, {"pixels": 196, "channels": 32, "splits": 8, "combine": "cluster"}, 6.6),
    (256, 14, 32, {"pixels": 784, "channels": 32, "splits": 2, "combine": "cluster"}, 31.2),
    (256, 14, 32, {"pixels": 483, "channels": 52, "splits": 2, "combine": "cluster"}, 39.3),
    (256, 14, 1, {"pixels": 196, "channels": 16, "splits": 8, "combine": "cluster"}, 9.9),
    (512, 7, 32, {"pixels": 400, "channels": 64, "splits": 4, "combine": "cluster"}, 74.6),
    (512, 7, 1, {"pixels": 49, "channels": 32, "splits": 8, "combine": "cluster"}, 23.0),
)


@pytest.mark.parametrize(("channels", "side", "batch", "how", "us"), MEASURED)
def test_predictions_are_within_half_of_what_was_measured(
    channels: int, side: int, batch: int, how: dict[str, object], us: float
) -> None:
    g = Geometry(oc=channels, ic=channels, kh=3, kw=3, h=side, w=side, pads=(1, 1, 1, 1))
    schedule = replace(Schedule(g, "f32"), **how)  # type: ignore[arg-type]
    predicted = time_us(estimate(schedule, round(0.1 * 9 * channels**2), batch), H200)[0]
    assert us / 1.5 <= predicted <= us * 1.5


def test_every_device_has_ceilings_and_says_whose() -> None:
    combine: Combine = "none"
    assert combine == "none"
    for device in DEVICES:
        c = ceilings(device)
        assert c.sm_count == device.sm_count
        peak = c.sm_count * c.schedulers * 32 * 2 * c.clock_ghz / 1e3
        assert peak == pytest.approx(device.fp32_tflops, rel=0.02)
        assert (device.name == "h200") == (c.source == "measured on an H200")
    assert ceilings(find("jetson-nano")).gpcs == 1


@pytest.mark.parametrize(("oc", "precision"), [(64, "fp32"), (96, "fp32"), (128, "fp32"), (128, "fp16")])
def test_more_zeros_are_never_predicted_to_take_longer(oc: int, precision: Precision) -> None:
    g = Geometry(oc=oc, ic=32, kh=3, kw=3, h=256, w=256, pads=(1, 1, 1, 1))
    found = [
        ranked(g, precision, 32, round((1 - zeros) * oc * 32 * 9), H200, (90,), 1)[0][1] for zeros in (0.9, 0.94, 0.98)
    ]
    assert found == sorted(found, reverse=True)


def test_one_block_an_sm_with_one_stage_is_predicted_slower_than_three() -> None:
    # 32->64@256, N=32: 239 us at 94 % zeros in three blocks of four stages, 306 at 98 % in one block of one stage.
    g = Geometry(oc=64, ic=32, kh=3, kw=3, h=256, w=256, pads=(1, 1, 1, 1))
    base = Schedule(g, "f32", columns=32)
    single = replace(base, pixels=320, stage_channels=32, ring=2)
    three = replace(base, pixels=256, stage_channels=8, ring=4, min_blocks=3)
    assert time_us(estimate(single, 369, 32), H200)[0] > time_us(estimate(three, 1106, 32), H200)[0]

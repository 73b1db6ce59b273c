"""Probes of a device's ceilings, as far as they go without one."""

from __future__ import annotations

from pathlib import Path

import pytest
from measure_device import SIZES, STEPS, WARPS, as_profile, compared, from_fetch, prepare, probe

from sparsedeploy.devices import find
from sparsedeploy.errors import InputError
from sparsedeploy.plugins.assemble import assemble, ptx_version
from sparsedeploy.plugins.cost import H200


@pytest.mark.parametrize("arch", [53, 80, 90, 120])
def test_a_probe_assembles_without_spills_and_is_as_long_as_it_says(arch: int) -> None:
    made = assemble(probe(1024, 64, arch, ptx_version(arch)).encode(), arch)
    assert made.spill_bytes == 0
    longer = assemble(probe(2048, 64, arch, ptx_version(arch)).encode(), arch)
    assert len(longer.cubin) - len(made.cubin) > 1024 * 8


def test_a_probe_has_the_barriers_it_is_asked_for() -> None:
    assert probe(1024, 256, 90, "7.8").count("bar.sync 0;") == 1 + 3
    assert probe(1024, 0, 90, "7.8").count("bar.sync 0;") == 1


def test_prepare_writes_every_probe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("measure_device.SIZES", (64, 128))
    monkeypatch.setattr("measure_device.FLUSH", 256)
    prepare(tmp_path, 90)
    names = {path.name for path in tmp_path.iterdir()}
    assert names == {f"fetch_{count}_{step}.cubin" for count in (64, 128) for step in STEPS} | {"flush.cubin"}


def table() -> list[dict[str, float]]:
    """A device that fetches an instruction in 1.1 clocks from small code, 2.4 from 64 KB, 6 beyond."""
    price = {1024: 1.1, 2048: 1.2, 4096: 2.4, 8192: 2.5, 16384: 6.0}
    return [
        {"instructions": count, "step": step, "warps": warps, "first": 3.0, "warm": max(price[count], 1.125 * warps / 4)}
        for count in SIZES for step in STEPS for warps in WARPS
    ]  # fmt: skip


def test_what_the_cost_model_takes_comes_from_the_table() -> None:
    found = from_fetch(table())
    assert found == pytest.approx({"issue_share": 1 / 1.125, "near_clocks": 2.4, "far_clocks": 6.0})


def test_measured_numbers_are_printed_beside_those_assumed() -> None:
    result = {
        "device": "NVIDIA H200", "sm": 90, "sm_count": 132, "clock_ghz": 1.98, "l2_mb": 60, "shared_kb": 227, "hbm_tbs": 4.2,
        "l2_tbs": H200.l2_tbs / 2, "launch_us": H200.launch_us, **from_fetch(table()),
    }  # fmt: skip
    lines = compared(result, H200)
    assert any(line.startswith("l2_tbs") and line.endswith("-50%") for line in lines)
    assert any(line.startswith("hbm_tbs") and line.endswith("+0%") for line in lines)
    profile = as_profile(result, find("h200"))
    assert profile.ceilings["copy_gbs"] == pytest.approx(4200)
    with pytest.raises(InputError, match="sm_80"):
        as_profile(result, find("a100"))

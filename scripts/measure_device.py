"""Measure a device's ceilings for plugins/cost.py: copies, launches, clusters, and the price of straight-line code.

    python scripts/measure_device.py prepare FOLDER --arch 90     writes and assembles the probes (no GPU)
    python scripts/measure_device.py run FOLDER --out device.json     needs torch and a driver
        [--profile profile.json --target h200]     the ceilings as a device profile, which `tune --save-profile` can extend

Prints the measured ceilings beside those that plugins/cost.py assumes. The fetch probe runs n fmas with immediates between two clock reads, block barriers every `step` of them (0: none), over
several passes; the time of a pass is the block's last end minus its first start, so passes of different warps cannot
overlap. The first pass follows a kernel of 1 MB of other code. Clocks per instruction over the ideal (a warp instruction
per scheduler and clock) is the price of fetching.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import random
import re
import sys
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent))
from bench_device import time_us
from raw_driver import Driver

from sparsedeploy.devices import Device, find
from sparsedeploy.errors import InputError
from sparsedeploy.plugins.cost import H200, Ceilings
from sparsedeploy.profile import DeviceProfile

SIZES = (1024, 2048, 4096, 8192, 16384)
STEPS = (0, 64, 256, 1024)
WARPS = (1, 4, 8, 12, 16, 20, 24)
SUMS, INPUTS, PASSES, FLUSH = 32, 16, 3, 65536


def probe(count: int, step: int, arch: int, version: str) -> str:
    """PTX of entry `k`(clocks, sink, passes): `count` fmas a pass, a barrier every `step`."""
    draw = random.Random(1)
    lines = [f".version {version}", f".target sm_{arch}", ".address_size 64"]
    lines += [
        ".visible .entry k(.param .u64 clocks, .param .u64 sink, .param .u32 passes)",
        "{",
        f".reg .f32 %a<{SUMS}>; .reg .f32 %v<{INPUTS}>; .reg .u64 %c<2>; .reg .u64 %q<4>; .reg .u32 %r<8>; .reg .pred %p;",
        "ld.param.u64 %q0, [clocks]; ld.param.u64 %q1, [sink]; ld.param.u32 %r0, [passes];",
        "mov.u32 %r1, %tid.x; mov.u32 %r5, %ctaid.x; mov.u32 %r6, %ntid.x; mad.lo.u32 %r2, %r5, %r6, %r1;",
    ]
    lines += [f"cvt.rn.f32.u32 %v{i}, %r1; add.f32 %v{i}, %v{i}, 0f{0x3F800000 + i * 1000:08X};" for i in range(INPUTS)]
    lines += [f"mov.f32 %a{i}, 0f00000000;" for i in range(SUMS)]
    lines += ["mov.u32 %r3, 0;", "again:", "bar.sync 0;", "mov.u64 %c0, %clock64;"]
    for i in range(count):
        weight = 0x3D000000 + draw.randrange(1 << 20)
        lines.append(f"fma.rn.f32 %a{i % SUMS}, %v{draw.randrange(INPUTS)}, 0f{weight:08X}, %a{i % SUMS};")
        if step and i % step == step - 1 and i < count - 1:
            lines.append("bar.sync 0;")
    lines += [
        "mov.u64 %c1, %clock64;",
        "mad.lo.u32 %r4, %r3, 1048576, %r2; mul.wide.u32 %q2, %r4, 16; add.u64 %q2, %q0, %q2;",
        "st.global.v2.u64 [%q2], {%c0, %c1};",
        "add.u32 %r3, %r3, 1; setp.lt.u32 %p, %r3, %r0; @%p bra again;",
        "mov.f32 %v0, 0f00000000;",
        *[f"add.f32 %v0, %v0, %a{i};" for i in range(SUMS)],
        "mul.wide.u32 %q3, %r2, 4; add.u64 %q3, %q1, %q3; st.global.f32 [%q3], %v0;",
        "ret;",
        "}",
    ]
    return "\n".join(lines) + "\n"


def prepare(folder: Path, arch: int) -> None:
    """Write every probe as NAME.cubin."""
    from sparsedeploy.plugins.assemble import assemble_many, ptx_version

    folder.mkdir(parents=True, exist_ok=True)
    names = {f"fetch_{count}_{step}": (count, step) for count in SIZES for step in STEPS} | {"flush": (FLUSH, 0)}
    texts = [probe(count, step, arch, ptx_version(arch)).encode() for count, step in names.values()]
    for name, made in zip(names, assemble_many([(text, arch) for text in texts]), strict=True):
        (folder / f"{name}.cubin").write_bytes(made.cubin)
    print(f"{len(names)} probes in {folder}")


def run(folder: Path, out: Path | None, fetch: bool = True) -> dict[str, Any]:
    """Measure, print a table, write JSON (after each part, so that a run that is stopped leaves what it had)."""
    import torch

    one = torch.zeros(1, device="cuda")
    properties = torch.cuda.get_device_properties(0)
    for _ in range(3):  # clocks up
        _copy_tbs(1 << 28)
    result: dict[str, Any] = {
        "schema": 1,
        "device": properties.name,
        "sm": 10 * properties.major + properties.minor,
        "sm_count": properties.multi_processor_count,
        "clock_ghz": _clock_ghz(),
        "l2_mb": properties.L2_cache_size / 1e6,
        "shared_kb": getattr(properties, "shared_memory_per_block_optin", 0) / 1024,
        "hbm_tbs": _copy_tbs(1 << 28),
        "l2_tbs": _l2_tbs(),
        "launch_us": time_us(one.zero_).us,
    }
    print(json.dumps(result), flush=True)
    driver = Driver()
    result["clusters_at_once"] = _clusters(driver, (folder / "fetch_1024_0.cubin").read_bytes())
    _write(result, out)
    if fetch:
        rows = _fetch(driver, folder, properties.multi_processor_count)
        result |= {"fetch": rows, **from_fetch(rows)}
        _write(result, out)
    print("\n".join(compared(result, H200)))
    return result


def as_profile(result: dict[str, Any], device: Device) -> DeviceProfile:
    """The ceilings as a profile without points; raises InputError for another architecture's device."""
    if result["sm"] != device.sm:
        raise InputError(
            f"measured on {result['device']} (sm_{result['sm']}), --target {device.name} is sm_{device.sm}."
        )
    ceilings = {"copy_gbs": 1e3 * result["hbm_tbs"], "l2_copy_gbs": 1e3 * result["l2_tbs"]}
    ceilings |= {
        name: result[name]
        for name in ("clock_ghz", "launch_us", "issue_share", "near_clocks", "far_clocks")
        if name in result
    }
    return DeviceProfile(
        target=device.name, gpu=result["device"], sm=device.sm, sm_count=result["sm_count"], versions={},
        conditions="scripts/measure_device.py: copies, launches and straight-line code alone on the device",
        ceilings={name: round(value, 3) for name, value in ceilings.items()},
    )  # fmt: skip


def _write(result: dict[str, Any], out: Path | None) -> None:
    if out:
        out.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


def _clock_ghz() -> float:
    """The SM clock under load, by counting clocks of a spinning kernel against an event's time."""
    import torch

    torch.cuda._sleep(10_000_000)
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record()
    torch.cuda._sleep(50_000_000)
    end.record()
    end.synchronize()
    return 50_000_000 / (float(start.elapsed_time(end)) * 1e6)


def from_fetch(rows: list[dict[str, float]]) -> dict[str, float]:
    """What plugins/cost.py takes from the fetch table: issue_share, near_clocks and far_clocks."""

    def warm(count: int, warps: int) -> float:
        found = [row["warm"] for row in rows if row["instructions"] == count and row["warps"] == warps]
        return min(found)  # over the barrier distances: what code may choose

    return {
        "issue_share": max(1.0, 24 / 4) / warm(2048, 24),
        "near_clocks": warm(4096, 1),
        "far_clocks": warm(16384, 1),
    }


def compared(result: dict[str, Any], ceilings: Ceilings) -> list[str]:
    """A line for each number that the cost model assumes and this run measured."""
    lines = [f"{'':14s} measured  assumed ({ceilings.source})"]
    for name in ("sm_count", "clock_ghz", "hbm_tbs", "l2_tbs", "l2_mb", "shared_kb", "launch_us", "issue_share", "near_clocks", "far_clocks"):  # fmt: skip
        if name not in result:
            continue
        measured, assumed = float(result[name]), float(getattr(ceilings, name))
        lines.append(f"{name:14s} {measured:8.2f} {assumed:8.2f}  {measured / assumed - 1:+.0%}")
    return lines


def _copy_tbs(elements: int) -> float:
    import torch

    source = torch.randn(elements, device="cuda")
    target = torch.empty_like(source)
    us = time_us(lambda: torch.add(source, 1.0, out=target), 5)[0]
    return 2 * elements * 4 / us / 1e6


def _l2_tbs() -> float:
    """Read plus write within the L2, by how much longer a copy of 24 MB in all takes than one of 8: no launch in it."""
    import torch

    times = []
    for elements in (1 << 20, 3 << 20):
        source = torch.randn(elements, device="cuda")
        target = torch.empty_like(source)
        times.append(time_us(lambda a=source, b=target: torch.add(a, 1.0, out=b)).us)  # type: ignore[misc]
    return 2 * (2 << 20) * 4 / (times[1] - times[0]) / 1e6


def _clusters(driver: Driver, image: bytes) -> dict[int, int]:
    """Clusters that run at once where one block fills an SM, by size."""
    shared = 200 * 1024
    function = driver.function(driver.load(image), "k", shared)
    found = {}
    for size in (2, 4, 8):
        found[size] = driver.clusters(function, {"cluster": size, "block": [128, 1, 1], "shared": shared})
    print(f"clusters at once {found}", flush=True)
    return found


def _fetch(driver: Driver, folder: Path, sm_count: int) -> list[dict[str, float]]:
    import torch

    clocks = torch.zeros((PASSES, 1 << 20, 2), dtype=torch.int64, device="cuda")
    sink = torch.zeros(1 << 20, device="cuda")
    flush = driver.function(driver.load((folder / "flush.cubin").read_bytes()), "k", 0)
    rows = []
    for path in sorted(folder.glob("fetch_*.cubin"), key=lambda path: [int(n) for n in re.findall(r"\d+", path.stem)]):
        count, step = (int(n) for n in re.findall(r"\d+", path.stem))
        function = driver.function(driver.load(path.read_bytes()), "k", 0)
        for warps in WARPS:
            times = []
            for _ in range(5):
                for code, threads, passes in ((flush, 128, 1), (flush, 128, 1), (function, 32 * warps, PASSES)):
                    values = [
                        ctypes.c_uint64(clocks.data_ptr()),
                        ctypes.c_uint64(sink.data_ptr()),
                        ctypes.c_uint32(passes),
                    ]
                    driver.launch(
                        code, {"cluster": 1, "block": [threads, 1, 1], "shared": 0}, (sm_count, 1, 1), values, 0
                    )
                torch.cuda.synchronize()
                seen = clocks[:, : sm_count * 32 * warps].cpu().numpy().reshape(PASSES, sm_count, 32 * warps, 2)
                times.append(np.median(seen[..., 1].max(2) - seen[..., 0].min(2), axis=1) / count)
            first, *_, warm = np.median(times, axis=0)
            ideal = max(1.0, warps / 4)
            rows.append(
                {"instructions": count, "step": step, "warps": warps, "first": float(first), "warm": float(warm)}
            )
            print(
                f"{count * 16 >> 10:4d} KB, barrier every {step:4d}, {warps:2d} warps: clocks per instruction first {first:.2f}, warm {warm:.2f}, {ideal / warm:.0%} of peak",
                flush=True,
            )
    return rows


def main() -> int:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("prepare", "run"))
    parser.add_argument("folder", type=Path)
    parser.add_argument("--arch", type=int, default=90)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--profile", type=Path)
    parser.add_argument("--target", default="h200")
    parser.add_argument("--no-fetch", action="store_true", help="ceilings alone, a few seconds")
    options = parser.parse_args()
    if options.what == "prepare":
        prepare(options.folder, options.arch)
    else:
        result = run(options.folder, options.out, not options.no_fetch)
        if options.profile:
            options.profile.write_text(as_profile(result, find(options.target)).to_json(), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""Predicted time of one kernel launch from counted work and a device's ceilings: the largest of several bounds, plus what
comes before and after. Used to rank kernels and configurations; on a device the few best are measured.

The ceilings of the H200 were measured (scripts/measure_device.py, scripts/lab/NOTES.md); other devices are scaled from it
by peak rate, SM count and bandwidth, and say so.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from sparsedeploy.devices import Device
from sparsedeploy.plugins.kernel import Prediction


@dataclass(frozen=True)
class Ceilings:
    """What one device can do. Rates are per SM and clock unless named otherwise."""

    source: str
    sm_count: int
    clock_ghz: float
    schedulers: int
    """Warp schedulers per SM, each one instruction a clock."""
    issue_share: float
    """Share of the issue rate that long runs of fma with immediates reach."""
    shared_bytes: float
    """Shared-memory bytes per SM and clock."""
    l2_tbs: float
    hbm_tbs: float
    cluster_tbs: float
    """Stores to other blocks' shared memory, whole chip."""
    l2_mb: float
    fetch_kb: float
    """Code that an SM keeps close."""
    near_clocks: float
    """Clocks per instruction of straight-line code that is kept close, however few warps run it."""
    far_clocks: float
    """The same for code that streams from L2."""
    launch_us: float
    """One more launch in a replayed graph, an empty kernel."""
    start_us: float
    """From a block's first instruction to its first sums: addresses, first loads."""
    sync_us: float
    """A round of cluster barriers, or one more dependent launch."""
    registers: int = 65536
    shared_kb: float = 227


H200 = Ceilings(
    source="measured on an H200", sm_count=132, clock_ghz=1.98, schedulers=4, issue_share=0.80, shared_bytes=128,
    l2_tbs=5.5, hbm_tbs=4.2, cluster_tbs=2.6, l2_mb=60, fetch_kb=128, near_clocks=2.3, far_clocks=6.0, launch_us=0.7,
    start_us=1.2, sync_us=0.8,
)  # fmt: skip


def ceilings(device: Device) -> Ceilings:
    """The device's ceilings: measured for the H200, else scaled from it."""
    if device.name == "h200":
        return H200
    schedulers = 4
    # Peak = SMs x 32 lanes x schedulers x 2 x clock; consumer parts of sm_86 and later reach it the same way.
    clock = device.fp32_tflops * 1e3 / (device.sm_count * 32 * schedulers * 2)
    scale = device.bandwidth_gbs * 0.875 / 1e3 / H200.hbm_tbs
    return replace(
        H200,
        source=f"the H200's measured shares scaled to the {device.title}: nothing measured there",
        sm_count=device.sm_count, clock_ghz=clock, l2_tbs=max(1.4 * device.bandwidth_gbs / 1e3, H200.l2_tbs * scale),
        hbm_tbs=device.bandwidth_gbs * 0.875 / 1e3, cluster_tbs=H200.cluster_tbs * scale, l2_mb=device.l2_mb,
        shared_kb=device.shared_kb_per_block, launch_us=1.0 if device.sm >= 80 else 5.0,
        registers=32768 if device.sm == 53 else 65536,
    )  # fmt: skip


@dataclass(frozen=True)
class Work:
    """What one launch does. Per block where the name says block, else over the whole grid."""

    blocks: int
    threads: int
    registers: int
    shared_bytes: int
    """Dynamic shared memory of a block."""
    instructions: float
    """Issued per warp, mean over the pieces."""
    heaviest: float
    """Issued per warp of the longest piece."""
    loads: float
    """Shared-memory wavefronts per warp."""
    code_bytes: float
    """Of one piece."""
    fill_bytes: float
    """Read into shared memory, halos and repeats counted."""
    read_bytes: float
    """Input, once."""
    write_bytes: float
    cluster_bytes: float = 0.0
    planes_bytes: float = 0.0
    """Partial sums written and read again through memory."""


def resident(work: Work, c: Ceilings) -> int:
    """Blocks that fit an SM at once; 0 when a block does not fit at all."""
    warps = -(-work.threads // 32)
    # Registers are dealt per warp in units of 256, each scheduler owning a quarter.
    per_warp = -(-work.registers * 32 // 256) * 256
    by_registers = c.registers // c.schedulers // per_warp * c.schedulers // warps
    by_shared = int(c.shared_kb * 1024 // max(work.shared_bytes + 1024, 1))
    return min(by_registers, by_shared, 2048 // (warps * 32), 32)


def predict(work: Work, c: Ceilings) -> Prediction:
    """Time in microseconds and the bound that is largest; inf when a block does not fit."""
    per_sm = resident(work, c)
    if per_sm < 1 or work.blocks < 1:
        return Prediction(us=1e9, bound="launch", source="a block does not fit this device")
    warps = -(-work.threads // 32)
    rounds = -(-work.blocks // (per_sm * c.sm_count))
    full, left = divmod(work.blocks, per_sm * c.sm_count)
    clocks = issue = shared = fetch = 0.0
    for count in [per_sm] * full + ([-(-left // c.sm_count)] if left else []):
        deep = -(-count * warps // c.schedulers)
        slots = deep * work.heaviest / c.issue_share
        words = count * warps * work.loads * 128 / c.shared_bytes
        near = work.code_bytes <= c.fetch_kb * 1024
        streamed = work.heaviest * (c.near_clocks if near else c.far_clocks)
        clocks += max(slots, words, streamed) + 0.25 * words
        issue, shared, fetch = issue + slots, shared + words, fetch + streamed
    us = 1e-3 / c.clock_ghz
    in_l2 = (work.read_bytes + work.write_bytes) < c.l2_mb * 1e6 * 0.8
    memory = (work.read_bytes + work.write_bytes) / ((c.l2_tbs if in_l2 else c.hbm_tbs) * 1e6)
    fill = (work.fill_bytes + work.write_bytes) / (c.l2_tbs * 1e6)
    bounds = {"compute": issue * us, "shared": shared * us, "fetch": fetch * us, "l2": fill, "memory": memory}
    bound = max(bounds, key=lambda name: bounds[name])
    body = max(clocks * us, fill, memory)
    # The last wave's stores drain after its sums; with many waves they hide behind the next one's.
    drain = 0.5 * work.write_bytes / max(1, rounds) / (c.l2_tbs * 1e6)
    combine = work.cluster_bytes / (c.cluster_tbs * 1e6) + (c.sync_us if work.cluster_bytes else 0.0)
    if work.planes_bytes:
        combine += work.planes_bytes / (c.l2_tbs * 1e6) + c.sync_us + c.launch_us
    fixed = c.launch_us + c.start_us
    total = fixed + body + drain + combine
    if fixed > body:
        bound = "launch"
    return Prediction(us=round(total, 2), bound=bound, source=c.source)

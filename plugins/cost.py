"""Predicted time of one kernel launch from counted work and a device's ceilings: the largest of several bounds, plus what
comes before and after. Used to rank kernels and configurations; on a device the few best are measured.

The ceilings of the H200 were measured (scripts/measure_device.py, scripts/lab/NOTES.md); other devices are scaled from it
by peak rate, SM count and bandwidth, and say so.
"""

from __future__ import annotations

import math
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
    issue_least: float
    """Part of that share which one warp on an SM would reach by itself, from a line through few warps ..."""
    issue_per_warp: float
    """... and what each warp of an SM adds, up to 1."""
    shared_bytes: float
    """Shared-memory bytes per SM and clock."""
    l2_tbs: float
    hbm_tbs: float
    cluster_tbs: float
    """Stores to other blocks' shared memory, whole chip."""
    l2_mb: float
    gpcs: int
    """Groups of SMs that share an instruction cache."""
    gpc_code_kb: float
    """Code that this cache holds: what its SMs run is fetched from L2 once if it fits, all of it again at 1.75 times."""
    gpc_clocks: float
    """Clocks per instruction that this cache takes to deliver what does not fit, once for all its SMs on that code."""
    sm_code_kb: float
    """Code of one block of which an SM keeps a part from launch to launch; larger code it fetches anew."""
    near_kb: float
    """Code of one block up to which it streams at `near_clocks`."""
    near_clocks: float
    """Clocks per instruction of straight-line code at least, however few warps run it."""
    miss_clocks: float
    """Added to them where the GPC's cache misses."""
    far_clocks: float
    """Never more than these: code far larger than near_kb, or always missed."""
    launch_us: float
    """One more launch in a replayed graph, an empty kernel."""
    start_us: float
    """From a block's first instruction to its first sums: addresses, first loads."""
    latency_us: float
    """What is left of a stage's latency where it is asked for one stage ahead."""
    stage_us: float
    """Barrier and addresses of one more stage of inputs that are copied asynchronously."""
    plain_stage_us: float
    """The same where they go through registers."""
    sync_us: float
    """A round of cluster barriers, or one more dependent launch."""
    exposed: float
    """Share of the shorter one of arithmetic and memory traffic that a single block on an SM does not overlap with the longer."""
    exposed_power: float
    """By how much more blocks on an SM lower it: blocks ** -exposed_power."""
    half_cost: float
    """Traffic of half2 code, whose stores are of two bytes a thread, over its bytes."""
    partial: float
    """Share of the lesser ones of issue, shared memory and fetch that the largest does not hide."""
    chain_us: float = 1.3
    """From the start of one launch to that of the next, where they overlap."""
    registers: int = 65536
    shared_kb: float = 227


H200 = Ceilings(
    source="measured on an H200", sm_count=132, clock_ghz=1.98, schedulers=4, issue_share=0.88, issue_least=0.25, issue_per_warp=0.063,
    shared_bytes=128, l2_tbs=6.9, hbm_tbs=4.2, cluster_tbs=3.55, l2_mb=60, gpcs=8, gpc_code_kb=104, gpc_clocks=1.15, sm_code_kb=44,
    near_kb=100, near_clocks=2.4, miss_clocks=8.7, far_clocks=6.0, launch_us=0.95, start_us=0.5, latency_us=0.3, stage_us=0.036,
    plain_stage_us=0.114, sync_us=0.4, exposed=0.75, exposed_power=0.82, half_cost=1.25, partial=0.18,
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
        gpcs=max(1, round(device.sm_count / 16.5)), registers=32768 if device.sm == 53 else 65536,
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
    pieces: int
    """Different codes; every block runs one, of `heaviest` instructions at most."""
    fill_bytes: float
    """Read into shared memory, halos and repeats counted."""
    read_bytes: float
    """Input, once."""
    write_bytes: float
    cluster: int = 1
    """Blocks per cluster."""
    stages: float = 1.0
    """Stages of inputs that a block waits for, one after another."""
    plain: bool = False
    """Stages go through registers."""
    halves: bool = False
    """Sums and stores of half2."""
    readers: int = 1
    """Times that the grid goes through the whole input, one after the other."""
    ahead: int = 2
    """Stages asked for ahead of their use."""
    cluster_bytes: float = 0.0
    planes_bytes: float = 0.0
    """Partial sums written and read again through memory."""
    ahead_bytes: float = 0.0
    """Read and written by a launch of its own that gathers the input first."""
    launches: int = 1
    """Launches that the blocks are dealt to, one starting after the other."""


def resident(work: Work, c: Ceilings) -> int:
    """Blocks that fit an SM at once; 0 when a block does not fit at all."""
    warps = -(-work.threads // 32)
    # Registers are dealt per warp in units of 256, each scheduler owning a quarter.
    per_warp = -(-work.registers * 32 // 256) * 256
    by_registers = c.registers // c.schedulers // per_warp * c.schedulers // warps
    by_shared = int(c.shared_kb * 1024 // max(work.shared_bytes + 1024, 1))
    return min(by_registers, by_shared, 2048 // (warps * 32), 32)


def slots(per_sm: int, cluster: int, c: Ceilings) -> int:
    """Blocks that run at once.

    A cluster stays within one GPC, whose SMs need not be a multiple of it: an H200 runs 15 clusters of 8 or 30 of 4
    where one block fills an SM.
    """
    if cluster <= 2:
        return per_sm * c.sm_count // cluster * cluster
    return int(per_sm * c.sm_count * 0.91 + 1e-6) // cluster * cluster


@dataclass(frozen=True)
class Clocks:
    """Clocks that a launch takes by each of an SM's resources, waves counted: alone, and together."""

    issue: float
    shared: float
    fetch: float
    together: float


def _clocks(work: Work, c: Ceilings, at_once: int) -> Clocks:
    warps = -(-work.threads // 32)
    full, left = divmod(work.blocks, at_once)
    clocks = issue = shared = fetch = 0.0
    us = c.clock_ghz * 1e3
    for blocks in [at_once] * min(full, 1) + ([left] if left else []):
        times = full if blocks == at_once and full else 1
        count = -(-blocks // min(c.sm_count, at_once))
        # Few warps hide less of each other's waiting.
        share = c.issue_share * min(1.0, c.issue_least + c.issue_per_warp * count * warps)
        busy = -(-count * warps // c.schedulers) * work.heaviest / share
        words = count * warps * work.loads * 128 / c.shared_bytes
        streamed = work.heaviest * _clocks_fetched(work, c, max(1.0, blocks / c.gpcs))
        waits = max(0.0, work.stages - 1) / work.ahead * c.latency_us * us
        largest = max(busy, words, streamed)
        stages = work.stages * (c.plain_stage_us if work.plain else c.stage_us) * us
        clocks += times * (max(largest, waits) + c.partial * (busy + words + streamed - largest) + stages)
        issue, shared, fetch = issue + times * busy, shared + times * words, fetch + times * max(streamed, waits)
    return Clocks(issue, shared, fetch, clocks)


def _clocks_fetched(work: Work, c: Ceilings, per_gpc: float) -> float:
    """Clocks per instruction that fetching takes, where `per_gpc` blocks run in a GPC at once."""
    kb = work.heaviest * 16 / 1024
    distinct = work.pieces * (1 - math.pow(1 - 1 / work.pieces, per_gpc)) if work.pieces > 1 else 1.0
    missed = min(1.0, max(0.0, distinct * kb / c.gpc_code_kb - 1) / 0.75)
    alone = min(c.far_clocks, c.near_clocks * math.pow(max(1.0, kb / c.near_kb), 1.2) + missed * c.miss_clocks)
    # Blocks of one piece share a fetch, in a GPC and, less, across the chip.
    fetches = min(distinct, per_gpc * work.pieces / (0.6 * work.blocks))
    return max(alone, missed * fetches * c.gpc_clocks * min(1.0, kb / c.sm_code_kb))


def _fits(work: Work, c: Ceilings) -> int:
    """Blocks that run at once; 0 where none does."""
    per_sm = resident(work, c)
    return slots(per_sm, work.cluster, c) if per_sm and work.blocks >= 1 else 0


def bounds_us(work: Work, c: Ceilings) -> dict[str, float]:
    """Time by each resource alone, by name, in microseconds; empty when a block does not fit the device."""
    at_once = _fits(work, c)
    if at_once < 1:
        return {}
    return _bounds(work, c, _clocks(work, c, at_once), -(-work.blocks // at_once))


def _bounds(work: Work, c: Ceilings, clocks: Clocks, rounds: int) -> dict[str, float]:
    us = 1e-3 / c.clock_ghz
    # Blocks of all groups beside each other find the input in L2; one group after the other finds a small one there.
    times = min(work.readers, rounds) if work.read_bytes > c.l2_mb * 1e6 * 0.5 else 1
    moved = work.read_bytes * times + work.write_bytes
    scale = c.half_cost if work.halves else 1.0
    memory = scale * moved / ((c.l2_tbs if moved < c.l2_mb * 1e6 * 0.5 else c.hbm_tbs) * 1e6)
    fill = scale * work.fill_bytes / (c.l2_tbs * 1e6)
    return {
        "compute": clocks.issue * us, "shared": clocks.shared * us, "fetch": clocks.fetch * us, "l2": fill, "memory": memory
    }  # fmt: skip


def time_us(work: Work, c: Ceilings) -> tuple[float, str]:
    """Time in microseconds and the bound that is largest; a huge time when a block does not fit."""
    at_once = _fits(work, c)
    if at_once < 1:
        return 1e9, "launch"
    clocks = _clocks(work, c, at_once)
    bounds = _bounds(work, c, clocks, -(-work.blocks // at_once))
    bound = max(bounds, key=lambda name: bounds[name])
    inside, outside = clocks.together * (1e-3 / c.clock_ghz), max(bounds["l2"], bounds["memory"])
    # One block to an SM reads, computes and stores in turn: nothing there overlaps with it, only what other SMs do.
    body = max(inside, outside) + _exposed(work, c) * min(inside, outside)
    combine = work.cluster_bytes / (c.cluster_tbs * 1e6) + (c.sync_us if work.cluster_bytes else 0.0)
    if work.planes_bytes:
        combine += work.planes_bytes / (c.l2_tbs * 1e6) + c.sync_us + c.launch_us
    fixed = c.launch_us + c.start_us + (work.launches - 1) * c.chain_us
    if work.ahead_bytes:
        fits = work.ahead_bytes < c.l2_mb * 1e6 * 0.5
        fixed += c.chain_us + c.latency_us + work.ahead_bytes / ((c.l2_tbs if fits else c.hbm_tbs) * 1e6)
    return fixed + body + combine, "launch" if fixed > body else bound


def _exposed(work: Work, c: Ceilings) -> float:
    # More than three blocks on an SM gained no more where they were measured.
    return c.exposed * math.pow(min(resident(work, c), 3), -c.exposed_power)


def predict(work: Work, c: Ceilings) -> Prediction:
    """`time_us` as a record."""
    us, bound = time_us(work, c)
    return Prediction(us=round(us, 2), bound=bound, source=c.source)

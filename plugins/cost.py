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
    gpcs: int
    """Groups of SMs that share an instruction cache."""
    gpc_code_kb: float
    """Code that this cache holds: what fits is fetched from L2 once for all its SMs."""
    gpc_sharing: float
    """How many SMs use one fetch on average when it does not fit."""
    near_kb: float
    """Code of one block up to which it streams at `near_clocks`."""
    near_clocks: float
    """Clocks per instruction of straight-line code at least, however few warps run it."""
    far_clocks: float
    """The same for code far larger than near_kb."""
    launch_us: float
    """One more launch in a replayed graph, an empty kernel."""
    start_us: float
    """From a block's first instruction to its first sums: addresses, first loads."""
    latency_us: float
    """From asking for a stage of inputs to having it."""
    sync_us: float
    """A round of cluster barriers, or one more dependent launch."""
    chain_us: float = 1.3
    """From the start of one launch to that of the next, where they overlap."""
    registers: int = 65536
    shared_kb: float = 227


H200 = Ceilings(
    source="measured on an H200", sm_count=132, clock_ghz=1.98, schedulers=4, issue_share=0.88, shared_bytes=128,
    l2_tbs=5.5, hbm_tbs=4.2, cluster_tbs=2.6, l2_mb=60, gpcs=8, gpc_code_kb=128, gpc_sharing=2.6, near_kb=70, near_clocks=2.4, far_clocks=6.0, launch_us=0.7, start_us=1.4, latency_us=0.8,
    sync_us=0.5,
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
    for blocks in [at_once] * min(full, 1) + ([left] if left else []):
        times = full if blocks == at_once and full else 1
        count = -(-blocks // min(c.sm_count, at_once))
        # Few warps hide less of each other's waiting.
        share = c.issue_share * min(1.0, 0.7 + 0.0125 * count * warps)
        busy = -(-count * warps // c.schedulers) * work.heaviest / share
        words = count * warps * work.loads * 128 / c.shared_bytes
        # What an SM misses, its GPC's cache fetches, an instruction a clock; SMs on the same code share some fetches.
        per_gpc = max(1.0, blocks / c.gpcs)
        distinct = work.pieces * (1 - (1 - 1 / work.pieces) ** per_gpc) if work.pieces > 1 else 1.0
        sharing = min(c.gpc_sharing, max(per_gpc / distinct, 0.6 * work.blocks / work.pieces))
        if distinct * work.instructions * 16 <= c.gpc_code_kb * 1024:
            sharing = 1e9
        alone = min(c.far_clocks, c.near_clocks * max(1.0, work.heaviest * 16 / 1024 / c.near_kb) ** 1.2)
        streamed = work.heaviest * max(alone, per_gpc / sharing)
        waits = max(0.0, work.stages - 1) / work.ahead * c.latency_us * c.clock_ghz * 1e3
        streamed = max(streamed, waits)
        clocks += times * (max(busy, words, streamed) + 0.12 * (busy + words + streamed - max(busy, words, streamed)))
        issue, shared, fetch = issue + times * busy, shared + times * words, fetch + times * streamed
    return Clocks(issue, shared, fetch, clocks)


def _fits(work: Work, c: Ceilings) -> int:
    """Blocks that run at once; 0 where none does."""
    per_sm = resident(work, c)
    return slots(per_sm, work.cluster, c) if per_sm and work.blocks >= 1 else 0


def bounds_us(work: Work, c: Ceilings) -> dict[str, float]:
    """Time by each resource alone, by name, in microseconds; empty when a block does not fit the device."""
    at_once = _fits(work, c)
    if at_once < 1:
        return {}
    return _bounds(work, c, _clocks(work, c, at_once))


def _bounds(work: Work, c: Ceilings, clocks: Clocks) -> dict[str, float]:
    us = 1e-3 / c.clock_ghz
    in_l2 = (work.read_bytes + work.write_bytes) < c.l2_mb * 1e6 * 0.5
    memory = (work.read_bytes + work.write_bytes) / ((c.l2_tbs if in_l2 else c.hbm_tbs) * 1e6)
    fill = (work.fill_bytes + work.write_bytes) / (c.l2_tbs * 1e6)
    return {
        "compute": clocks.issue * us, "shared": clocks.shared * us, "fetch": clocks.fetch * us, "l2": fill, "memory": memory
    }  # fmt: skip


def time_us(work: Work, c: Ceilings) -> tuple[float, str]:
    """Time in microseconds and the bound that is largest; a huge time when a block does not fit."""
    at_once = _fits(work, c)
    if at_once < 1:
        return 1e9, "launch"
    clocks = _clocks(work, c, at_once)
    bounds = _bounds(work, c, clocks)
    bound = max(bounds, key=lambda name: bounds[name])
    rounds = max(1, -(-work.blocks // at_once))
    body = max(clocks.together * (1e-3 / c.clock_ghz), bounds["l2"], bounds["memory"])
    # A round's stores leave when its sums are done: behind the next round's sums, but for the last.
    drain = work.write_bytes / rounds / (c.l2_tbs * 1e6)
    combine = work.cluster_bytes / (c.cluster_tbs * 1e6) + (c.sync_us if work.cluster_bytes else 0.0)
    if work.planes_bytes:
        combine += work.planes_bytes / (c.l2_tbs * 1e6) + c.sync_us + c.launch_us
    fixed = c.launch_us + c.start_us + (work.launches - 1) * c.chain_us
    if work.ahead_bytes:
        fits = work.ahead_bytes < c.l2_mb * 1e6 * 0.5
        fixed += c.chain_us + c.latency_us + work.ahead_bytes / ((c.l2_tbs if fits else c.hbm_tbs) * 1e6)
    return fixed + body + drain + combine, "launch" if fixed > body else bound


def predict(work: Work, c: Ceilings) -> Prediction:
    """`time_us` as a record."""
    us, bound = time_us(work, c)
    return Prediction(us=round(us, 2), bound=bound, source=c.source)

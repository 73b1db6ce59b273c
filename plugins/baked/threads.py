"""Threads of the blocks that are interpreted together, and what they share: registers, barriers, where they stand."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from sparsedeploy.plugins.baked.memory import AccessError, Array, GlobalMemory, SharedMemory
from sparsedeploy.plugins.launch import Launch


class InterpretError(ValueError):
    """The PTX does what no device promises to do, or uses what the interpreter does not know; names the line."""


@dataclass(eq=False)
class Fragment:
    """Threads at one program counter."""

    lanes: Array
    """Numbers of the threads in the batch."""
    block: Array
    """Block of each thread, numbered in the batch."""
    thread: Array
    """Linear thread index in its block."""
    regs: list[Array | None]
    pc: int = 0
    copies: list[list[tuple[Array, list[Array]]]] = field(default_factory=lambda: [[]])
    """cp.async groups not waited for, oldest first, the open one last: (lanes, granules)."""
    past: Array = field(default_factory=lambda: np.zeros(0, np.uint64))
    own: Array = field(default_factory=lambda: np.zeros(0, np.uint64))

    def take(self, which: Array, pc: int, live: Sequence[int]) -> Fragment:
        """The chosen threads as a fragment of their own, with the registers that are read from `pc` on."""
        lanes = self.lanes[which]
        member = np.zeros(int(self.lanes.max()) + 1, np.bool_)
        member[lanes] = True
        copies = []
        for group in self.copies:
            kept = []
            for owners, granules in group:
                mine = member[owners]
                if mine.any():
                    kept.append((owners[mine], [granule[mine] for granule in granules]))
            copies.append(kept)
        regs: list[Array | None] = [None] * len(self.regs)
        for at in live:
            held = self.regs[at]
            regs[at] = None if held is None else held[which]
        return Fragment(
            lanes, self.block[which], self.thread[which], regs, pc, copies, self.past[which], self.own[which]
        )


def merge(parts: list[Fragment], live: Sequence[int]) -> Fragment:
    """Threads that meet again at one place, with the registers that are read from there on."""
    if len(parts) == 1:
        return parts[0]
    regs: list[Array | None] = [None] * len(parts[0].regs)
    for at in live:
        values = [part.regs[at] for part in parts]
        kind = next((value.dtype for value in values if value is not None), None)
        if kind is None:
            continue
        filled = [
            np.zeros(len(part.lanes), kind) if value is None else value
            for part, value in zip(parts, values, strict=True)
        ]
        regs[at] = np.concatenate(filled)
    depth = max(len(part.copies) for part in parts)
    copies: list[list[tuple[Array, list[Array]]]] = [[] for _ in range(depth)]
    for part in parts:
        for group, target in zip(reversed(part.copies), reversed(copies), strict=False):
            target += group
    joined = [np.concatenate([getattr(part, name) for part in parts]) for name in ("lanes", "block", "thread")]
    past, own = (np.concatenate([getattr(part, name) for part in parts]) for name in ("past", "own"))
    return Fragment(joined[0], joined[1], joined[2], regs, parts[0].pc, copies, past, own)


@dataclass(eq=False)
class Barrier:
    """An mbarrier of one block in its first phase, the only one here."""

    arrivals: int
    """Still to come."""
    bytes: int = 0
    """Expected and not yet stored."""
    granules: list[Array] = field(default_factory=list)
    """Of shared memory, stored by st.async: nobody may read them ahead of a wait at the barrier."""

    @property
    def complete(self) -> bool:
        return self.arrivals == 0 and self.bytes == 0


class Batch:
    """The state that the blocks of one batch share."""

    def __init__(self, grid: tuple[int, int, int], launch: Launch, blocks: Array, memory: GlobalMemory) -> None:
        self.grid, self.shape, self.cluster, self.memory = grid, launch.block, launch.cluster, memory
        self.blocks = blocks
        """Linear numbers of the batch's blocks in the grid."""
        self.threads = launch.block[0] * launch.block[1] * launch.block[2]
        self.live = np.full(len(blocks), self.threads)
        self.arrived = np.zeros(len(blocks) * self.threads, np.int64)
        self.waits = np.zeros(len(blocks) * self.threads, np.int64)
        self.gone = np.zeros(len(blocks) * self.threads, np.bool_)
        self.barriers: dict[tuple[int, int], Barrier] = {}
        """mbarriers by block of the batch and address."""
        self.shared: SharedMemory
        self.params: Array

    def barrier(self, block: int, address: int) -> Barrier:
        """The mbarrier that a block made at an address of its shared memory; raises AccessError where there is none."""
        found = self.barriers.get((block, address))
        if found is None:
            raise AccessError(f"uses byte {address} of shared memory as an mbarrier, which nothing made one")
        return found

    def stamp(self, fragment: Fragment) -> None:
        fragment.past = self.shared.stamp(fragment.block)
        fragment.own = fragment.past | fragment.lanes.astype(np.uint64)

    def special(self, name: str, fragment: Fragment) -> Array:
        head, _, axis = name[1:].partition(".")
        at = "xyz".find(axis) if axis else 0
        size = {"ntid": self.shape, "nctaid": self.grid}.get(head)
        n = len(fragment.lanes)
        if size is not None:
            return np.full(n, size[at], np.uint32)
        linear = self.blocks[fragment.block]
        if head == "tid":
            return _axis(fragment.thread, self.shape, at)
        if head == "ctaid":
            return _axis(linear, self.grid, at)
        if head == "clusterid":
            where = _axis(linear, self.grid, at)
            return where // np.uint32(self.cluster) if at == 0 else where
        if head == "cluster_ctarank" or (head == "cluster_ctaid" and at == 0):
            return np.asarray(_axis(linear, self.grid, 0) % np.uint32(self.cluster))
        if head == "cluster_nctarank" or (head == "cluster_nctaid" and at == 0):
            return np.full(n, self.cluster, np.uint32)
        if head == "cluster_ctaid":
            return np.zeros(n, np.uint32)
        if head == "cluster_nctaid":
            return np.ones(n, np.uint32)
        if head == "nclusterid":
            return np.full(n, self.grid[at] // (self.cluster if at == 0 else 1), np.uint32)
        if head == "laneid":
            return (fragment.thread % 32).astype(np.uint32)
        return (fragment.thread // 32).astype(np.uint32)


def _axis(linear: Array, shape: tuple[int, int, int], at: int) -> Array:
    x, y, _ = shape
    value = linear % x if at == 0 else linear // x % y if at == 1 else linear // (x * y)
    return np.asarray(value.astype(np.uint32))


Get = Callable[[Fragment], Array]
Do = Callable[["Batch", Fragment], None]


class Control:
    """An instruction that moves the program counter or waits."""

    def __init__(
        self,
        kind: str,
        guard: Callable[[Fragment], Array] | None,
        targets: tuple[int, ...],
        index: Get | None,
        then: Do | None = None,
    ) -> None:
        self.kind, self.guard, self.targets, self.index, self.then = kind, guard, targets, index, then

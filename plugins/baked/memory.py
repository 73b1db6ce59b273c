"""Memory of the interpreted machine: global buffers with bounds, shared memory that knows who wrote what and when."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]

_BUFFER_BITS = 36
"""Buffers lie 64 GiB apart: an address that runs out of one never lands in another."""
POISON = np.uint64(2**64 - 1)
"""Tag of shared memory that nothing wrote."""
PENDING = np.uint64(2**64 - 2)
"""Tag of shared memory that a cp.async is still on its way to."""
_LANE_BITS = 24
_BLOCK_EPOCH_BITS = 20

_UNSIGNED = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}


class AccessError(ValueError):
    """An access that a device would not survive, or whose result it would not promise."""


@dataclass
class _Buffer:
    name: str
    base: int
    data: NDArray[np.uint8]
    writable: bool


class GlobalMemory:
    """Device memory: named buffers, each access checked for bounds, alignment and permission."""

    def __init__(self) -> None:
        self._buffers: list[_Buffer] = []

    def alloc(self, name: str, data: Array, writable: bool = False) -> int:
        """Map a C-contiguous array, in place when writable, and return its address."""
        flat = np.ascontiguousarray(data) if not writable else data
        if not flat.flags.c_contiguous:
            raise ValueError(f"{name}: a writable buffer must be C-contiguous")
        base = (len(self._buffers) + 1) << _BUFFER_BITS
        self._buffers.append(_Buffer(name, base, flat.reshape(-1).view(np.uint8), writable))
        return base

    def clear(self, address: int, size: int) -> None:
        """Zero `size` bytes at `address`."""
        if size == 0:
            return
        self._find(np.array([address + size - 1], np.uint64), 1, True)
        buffer, offset = self._find(np.array([address], np.uint64), 1, True)
        buffer.data[int(offset[0]) : int(offset[0]) + size] = 0

    def load(self, address: Array, element: int, count: int) -> list[Array]:
        """`count` consecutive unsigned elements of `element` bytes for every lane."""
        if len(address) == 0:
            return [np.zeros(0, _UNSIGNED[element])] * count
        parts = self._split(address)
        if len(parts) == 1:
            return self._load_one(address, element, count)
        out = [np.zeros(len(address), _UNSIGNED[element]) for _ in range(count)]
        for lanes in parts:
            for target, value in zip(out, self._load_one(address[lanes], element, count), strict=True):
                target[lanes] = value
        return out

    def _load_one(self, address: Array, element: int, count: int) -> list[Array]:
        buffer, offset = self._find(address, element * count, False)
        view = _view(buffer.data, element)
        first = offset // np.uint64(element)
        return [view[first + np.uint64(k)] for k in range(count)]

    def store(self, address: Array, element: int, values: list[Array]) -> None:
        """Store each lane's elements; two lanes storing different values to one place is an error."""
        if len(address) == 0:
            return
        for lanes in self._split(address):
            buffer, offset = self._find(address[lanes], element * len(values), True)
            view = _view(buffer.data, element)
            first = offset // np.uint64(element)
            for k, value in enumerate(values):
                view[first + np.uint64(k)] = value[lanes]
                if not np.array_equal(view[first + np.uint64(k)], value[lanes]):
                    raise AccessError(f"two threads store different values to one address of {buffer.name}")

    def update(self, address: int, element: int) -> Array:
        """A one-element writable view, for atomics."""
        buffer, offset = self._find(np.array([address], np.uint64), element, True)
        at = int(offset[0])
        return buffer.data[at : at + element].view(_UNSIGNED[element])

    def _split(self, address: Array) -> list[Any]:
        which = address >> np.uint64(_BUFFER_BITS)
        if (which == which[0]).all():
            return [slice(None)]
        return [np.nonzero(which == one)[0] for one in np.unique(which)]

    def _find(self, address: Array, size: int, write: bool) -> tuple[_Buffer, Array]:
        index = (int(address[0]) >> _BUFFER_BITS) - 1
        if not 0 <= index < len(self._buffers):
            raise AccessError(f"global address {int(address[0]):#x} belongs to no buffer")
        buffer = self._buffers[index]
        offset = address - np.uint64(buffer.base)
        if int(offset.max()) + size > len(buffer.data):
            worst = int(address.max())
            raise AccessError(
                f"{size} bytes at byte {worst - buffer.base} of {buffer.name}, which has {len(buffer.data)} bytes"
            )
        if (offset & np.uint64(_natural(size) - 1)).any():
            bad = int(offset[np.argmax(offset & np.uint64(_natural(size) - 1) != 0)])
            raise AccessError(f"{size} bytes at byte {bad} of {buffer.name}: misaligned")
        if write and not buffer.writable:
            raise AccessError(f"a store to {buffer.name}, which is read-only")
        return buffer, offset


def _natural(size: int) -> int:
    return 1 << (size - 1).bit_length()


def _view(data: NDArray[np.uint8], element: int) -> Array:
    whole = len(data) // element * element
    return data[:whole].view(_UNSIGNED[element])


class SharedMemory:
    """Shared memory of a batch of blocks, with a tag per granule: which lane wrote it in which epoch.

    A read must see a value of its own or of an epoch (the time between two barriers of the block) before; so a
    missing barrier, a missing cp.async wait and a read of what nothing wrote are all errors. Reads leave a tag of
    their own (the last reader's), against writes that overtake readers. Blocks of a cluster see each other's memory
    only past a cluster barrier.
    """

    def __init__(self, blocks: int, size: int, granule: int) -> None:
        self.size = size
        self._pitch = max((size + 15) // 16 * 16, 16)
        self._granule = granule
        self._data = np.zeros(blocks * self._pitch, np.uint8)
        self._views = {size: self._data.view(kind) for size, kind in _UNSIGNED.items()}
        self._written = np.full(blocks * self._pitch // granule, POISON, np.uint64)
        self._read = np.zeros(blocks * self._pitch // granule, np.uint64)
        self._epoch = np.ones(blocks, np.uint64)
        self._cluster_epoch = np.zeros(blocks, np.uint64)

    def pass_barrier(self, blocks: Array) -> None:
        """Blocks passed bar.sync."""
        self._epoch[blocks] += np.uint64(1)

    def pass_cluster_barrier(self, blocks: Array, count: Array) -> None:
        """Blocks passed their count-th cluster barrier."""
        np.maximum.at(self._cluster_epoch, blocks, count.astype(np.uint64))

    def stamp(self, blocks: Array) -> Array:
        """The present epoch of each lane's block, as the upper bits of a tag."""
        whole = (self._cluster_epoch[blocks] << np.uint64(_BLOCK_EPOCH_BITS)) | self._epoch[blocks]
        return np.asarray(whole << np.uint64(_LANE_BITS))

    def cluster_stamp(self, blocks: Array) -> Array:
        """As `stamp`, but only what a cluster barrier separates counts as past."""
        return np.asarray(self._cluster_epoch[blocks] << np.uint64(_BLOCK_EPOCH_BITS + _LANE_BITS))

    def remote_tag(self, blocks: Array) -> Array:
        """Upper bits of the tag of an access from another block: past only after a cluster barrier."""
        last = np.uint64((1 << _BLOCK_EPOCH_BITS) - 1)
        return np.asarray(
            ((self._cluster_epoch[blocks] << np.uint64(_BLOCK_EPOCH_BITS)) | last) << np.uint64(_LANE_BITS)
        )

    def place(self, blocks: Array, address: Array, size: int) -> Array:
        """Byte positions; raises AccessError for what lies outside of a block's memory or is misaligned."""
        wide = address.astype(np.uint64)
        if len(wide) and int(wide.max()) + size > self.size:
            raise AccessError(f"{size} bytes at byte {int(wide.max())} of shared memory, which has {self.size} bytes")
        if (wide & np.uint64(_natural(size) - 1)).any():
            raise AccessError(
                f"{size} bytes at byte {int(wide[wide % _natural(size) != 0][0])} of shared memory: misaligned"
            )
        return np.asarray(blocks.astype(np.uint64) * np.uint64(self._pitch) + wide)

    def _granules(self, at: Array, size: int) -> list[Array]:
        first = at // np.uint64(self._granule)
        return [first + np.uint64(k) for k in range(max(1, size // self._granule))]

    def load(self, at: Array, element: int, count: int, past: Array, own: Array) -> list[Array]:
        """Elements at byte positions. Valid are granules tagged before `past` or exactly `own`."""
        for granule in self._granules(at, element * count):
            tag = self._written[granule]
            fine = (tag < past) | (tag == own)
            if not fine.all():
                raise AccessError(_why(int(tag[~fine][0]), int(at[~fine][0]) % self._pitch, "reads"))
            self._read[granule] = own
        view, first = self._views[element], at // np.uint64(element)
        return [view[first + np.uint64(k)] for k in range(count)]

    def _check_write(self, granules: list[Array], at: Array, past: Array, own: Array) -> None:
        for granule in granules:
            tag, reader = self._written[granule], self._read[granule]
            fine = ((tag < past) | (tag == own) | (tag == POISON)) & ((reader < past) | (reader == own))
            if not fine.all():
                first = int(np.argmin(fine))
                bad = int(tag[first]) if not (tag[first] < past[first] or tag[first] in (own[first], POISON)) else -1
                where = int(at[first]) % self._pitch
                raise AccessError(
                    _why(bad, where, "overwrites")
                    if bad >= 0
                    else f"overwrites byte {where} of shared memory, read by another thread with no barrier between"
                )

    def store(self, at: Array, element: int, values: list[Array], past: Array, own: Array) -> None:
        """Store elements; two lanes storing different values to one place is an error."""
        granules = self._granules(at, element * len(values))
        self._check_write(granules, at, past, own)
        view, first = self._views[element], at // np.uint64(element)
        for k, value in enumerate(values):
            view[first + np.uint64(k)] = value
            if not np.array_equal(view[first + np.uint64(k)], value):
                raise AccessError("two threads store different values to one byte of shared memory")
        for granule in granules:
            self._written[granule] = own

    def start_copy(self, at: Array, size: int, words: list[Array], past: Array, own: Array) -> list[Array]:
        """Begin a cp.async of 4-byte words; returns the granules to hand to `finish_copy`."""
        granules = self._granules(at, size)
        self._check_write(granules, at, past, own)
        view, first = self._views[4], at // np.uint64(4)
        for k, value in enumerate(words):
            view[first + np.uint64(k)] = value
        for granule in granules:
            self._written[granule] = PENDING
        return granules

    def finish_copy(self, granules: list[Array], own: Array) -> None:
        """The copying thread waited: the words are its own until the next barrier."""
        for granule in granules:
            self._written[granule] = own


def _why(tag: int, where: int, verb: str) -> str:
    if tag == int(POISON):
        return f"{verb} byte {where} of shared memory, which nothing wrote"
    if tag == int(PENDING):
        return f"{verb} byte {where} of shared memory, where a cp.async has not been waited for"
    return f"{verb} byte {where} of shared memory, written by another thread with no barrier between"

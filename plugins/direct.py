"""Code and launch plan of the data-driven kernels: how `packed` and `csr` are run by direct.cu.

The source is fixed; what a layer adds is a head of definitions (geometry, tiling, epilogue) and one more INT32 constant,
the *table*: which output channels stand together in a block, which input channels form a stage, and where in the
format's own arrays the nonzeros of each lie. The table only orders the nonzeros; the weights are those of the format.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, fields, replace
from functools import lru_cache
from importlib.resources import files
from itertools import pairwise
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from sparsedeploy.devices import Device
from sparsedeploy.errors import MachineError
from sparsedeploy.layer import ELEMENT_BYTES, ConvLayer, Epilogue, Geometry, Precision
from sparsedeploy.plugins.assemble import assemble, compile_cuda
from sparsedeploy.plugins.kernel import BuildOptions, Built, Prediction, UnfitWeightsError
from sparsedeploy.plugins.launch import Arg, Expr, Launch, Plan, Variant, const, var
from sparsedeploy.plugins.node import Image, SparseConv

Format = Literal["packed", "csr"]
Longs = NDArray[np.int64]
ENTRY = "direct"
_BANKS = 32
_CLUSTER_SM = 90
"""First architecture with clusters and programmatic dependent launch."""


@dataclass(frozen=True)
class Nonzeros:
    """Where each nonzero of a format's arrays belongs, in array order."""

    row: Longs
    """Row of the format: block * oc + output channel for packed, output channel for csr."""
    oc: Longs
    ic: Longs
    """Input channel, counted over the whole input."""
    block_ic: int
    """Input channels of a group that one row covers: a stage may not reach across."""


@dataclass(frozen=True)
class Tiling:
    """The compile-time shape of direct.cu for one layer. Names as there, in lower case."""

    geometry: Geometry
    images: int = 1
    groups: int = 1
    rows: int = 8
    cols: int = 32
    warps: int = 1
    sets: int = 8
    slots: int = 2
    splits: int = 1
    stage: int = 16
    pairs: Literal["none", "images", "rows"] = "none"
    buffers: int = 2
    """Stages that shared memory holds at once, at least 2 (a single stage takes one)."""

    @property
    def pixels(self) -> int:
        """Threads of a set that have a pixel."""
        return self.images * self.groups * self.cols

    @property
    def threads(self) -> int:
        """Threads of a block."""
        return self.sets * self.warps * 32

    @property
    def channels(self) -> int:
        """Output channels of a block."""
        return self.sets * self.slots

    @property
    def in_rows(self) -> int:
        """Input rows of a tile, halo included."""
        g = self.geometry
        return (self.groups * self.rows - 1) * g.stride[0] + (g.kh - 1) * g.dilation[0] + 1

    @property
    def in_cols(self) -> int:
        """Input columns of a tile, halo included."""
        g = self.geometry
        return (self.cols - 1) * g.stride[1] + (g.kw - 1) * g.dilation[1] + 1

    @property
    def vector(self) -> int:
        """Elements of one copy to shared memory; 1 where columns are taken apart by the stride."""
        g = self.geometry
        if g.stride[1] != 1:
            return 1
        one_tile = self.cols >= g.ow
        return next(v for v in (4, 2, 1) if g.w % v == 0 and (one_tile or self.cols % v == 0))

    @property
    def shift(self) -> int:
        """Words ahead of a row, so that its copies are aligned."""
        return -self.geometry.pads[1] % self.vector

    @property
    def whole_maps(self) -> bool:
        """Whether a tile is whole maps of image pairs, all of whose pixels it holds."""
        g = self.geometry
        whole = self.cols >= g.ow and self.tile_rows >= g.oh
        inside = g.h + g.pads[0] <= self.in_rows and g.w + g.pads[1] <= self.in_cols
        return self.pairs == "images" and g.stride[1] == 1 and self.vector < 4 and whole and inside

    @property
    def flat(self) -> bool:
        """Whether the channels of a stage are read in runs, 8 halves at a time, a stage ahead."""
        shape = (np.array([value]) for value in (self.images, self.rows, self.threads, self.slots, self.stage))
        return self.whole_maps and bool(_in_runs(self.geometry, *shape)[0])

    def _row_words(self) -> int:
        sw = self.geometry.stride[1]
        if sw > 1:
            return sw * -(-self.in_cols // sw)
        return -(-(self.shift + self.in_cols) // self.vector) * self.vector

    def layout(self) -> tuple[int, int]:
        """(pitch, image): words from row to row and from image to image; the smallest at which a warp's lanes share no bank."""
        return self._bank_layout()[:2]

    @property
    def conflicts(self) -> float:
        """Mean cycles of one input load of a warp; 1 is free of bank conflicts."""
        return self._bank_layout()[2]

    def _bank_layout(self) -> tuple[int, int, float]:
        step = self.rows * self.geometry.stride[0]
        return _bank_layout(
            self._row_words(), self.vector, self.in_rows, step, self.images, self.groups, self.cols, self.warps
        )

    @property
    def tile_rows(self) -> int:
        """Output rows of a tile."""
        return self.groups * self.rows

    def row_count(self) -> int:
        """Output rows that tiles cover: half of them when rows are paired."""
        return -(-self.geometry.oh // 2) if self.pairs == "rows" else self.geometry.oh

    def grid(self, blocks: int) -> tuple[Expr, Expr, Expr]:
        """Blocks along x, y and z for any N, OH and OW, `blocks` being those of output channels."""
        rows = (var("OH") + 1) // 2 if self.pairs == "rows" else var("OH")
        batch = (var("N") + 1) // 2 if self.pairs == "images" else var("N")
        across = batch.ceil_div(self.images) * var("OW").ceil_div(self.cols)
        return across * self.splits, rows.ceil_div(self.tile_rows), const(blocks)

    def tile_count(self, n: int) -> int:
        """Tiles over the batch."""
        batch = -(-n // 2) if self.pairs == "images" else n
        return -(-batch // self.images) * -(-self.row_count() // self.tile_rows) * -(-self.geometry.ow // self.cols)

    @property
    def vec(self) -> int:
        """Sums of a thread that travel together to the block that adds them up."""
        return 4 if self.rows >= 3 else self.rows

    @property
    def share(self) -> int:
        """Groups of `vec` sums that one block of a cluster adds up."""
        return -(-self.channels * -(-self.rows // self.vec) // self.splits)

    def channel_blocks(self) -> list[tuple[int, int]]:
        """(first, last) of the convolution's groups that share a block; a large group repeats, once per block."""
        g = self.geometry
        per_oc = g.oc // g.group
        if per_oc >= self.channels:
            return [(k, k + 1) for k in range(g.group) for _ in range(-(-per_oc // self.channels))]
        together = self.channels // per_oc
        return [(k, min(k + together, g.group)) for k in range(0, g.group, together)]

    def stages(self, block_ic: int) -> int:
        """Stages of one split, at most."""
        return max(
            len(split) for first, last in set(self.channel_blocks()) for split in self.chunks(first, last, block_ic)
        )

    def chunks(self, first: int, last: int, block_ic: int) -> list[list[tuple[int, int]]]:
        """Per split, the (first channel, channels) of its stages for the convolution's groups first..last."""
        per_ic = self.geometry.ic // self.geometry.group
        low, high = first * per_ic, last * per_ic
        cuts = [low + (high - low) * k // self.splits for k in range(self.splits + 1)]
        result = []
        for start, end in pairwise(cuts):
            parts, at = [], start
            while at < end:
                limit = end if block_ic >= per_ic else min(end, at + block_ic - (at - low) % block_ic)
                pieces = -(-(limit - at) // self.stage)
                size = -(-(limit - at) // pieces)
                parts.append((at, min(size, limit - at)))
                at += parts[-1][1]
            result.append(parts)
        return result

    def shared_bytes(self, stages: int, capacity: int) -> int:
        """Dynamic shared memory: a rank's table, the stages' buffers, what a block receives of its cluster."""
        _, image = self.layout()
        buffer = self.stage * self.images * image + self.channels * capacity * 2
        received = 4 + self.splits * self.share * self.pixels * self.vec if self.splits > 1 else 0
        return 4 * (self.table_ints(stages) + buffer * min(stages, self.buffers) + received)

    def table_ints(self, stages: int) -> int:
        """Integers of one rank's part of the table."""
        ints = 2 * stages + self.channels * (2 + 3 * stages) + (self.channels if self.splits > 1 else 0)
        return -(-ints // 4) * 4


_RUN_BYTES, _RUN_HALVES, _RUN_BATCH = 16, 8, 4
_OTHER_REGISTERS = 64
"""Of a thread beside its sums and the halves on their way: with fewer ptxas spills, and 29 us become 40 (H200, 512@7)."""


def _in_runs(g: Geometry, images: Longs, rows: Longs, threads: Longs, slots: Longs, stage: Longs) -> NDArray[np.bool_]:
    """Where stages of whole maps begin at 16 bytes and a thread has the registers to read one ahead."""
    unit = _RUN_HALVES // math.gcd(_RUN_HALVES, g.h * g.w)
    items = -(-images * -(-stage * g.h * g.w // _RUN_HALVES) // threads)
    room = 65536 // threads // 8 * 8 - slots * rows - 2 * (_RUN_BYTES // 4) * np.minimum(items, _RUN_BATCH)
    fits: NDArray[np.bool_] = (g.ic % unit == 0) & (stage % unit == 0) & (room >= _OTHER_REGISTERS)
    return fits


@lru_cache(maxsize=4096)
def _bank_layout(
    least: int, vector: int, in_rows: int, step: int, images: int, groups: int, cols: int, warps: int
) -> tuple[int, int, float]:
    """(pitch, image, conflicts): the smallest strides at which the lanes of a warp share banks least."""
    t = np.minimum(np.arange(warps * 32), images * groups * cols - 1)
    image_of, group_of = t // (groups * cols), t // cols % groups
    best: tuple[float, int, int] | None = None
    for pitch in range(least, least + _BANKS, vector):
        start = -(-in_rows * pitch // 4) * 4
        for image in range(start, start + (_BANKS if images > 1 else 1), 4):
            words = image_of * image + group_of * (step * pitch) + t % cols
            cycles = [np.bincount(np.unique(words[k : k + 32]) % _BANKS).max() for k in range(0, len(words), 32)]
            key = (float(np.mean(cycles)), image, pitch)
            if best is None or key < best:
                best = key
        if best is not None and best[0] == 1.0:
            break
    assert best is not None
    return best[2], best[1], best[0]


def _deal(loads: Longs, bins: int, room: int) -> list[list[int]]:
    """Spread items over bins of `room` places, heaviest first to the lightest bin with a place."""
    groups: list[list[int]] = [[] for _ in range(bins)]
    weight = [0] * bins
    for item in sorted(range(len(loads)), key=lambda k: (-int(loads[k]), k)):
        pick = min((k for k in range(bins) if len(groups[k]) < room), key=lambda k: (weight[k], k))
        groups[pick].append(item)
        weight[pick] += int(loads[item])
    return groups


def blocks_of_channels(tiling: Tiling, nonzeros: Nonzeros) -> list[tuple[int, int, list[int]]]:
    """(first group, last group, output channels) of each block of output channels."""
    g = tiling.geometry
    per_oc = g.oc // g.group
    counts = np.bincount(nonzeros.oc, minlength=g.oc)
    result: list[tuple[int, int, list[int]]] = []
    if per_oc >= tiling.channels:
        for group in range(g.group):
            members = np.arange(group * per_oc, (group + 1) * per_oc)
            bins = -(-per_oc // tiling.channels)
            parts = _deal(counts[members], bins, tiling.channels)
            result += [(group, group + 1, [int(members[k]) for k in sorted(part)]) for part in parts]
        return result
    return [(first, last, list(range(first * per_oc, last * per_oc))) for first, last in tiling.channel_blocks()]


def make_table(tiling: Tiling, fmt: Format, nonzeros: Nonzeros) -> tuple[NDArray[np.int32], int, int]:
    """(table, stages, capacity): the constant that direct.cu walks by; capacity is the most nonzeros of a slot's stage."""
    g = tiling.geometry
    per_oc, per_ic = g.oc // g.group, g.ic // g.group
    stages = tiling.stages(nonzeros.block_ic)
    key = nonzeros.row * (g.ic + 1) + nonzeros.ic
    capacity = 2
    words: list[int] = []
    for first, last, members in blocks_of_channels(tiling, nonzeros):
        splits = [parts + [(parts[-1][0] + parts[-1][1], 0)] * (stages - len(parts)) if parts else [(first * per_ic, 0)] * stages
                  for parts in tiling.chunks(first, last, nonzeros.block_ic)]  # fmt: skip
        padded = members + [-1] * (tiling.channels - len(members))
        for parts in splits:
            cuts = np.zeros((tiling.channels, stages, 3), np.int64)
            for slot, oc in enumerate(members):
                for stage, (start, count) in enumerate(parts):
                    base = oc // per_oc * per_ic
                    block = max(0, start - base) // nonzeros.block_ic if fmt == "packed" else 0
                    row = block * g.oc + oc if fmt == "packed" else oc
                    low, high = np.searchsorted(key, [row * (g.ic + 1) + start, row * (g.ic + 1) + start + count])
                    delta = (base + block * nonzeros.block_ic if fmt == "packed" else 0) - start
                    cuts[slot, stage] = low, high, delta
            counts = (cuts[:, :, 1] - cuts[:, :, 0]).sum(1)
            capacity = max(capacity, int((cuts[:, :, 1] - cuts[:, :, 0]).max()))
            part = [value for pair in parts for value in pair]
            for slot in (slot for group in _deal(counts, tiling.sets, tiling.slots) for slot in group):
                part += [slot, padded[slot], *cuts[slot].ravel().tolist()]
            part += padded if tiling.splits > 1 else []
            words += part + [0] * (tiling.table_ints(stages) - len(part))
    return np.array(words, np.int64).astype(np.int32), stages, capacity + capacity % 2


_ACTIVATIONS = {"none": 0, "relu": 1, "clip": 2, "leaky_relu": 3}
_RESIDUALS = {"none": 0, "before_activation": 1, "after_activation": 2}


def _literal(value: float) -> str:
    """An exact C float literal; INFINITY has none, so the largest float stands for an open bound."""
    limit = float(np.finfo(np.float32).max)
    return f"({float(np.float32(min(max(value, -limit), limit))).hex()}f)"


def source(
    tiling: Tiling,
    fmt: Format,
    epilogue: Epilogue,
    precision: Precision,
    stages: int,
    capacity: int,
    scale: float = 1.0,
) -> str:
    """direct.cu under its definitions; sums are multiplied by `scale` ahead of the bias."""
    g = tiling.geometry
    pitch, image = tiling.layout()
    definitions: dict[str, int | str] = {
        "IC": g.ic, "OC": g.oc, "KH": g.kh, "KW": g.kw, "SH": g.stride[0], "SW": g.stride[1], "DH": g.dilation[0],
        "DW": g.dilation[1], "PT": g.pads[0], "PL": g.pads[1], "PB": g.pads[2], "PR": g.pads[3],
        "FIXED_H": g.h, "FIXED_W": g.w, "CSR": int(fmt == "csr"), "HALF": int(precision == "fp16"),
        "PAIRS": int(tiling.pairs != "none"), "PAIR_IMAGES": int(tiling.pairs == "images"),
        "FLAT": int(precision == "fp16" and tiling.flat),
        "IMAGES": tiling.images, "GROUPS": tiling.groups, "ROWS": tiling.rows, "COLS": tiling.cols,
        "WARPS": tiling.warps, "SETS": tiling.sets, "SLOTS": tiling.slots, "SPLITS": tiling.splits,
        "STAGES": stages, "BUFFERS": min(stages, tiling.buffers), "STAGE": tiling.stage, "CAPACITY": capacity, "VECTOR": tiling.vector, "SHIFT": tiling.shift,
        "PITCH": pitch, "IMAGE": image, "BIAS": int(epilogue.bias), "ACTIVATION": _ACTIVATIONS[epilogue.activation],
        "RESIDUAL": _RESIDUALS[epilogue.residual], "SLOPE": _literal(epilogue.slope), "LOW": _literal(epilogue.low),
        "HIGH": _literal(epilogue.high), "SCALED": int(scale != 1.0), "SCALE": _literal(scale),
    }  # fmt: skip
    head = "".join(f"#define {name} {value}\n" for name, value in definitions.items())
    return head + files("sparsedeploy.plugins").joinpath("direct.cu").read_text(encoding="utf-8")


def make_plan(
    tiling: Tiling,
    fmt: Format,
    epilogue: Epilogue,
    precision: Precision,
    blocks: int,
    shared_bytes: int,
    device: Device | None = None,
) -> Plan:
    """Launches for every N (and every H and W where the format allows).

    Given a `device`, launches may start before the op ahead of them ends: the code then waits by itself (sm_90 and
    later only). Batches whose blocks all run at once then ask for over half of an SM's shared memory, so that each has
    an SM for itself: blocks of the next launch would else be laid two to one SM while others stand idle.
    """
    count = 2 if fmt == "packed" else 3
    # The format's arrays in the order of the kernel's parameters: packed has words first, csr indices then values.
    arrays = [0] if fmt == "packed" else [1, 2]
    bias = [count] if epilogue.bias else []
    table = count + len(bias)
    args = [Arg("input"), Arg("output")]
    if epilogue.residual != "none":
        args.append(Arg("residual"))
    args += [Arg("constant", k) for k in (table, *arrays, *bias)]
    args += [Arg("N"), Arg("H"), Arg("W")]
    launch = Launch(
        ENTRY, tiling.grid(blocks), (tiling.threads, 1, 1), tuple(args), shared_bytes,
        cluster=tiling.splits, dependent=device is not None,
    )  # fmt: skip
    whole = Variant(precision, (launch,))
    if device is None:
        return (whole,)
    half, most = device.shared_kb_per_block * 512 + 1024, _largest_at_once(tiling, blocks, device)
    if most == 0 or shared_bytes >= half:
        return (whole,)
    return Variant(precision, (replace(launch, shared_bytes=half),), max_n=most), whole


def _sms(splits: int, device: Device) -> int:
    """SMs that clusters of so many blocks reach."""
    return int(device.sm_count * (_CLUSTER_SMS if splits >= 4 else 1))


def _largest_at_once(tiling: Tiling, blocks: int, device: Device) -> int:
    """The largest batch whose blocks have an SM each; 0 when there is none."""
    at_once = _sms(tiling.splits, device) // (tiling.tile_count(1) * blocks * tiling.splits)
    return at_once * tiling.images * (2 if tiling.pairs == "images" else 1)


def _isa(tiling: Tiling, arch: int) -> str | None:
    """PTX ISA that the code needs beyond what its architecture does: st.async is of 8.1."""
    return "8.1" if tiling.splits > 1 and arch == _CLUSTER_SM else None


_BLOCK_US, _STAGE_US = 2.1, 0.39
"""Latency of a launch and of a block's first loads, which a wave of blocks pays once, and of each stage from the third on."""
_SECOND_US: dict[Precision, float] = {"fp32": 0.18, "fp16": 0.59}
"""Of the second stage: halves of the first are waited for before those of the second are asked for."""
_PUSH_CYCLES, _STORE_CYCLES, _LOOP_CYCLES = 1.9, 6.1, 9.9
"""Of one warp's `vec` sums stored to another block's shared memory, of its sum of each thread finished and stored, and of
its way into and out of one output channel's nonzeros of a stage."""
_FIRST_BYTES_PER_CYCLE = 32.0
"""At which a block's first stage arrives, while it has nothing to compute."""
_SHARED_SHARE, _FEW_WARPS = 0.887, 0.176
"""Measured over counted cycles of shared-memory words; how much more where an SM has below 20 warps."""
_ISSUE_SHARE: dict[Precision, float] = {"fp32": 0.42, "fp16": 1.6}
"""Measured over counted issue slots of the other instructions; halves go to shared memory through registers.

These are a least-squares fit to 175 tilings of ResNet-50's 3x3 layers at 90, 95 and 98 %, N=1, 8 and 32, measured on an
H200; its root-mean-square error is 6 %.
"""
_UNEVEN = 0.5
"""Blocks more on the busiest SM than their number says, where several share one."""
_CLUSTER_SMS = 120 / 132
"""Share of the SMs that clusters of 4 or 8 reach: processing clusters have unequal numbers of SMs (measured on an H200)."""


@dataclass(frozen=True)
class Estimate:
    """A predicted time of a tiling and what binds it."""

    us: float
    bound: str


def _registers(device: Device) -> int:
    """Registers that a block may have."""
    return 32768 if device.sm == 53 else 65536


_COLUMNS = ("images", "groups", "rows", "cols", "warps", "sets", "slots", "splits", "stage", "buffers")


@dataclass(frozen=True)
class _Space:
    """Tilings of one geometry and batch as columns, one entry per tiling: what does not depend on the nonzeros.

    Columns of `shape` are _COLUMNS.
    """

    geometry: Geometry
    pairs: Literal["none", "images", "rows"]
    shape: Longs
    stages: Longs
    tiles: Longs
    channel_blocks: Longs
    conflicts: NDArray[np.float64]
    image_words: Longs
    tile_words: Longs
    """Input words that a block reads per channel, halo included."""
    vector: Longs

    def only(self, rows: Longs) -> _Space:
        """Those tilings alone."""
        columns = {f.name: getattr(self, f.name)[rows] for f in fields(self) if f.name not in ("geometry", "pairs")}
        return replace(self, **columns)

    def tiling(self, k: int) -> Tiling:
        """The k-th tiling."""
        values = dict(zip(_COLUMNS, (int(value) for value in self.shape[k]), strict=True))
        return Tiling(self.geometry, pairs=self.pairs, **values)

    @classmethod
    def of(cls, tilings: Sequence[Tiling], n: int) -> _Space:
        """The columns of tilings that differ neither in geometry nor in pairs."""
        first = tilings[0]
        g = first.geometry
        shape = [[getattr(t, name) for name in _COLUMNS] for t in tilings]

        def column(values: Iterable[int]) -> Longs:
            return np.fromiter(values, np.int64, len(tilings))

        return cls(
            g, first.pairs, np.array(shape, np.int64), column(t.stages(g.ic // g.group) for t in tilings),
            column(t.tile_count(n) for t in tilings), column(len(t.channel_blocks()) for t in tilings),
            np.array([t.conflicts for t in tilings]), column(t.layout()[1] for t in tilings),
            column(t.images * t.in_rows * t.in_cols for t in tilings),
            column(_RUN_HALVES if t.flat else t.vector for t in tilings),
        )  # fmt: skip


def _work(space: _Space, nnz: int, device: Device) -> dict[str, NDArray[np.float64]]:
    """Counted work of each tiling on its busiest SM: what `_times` weighs with measured constants."""
    g, s = space.geometry, space
    images, groups, rows, cols, warps, sets, slots, splits, stage, buffers = s.shape.T
    channels, threads = sets * slots, sets * warps * 32
    blocks = s.tiles * s.channel_blocks * splits
    sms = np.where(splits >= 4, _sms(4, device), _sms(1, device))
    per_sm = -(-blocks // sms)
    # Of the fullest block: the last one may have fewer channels.
    taps = nnz * np.minimum(channels, g.oc) / g.oc / splits
    per_slot = taps / (channels * s.stages)
    # The fullest set keeps the others waiting, stage by stage.
    spread = 1 + 1.5 / np.sqrt(np.maximum(taps / sets / s.stages, 1.0))
    vec = np.where(rows >= 3, 4, rows)
    units = -(-rows // vec) * channels
    received = np.where(splits > 1, 4 + splits * -(-units // splits) * images * groups * cols * vec, 0)
    capacity = np.round(per_slot + 3 * np.sqrt(per_slot)) + 4
    table = channels * (3 + 3 * s.stages) + 2 * s.stages
    buffer = stage * images * s.image_words + channels * capacity * 2
    shared_bytes = 4 * (table + buffer * np.minimum(s.stages, buffers) + received)
    fits = device.shared_kb_per_block * 1024 // shared_bytes
    live = np.where(s.stages == 1, rows, slots * rows)
    # As many registers as the compiler takes where one block is all that it is asked for.
    resident = np.minimum(_registers(device) // (threads * (live + 80)), np.minimum(fits, 2048 // threads))
    resident = np.maximum(resident, 1)
    waves = -(-per_sm // resident)
    # Blocks that share SMs are not laid evenly, least of all beside those of the launch ahead.
    per_sm = per_sm + _UNEVEN * ((per_sm > 1) & (resident > 1))
    halves = 1 if s.pairs == "none" else 2
    items = stage * s.stages * s.tile_words / s.vector * halves
    decodes = channels * s.stages * warps * -(-np.round(1.3 * per_slot + 0.5) // (32 * warps))
    return {
        "fits": fits >= 1,
        "waves": waves,
        "warps": np.minimum(per_sm, resident) * threads / 32,
        "words": per_sm * taps * spread * warps * (rows * s.conflicts + 0.5),
        "other": per_sm * (decodes * 25 + items / 32 * 6) / 2,
        "loops": per_sm * channels * warps * s.stages,
        "pushes": np.where(splits > 1, per_sm * units * warps, 0),
        "stores": per_sm * np.minimum(channels, g.oc) * rows * warps * halves / splits,
        "first_words": waves * stage * s.tile_words * halves,
        "fill_words": s.tiles * (g.ic * s.tile_words * s.channel_blocks / g.group) * halves,
    }


def _times(
    space: _Space, nnz: int, device: Device, precision: Precision
) -> tuple[NDArray[np.float64], NDArray[np.bool_]]:
    """Predicted microseconds of each tiling, infinite where it cannot fit, and whether the L2 fill binds."""
    work = _work(space, nnz, device)
    clock_khz = device.fp32_tflops * 1e9 / (device.sm_count * 256)
    shared = work["words"] * _SHARED_SHARE * (1 + _FEW_WARPS * np.maximum(0.0, 20 / work["warps"] - 1))
    compute = shared + work["other"] * _ISSUE_SHARE[precision]
    compute += work["pushes"] * _PUSH_CYCLES + work["stores"] * _STORE_CYCLES + work["loops"] * _LOOP_CYCLES
    compute += work["first_words"] * ELEMENT_BYTES[precision] / _FIRST_BYTES_PER_CYCLE
    compute *= 1e3 / clock_khz
    fill = work["fill_words"] * ELEMENT_BYTES[precision] / (1.3 * device.bandwidth_gbs) / 1e3
    latency = _BLOCK_US + _SECOND_US[precision] * (space.stages > 1) + _STAGE_US * np.maximum(0, space.stages - 2)
    us = work["waves"] * latency + np.maximum(compute, fill)
    return np.where(work["fits"], us, np.inf), fill > compute


def estimate(tiling: Tiling, nnz: int, n: int, device: Device, precision: Precision) -> Estimate:
    """Time from what binds: shared-memory words, L2 fill with halos, other instructions, sums in clusters, waves.

    Clock from the fp32 peak (128 lanes an SM); L2 at 1.3 times the device's memory bandwidth, as measured on an H200
    (5.5 TB/s against 4.2). Infinite when the tiling cannot fit the device's shared memory.
    """
    us, filling = _times(_Space.of([tiling], n), nnz, device, precision)
    return Estimate(float(us[0]), "shared" if np.isinf(us[0]) or not filling[0] else "l2")


def measured(layer: ConvLayer, device: Device, precision: Precision, batch: int, per_nonzero: int) -> Prediction | None:
    """`predict` on the devices that it was fitted for (sm_90), when a tiling fits; None elsewhere."""
    if device.sm != _CLUSTER_SM:
        return None
    try:
        return predict(layer, device, precision, batch, per_nonzero)
    except UnfitWeightsError:
        return None


def predict(layer: ConvLayer, device: Device, precision: Precision, batch: int, per_nonzero: int = 4) -> Prediction:
    """Predicted time of the layer with the tiling that would be built for the device, never below its memory traffic.

    `per_nonzero` is the bytes of the format per nonzero. Raises ValueError for a layer without geometry or zeros,
    UnfitWeightsError (one too) when no tiling fits.
    """
    g, zeros = layer.geometry, layer.zeros
    if g is None or zeros is None:
        raise ValueError(f"{layer.name}: a time cannot be predicted without its geometry and zeros")
    space = _shortlist(g, device, batch, precision, device.sm >= _CLUSTER_SM)
    times, filling = _times(space, zeros.nnz, device, precision)
    if not np.isfinite(times).any():
        raise _unfit(g, device)
    best = int(np.argmin(times))
    us = float(times[best])
    activations = batch * (g.ic * g.h * g.w + g.oc * g.oh * g.ow) * ELEMENT_BYTES[precision]
    memory_us = (activations + per_nonzero * zeros.nnz) / device.bandwidth_gbs / 1e3
    return Prediction(
        us=max(us, memory_us),
        bound="memory" if memory_us > us else "l2" if filling[best] else "shared",
        source="the data-driven kernel's bounds (shared-memory words, L2 fill, waves) at this device's peaks; fitted on an H200",
    )


_SETS = (4, 6, 8, 9, 10, 11, 12, 14, 15, 16, 18, 19, 20, 22, 24)
_SLOTS = (1, 2, 3, 4, 6, 8)
_SPLITS = (1, 2, 4, 8)
_MAX_WARPS = 32
_PIXEL_SHAPES = 8
_TILE_SHARE = 0.7
"""Of the device's shared memory, for the stages' inputs: the rest holds weights and sums."""


@lru_cache(maxsize=4)
def _tilings(g: Geometry, shared_kb: int, registers: int, n: int, precision: Precision, clusters: bool) -> _Space:
    """All tilings worth an estimate, perhaps none."""
    pairs: Literal["none", "images", "rows"] = "none"
    if precision == "fp16":
        pairs = "images" if n >= 2 else "rows"
    rows_out = -(-g.oh // 2) if pairs == "rows" else g.oh
    batch = -(-n // 2) if pairs == "images" else n
    per_oc, per_ic = g.oc // g.group, g.ic // g.group
    shapes = [Tiling(g, *shape, pairs=pairs) for shape in _pixel_shapes(g, rows_out, batch)]
    axes = (
        np.arange(len(shapes)),
        np.array(_SETS),
        np.array(_SLOTS),
        np.array(_SPLITS if clusters else (1,)),
        np.arange(6),
    )
    pixel, sets, slots, splits, cut = (axis.ravel() for axis in np.meshgrid(*axes, indexing="ij"))

    def column(values: Iterable[int]) -> Longs:
        each: Longs = np.fromiter(values, np.int64, len(shapes))[pixel]  # one value per tiling from one per shape
        return each

    rows, warps = column(t.rows for t in shapes), column(t.warps for t in shapes)
    image_words = column(t.images * t.layout()[1] for t in shapes)
    channels, threads = sets * slots, sets * warps * 32
    together = np.minimum(np.maximum(1, channels // per_oc), g.group)
    range_ic = -(-per_ic * together // splits)
    # The range at once, in halves or quarters that stay, or in pieces through two buffers.
    stage = np.select(
        [cut == 0, cut == 1, cut == 2], [range_ic, -(-range_ic // 2), -(-range_ic // 4)], 2 ** np.maximum(8 - cut, 0)
    )
    buffers = np.where(cut == 2, 4, 2)
    stages = -(-range_ic // stage)
    tile_bytes = 4 * np.minimum(buffers, stages) * stage * image_words
    keep = (
        (sets * warps <= _MAX_WARPS)
        & (threads * (np.where(stages == 1, rows, slots * rows) + 64) <= registers)
        & (slots * rows <= 64)
        & ((slots == 1) | (sets * (slots // 2) < g.oc))
        & ((splits == 1) | ((g.group == 1) & (per_ic >= 8 * splits) & (channels >= splits)))
        & (stage <= range_ic)
        & ((cut < 3) | (stages > 2))
        & ((cut != 2) | (stages > 2))
        & ((stages > 1) | (cut == 0))
        & (tile_bytes <= _TILE_SHARE * 1024 * shared_kb)
    )
    pixel, channels = pixel[keep], channels[keep]
    blocks = np.where(
        per_oc >= channels, g.group * -(-per_oc // channels), -(-g.group // np.maximum(1, channels // per_oc))
    )
    vector = column(t.vector for t in shapes)
    if any(t.whole_maps for t in shapes):
        images = column(t.images for t in shapes)
        runs = _in_runs(g, images, rows[keep], threads[keep], slots[keep], stage[keep])
        vector = np.where(column(t.whole_maps for t in shapes).astype(bool) & runs, _RUN_HALVES, vector)
    front = [column(getattr(t, name) for t in shapes) for name in _COLUMNS[:5]]
    return _Space(
        g, pairs, np.stack([*front, sets[keep], slots[keep], splits[keep], stage[keep], buffers[keep]], 1), stages[keep],
        column(t.tile_count(n) for t in shapes), blocks,
        np.array([t.conflicts for t in shapes])[pixel], column(t.layout()[1] for t in shapes),
        column(t.images * t.in_rows * t.in_cols for t in shapes), vector,
    )  # fmt: skip


_SHORTLISTS: dict[tuple[object, ...], _Space] = {}
_SHORT = 32
"""Tilings kept per density: a plan asks for times at many sparsities of every layer."""


def _shortlist(geometry: Geometry, device: Device, n: int, precision: Precision, clusters: bool) -> _Space:
    """The best tilings at each of some densities."""
    # All that times depend on: a device whose ceilings were measured keeps its name.
    ceilings = (device.sm, device.sm_count, device.shared_kb_per_block, device.bandwidth_gbs, device.fp32_tflops)
    key = (geometry, ceilings, n, precision, clusters)
    if key not in _SHORTLISTS:
        space = _space(geometry, device, n, precision, clusters)
        total = geometry.oc * geometry.ic // geometry.group * geometry.kh * geometry.kw
        times = [_times(space, round(total * density), device, precision)[0] for density in (1, 0.3, 0.1, 0.03, 0)]
        best = np.unique(np.concatenate([np.argsort(us, kind="stable")[:_SHORT] for us in times]))
        _SHORTLISTS[key] = space.only(best)
    return _SHORTLISTS[key]


def _space(geometry: Geometry, device: Device, n: int, precision: Precision, clusters: bool) -> _Space:
    return _tilings(geometry, device.shared_kb_per_block, _registers(device), n, precision, clusters)


def _pixel_shapes(g: Geometry, rows_out: int, batch: int) -> list[tuple[int, int, int, int, int]]:
    """(images, groups, rows, cols, warps) whose lanes are mostly pixels, best first."""
    found: dict[tuple[int, int, int, int, int], float] = {}
    for rows in range(1, min(8, rows_out) + 1):
        groups_out = -(-rows_out // rows)
        for warps in (1, 2, 4):
            lanes = warps * 32
            for cols in {min(g.ow, lanes), min(32, g.ow), -(-g.ow // 2), -(-g.ow // 4)}:
                if cols > lanes:
                    continue
                groups = max(1, min(lanes // cols, groups_out))
                images = max(1, min(lanes // (cols * groups), batch)) if groups == groups_out and cols == g.ow else 1
                height, width = -(-rows_out // (groups * rows)) * groups * rows, -(-g.ow // cols) * cols
                use = rows_out * g.ow * batch / (height * width * -(-batch // images) * images)
                worth = use * (images * groups * cols / lanes) * rows / (rows + 0.75) / warps**0.1
                found[images, groups, rows, cols, warps] = worth
    return sorted(found, key=lambda shape: (-found[shape], shape))[:_PIXEL_SHAPES]


def ranked(
    geometry: Geometry, nnz: int, device: Device, n: int, precision: Precision, clusters: bool
) -> Iterator[tuple[Tiling, Estimate]]:
    """All tilings that may fit, least predicted time first."""
    space = _space(geometry, device, n, precision, clusters)
    times, filling = _times(space, nnz, device, precision)
    for k in np.argsort(times, kind="stable"):
        if np.isinf(times[k]):
            return
        yield space.tiling(int(k)), Estimate(float(times[k]), "l2" if filling[k] else "shared")


def choose(
    geometry: Geometry, nnz: int, device: Device, n: int, precision: Precision, clusters: bool
) -> tuple[Tiling, Estimate]:
    """The tiling with the least predicted time; UnfitWeightsError when none fits."""
    for best in ranked(geometry, nnz, device, n, precision, clusters):
        return best
    raise _unfit(geometry, device)


def _unfit(geometry: Geometry, device: Device) -> UnfitWeightsError:
    return UnfitWeightsError(f"no tiling of {geometry} fits {device.shared_kb_per_block} KB of shared memory")


def _fitting(node: SparseConv, fmt: Format, nonzeros: Nonzeros, device: Device, options: BuildOptions) -> Tiling:
    """The first tiling by predicted time whose real shared memory fits: the fullest slot is known only with the weights."""
    clusters = min(options.archs) >= _CLUSTER_SM
    limit = device.shared_kb_per_block * 1024
    for tiling, _ in ranked(node.geometry, len(nonzeros.oc), device, options.batch, options.precision, clusters):
        # The tile alone rules most of the rest out, without making their tables.
        if tiling.shared_bytes(1, 2) <= limit and tiling.shared_bytes(*make_table(tiling, fmt, nonzeros)[1:]) <= limit:
            return tiling
    raise UnfitWeightsError(
        f"{node.layer}: {len(nonzeros.oc)} nonzero weights at {node.geometry.h}x{node.geometry.w} do not fit the "
        f"{device.shared_kb_per_block} KB of shared memory of {device.title} in any tiling"
    )


def with_code(
    built: Built,
    fmt: Format,
    nonzeros: Nonzeros,
    device: Device,
    options: BuildOptions,
    tiling: Tiling | None = None,
    scale: float = 1.0,
) -> Built:
    """The built node with table, images and plan for the options' architectures; unchanged when they name none.

    `scale` is what sums of the carried weights must be multiplied by.

    Where the compiler is missing the node keeps its weights alone and a note says so. Raises AssembleError when a
    compiler refuses the source, UnfitWeightsError when no tiling fits the device.
    """
    if not options.archs:
        return built
    node = built.node
    tiling = tiling or _fitting(node, fmt, nonzeros, device, options)
    table, stages, capacity = make_table(tiling, fmt, nonzeros)
    text = source(tiling, fmt, node.epilogue, options.precision, stages, capacity, scale)
    images: list[Image] = []
    record = {**built.record, "ptx_bytes": 0.0, "compile_s": 0.0, "assemble_s": 0.0}
    try:
        for arch in options.archs:
            made = compile_cuda(text, arch, name="direct.cu", isa=_isa(tiling, arch))
            images.append(Image(arch, options.precision, "ptx", made.data))
            record["ptx_bytes"] += len(made.data)
            record["compile_s"] += made.seconds
            if options.assemble:
                assembled = assemble(made.data, arch)
                images.append(Image(arch, options.precision, "cubin", assembled.cubin))
                record["assemble_s"] += assembled.seconds
    except MachineError as error:
        return replace(built, notes=(*built.notes, f"{node.layer}: no code, weights alone: {error}"))
    blocks = len(blocks_of_channels(tiling, nonzeros))
    # An older image on a newer device would start early and not wait: overlap only where every image waits.
    overlap = min(options.archs) >= _CLUSTER_SM
    shared_bytes = tiling.shared_bytes(stages, capacity)
    plan = make_plan(tiling, fmt, node.epilogue, options.precision, blocks, shared_bytes, device if overlap else None)
    node = replace(node, constants=(*node.constants, table), plan=plan, images=tuple(images))
    return replace(built, node=node, record=record)

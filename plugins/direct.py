"""Code and launch plan of the data-driven kernels: how `packed` and `csr` are run by direct.cu.

The source is fixed; what a layer adds is a head of definitions (geometry, tiling, epilogue) and one more INT32 constant,
the *table*: which output channels stand together in a block, which input channels form a stage, and where in the
format's own arrays the nonzeros of each lie. The table only orders the nonzeros; the weights are those of the format.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
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

    def tiles(self) -> Expr:
        """Tiles over the batch, for any N, OH and OW."""
        rows = (var("OH") + 1) // 2 if self.pairs == "rows" else var("OH")
        batch = (var("N") + 1) // 2 if self.pairs == "images" else var("N")
        return batch.ceil_div(self.images) * rows.ceil_div(self.tile_rows) * var("OW").ceil_div(self.cols)

    def tile_count(self, n: int) -> int:
        """`tiles` at batch n."""
        g = self.geometry
        return self.tiles().value({"N": n, "OH": g.oh, "OW": g.ow, "H": g.h, "W": g.w})

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
        received = (
            self.splits * -(-self.channels // self.splits) * self.rows * self.warps * 32 if self.splits > 1 else 0
        )
        table = -(-(2 * stages + self.channels * (2 + 3 * stages)) // 4) * 4
        return 4 * (table + buffer * min(stages, 2) + received)


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
        for parts in splits:
            words += [value for part in parts for value in part]
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
            dealt = _deal(counts, tiling.sets, tiling.slots)
            for slot in (slot for group in dealt for slot in group):
                words += [slot, padded[slot], *cuts[slot].ravel().tolist()]
        words += padded
    return np.array(words, np.int64).astype(np.int32), stages, capacity + capacity % 2


_ACTIVATIONS = {"none": 0, "relu": 1, "clip": 2, "leaky_relu": 3}
_RESIDUALS = {"none": 0, "before_activation": 1, "after_activation": 2}


def _literal(value: float) -> str:
    """An exact C float literal; INFINITY has none, so the largest float stands for an open bound."""
    limit = float(np.finfo(np.float32).max)
    return f"({float(np.float32(min(max(value, -limit), limit))).hex()}f)"


def source(tiling: Tiling, fmt: Format, epilogue: Epilogue, precision: Precision, stages: int, capacity: int) -> str:
    """direct.cu under its definitions."""
    g = tiling.geometry
    pitch, image = tiling.layout()
    definitions: dict[str, int | str] = {
        "IC": g.ic, "OC": g.oc, "KH": g.kh, "KW": g.kw, "SH": g.stride[0], "SW": g.stride[1], "DH": g.dilation[0],
        "DW": g.dilation[1], "PT": g.pads[0], "PL": g.pads[1], "PB": g.pads[2], "PR": g.pads[3],
        "FIXED_H": g.h, "FIXED_W": g.w, "CSR": int(fmt == "csr"), "HALF": int(precision == "fp16"),
        "PAIRS": int(tiling.pairs != "none"), "PAIR_IMAGES": int(tiling.pairs == "images"),
        "IMAGES": tiling.images, "GROUPS": tiling.groups, "ROWS": tiling.rows, "COLS": tiling.cols,
        "WARPS": tiling.warps, "SETS": tiling.sets, "SLOTS": tiling.slots, "SPLITS": tiling.splits,
        "STAGES": stages, "STAGE": tiling.stage, "CAPACITY": capacity, "VECTOR": tiling.vector, "SHIFT": tiling.shift,
        "PITCH": pitch, "IMAGE": image, "BIAS": int(epilogue.bias), "ACTIVATION": _ACTIVATIONS[epilogue.activation],
        "RESIDUAL": _RESIDUALS[epilogue.residual], "SLOPE": _literal(epilogue.slope), "LOW": _literal(epilogue.low),
        "HIGH": _literal(epilogue.high),
    }  # fmt: skip
    head = "".join(f"#define {name} {value}\n" for name, value in definitions.items())
    return head + files("sparsedeploy.plugins").joinpath("direct.cu").read_text(encoding="utf-8")


def make_plan(
    tiling: Tiling, fmt: Format, epilogue: Epilogue, precision: Precision, blocks: int, shared_bytes: int, overlap: bool
) -> Plan:
    """One launch, for every N (and every H and W where the format allows).

    `overlap` lets it start before the op ahead ends; the code then waits by itself (sm_90 and later only).
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
        ENTRY, (tiling.tiles() * tiling.splits, const(blocks), const(1)), (tiling.threads, 1, 1), tuple(args), shared_bytes,
        cluster=tiling.splits, dependent=overlap,
    )  # fmt: skip
    return (Variant(precision, (launch,)),)


_BLOCK_US = 4.0
"""Latency of a launch and of a block's first loads, which a wave of blocks pays once."""
_PUSH_CYCLES = 21.0
"""Of one warp's store of 128 bytes to another block's shared memory."""
_SHARED_SHARE, _FEW_WARPS, _ISSUE_SHARE = 1.02, 0.31, 2.7
"""Measured over counted cycles of shared-memory words (more below 16 warps), and of the other instructions.

These five are a least-squares fit to 101 tilings of ResNet-50's 3x3 layers at 90 %, N=1 and 32, measured on an H200; its
root-mean-square error is 15 %.
"""


@dataclass(frozen=True)
class Estimate:
    """A predicted time of a tiling and what binds it."""

    us: float
    bound: str


def _registers(device: Device) -> int:
    """Registers that a block may have."""
    return 32768 if device.sm == 53 else 65536


def estimate(tiling: Tiling, nnz: int, n: int, device: Device, precision: Precision) -> Estimate:
    """Time from what binds: shared-memory words, L2 fill with halos, other instructions, sums in clusters, waves.

    Clock from the fp32 peak (128 lanes an SM); L2 at 1.3 times the device's memory bandwidth, as measured on an H200
    (5.5 TB/s against 4.2). Infinite when the tiling cannot fit the device's shared memory.
    """
    g, t = tiling.geometry, tiling
    clock_khz = device.fp32_tflops * 1e9 / (device.sm_count * 256)
    channel_blocks = len(t.channel_blocks())
    blocks = t.tile_count(n) * channel_blocks * t.splits
    stages = t.stages(g.ic // g.group)
    taps = nnz / (channel_blocks * t.splits)
    per_slot = taps / (t.channels * stages)
    # The fullest set keeps the others waiting, stage by stage.
    spread = 1 + 1.0 / math.sqrt(max(taps / t.sets / stages, 1.0))
    fits = device.shared_kb_per_block * 1024 // t.shared_bytes(stages, round(1.5 * per_slot) + 4)
    if fits == 0:
        return Estimate(math.inf, "shared")
    resident = max(1, min(_registers(device) // (t.threads * (t.slots * t.rows + 48)), fits, 2048 // t.threads))
    per_sm = -(-blocks // device.sm_count)
    busy_warps = min(per_sm, resident) * t.threads / 32
    words = taps * spread * t.warps * (t.rows * t.conflicts + 0.5)
    shared = per_sm * words * _SHARED_SHARE * (1 + _FEW_WARPS * max(0.0, 16 / busy_warps - 1))
    items = t.stage * stages * t.images * t.in_rows * t.in_cols / t.vector * (2 if t.pairs != "none" else 1)
    decodes = t.channels * stages * t.warps * -(-round(1.3 * per_slot + 0.5) // (32 * t.warps))
    other = per_sm * (decodes * 25 + items / 32 * 6) / 2 * _ISSUE_SHARE
    pushes = per_sm * t.channels * t.rows * t.warps * _PUSH_CYCLES if t.splits > 1 else 0.0
    compute = (shared + other + pushes) / clock_khz * 1e3
    fill_words = g.ic * t.images * t.in_rows * t.in_cols * channel_blocks / g.group
    bytes_each = ELEMENT_BYTES[precision] * (2 if t.pairs != "none" else 1)
    fill = t.tile_count(n) * fill_words * bytes_each / (1.3 * device.bandwidth_gbs) / 1e3
    waves = -(-per_sm // resident)
    return Estimate(waves * _BLOCK_US + max(compute, fill), "shared" if compute >= fill else "l2")


def predict(layer: ConvLayer, device: Device, precision: Precision, batch: int) -> Prediction:
    """Predicted time of the layer with the tiling that would be built for the device, never below its memory traffic.

    Raises ValueError for a layer without geometry or zeros.
    """
    g, zeros = layer.geometry, layer.zeros
    if g is None or zeros is None:
        raise ValueError(f"{layer.name}: a time cannot be predicted without its geometry and zeros")
    _, guess = choose(g, zeros.nnz, device, batch, precision, device.sm >= _CLUSTER_SM)
    activations = batch * (g.ic * g.h * g.w + g.oc * g.oh * g.ow) * ELEMENT_BYTES[precision]
    memory_us = (activations + 4 * zeros.nnz) / device.bandwidth_gbs / 1e3
    return Prediction(
        us=max(guess.us, memory_us),
        bound=guess.bound if guess.us >= memory_us else "memory",
        source="the data-driven kernel's bounds (shared-memory words, L2 fill, waves) at this device's peaks; fitted on an H200",
    )


def candidates(geometry: Geometry, device: Device, n: int, precision: Precision, clusters: bool) -> Iterator[Tiling]:
    """Tilings worth an estimate."""
    g, registers = geometry, _registers(device)
    limit = device.shared_kb_per_block * 1024
    per_oc, per_ic = g.oc // g.group, g.ic // g.group
    pair_kinds: list[Literal["none", "images", "rows"]] = ["none"]
    if precision == "fp16":
        pair_kinds = ["images"] if n >= 2 else ["rows"]
    for pairs in pair_kinds:
        rows_out = -(-g.oh // 2) if pairs == "rows" else g.oh
        batch = -(-n // 2) if pairs == "images" else n
        for images, groups, rows, cols, warps in _pixel_shapes(g, rows_out, batch):
            for sets in (4, 8, 16):
                if sets * warps > 16:
                    continue
                for slots in (1, 2, 4, 8):
                    if slots * rows > min(64, registers // (sets * warps * 32) - 64) or (
                        slots > 1 and sets * (slots // 2) >= per_oc * max(1, g.group)
                    ):
                        continue
                    for splits in (1, 2, 4, 8) if clusters else (1,):
                        if splits > 1 and (g.group > 1 or per_ic < 8 * splits or sets * slots < splits):
                            continue
                        made = Tiling(g, images, groups, rows, cols, warps, sets, slots, splits, 1, pairs)
                        yield from _staged(made, limit, per_oc, per_ic)


def _staged(tiling: Tiling, limit: int, per_oc: int, per_ic: int) -> Iterator[Tiling]:
    """The tiling with stages that fit shared memory with room for weights."""
    together = max(1, tiling.channels // per_oc)
    range_ic = -(-min(per_ic * together, tiling.geometry.ic) // tiling.splits)
    _, image = tiling.layout()
    sizes = {range_ic, -(-range_ic // 2), -(-range_ic // 4), 32, 16, 8, 4, 2, 1}
    found = 0
    for stage in sorted((size for size in sizes if size <= range_ic), reverse=True):
        buffers = 1 if stage == range_ic else 2
        if 4 * buffers * stage * tiling.images * image <= limit * 0.7:
            yield replace(tiling, stage=stage)
            found += 1
            if found == 2:
                return


def _pixel_shapes(g: Geometry, rows_out: int, batch: int) -> list[tuple[int, int, int, int, int]]:
    """(images, groups, rows, cols, warps) whose lanes are mostly pixels, best first."""
    found: list[tuple[float, tuple[int, int, int, int, int]]] = []
    for rows in range(1, 9):
        if rows > rows_out:
            break
        groups_out = -(-rows_out // rows)
        for warps in (1, 2, 4):
            lanes = warps * 32
            for cols in {min(g.ow, lanes), min(32, g.ow), -(-g.ow // 2), -(-g.ow // 4)}:
                if cols > lanes:
                    continue
                groups = max(1, min(lanes // cols, groups_out))
                images = max(1, min(lanes // (cols * groups), batch)) if groups == groups_out and cols == g.ow else 1
                covered = (
                    -(-rows_out // (groups * rows))
                    * groups
                    * rows
                    * (-(-g.ow // cols) * cols)
                    * -(-batch // images)
                    * images
                )
                use = rows_out * g.ow * batch / covered * (images * groups * cols / lanes)
                worth = use * rows / (rows + 0.75) / warps**0.1
                found.append((worth, (images, groups, rows, cols, warps)))
    found.sort(key=lambda item: (-item[0], item[1]))
    return [shape for _, shape in found[:10]]


def ranked(
    geometry: Geometry, nnz: int, device: Device, n: int, precision: Precision, clusters: bool
) -> list[tuple[Tiling, Estimate]]:
    """All tilings, least predicted time first, those that cannot fit last; UnfitWeightsError when there is none."""
    made = [(t, estimate(t, nnz, n, device, precision)) for t in candidates(geometry, device, n, precision, clusters)]
    if not made:
        raise UnfitWeightsError(f"no tiling of {geometry} fits {device.shared_kb_per_block} KB of shared memory")
    return sorted(made, key=lambda item: item[1].us)


def choose(
    geometry: Geometry, nnz: int, device: Device, n: int, precision: Precision, clusters: bool
) -> tuple[Tiling, Estimate]:
    """The tiling with the least predicted time."""
    return ranked(geometry, nnz, device, n, precision, clusters)[0]


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
    built: Built, fmt: Format, nonzeros: Nonzeros, device: Device, options: BuildOptions, tiling: Tiling | None = None
) -> Built:
    """The built node with table, images and plan for the options' architectures; unchanged when they name none.

    Where the compiler is missing the node keeps its weights alone and a note says so. Raises AssembleError when a
    compiler refuses the source, UnfitWeightsError when no tiling fits the device.
    """
    if not options.archs:
        return built
    node = built.node
    tiling = tiling or _fitting(node, fmt, nonzeros, device, options)
    table, stages, capacity = make_table(tiling, fmt, nonzeros)
    text = source(tiling, fmt, node.epilogue, options.precision, stages, capacity)
    images: list[Image] = []
    record = {**built.record, "ptx_bytes": 0.0, "compile_s": 0.0, "assemble_s": 0.0}
    try:
        for arch in options.archs:
            made = compile_cuda(text, arch, name="direct.cu")
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
    overlap, shared_bytes = min(options.archs) >= _CLUSTER_SM, tiling.shared_bytes(stages, capacity)
    plan = make_plan(tiling, fmt, node.epilogue, options.precision, blocks, shared_bytes, overlap)
    node = replace(node, constants=(*node.constants, table), plan=plan, images=tuple(images))
    return replace(built, node=node, record=record)

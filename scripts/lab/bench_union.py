"""The union tensor-core kernel (union.cu): pack weights, compile tilings, check against float64 and time beside cuDNN.

python scripts/lab/bench_union.py prepare FOLDER [--only TEXT]     # needs sparsedeploy's NVRTC and ptxas wheels, no GPU
python scripts/lab/bench_union.py run FOLDER --out results.json    # needs torch and a GPU
python scripts/lab/bench_union.py emulate                          # the tables, interpreted in numpy
"""

from __future__ import annotations

import argparse
import gzip
import json
import os
import pickle
import sys
import time
from concurrent.futures import Future, ProcessPoolExecutor
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from sparsedeploy.layer import Epilogue, Geometry
from sparsedeploy.plugins.launch import Arg, Launch, Variant, const, var
from sparsedeploy.plugins.node import Image, SparseConv

Ints = NDArray[np.int32]
Floats = NDArray[np.float32]
GROUP, STEP, LANES, STEP_WORDS = 16, 32, 8, 288
SHARED_MAX = 227 * 1024 - 1024
AHEAD = 4
"""Steps that a warp may load past its last."""
SHAPES = ((64, 56), (128, 28), (256, 14), (512, 7))


@dataclass(frozen=True)
class Tiling:
    """The compile-time shape of union.cu for one layer. Names as there, in lower case."""

    geometry: Geometry
    th: int
    tw: int
    ln: int = 8
    ly: int = 1
    lx: int = 1
    groups: int = 4
    rw: int = 1
    cw: int = 0
    producers: int = 4
    splits: int = 1
    chunk: int = 16
    ring: int = 8
    unroll: int = 0
    overlap: int = 1
    held: int = 6
    blocks: int = 1
    times: int = 0
    depth: int = 1

    @property
    def columns(self) -> int:
        """Output columns of a warp."""
        return self.cw or self.tw

    @property
    def parts(self) -> tuple[int, int]:
        """Warps of a group, down and across."""
        return -(-self.th // self.rw), -(-self.tw // self.columns)

    @property
    def consumers(self) -> int:
        """Warps that compute."""
        return self.groups * self.parts[0] * self.parts[1]

    @property
    def threads(self) -> int:
        """Threads of a block."""
        return 32 * (self.consumers + self.producers)

    @property
    def in_rows(self) -> int:
        """Input rows of a lane's patch."""
        g = self.geometry
        return (self.th - 1) * g.stride[0] + (g.kh - 1) * g.dilation[0] + 1

    @property
    def in_cols(self) -> int:
        """Input columns of a lane's patch, and the pitch of its rows in 16-byte rows."""
        g = self.geometry
        return (self.tw - 1) * g.stride[1] + (g.kw - 1) * g.dilation[1] + 1

    @property
    def per_channel(self) -> int:
        """16-byte rows from channel to channel: odd, so that channels start in different banks."""
        return self.in_rows * self.in_cols | 1

    @property
    def ic_block(self) -> int:
        """Input channels of a rank."""
        return -(-self.geometry.ic // self.splits)

    @property
    def chunks(self) -> int:
        """Chunks of a rank."""
        return -(-self.ic_block // self.chunk)

    @property
    def slots(self) -> int:
        """Chunks that shared memory holds."""
        return min(self.ring, self.chunks)

    @property
    def oc_blocks(self) -> int:
        """Blocks of output channels."""
        return -(-self.geometry.oc // (GROUP * self.groups))

    @property
    def pair(self) -> bool:
        """Whether two neighbouring pixels are loaded in one word."""
        g = self.geometry
        one = self.lx * self.tw >= g.ow and self.lx == 1
        return g.w % 2 == 0 and (one or self.tw * g.stride[1] % 2 == 0)

    @property
    def pair_out(self) -> bool:
        """Whether two neighbouring outputs are stored in one word."""
        return self.geometry.ow % 2 == 0 and self.tw % 2 == 0

    @property
    def in_flight(self) -> int:
        """Tasks of a producer whose loads are in flight at once."""
        if self.unroll:
            return self.unroll
        g, vec = self.geometry, 2 if self.pair else 1
        whole_x = self.lx == 1 and self.tw >= g.ow and g.pads[1] + g.w <= self.in_cols
        whole_y = self.ly == 1 and self.th >= g.oh and g.pads[0] + g.h <= self.in_rows
        tasks = self.chunk * (g.h if whole_y else self.in_rows) * (g.w if whole_x else self.in_cols + vec - 1) // vec
        each = -(-tasks // (32 * max(self.producers, 1)))
        return -(-each // -(-each // 8))

    @property
    def shared_bytes(self) -> int:
        """Tile, or what takes its place at the end: the sums."""
        staging = self.groups * 128 * (self.th * self.tw + 5) * 4
        return max(self.slots * self.chunk * self.per_channel * 16, staging)

    def grid(self, n: int) -> tuple[int, int, int]:
        """Blocks along x (channels, ranks), y (tiles) and z (images)."""
        g = self.geometry
        tiles = -(-g.oh // (self.ly * self.th)) * -(-g.ow // (self.lx * self.tw))
        return self.oc_blocks * self.splits, tiles, -(-n // self.ln)

    def problem(self) -> str:
        """Why it cannot be; empty when it can."""
        if self.shared_bytes > SHARED_MAX:
            return f"{self.shared_bytes} bytes of shared memory"
        if (self.chunks > self.slots and 2 * self.slots > 15) or self.slots > 14 or self.chunks > 32:
            return "named barriers"
        if self.threads > 1024 or self.groups * 128 % self.splits or self.ln * self.ly * self.lx != LANES:
            return "shape"
        if self.producers == 0 and self.chunks > 1:
            return "no producers"
        return ""


def cluster(mask: NDArray[np.bool_]) -> NDArray[np.int64]:
    """Output channels ordered so that each 16 in a row need few columns: greedy, fullest first. mask [oc, columns]."""
    bits = mask.astype(np.float32)
    nnz = bits.sum(1)
    left = np.ones(len(mask), bool)
    order: list[int] = []
    union = np.zeros(mask.shape[1], np.float32)
    for k in range(len(mask)):
        if k % GROUP == 0:
            pick = int(np.argmax(np.where(left, nnz, -1)))
            union = bits[pick].copy()
        else:
            pick = int(np.argmin(np.where(left, nnz - bits @ union, np.inf)))
            union = np.maximum(union, bits[pick])
        left[pick] = False
        order.append(pick)
    return np.array(order)


def order_columns(rows: Ints, chunk: Ints, chunks: int, reused: bool) -> tuple[list[int], list[int]]:
    """Columns in the order they are used, and how many steps of 32 each chunk has.

    rows: first 16-byte row of each column, ascending chunks. Eight columns that one matrix of ldmatrix takes should start in
    eight different banks (rows mod 8): columns wait for others, until the end of the next chunk where its place is reused. -1 - r is a column of
    padding that starts in bank r.
    """
    queues: list[list[int]] = [[] for _ in range(8)]
    used: list[int] = []
    steps: list[int] = []
    residue = (rows % 8).tolist()
    which = chunk.tolist()
    at = 0
    for c in range(chunks):
        while at < len(which) and which[at] == c:
            queues[residue[at]].append(at)
            at += 1
        octets: list[list[int]] = []
        while all(queues):
            octets.append([queue.pop(0) for queue in queues])
        last = c == chunks - 1
        due = sum(1 for queue in queues for k in queue if last or (reused and which[k] < c))
        if due:
            rest = sorted((k for queue in queues for k in queue), key=lambda k: which[k])
            take = set(rest if last else rest[:due])
            counts = [[k for k in queue if k in take] for queue in queues]
            for b in range(8):
                queues[b] = [k for k in queues[b] if k not in take]
            need = -(-due // 8)
            need += -(len(octets) + need) % 4
            for o in range(need):
                octet: list[int] = []
                limit = max((-(-len(part) // (need - o)) for part in counts), default=0)
                for b in sorted(range(8), key=lambda b: -len(counts[b])):
                    room = min(limit, len(counts[b]), 8 - len(octet))
                    octet += counts[b][:room]
                    del counts[b][:room]
                for b in range(8):
                    if queues[b] and len(octet) < 8 and not any(residue[k] == b for k in octet):
                        octet.append(queues[b].pop(0))
                free = [b for b in range(8) if not any(residue[k] == b for k in octet)]
                octet += [-1 - free[i % len(free)] if free else -1 for i in range(8 - len(octet))]
                octets.append(octet)
        # A step is four octets; what is over waits, unless it must not.
        over = len(octets) % 4
        if over and not last and not any(k < 0 for octet in octets for k in octet):
            for octet in octets[len(octets) - over :]:
                for k in octet:
                    queues[residue[k]].insert(0, k)
            late = [k for queue in queues for k in queue if reused and which[k] < c]
            octets = octets[: len(octets) - over]
            while late:
                octets.append(late[:8] + [-1 - b for b in range(8 - len(late[:8]))])
                late = late[8:]
            flushed = {k for octet in octets for k in octet}
            for b in range(8):
                queues[b] = sorted(k for k in queues[b] if k not in flushed)
        while len(octets) % 4:
            octets.append([-1 - b for b in range(8)])
        used += [k for octet in octets for k in octet]
        steps.append(len(octets) // 4)
    return used, steps


def _pads(t: Tiling, channels: int) -> NDArray[np.int64]:
    """[chunk, 8]: a column of the chunk that starts in each bank."""
    g = t.geometry
    taps = g.kh * g.kw
    pads = np.zeros((t.chunks, 8), np.int64)
    for c in range(t.chunks):
        base = (c % t.slots) * t.chunk * t.per_channel
        pads[c] = base
        for k in range(min(t.chunk, channels - c * t.chunk) * taps):
            r = base + k // taps * t.per_channel
            r += k % taps // g.kw * g.dilation[0] * t.in_cols + k % g.kw * g.dilation[1]
            pads[c, r % 8] = r
    return pads


def pack(tiling: Tiling, weight: Floats) -> tuple[Ints, Ints, dict[str, float]]:
    """(steps, counts, record): the constants that union.cu walks by."""
    g, t = tiling.geometry, tiling
    flat = (weight != 0).reshape(g.oc, -1)
    order = cluster(flat)
    slots = np.full(t.oc_blocks * t.groups * GROUP, -1, np.int64)
    slots[: g.oc] = order
    entries = t.oc_blocks * t.splits * t.groups
    counts = np.zeros((entries, t.chunks), np.int32)
    lists: list[tuple[NDArray[np.uint16], Ints]] = []
    phases = octets = columns_total = 0
    halves = weight.astype(np.float16)
    taps = g.kh * g.kw
    pads_of: dict[int, NDArray[np.int64]] = {}
    for entry in range(entries):
        block, rank, group = entry // (t.splits * t.groups), entry // t.groups % t.splits, entry % t.groups
        base = (block * t.groups + group) * GROUP
        members = slots[base : base + GROUP]
        real = members[members >= 0]
        first = rank * t.ic_block
        last = min(g.ic, first + t.ic_block)
        part = flat[real, first * taps : last * taps]
        column = np.flatnonzero(part.any(0)) if len(real) else np.zeros(0, np.int64)
        columns_total += len(column)
        ic, tap = column // taps, column % taps
        chunk = ic // t.chunk
        start = ((chunk % t.slots) * t.chunk + ic % t.chunk) * t.per_channel
        start = start + tap // g.kw * g.dilation[0] * t.in_cols + tap % g.kw * g.dilation[1]
        # Padding reads columns of the chunk that the step belongs to, in the banks that the others leave.
        if rank not in pads_of:
            pads_of[rank] = _pads(t, last - first)
        pads = pads_of[rank]
        used, steps = order_columns(start.astype(np.int32), chunk.astype(np.int32), t.chunks, t.slots < t.chunks)
        counts[entry] = steps
        k = np.array(used, np.int64).reshape(-1, STEP)
        pad = pads[np.repeat(np.arange(t.chunks), steps)[:, None], np.clip(-1 - k, 0, 7)]
        rows = np.where(k >= 0, start[np.maximum(k, 0)] if len(start) else 0, pad)
        lanes = rows.reshape(-1, 8) % 8
        phases += sum(int(np.bincount(row).max()) for row in lanes)
        octets += len(lanes)
        values = np.zeros((GROUP, k.size), np.float16)
        if len(real) and len(column):
            dense = halves[real].reshape(len(real), -1)[:, first * taps : last * taps][:, column]
            spread = np.where(k.ravel() >= 0, dense[:, np.maximum(k.ravel(), 0)], np.float16(0))
            values[: len(real)] = spread
        lists.append((values.view(np.uint16), (rows * 16).astype(np.int32)))
    most = max(1, max(len(rows) for _, rows in lists))
    out = np.zeros((entries * most + AHEAD, STEP_WORDS), np.int32)
    lane = np.arange(32)
    r, q = lane // 4, lane % 4 * 2
    for entry, (bits, rows) in enumerate(lists):
        count = len(rows)
        if not count:
            continue
        v = bits.reshape(GROUP, count, 2, 16)  # [oc, step, mma, k]
        # Registers of an A fragment: (r, k), (r + 8, k), (r, k + 8), (r + 8, k + 8), two k each.
        words = np.empty((count, 2, 32, 4, 2), np.uint16)
        for reg, (dr, dk) in enumerate(((0, 0), (8, 0), (0, 8), (8, 8))):
            for low in range(2):
                words[:, :, :, reg, low] = v[r + dr, :, :, q + dk + low].transpose(1, 2, 0)
        out[entry * most : entry * most + count, :256] = words.reshape(count, 512).view(np.int32)
        out[entry * most : entry * most + count, 256:] = rows
    nnz = int(np.count_nonzero(weight))
    record = {
        "max_steps": most,
        "union": columns_total / (t.oc_blocks * t.groups * g.ic * taps),
        "padded": octets * 8 / max(1, columns_total),
        "conflicts": phases / max(1, octets),
        "steps_bytes": out.nbytes,
        "nnz": nnz,
    }
    return out.reshape(-1), np.concatenate([counts.ravel(), slots.astype(np.int32)]), record


def definitions(tiling: Tiling, max_steps: int, epilogue: Epilogue) -> str:
    """The head of union.cu."""
    g, t = tiling.geometry, tiling
    names = {
        "IC": g.ic, "OC": g.oc, "KH": g.kh, "KW": g.kw, "SH": g.stride[0], "SW": g.stride[1], "DH": g.dilation[0],
        "DW": g.dilation[1], "PT": g.pads[0], "PL": g.pads[1], "H": g.h, "W": g.w, "OH": g.oh, "OW": g.ow,
        "TH": t.th, "TW": t.tw, "LN": t.ln, "LY": t.ly, "LX": t.lx, "GROUPS": t.groups, "RW": t.rw, "CW": t.columns,
        "PY": t.parts[0], "PX": t.parts[1], "PRODUCERS": t.producers, "SPLITS": t.splits, "CHUNK": t.chunk,
        "RING": t.slots, "UNROLL": t.in_flight, "IWP": t.in_cols, "RPC": t.per_channel, "PAIR": int(t.pair),
        "OVEC": 2 if t.pair_out else 1, "MAX_STEPS": max_steps, "OVERLAP": t.overlap, "HELD": t.held, "MIN_BLOCKS": t.blocks, "TIMES": t.times, "DEPTH": t.depth,
        "OC_AT": t.oc_blocks * t.splits * t.groups * t.chunks, "BIAS": int(epilogue.bias),
        "ACTIVATION": ("none", "relu", "clip", "leaky_relu").index(epilogue.activation),
        "RESIDUAL": ("none", "before_activation", "after_activation").index(epilogue.residual),
        "SLOPE": f"{epilogue.slope!r}f", "LOW": f"{epilogue.low!r}f", "HIGH": f"{epilogue.high!r}f",
    }  # fmt: skip
    return "".join(f"#define {name} {value}\n" for name, value in names.items())


def emulate(tiling: Tiling, steps: Ints, counts: Ints, x: NDArray[np.float64]) -> NDArray[np.float64]:
    """What union.cu computes without epilogue, from its tables, block by block: the fragments' indices as the hardware has them."""
    g, t = tiling.geometry, tiling
    n = len(x)
    out = np.full((n, g.oc, g.oh, g.ow), np.nan)
    entries = t.oc_blocks * t.splits * t.groups
    table = steps.reshape(-1, STEP_WORDS)
    most = (len(table) - AHEAD) // entries
    perm = counts[entries * t.chunks :]
    _, gy, gz = t.grid(n)
    tiles_x = -(-g.ow // (t.lx * t.tw))
    for bz in range(gz):
        for by in range(gy):
            for ocb in range(t.oc_blocks):
                sums = np.zeros((t.groups, GROUP, t.th * t.tw, LANES))
                for rank in range(t.splits):
                    first = rank * t.ic_block
                    channels = min(t.ic_block, g.ic - first)
                    shared = np.full((t.slots * t.chunk * t.per_channel, LANES), np.nan)
                    tiles = []
                    for c in range(t.chunks):
                        block = np.full((t.chunk, t.per_channel, LANES), np.nan)
                        for k in range(min(t.chunk, channels - c * t.chunk)):
                            for j in range(LANES):
                                img = bz * t.ln + j // (t.ly * t.lx)
                                y0 = (by // tiles_x * t.ly + j // t.lx % t.ly) * t.th * g.stride[0] - g.pads[0]
                                x0 = (by % tiles_x * t.lx + j % t.lx) * t.tw * g.stride[1] - g.pads[1]
                                patch = np.zeros((t.in_rows, t.in_cols))
                                for a in range(t.in_rows):
                                    for b in range(t.in_cols):
                                        if img < n and 0 <= y0 + a < g.h and 0 <= x0 + b < g.w:
                                            patch[a, b] = x[img, first + c * t.chunk + k, y0 + a, x0 + b]
                                block[k, : t.in_rows * t.in_cols, j] = patch.ravel()
                        tiles.append(block.reshape(-1, LANES))
                    size = t.chunk * t.per_channel
                    for group in range(t.groups):
                        entry = (ocb * t.splits + rank) * t.groups + group
                        shared[:] = np.nan
                        at = entry * most
                        for c in range(t.chunks):
                            shared[c % t.slots * size : (c % t.slots + 1) * size] = tiles[c]
                            if t.slots < t.chunks and c >= 2:  # a place of two chunks ago may be written again
                                gone = (c - 2) % t.slots
                                if gone not in (c % t.slots, (c - 1) % t.slots):
                                    shared[gone * size : (gone + 1) * size] = np.nan
                            for _ in range(counts[entry * t.chunks + c]):
                                line = table[at]
                                at += 1
                                a = line[:256].copy().view(np.float16).astype(np.float64).reshape(2, 32, 4, 2)
                                weights = np.zeros((2, GROUP, 16))
                                for lane in range(32):
                                    r, q = lane // 4, lane % 4 * 2
                                    for reg, (dr, dk) in enumerate(((0, 0), (8, 0), (0, 8), (8, 8))):
                                        weights[:, r + dr, q + dk : q + dk + 2] = a[:, lane, reg]
                                starts = line[256:] // 16
                                for p in range(t.th * t.tw):
                                    move = p // t.tw * g.stride[0] * t.in_cols + p % t.tw * g.stride[1]
                                    b = shared[starts + move]
                                    sums[group, :, p] += weights[0] @ b[:16] + weights[1] @ b[16:]
                for group in range(t.groups):
                    for m in range(GROUP):
                        oc = perm[(ocb * t.groups + group) * GROUP + m]
                        if oc < 0:
                            continue
                        for j in range(LANES):
                            img = bz * t.ln + j // (t.ly * t.lx)
                            for p in range(t.th * t.tw):
                                oy = (by // tiles_x * t.ly + j // t.lx % t.ly) * t.th + p // t.tw
                                ox = (by % tiles_x * t.lx + j % t.lx) * t.tw + p % t.tw
                                if img < n and oy < g.oh and ox < g.ow:
                                    out[img, oc, oy, ox] = sums[group, m, p, j]
    return out


def pruned(g: Geometry, sparsity: float, seed: int = 0) -> Floats:
    """Magnitude-pruned normal weights with fp16 values."""
    w = np.random.default_rng(seed).standard_normal(g.weight_shape).astype(np.float32)
    w /= np.float32(np.sqrt(g.ic * g.kh * g.kw * (1 - sparsity)))
    cut = int(w.size * sparsity)
    w.ravel()[np.argsort(np.abs(w.ravel()))[:cut]] = 0
    return w.astype(np.float16).astype(np.float32)


def tilings(g: Geometry, n: int) -> list[Tiling]:
    """What to measure."""
    t = Tiling(g, 1, 1)
    if n >= 8:
        found = {
            64: [replace(t, th=4, tw=14, rw=2)],
            128: [
                replace(t, th=4, tw=14, rw=2, times=1),
                replace(t, th=4, tw=14, rw=2),
                replace(t, th=4, tw=14, rw=1),
                replace(t, th=1, tw=28, groups=8),
                replace(t, th=1, tw=28, groups=8, cw=14),
            ],
            256: [
                replace(t, th=1, tw=14, groups=8, chunk=32, depth=2, times=1),
                replace(t, th=1, tw=14, groups=8, chunk=32, depth=2),
                replace(t, th=1, tw=14, groups=8, chunk=32, depth=3),
                replace(t, th=2, tw=14, groups=8, rw=2, splits=2, chunk=32),
                replace(t, th=2, tw=14, groups=8, rw=1, splits=2, chunk=32),
            ],
            512: [
                replace(t, th=7, tw=7, groups=2, rw=2, splits=2, ring=5, chunk=32, producers=8, depth=2, times=1),
                replace(t, th=7, tw=7, groups=2, rw=2, splits=2, ring=5, chunk=32, producers=8, depth=2),
                replace(t, th=7, tw=7, groups=2, rw=2, splits=2, ring=7, chunk=16, producers=4, depth=2),
                replace(t, th=7, tw=7, groups=2, rw=1, splits=2, ring=7, chunk=16, producers=6),
            ],
        }[g.oc]  # fmt: skip
    else:
        t = replace(t, ln=1, ring=14, blocks=2)
        found = {
            64: [replace(t, ly=2, lx=4, th=1, tw=14, groups=2, splits=2, chunk=32, producers=6, cw=7)],
            128: [replace(t, ly=2, lx=4, th=1, tw=7, groups=4, splits=4, chunk=32, producers=4)],
            256: [replace(t, ly=4, lx=2, th=1, tw=7, groups=4, splits=8, chunk=32, producers=4)],
            512: [replace(t, ly=8, lx=1, th=1, tw=7, groups=2, splits=8, chunk=64, producers=4, cw=4)],
        }[g.oc]  # fmt: skip
    return found


def source(tiling: Tiling, max_steps: int, epilogue: Epilogue) -> str:
    """union.cu under its definitions."""
    return definitions(tiling, max_steps, epilogue) + Path(__file__).with_name("union.cu").read_text(encoding="utf-8")


def make_node(tiling: Tiling, steps: Ints, counts: Ints, images: tuple[Image, ...]) -> SparseConv:
    """A node that plugins.host runs."""
    t, g = tiling, tiling.geometry
    gx, gy, _ = t.grid(1)
    args = [Arg("input"), Arg("output"), Arg("constant", 0), Arg("constant", 1), Arg("N")]
    if t.times:
        args.append(Arg("workspace", 0))
    launch = Launch("union_conv", (const(gx), const(gy), var("N").ceil_div(t.ln)), (t.threads, 1, 1), tuple(args), t.shared_bytes,
                    cluster=t.splits, dependent=bool(t.overlap))  # fmt: skip
    return SparseConv(layer="bench", kernel="union", geometry=g, epilogue=Epilogue(), precision="fp16",
                      constants=(steps, counts), plan=(Variant("fp16", (launch,), var("N").ceil_div(t.ln) * (gx * gy * 256 * t.times)),), images=images)  # fmt: skip


def label_of(t: Tiling) -> str:
    """The tiling in one line."""
    skip = {"geometry"}
    return " ".join(f"{k}{v}" for k, v in asdict(t).items() if k not in skip)


PLAIN = Geometry(oc=40, ic=24, kh=3, kw=3, h=9, w=10, pads=(1, 1, 1, 1))
STRIDED = Geometry(oc=20, ic=13, kh=3, kw=2, h=11, w=9, pads=(0, 1, 2, 1), stride=(2, 2), dilation=(1, 2))
SMALL = (
    (PLAIN, Tiling(PLAIN, 2, 5, groups=2, chunk=8), 3),
    (PLAIN, Tiling(PLAIN, 3, 10, groups=1, chunk=4, ring=3), 9),
    (PLAIN, Tiling(PLAIN, 2, 5, ln=1, ly=4, lx=2, groups=1, chunk=6, splits=2), 2),
    (STRIDED, Tiling(STRIDED, 2, 2, ln=2, ly=2, lx=2, groups=1, chunk=4, splits=2, ring=2), 3),
)
"""Small layers of every kind, (geometry, tiling, batch)."""


def works(only: str, sparsities: tuple[float, ...]) -> list[tuple[str, Tiling, int, float]]:
    """(label, tiling, batch, sparsity)."""
    found = []
    for sparsity in sparsities:
        for n in (32, 1):
            for c, size in SHAPES:
                g = Geometry(oc=c, ic=c, kh=3, kw=3, h=size, w=size, pads=(1, 1, 1, 1))
                for t in tilings(g, n):
                    label = f"{c}@{size} N={n} {sparsity}"
                    if not only or only in f"{label};":
                        found.append((label, t, n, sparsity))
    for g, t, n in SMALL:
        if not only or "small" in only:
            found += [(f"small{g.ic}@{g.h} N={n} {sparsity}", t, n, sparsity) for sparsity in (0.7,)]
    return found


def pack_job(tiling: Tiling, sparsity: float) -> tuple[Ints, Ints, dict[str, float]]:
    """`pack` of the pruned weights, in a process of its own."""
    return pack(tiling, pruned(tiling.geometry, sparsity))


def prepare(folder: Path, only: str, sparsities: tuple[float, ...]) -> None:
    """Compile every tiling and write the work list; weights are packed again where they are measured."""
    from sparsedeploy.plugins.assemble import compile_cuda

    folder.mkdir(parents=True, exist_ok=True)
    packed = []
    for label, t, n, sparsity in works(only, sparsities):
        if t.problem():
            print(label, "SKIP", t.problem(), label_of(t))
            continue
        started = time.perf_counter()
        _, _, record = pack_job(t, sparsity)
        took = time.perf_counter() - started
        done = compile_cuda(source(t, int(record["max_steps"]), Epilogue()), 90, kind="cubin", name="union.cu")
        usage = done.usage["union_conv"]
        print(f"{label} grid {t.grid(n)} thr {t.threads} smem {t.shared_bytes} regs {usage.registers} spill {usage.spill_bytes} union {record['union']:.3f} "
              f"pad {record['padded']:.3f} conf {record['conflicts']:.3f} pack {took:.1f}s {label_of(t)}", flush=True)  # fmt: skip
        packed.append((label, t, n, sparsity, done.data, record, usage.registers, usage.spill_bytes))
    (folder / "works.pickle.gz").write_bytes(gzip.compress(pickle.dumps(packed)))


def time_us(call: Any, launches: int = 20, repeats: int = 7) -> tuple[float, float]:
    """Median and spread in microseconds of one call in a replayed graph."""
    import torch

    for _ in range(3):
        call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(launches):
            call()
    for _ in range(10):
        graph.replay()
    torch.cuda.synchronize()
    times = []
    for _ in range(repeats):
        a, b = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        a.record()
        graph.replay()
        b.record()
        b.synchronize()
        times.append(a.elapsed_time(b) * 1e3 / launches)
    return float(np.median(times)), float(max(times) - min(times))


def dense_us(g: Geometry, n: int) -> float:
    """What cuDNN takes in fp16 with full search, best of NCHW and NHWC, layouts converted outside of the timing."""
    import torch
    from torch.nn.functional import conv2d

    torch.backends.cudnn.benchmark, torch.backends.cudnn.benchmark_limit = True, 0
    x, w = torch.randn(n, g.ic, g.h, g.w, device="cuda").half(), torch.randn(*g.weight_shape, device="cuda").half()
    times = []
    for layout in (torch.contiguous_format, torch.channels_last):
        a, b = x.contiguous(memory_format=layout), w.contiguous(memory_format=layout)
        times.append(time_us(lambda a=a, b=b: conv2d(a, b, padding=g.pads[0]))[0])
    return min(times)


_EXPECTED: dict[Any, Any] = {}


def summary(marks: NDArray[np.uint32], t: Tiling) -> str:
    """Clocks since a block's start, mean over blocks."""
    since = (marks - marks[:, :1]).astype(np.int32).mean(0).round().astype(int)
    return (
        f"wait {since[1]} first {since[2]} full {since[3 : 3 + t.chunks].tolist()} filled {since[25 : 24 + t.chunks].tolist()} "
        f"computed {since[56]} staged {since[57]} stored {since[58]} end {since[59]}"
    )


def measure(
    t: Tiling, n: int, sparsity: float, cubin: bytes, tables: tuple[Ints, Ints, dict[str, float]]
) -> dict[str, Any]:
    """Check, then time."""
    import torch
    from torch.nn.functional import conv2d, pad

    from sparsedeploy.plugins.host import Runner

    g = t.geometry
    torch.manual_seed(g.ic + n)
    x = torch.randn(n, g.ic, g.h, g.w, device="cuda").half()
    weight = torch.from_numpy(pruned(g, sparsity)).cuda().double()
    key = (str(g), n, sparsity)
    if key not in _EXPECTED:
        _EXPECTED.clear()
        padded = pad(x.double(), (g.pads[1], g.pads[3], g.pads[0], g.pads[2]))
        _EXPECTED[key] = conv2d(padded, weight, stride=g.stride, dilation=g.dilation)
    expected = _EXPECTED[key]
    y = torch.full(expected.shape, float("nan"), device="cuda", dtype=torch.float16)
    runner = Runner(make_node(t, tables[0], tables[1], (Image(90, "fp16", "cubin", cubin),)))
    runner.reserve(n, "fp16")
    runner.run(x, out=y)
    torch.cuda.synchronize()
    error = float(((y.double() - expected).norm() / expected.norm()).item())
    again = torch.full_like(y, float("nan"))
    runner.run(x, out=again)
    torch.cuda.synchronize()
    row: dict[str, Any] = {"error": error, "repeats": bool((y == again).all().item())}
    if not error < 1e-3 or not row["repeats"]:
        wrong = ~((y.double() - expected).abs() < 0.02)
        where = wrong.nonzero()
        row["wrong"] = f"{int(wrong.sum())} of {wrong.numel()}, first {where[:4].tolist()}, nan {int(y.isnan().sum())}"
        if len(where):
            i = tuple(where[0].tolist())
            row["wrong"] += (
                f" got {y[i].item()} want {expected[i].item()}; images {where[:, 0].unique()[:10].tolist()} oc {where[:, 1].unique()[:20].tolist()} rows {where[:, 2].unique()[:20].tolist()} cols {where[:, 3].unique()[:20].tolist()}"
            )
        return {**row, "us": None}
    if t.times:
        gx, gy, gz = t.grid(n)
        raw = runner._driver.download(runner._workspace, gx * gy * gz * 256)
        row["marks"] = summary(np.frombuffer(raw, np.uint32).reshape(-1, 64), t)
    row["us"], row["spread_us"] = time_us(lambda: runner.run(x, out=y, stream=torch.cuda.current_stream()))
    return row


def run(folder: Path, out: Path, only: str, cudnn: bool) -> int:
    """Measure the work list; the exit code is 1 when a result is wrong."""
    jobs = pickle.loads(gzip.decompress((folder / "works.pickle.gz").read_bytes()))
    jobs = [job for job in jobs if not only or only in f"{job[0]};"]
    rows: list[dict[str, Any]] = []
    dense: dict[str, float] = {}
    bad = 0
    with ProcessPoolExecutor(max_workers=max(2, (os.cpu_count() or 2) - 2)) as pool:
        made: dict[Any, Future[Any]] = {}
        tables: list[Future[Any]] = []
        for _, t, _, sparsity, *_ in jobs:
            key = (t.geometry, sparsity, t.groups, t.splits, t.chunk, t.slots, t.per_channel, t.in_cols)
            if str(key) not in made:
                made[str(key)] = pool.submit(pack_job, t, sparsity)
            tables.append(made[str(key)])
        for (label, t, n, sparsity, cubin, record, registers, spills), table in zip(jobs, tables, strict=True):
            name = label.rsplit(" ", 1)[0]
            if cudnn and "small" not in name and name not in dense:
                dense[name] = dense_us(t.geometry, n)
                print("cudnn fp16", name, f"{dense[name]:.2f}", flush=True)
            try:
                row = measure(t, n, sparsity, cubin, table.result())
            except Exception as error:  # a lost device makes all later rows say so
                row = {"us": None, "wrong": repr(error)[:600]}
            row = {
                "layer": label,
                "n": n,
                "sparsity": sparsity,
                "tiling": label_of(t),
                "registers": registers,
                **record,
                **row,
            }
            rows.append(row)
            bad += row["us"] is None
            shown = f"WRONG {row.get('wrong')}" if row["us"] is None else f"{row['us']:.2f} +-{row['spread_us']:.2f}"
            print(label, shown, row.get("error"), f"regs {registers} spill {spills}", row["tiling"], flush=True)
            if row.get("marks"):
                print("   ", row["marks"], flush=True)
            out.write_text(json.dumps({"rows": rows, "dense": dense}, indent=1))
    return int(bad > 0)


def check_emulated() -> int:
    """The tables against float64, on small layers of every kind."""
    from sparsedeploy.plugins.reference import conv2d

    bad = 0
    for g, t, n in SMALL:
        for sparsity in (0.0, 0.7, 0.95, 0.999):
            w = pruned(g, sparsity)
            x = np.random.default_rng(1).standard_normal((n, g.ic, g.h, g.w))
            steps, counts, record = pack(t, w)
            got = emulate(t, steps, counts, x)
            want = conv2d(x, w, None, g)
            error = np.abs(got - want).max()
            bad += not error < 1e-9
            print(sparsity, error, {k: round(v, 3) for k, v in record.items()})
    return bad


def main() -> int:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("action", choices=("prepare", "run", "emulate"))
    parser.add_argument("folder", type=Path, nargs="?", default=Path("."))
    parser.add_argument("--out", type=Path, default=Path("results.json"))
    parser.add_argument("--only", default="")
    parser.add_argument("--sparsities", type=float, nargs="+", default=(0.95,))
    parser.add_argument("--cudnn", action="store_true")
    options = parser.parse_args()
    if options.action == "emulate":
        return check_emulated()
    if options.action == "prepare":
        prepare(options.folder, options.only, tuple(options.sparsities))
        return 0
    return run(options.folder, options.out, options.only, options.cudnn)


if __name__ == "__main__":
    # Pickled works name this module, not __main__.
    sys.path.insert(0, str(Path(__file__).parent))
    from bench_union import main as entry

    raise SystemExit(entry())

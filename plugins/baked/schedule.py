"""How a layer is cut up for baked code: pieces of the weights, tiles of the output, and where things lie in shared memory.

A *piece* is (output channels, range of input channels): the unit of code. A *tile* is the output pixels of one block;
each thread holds one pixel (or `rows` vertically adjacent ones, or pairs in half2) for every output channel of its piece.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from sparsedeploy.layer import Geometry
from sparsedeploy.plugins.launch import Expr, const, var

Mode = Literal["f32", "hf", "h2"]
Pair = Literal["none", "image", "row"]
Combine = Literal["none", "cluster", "planes"]
_BANK_BYTES = 128
_SHARED_PER_SM = 224 * 1024


@dataclass(frozen=True)
class Nonzeros:
    """The nonzero weights in absolute channel numbers, sorted by (ic, ky, kx, oc)."""

    oc: NDArray[np.int32]
    ic: NDArray[np.int32]
    ky: NDArray[np.int32]
    kx: NDArray[np.int32]
    value: NDArray[np.float32]

    @property
    def count(self) -> int:
        """Number of nonzeros."""
        return int(self.oc.size)


def nonzeros(weight: NDArray[np.float32], geometry: Geometry) -> Nonzeros:
    """Nonzeros of weight [oc, ic // group, kh, kw], channels counted over the whole input."""
    oc, ic, ky, kx = np.nonzero(weight)
    absolute = ic + oc // (geometry.oc // geometry.group) * (geometry.ic // geometry.group)
    order = np.lexsort((oc, kx, ky, absolute))
    a, b, c, d = (index[order].astype(np.int32) for index in (oc, absolute, ky, kx))
    return Nonzeros(a, b, c, d, weight[oc, ic, ky, kx][order].astype(np.float32))


def flatten(geometry: Geometry) -> Geometry:
    """A 1x1 convolution of stride 1 without pads seen as one row of H*W pixels; others unchanged."""
    g = geometry
    if (g.kh, g.kw) != (1, 1) or g.stride != (1, 1) or any(g.pads):
        return g
    return g.model_copy(update={"h": 1, "w": g.h * g.w, "dilation": (1, 1)})


def strided(geometry: Geometry) -> bool:
    """Whether a convolution is a dense 1x1 one of every stride-th row and column of its input."""
    g = geometry
    return (g.kh, g.kw) == (1, 1) and g.stride != (1, 1) and not any(g.pads)


def compiled(geometry: Geometry, pair: Pair) -> tuple[Geometry, Geometry | None]:
    """(geometry as compiled, the layer's own where that is a dense view of a strided 1x1 convolution, else None).

    Row pairs need the map's rows; everything else takes a 1x1 convolution as one row of pixels.
    """
    g = geometry
    seen = g.model_copy(update={"h": g.oh, "w": g.ow, "stride": (1, 1), "dilation": (1, 1)}) if strided(g) else g
    return seen if pair == "row" else flatten(seen), g if strided(g) else None


@dataclass(frozen=True)
class Schedule:
    """One way to run a layer. Sizes are in output pixels unless the name says bytes.

    The output is cut into column strips; within a strip the pixels of the whole batch stand in one row, (image, row
    group, column), and a tile is `pixels` consecutive ones, so tiles may cross rows and images and are always full. The
    input rows of the batch lie below each other too: image n starts at virtual row n * `image_rows`, and the rows
    between two images are the zeros that both need as padding.
    """

    geometry: Geometry
    """As compiled (see `flatten`)."""
    mode: Mode
    pair: Pair = "none"
    channels: int = 64
    """Output channels of a piece, at most."""
    splits: int = 1
    """Ranges of input channels, each its own piece."""
    combine: Combine = "none"
    mates: int = 1
    """Blocks of one piece, on neighbouring tiles, that form a cluster: they share a GPC, whose instruction cache then
    fetches their code once (sm_90 and later)."""
    pieces_first: bool = False
    """Neighbouring clusters run different pieces, not different tiles: clusters are dealt to the GPCs in turn, so that a
    GPC meets fewer pieces where their number is a multiple of the GPCs'."""
    pixels: int = 256
    """Threads of a block that have a pixel."""
    rows: int = 1
    """Vertically adjacent output pixels (or pairs) of a thread."""
    columns: int = 0
    """Width of a strip; 0 is the whole width."""
    stage_channels: int = 4
    interleave: int = 1
    """Input channels (1, 2 or 4) whose values of a pixel lie side by side in shared memory, where one load reads them all: every
    load is an instruction to fetch and to issue. See `abreast`."""
    ring: int = 3
    use_async: bool = True
    min_blocks: int = 1
    step: int = 64
    """Instructions between block barriers that keep the warps at the same code, so that it is fetched once; 0: none."""
    dependent: bool = False
    """Start before the kernel ahead ends, wait for it ahead of the first read (sm_90 and later)."""
    stream: bool = False
    """Mark inputs (where copied asynchronously) and outputs as first to leave the L2 (sm_90 and later): it pays where the input
    is beyond L2, and costs up to 8 % where the next layer would have found the output there."""
    sync: int = 0
    """Stages between barriers of the whole cluster, which keep its blocks at the same code; 0: none."""
    parts: int = 0
    """Launches that the groups of output channels are dealt to, each an entry of its own: ptxas takes more than twice
    as long for an entry of twice the code, and works on several entries at once. 0: as many as that asks for."""
    origin: Geometry | None = None
    """The layer's own geometry, where `geometry` is the dense view of a strided 1x1 convolution (see `compiled`)."""
    gather: bool = False
    """A launch ahead copies the view to the workspace, densely; else every block picks its elements from the input."""

    # ---- the tile grid ----
    @property
    def strip(self) -> int:
        """Output columns of a strip."""
        return self.columns or self.geometry.ow

    @property
    def strips(self) -> int:
        """Strips along the width."""
        return -(-self.geometry.ow // self.strip)

    @property
    def half_rows(self) -> int:
        """Output rows of an image that are threads' own: half of them when rows are paired."""
        return -(-self.geometry.oh // 2) if self.pair == "row" else self.geometry.oh

    @property
    def row_groups(self) -> int:
        """Threads along the height of an image."""
        return -(-self.half_rows // self.rows)

    @property
    def image_pixels(self) -> int:
        """Threads that an image (or pair of images) takes in one strip."""
        return self.row_groups * self.strip

    @property
    def images_per_unit(self) -> int:
        """Images that one pixel of a thread covers."""
        return 2 if self.pair == "image" else 1

    @property
    def threads(self) -> int:
        """Threads per block, whole warps."""
        return -(-self.pixels // 32) * 32

    @property
    def cluster(self) -> int:
        """Blocks of a cluster: the splits that are summed in it, times the mates."""
        return self.mates * (self.splits if self.combine == "cluster" else 1)

    def grid(self, groups: int) -> tuple[Expr, Expr, Expr]:
        """Blocks of a launch whose pieces form `groups` groups of output channels."""
        tiles = self.tiles().ceil_div(self.mates) * (self.mates * self.splits)
        return (tiles * groups, const(1), const(1)) if self.pieces_first else (tiles, const(groups), const(1))

    def tiles(self) -> Expr:
        """Tiles over the batch."""
        return (var("N").ceil_div(self.images_per_unit) * self.image_pixels).ceil_div(self.pixels) * self.strips

    # ---- element sizes ----
    @property
    def global_bytes(self) -> int:
        """Bytes of an element in device memory."""
        return 4 if self.mode == "f32" else 2

    @property
    def shared_bytes(self) -> int:
        """Bytes of a pixel (or pair of pixels) of one channel in shared memory."""
        return 2 if self.mode == "hf" else 4

    @cached_property
    def abreast(self) -> int:
        """Channels that do lie side by side: in fp32, where stages and channels are so divided."""
        per_ic = self.geometry.ic // self.geometry.group
        fits = self.mode == "f32" and not self.stage_channels % self.interleave and not per_ic % self.interleave
        return self.interleave if fits else 1

    @property
    def element_bytes(self) -> int:
        """Bytes from one pixel of a shared row to the next."""
        return self.shared_bytes * self.abreast

    @property
    def exchanges(self) -> bool:
        """Whether neighbouring threads swap halves, so that each stores two pixels of one image (or row) at once."""
        even = all(size % 2 == 0 for size in (self.strip, self.geometry.ow, self.pixels))
        return self.mode == "h2" and self.combine != "planes" and even

    # ---- input rows of a tile ----
    @cached_property
    def image_rows(self) -> int:
        """Virtual input rows from one image to the next: all that an image's pixels read, padding included."""
        g = self.geometry
        return (self.row_groups * self.rows - 1) * g.stride[0] + (g.kh - 1) * g.dilation[0] + 1

    @cached_property
    def _worst_tile(self) -> tuple[int, int]:
        """(input rows, images crossed) at most, over all tiles."""
        period = self.image_pixels
        starts = np.unique(np.arange(period) * self.pixels % period)
        last = starts + self.pixels - 1
        step = self.rows * self.geometry.stride[0]
        image, first = np.divmod(last, period)[0], starts // self.strip * step
        end = image * self.image_rows + last % period // self.strip * step
        return int((end - first).max()) + self.row_span, int(image.max())

    @property
    def row_span(self) -> int:
        """Input rows of one thread's pixels."""
        g = self.geometry
        return (self.rows - 1) * g.stride[0] + (g.kh - 1) * g.dilation[0] + 1

    @property
    def input_rows(self) -> int:
        """Input rows of a tile, halo included."""
        return self._worst_tile[0]

    @property
    def input_cols(self) -> int:
        """Input columns of a tile, halo included."""
        g = self.geometry
        return (self.strip - 1) * g.stride[1] + (g.kw - 1) * g.dilation[1] + 1

    @property
    def pair_rows(self) -> int:
        """Input rows between both halves of a row pair."""
        return self.half_rows * self.geometry.stride[0]

    # ---- how a tile is loaded ----
    @property
    def source(self) -> Geometry:
        """What the loader reads: its size in memory, and the steps from one pixel of `geometry` to the next."""
        return self.geometry if self.origin is None or self.gather else self.origin

    @cached_property
    def sector_share(self) -> float:
        """Bytes that a fill fetches, in sectors of 32, for one byte that it keeps."""
        if self.source is self.geometry:
            return 1.0
        g = self.source
        at = np.arange(g.oh)[:, None] * g.stride[0] * g.w + np.arange(g.ow) * g.stride[1]
        return len(np.unique(at * self.global_bytes // 32)) * 32 / (at.size * self.global_bytes)

    @cached_property
    def chunk(self) -> int:
        """Elements that one load moves: 16 bytes where rows allow it."""
        widest = 4 if self.mode == "h2" else 16 // self.global_bytes
        step = (
            self.geometry.w if self.strips == 1 else int(np.gcd(self.geometry.w, self.strip * self.geometry.stride[1]))
        )
        if self.source is not self.geometry:  # a chunk is of one row, whose pixels lie beside each other
            step = int(np.gcd.reduce((step, self.source.ow, self.source.w))) if self.source.stride[1] == 1 else 1
        return next(v for v in (8, 4, 2, 1) if v <= widest and step % v == 0)

    @property
    def asynchronous(self) -> bool:
        """Whether tiles arrive by cp.async: not for pairs, nor for chunks below 4 bytes, nor where channels are woven together:
        copies of 4 bytes cost more than loads and wide stores (512@7, N=32: 38 against 29 us).
        """
        return self.use_async and self.mode != "h2" and self.chunk * self.global_bytes >= 4 and self.abreast == 1

    @cached_property
    def load_chunks(self) -> int:
        """Chunks of a row that are loaded."""
        g = self.geometry
        if self.strips == 1:
            return -(-min(g.w, max(1, self.input_cols - g.pads[1])) // self.chunk)
        return -(-(self.column_shift + self.input_cols) // self.chunk)

    @cached_property
    def column_shift(self) -> int:
        """Element of a shared row at which the tile's first input column (padding included) lies."""
        return -self.geometry.pads[1] % self.chunk

    @property
    def load_column(self) -> int:
        """Element of a shared row at which the first loaded chunk goes."""
        return self.column_shift + self.geometry.pads[1] if self.strips == 1 else 0

    @cached_property
    def whole_rows(self) -> int:
        """Rows of an image that are loaded where tiles are whole images and what surrounds them is zeroed once; else 0."""
        g = self.geometry
        if self.abreast == 1 or self.strips > 1 or self.pixels % self.image_pixels:
            return 0
        return max(0, min(g.h, self.image_rows - g.pads[0]))

    @property
    def positions(self) -> int:
        """Chunks of one input channel of a tile."""
        rows = self.pixels // self.image_pixels * self.whole_rows or self.input_rows
        return rows * self.load_chunks

    @cached_property
    def phases(self) -> int:
        """Input channels (or as many times those side by side) that a block loads at once, one chunk a thread."""
        limit, planes = self.threads // max(1, self.positions), self.stage_channels // self.abreast
        phases = 1
        while phases * 2 <= min(limit, planes) and planes % (phases * 2) == 0:
            phases *= 2
        return phases

    @property
    def loads_abreast(self) -> int:
        """Chunks that all threads together load in one go: those of `phases` input channels."""
        return self.positions * self.phases

    @property
    def slots(self) -> int:
        """Chunks of one input channel that a thread loads."""
        return -(-self.positions // self.threads)

    # ---- shared memory ----
    @property
    def _align(self) -> int:
        return max(4, self.chunk * self.element_bytes)

    @cached_property
    def pitch_bytes(self) -> int:
        """Bytes from one input row to the next: the smallest at which a warp's pixels meet no bank twice."""
        row = max(self.column_shift + self.input_cols, self.load_column + self.load_chunks * self.chunk)
        least = -(-row * self.element_bytes // self._align) * self._align
        candidates = range(least, least + 2 * _BANK_BYTES, self._align)
        one_image = np.arange(min(self.image_pixels, 2048))
        return min(candidates, key=lambda pitch: (self._wavefronts(one_image, pitch, 0), pitch))

    @cached_property
    def gap_bytes(self) -> int:
        """Bytes added between two images of a tile, against bank conflicts."""
        if self._worst_tile[1] == 0:
            return 0
        some = np.arange(min(max(2 * self.image_pixels, 256), 4096))
        candidates = range(0, _BANK_BYTES + 1, self._align)
        return min(candidates, key=lambda gap: (self._wavefronts(some, self.pitch_bytes, gap), gap))

    @property
    def plane_bytes(self) -> int:
        """Bytes from one input channel (those side by side counted once) to the next."""
        return -(-(self.input_rows * self.pitch_bytes + self._worst_tile[1] * self.gap_bytes) // 16) * 16

    @property
    def slot_bytes(self) -> int:
        """Bytes of one ring slot."""
        return self.stage_channels // self.abreast * self.plane_bytes

    @property
    def ring_slots(self) -> int:
        """Slots of the ring; plain loads go through registers and need two."""
        return self.ring if self.asynchronous else 2

    @property
    def ring_bytes(self) -> int:
        """Bytes of the ring."""
        return self.ring_slots * self.slot_bytes

    def share(self, count: int) -> int:
        """Output channels of a piece of `count` that one block of a cluster sums."""
        return -(-count // self.splits)

    def combine_bytes(self, count: int) -> int:
        """Bytes in which a block receives the others' sums."""
        return self.splits * self.share(count) * self.rows * self.threads * 4 if self.combine == "cluster" else 0

    def aliased(self, count: int) -> bool:
        """Whether the received sums lie over the ring, for want of room beside it."""
        return self.ring_bytes + self.combine_bytes(count) > _SHARED_PER_SM // self.min_blocks

    def block_bytes(self, count: int) -> int:
        """Dynamic shared memory of a block whose largest piece has `count` output channels."""
        ring, sums = self.ring_bytes, self.combine_bytes(count)
        return max(ring, sums) if self.aliased(count) else ring + sums

    @property
    def pad_elements(self) -> tuple[int, ...]:
        """Elements of a shared row that are read but never loaded: the zeros left and right of the image."""
        read = range(self.column_shift, self.column_shift + self.input_cols)
        first = self.load_column
        return tuple(e for e in read if not first <= e < first + self.load_chunks * self.chunk)

    def _wavefronts(self, pixel: NDArray[np.int64], pitch: int, gap: int) -> float:
        image, rest = np.divmod(pixel, self.image_pixels)
        row, col = np.divmod(rest, self.strip)
        sh, sw = self.geometry.stride
        row = image * self.image_rows + row * self.rows * sh
        # A load of 8 or 16 bytes a lane is one of 16 or 8 lanes after the other, of as many times wider banks.
        width = 32 // self.abreast
        words = (row * pitch + image * gap + col * sw * self.element_bytes) // (4 * self.abreast)
        count = len(words) // width * width
        lanes = np.sort(words[:count].reshape(-1, width) if count else words[None], axis=1)
        fresh = np.ones(lanes.shape, np.int64)  # lanes that read one word cost one access
        fresh[:, 1:] = lanes[:, 1:] != lanes[:, :-1]
        banks = np.zeros((len(lanes), width), np.int64)
        np.add.at(banks, (np.arange(len(lanes))[:, None], lanes % width), fresh)
        return float(banks.max(1).mean())

    @cached_property
    def load_wavefronts(self) -> float:
        """Mean shared-memory cycles of one load of a warp: 1 is free of bank conflicts."""
        return self._wavefronts(
            np.arange(min(max(self.image_pixels, self.pixels), 4096)), self.pitch_bytes, self.gap_bytes
        )


@dataclass(frozen=True)
class Piece:
    """A unit of code. Channels are absolute; the input range is half open."""

    group: int
    split: int
    oc: tuple[int, ...]
    ic: tuple[int, int]


def columns(weights: Nonzeros, geometry: Geometry) -> NDArray[np.bool_]:
    """[oc, ic * kh * kw]: which columns each output channel uses."""
    taps = geometry.kh * geometry.kw
    used = np.zeros((geometry.oc, geometry.ic * taps), np.bool_)
    used[weights.oc, weights.ic * taps + weights.ky * geometry.kw + weights.kx] = True
    return used


def cluster_channels(used: NDArray[np.bool_], members: Sequence[int], bins: int, size: int) -> list[tuple[int, ...]]:
    """Spread output channels over `bins` groups of at most `size`: balanced in nonzeros, each sharing columns.

    Greedy and deterministic: fullest channel first, to the group that already loads most of its columns among those
    whose nonzeros stay within 2 % of an even share; else to the emptiest group.
    """
    if bins == 1:
        return [tuple(sorted(members))]
    work = used[list(members)]
    counts = work.sum(1)
    cap = counts.sum() / bins * 1.02 + 1
    union = np.zeros((bins, used.shape[1]), np.bool_)
    load, sizes = np.zeros(bins), np.zeros(bins, int)
    groups: list[list[int]] = [[] for _ in range(bins)]
    for i in sorted(range(len(members)), key=lambda i: (-int(counts[i]), i)):
        room = sizes < size
        # Seeds spread first: an empty group takes the next channel before overlap decides.
        fits = room & (load + counts[i] <= cap)
        shared = (union & work[i]).sum(1)
        if (room & (sizes == 0)).any():
            pick = int(np.flatnonzero(room & (sizes == 0))[0])
        elif fits.any():
            pick = max(
                np.flatnonzero(fits).tolist(), key=lambda b: (int(shared[b]) - load[b] / max(1.0, cap) * counts[i], -b)
            )
        else:
            pick = min(np.flatnonzero(room).tolist(), key=lambda b: (load[b], b))
        groups[pick].append(members[i])
        union[pick] |= work[i]
        load[pick] += counts[i]
        sizes[pick] += 1
    return [tuple(sorted(group)) for group in groups if group]


def pieces(schedule: Schedule, weights: Nonzeros) -> tuple[Piece, ...]:
    """All pieces, group-major then split: index = group * splits + split."""
    g = schedule.geometry
    per_oc, per_ic = g.oc // g.group, g.ic // g.group
    together = max(1, schedule.channels // per_oc)  # whole convolution groups that share a piece
    used = columns(weights, g)
    result: list[Piece] = []
    for first in range(0, g.group, together):
        last = min(g.group, first + together)
        members = range(first * per_oc, last * per_oc)
        bins = -(-len(members) // schedule.channels)
        size = -(-len(members) // bins)
        size = min(schedule.channels, size + size // 8)  # room to balance skewed filters
        for oc in cluster_channels(used, members, bins, size):
            ranges = split_inputs(used, oc, g, (first * per_ic, last * per_ic), schedule.splits, schedule.abreast)
            group = len(result) // schedule.splits
            result += [Piece(group, i, oc, ic) for i, ic in enumerate(ranges)]
    return tuple(result)


def parts(schedule: Schedule, whole: Sequence[Piece]) -> tuple[tuple[Piece, ...], ...]:
    """The pieces of each launch: whole groups, as evenly as they go."""
    groups = len(whole) // schedule.splits
    count = max(1, min(schedule.parts, groups))
    cuts = [groups * i // count * schedule.splits for i in range(count + 1)]
    return tuple(tuple(whole[first:last]) for first, last in pairwise(cuts))


def split_inputs(
    used: NDArray[np.bool_], oc: Sequence[int], geometry: Geometry, ic: tuple[int, int], splits: int, unit: int = 1
) -> list[tuple[int, int]]:
    """Cut the input channels into ranges of even cost, `unit` of them together: a load counts half a fma's issue slot more than
    the slot itself.
    """
    if splits == 1:
        return [ic]
    taps = geometry.kh * geometry.kw
    part = used[list(oc), ic[0] * taps : ic[1] * taps]
    cost = (part.sum(0) + 1.5 * part.any(0)).reshape(-1, taps * unit).sum(1) + 1e-3
    total = np.concatenate([[0.0], np.cumsum(cost)])
    cuts = [int(np.argmin(np.abs(total - total[-1] * i / splits))) for i in range(splits + 1)]
    for i in range(1, splits + 1):  # every range keeps at least one channel where there are enough
        cuts[i] = max(cuts[i], min(cuts[i - 1] + 1, len(cost)))
    cuts[-1] = len(cost)
    for i in range(splits - 1, 0, -1):
        cuts[i] = min(cuts[i], max(cuts[i + 1] - 1, 0))
    return [(ic[0] + cuts[i] * unit, ic[0] + cuts[i + 1] * unit) for i in range(splits)]

"""Which schedules a layer may run with, and which is predicted to be fastest. Looks at counts, not at weights."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import lru_cache

from sparsedeploy.layer import Geometry, Precision
from sparsedeploy.plugins.baked.schedule import Combine, Mode, Pair, Schedule, compiled
from sparsedeploy.plugins.cost import Ceilings, Work, resident, slots, time_us
from sparsedeploy.plugins.kernel import Config

SHARED_KB = {53: 48, 75: 64, 80: 163, 86: 99, 87: 163, 89: 99, 90: 227, 120: 99}
"""Shared memory that one block may have, by compute capability times ten (CUDA C++ programming guide, table of limits)."""
_COMBINES: tuple[Combine, ...] = ("none", "cluster", "planes")
_SIZES = (64, 96, 128, 192, 224, 256, 320, 384, 448, 512, 576, 640, 768)
_OVERLAP_US = 12.0
_REFINED = 32
_STAGINGS = 3
_STEP = 64
"""Instructions between the barriers that keep warps at the same code."""
_FEW_FMAS = 0.05
"""Share of nonzeros below which 64 fp32 sums spill in 96 registers, above it in 80: 32->64@256 at 4 %, N=32, took 409 us by
80, 318 by 96 and 242 by as many as ptxas likes."""
PART_FMAS = 60_000
"""Fmas of one entry at most, where a layer is launched in parts: some 12 s of one core's ptxas (scripts/lab/NOTES.md)."""
WHOLE_FMAS = 80_000
"""Up to so many a layer stays one launch: a further one costs more at run time than it saves in assembling."""
_SHARED_CODE = 3000
"""Nonzeros whose code (some 20 bytes each) stays in an SM's instruction cache: a 1x1 layer of four groups on 56x56 maps,
whose inputs are too many for L2, took 62 us tile by tile for one group after the other and 50 for all groups."""
_VIEW_CHANNELS = 128
"""Output channels of a piece of a strided 1x1 layer at most: every piece fetches the input's sectors, of which it keeps half
or less, and no halo asks for large tiles."""
_PICK_COST = 1.7
"""What a sector costs that is fetched by 4-byte copies, against 16-byte ones: the strided layers of ResNet-50 took 1.5 to 1.9
times as long as predicted without it."""
_MAX_PICKS = 2
"""Elements of a channel that a thread picks from a strided input at most: with 7, ptxas took 29 s for 3k nonzeros (else 1)
and 20 GB for 52k."""
_MUCH = 256
"""Pixels of a strip, over the batch, from which on tiles have at least 128."""
_WOVEN_CHUNK = 2
"""Elements that a copy moves at most where channels are woven together: of rows that allow 16 bytes the copies are cheap, and weaving
gains nothing (64@56, 128@28); of rows of 7 and 14 it does (512@7, N=32, fp32: 41 to 29 us; 256@14: 31 to 26)."""
_SMALL_COPY = 4
"""Wavefronts of shared memory that a warp's asynchronous copy of 4 bytes a lane counts for."""
_MAX_CODE = 40_000
"""Instructions of one piece at most: what ptxas still takes in seconds."""


def shared_limit(archs: tuple[int, ...]) -> int:
    """Dynamic shared memory that a block may have on every one of these architectures, bytes."""
    return min(SHARED_KB.get(arch, 48) for arch in archs) * 1024


def mode_of(precision: Precision, config: Config) -> Mode:
    """Config `sums` is 16 for half2 sums, 32 for fp32 sums; it matters for fp16 only."""
    if precision == "fp32":
        return "f32"
    return "hf" if config.get("sums", 16) == 32 else "h2"


def from_config(geometry: Geometry, precision: Precision, config: Config) -> Schedule:
    """The schedule that a configuration names; raises ValueError for a name, or a number of channels abreast, that it does not know."""
    known = {
        "sums", "pair_rows", "channels", "splits", "combine", "mates", "pieces_first", "pixels", "rows", "columns", "stage_channels",
        "ring", "min_blocks", "step", "dependent", "sync", "parts", "gather", "interleave", "stream",
    }  # fmt: skip
    unknown = set(config) - known
    if unknown:
        raise ValueError(f"baked has no parameter {', '.join(sorted(unknown))}; it has {', '.join(sorted(known))}")
    if config.get("interleave", 1) not in (1, 2, 4):
        raise ValueError(
            f"baked weaves 2 or 4 input channels together, or none (interleave=1), not {config['interleave']}"
        )
    mode = mode_of(precision, config)
    pair: Pair = "none" if mode != "h2" else "row" if config.get("pair_rows", 0) else "image"
    c = config.get
    seen, origin = compiled(geometry, pair)
    combine = _COMBINES[c("combine", 0)]
    return Schedule(
        geometry=seen, origin=origin, gather=bool(c("gather", 0)) and origin is not None and combine != "planes", mode=mode, pair=pair, channels=c("channels", 64),
        splits=c("splits", 1), combine=combine, mates=c("mates", 1), pieces_first=bool(c("pieces_first", 0)),
        pixels=c("pixels", 256), rows=c("rows", 1), columns=c("columns", 0), stage_channels=c("stage_channels", 4),
        ring=c("ring", 3), min_blocks=c("min_blocks", 1), step=c("step", 0), dependent=bool(c("dependent", 0)),
        sync=c("sync", 0), parts=c("parts", 0), interleave=c("interleave", 1), stream=bool(c("stream", 0)),
    )  # fmt: skip


def to_config(s: Schedule) -> Config:
    """Inverse of `from_config`."""
    config = {
        "channels": s.channels, "splits": s.splits, "combine": _COMBINES.index(s.combine), "mates": s.mates,
        "pieces_first": int(s.pieces_first), "pixels": s.pixels, "rows": s.rows, "columns": s.columns,
        "stage_channels": s.stage_channels, "ring": s.ring, "min_blocks": s.min_blocks, "step": s.step,
        "dependent": int(s.dependent), "sync": s.sync, "parts": s.parts,
    }  # fmt: skip
    if s.interleave > 1:
        config["interleave"] = s.interleave
    if s.stream:
        config["stream"] = 1
    if s.origin is not None:
        config["gather"] = int(s.gather)
    if s.mode != "f32":
        config |= {"sums": 32 if s.mode == "hf" else 16, "pair_rows": int(s.pair == "row")}
    return config


def groups_of(g: Geometry, channels: int) -> tuple[int, int, int]:
    """(pieces before splitting, output channels of one, input channels of one) for pieces of at most `channels`."""
    per_oc, per_ic = g.oc // g.group, g.ic // g.group
    together = max(1, channels // per_oc)
    if together > 1:
        return -(-g.group // together), min(together, g.group) * per_oc, min(together, g.group) * per_ic
    bins = -(-per_oc // channels)
    return g.group * bins, -(-per_oc // bins), per_ic


def part_count(s: Schedule, nnz: int) -> int:
    """Launches: what the schedule says, else as many as assembling it in bounded time asks for."""
    fmas = nnz * s.rows
    wanted = s.parts or (1 if fmas <= WHOLE_FMAS else -(-fmas // PART_FMAS))
    return max(1, min(wanted, groups_of(s.geometry, s.channels)[0]))


def parted(s: Schedule, nnz: int, archs: tuple[int, ...]) -> Schedule:
    """The schedule with its number of launches settled; those that were not asked for overlap where they can."""
    count = part_count(s, nnz)
    overlap = not s.parts and count > 1 and min(archs) >= 90
    return replace(s, parts=count, dependent=s.dependent or overlap)


def estimate(s: Schedule, nnz: int, batch: int, exact: bool = True) -> Work:
    """Counts of one launch at this batch, weights taken as spread evenly. Not `exact`: rows and bytes by rule of thumb."""
    g = s.geometry
    groups, oc, ic = groups_of(g, s.channels)
    ic_part = max(1.0, ic / s.splits)
    per_oc = g.oc // g.group
    density = nnz / max(1, g.oc * (g.ic // g.group) * g.kh * g.kw)
    fmas = nnz / (groups * s.splits) * s.rows
    readers = min(oc, per_oc) * (1 if s.rows == 1 else 1.6)
    taps = ((s.rows - 1) * g.stride[0] + g.kh) * g.kw
    loads = ic_part / s.abreast * taps * (1 - (1 - density) ** (readers * s.abreast))
    stages = ic_part / s.stage_channels
    strip_rows = s.pixels / s.strip * s.rows * g.stride[0]
    input_rows = strip_rows + (g.kh - 1) * g.dilation[0] + (1 if s.pixels % s.strip else 0)
    input_rows += s.pixels / max(1, s.image_pixels) * (g.kh - 1)
    if exact:
        input_rows = float(s.input_rows)
    moved = s.input_cols + s.chunk if s.strips > 1 else g.w
    copied = s.pixels / s.image_pixels * s.whole_rows or input_rows
    copies = copied * moved / s.chunk / s.threads * s.stage_channels
    small = _SMALL_COPY if s.asynchronous and s.chunk * s.global_bytes == 4 else 0
    half = s.mode == "h2"
    own = oc / (s.splits if s.combine == "cluster" else 1)
    fixed = (
        200
        + oc * s.rows * (1 + (1 if s.combine == "cluster" else 0))
        + own * s.rows * ((4 if half else 1.5) + (2 * s.splits if s.combine == "cluster" else 0))
    )
    instructions = (
        fmas
        + loads * (2 if s.mode == "hf" else 1)
        + stages * (6 + copies * (8 if half else 1 if s.abreast == 1 else 1.6))
        + fixed
    )
    tiles = s.tiles().value({"N": batch})
    blocks = -(-tiles // s.mates) * s.mates * s.splits * groups
    sums = oc * s.rows * s.threads * 4
    fill = (
        input_rows * moved * ic_part * s.global_bytes * (2 if half else 1) * tiles * s.splits * groups * s.sector_share
    )
    fill *= 1.0 if s.source is g else _PICK_COST
    row_bytes = (s.input_cols + s.chunk) * s.shared_bytes + 64
    # A layer of few input channels has them all in two slots at most.
    ring = int(min(s.stage_channels * s.ring_slots, 2 * ic_part) * (input_rows + 1) * row_bytes)
    shared = max(ring, sums) if s.combine == "cluster" else ring
    if exact:
        shared = s.block_bytes(oc)
    output = batch * g.oc * g.oh * g.ow
    return Work(
        blocks=blocks, threads=s.threads, registers=registers(s, oc), shared_bytes=shared, instructions=instructions,
        heaviest=instructions * 1.03, loads=loads * s.abreast * (s.load_wavefronts if exact else 1.0) + stages * copies * small, pieces=groups * s.splits, fill_bytes=fill,
        read_bytes=batch * g.ic * g.h * g.w * s.global_bytes * s.sector_share, ahead_bytes=_gathered(s, batch), write_bytes=output * s.global_bytes, cluster=s.cluster,
        stages=stages, ahead=max(1, s.ring_slots - 1), cluster_bytes=blocks * sums * (s.splits - 1) / s.splits if s.combine == "cluster" else 0.0,
        planes_bytes=2.0 * s.splits * output * 4 if s.combine == "planes" else 0.0, launches=part_count(s, nnz),
        plain=not s.asynchronous and s.abreast == 1, halves=half, readers=1 if s.pieces_first else groups,
    )  # fmt: skip


def _gathered(s: Schedule, batch: int) -> float:
    """Bytes that a gathering launch reads and writes."""
    if not s.gather:
        return 0.0
    g = s.geometry
    return batch * g.ic * g.h * g.w * s.global_bytes * (1 + replace(s, gather=False).sector_share)


def registers(s: Schedule, oc: int) -> int:
    """What ptxas needs, or is held to by min_blocks."""
    return min(255, oc * s.rows + (40 if s.mode == "h2" else 24), register_cap(s))


def register_cap(s: Schedule, file: int = 65536) -> int:
    """Registers that a thread may have for min_blocks blocks on an SM: each scheduler has a quarter, dealt in eights."""
    warps = -(-s.min_blocks * s.threads // 32 // 4) if s.min_blocks * s.threads >= 128 else 1
    return min(255, file // 4 // warps // 32 // 8 * 8)


def candidates(
    geometry: Geometry,
    precision: Precision,
    batch: int,
    density: float,
    clusters: bool,
    asynchronous: bool,
    sums: tuple[int, ...] = (16,),
) -> Iterator[Schedule]:
    """Schedules worth predicting."""
    for mode in ("f32",) if precision == "fp32" else tuple("h2" if bits == 16 else "hf" for bits in sums):
        pair: Pair = "none" if mode != "h2" else "image" if batch > 1 else "row"
        g, origin = compiled(geometry, pair)
        base = Schedule(g, mode, pair=pair, use_async=asynchronous, step=0, origin=origin)
        widest = _VIEW_CHANNELS if origin is not None else 72
        small = density * g.oc * (g.ic // g.group) * g.kh * g.kw <= _SHARED_CODE
        few = density < _FEW_FMAS
        for columns in _columns(g):
            shape = replace(base, columns=columns)
            total = -(-batch // shape.images_per_unit) * shape.image_pixels
            for channels in _channels(g, widest):
                for splits in (1, 2, 4, 8) if groups_of(g, channels)[2] >= 64 else (1,):
                    for pixels in _pixels(shape, total):
                        for gather in (False, True) if origin is not None else (False,):
                            s = replace(shape, gather=gather)
                            yield from _shapes(s, channels, splits, pixels, clusters, small, few)


def _shapes(
    shape: Schedule, channels: int, splits: int, pixels: int, clusters: bool, small: bool, few: bool
) -> Iterator[Schedule]:
    """`small`: all pieces fit an instruction cache, so neighbours may run different ones and share their inputs.

    `few`: so few fmas follow each load that ptxas holds more loads than registers are left beside the sums.
    """
    spare = 30 if shape.mode == "h2" else 40 if few else 18
    combine: Combine = "none" if splits == 1 else "cluster" if clusters else "planes"
    if shape.gather and combine == "planes":
        return
    if shape.origin is not None and not shape.gather and _picks(replace(shape, pixels=pixels)) > _MAX_PICKS:
        return
    shared = small and splits == 1 and groups_of(shape.geometry, channels)[0] > 1
    for blocks in (1, 2, 3):
        s = replace(
            shape, channels=channels, splits=splits, combine=combine, pixels=pixels, min_blocks=blocks,
            pieces_first=shared or (combine == "cluster" and splits >= 4),
        )  # fmt: skip
        oc = groups_of(s.geometry, channels)[1]
        if (blocks == 1 or blocks * s.threads <= 1024) and register_cap(s) >= oc * s.rows + spare:
            yield s


@lru_cache(maxsize=1 << 12)
def _picks(s: Schedule) -> int:
    """Elements of one input channel that a thread picks: rows of pixels are loaded whole."""
    return s.slots


def _columns(g: Geometry) -> list[int]:
    if g.h == 1 and g.w > 256 and g.kw == 1:  # flattened: a strip is a stretch of pixels
        return sorted({(g.w // k + 8) // 8 * 8 for k in range(max(1, g.w // 768), g.w // 128 + 1)})[-6:]
    if g.ow <= 128:
        return [0]
    # Of a 14x14 map stretches of 64 beat tiles that cross images: 78 us against 97 for 1024->512, 50 and 58 for 256->1024.
    return [64] if g.h == 1 and g.kw == 1 else [32, 64]


def _channels(g: Geometry, widest: int) -> list[int]:
    """Sizes of pieces, up to what is worth a try."""
    per_oc = g.oc // g.group
    if per_oc < 8 and g.group > 1:
        return sorted({min(g.oc, max(1, 16 // per_oc) * per_oc), min(g.oc, max(1, 32 // per_oc) * per_oc)})
    # 15 groups of 8 splits fill an H200 once; 5 and 7 do with several tiles.
    sizes = {-(-per_oc // k) for k in (1, 2, 3, 4, 5, 6, 7, 8, 12, 15, 16, 24, 32, 48, 64)}
    return sorted(size for size in sizes if 8 <= size <= widest) or [min(per_oc, 96)]


def _pixels(s: Schedule, total: int) -> list[int]:
    """Thread counts near the usual ones, evened out over the tiles."""
    if s.strips > 1 and s.geometry.h == 1:
        sizes = {s.strip * k for k in range(1, 5) if s.strip * k <= 768}
        # The model thinks well of blocks of a warp or two; on the device they took up to three times as long (N=8, 32).
        least = 128 if total >= _MUCH else 1
        return sorted(size for size in sizes if size >= least) or [min(s.strip, 768)]
    even = {-(-total // -(-total // size)) for size in _SIZES} | {size for size in _SIZES if size <= total}
    # Whole images, or tiles that begin where a warp's stores do: 128@28 in half2 took 14.3 us by 384 pixels and 15.2 by 381.
    even = {size if size % s.image_pixels == 0 or size < 32 else -(-size // 32) * 32 for size in even}
    return sorted(size for size in even if size / (-(-size // 32) * 32) > 0.75) or [min(total, 256)]


def fitted(s: Schedule, limit: int, ceiling: int) -> Schedule | None:
    """The schedule with the first stages and ring that fit `limit` bytes, of at most `ceiling` channels a stage."""
    return next(iter(_stagings(s, limit, ceiling)), None)


@lru_cache(maxsize=1 << 16)
def _stagings(s: Schedule, limit: int, ceiling: int) -> tuple[Schedule, ...]:
    """The schedule with all stages and rings worth a try that fit `limit` bytes, large stages first."""
    whole = max(1, ceiling)
    choices = [(whole, 2)] if whole <= 32 else []
    choices += [(8, 4), (4, 6), (4, 4), (4, 3), (2, 4), (2, 3), (1, 3), (1, 2)]
    found: dict[tuple[int, int], Schedule] = {}
    for channels, ring in choices:
        if channels > whole:
            continue
        deep = min(ring, max(2, -(-whole // channels) + 1))
        made = replace(s, stage_channels=channels, ring=deep)
        oc = groups_of(s.geometry, s.channels)[1]
        size = oc + oc // 8
        sums = made.combine_bytes(size)
        if max(made.ring_bytes, sums) <= limit // s.min_blocks - 1024 and (
            made.ring_bytes + sums <= limit or made.block_bytes(size) <= limit
        ):
            found.setdefault((channels, made.ring_slots), made)
        if len(found) == _STAGINGS:
            break
    return tuple(found.values())


def _woven(s: Schedule, limit: int) -> Iterator[Schedule]:
    """The schedule with channels side by side, where copies are small: of 3x3 maps stages of more than 4 channels spill."""
    if s.mode != "f32" or s.chunk > _WOVEN_CHUNK:
        return
    channels = 8 if (s.geometry.kh, s.geometry.kw) == (1, 1) else 4
    made = replace(
        s, interleave=4 if s.chunk == 1 and s.geometry.stride == (1, 1) else 2, stage_channels=channels, ring=2
    )
    oc = groups_of(s.geometry, s.channels)[1]
    if made.abreast > 1 and made.block_bytes(oc + oc // 8) <= limit // s.min_blocks - 1024:
        yield made


def ranked(
    geometry: Geometry, precision: Precision, batch: int, nnz: int, c: Ceilings, archs: tuple[int, ...], count: int = 5,
    sums: tuple[int, ...] = (16,),
) -> list[tuple[Schedule, float, str]]:  # fmt: skip
    """The `count` schedules predicted fastest, with time in us and bound; never empty.

    They are searched for at the next two-digit number of nonzeros, so that like layers share a search, and timed at nnz.
    """
    found = _searched(geometry, precision, batch, _two_digits(nnz), c, archs, count, sums)
    if not found:
        s = smallest(geometry, precision, batch, shared_limit(archs), min(archs) >= 80, sums)
        return [(s, 1e6, "launch")]
    timed = [(s, *time_us(estimate(s, nnz, batch), c)) for s in found]
    return sorted(timed, key=lambda entry: entry[1])


def _two_digits(nnz: int) -> int:
    unit: int = 10 ** max(0, len(str(nnz)) - 2)
    return -(-nnz // unit) * unit


@lru_cache(maxsize=4096)
def _searched(
    geometry: Geometry, precision: Precision, batch: int, nnz: int, c: Ceilings, archs: tuple[int, ...], count: int,
    sums: tuple[int, ...],
) -> tuple[Schedule, ...]:  # fmt: skip
    """The `count` best schedules, best first; none where nothing fits."""
    clusters = min(archs) >= 90
    density = nnz / max(1, geometry.oc * (geometry.ic // geometry.group) * geometry.kh * geometry.kw)
    limit = shared_limit(archs)
    guesses: list[tuple[float, int, str, Schedule]] = []
    for number, s in enumerate(candidates(geometry, precision, batch, density, clusters, min(archs) >= 80, sums)):
        work = estimate(s, nnz, batch, exact=False)
        if work.heaviest > _MAX_CODE or resident(work, c) < s.min_blocks or not slots(resident(work, c), s.cluster, c):
            continue
        us, bound = time_us(replace(work, stages=max(1.0, groups_of(s.geometry, s.channels)[2] / s.splits / 8)), c)
        guesses.append((us, number, bound, s))
    # The best by rule of thumb are laid out and counted exactly.
    refined: list[tuple[float, int, str, Schedule]] = []
    seen: set[tuple[object, ...]] = set()
    for _, number, _, s in sorted(guesses, key=lambda guess: guess[:2]):
        kind = (s.mode, s.channels, s.splits, s.pixels, s.rows, s.columns, s.min_blocks, s.gather)
        ic = groups_of(s.geometry, s.channels)[2]
        stagings = () if kind in seen else _stagings(s, limit, -(-ic // s.splits))
        if not stagings:
            continue
        seen.add(kind)
        pieces = groups_of(s.geometry, s.channels)[0] * s.splits
        tried = (*stagings, *_woven(stagings[0], limit))
        made, us, bound = min(((m, *time_us(estimate(m, nnz, batch), c)) for m in tried), key=lambda found: found[1])
        # Overlapping launches won 1.5 us where a block fills an SM for 20, and lost a little at 4 us.
        long = us > _OVERLAP_US
        # Barriers among many warps of half2 code of many pieces won a fifth (256@14, 512@7), and lost with fp32 or few.
        step = _STEP if long and s.mode == "h2" and made.threads >= 512 and pieces >= 6 else 0
        # Where nothing is read twice, what was read and written only drives out what will be (512->256@28, N=32: 85 to 50 us).
        stream = clusters and long and made.origin is None and (made.geometry.kh, made.geometry.kw) == (1, 1)
        refined.append((us, number, bound, replace(made, dependent=clusters and long, step=step, stream=stream)))
        if len(refined) == max(_REFINED, count):
            break
    return tuple(s for _, _, _, s in sorted(refined, key=lambda guess: guess[:2])[:count])


def portable(s: Schedule, archs: tuple[int, ...]) -> Schedule:
    """The schedule without what the oldest of these architectures lacks: clusters, overlap, shared memory.

    Raises ValueError where no stage of it fits their shared memory.
    """
    if min(archs) < 90:
        s = replace(s, combine="planes" if s.combine == "cluster" else s.combine, mates=1, dependent=False, sync=0)
    if s.combine == "planes":  # the partial sums have the workspace
        s = replace(s, gather=False)
    oc = groups_of(s.geometry, s.channels)[1]
    limit = shared_limit(archs)
    # Architectures without cp.async use two slots; the larger need counts.
    if max(replace(s, use_async=flag).block_bytes(oc + oc // 8) for flag in (True, False)) <= limit:
        return s
    made = fitted(s, limit, -(-groups_of(s.geometry, s.channels)[2] // s.splits))
    if made is None:
        raise ValueError(f"{s.pixels} pixels of {s.geometry} do not fit {limit} bytes of shared memory")
    return made


def smallest(
    geometry: Geometry, precision: Precision, batch: int, limit: int, asynchronous: bool, sums: tuple[int, ...] = (16,)
) -> Schedule:
    """A schedule that fits everywhere: few channels, few pixels; raises ValueError where even that does not fit."""
    mode: Mode = "f32" if precision == "fp32" else "h2" if sums[0] == 16 else "hf"
    pair: Pair = "none" if mode != "h2" else "image" if batch > 1 else "row"
    g, origin = compiled(geometry, pair)
    for columns in (0, 64, 32, 16, 8):
        for pixels in (128, 64, 32):
            s = Schedule(
                g, mode, pair=pair, channels=16, pixels=pixels, columns=min(columns, g.ow), stage_channels=1, ring=2, step=0,
                use_async=asynchronous, origin=origin,
            )  # fmt: skip
            if s.ring_bytes <= limit:
                return s
    raise ValueError(f"no tile of {geometry} fits {limit} bytes of shared memory")

"""Weights and bias recovered from the PTX that a node carries: accumulator to oc, load offset to ic, ky, kx, immediate
to weight, by the conventions that emit.py states.

Nothing is taken from a copy: every value comes from the instruction that a device executes. Whatever the reader cannot
account for (an fma that is guarded, an accumulator written otherwise, a branch inside a piece) raises ValueError with
its line, so that a text which reads well is one whose sums are these weights and no others. That a slot of shared
memory holds the channel that the text says is the interpreter's to prove.
"""

from __future__ import annotations

import re
import struct
from dataclasses import dataclass, field, replace
from typing import NoReturn

import numpy as np
from numpy.typing import NDArray

from sparsedeploy.layer import Geometry
from sparsedeploy.plugins.launch import Launch
from sparsedeploy.plugins.node import SparseConv

Floats = NDArray[np.float32]

_HEADER = re.compile(
    r"// baked 1 ic=(\d+) oc=(\d+) kh=(\d+) kw=(\d+) stride=(\d+),(\d+) dilation=(\d+),(\d+) "
    r"pads=(\d+),(\d+),(\d+),(\d+) h=(\d+) w=(\d+) group=(\d+)(?: view=(\d+),(\d+),(\d+),(\d+))?$"
)
_ENTRY = re.compile(r"// entry (\S+)((?: \w+=[\w$,]+)+)$")
_PIECE = re.compile(r"// piece (\d+) (\d+) ic=(\d+)\.\.(\d+) oc=([\d,]+)$")
_STAGE = re.compile(r"// stage ic=(\d+)\.\.(\d+) slot=(\d+)$")
_FMA = re.compile(r"fma\.rn\.(f32|f16x2) %a(\d+), %v(\d+), (0f[0-9A-F]{8}|%w), %a(\d+);$")
_LOAD = re.compile(r"ld\.shared\.(?:f32|b32|b16) %(v\d+|h0), \[%b\+(\d+)\];$")
_LOAD_ABREAST = re.compile(r"ld\.shared\.v([24])\.f32 \{(%v\d+(?:, %v\d+)*)\}, \[%b\+(\d+)\];$")
_WIDEN = re.compile(r"cvt\.f32\.f16 %v(\d+), %h0;$")
_WEIGHT = re.compile(r"mov\.b32 %w, 0x([0-9A-F]{8});$")
_START = re.compile(r"mov\.(?:f32|b32) %a(\d+), (0f|0x)([0-9A-F]{8});$")
_RESIDUAL = re.compile(r"@%[sc]\d+ ld\.global\.(?:f32|b32) %a(\d+), \[%q2\+\d+\];$")
_SWAP = re.compile(r"prmt\.b32 %a(\d+), %a(\d+), %r7, %x;$")
_BIAS = re.compile(r"add\.(f32|rn\.f16x2) %a(\d+), %a(\d+), (0f[0-9A-F]{8}|%w);$")
_VISIBLE = re.compile(r"\.visible \.entry ([\w$]+)\(")
_WRITES = re.compile(r"(?:@!?%\w+ )?(?!st\.|bra|ret|cp\.|bar|setp)[a-z][\w.:]* \{?(%[avwb]\d*)\b")


def _fail(line: int, text: str, why: str) -> NoReturn:
    raise ValueError(f"PTX line {line}: {why}: {text[:160]}")


@dataclass(frozen=True)
class _Layout:
    """The strides of an entry's shared memory."""

    name: str
    mode: str
    rows: int
    splits: int
    stage: int
    plane: int
    pitch: int
    element: int
    abreast: int
    """Input channels side by side."""


@dataclass
class _Reading:
    """What one entry has said so far."""

    geometry: Geometry
    layout: _Layout
    bias: NDArray[np.float64]
    """NaN where no piece set it."""
    covered: NDArray[np.bool_]
    """[oc, ic // group]: which input channels some piece of the output channel goes through."""
    found: dict[int, tuple[float, int]] = field(default_factory=dict)
    """Flat index of a weight to its value and to the rows it was met for (bit j: the thread's row j)."""
    names: list[str] = field(default_factory=list)
    """Entries read so far: the parts of one schedule are read into one state."""
    of: str = ""
    parts: int = 1
    piece: _PieceState | None = None


@dataclass
class _PieceState:
    split: int
    first: int
    last: int
    channels: frozenset[int]
    started: dict[int, float] = field(default_factory=dict)
    loaded: dict[int, float] = field(default_factory=dict)
    """Sums that a residual starts, by number of %a, to the bias that is added to them."""
    values: dict[int, tuple[int, int, int]] = field(default_factory=dict)
    """%v number to (ic, input row, input column)."""
    half: tuple[int, int, int] | None = None
    """What %h0 holds on its way to a %v."""
    word: int | None = None
    """What %w holds."""
    stage: tuple[int, int, int] | None = None
    finished: bool = False
    """Past the last sum: from here on nothing may add to a sum."""


@dataclass(frozen=True)
class ReadImage:
    """What one PTX text carries."""

    geometry: Geometry
    """As compiled: a 1x1 convolution may be flattened to one row."""
    weight: Floats
    """[oc, ic // group, kh, kw]; values of fp16 when any entry sums in half2."""
    bias: Floats
    """[oc]."""
    half: bool
    """Whether weights were rounded to fp16."""
    launches: tuple[tuple[str, ...], ...] = ()
    """For every schedule the entries that compute the layer together, in order."""
    view: tuple[int, ...] = ()
    """Height, width and strides of the input that `geometry` is a dense view of; () where it is the input itself."""


def read_image(ptx: bytes | str) -> ReadImage:
    """Weights of one PTX text; raises ValueError naming the line, or the entries that disagree."""
    text = ptx.decode("ascii") if isinstance(ptx, bytes) else ptx
    geometry: Geometry | None = None
    current: _Reading | None = None
    done: list[_Reading] = []
    announced: str | None = None
    view: tuple[int, ...] = ()
    gathers: set[str] = set()
    for number, line in enumerate(text.splitlines(), 1):
        if line.startswith("// baked "):
            if geometry is not None:
                _fail(number, line, "a second header")
            geometry, view = _read_header(number, line)
        elif line.startswith("// entry "):
            if geometry is None or current is not None:
                _fail(number, line, "an entry outside of its place")
            current = _open(number, line, geometry, done[-1] if done else None)
            _check_input(number, line, current, bool(view), gathers)
        elif line.startswith(("// sum ", "// gather ")) and current is None:
            kind, name = line.split()[1:3]
            announced = f"{name}_{kind}"
            gathers |= {name} if kind == "gather" else set()
        elif match := _VISIBLE.match(line):
            expected = current.layout.name if current else announced
            if match.group(1) != expected:
                _fail(number, line, f"an entry that no comment announces (expected {expected})")
            announced = None if current is None else announced
        elif current is not None and line == "}":
            _close_piece(number, line, current)
            if not done or done[-1] is not current:
                done.append(current)
            current = None
        elif current is not None:
            _read_line(number, line, current)
    if geometry is None or not done or current is not None:
        raise ValueError("the PTX has no `// baked 1` header, no entry, or an entry that does not end")
    return replace(_agree([_finish(reading) for reading in done]), view=view)


def _check_input(number: int, line: str, reading: _Reading, view: bool, gathers: set[str]) -> None:
    """An entry says what it reads where the text is of a view; one of gathered input is run behind what gathers it."""
    said = re.search(r" input=(\w+)", line)
    kind = said.group(1) if said else ""
    if kind not in (("strided", "gathered") if view else ("",)) or (kind == "gathered") != (reading.of in gathers):
        _fail(number, line, "an entry that does not say which input it reads, or reads what nothing gathers")
    if kind == "gathered" and len(reading.names) == 1:
        reading.names.insert(0, f"{reading.of}_gather")


def read_weights(node: SparseConv) -> tuple[Floats, Floats | None]:
    """Weight [oc, ic // group, kh, kw] and bias [oc] (None when the node's epilogue has none) from every PTX image.

    Images must agree: bit for bit among those with fp32 weights, and after rounding to fp16 with those that hold
    fp16. The result is the fp32 one when any image has it. Raises ValueError naming image and line.
    """
    results: list[tuple[str, ReadImage]] = []
    for image in node.images:
        if image.kind != "ptx":
            continue
        name = f"sm_{image.arch} {image.dtype}"
        try:
            read = read_image(image.data)
        except ValueError as error:
            raise ValueError(f"{node.layer}: image {name}: {error}") from error
        _check_geometry(node, name, read)
        _check_plan(node, name, image.dtype, read)
        results.append((name, read))
    if not results:
        raise ValueError(f"{node.layer}: the node carries no PTX to read weights from")
    first_name, first = next(((n, r) for n, r in results if not r.half), results[0])
    for name, read in results:
        for what, mine, other in (("weights", first.weight, read.weight), ("bias", first.bias, read.bias)):
            same = (
                np.array_equal(_rounded(mine), _rounded(other)) if first.half != read.half else _same_bits(mine, other)
            )
            if not same:
                raise ValueError(f"{node.layer}: images {first_name} and {name} carry different {what}")
    if not node.epilogue.bias and first.bias.any():
        raise ValueError(f"{node.layer}: image {first_name} adds a bias, the node says there is none")
    return first.weight, first.bias if node.epilogue.bias else None


def _rounded(values: Floats) -> NDArray[np.float16]:
    with np.errstate(over="ignore"):
        return values.astype(np.float16)


def _same_bits(a: Floats, b: Floats) -> bool:
    return bool(np.array_equal(a.view(np.uint32), b.view(np.uint32)))


def _check_geometry(node: SparseConv, name: str, read: ReadImage) -> None:
    mine, other = node.geometry, read.geometry
    fields: tuple[str, ...] = ("oc", "ic", "kh", "kw", "stride", "group")
    if read.view:
        if read.view != (mine.h, mine.w, *mine.stride) or any(mine.pads) or (mine.kh, mine.kw) != (1, 1):
            raise ValueError(
                f"{node.layer}: image {name} was made for a 1x1 convolution of every ({read.view[2]}, {read.view[3]})-th pixel "
                f"of {read.view[0]}x{read.view[1]}, the node says {mine.kh}x{mine.kw}, stride {mine.stride} on {mine.h}x{mine.w}"
            )
        mine = mine.model_copy(update={"h": mine.oh, "w": mine.ow, "stride": (1, 1), "dilation": (1, 1)})
        other = other.model_copy(update={"dilation": (1, 1)})
    flattened = (other.h, other.w) == (1, mine.h * mine.w) and (mine.kh, mine.kw) == (1, 1)
    if not flattened:
        fields += ("h", "w", "pads", "dilation")
    for key in fields:
        if getattr(mine, key) != getattr(other, key):
            raise ValueError(
                f"{node.layer}: image {name} was made for {key} {getattr(other, key)}, the node says {getattr(mine, key)}"
            )


def _check_plan(node: SparseConv, name: str, dtype: str, read: ReadImage) -> None:
    """Every variant launches all parts of one schedule: weights that are read but never run would prove nothing."""
    for variant in node.plan:
        launched = tuple(op.entry for op in variant.ops if isinstance(op, Launch) and not op.entry.endswith("_sum"))
        if variant.dtype == dtype and launched not in read.launches:
            raise ValueError(
                f"{node.layer}: the launch plan runs {', '.join(launched) or 'nothing'}, image {name} has "
                f"{' or '.join(', '.join(names) for names in read.launches)}"
            )


def _read_header(number: int, line: str) -> tuple[Geometry, tuple[int, ...]]:
    match = _HEADER.match(line)
    if not match:
        _fail(number, line, "a header of another form or version")
    ic, oc, kh, kw, sh, sw, dh, dw, top, left, bottom, right, h, w, group = (int(part) for part in match.groups()[:15])
    view = tuple(int(part) for part in match.groups()[15:] if part is not None)
    geometry = Geometry(
        oc=oc, ic=ic, kh=kh, kw=kw, h=h, w=w, stride=(sh, sw), pads=(top, left, bottom, right), dilation=(dh, dw), group=group,
    )  # fmt: skip
    return geometry, view


def _open(number: int, line: str, g: Geometry, before: _Reading | None) -> _Reading:
    match = _ENTRY.match(line)
    if not match:
        _fail(number, line, "an entry comment of another form")
    said = dict(part.split("=") for part in match.group(2).split())
    try:
        numbers = [int(said[key]) for key in ("rows", "splits", "stage", "plane", "pitch", "element")]
        numbers.append(int(said.get("abreast", "1")))
        part, parts = int(said["part"]), int(said["parts"])
        layout = _Layout(match.group(1), said["mode"], *numbers)
        of = said["of"]
    except (KeyError, ValueError) as error:
        _fail(number, line, f"an entry comment without a usable {error}")
    if layout.mode not in ("f32", "hf", "h2") or min(numbers) < 1:
        _fail(number, line, "an entry comment with values that make no sense")
    if part == 0:
        empty = np.full(g.oc, np.nan), np.zeros((g.oc, g.ic // g.group), np.bool_)
        return _Reading(g, layout, *empty, names=[layout.name], of=of, parts=parts)
    read = 0 if before is None else len(before.names) - (before.names[0] == f"{of}_gather")
    if before is None or (before.of, before.parts, read) != (of, parts, part):
        _fail(number, line, f"part {part} of {parts} out of its place")
    if (before.layout.mode, before.layout.rows, before.layout.splits) != (layout.mode, layout.rows, layout.splits):
        _fail(number, line, "a part unlike the one before")
    before.layout, before.names = layout, [*before.names, layout.name]
    return before


def _read_line(number: int, line: str, reading: _Reading) -> None:
    piece = reading.piece
    if line.startswith("// piece "):
        _close_piece(number, line, reading)
        _open_piece(number, line, reading)
    elif match := _FMA.match(line):
        if piece is None or piece.finished:
            _fail(number, line, "a sum outside of a piece's arithmetic")
        _add(number, line, reading, piece, match)
    elif match := _LOAD.match(line):
        if piece is not None:
            _load(number, line, reading, piece, match)
    elif match := _LOAD_ABREAST.match(line):
        if piece is not None:
            _load_abreast(number, line, reading, piece, match)
    elif piece is None:
        if line.startswith("// stage") or (re.search(r"%[aw]\d*\b", line) and not line.startswith(".reg")):
            _fail(number, line, "a sum outside of a piece")
    elif line.startswith("// stage "):
        _settle(number, line, reading, piece)
        found = _STAGE.match(line)
        if not found or piece.finished:
            _fail(number, line, "a stage out of its place")
        piece.stage = (int(found.group(1)), int(found.group(2)), int(found.group(3)))
        if not piece.first <= piece.stage[0] < piece.stage[1] <= piece.last:
            _fail(number, line, f"a stage outside of the piece's channels {piece.first}..{piece.last}")
    elif match := _WEIGHT.match(line):
        piece.word = int(match.group(1), 16)
    elif match := _WIDEN.match(line):
        if piece.half is None or reading.layout.mode != "hf":
            _fail(number, line, "a conversion of nothing that was loaded")
        piece.values[int(match.group(1))], piece.half = piece.half, None
    elif match := _START.match(line):
        _start(number, line, reading, piece, match)
    elif piece.stage is None and not piece.finished and _ahead(number, line, reading, piece):
        return
    else:
        _other(number, line, piece)


def _ahead(number: int, line: str, reading: _Reading, piece: _PieceState) -> bool:
    """Whether the line is one of those that start a sum from the residual; they stand ahead of the first stage."""
    if match := _RESIDUAL.match(line):
        if int(match.group(1)) // reading.layout.rows not in piece.started or int(match.group(1)) in piece.loaded:
            _fail(number, line, "a residual out of its place")
        piece.loaded[int(match.group(1))] = 0.0
    elif match := _SWAP.match(line):
        if match.group(1) != match.group(2) or int(match.group(1)) not in piece.loaded or reading.layout.mode != "h2":
            _fail(number, line, "halves swapped of what was not loaded")
    elif match := _BIAS.match(line):
        target = int(match.group(2))
        half = reading.layout.mode == "h2"
        if match.group(2) != match.group(3) or piece.loaded.get(target) != 0.0 or (match.group(1) != "f32") != half:
            _fail(number, line, "a bias out of its place")
        if half and piece.word is None:
            _fail(number, line, "a bias that was never set")
        word = piece.word or 0
        piece.loaded[target] = _pair(number, line, word) if half else _single(int(match.group(4)[2:], 16))
    else:
        return False
    return True


def _settle(number: int, line: str, reading: _Reading, piece: _PieceState) -> None:
    """The biases that were added to sums which a residual started: alike in all rows, in the first split only."""
    rows = reading.layout.rows
    for oc in sorted({target // rows for target in piece.loaded}):
        found = {piece.loaded.get(oc * rows + j) for j in range(rows)}
        value = next(iter(found))
        if len(found) != 1 or value is None or piece.started[oc] != 0.0 or (value != 0.0 and piece.split != 0):
            _fail(number, line, f"the sums of output channel {oc} start unlike, or with a bias out of its place")
        if piece.split == 0:
            reading.bias[oc] = value
    piece.loaded = {}


def _open_piece(number: int, line: str, reading: _Reading) -> None:
    match = _PIECE.match(line)
    if not match:
        _fail(number, line, "a piece comment of another form")
    g = reading.geometry
    split, first, last = int(match.group(2)), int(match.group(3)), int(match.group(4))
    channels = frozenset(int(part) for part in match.group(5).split(","))
    if not channels or max(channels) >= g.oc or not 0 <= first <= last <= g.ic or split >= reading.layout.splits:
        _fail(number, line, f"a piece outside of {g.oc} output and {g.ic} input channels")
    per_oc, per_ic = g.oc // g.group, g.ic // g.group
    for oc in channels:
        base = oc // per_oc * per_ic
        low, high = max(first - base, 0), min(last - base, per_ic)
        if low < high:
            if reading.covered[oc, low:high].any():
                _fail(number, line, f"a second piece for output channel {oc} and the same input channels")
            reading.covered[oc, low:high] = True
    reading.piece = _PieceState(split, first, last, channels)


def _close_piece(number: int, line: str, reading: _Reading) -> None:
    piece = reading.piece
    if piece is None:
        return
    _settle(number, line, reading, piece)
    missing = piece.channels - set(piece.started)
    if missing:
        _fail(number, line, f"the piece before never starts the sum of output channel {min(missing)}")
    reading.piece = None


def _start(number: int, line: str, reading: _Reading, piece: _PieceState, match: re.Match[str]) -> None:
    oc, row = divmod(int(match.group(1)), reading.layout.rows)
    bits, half = int(match.group(3), 16), reading.layout.mode == "h2"
    if oc not in piece.channels or piece.stage is not None or (match.group(2) == "0x") != half:
        _fail(number, line, "a sum started out of its place")
    value = _pair(number, line, bits) if half else _single(bits)
    if (oc in piece.started) != (row > 0) or (row and piece.started[oc] != value):
        _fail(number, line, f"the sums of output channel {oc} start unlike or out of order")
    piece.started[oc] = value
    if piece.split == 0:
        if row == 0 and not np.isnan(reading.bias[oc]):
            _fail(number, line, f"a second start of output channel {oc}")
        reading.bias[oc] = value
    elif value != 0.0:
        _fail(number, line, "a bias outside of the first split")


def _load(number: int, line: str, reading: _Reading, piece: _PieceState, match: re.Match[str]) -> None:
    what = _loaded(number, line, reading, piece, int(match.group(2)))
    if match.group(1) == "h0":
        piece.half = what
    elif reading.layout.mode == "hf":
        _fail(number, line, "a half loaded without conversion")
    else:
        piece.values[int(match.group(1)[1:])] = what


def _load_abreast(number: int, line: str, reading: _Reading, piece: _PieceState, match: re.Match[str]) -> None:
    names = [int(name[2:]) for name in match.group(2).split(", ")]
    channel, row, column = _loaded(number, line, reading, piece, int(match.group(3)))
    first = piece.stage[0] if piece.stage else 0
    if (
        {len(names), int(match.group(1))} != {reading.layout.abreast}
        or (channel - first) % len(names)
        or len(set(names)) != len(names)
    ):
        _fail(number, line, "a load of channels that do not lie side by side")
    for k, name in enumerate(names):
        piece.values[name] = (channel + k, row, column)


def _loaded(number: int, line: str, reading: _Reading, piece: _PieceState, at: int) -> tuple[int, int, int]:
    """(input channel, row, column) of what lies at an offset from %b."""
    if piece.stage is None:
        _fail(number, line, "a load ahead of its stage")
    layout, (first, last, slot) = reading.layout, piece.stage
    offset = at - slot * layout.stage
    plane, inside = divmod(offset, layout.plane)
    row, inside = divmod(inside, layout.pitch)
    column, inside = divmod(inside, layout.element)
    beside, rest = divmod(inside, layout.element // layout.abreast)
    channel = first + plane * layout.abreast + beside
    if offset < 0 or rest or channel >= last:
        _fail(number, line, f"a load outside of stage {first}..{last}")
    return channel, row, column


def _add(number: int, line: str, reading: _Reading, piece: _PieceState, match: re.Match[str]) -> None:
    kind, target, source, literal, again = match.groups()
    layout, g = reading.layout, reading.geometry
    oc, j = divmod(int(target), layout.rows)
    if target != again or oc not in piece.channels or (kind == "f16x2") != (layout.mode == "h2"):
        _fail(number, line, "an fma that is no sum of this piece")
    if oc not in piece.started:
        _fail(number, line, f"a sum of output channel {oc} ahead of its start")
    if int(source) not in piece.values:
        _fail(number, line, f"%v{source} holds nothing that was loaded in this piece")
    ic, row, column = piece.values[int(source)]
    ky, off_y = divmod(row - j * g.stride[0], g.dilation[0])
    kx, off_x = divmod(column, g.dilation[1])
    inside = ic - oc // (g.oc // g.group) * (g.ic // g.group)
    if off_y or off_x or not 0 <= ky < g.kh or not 0 <= kx < g.kw or not 0 <= inside < g.ic // g.group:
        _fail(number, line, f"input ({ic}, {row}, {column}) is no tap of output channel {oc}, row {j}")
    if literal == "%w":
        if piece.word is None:
            _fail(number, line, "a weight that was never set")
        value = _pair(number, line, piece.word)
    else:
        value = _single(int(literal[2:], 16))
    if value == 0.0 or value - value != 0.0:
        _fail(number, line, f"a weight of {value}")
    at, bit = ((oc * (g.ic // g.group) + inside) * g.kh + ky) * g.kw + kx, 1 << j
    before, rows = reading.found.get(at, (value, 0))
    if rows & bit:
        _fail(number, line, f"weight ({oc}, {inside}, {ky}, {kx}) of row {j} is added twice")
    if before != value:
        _fail(number, line, f"weight ({oc}, {inside}, {ky}, {kx}) differs between rows: {value} and {before}")
    reading.found[at] = (value, rows | bit)


def _other(number: int, line: str, piece: _PieceState) -> None:
    """Everything else must leave sums, weights, loaded values and their base alone, and must not branch among them."""
    text = line.strip()
    if text.startswith("//") or not text:
        return
    if re.match(r"(?:@!?%\w+ )?(?:bra|brx|ret|exit|call)\b", text) or text.endswith(":"):
        piece.finished = True
        return
    match = _WRITES.match(text)
    if match is None or (match.group(1) == "%b" and piece.stage is None):
        return  # a thread's place is found ahead of the first stage
    if match.group(1) == "%w" and text.startswith("ld.shared.b32 %w, [%r6+"):  # another block's sums
        piece.finished = True
        return
    _fail(number, line, f"{match.group(1)} is written in a way that is not accounted for")


def _single(bits: int) -> float:
    value: float = struct.unpack("<f", struct.pack("<I", bits))[0]
    return value


def _pair(number: int, line: str, bits: int) -> float:
    if bits & 0xFFFF != bits >> 16:
        _fail(number, line, f"the halves of 0x{bits:08X} differ")
    value: float = struct.unpack("<e", struct.pack("<H", bits & 0xFFFF))[0]
    return value


def _finish(reading: _Reading) -> ReadImage:
    layout = reading.layout
    read = len(reading.names) - (reading.names[0] == f"{reading.of}_gather")
    if read != reading.parts:
        raise ValueError(f"entry {reading.of}: {read} of its {reading.parts} parts are there")
    if np.isnan(reading.bias).any():
        raise ValueError(
            f"entry {layout.name}: no piece computes output channel {int(np.isnan(reading.bias).argmax())}"
        )
    if not reading.covered.all():
        oc, ic = (int(k) for k in np.argwhere(~reading.covered)[0])
        raise ValueError(
            f"entry {layout.name}: no piece takes output channel {oc} through input channel {ic} of its group"
        )
    weight = np.zeros(reading.geometry.weight_shape, np.float32)
    for flat, (value, rows) in reading.found.items():
        if rows != (1 << layout.rows) - 1:
            at = tuple(int(k) for k in np.unravel_index(flat, weight.shape))
            raise ValueError(
                f"entry {layout.name}: weight {at} is missing in some of the {layout.rows} rows of a thread"
            )
        weight.flat[flat] = value
    launches = (tuple(reading.names),)
    return ReadImage(reading.geometry, weight, reading.bias.astype(np.float32), layout.mode == "h2", launches)


def _agree(entries: list[ReadImage]) -> ReadImage:
    """Entries for several batch sizes carry the same weights (rounded to fp16 where one of them sums in half2)."""
    exact = [entry for entry in entries if not entry.half] or entries
    launches = tuple(names for entry in entries for names in entry.launches)
    for entry in entries:
        for what, mine, other in (("weights", exact[0].weight, entry.weight), ("bias", exact[0].bias, entry.bias)):
            same = (
                np.array_equal(_rounded(mine), _rounded(other))
                if entry.half != exact[0].half
                else _same_bits(mine, other)
            )
            if not same:
                raise ValueError(f"two entries of one image carry different {what}")
    return replace(exact[0], launches=launches)

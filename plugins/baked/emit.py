"""PTX text of one pruned convolution: what the code looks like, and how to read it back.

One module per (architecture, activation dtype); one `.visible .entry` per schedule (a schedule serves a range of N), or
one for each of its parts, which are launched one after another (NAME_0, NAME_1, ...), where input-channel splits are
summed by a further launch, one entry `NAME_sum`, and, where a strided 1x1 convolution's input is copied densely ahead, one
entry `NAME_gather`. Text is deterministic.

Parts overlap where launches are dependent: part 0 waits for the kernel ahead before it lets part 1 start, so that part 1
may read its input at once; part 1 waits for part 0 at its end, so that who waits for the last part has waited for all.

What one block does. A *piece* is (output-channel list, input-channel range). A block runs one piece on one tile of output
pixels: input rows with their halo go to shared memory in *stages* of a few channels through a ring of slots, each thread
holds the sums of its pixels for all output channels of the piece, and per nonzero there is one fma whose weight is an
immediate. Blocks are numbered `piece = ctaid.y * splits + ctaid.x % splits` or, pieces first, within ctaid.x; the code of a
piece is reached by a binary tree of `setp.lt.u32` / `@p bra`.

Grammar (one instruction per line, optional `@%p ` or `@!%p ` guard, `;` at the end; labels `NAME:` alone on a line; `//` comments):
  directives   .version .target .address_size .extern .shared  .visible .entry NAME( .param .u64|.u32 NAME, ... )  .maxntid
               .minnctapersm  .reg .pred|.b16|.b32|.b64|.f32 %x<N>  { }
  special      %tid.x %ctaid.x %ctaid.y (in mov.u32); the dynamic shared array `smem` (in mov.u32)
  parameters   ld.param.u64 ld.param.u32            cvta.to.global.u64
  integers     mov.u32 mov.b32 mov.b16 mov.f32 (register or immediate)  add.s32 sub.s32 mul.lo.u32 mad.lo.u32 div.u32 rem.u32
               mul.wide.u32 mul.wide.s32 add.s64 shl.b32 selp.b32
  predicates   setp.lt.u32  setp.lt.and.u32 %p, a, b, %q
  control      bra ret bar.sync 0
  global       ld.global.{b16,u16,b32,v2.b32,v4.b32,f32}  st.global.{b16,b32,v2.b32,f32}       addresses [%reg+imm]; u16 goes to a .b32 register
  shared       ld.shared.{b16,b32,f32,v2.f32,v4.f32}  st.shared.{u16,b32,v2.b32,v4.b32}             addresses [%reg+imm]
  async        cp.async.ca.shared.global (4, 8 bytes)  cp.async.cg.shared.global (16 bytes), with a source size of 0 for
               padding: [%to+imm], [%from+imm], BYTES, %size    cp.async.commit_group
               cp.async.wait_group K                   (sm_80 and later; a copy is visible after wait_group and bar.sync)
  L2           createpolicy.fractional.L2::evict_first.b64, cp.async with .L2::cache_hint and the policy last, st.global.cs
               (sm_90 and later): no result changes
  dependent    griddepcontrol.launch_dependents  griddepcontrol.wait   (sm_90 and later)
  cluster      barrier.cluster.arrive.aligned  barrier.cluster.wait.aligned  mapa.shared::cluster.u32 %r, %addr, RANK
               st.shared::cluster.{f32,b32}            (sm_90 and later; the cluster lies along x, rank = ctaid.x % cluster)
  floats       fma.rn.f32 add.f32 mul.f32 max.f32 min.f32 (immediates `0fXXXXXXXX`)
  halves       add.rn.f16x2  fma.rn.f16x2 (weight: %w, both halves equal)  mov.b32 {%h,%h} <-> %r  cvt.f32.f16 cvt.rn.f16.f32
               prmt.b32    shfl.sync.bfly.b32 %r, %r, 1, 31, -1

Modes (in the entry's comment):
  f32  fp32 storage, fp32 sums.
  hf   fp16 storage, fp32 sums: ld.shared.b16 then cvt.f32.f16.
  h2   fp16 storage, half2 sums. A word is a pair: two images (pair=image: 2i and 2i+1) or two rows of one image
       (pair=row: output row y and y + half, half = ceil(oh / 2)). Low half first. Where rows allow it, neighbouring
       threads swap halves ahead of storing: the even one stores both low halves, the odd one both high halves.

Markers and conventions that make the weights recoverable from the text alone:
  `// baked 1 ic=.. oc=.. kh=.. kw=.. stride=sh,sw dilation=dh,dw pads=t,l,b,r h=.. w=.. group=..`   once, after .address_size
       (the geometry as compiled: a 1x1 convolution of stride 1 without pads is flattened to h=1, w=H*W; one of a larger
       stride is compiled as the dense one of its output's size, followed by `view=H,W,sh,sw`, what it is a view of)
  `// entry NAME of=NAME part=I parts=K mode=.. pair=none|image|row rows=P splits=KS pixels=T strip=COLUMNS stage=BYTES plane=BYTES pitch=BYTES element=BYTES`
       (where channels lie side by side, `abreast=V`; and, of a view, `input=strided`: blocks pick its elements, or `input=gathered`: they read what the entry NAME_gather,
       announced by `// gather NAME`, left in the workspace)
       before each entry; the K parts of one `of` carry the weights together. Bytes are shared-memory strides: ring slot, channel, input row, pixel. COLUMNS: see Schedule.
  `// piece g ks ic=LO..HI oc=a,b,c`   at each piece's label; HI exclusive; channels are absolute (of the whole input).
  `// stage ic=LO..HI slot=K`          ahead of each stage's arithmetic.
  `%a{oc * P + j}`   sum of output channel oc (absolute) for the thread's j-th output row, 0 <= j < P.
       Its only definitions are `mov %a, imm` (the bias in pieces with ks = 0, else 0) and the fma lines. A residual that is
       added before the activation starts the sum instead, so that all its loads are in flight at once, beside the first
       inputs' (in a cluster it is loaded to %f while the blocks wait for each other): `mov %a, 0`, `@%s ld.global %a, [%q2+IMM]` (h2: two neighbours' words, then swapped by shfl and prmt) and,
       ahead of the first stage, `add %a, %a, imm` (h2: `mov.b32 %w`, `add.rn.f16x2`): the bias.
  `ld.shared.* %v?, [%b+IMM]` is the only use of %b, and IMM gives the tap: rel = IMM - slot * stage;
       c = rel // plane, r = rel % plane // pitch, x = rel % pitch // element; the input channel is LO + c of the stage (where
       the entry says abreast=V: LO + V * c + rel % element / 4, and `ld.shared.v{V}.f32 {%v?, ...}` loads that one and those after it),
       the input row is r = j * sh + ky * dh and the column x = kx * dw, relative to the thread's first output pixel.
  `fma.rn.f32 %a, %v, 0f........, %a`  or  `mov.b32 %w, 0x........` and `fma.rn.f16x2 %a, %v, %w, %a`: the weight of (oc, ic, ky, kx) for row j, where
       ky = (r - j * sh) / dh, kx = x / dw. In mode hf the %v is the destination of the cvt of that load.
  Zeros have no line; an explicit zero weight is never emitted.
"""

from __future__ import annotations

import struct
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from sparsedeploy.layer import Epilogue, Geometry
from sparsedeploy.plugins.baked.schedule import Nonzeros, Piece, Schedule, parts, pieces

_ZERO = "0f00000000"
_CLUSTER_BARRIER = ("barrier.cluster.arrive.aligned", "barrier.cluster.wait.aligned")
_BATCH = 8
"""Sums whose residuals are loaded together, where they cannot start the sums."""
_MARKED_FROM = 90
"""First architecture whose loads and stores say what is to leave the L2 first: where that was measured."""
_TAPS_AHEAD = 4
"""Input elements loaded together, one group ahead of their use: two groups are live beside the sums."""
Tap = tuple[int, int]
"""(row, column) of an input element relative to the thread's first output pixel."""
_Load = tuple[int, Tap, list[list[tuple[int, float]]]]
"""(plane of the slot, tap, for each of the channels abreast the (sum, weight) pairs that its value feeds)."""


@dataclass(frozen=True)
class Entry:
    """One kernel of a module."""

    name: str
    schedule: Schedule

    def part_name(self, part: int) -> str:
        """Name of the entry of one part."""
        return self.name if self.schedule.parts <= 1 else f"{self.name}_{part}"


def float_literal(value: float) -> str:
    """An fp32 immediate: 0f3F800000."""
    return f"0f{struct.unpack('<I', struct.pack('<f', value))[0]:08X}"


def pair_literal(value: float) -> str:
    """Both halves of a half2 immediate: 0x3C003C00."""
    return f"0x{int(np.float16(value).view(np.uint16)) * 0x10001:08X}"


def module(
    geometry: Geometry, weights: Nonzeros, bias: NDArray[np.float32] | None, epilogue: Epilogue,
    entries: Sequence[Entry], arch: int, version: str,
) -> str:  # fmt: skip
    """The PTX module of `entries` for one architecture (compute capability times ten) and PTX ISA version."""
    g = geometry
    out = [
        f".version {version}",
        f".target sm_{arch}",
        ".address_size 64",
        f"// baked 1 ic={g.ic} oc={g.oc} kh={g.kh} kw={g.kw} stride={_list(g.stride)} dilation={_list(g.dilation)} "
        f"pads={_list(g.pads)} h={g.h} w={g.w} group={g.group}{_view(entries[0].schedule)}",
        ".extern .shared .align 16 .b8 smem[];",
    ]
    by_channel = _by_channel(weights)
    for entry in entries:
        cut = parts(entry.schedule, pieces(entry.schedule, weights))
        if entry.schedule.gather:
            out += _gather_entry(entry)
        for number in range(len(cut)):
            out += _Writer(entry, by_channel, cut, number, bias, epilogue, arch).text()
        if entry.schedule.combine == "planes":
            out += _sum_entry(entry, epilogue)
    return "\n".join(out) + "\n"


def _view(s: Schedule) -> str:
    o = s.origin
    return f" view={o.h},{o.w},{_list(o.stride)}" if o else ""


def _list(values: Iterable[int]) -> str:
    return ",".join(str(value) for value in values)


def _by_channel(weights: Nonzeros) -> dict[int, list[tuple[int, int, int, float]]]:
    table: dict[int, list[tuple[int, int, int, float]]] = defaultdict(list)
    for oc, ic, ky, kx, value in zip(
        weights.oc.tolist(),
        weights.ic.tolist(),
        weights.ky.tolist(),
        weights.kx.tolist(),
        weights.value.tolist(),
        strict=True,
    ):
        table[ic].append((oc, ky, kx, value))
    return table


class _Writer:
    """Writes one entry."""

    def __init__(
        self, entry: Entry, weights: dict[int, list[tuple[int, int, int, float]]], cut: Sequence[Sequence[Piece]],
        part: int, bias: NDArray[np.float32] | None, epilogue: Epilogue, arch: int,
    ) -> None:  # fmt: skip
        streams = entry.schedule.stream and arch >= _MARKED_FROM
        self.store, self.marked = "st.global.cs" if streams else "st.global", streams and entry.schedule.asynchronous
        self.name, self.s, self.weights, self.pieces = entry.part_name(part), entry.schedule, weights, cut[part]
        self.part, self.said = part, f"of={entry.name} part={part} parts={len(cut)}"
        self.g, self.bias, self.epilogue = entry.schedule.geometry, bias, epilogue
        self.woven = entry.schedule.abreast > 1
        """Whether channels come to lie side by side, on their way through registers."""
        self.lines: list[str] = []
        self.plane_out = self.g.oh * self.g.ow
        self.channel_bytes = self.s.source.h * self.s.source.w * self.s.global_bytes
        self.largest = max(len(piece.oc) for piece in self.pieces)
        self.aliased = entry.schedule.aliased(self.largest)
        clustered, residual = entry.schedule.combine == "cluster", epilogue.residual != "none"
        self.swaps = entry.schedule.exchanges and residual and (clustered or epilogue.residual == "before_activation")
        """Whether neighbours swap halves. Two-byte stores alone cost no more than that; two-byte loads do."""
        loads = residual and entry.schedule.combine != "planes" and (entry.schedule.mode == "f32" or self.swaps)
        self.held = loads and clustered
        """Whether the residual is loaded while a cluster waits, into registers whose sums have been sent."""
        self.early = loads and not clustered and epilogue.residual == "before_activation"
        """Whether the residual starts the sums; `after` is what then follows them."""
        self.after = epilogue.model_copy(update={"residual": "none"}) if self.early else epilogue
        self.batched = self.after.residual != "none" and entry.schedule.combine != "planes" and not self.held
        """Whether it is loaded for a few sums at a time: no load can pass the store ahead of it."""
        self.unsettled: list[tuple[int, float]] = []
        # Every block of a cluster must meet as many barriers: as many as the piece of fewest stages has.
        fewest = min(-(-(piece.ic[1] - piece.ic[0]) // self.s.stage_channels) for piece in self.pieces)
        wanted = self.s.sync and self.s.asynchronous and self.s.cluster > 1
        self.synced = range(0, fewest if wanted else 0, self.s.sync or 1)

    def op(self, *lines: str) -> None:
        """Add instructions."""
        self.lines += [f"{line};" for line in lines]

    def note(self, text: str) -> None:
        """Add a comment."""
        self.lines.append(f"// {text}")

    def label(self, name: str) -> None:
        """Add a label."""
        self.lines.append(f"{name}:")

    # ---- the entry ----
    def text(self) -> list[str]:
        """All lines of the entry."""
        s = self.s
        self._prologue()
        self._dispatch(0, len(self.pieces))
        body = self.lines
        value = "f32" if s.mode != "h2" else "b32"
        parameters = [".param .u64 x", ".param .u64 y"]
        if self.epilogue.residual != "none" and s.combine != "planes":
            parameters.append(".param .u64 residual")
        parameters.append(".param .u32 n")
        head = [
            f"// entry {self.name} {self.said} mode={s.mode} pair={s.pair} rows={s.rows} splits={s.splits} "
            f"pixels={s.pixels} strip={s.strip} stage={s.slot_bytes} plane={s.plane_bytes} pitch={s.pitch_bytes} "
            f"element={s.element_bytes}{f' abreast={s.abreast}' if s.abreast > 1 else ''}{_input(s)}",
            f".visible .entry {self.name}({', '.join(parameters)})",
            f".maxntid {s.threads}, 1, 1",
            *([f".minnctapersm {s.min_blocks}"] if s.min_blocks > 1 else []),
            "{",
            f".reg .{value} %a<{self.g.oc * s.rows}>;",
            f".reg .{value} %v<{2 * _TAPS_AHEAD}>;",
            ".reg .b32 %w;",
            ".reg .f32 %o<6>;",
            *([f".reg .{value} %f<{s.share(self.largest) * s.rows}>;"] if self.held else []),
            *([f".reg .f32 %f<{_BATCH}>; .reg .b16 %i<{2 * _BATCH}>;"] if self.batched else []),
            ".reg .b16 %h<4>;",
            f".reg .b32 %d<{max(1, self._staged() * 4)}>;",
            f".reg .b32 %r<16>; .reg .b32 %u<{3 * s.slots + 1}>;",
            f".reg .b64 %q<8>; .reg .b64 %g<{s.slots}>; .reg .b64 %z<{s.slots}>;",
            f".reg .pred %p<8>; .reg .pred %k<{s.slots}>; .reg .pred %l<{s.slots}>; .reg .pred %m<{s.slots}>; .reg .pred %s<{s.rows}>; .reg .pred %t<{s.rows}>;",
            f".reg .b32 %b; .reg .b32 %n; .reg .b64 %y; .reg .b64 %e; .reg .b64 %first; .reg .b32 %x; .reg .pred %c<{s.rows}>;",
        ]
        return [*head, *body, "}"]

    def _staged(self) -> int:
        s = self.s
        if s.asynchronous:
            return 0
        return s.slots * (s.stage_channels // s.phases) * (2 if s.pair != "none" else 1)

    def _dispatch(self, first: int, last: int) -> None:
        if last - first == 1:
            self._piece(self.pieces[first])
            return
        middle = (first + last) // 2
        name = f"{self.name}_low_{first}_{last}"
        self.op(f"setp.lt.u32 %p0, %r0, {middle}", f"@%p0 bra {name}")
        self._dispatch(middle, last)
        self.label(name)
        self._dispatch(first, middle)

    # ---- where a thread stands ----
    def _prologue(self) -> None:
        """%r2: the tile's first pixel in its strip; %r3: image of that pixel; %r4: first column; %r5: virtual input row in the image."""
        s, g = self.s, self.g
        if s.dependent and self.part:
            self.op("griddepcontrol.launch_dependents")
        self.op("ld.param.u64 %q0, [x]", "ld.param.u64 %q1, [y]", "ld.param.u32 %n, [n]")
        if self.marked:
            self.op("createpolicy.fractional.L2::evict_first.b64 %first")
        self.op("cvta.to.global.u64 %q0, %q0", "cvta.to.global.u64 %q1, %q1")
        self.op("mov.u32 %r1, %tid.x", "mov.u32 %r2, %ctaid.x", "mov.u32 %r0, %ctaid.y", "mov.u32 %r15, smem")
        if s.pieces_first:
            self._pieces_first()
        elif s.splits > 1:
            self.op(
                f"rem.u32 %r3, %r2, {s.splits}",
                f"div.u32 %r2, %r2, {s.splits}",
                f"mad.lo.u32 %r0, %r0, {s.splits}, %r3",
            )
        self.op("mov.u32 %r4, 0")
        if s.strips > 1:
            self.op(f"rem.u32 %r4, %r2, {s.strips}", f"div.u32 %r2, %r2, {s.strips}", f"mul.lo.u32 %r4, %r4, {s.strip}")
        self.op(
            f"mul.lo.u32 %r2, %r2, {s.pixels}",
            f"div.u32 %r3, %r2, {s.image_pixels}",
            f"rem.u32 %r5, %r2, {s.image_pixels}",
        )
        self.op(f"div.u32 %r5, %r5, {s.strip}", f"mul.lo.u32 %r5, %r5, {s.rows * g.stride[0]}")
        for slot in range(s.slots):
            self._loader(slot)
        if self.woven:
            self._wipe()
        if s.combine == "cluster" and not self.aliased and not self.synced:
            self.op("barrier.cluster.arrive.aligned")
        if s.dependent and s.parts <= 1:
            self.op("griddepcontrol.launch_dependents", "griddepcontrol.wait")
        elif s.dependent and self.part == 0:
            self.op("griddepcontrol.wait", "griddepcontrol.launch_dependents")

    def _pieces_first(self) -> None:
        """%r0: piece, %r2: tile, where ctaid.x counts blocks of a cluster fastest, then pieces, then tiles."""
        s = self.s
        inside = s.splits if s.combine == "cluster" else 1
        others = len(self.pieces) // inside
        self.op(f"rem.u32 %r3, %r2, {s.cluster}", f"div.u32 %r2, %r2, {s.cluster}")
        self.op(f"rem.u32 %r0, %r2, {others}", f"div.u32 %r2, %r2, {others}")
        if inside > 1:
            self.op(f"rem.u32 %r4, %r3, {inside}", f"div.u32 %r3, %r3, {inside}", f"mad.lo.u32 %r0, %r0, {inside}, %r4")
        self.op(f"mad.lo.u32 %r2, %r2, {s.mates}, %r3")

    def _clear(self) -> None:
        """Zero the columns beside the image in every row of the ring: nothing else writes them, so once is enough."""
        s = self.s
        if not s.pad_elements or self.woven:
            return
        kind = "u16" if s.shared_bytes == 2 else "b32"
        planes = s.ring_slots * s.stage_channels
        abreast = max(1, min(planes, s.threads // s.input_rows))
        self.op("mov.b32 %r6, 0")
        for first in range(0, s.input_rows, s.threads):
            count = min(s.threads, s.input_rows - first)
            self.op(f"div.u32 %r7, %r1, {count}", f"rem.u32 %r8, %r1, {count}", f"add.s32 %r8, %r8, {first}")
            self.op(
                "add.s32 %r9, %r8, %r5",
                f"div.u32 %r9, %r9, {s.image_rows}",
                f"mad.lo.u32 %r9, %r9, {s.gap_bytes}, %r15",
            )
            self.op(f"mad.lo.u32 %r9, %r8, {s.pitch_bytes}, %r9", f"mad.lo.u32 %r9, %r7, {s.plane_bytes}, %r9")
            for plane in range(0, planes, abreast):
                self.op(f"setp.lt.u32 %p0, %r7, {min(abreast, planes - plane)}")
                for element in s.pad_elements:
                    self.op(f"@%p0 st.shared.{kind} [%r9+{plane * s.plane_bytes + element * s.element_bytes}], %r6")

    def _wipe(self) -> None:
        """Zero the ring once, ahead of the wait for the kernel before: only elements of the input are stored over it."""
        s, step = self.s, 16 * self.s.threads
        self.op("mov.b32 %r6, 0", "shl.b32 %r7, %r1, 4", "add.s32 %r7, %r7, %r15")
        for first in range(0, s.ring_bytes, step):
            left = -(-(s.ring_bytes - first) // 16)
            if left < s.threads:
                self.op(f"setp.lt.u32 %p0, %r1, {left}")
            guard = "@%p0 " if left < s.threads else ""
            self.op(f"{guard}st.shared.v4.b32 [%r7+{first}], {{%r6, %r6, %r6, %r6}}")
        self.op("bar.sync 0")

    def _loader(self, slot: int) -> None:
        """%u{3*slot}: shared address; %g{slot}: global address (of the pair's second part: %z); %l, %m: whether to load, %k: whether to fill."""
        s, g = self.s, self.g
        at, phase, load = f"%u{3 * slot}", f"%u{3 * slot + 1}", f"%l{slot}"
        thread = "%r1"
        if slot:
            self.op(f"add.s32 %r6, %r1, {slot * s.threads}")
            thread = "%r6"
        self.op(f"setp.lt.u32 %k{slot}, {thread}, {s.loads_abreast}")
        if s.phases > 1:
            self.op(f"div.u32 {phase}, {thread}, {s.positions}", f"rem.u32 %r6, {thread}, {s.positions}")
        else:
            self.op(f"mov.u32 %r6, {thread}")
        # Row of the tile in %r8, image after the tile's first in %r7, row inside that image's virtual rows in %r9.
        self.op(f"div.u32 %r8, %r6, {s.load_chunks}", f"rem.u32 %r6, %r6, {s.load_chunks}")
        if s.whole_rows:
            self.op(f"div.u32 %r7, %r8, {s.whole_rows}", f"rem.u32 %r9, %r8, {s.whole_rows}")
            self.op(f"add.s32 %r9, %r9, {g.pads[0]}", f"mad.lo.u32 %r8, %r7, {s.image_rows}, %r9")
        else:
            self.op("add.s32 %r9, %r8, %r5", f"div.u32 %r7, %r9, {s.image_rows}", f"rem.u32 %r9, %r9, {s.image_rows}")
        self.op(
            f"mad.lo.u32 {at}, %r8, {s.pitch_bytes}, %r15", f"mad.lo.u32 {at}, %r6, {s.chunk * s.element_bytes}, {at}"
        )
        self.op(f"mad.lo.u32 {at}, %r7, {s.gap_bytes}, {at}", f"add.s32 {at}, {at}, {s.load_column * s.element_bytes}")
        if s.phases > 1:
            self.op(f"mad.lo.u32 {at}, {phase}, {s.plane_bytes}, {at}")
        # Input coordinates: row %r9, column %r6, image %r7; unsigned comparisons refuse negative ones.
        self.op(f"add.s32 %r9, %r9, {-g.pads[0]}", f"mul.lo.u32 %r6, %r6, {s.chunk}")
        if s.strips > 1:
            self.op(f"mad.lo.u32 %r6, %r4, {g.stride[1]}, %r6", f"add.s32 %r6, %r6, {-g.pads[1] - s.column_shift}")
            self.op(f"setp.lt.and.u32 {load}, %r6, {g.w}, %k{slot}")
        self.op("add.s32 %r7, %r7, %r3")
        if s.pair == "image":
            self.op("shl.b32 %r7, %r7, 1")
        self.op(f"setp.lt.and.u32 {load}, %r7, %n, {load if s.strips > 1 else f'%k{slot}'}")
        if s.pair == "image":
            self.op(
                "add.s32 %r10, %r7, 1",
                f"setp.lt.and.u32 {load}, %r9, {g.h}, {load}",
                f"setp.lt.and.u32 %m{slot}, %r10, %n, {load}",
            )
        elif s.pair == "row":
            self.op(f"add.s32 %r10, %r9, {s.pair_rows}", f"setp.lt.and.u32 %m{slot}, %r10, {g.h}, {load}")
            self.op(f"setp.lt.and.u32 {load}, %r9, {g.h}, {load}")
        else:
            self.op(f"setp.lt.and.u32 {load}, %r9, {g.h}, {load}")
        channel = self.channel_bytes
        self.op(f"mul.wide.u32 %g{slot}, %r7, {g.ic * channel}", f"add.s64 %g{slot}, %g{slot}, %q0")
        self.op(f"mad.lo.u32 %r9, %r9, {g.w}, %r6")
        if s.source is not g:  # the pixel's place among every sh-th row and sw-th column
            (sh, sw), of = s.source.stride, s.source
            self.op(f"div.u32 %r10, %r9, {of.ow}", f"rem.u32 %r9, %r9, {of.ow}")
            self.op(f"mul.lo.u32 %r9, %r9, {sw}", f"mad.lo.u32 %r9, %r10, {sh * of.w}, %r9")
        self.op(f"mul.lo.u32 %r9, %r9, {s.global_bytes}")
        if s.phases > 1:
            self.op(f"mad.lo.u32 %r9, {phase}, {channel * s.abreast}, %r9")
        # Signed: a row above the image has a negative offset. It is never read, but its pair's second row may be.
        self.op("mul.wide.s32 %q3, %r9, 1", f"add.s64 %g{slot}, %g{slot}, %q3")
        if s.asynchronous:
            self.op(f"selp.b32 %u{3 * slot + 2}, {s.chunk * s.global_bytes}, 0, {load}")
        if s.pair != "none":
            row = s.source.w * (1 if s.source is g else s.source.stride[0])
            distance = g.ic * channel if s.pair == "image" else s.pair_rows * row * s.global_bytes
            self.op(f"add.s64 %z{slot}, %g{slot}, {distance}")

    def _pixel(self) -> None:
        """%b: the thread's place in a plane; %e: byte offset of its first output; %s{j} (pair's second: %t{j}): store row j."""
        s, g = self.s, self.g
        self.op(f"setp.lt.u32 %p1, %r1, {s.pixels}", "selp.b32 %r6, %r1, 0, %p1", "add.s32 %r6, %r6, %r2")
        self.op(f"div.u32 %r7, %r6, {s.image_pixels}", f"rem.u32 %r6, %r6, {s.image_pixels}")
        self.op(f"div.u32 %r8, %r6, {s.strip}", f"rem.u32 %r6, %r6, {s.strip}", "sub.s32 %r9, %r7, %r3")
        self.op(
            f"mul.lo.u32 %r10, %r9, {s.image_rows}",
            f"mad.lo.u32 %r10, %r8, {s.rows * g.stride[0]}, %r10",
            "sub.s32 %r10, %r10, %r5",
        )
        self.op(f"mad.lo.u32 %b, %r10, {s.pitch_bytes}, %r15", f"mad.lo.u32 %b, %r9, {s.gap_bytes}, %b")
        self.op(
            f"mad.lo.u32 %b, %r6, {g.stride[1] * s.element_bytes}, %b",
            f"add.s32 %b, %b, {s.column_shift * s.element_bytes}",
        )
        if s.pair == "image":
            self.op("shl.b32 %r7, %r7, 1")
        self.op("add.s32 %r6, %r6, %r4", f"mul.lo.u32 %r8, %r8, {s.rows}")
        self.op("setp.lt.and.u32 %p1, %r7, %n, %p1", f"setp.lt.and.u32 %p1, %r6, {g.ow}, %p1")
        for j in range(s.rows):
            self.op(f"add.s32 %r9, %r8, {j}", f"setp.lt.and.u32 %s{j}, %r9, {s.half_rows}, %p1")
            if s.pair == "image":
                self.op("add.s32 %r10, %r7, 1", f"setp.lt.and.u32 %t{j}, %r10, %n, %s{j}")
            elif s.pair == "row":
                self.op(f"add.s32 %r9, %r9, {s.half_rows}", f"setp.lt.and.u32 %t{j}, %r9, {g.oh}, %s{j}")
        size = 4 if s.combine == "planes" else s.global_bytes
        self.op(f"mad.lo.u32 %r8, %r8, {g.ow}, %r6", f"mul.wide.u32 %e, %r8, {size}")
        self.op(f"mul.wide.u32 %q3, %r7, {g.oc * self.plane_out * size}", "add.s64 %e, %e, %q3", "add.s64 %y, %q1, %e")
        if self.epilogue.residual != "none" and s.combine != "planes":
            self.op("ld.param.u64 %q2, [residual]", "cvta.to.global.u64 %q2, %q2", "add.s64 %q2, %q2, %e")
        if self.swaps:
            self._swap_places()

    def _swap_places(self) -> None:
        """%x: which halves a thread keeps; %y: where they go; %c{j}: whether row j is stored."""
        s = self.s
        self.op("rem.u32 %r9, %r1, 2", "setp.lt.u32 %p2, %r9, 1", "selp.b32 %x, 0x5410, 0x3276, %p2")
        self.op(f"selp.b32 %r9, 0, {self._pair_distance() - 2}, %p2", "mul.wide.u32 %q3, %r9, 1", "add.s64 %y, %y, %q3")
        if self.early or self.held:
            self.op("add.s64 %q2, %q2, %q3")
        for j in range(s.rows):
            self.op(f"selp.b32 %r9, 1, 0, %s{j}", f"selp.b32 %r10, 1, 0, %t{j}", "selp.b32 %r9, %r9, %r10, %p2")
            self.op(f"setp.lt.u32 %c{j}, 0, %r9")

    # ---- one piece ----
    def _piece(self, piece: Piece) -> None:
        s = self.s
        self.note(f"piece {piece.group} {piece.split} ic={piece.ic[0]}..{piece.ic[1]} oc={_list(piece.oc)}")
        members = set(piece.oc)
        channels = range(*piece.ic)
        stages = [channels[i : i + s.stage_channels] for i in range(0, len(channels), s.stage_channels)]
        self._start_loads(stages)
        self._clear()
        self._pixel()
        self._start_sums(piece)
        if s.asynchronous:
            self._async_stages(stages, members)
        else:
            self._plain_stages(stages, members)
        self._settle()
        if s.combine == "cluster":
            self._cluster_sum(piece)
        elif s.combine == "planes":
            self._store_planes(piece)
        else:
            places = [(oc, j) for oc in piece.oc for j in range(s.rows)]
            for number, (oc, j) in enumerate(places):
                self._load_batch(places, number)
                self._finish(oc, j, f"%a{oc * s.rows + j}", number % _BATCH)
        if s.dependent and self.part:
            self.op("griddepcontrol.wait")
        self.op("ret")

    def _start_sums(self, piece: Piece) -> None:
        s = self.s
        for oc in piece.oc:
            bias = float(self.bias[oc]) if self.bias is not None and piece.split == 0 else 0.0
            start = 0.0 if self.early else bias
            for j in range(s.rows):
                a = oc * s.rows + j
                self.op(
                    f"mov.b32 %a{a}, {pair_literal(start)}"
                    if s.mode == "h2"
                    else f"mov.f32 %a{a}, {float_literal(start)}"
                )
                if self.early:
                    self._load_residual(oc, j, f"%a{a}")
                    self.unsettled.append((a, bias))

    def _load_residual(self, oc: int, j: int, target: str) -> None:
        """One row's residual: in h2 two neighbours' words, to be swapped when they are there."""
        guard, kind = ("%c", "b32") if self.s.mode == "h2" else ("%s", "f32")
        offset = (oc * self.g.oh + j) * self.g.ow * self.s.global_bytes
        self.op(f"@{guard}{j} ld.global.{kind} {target}, [%q2+{offset}]")

    def _settle(self) -> None:
        """What the sums that a residual started still lack: neighbours' halves swapped, the bias."""
        for a, bias in self.unsettled:
            if self.s.mode == "h2":
                self.op(f"shfl.sync.bfly.b32 %r7, %a{a}, 1, 31, -1", f"prmt.b32 %a{a}, %a{a}, %r7, %x")
                if np.float16(bias) != 0:
                    self.op(f"mov.b32 %w, {pair_literal(bias)}", f"add.rn.f16x2 %a{a}, %a{a}, %w")
            elif bias:
                self.op(f"add.f32 %a{a}, %a{a}, {float_literal(bias)}")
        self.unsettled = []

    def _start_loads(self, stages: Sequence[Sequence[int]]) -> None:
        """First loads ahead of all that does not need them: their latency is a small batch's time."""
        s = self.s
        if s.asynchronous:
            for stage in range(min(s.ring - 1, len(stages))):
                self._copy_async(stages[stage], stage)
        elif stages:
            self._fetch(stages[0])

    def _async_stages(self, stages: Sequence[Sequence[int]], members: set[int]) -> None:
        s = self.s
        for i, stage_channels in enumerate(stages):
            issued = min(len(stages), i + s.ring - 1)
            self.op(
                f"cp.async.wait_group {issued - i - 1}", *(_CLUSTER_BARRIER if i in self.synced else ("bar.sync 0",))
            )
            if i + s.ring - 1 < len(stages):
                self._copy_async(stages[i + s.ring - 1], (i + s.ring - 1) % s.ring)
            self._settle()
            self._arithmetic(stage_channels, i % s.ring, members)

    def _copy_async(self, channels: Sequence[int], slot: int) -> None:
        s = self.s
        size = s.chunk * s.global_bytes
        plane = self.channel_bytes
        for c, k, _ in self._loads(channels):
            guard = self._tail(k, c, len(channels), f"%k{k}")
            # Where every thread copies none needs one, and ptxas takes a third of its time less for a 1x1 layer.
            guarded = "" if guard == f"%k{k}" and (k + 1) * s.threads <= s.loads_abreast else f"@{guard} "
            to, of = slot * s.slot_bytes + c * s.plane_bytes, (channels[0] + c) * plane
            hint, policy = (".L2::cache_hint", ", %first") if self.marked else ("", "")
            self.op(
                f"{guarded}cp.async.{'cg' if size == 16 else 'ca'}.shared.global{hint} [%u{3 * k}+{to}], [%g{k}+{of}], {size}, %u{3 * k + 2}{policy}"
            )
        self.op("cp.async.commit_group")

    def _tail(self, k: int, c: int, count: int, guard: str) -> str:
        """The guard of a load of channels c.. when the last of the side-by-side channels may not exist."""
        left = count // self.s.abreast - c // self.s.abreast
        if self.s.phases <= left:
            return guard
        self.op(f"setp.lt.and.u32 %p2, %u{3 * k + 1}, {left}, {guard}")
        return "%p2"

    def _plain_stages(self, stages: Sequence[Sequence[int]], members: set[int]) -> None:
        if not stages:
            return
        self._put(stages[0], 0)
        self.op("bar.sync 0")
        for i, stage_channels in enumerate(stages):
            if i + 1 < len(stages):
                self._fetch(stages[i + 1])
            self._settle()
            self._arithmetic(stage_channels, i % 2, members)
            if i + 1 < len(stages):
                self._put(stages[i + 1], (i + 1) % 2)
                self.op("bar.sync 0")

    def _loads(self, channels: Sequence[int]) -> list[tuple[int, int, int]]:
        """(channel of the stage, slot, first register) of what a thread loads."""
        s = self.s
        parts = 2 if s.pair != "none" else 1
        return [
            (c + beside, k, ((i * s.abreast + beside) * s.slots + k) * parts * 4)
            for i, c in enumerate(range(0, len(channels), s.phases * s.abreast))
            for beside in range(s.abreast)
            for k in range(s.slots)
        ]

    def _fetch(self, channels: Sequence[int]) -> None:
        """Global memory to registers %d."""
        s = self.s
        plane = self.channel_bytes
        for c, k, at in self._loads(channels):
            offset = (channels[0] + c) * plane
            parts = [(f"%g{k}", f"%l{k}"), (f"%z{k}", f"%m{k}")]
            for part, (address, guard) in enumerate(parts[: 1 if s.pair == "none" else 2]):
                first = at + 4 * part
                if not self.woven:
                    self.op(*[f"mov.b32 %d{first + i}, 0" for i in range(max(1, s.chunk * s.global_bytes // 4))])
                self.op(self._load_global(self._tail(k, c, len(channels), guard), first, f"[{address}+{offset}]"))

    def _load_global(self, guard: str, first: int, address: str) -> str:
        size = self.s.chunk * self.s.global_bytes
        if size == 2:
            # A 16-bit load needs a 16-bit register; widened when it is used.
            return f"@{guard} ld.global.u16 %d{first}, {address}"
        words = size // 4
        names = [f"%d{first + i}" for i in range(words)]
        kind = {1: "b32", 2: "v2.b32", 4: "v4.b32"}[words]
        return f"@{guard} ld.global.{kind} {names[0] if words == 1 else '{' + ', '.join(names) + '}'}, {address}"

    def _put(self, channels: Sequence[int], slot: int) -> None:
        """Registers %d to shared memory, pairs interleaved."""
        s = self.s
        if self.woven:
            self._weave(channels, slot)
            return
        for c, k, at in self._loads(channels):
            to = f"[%u{3 * k}+{slot * s.slot_bytes + c * s.plane_bytes}]"
            if s.pair == "none":
                self._store_shared(self._tail(k, c, len(channels), f"%k{k}"), to, [f"%d{at + i}" for i in range(4)])
                continue
            words = [f"%r{8 + i}" for i in range(s.chunk)]
            for i in range(s.chunk):
                low, high = f"%d{at + i // 2}", f"%d{at + 4 + i // 2}"
                self.op(f"prmt.b32 {words[i]}, {low}, {high}, {'0x7632' if i % 2 else '0x5410'}")
            guard = self._tail(k, c, len(channels), f"%k{k}")
            kind = {1: "b32", 2: "v2.b32", 4: "v4.b32"}[s.chunk]
            self.op(f"@{guard} st.shared.{kind} {to}, {words[0] if s.chunk == 1 else '{' + ', '.join(words) + '}'}")

    def _weave(self, channels: Sequence[int], slot: int) -> None:
        """Registers %d to shared memory, channels side by side, 16 bytes at once where a thread has so many."""
        s = self.s
        together = max(1, min(s.chunk, 4 // s.abreast))
        for c, k, register in self._loads(channels):
            if c % s.abreast:
                continue
            guard = self._tail(k, c, len(channels), f"%l{k}")
            for first in range(0, s.chunk, together):
                at = slot * s.slot_bytes + c // s.abreast * s.plane_bytes + first * s.element_bytes
                words = [
                    f"%d{register + i * s.slots * 4 + pixel}"
                    for pixel in range(first, first + together)
                    for i in range(s.abreast)
                ]
                self.op(f"@{guard} st.shared.v{len(words)}.b32 [%u{3 * k}+{at}], {{{', '.join(words)}}}")

    def _store_shared(self, guard: str, to: str, words: Sequence[str]) -> None:
        size = self.s.chunk * self.s.global_bytes
        if size == 2:
            self.op(f"@{guard} st.shared.u16 {to}, {words[0]}")
            return
        count = size // 4
        kind = {1: "b32", 2: "v2.b32", 4: "v4.b32"}[count]
        self.op(f"@{guard} st.shared.{kind} {to}, {words[0] if count == 1 else '{' + ', '.join(words[:count]) + '}'}")

    # ---- the arithmetic ----
    def _arithmetic(self, channels: Sequence[int], slot: int, members: set[int]) -> None:
        """Loads run one group of taps ahead of the sums, so that their latency hides behind the other group's fmas."""
        s = self.s
        self.note(f"stage ic={channels[0]}..{channels[-1] + 1} slot={slot}")
        work = self._work(channels, members)
        groups = [work[i : i + _TAPS_AHEAD // s.abreast] for i in range(0, len(work), _TAPS_AHEAD // s.abreast)]
        if not groups:
            return
        since = 0
        names = self._load_taps(groups[0], slot, 0)
        for i, group in enumerate(groups):
            if s.step and since >= s.step:
                self.op("bar.sync 0")
                since = 0
            following = self._load_taps(groups[i + 1], slot, (i + 1) % 2) if i + 1 < len(groups) else []
            since += len(following)
            every = [sums for _, _, abreast in group for sums in abreast]
            for name, sums in zip(names, every, strict=True):
                since += len(sums)
                for accumulator, value in sums:
                    if s.mode == "h2":
                        self.op(
                            f"mov.b32 %w, {pair_literal(value)}",
                            f"fma.rn.f16x2 %a{accumulator}, {name}, %w, %a{accumulator}",
                        )
                    else:
                        self.op(f"fma.rn.f32 %a{accumulator}, {name}, {float_literal(value)}, %a{accumulator}")
            names = following

    def _work(self, channels: Sequence[int], members: set[int]) -> list[_Load]:
        """What a stage loads, in order, and the sums that each value feeds."""
        s = self.s
        work: list[_Load] = []
        for c in range(0, len(channels), s.abreast):
            each = [self._taps(ic, members) for ic in channels[c : c + s.abreast]]
            every = sorted({tap for taps in each for tap in taps})
            work += [(c // s.abreast, tap, [taps.get(tap, []) for taps in each]) for tap in every]
        return work

    def _taps(self, ic: int, members: set[int]) -> dict[Tap, list[tuple[int, float]]]:
        """For one input channel: which input elements feed which sums, in load order."""
        g, s = self.g, self.s
        taps: dict[Tap, list[tuple[int, float]]] = {}
        for oc, ky, kx, value in self.weights.get(ic, ()):
            if oc in members:
                for j in range(s.rows):
                    taps.setdefault((j * g.stride[0] + ky * g.dilation[0], kx * g.dilation[1]), []).append(
                        (oc * s.rows + j, value)
                    )
        return dict(sorted(taps.items()))

    def _load_taps(self, group: Sequence[_Load], slot: int, parity: int) -> list[str]:
        s = self.s
        names: list[str] = []
        kind = {"f32": "f32", "hf": "b16", "h2": "b32"}[s.mode]
        for i, (channel, (row, column), abreast) in enumerate(group):
            first = parity * _TAPS_AHEAD + i * s.abreast
            name = f"%v{first}"
            at = slot * s.slot_bytes + channel * s.plane_bytes + row * s.pitch_bytes + column * s.element_bytes
            if self.woven:
                names += self._load_abreast(first, at, [k for k, sums in enumerate(abreast) if sums])
                continue
            if s.mode == "hf":
                self.op(f"ld.shared.b16 %h0, [%b+{at}]", f"cvt.f32.f16 {name}, %h0")
            else:
                self.op(f"ld.shared.{kind} {name}, [%b+{at}]")
            names.append(name)
        return names

    def _load_abreast(self, first: int, at: int, used: Sequence[int]) -> list[str]:
        """A pixel of channels that lie side by side; of a single one where no other is used."""
        count = self.s.abreast
        names = [f"%v{first + k}" for k in range(count)]
        if len(used) == 1:
            self.op(f"ld.shared.f32 {names[used[0]]}, [%b+{at + used[0] * self.s.shared_bytes}]")
        else:
            self.op(f"ld.shared.v{count}.f32 {{{', '.join(names)}}}, [%b+{at}]")
        return names

    # ---- what follows the sums ----
    def _load_batch(self, places: Sequence[tuple[int, int]], number: int) -> None:
        """Residuals of the next _BATCH sums."""
        if not self.batched or number % _BATCH:
            return
        s, size = self.s, self.s.global_bytes
        for k, (oc, j) in enumerate(places[number : number + _BATCH]):
            offset = (oc * self.g.oh + j) * self.g.ow * size
            if size == 4:
                self.op(f"mov.f32 %f{k}, {_ZERO}", f"@%s{j} ld.global.f32 %f{k}, [%q2+{offset}]")
                continue
            self.op(f"mov.b16 %i{2 * k}, 0", f"@%s{j} ld.global.b16 %i{2 * k}, [%q2+{offset}]")
            if s.mode == "h2":
                offset += self._pair_distance()
                self.op(f"mov.b16 %i{2 * k + 1}, 0", f"@%t{j} ld.global.b16 %i{2 * k + 1}, [%q2+{offset}]")

    def _batch_held(self, k: int) -> tuple[str, str]:
        """Registers with the residual of the batch's k-th sum (of both its halves)."""
        if not self.batched:
            return "", ""
        if self.s.global_bytes == 4:
            return f"%f{k}", ""
        self.op(f"cvt.f32.f16 %o4, %i{2 * k}")
        if self.s.mode == "h2":
            self.op(f"cvt.f32.f16 %o5, %i{2 * k + 1}")
        return "%o4", "%o5"

    def _finish(self, oc: int, j: int, source: str, k: int) -> None:
        """Epilogue and store of one sum (a pair of sums in h2), the k-th of its batch."""
        s, g = self.s, self.g
        if s.mode != "h2":
            offset = (oc * g.oh + j) * g.ow * s.global_bytes
            self._finish_one(source, offset, f"%s{j}", self._batch_held(k)[0])
            return
        if _plain(self.after) and self.swaps:
            self._store_swapped(oc, j, source)
            return
        self.op(f"mov.b32 {{%h0, %h1}}, {source}")
        if _plain(self.after):
            base, second = self._pair_places(oc, j)
            self.op(f"@%s{j} {self.store}.b16 [%y+{base}], %h0", f"@%t{j} {self.store}.b16 [%y+{second}], %h1")
            return
        self.op("cvt.f32.f16 %o2, %h0", "cvt.f32.f16 %o3, %h1")
        self._finish_pair(oc, j, self._batch_held(k))

    def _pair_distance(self) -> int:
        """Bytes of the output between both halves of a pair."""
        return self.g.oc * self.plane_out * 2 if self.s.pair == "image" else self.s.half_rows * self.g.ow * 2

    def _pair_places(self, oc: int, j: int) -> tuple[int, int]:
        base = (oc * self.g.oh + j) * self.g.ow * self.s.global_bytes
        return base, base + self._pair_distance()

    def _store_swapped(self, oc: int, j: int, source: str) -> None:
        self.op(f"shfl.sync.bfly.b32 %r7, {source}, 1, 31, -1", f"prmt.b32 %r7, {source}, %r7, %x")
        self.op(f"@%c{j} {self.store}.b32 [%y+{self._pair_places(oc, j)[0]}], %r7")

    def _finish_pair(self, oc: int, j: int, held: tuple[str, str]) -> None:
        """Epilogue and store of %o2 and %o3."""
        base, second = self._pair_places(oc, j)
        if not self.swaps:
            self._finish_one("%o2", base, f"%s{j}", held[0])
            self._finish_one("%o3", second, f"%t{j}", held[1])
            return
        for half, source, residual in (("%h0", "%o2", held[0]), ("%h1", "%o3", held[1])):
            self.op(*_after(self.after, source, residual))
            self.op(f"cvt.rn.f16.f32 {half}, {_result(self.after, source)}")
        self.op("mov.b32 %r10, {%h0, %h1}")
        self._store_swapped(oc, j, "%r10")

    def _finish_one(self, source: str, offset: int, guard: str, held: str) -> None:
        s, e = self.s, self.after
        self.op(*_after(e, source, held))
        if s.global_bytes == 4:
            self.op(f"@{guard} {self.store}.f32 [%y+{offset}], {_result(e, source)}")
        else:
            self.op(f"cvt.rn.f16.f32 %h2, {_result(e, source)}", f"@{guard} {self.store}.b16 [%y+{offset}], %h2")

    def _store_planes(self, piece: Piece) -> None:
        """Partial sums as fp32 into plane `split` of the workspace, which stands in the place of y."""
        s, g = self.s, self.g
        self.op(f"mul.wide.u32 %q3, %n, {g.oc * self.plane_out * 4}")
        for _ in range(piece.split):
            self.op("add.s64 %y, %y, %q3")
        for oc in piece.oc:
            for j in range(s.rows):
                offset, a = (oc * g.oh + j) * g.ow * 4, f"%a{oc * s.rows + j}"
                if s.mode != "h2":
                    self.op(f"@%s{j} st.global.f32 [%y+{offset}], {a}")
                    continue
                distance = g.oc * self.plane_out * 4 if s.pair == "image" else s.half_rows * g.ow * 4
                self.op(f"mov.b32 {{%h0, %h1}}, {a}", "cvt.f32.f16 %o2, %h0", "cvt.f32.f16 %o3, %h1")
                self.op(
                    f"@%s{j} st.global.f32 [%y+{offset}], %o2", f"@%t{j} st.global.f32 [%y+{offset + distance}], %o3"
                )

    def _cluster_sum(self, piece: Piece) -> None:
        """Every block sends the others their share of its sums, then adds its own share in the order of the splits."""
        s = self.s
        share = s.share(len(piece.oc))
        kind = "b32" if s.mode == "h2" else "f32"
        # Over the ring: all blocks must have read their inputs. Beside it: all must have started, which they said then.
        if self.aliased:
            self.op(*_CLUSTER_BARRIER)
        elif not self.synced:
            self.op(_CLUSTER_BARRIER[1])
        self.op("shl.b32 %r6, %r1, 2", "add.s32 %r6, %r6, %r15")
        if not self.aliased:
            self.op(f"add.s32 %r6, %r6, {s.ring_bytes}")
        if s.mates > 1:  # rank of the first split of this tile
            self.op(
                "mov.u32 %r9, %ctaid.x",
                f"rem.u32 %r9, %r9, {s.cluster}",
                f"div.u32 %r9, %r9, {s.splits}",
                f"mul.lo.u32 %r9, %r9, {s.splits}",
            )
        for owner in range(s.splits):
            mine = piece.oc[owner * share : (owner + 1) * share]
            if owner == piece.split or not mine:
                continue
            rank = str(owner)
            if s.mates > 1:
                self.op(f"add.s32 %r8, %r9, {owner}")
                rank = "%r8"
            self.op(f"mapa.shared::cluster.u32 %r7, %r6, {rank}")
            for i, oc in enumerate(mine):
                for j in range(s.rows):
                    self.op(
                        f"st.shared::cluster.{kind} [%r7+{self._slot(piece.split, share, i, j)}], %a{oc * s.rows + j}"
                    )
        own = piece.oc[piece.split * share : (piece.split + 1) * share]
        places = [(i, oc, j) for i, oc in enumerate(own) for j in range(s.rows)]
        for i, oc, j in places if self.held else ():
            held = f"%f{i * s.rows + j}"
            self.op(f"mov.b32 {held}, 0" if s.mode == "h2" else f"mov.f32 {held}, {_ZERO}")
            self._load_residual(oc, j, held)
        self.op(*_CLUSTER_BARRIER)
        for number, (i, oc, j) in enumerate(places):
            self._load_batch([place[1:] for place in places], number)
            self._sum_shares(piece, share, i, oc, j, number % _BATCH)

    def _slot(self, split: int, share: int, i: int, j: int) -> int:
        return ((split * share + i) * self.s.rows + j) * self.s.threads * 4

    def _sum_shares(self, piece: Piece, share: int, i: int, oc: int, j: int, k: int) -> None:
        s = self.s
        for split in range(s.splits):
            own = split == piece.split
            address = f"[%r6+{self._slot(split, share, i, j)}]"
            if s.mode != "h2":
                source = f"%a{oc * s.rows + j}" if own else "%o1"
                if not own:
                    self.op(f"ld.shared.f32 %o1, {address}")
                self.op(f"mov.f32 %o2, {source}" if split == 0 else f"add.f32 %o2, %o2, {source}")
                continue
            if not own:
                self.op(f"ld.shared.b32 %w, {address}")
            self.op(
                f"mov.b32 {{%h0, %h1}}, {f'%a{oc * s.rows + j}' if own else '%w'}",
                "cvt.f32.f16 %o0, %h0",
                "cvt.f32.f16 %o1, %h1",
            )
            self.op(
                *(
                    [
                        f"mov.f32 %o{k + 2}, %o{k}" if split == 0 else f"add.f32 %o{k + 2}, %o{k + 2}, %o{k}"
                        for k in (0, 1)
                    ]
                )
            )
        held = f"%f{i * s.rows + j}" if self.held else ""
        if s.mode != "h2":
            offset = (oc * self.g.oh + j) * self.g.ow * s.global_bytes
            self._finish_one("%o2", offset, f"%s{j}", held or self._batch_held(k)[0])
            return
        if not held:
            self._finish_pair(oc, j, self._batch_held(k))
            return
        self.op(f"shfl.sync.bfly.b32 %r7, {held}, 1, 31, -1", f"prmt.b32 %r7, {held}, %r7, %x")
        self.op("mov.b32 {%h2, %h3}, %r7", "cvt.f32.f16 %o4, %h2", "cvt.f32.f16 %o5, %h3")
        self._finish_pair(oc, j, ("%o4", "%o5"))


def _input(s: Schedule) -> str:
    return "" if s.origin is None else " input=gathered" if s.gather else " input=strided"


def _plain(e: Epilogue) -> bool:
    return e.activation == "none" and e.residual == "none"


def _result(e: Epilogue, source: str) -> str:
    return source if _plain(e) else "%o0"


def _after(e: Epilogue, source: str, residual: str) -> list[str]:
    """Instructions that leave act(source + residual) or act(source) + residual in %o0; none when nothing follows.

    `residual` is a register.
    """
    if _plain(e):
        return []
    lines: list[str] = []
    if e.residual == "before_activation":
        lines.append(f"add.f32 %o0, {source}, {residual}")
        source = "%o0"
    if e.activation == "relu":
        lines.append(f"max.f32 %o0, {source}, {_ZERO}")
    elif e.activation == "clip":
        lines += [f"max.f32 %o0, {source}, {float_literal(e.low)}", f"min.f32 %o0, %o0, {float_literal(e.high)}"]
    elif e.activation == "leaky_relu":
        # max(x, slope x) is leaky ReLU for slope <= 1, min for slope > 1.
        lines += [
            f"mul.f32 %o1, {source}, {float_literal(e.slope)}",
            f"{'max' if e.slope <= 1 else 'min'}.f32 %o0, {source}, %o1",
        ]
    elif source != "%o0":
        lines.append(f"mov.f32 %o0, {source}")
    if e.residual == "after_activation":
        lines.append(f"add.f32 %o0, %o0, {residual}")
    return lines


SUM_THREADS = 256
GATHER_THREADS = 256
_GATHER_ITEMS = 4
"""Items of a thread of the gathering launch, all loaded ahead of the first store: a latency of HBM needs some 20 KB in
flight on every SM."""


def gather_pixels(s: Schedule) -> int:
    """Output elements of a block of the gathering launch."""
    return GATHER_THREADS * _GATHER_ITEMS * _item(s)


def _item(s: Schedule) -> int:
    """Neighbouring elements that a thread gathers at once."""
    return 2 if s.origin is not None and s.origin.ow % 2 == 0 else 1


def _gather_entry(entry: Entry) -> list[str]:
    """Copies every sh-th row and sw-th column of the input to the workspace: [N, ic, oh, ow], dense."""
    s = entry.schedule
    if s.origin is None:
        raise ValueError(f"{entry.name}: only a strided 1x1 convolution gathers its input")
    g, size, item = s.origin, s.global_bytes, _item(s)
    (sh, sw), per_block = g.stride, gather_pixels(s)
    wide = item == 2 and sw == 2 and g.w % 4 == 0
    half = size == 2
    ops = [
        *(["griddepcontrol.launch_dependents"] if s.dependent else []),
        "ld.param.u64 %q0, [x]", "ld.param.u64 %q1, [y]", "ld.param.u32 %r3, [n]",
        "cvta.to.global.u64 %q0, %q0", "cvta.to.global.u64 %q1, %q1",
        "mov.u32 %r0, %tid.x", "mov.u32 %r1, %ctaid.x", f"mul.lo.u32 %r0, %r0, {item}", f"mad.lo.u32 %r0, %r1, {per_block}, %r0",
        f"mul.lo.u32 %r2, %r3, {g.ic * g.oh * g.ow}", f"mul.wide.u32 %q2, %r0, {size}", "add.s64 %q1, %q1, %q2",
    ]  # fmt: skip
    stores: list[str] = []
    for k in range(_GATHER_ITEMS):
        step = k * GATHER_THREADS * item
        ops += [
            f"add.s32 %r4, %r0, {step}", f"setp.lt.u32 %p{k}, %r4, %r2",
            f"div.u32 %r5, %r4, {g.ow}", f"rem.u32 %r4, %r4, {g.ow}", f"mul.lo.u32 %r4, %r4, {sw}",
        ]  # fmt: skip
        if g.oh * sh == g.h:
            ops.append(f"mul.wide.u32 %q2, %r5, {sh * g.w * size}")
        else:
            ops += [
                f"div.u32 %r6, %r5, {g.oh}", f"rem.u32 %r5, %r5, {g.oh}", f"mad.lo.u32 %r4, %r5, {sh * g.w}, %r4",
                f"mul.wide.u32 %q2, %r6, {g.h * g.w * size}",
            ]  # fmt: skip
        ops += [f"mul.wide.u32 %q3, %r4, {size}", "add.s64 %q2, %q2, %q3", "add.s64 %q2, %q2, %q0"]
        d, to = 4 * k, f"@%p{k} st.global"
        at = f"[%q1+{step * size}]"
        if wide and half:
            ops.append(f"@%p{k} ld.global.v2.b32 {{%d{d}, %d{d + 1}}}, [%q2+0]")
            stores += [f"@%p{k} prmt.b32 %d{d}, %d{d}, %d{d + 1}, 0x5410", f"{to}.b32 {at}, %d{d}"]
        elif wide:
            ops.append(f"@%p{k} ld.global.v4.b32 {{%d{d}, %d{d + 1}, %d{d + 2}, %d{d + 3}}}, [%q2+0]")
            stores.append(f"{to}.v2.b32 {at}, {{%d{d}, %d{d + 2}}}")
        else:
            name, kind = ("%h", "b16") if half else ("%d", "b32")
            for i in range(item):
                ops.append(f"@%p{k} ld.global.{kind} {name}{d + i}, [%q2+{i * sw * size}]")
                stores.append(f"{to}.{kind} [%q1+{(step + i) * size}], {name}{d + i}")
    return [
        f"// gather {entry.name}",
        f".visible .entry {entry.name}_gather(.param .u64 x, .param .u64 y, .param .u32 n)",
        f".maxntid {GATHER_THREADS}, 1, 1",
        "{",
        f".reg .b16 %h<{4 * _GATHER_ITEMS}>; .reg .b32 %d<{4 * _GATHER_ITEMS}>; .reg .b32 %r<7>; .reg .b64 %q<4>; .reg .pred %p<{_GATHER_ITEMS}>;",
        *[f"{op};" for op in (*ops, *stores)],
        "ret;",
        "}",
    ]


def _sum_entry(entry: Entry, epilogue: Epilogue) -> list[str]:
    """Adds the planes of partial sums in the order of the splits: one element a thread."""
    s = entry.schedule
    g = s.geometry
    size = s.global_bytes
    residual = epilogue.residual != "none"
    parameters = [".param .u64 x", ".param .u64 y", *([".param .u64 residual"] if residual else []), ".param .u32 n"]
    ops = [
        "ld.param.u64 %q0, [x]", "ld.param.u64 %q1, [y]", "ld.param.u32 %r3, [n]",
        "cvta.to.global.u64 %q0, %q0", "cvta.to.global.u64 %q1, %q1",
        "mov.u32 %r0, %tid.x", "mov.u32 %r1, %ctaid.x", f"mad.lo.u32 %r0, %r1, {SUM_THREADS}, %r0",
        f"mul.lo.u32 %r2, %r3, {g.oc * g.oh * g.ow}", "setp.lt.u32 %p0, %r0, %r2", "@!%p0 bra " + entry.name + "_sum_end",
        "mul.wide.u32 %q3, %r0, 4", "add.s64 %q0, %q0, %q3", "mul.wide.u32 %q4, %r2, 4",
        f"mul.wide.u32 %q3, %r0, {size}", "add.s64 %q1, %q1, %q3", "ld.global.f32 %o2, [%q0+0]",
    ]  # fmt: skip
    if residual:
        ops += ["ld.param.u64 %q2, [residual]", "cvta.to.global.u64 %q2, %q2", "add.s64 %q2, %q2, %q3"]
    for _ in range(1, s.splits):
        ops += ["add.s64 %q0, %q0, %q4", "ld.global.f32 %o1, [%q0+0]", "add.f32 %o2, %o2, %o1"]
    if residual and size == 4:
        ops.append("ld.global.f32 %o3, [%q2+0]")
    elif residual:
        ops += ["ld.global.b16 %h3, [%q2+0]", "cvt.f32.f16 %o3, %h3"]
    ops += _after(epilogue, "%o2", "%o3")
    result = _result(epilogue, "%o2")
    if size == 4:
        ops.append(f"st.global.f32 [%q1+0], {result}")
    else:
        ops += [f"cvt.rn.f16.f32 %h2, {result}", "st.global.b16 [%q1+0], %h2"]
    return [
        f"// sum {entry.name} splits={s.splits}",
        f".visible .entry {entry.name}_sum({', '.join(parameters)})",
        f".maxntid {SUM_THREADS}, 1, 1",
        "{",
        ".reg .f32 %o<4>; .reg .b16 %h<4>; .reg .b32 %r<4>; .reg .b64 %q<5>; .reg .pred %p<1>;",
        *[f"{op};" for op in ops],
        f"{entry.name}_sum_end:",
        "ret;",
        "}",
    ]

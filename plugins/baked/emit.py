"""PTX text of one pruned convolution: what the code looks like, and how to read it back.

One module per (architecture, activation dtype); one `.visible .entry` per schedule (a schedule serves a range of N) and,
where input-channel splits are summed by a second launch, one entry `NAME_sum`. Text is deterministic.

What one block does. A *piece* is (output-channel list, input-channel range). A block runs one piece on one tile of output
pixels: input rows with their halo go to shared memory in *stages* of a few channels through a ring of slots, each thread
holds the sums of its pixels for all output channels of the piece, and per nonzero there is one fma whose weight is an
immediate. `piece = ctaid.y * splits + ctaid.x % splits`, reached by a binary tree of `setp.lt.u32` / `@p bra`.

Grammar (one instruction per line, optional `@%p ` or `@!%p ` guard, `;` at the end; labels `NAME:` alone on a line; `//` comments):
  directives   .version .target .address_size .extern .shared  .visible .entry NAME( .param .u64|.u32 NAME, ... )  .maxntid
               .minnctapersm  .reg .pred|.b16|.b32|.b64|.f32 %x<N>  { }
  special      %tid.x %ctaid.x %ctaid.y (in mov.u32); the dynamic shared array `smem` (in mov.u32)
  parameters   ld.param.u64 ld.param.u32            cvta.to.global.u64
  integers     mov.u32 mov.b32 mov.f32 (register or immediate)  add.s32 sub.s32 mul.lo.u32 mad.lo.u32 div.u32 rem.u32
               mul.wide.u32 add.s64 shl.b32 and.b32 selp.b32
  predicates   setp.{lt,ge,eq}.u32  setp.lt.and.u32 %p, a, b, %q  and.pred
  control      bra bra.uni ret bar.sync 0
  global       ld.global.{b16,b32,v2.b32,v4.b32,f32}  st.global.{b16,f32}           addresses [%reg+imm]
  shared       ld.shared.{b16,b32,f32}  st.shared.{b16,b32,v2.b32,v4.b32,f32}       addresses [%reg+imm]
  async        cp.async.ca.shared.global (4, 8 bytes)  cp.async.cg.shared.global (16 bytes)  cp.async.commit_group
               cp.async.wait_group K                   (sm_80 and later; a copy is visible after wait_group and bar.sync)
  cluster      barrier.cluster.arrive.release.aligned  barrier.cluster.wait.acquire.aligned  mapa.shared::cluster.u32 %r, %addr, RANK
               st.shared::cluster.{f32,b32}            (sm_90 and later; the cluster lies along x, rank = ctaid.x % splits)
  floats       fma.rn.f32 add.f32 mul.f32 max.f32 min.f32 (immediates `0fXXXXXXXX`)
  halves       fma.rn.f16x2 (weight: %w, both halves equal)  mov.b32 {%h,%h} <-> %r  cvt.f32.f16 cvt.rn.f16.f32
               prmt.b32

Modes (in the entry's comment):
  f32  fp32 storage, fp32 sums.
  hf   fp16 storage, fp32 sums: ld.shared.b16 then cvt.f32.f16.
  h2   fp16 storage, half2 sums. A word is a pair: two images (pair=image: 2i and 2i+1) or two rows of one image
       (pair=row: output row y and y + half, half = ceil(oh / 2)). Low half first.

Markers and conventions that make the weights recoverable from the text alone:
  `// baked 1 ic=.. oc=.. kh=.. kw=.. stride=sh,sw dilation=dh,dw pads=t,l,b,r h=.. w=.. group=..`   once, after .address_size
       (the geometry as compiled: a 1x1 convolution of stride 1 without pads is flattened to h=1, w=H*W)
  `// entry NAME mode=.. pair=none|image|row rows=P splits=KS tile=TI,TR,TC stage=BYTES plane=BYTES image=BYTES pitch=BYTES element=BYTES`
       before each entry. Bytes are shared-memory strides: ring slot, channel, image of a tile, input row, pixel.
  `// piece g ks ic=LO..HI oc=a,b,c`   at each piece's label; HI exclusive; channels are absolute (of the whole input).
  `// stage ic=LO..HI slot=K`          ahead of each stage's arithmetic.
  `%a{oc * P + j}`   sum of output channel oc (absolute) for the thread's j-th output row, 0 <= j < P.
       Its only definitions are `mov %a, imm` (the bias in pieces with ks = 0, else 0) and the fma lines.
  `ld.shared.* %v?, [%b+IMM]` is the only use of %b, and IMM gives the tap: rel = IMM - slot * stage;
       c = rel // plane, r = rel % plane // pitch, x = rel % pitch // element; the input channel is LO + c of the stage,
       the input row is r = j * sh + ky * dh and the column x = kx * dw, relative to the thread's first output pixel.
  `fma.rn.f32 %a, %v, 0f........, %a`  or  `mov.b32 %w, 0x........` and `fma.rn.f16x2 %a, %v, %w, %a`: the weight of (oc, ic, ky, kx) for row j, where
       ky = (r - j * sh) / dh, kx = x / dw. In mode hf the %v is the destination of the cvt of that load.
  Zeros have no line; an explicit zero weight is never emitted.
"""

// Sparse convolution on tensor cores (mma.sync m16n8k16, fp16 data and weights, fp32 sums; sm_80 and later).
//
// Sixteen output channels, a *group*, share one list of (ic, ky, kx) columns: the union of what they need. A step of the list is
// 32 columns: the weights of the 16 channels in them (zeros where a channel has none) lie in memory as the two A fragments of
// the step, followed by where each column starts in the tile of input.
//
// The tile holds 8 *lanes* side by side: 8 patches of TH x TW output pixels, from LN images, LY rows and LX columns of patches.
// One (ic, y, x) of the tile is 16 bytes, the 8 lanes' halves: so every column is aligned under any shift, stride and dilation,
// and gathering 32 unrelated columns at one position of the patch is one ldmatrix.x4.trans: B of both mmas.
//
// Consumer warps compute (group, part of the patch). Producer warps fill a ring of RING chunks of CHUNK input channels, turning
// NCHW into lanes; the first chunk is filled by all. SPLITS blocks of a cluster take a range of input channels each; sums meet in
// shared memory and each block adds its share in rank order, so that results are equal from run to run.
//
// Right, and not fast enough to ship: what it takes and what limits it is in NOTES.md, "Union tensor-core kernel".
//
// counts: per (block of channels, rank, group) CHUNKS counts of steps, then the output channel of every row (-1: none).

typedef unsigned int u32;
typedef unsigned short u16;
#define DEVICE static __device__ __forceinline__

#define IH ((TH - 1) * SH + (KH - 1) * DH + 1)
#define IW ((TW - 1) * SW + (KW - 1) * DW + 1)
#define NPOS (TH * TW)
#define P (RW * CW)
#define CONSUMERS (GROUPS * PY * PX)
#define THREADS ((CONSUMERS + PRODUCERS) * 32)
#define ICB ((IC + SPLITS - 1) / SPLITS)
#define CHUNKS ((ICB + CHUNK - 1) / CHUNK)
#define STEP_WORDS 288
#if TIMES
#define MARK(k, who) do { if (who) { u32 now; asm volatile("mov.u32 %0, %%clock;" : "=r"(now) :: "memory"); marks[k] = now; } } while (0)
#else
#define MARK(k, who)
#endif
#define FIRST_TASKS ((CHUNK * FILL_ROWS * QW + THREADS - 1) / THREADS)
#define FIRST_UNROLL (FIRST_TASKS < 8 ? FIRST_TASKS : 8)
// Words of a row of sums: odd, or twice odd where two are moved at once, so that 32 rows start in different banks.
#define PP (OVEC == 2 ? (NPOS % 4 == 2 ? NPOS : NPOS + 2 - NPOS % 4 + (NPOS % 4 == 3 ? 4 : 0)) : (NPOS | 1))
#define PER_ROW (NPOS / OVEC)
#define SIDE (PER_ROW < 32 ? 32 / PER_ROW : 1)
#define ROWS (GROUPS * 128)
#define TILES_X ((OW + LX * TW - 1) / (LX * TW))
#define TILES_Y ((OH + LY * TH - 1) / (LY * TH))
#define VEC (PAIR ? 2 : 1)
// Where one tile has all columns (or rows), those beyond the image are zero once and for all: only the image is copied.
#define WHOLE_X (TILES_X == 1 && LX == 1 && W % VEC == 0 && PL + W <= IW)
#define WHOLE_Y (TILES_Y == 1 && LY == 1 && PT + H <= IH)
#define LEAD (WHOLE_X ? -PL : PAIR ? (PL & 1) : 0)
#define QW (WHOLE_X ? W / VEC : (IW + LEAD + VEC - 1) / VEC)
#define FIRST_ROW (WHOLE_Y ? PT : 0)
#define FILL_ROWS (WHOLE_Y ? H : IH)

DEVICE u32 load_half(const u16* p, bool ok) {
  u16 v;
  asm volatile("{ .reg .pred p; setp.ne.b32 p, %2, 0; mov.b16 %0, 0; @p ld.global.cg.u16 %0, [%1]; }" : "=h"(v) : "l"(p), "r"((int)ok));
  return v;
}
DEVICE u32 load_pair(const u16* p, bool ok) {
  u32 v;
  asm volatile("{ .reg .pred p; setp.ne.b32 p, %2, 0; mov.b32 %0, 0; @p ld.global.cg.u32 %0, [%1]; }" : "=r"(v) : "l"(p), "r"((int)ok));
  return v;
}
DEVICE void store_row(u32 at, u32 a, u32 b, u32 c, u32 d) {
  asm volatile("st.shared.v4.u32 [%0], {%1, %2, %3, %4};" :: "r"(at), "r"(a), "r"(b), "r"(c), "r"(d) : "memory");
}
DEVICE uint4 load_weights(const u32* p) {
  uint4 v;
  asm volatile("ld.global.v4.u32 {%0, %1, %2, %3}, [%4];" : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "l"(p));
  return v;
}
DEVICE u32 load_offset(const u32* p) { u32 v; asm volatile("ld.global.u32 %0, [%1];" : "=r"(v) : "l"(p)); return v; }
DEVICE uint4 gather(u32 at) {
  uint4 v;
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];" : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "r"(at));
  return v;
}
DEVICE void mma(float* c, uint4 a, u32 b0, u32 b1) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3]) : "r"(a.x), "r"(a.y), "r"(a.z), "r"(a.w), "r"(b0), "r"(b1));
}
DEVICE void bar_sync(int id) { asm volatile("bar.sync %0, %1;" :: "r"(id), "n"(THREADS) : "memory"); }
DEVICE void bar_arrive(int id) { asm volatile("fence.acq_rel.cta; bar.arrive %0, %1;" :: "r"(id), "n"(THREADS) : "memory"); }
DEVICE u32 float_to_half(float f) { u16 h; asm("cvt.rn.f16.f32 %0, %1;" : "=h"(h) : "f"(f)); return h; }
DEVICE float half_to_float(u16 h) { float f; asm("cvt.f32.f16 %0, %1;" : "=f"(f) : "h"(h)); return f; }
// The sums at `at` of all ranks, added in rank order.
DEVICE void staged(float* v, u32 at) {
  float part[SPLITS][2];
#pragma unroll
  for (int s = 0; s < SPLITS; s++) {
#if SPLITS > 1
    u32 there;
    asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(there) : "r"(at), "r"(s));
#if OVEC == 2
    asm volatile("ld.shared::cluster.v2.f32 {%0, %1}, [%2];" : "=f"(part[s][0]), "=f"(part[s][1]) : "r"(there));
#else
    asm volatile("ld.shared::cluster.f32 %0, [%1];" : "=f"(part[s][0]) : "r"(there));
#endif
#else
#if OVEC == 2
    asm volatile("ld.shared.v2.f32 {%0, %1}, [%2];" : "=f"(part[s][0]), "=f"(part[s][1]) : "r"(at));
#else
    asm volatile("ld.shared.f32 %0, [%1];" : "=f"(part[s][0]) : "r"(at));
#endif
#endif
  }
#pragma unroll
  for (int k = 0; k < OVEC; k++) {
    v[k] = part[0][k];
#pragma unroll
    for (int s = 1; s < SPLITS; s++) v[k] += part[s][k];
  }
}

// Rows of 16 bytes for channels c0 .. c1 of the rank's range, by thread t of `threads`; U rows (or pairs of rows) in flight.
template <int U>
DEVICE void fill(u32 slot, const u16* x, int images, int iy0, int ix0, int c0, int c1, int t, int threads) {
  const int tasks = (c1 - c0) * (FILL_ROWS * QW);
  for (int base = t; base < tasks; base += threads * U) {
    u32 v[U][8];
#pragma unroll
    for (int u = 0; u < U; u++) {
      const int task = base + u * threads, c = task / (FILL_ROWS * QW), r = task / QW % FILL_ROWS + FIRST_ROW, q = task % QW;
      const int iy = iy0 + r, ix = ix0 - LEAD + q * VEC;
      const u16* p = x + ((c0 + c) * H + iy) * W + ix;
#pragma unroll
      for (int j = 0; j < 8; j++) {
        const int ln = j / (LY * LX), ly = j / LX % LY, lx = j % LX;
        const bool ok = task < tasks && ln < images && (u32)(iy + ly * TH * SH) < (u32)H && (u32)(ix + lx * TW * SW) < (u32)W;
        const u16* from = p + (ln * IC * H * W + ly * TH * SH * W + lx * TW * SW);
        v[u][j] = PAIR ? load_pair(from, ok) : load_half(from, ok);
      }
    }
#pragma unroll
    for (int u = 0; u < U; u++) {
      const int task = base + u * threads, c = task / (FILL_ROWS * QW), r = task / QW % FILL_ROWS + FIRST_ROW, q = task % QW;
      if (task >= tasks) break;
      const u32 row = slot + (c * RPC + r * IWP) * 16;
#if PAIR
      // Every other four threads store their second row first: then eight neighbours touch all banks once.
      const int swap = q >> 2 & 1;
#pragma unroll
      for (int k = 0; k < 2; k++) {
        const int second = k ^ swap, col = 2 * q - LEAD + second;
        const u32 pick = second ? 0x7632 : 0x5410;
        if ((u32)col < (u32)IW)
          store_row(row + col * 16, __byte_perm(v[u][0], v[u][1], pick), __byte_perm(v[u][2], v[u][3], pick),
                    __byte_perm(v[u][4], v[u][5], pick), __byte_perm(v[u][6], v[u][7], pick));
      }
#else
      store_row(row + (q - LEAD) * 16, v[u][0] | v[u][1] << 16, v[u][2] | v[u][3] << 16, v[u][4] | v[u][5] << 16, v[u][6] | v[u][7] << 16);
#endif
    }
  }
}

#define EACH ((CHUNK * FILL_ROWS * QW + PRODUCERS * 32 - 1) / (PRODUCERS * 32))
#define PLANE (IC * H * W * 2)
#define QUICK (PRODUCERS > 0 && LN == 8 && ICB % CHUNK == 0 && IC % SPLITS == 0)
#if PRODUCERS
// What a producer does in every chunk: where its rows come from and go to is the same in each.
struct Chores {
  int from[EACH];
  u32 to[EACH];  // bits 0..3: second row first; first row wanted; second row wanted; inside the image
};
DEVICE void plan_chores(Chores& w, int iy0, int ix0, int t) {
#pragma unroll
  for (int u = 0; u < EACH; u++) {
    const int task = t + u * (PRODUCERS * 32), c = task / (FILL_ROWS * QW), r = task / QW % FILL_ROWS + FIRST_ROW, q = task % QW;
    const int iy = iy0 + r, ix = ix0 - LEAD + q * VEC, col = q * VEC - LEAD;
    const bool some = task < CHUNK * FILL_ROWS * QW;
    w.from[u] = (c * H + iy) * W + ix;
    w.to[u] = (c * RPC + r * IWP + col) * 16 + ((q >> 2 & 1) | (some && (u32)col < (u32)IW) << 1 | (some && (u32)(col + 1) < (u32)IW) << 2 |
              (some && (u32)iy < (u32)H && (u32)ix < (u32)W) << 3);
  }
}
DEVICE void load_lanes(u32* v, const u16* p, u32 ok) {
#if PAIR
  asm volatile("{ .reg .pred p; setp.ne.b32 p, %9, 0; mov.b32 %0, 0; mov.b32 %1, 0; mov.b32 %2, 0; mov.b32 %3, 0; mov.b32 %4, 0; mov.b32 %5, 0; mov.b32 %6, 0; mov.b32 %7, 0;"
               "@p ld.global.cg.u32 %0, [%8]; @p ld.global.cg.u32 %1, [%8+%10]; @p ld.global.cg.u32 %2, [%8+%11]; @p ld.global.cg.u32 %3, [%8+%12];"
               "@p ld.global.cg.u32 %4, [%8+%13]; @p ld.global.cg.u32 %5, [%8+%14]; @p ld.global.cg.u32 %6, [%8+%15]; @p ld.global.cg.u32 %7, [%8+%16]; }"
               : "=r"(v[0]), "=r"(v[1]), "=r"(v[2]), "=r"(v[3]), "=r"(v[4]), "=r"(v[5]), "=r"(v[6]), "=r"(v[7])
               : "l"(p), "r"(ok), "n"(PLANE), "n"(2 * PLANE), "n"(3 * PLANE), "n"(4 * PLANE), "n"(5 * PLANE), "n"(6 * PLANE), "n"(7 * PLANE));
#else
  u16 h[8];
  asm volatile("{ .reg .pred p; setp.ne.b32 p, %9, 0; mov.b16 %0, 0; mov.b16 %1, 0; mov.b16 %2, 0; mov.b16 %3, 0; mov.b16 %4, 0; mov.b16 %5, 0; mov.b16 %6, 0; mov.b16 %7, 0;"
               "@p ld.global.cg.u16 %0, [%8]; @p ld.global.cg.u16 %1, [%8+%10]; @p ld.global.cg.u16 %2, [%8+%11]; @p ld.global.cg.u16 %3, [%8+%12];"
               "@p ld.global.cg.u16 %4, [%8+%13]; @p ld.global.cg.u16 %5, [%8+%14]; @p ld.global.cg.u16 %6, [%8+%15]; @p ld.global.cg.u16 %7, [%8+%16]; }"
               : "=h"(h[0]), "=h"(h[1]), "=h"(h[2]), "=h"(h[3]), "=h"(h[4]), "=h"(h[5]), "=h"(h[6]), "=h"(h[7])
               : "l"(p), "r"(ok), "n"(PLANE), "n"(2 * PLANE), "n"(3 * PLANE), "n"(4 * PLANE), "n"(5 * PLANE), "n"(6 * PLANE), "n"(7 * PLANE));
  for (int j = 0; j < 8; j++) v[j] = h[j];
#endif
}
DEVICE void do_chores(const Chores& w, u32 slot, const u16* x) {
  u32 v[EACH][8];
#pragma unroll
  for (int u = 0; u < EACH; u++) load_lanes(v[u], x + w.from[u], w.to[u] & 8);
#pragma unroll
  for (int u = 0; u < EACH; u++) {
    const u32 row = slot + (w.to[u] & ~15u);
#if PAIR
    const u32 swap = w.to[u] & 1;
#pragma unroll
    for (int k = 0; k < 2; k++) {
      const u32 second = k ^ swap, pick = second ? 0x7632 : 0x5410;
      if (w.to[u] >> second & 2)
        store_row(row + second * 16, __byte_perm(v[u][0], v[u][1], pick), __byte_perm(v[u][2], v[u][3], pick),
                  __byte_perm(v[u][4], v[u][5], pick), __byte_perm(v[u][6], v[u][7], pick));
    }
#else
    if (w.to[u] & 2)
      store_row(row, v[u][0] | v[u][1] << 16, v[u][2] | v[u][3] << 16, v[u][4] | v[u][5] << 16, v[u][6] | v[u][7] << 16);
#endif
  }
}
#endif

// Zeros where `fill` never writes.
DEVICE void clear_borders(u32 shared, int t) {
  if (!WHOLE_X && !WHOLE_Y) return;
  for (int k = t; k < RING * CHUNK * (IH * IW); k += THREADS) {
    const int r = k / IW % IH, c = k % IW;
    if ((WHOLE_X && (c < PL || c >= PL + W)) || (WHOLE_Y && (r < PT || r >= PT + H)))
      store_row(shared + (k / (IH * IW) * RPC + r * IWP + c) * 16, 0, 0, 0, 0);
  }
}

DEVICE float activate(float v) {
#if ACTIVATION == 1
  return v < 0.0f ? 0.0f : v;
#elif ACTIVATION == 2
  v = v < LOW ? LOW : v;
  return v > HIGH ? HIGH : v;
#elif ACTIVATION == 3
  return v < 0.0f ? v * SLOPE : v;
#else
  return v;
#endif
}

extern "C" __global__ void __launch_bounds__(THREADS, MIN_BLOCKS) union_conv(
    const u16* __restrict__ x, u16* __restrict__ y,
#if RESIDUAL
    const u16* __restrict__ residual,
#endif
    const u32* __restrict__ steps, const int* __restrict__ counts,
#if BIAS
    const float* __restrict__ bias,
#endif
    int n
#if TIMES
    , u32* __restrict__ times
#endif
    ) {
  extern __shared__ __align__(128) unsigned char smem[];
  __shared__ int names[GROUPS * 16];
#if TIMES
  u32* const marks = times + ((blockIdx.z * gridDim.y + blockIdx.y) * gridDim.x + blockIdx.x) * 64;
#endif
  const u32 shared = (u32)__cvta_generic_to_shared(smem);
  const int tid = threadIdx.x, warp = tid >> 5, lane = tid & 31;
  const int rank = blockIdx.x % SPLITS, ocb = blockIdx.x / SPLITS;
  const int image = blockIdx.z * LN, oy0 = blockIdx.y / TILES_X * (LY * TH), ox0 = blockIdx.y % TILES_X * (LX * TW);
  const int channels = rank == SPLITS - 1 ? IC - (SPLITS - 1) * ICB : ICB;
  const bool consumer = warp < CONSUMERS;
  const int group = warp / (PY * PX), part = warp % (PY * PX);
  const int row0 = min(part / PX * RW, TH - RW), col0 = min(part % PX * CW, TW - CW);
  const int entry = blockIdx.x * GROUPS + group;
  const u32* at = steps + (size_t)entry * (MAX_STEPS * STEP_WORDS);
  uint4 a0[DEPTH], a1[DEPTH];
  u32 off[DEPTH];
  int mine = 0;
#if OVERLAP
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
  if (consumer) {
#pragma unroll
    for (int d = 0; d < DEPTH; d++) {
      a0[d] = load_weights(at + d * STEP_WORDS + lane * 4);
      a1[d] = load_weights(at + d * STEP_WORDS + 128 + lane * 4);
      off[d] = load_offset(at + d * STEP_WORDS + 256 + lane);
    }
    mine = lane < CHUNKS ? (int)load_offset((const u32*)counts + entry * CHUNKS + lane) : 0;
  }
  for (int k = tid; k < GROUPS * 16; k += THREADS) names[k] = (int)load_offset((const u32*)counts + OC_AT + ocb * GROUPS * 16 + k);
  clear_borders(shared, tid);
  MARK(0, tid == 0);
#if OVERLAP
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
  MARK(1, tid == 0);
  const u16* xb = x + ((size_t)image * IC + rank * ICB) * (H * W);
  const int iy0 = oy0 * SH - PT, ix0 = ox0 * SW - PL;
  fill<FIRST_UNROLL>(shared, xb, n - image, iy0, ix0, 0, min(CHUNK, channels), tid, THREADS);
  __syncthreads();
  MARK(2, tid == 0);

  float acc[P][4];
  if (consumer) {
#pragma unroll
    for (int p = 0; p < P; p++) acc[p][0] = acc[p][1] = acc[p][2] = acc[p][3] = 0.0f;
    const u32 zero = (u32)n >> 31;
    const u32 from = shared + (row0 * SH * IWP + col0 * SW) * 16;
    for (int c = 0; c < CHUNKS; c++) {
      if (c > 0) bar_sync(1 + c % RING);
      MARK(3 + c, tid == 0);
      for (int left = __shfl_sync(0xffffffffu, mine, c); left > 0; left--) {
        const uint4 w0 = a0[0], w1 = a1[0];
        const u32 row = from + off[0];
#pragma unroll
        for (int d = 0; d < DEPTH - 1; d++) { a0[d] = a0[d + 1]; a1[d] = a1[d + 1]; off[d] = off[d + 1]; }
        a0[DEPTH - 1] = load_weights(at + DEPTH * STEP_WORDS + lane * 4);
        a1[DEPTH - 1] = load_weights(at + DEPTH * STEP_WORDS + 128 + lane * 4);
        off[DEPTH - 1] = load_offset(at + DEPTH * STEP_WORDS + 256 + lane);
        at += STEP_WORDS;
        __syncwarp();
        // ptxas would gather for all positions ahead of the first mma, and spill: so that it cannot, an address depends on
        // what was gathered HELD positions before (`zero` is 0, which only the caller knows).
        u32 seen[P];
#pragma unroll
        for (int p = 0; p < P; p++) {
          const u32 from_here = p < HELD ? row : row | (seen[p < HELD ? 0 : p - HELD] & zero);
          const uint4 b = gather(from_here + (p / CW * SH * IWP + p % CW * SW) * 16);
          seen[p] = b.x;
          mma(acc[p], w0, b.x, b.y);
          mma(acc[p], w1, b.z, b.w);
        }
      }
      // A column may be used up to one chunk late, so it is the chunk before whose place is free now.
      if (CHUNKS > RING && c > 0 && c - 1 + RING < CHUNKS) bar_arrive(1 + RING + (c - 1) % RING);
    }
  } else {
#if PRODUCERS
    const bool quick = QUICK && n - image >= LN && CHUNKS > 1;
    Chores chores;
    if (quick) plan_chores(chores, iy0, ix0, tid - CONSUMERS * 32);
    for (int c = 1; quick && c < CHUNKS; c++) {
      const int slot = c % RING;
      if (c >= RING) bar_sync(1 + RING + slot);
      do_chores(chores, shared + slot * (CHUNK * RPC * 16), xb + (size_t)c * (CHUNK * H * W));
      bar_arrive(1 + slot);
      MARK(24 + c, tid == CONSUMERS * 32);
    }
    for (int c = 1; !quick && c < CHUNKS; c++) {
      const int slot = c % RING;
      if (c >= RING) bar_sync(1 + RING + slot);
      fill<UNROLL>(shared + slot * (CHUNK * RPC * 16), xb, n - image, iy0, ix0, c * CHUNK, min(c * CHUNK + CHUNK, channels),
                   tid - CONSUMERS * 32, PRODUCERS * 32);
      bar_arrive(1 + slot);
      MARK(24 + c, tid == CONSUMERS * 32);
    }
#endif
  }
  MARK(56, tid == 0);
  __syncthreads();                                               // nobody reads the tile any more

  if (consumer) {
    const u32 to = shared + ((group * 128 + lane) * PP + row0 * TW + col0) * 4;
#pragma unroll
    for (int i = 0; i < 4; i++)
#if OVEC == 2 && CW % 2 == 0
#pragma unroll
      for (int p = 0; p < P; p += 2)
        asm volatile("st.shared.v2.f32 [%0], {%1, %2};" :: "r"(to + (i * 32 * PP + p / CW * TW + p % CW) * 4), "f"(acc[p][i]), "f"(acc[p + 1][i]) : "memory");
#else
#pragma unroll
      for (int p = 0; p < P; p++)
        asm volatile("st.shared.f32 [%0], %1;" :: "r"(to + (i * 32 * PP + p / CW * TW + p % CW) * 4), "f"(acc[p][i]) : "memory");
#endif
  }
#if SPLITS > 1
  asm volatile("barrier.cluster.arrive.aligned;\n barrier.cluster.wait.aligned;" ::: "memory");
#else
  __syncthreads();
#endif
  MARK(57, tid == 0);
  const int first = rank * (ROWS / SPLITS), side = lane / PER_ROW;
#pragma unroll 4
  for (int k0 = warp * SIDE + side; k0 < ROWS / SPLITS; k0 += THREADS / 32 * SIDE)
#pragma unroll
  for (int q = 0; q < PER_ROW; q += 32) {
    const int row = first + k0, p = (PER_ROW < 32 ? lane % PER_ROW : q + lane) * OVEC;
    if (PER_ROW < 32 ? side >= SIDE : p >= NPOS) continue;
    float v[OVEC];
    staged(v, shared + (row * PP + p) * 4);
    const int l = row & 31, i = row >> 5 & 3, j = (l & 3) * 2 + (i & 1);
    const int oc = names[(row >> 7) * 16 + (i >> 1) * 8 + (l >> 2)];
    const int img = image + j / (LY * LX), oy = oy0 + j / LX % LY * TH + p / TW, ox = ox0 + j % LX * TW + p % TW;
    if (oc < 0 || img >= n || oy >= OH || ox >= OW) continue;
    const size_t to = (((size_t)img * OC + oc) * OH + oy) * OW + ox;
#pragma unroll
    for (int k = 0; k < OVEC; k++) {
#if BIAS
      v[k] += __uint_as_float(load_offset((const u32*)bias + oc));
#endif
#if RESIDUAL
      const float r = half_to_float((u16)load_half(residual + to + k, true));
#endif
#if RESIDUAL == 1
      v[k] += r;
#endif
      v[k] = activate(v[k]);
#if RESIDUAL == 2
      v[k] += r;
#endif
    }
#if OVEC == 2
    *(u32*)(y + to) = float_to_half(v[0]) | float_to_half(v[1]) << 16;
#else
    y[to] = (u16)float_to_half(v[0]);
#endif
  }
  MARK(58, tid == 0);
#if SPLITS > 1
  asm volatile("barrier.cluster.arrive.aligned;\n barrier.cluster.wait.aligned;" ::: "memory");
#endif
  MARK(59, tid == 0);
}

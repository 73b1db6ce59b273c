// Direct sparse convolution with weights read as data: the code that `packed` and `csr` ship.
//
// Lanes are output pixels, a thread holds ROWS vertically adjacent ones for each of its output channels; a nonzero costs
// one broadcast load of (value, offset), ROWS loads of input from shared memory at immediate distances, ROWS fmas. That
// is one word of shared memory per fma, which is the bound (25 % of fp32 peak on Hopper).
//
// A block computes one tile of pixels (IMAGES x GROUPS * ROWS x COLS) for one block of output channels over one range of
// input channels. SETS warp sets of WARPS warps stand side by side, each with SLOTS output channels, so that weights
// differ between sets and inputs are shared by all. Input channels arrive in stages of at most STAGE channels through
// BUFFERS buffers (cp.async from sm_80): all at once where each stage has a buffer, else the next while one is summed.
// SPLITS blocks of a cluster take a range of input channels each and send their sums, by asynchronous stores, to the blocks
// that own them; these add in rank order, so that results are equal from run to run.
//
// Compile-time: see plugins/direct.py, which writes the definitions and the table. Run time: N, H, W.
// Grid: x = tile columns and images times SPLITS, y = rows of tiles, z = blocks of output channels.
// Table, per block of output channels and rank, TABLE_INTS: STAGES chunks of (first channel, channels); per set and slot the
// number of the slot, output channel (-1: none), and per stage (begin, end, delta) into the words; then, where SPLITS > 1,
// the output channel of each slot number.

#define VEC (ROWS >= 3 ? 4 : ROWS)                             // sums of a thread that travel together

typedef unsigned int u32;
typedef unsigned short u16;
typedef unsigned char u8;

#ifndef SPARSEDEPLOY_SHIM
#define DEVICE static __device__ __forceinline__
#define SHARED_MEMORY extern __shared__ __align__(16) u8 smem[]

DEVICE u32 shared_address(const void* p) { return (u32)__cvta_generic_to_shared(p); }

DEVICE float half_to_float(u16 h) { float f; asm("cvt.f32.f16 %0, %1;" : "=f"(f) : "h"(h)); return f; }
DEVICE u16 float_to_half(float f) { u16 h; asm("cvt.rn.f16.f32 %0, %1;" : "=h"(h) : "f"(f)); return h; }
#if PAIRS
DEVICE u32 fma_pair(u32 a, u32 b, u32 c) { u32 d; asm("fma.rn.f16x2 %0, %1, %2, %3;" : "=r"(d) : "r"(a), "r"(b), "r"(c)); return d; }
#endif

#if __CUDA_ARCH__ >= 800 && !HALF
#define ASYNC 1
DEVICE void copy_4(void* to, const void* from, bool valid) {
  asm volatile("cp.async.ca.shared.global [%0], [%1], 4, %2;" :: "r"(shared_address(to)), "l"(from), "r"(valid ? 4 : 0) : "memory");
}
DEVICE void copy_8(void* to, const void* from, bool valid) {
  asm volatile("cp.async.ca.shared.global [%0], [%1], 8, %2;" :: "r"(shared_address(to)), "l"(from), "r"(valid ? 8 : 0) : "memory");
}
DEVICE void copy_16(void* to, const void* from, bool valid) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" :: "r"(shared_address(to)), "l"(from), "r"(valid ? 16 : 0) : "memory");
}
DEVICE void copies_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }
template <int LEFT> DEVICE void copies_wait() { asm volatile("cp.async.wait_group %0;" :: "n"(LEFT) : "memory"); }
#endif

#if __CUDA_ARCH__ >= 900
#define OVERLAP 1
// Programmatic dependent launch: the kernel ahead in the stream may still run until `previous_kernel_wait` returns.
DEVICE void next_kernel_may_start() { asm volatile("griddepcontrol.launch_dependents;" ::: "memory"); }
DEVICE void previous_kernel_wait() { asm volatile("griddepcontrol.wait;" ::: "memory"); }
#endif

#if SPLITS > 1
// Relaxed: nothing is published by it, and the release of the other form would wait for all that is in flight.
DEVICE void cluster_arrive() { asm volatile("barrier.cluster.arrive.relaxed.aligned;" ::: "memory"); }
DEVICE void cluster_wait() { asm volatile("barrier.cluster.wait.aligned;" ::: "memory"); }
DEVICE u32 address_in(u32 mine, u32 rank) {
  u32 there;
  asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(there) : "r"(mine), "r"(rank));
  return there;
}
// Stores that count themselves in at a barrier of the block they go to: nobody has to wait until they have all arrived.
DEVICE void push(u32 there, u32 barrier, const u32* v) {
#if VEC == 4
  asm volatile("st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.v4.b32 [%0], {%1, %2, %3, %4}, [%5];"
               :: "r"(there), "r"(v[0]), "r"(v[1]), "r"(v[2]), "r"(v[3]), "r"(barrier) : "memory");
#elif VEC == 2
  asm volatile("st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.v2.b32 [%0], {%1, %2}, [%3];"
               :: "r"(there), "r"(v[0]), "r"(v[1]), "r"(barrier) : "memory");
#else
  asm volatile("st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.b32 [%0], %1, [%2];"
               :: "r"(there), "r"(v[0]), "r"(barrier) : "memory");
#endif
}
DEVICE void expect_pushes(u32 barrier, u32 bytes) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;" :: "r"(barrier) : "memory");
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" :: "r"(barrier), "r"(bytes) : "memory");
}
DEVICE void wait_pushes(u32 barrier) {
  u32 done;
  do {
    asm volatile("{ .reg .pred p; mbarrier.try_wait.parity.shared::cta.b64 p, [%1], 0; selp.u32 %0, 1, 0, p; }"
                 : "=r"(done) : "r"(barrier) : "memory");
  } while (!done);
}
#endif
// Past L1 and in program order: with overlapped launches these bytes may be written while this kernel is already resident, so
// neither the read-only path nor a load that moves ahead of `previous_kernel_wait` will do.
DEVICE u16 load_u16(const u16* p) { u16 v; asm volatile("ld.global.cg.u16 %0, [%1];" : "=h"(v) : "l"(p)); return v; }
DEVICE u32 load_u32(const void* p) { u32 v; asm volatile("ld.global.cg.u32 %0, [%1];" : "=r"(v) : "l"(p)); return v; }
DEVICE uint4 load_16(const void* p) {
  uint4 v;
  asm volatile("ld.global.cg.v4.u32 {%0, %1, %2, %3}, [%4];" : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "l"(p));
  return v;
}
DEVICE float load_f32(const float* p) { float v; asm volatile("ld.global.cg.f32 %0, [%1];" : "=f"(v) : "l"(p)); return v; }
DEVICE u32 float_bits(float f) { return __float_as_uint(f); }
DEVICE float bits_float(u32 u) { return __uint_as_float(u); }
#else
DEVICE u16 load_u16(const u16* p) { return *p; }
DEVICE u32 load_u32(const void* p) { return *(const u32*)p; }
DEVICE uint4 load_16(const void* p) { return *(const uint4*)p; }
DEVICE float load_f32(const float* p) { return *p; }
#endif  // SPARSEDEPLOY_SHIM

#ifndef OVERLAP
#define OVERLAP 0
DEVICE void next_kernel_may_start() {}
DEVICE void previous_kernel_wait() {}
#endif

#ifndef ASYNC
#define ASYNC 0
DEVICE void copy_4(void* to, const void* from, bool valid) { *(u32*)to = valid ? *(const u32*)from : 0u; }
DEVICE void copy_8(void* to, const void* from, bool valid) {
  *(uint2*)to = valid ? *(const uint2*)from : make_uint2(0, 0);
}
DEVICE void copy_16(void* to, const void* from, bool valid) {
  *(uint4*)to = valid ? *(const uint4*)from : make_uint4(0, 0, 0, 0);
}
DEVICE void copies_commit() {}
template <int LEFT> DEVICE void copies_wait() {}
#endif

#if HALF
typedef u16 element;
DEVICE float load_element(const element* p) { return half_to_float(load_u16(p)); }
DEVICE void store_element(element* p, float v) { *p = float_to_half(v); }
#else
typedef float element;
DEVICE float load_element(const element* p) { return load_f32(p); }
DEVICE void store_element(element* p, float v) { *p = v; }
#endif

#if PAIRS
typedef u32 sum_t;                                             // two halves
#define ZERO_SUM 0u
#define SUM_BITS(s) (s)
#define MULTIPLY_ADD(x, w, s) fma_pair(x, w, s)
#else
typedef float sum_t;
#define ZERO_SUM 0.f
#define SUM_BITS(s) float_bits(s)
#define MULTIPLY_ADD(x, w, s) fmaf(bits_float(x), bits_float(w), s)
#endif

#define THREADS (SETS * WARPS * 32)
#define SET_THREADS (WARPS * 32)
#define PIXELS (IMAGES * GROUPS * COLS)                        // threads of a set that have a pixel
#define IN_ROWS ((GROUPS * ROWS - 1) * SH + (KH - 1) * DH + 1)
#define IN_COLS ((COLS - 1) * SW + (KW - 1) * DW + 1)
#define PLANE (IMAGES * IMAGE)                                 // words of a channel; IMAGE and PITCH are given
#define TAP_WORDS (SETS * SLOTS * CAPACITY * 2)
#define BUFFER_WORDS (STAGE * PLANE + TAP_WORDS)
#define SLOT_INTS (2 + 3 * STAGES)
#define SLOTS_AT (2 * STAGES)
#define OCS_AT (SLOTS_AT + ALL_SLOTS * SLOT_INTS)
#define TABLE_INTS ((OCS_AT + (SPLITS > 1 ? ALL_SLOTS : 0) + 3) / 4 * 4)  // of a rank, kept in shared memory
#define RESIDENT (STAGES <= (FLAT ? 1 : BUFFERS))              // no buffer is filled twice
#define FIRST (RESIDENT ? STAGES : 1)                          // stages that are on their way before any sum
#define ROUNDS ((CAPACITY + SET_THREADS - 1) / SET_THREADS)    // words of a slot that a thread fetches
#define ALL_SLOTS (SETS * SLOTS)
#define QUADS ((ROWS + VEC - 1) / VEC)
#define UNITS (ALL_SLOTS * QUADS)                              // VEC sums of each thread of a slot
#define SHARE ((UNITS + SPLITS - 1) / SPLITS)                  // units that a rank sums

struct Place { int image, row, col, out_h, out_w; };           // first image, output row and column of the tile

// What stands at column c of a tile's row: columns of one remainder by the stride lie together, so that lanes meet no bank twice.
DEVICE int column_place(int c) { return SW == 1 ? c : c % SW * ((IN_COLS + SW - 1) / SW) + c / SW; }

// A thread keeps its place in the tile's rows and goes through the channels, PHASES of them side by side where the rows of one
// channel leave threads over: one copy then costs little more than itself.
template <int V> struct Places {
  enum {
    chunks = V > 1 ? (SHIFT + IN_COLS + V - 1) / V : IN_COLS,
    count = IMAGES * IN_ROWS * chunks,
    phases = count < THREADS ? THREADS / count : 1,
    step = count < THREADS ? count : THREADS
  };
};
struct From { const element* at; size_t step; bool valid; };   // the first channel's element; from channel to channel

DEVICE From source(const element* x, int image, int ic, int row, int col, int n, int h, int w) {
  From f;
  f.valid = image < n && row >= 0 && row < h && col >= 0 && col < w;
  f.at = f.valid ? x + (((size_t)image * IC + ic) * h + row) * w + col : x;
  f.step = f.valid ? (size_t)h * w : 0;
  return f;
}

#if HALF
#define BATCH (SLOTS * ROWS <= 32 ? 8 : 4)
template <int V> DEVICE void load_chunk(u32* out, const From& f, int c, bool wanted) {
  const element* at = f.at + c * f.step;
#pragma unroll
  for (int k = 0; k < (V + 1) / 2; ++k) out[k] = !(f.valid && wanted) ? 0u : V == 1 ? (u32)load_u16(at) : load_u32(at + 2 * k);
}
#endif

template <int V> DEVICE void fill_places(u32* tile, const element* x, Place at, int first_channel, int count, int n, int h, int w, int half, int tid) {
  typedef Places<V> P;
  const int top = at.row * SH - PT, left = at.col * SW - PL - (V > 1 ? SHIFT : 0);
  const int phase = tid / P::step;
  if (phase >= P::phases) return;
  for (int p = tid % P::step; p < P::count; p += P::step) {
    const int q = p % P::chunks, line = p / P::chunks, r = line % IN_ROWS, i = line / IN_ROWS;
    u32* to = tile + i * IMAGE + r * PITCH + (V > 1 ? q * V : SHIFT + column_place(q));
    const int col = left + q * V;
#if HALF
    const int image = (at.image + i) * (PAIR_IMAGES ? 2 : 1);
    const From low = source(x, image, first_channel, top + r, col, n, h, w);
    // A word holds two pixels: images 2i and 2i + 1, or rows y and y + half of one image, low half first.
    const From high = source(x, image + PAIR_IMAGES, first_channel, PAIR_IMAGES ? top + r : top + r + half * SH, col, PAIRS ? n : 0, h, w);
    for (int first = phase; first < count; first += BATCH * P::phases) {
      u32 a[BATCH][(V + 1) / 2], b[BATCH][(V + 1) / 2];
#pragma unroll
      for (int k = 0; k < BATCH; ++k) {                        // all loads of a batch are in flight together
        load_chunk<V>(a[k], low, first + k * P::phases, first + k * P::phases < count);
        load_chunk<V>(b[k], high, first + k * P::phases, first + k * P::phases < count);
      }
#pragma unroll
      for (int k = 0; k < BATCH; ++k) {
        const int c = first + k * P::phases;
        if (c >= count) break;
#pragma unroll
        for (int m = 0; m < (V + 1) / 2; ++m) {
          const u32 even = PAIRS ? (a[k][m] & 0xffffu) | b[k][m] << 16 : float_bits(half_to_float((u16)(a[k][m] & 0xffffu)));
          const u32 odd = PAIRS ? a[k][m] >> 16 | (b[k][m] & 0xffff0000u) : float_bits(half_to_float((u16)(a[k][m] >> 16)));
          if (V == 1) to[c * PLANE] = even; else *(uint2*)(to + c * PLANE + 2 * m) = make_uint2(even, odd);
        }
      }
    }
#else
    const From from = source(x, at.image + i, first_channel, top + r, col, n, h, w);
    const element* element_at = from.at + phase * from.step;
    u32* word = to + phase * PLANE;
#pragma unroll 4
    for (int c = phase; c < count; c += P::phases) {
      if (V == 4) copy_16(word, element_at, from.valid); else if (V == 2) copy_8(word, element_at, from.valid); else copy_4(word, element_at, from.valid);
      element_at += P::phases * from.step;
      word += P::phases * PLANE;
    }
#endif
  }
}

DEVICE void fill(u32* tile, const element* x, Place at, int first_channel, int count, int n, int h, int w, int half, int tid) {
#if VECTOR > 1
  if (w % VECTOR == 0) {                                       // a chunk is then inside or outside as a whole
    fill_places<VECTOR>(tile, x, at, first_channel, count, n, h, w, half, tid);
    return;
  }
#endif
  fill_places<1>(tile, x, at, first_channel, count, n, h, w, half, tid);
}

#if FLAT
// A tile of whole maps: the channels of a stage are one run of an image, read 8 halves at a time whatever the width, from two
// images that share words. Only pixels are written; the borders between them are cleared once, in every buffer.
#define MAP (FIXED_H * FIXED_W)
#define RUN ((STAGE * MAP + 7) / 8)                            // loads of an image's run
#define FLAT_ITEMS ((IMAGES * RUN + THREADS - 1) / THREADS)    // of a thread
#define FLAT_BATCH (FLAT_ITEMS < 4 ? FLAT_ITEMS : 4)           // of them in flight at once
struct Flat { uint4 low[FLAT_BATCH], high[FLAT_BATCH]; };

DEVICE bool runs_align(const element* x, int first_channel, int count, int h, int w) {
  return h == FIXED_H && w == FIXED_W && (size_t)x % 16 == 0 && first_channel * MAP % 8 == 0 && count * MAP % 8 == 0;
}

DEVICE void flat_load(Flat* f, int batch, const element* x, Place at, int first_channel, int count, int n, int tid) {
#pragma unroll
  for (int k = 0; k < FLAT_BATCH; ++k) {
    const int p = tid + (batch * FLAT_BATCH + k) * THREADS, i = p / RUN, q = p % RUN;
    const int image = 2 * (at.image + i);
    const bool wanted = i < IMAGES && q < count * MAP / 8;
    const element* from = x + ((size_t)image * IC + first_channel) * MAP + 8 * q;
    f->low[k] = wanted && image < n ? load_16(from) : make_uint4(0, 0, 0, 0);
    f->high[k] = wanted && image + 1 < n ? load_16(from + (size_t)IC * MAP) : make_uint4(0, 0, 0, 0);
  }
}

DEVICE void flat_put(const Flat* f, int batch, u32* tile, int count, int tid) {
#pragma unroll
  for (int k = 0; k < FLAT_BATCH; ++k) {
    const int p = tid + (batch * FLAT_BATCH + k) * THREADS, i = p / RUN, q = p % RUN;
    if (i >= IMAGES || q >= count * MAP / 8) continue;
    const int c = 8 * q / MAP, place = 8 * q % MAP;
    int row = place / FIXED_W, col = place % FIXED_W;
    u32* to = tile + i * IMAGE + c * PLANE + (row + PT) * PITCH + SHIFT + PL + col;
    const u32 low[4] = {f->low[k].x, f->low[k].y, f->low[k].z, f->low[k].w};
    const u32 high[4] = {f->high[k].x, f->high[k].y, f->high[k].z, f->high[k].w};
#pragma unroll
    for (int e = 0; e < 8; ++e) {
      const u32 a = low[e / 2], b = high[e / 2];
      *to++ = e % 2 ? a >> 16 | (b & 0xffff0000u) : (a & 0xffffu) | b << 16;
      if (++col == FIXED_W) {
        col = 0, to += PITCH - FIXED_W;
        if (++row == FIXED_H) row = 0, to += PLANE - FIXED_H * PITCH;
      }
    }
  }
}

// Batches from `batch` on, one after another.
DEVICE void flat_fill(int batch, u32* tile, const element* x, Place at, int first_channel, int count, int n, int tid) {
  for (; batch * FLAT_BATCH < FLAT_ITEMS; ++batch) {
    Flat f;
    flat_load(&f, batch, x, at, first_channel, count, n, tid);
    flat_put(&f, batch, tile, count, tid);
  }
}
#endif

struct Fetched { u32 place[SLOTS][ROUNDS]; u32 value[SLOTS][ROUNDS]; };

DEVICE void fetch(Fetched* f, const int* mine, int stage, const u32* words, const u32* values, int t) {
#pragma unroll
  for (int s = 0; s < SLOTS; ++s) {
    const int* cut = mine + s * SLOT_INTS + 2 + 3 * stage;
    const int begin = cut[0], end = cut[1];
#pragma unroll
    for (int r = 0; r < ROUNDS; ++r) {
      const int k = begin + r * SET_THREADS + t;
      f->place[s][r] = k < end ? words[k] : 0u;
#if CSR
      f->value[s][r] = k < end ? values[k] : 0u;
#endif
    }
  }
}

// A word becomes (weight, byte offset of the tap inside the stage's tile).
DEVICE void put(const Fetched* f, u32* taps, const int* mine, int stage, int t) {
#pragma unroll
  for (int s = 0; s < SLOTS; ++s) {
    const int* cut = mine + s * SLOT_INTS + 2 + 3 * stage;
    const int count = cut[1] - cut[0], delta = cut[2];
#pragma unroll
    for (int r = 0; r < ROUNDS; ++r) {
      const int k = r * SET_THREADS + t;
      if (k < count) {
        const u32 word = f->place[s][r];
#if CSR
        // Stretched index: ((channel * rows) + ky * DH) * pitch + kx * DW in the padded input.
        const int line = word / (PL + FIXED_W + PR), x = word % (PL + FIXED_W + PR);
        const int c = line / (PT + FIXED_H + PB) + delta, y = line % (PT + FIXED_H + PB);
        const u32 bits = f->value[s][r];
        const u32 half_bits = PAIRS ? float_to_half(bits_float(bits)) : 0u;
#else
        const int c = (int)(word >> 8 & 255) + delta, x = (int)(word >> 4 & 15) * DW, y = (int)(word & 15) * DH;
        const u32 half_bits = word >> 16;
        const u32 bits = PAIRS ? 0u : float_bits(half_to_float((u16)half_bits));
#endif
        u32* to = taps + (s * CAPACITY + k) * 2;
        to[0] = PAIRS ? half_bits * 0x10001u : bits;
        to[1] = 4 * (c * PLANE + y * PITCH + column_place(x));
      }
    }
  }
}

DEVICE void add_tap(sum_t* sums, const u8* base, u32 weight, u32 offset) {
  const u8* at = base + offset;
#pragma unroll
  for (int j = 0; j < ROWS; ++j) sums[j] = MULTIPLY_ADD(*(const u32*)(at + 4 * j * SH * PITCH), weight, sums[j]);
}

DEVICE float finish(float v, int oc, size_t place, const float* bias, const element* residual) {
#if SCALED
  v *= SCALE;
#endif
#if BIAS
  v += bias[oc];
#endif
#if RESIDUAL == 1
  v += load_element(residual + place);
#endif
#if ACTIVATION == 1
  v = v < 0.f ? 0.f : v;                                       // NaN stays NaN
#elif ACTIVATION == 2
  v = v < LOW ? LOW : v;
  v = v > HIGH ? HIGH : v;
#elif ACTIVATION == 3
  v = v < 0.f ? SLOPE * v : v;
#endif
#if RESIDUAL == 2
  v += load_element(residual + place);
#endif
  return v;
}

// Store what a thread's sums stand for: rows first..first + COUNT - 1 of thread t and output channel oc.
template <int COUNT> DEVICE void store(const sum_t* sums, int t, int first, int oc, Place at, int n, int half, element* y, const float* bias, const element* residual) {
  const int i = t / (GROUPS * COLS), g = t / COLS % GROUPS, c = t % COLS;
  const int row = at.row + g * ROWS + first, col = at.col + c;
  if (col >= at.out_w || oc < 0) return;
#pragma unroll
  for (int k = 0; k < (PAIRS ? 2 : 1); ++k) {
    const int image = PAIR_IMAGES ? 2 * (at.image + i) + k : at.image + i, out_row = PAIRS && !PAIR_IMAGES ? row + k * half : row;
    if (image >= n) continue;
    const int rows = k == 0 ? half - row : at.out_h - out_row;       // of one half where rows are paired, else of the map
    size_t place = (((size_t)image * OC + oc) * at.out_h + out_row) * at.out_w + col;
#pragma unroll
    for (int j = 0; j < COUNT; ++j) {
      if (j >= rows || first + j >= ROWS) break;
#if PAIRS
      const float value = half_to_float((u16)(k ? sums[j] >> 16 : sums[j] & 0xffffu));
#else
      const float value = sums[j];
#endif
      store_element(y + place, finish(value, oc, place, bias, residual));
      place += at.out_w;
    }
  }
}

#if SPLITS > 1
// Each unit goes to the block that owns it, to `at` there.
DEVICE void push_slot(const sum_t* sums, u32 slot, u32 at, u32 barrier) {
#pragma unroll
  for (int q = 0; q < QUADS; ++q) {
    const u32 unit = slot * QUADS + q, owner = unit / SHARE;
    u32 v[VEC];
#pragma unroll
    for (int j = 0; j < VEC; ++j) v[j] = SUM_BITS(sums[q * VEC + j]);
    push(address_in(at + (unit - owner * SHARE) * (PIXELS * VEC * 4), owner), address_in(barrier, owner), v);
  }
}
#endif

extern "C" __global__ void __launch_bounds__(THREADS, 1) direct(
    const element* __restrict__ x, element* __restrict__ y,
#if RESIDUAL
    const element* __restrict__ residual,
#endif
    const int* __restrict__ table, const u32* __restrict__ words,
#if CSR
    const u32* __restrict__ values,
#endif
#if BIAS
    const float* __restrict__ bias,
#endif
    int n, int h, int w) {
  SHARED_MEMORY;
#if !RESIDUAL
  const element* residual = 0;
#endif
#if !CSR
  const u32* values = 0;
#endif
#if !BIAS
  const float* bias = 0;
#endif
  const int tid = threadIdx.x, set = tid / SET_THREADS, t = tid % SET_THREADS;
  const int rank = blockIdx.x % SPLITS;
  int* chunks = (int*)smem;
  const int* mine = chunks + SLOTS_AT + set * (SLOTS * SLOT_INTS);
  const int* record = table + (blockIdx.z * SPLITS + rank) * TABLE_INTS;
  for (int k = tid; k < TABLE_INTS / 4; k += THREADS) ((uint4*)chunks)[k] = ((const uint4*)record)[k];
  u32* buffers = (u32*)smem + TABLE_INTS + (SPLITS > 1 ? 4 : 0);
#if SPLITS > 1
  const int owned = UNITS - rank * SHARE < SHARE ? UNITS - rank * SHARE : SHARE;
  const u32 barrier = shared_address(chunks + TABLE_INTS);
  if (tid == 0) expect_pushes(barrier, owned > 0 ? owned * (SPLITS * PIXELS * VEC * 4) : 0);
  cluster_arrive();                                            // waited for ahead of the first store to another block
#endif
  next_kernel_may_start();
  Place at;
  at.out_h = (h + PT + PB - DH * (KH - 1) - 1) / SH + 1;
  at.out_w = (w + PL + PR - DW * (KW - 1) - 1) / SW + 1;
  const int half = PAIRS && !PAIR_IMAGES ? (at.out_h + 1) / 2 : at.out_h;
  const u32 col_tiles = (at.out_w + COLS - 1) / COLS, across = blockIdx.x / SPLITS;
  const u32 image_tile = col_tiles == 1 ? across : across / col_tiles;
  at.col = (across - image_tile * col_tiles) * COLS;
  at.row = blockIdx.y * (GROUPS * ROWS);
  at.image = image_tile * IMAGES;
  const int pixel = t < PIXELS ? t : PIXELS - 1;
  const int base = pixel / (GROUPS * COLS) * IMAGE + pixel / COLS % GROUPS * (ROWS * SH * PITCH) + pixel % COLS + SHIFT;

  sum_t sums[SLOTS][QUADS * VEC];
#pragma unroll
  for (int s = 0; s < SLOTS; ++s)
#pragma unroll
    for (int j = 0; j < QUADS * VEC; ++j) sums[s][j] = ZERO_SUM;

  // Weights are nobody's output: they are fetched before the kernel ahead has ended, and put in place while inputs arrive.
  Fetched fetched[FIRST];
#if FLAT
  for (int k = tid; k < BUFFERS * BUFFER_WORDS / 4; k += THREADS) ((uint4*)buffers)[k] = make_uint4(0, 0, 0, 0);
#endif
  const int tap_place = STAGE * PLANE + set * (SLOTS * CAPACITY * 2);
  __syncthreads();
#pragma unroll
  for (int stage = 0; stage < FIRST; ++stage) fetch(&fetched[stage], mine, stage, words, values, t);
  previous_kernel_wait();
#pragma unroll
  for (int stage = 0; stage < FIRST; ++stage) {
#if FLAT
    if (runs_align(x, chunks[2 * stage], chunks[2 * stage + 1], h, w)) {
      flat_fill(0, buffers + stage * BUFFER_WORDS, x, at, chunks[2 * stage], chunks[2 * stage + 1], n, tid);
      continue;
    }
#endif
    fill(buffers + stage * BUFFER_WORDS, x, at, chunks[2 * stage], chunks[2 * stage + 1], n, h, w, half, tid);
    copies_commit();
  }
#pragma unroll
  for (int stage = 0; stage < FIRST; ++stage) put(&fetched[stage], buffers + stage * BUFFER_WORDS + tap_place, mine, stage, t);
#if SPLITS > 1
  // Received are [source rank][unit of the share][thread][VEC].
  u32* received = buffers + BUFFERS * BUFFER_WORDS;
  const u32 at_mine = shared_address(received) + (rank * (SHARE * PIXELS) + t) * (VEC * 4);
#endif
#if RESIDENT
#pragma unroll
#else
#pragma unroll 1
#endif
  for (int stage = 0; stage < STAGES; ++stage) {
    u32* buffer = buffers + (RESIDENT ? stage : stage & 1) * BUFFER_WORDS;
    u32* next = buffers + ((stage + 1) & 1) * BUFFER_WORDS;
#if RESIDENT
    switch (STAGES - 1 - stage) {                              // stages that may still be on their way
      case 1: copies_wait<1>(); break;
      case 2: copies_wait<2>(); break;
      case 3: copies_wait<3>(); break;
      default: copies_wait<0>();
    }
#else
    copies_wait<0>();
#endif
    __syncthreads();
    const bool more = !RESIDENT && stage + 1 < STAGES;
#if FLAT
    bool flat = false;
    Flat ahead;
#endif
    if (more) {
      fetch(&fetched[0], mine, stage + 1, words, values, t);
#if FLAT
      // Its first batch is on its way while this stage is summed.
      flat = runs_align(x, chunks[2 * stage + 2], chunks[2 * stage + 3], h, w);
      if (flat) flat_load(&ahead, 0, x, at, chunks[2 * stage + 2], chunks[2 * stage + 3], n, tid); else
#endif
      fill(next, x, at, chunks[2 * stage + 2], chunks[2 * stage + 3], n, h, w, half, tid);
      copies_commit();
    }
    const bool last = stage + 1 == STAGES;
#if SPLITS > 1
    if (last) cluster_wait();                                  // every block of the cluster runs
#endif
    const u8* from = (const u8*)(buffer + base);
#pragma unroll
    for (int s = 0; s < SLOTS; ++s) {
      const int* cut = mine + s * SLOT_INTS + 2 + 3 * stage;
      const int count = cut[1] - cut[0];
      const uint4* taps = (const uint4*)(buffer + STAGE * PLANE + (set * SLOTS + s) * (CAPACITY * 2));
      int k = 0;
#pragma unroll 2
      for (; k + 2 <= count; k += 2) {
        const uint4 two = *taps++;
        add_tap(sums[s], from, two.x, two.y);
        add_tap(sums[s], from, two.z, two.w);
      }
      if (k < count) {
        const uint2 one = *(const uint2*)taps;
        add_tap(sums[s], from, one.x, one.y);
      }
      // A finished sum leaves at once: other warps compute meanwhile.
      if (last && t < PIXELS) {
#if SPLITS > 1
        push_slot(sums[s], mine[s * SLOT_INTS], at_mine, barrier);
#else
        store<ROWS>(sums[s], t, 0, mine[s * SLOT_INTS + 1], at, n, half, y, bias, residual);
#endif
      }
    }
    if (more) put(&fetched[0], next + tap_place, mine, stage + 1, t);
#if FLAT
    if (flat) {
      flat_put(&ahead, 0, next, chunks[2 * stage + 3], tid);
      flat_fill(1, next, x, at, chunks[2 * stage + 2], chunks[2 * stage + 3], n, tid);
    }
#endif
  }

#if SPLITS > 1
  wait_pushes(barrier);
  for (int e = tid; e < owned * PIXELS; e += THREADS) {
    const int lane = e % PIXELS, unit = e / PIXELS, first = (rank * SHARE + unit) % QUADS * VEC;
    const int oc = chunks[OCS_AT + (rank * SHARE + unit) / QUADS];
    u32 part[SPLITS][VEC];
#pragma unroll
    for (int r = 0; r < SPLITS; ++r) {
      const u32* got = received + (r * SHARE * PIXELS + e) * VEC;
#if VEC == 4
      const uint4 four = *(const uint4*)got;
      part[r][0] = four.x, part[r][1] = four.y, part[r][2] = four.z, part[r][3] = four.w;
#elif VEC == 2
      const uint2 two = *(const uint2*)got;
      part[r][0] = two.x, part[r][1] = two.y;
#else
      part[r][0] = *got;
#endif
    }
    sum_t total[VEC];
#pragma unroll
    for (int j = 0; j < VEC; ++j) {
#if PAIRS
      float low = 0.f, high = 0.f;
#pragma unroll
      for (int r = 0; r < SPLITS; ++r) {
        low += half_to_float((u16)(part[r][j] & 0xffffu));
        high += half_to_float((u16)(part[r][j] >> 16));
      }
      total[j] = (u32)float_to_half(low) | (u32)float_to_half(high) << 16;
#else
      total[j] = 0.f;
#pragma unroll
      for (int r = 0; r < SPLITS; ++r) total[j] += bits_float(part[r][j]);
#endif
    }
    store<VEC>(total, lane, first, oc, at, n, half, y, bias, residual);
  }
#endif
}

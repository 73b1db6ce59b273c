// The kernel of arXiv 2611.17212 (Algorithm 1) as a baseline of record: not shipped. 32-bit words (fp16 weight, ic, kx, ky),
// input tile in shared memory, a warp is 8 output channels x 4 columns, fp32 sums, stride 1. Where the paper is silent:
// a thread holds 4 columns 4 apart, a block 8 rows x 16 columns x OCS output channels, input channels in chunks of CHUNK.
// Definitions: IC OC KH KW PT PL PB PR CHUNK OCS BLOCK_IC BLOCKS.
typedef unsigned int u32;
#define ROWS 8
#define COLS 16
#define IN_ROWS (ROWS + KH - 1)
#define IN_COLS (COLS + KW - 1)
extern "C" __global__ void __launch_bounds__(256) paper(const float* __restrict__ x, float* __restrict__ y,
    const u32* __restrict__ words, const int* __restrict__ offsets, int n, int h, int w) {
  __shared__ float tile[CHUNK * IN_ROWS * IN_COLS];
  const int oh = h + PT + PB - KH + 1, ow = w + PL + PR - KW + 1;
  const int tiles_x = (ow + COLS - 1) / COLS;
  const int x0 = blockIdx.x % tiles_x * COLS, y0 = blockIdx.x / tiles_x * ROWS, image = blockIdx.z;
  const int lane = threadIdx.x % 32, row = threadIdx.x / 32, channel = lane / 4, column = lane % 4;
  float sums[OCS / 8][4];
  for (int o = 0; o < OCS / 8; ++o) for (int k = 0; k < 4; ++k) sums[o][k] = 0.f;
  int at[OCS / 8];
  for (int first = 0; first < IC; first += CHUNK) {
    __syncthreads();
    for (int e = threadIdx.x; e < CHUNK * IN_ROWS * IN_COLS; e += 256) {
      const int c = e / (IN_ROWS * IN_COLS), r = e / IN_COLS % IN_ROWS, q = e % IN_COLS;
      const int iy = y0 + r - PT, ix = x0 + q - PL;
      const bool in = first + c < IC && iy >= 0 && iy < h && ix >= 0 && ix < w;
      tile[e] = in ? x[((size_t)(image * IC + first + c) * h + iy) * w + ix] : 0.f;
    }
    __syncthreads();
    const int block = first / BLOCK_IC, base = first - block * BLOCK_IC;
#pragma unroll
    for (int o = 0; o < OCS / 8; ++o) {
      const int oc = blockIdx.y * OCS + o * 8 + channel;
      if (oc >= OC) continue;
      if (base == 0) at[o] = offsets[block * OC + oc];
      const int end = offsets[block * OC + oc + 1];
      int k = at[o];
      for (; k < end; ++k) {
        const u32 word = words[k];
        const int ic = (int)(word >> 8 & 255) - base;
        if (ic >= CHUNK) break;
        float weight;
        asm("{ .reg .b16 l, h; mov.b32 {l, h}, %1; cvt.f32.f16 %0, h; }" : "=f"(weight) : "r"(word));
        const float* from = tile + (ic * IN_ROWS + row + (word & 15)) * IN_COLS + column + (word >> 4 & 15);
#pragma unroll
        for (int c = 0; c < 4; ++c) sums[o][c] = fmaf(weight, from[4 * c], sums[o][c]);
      }
      at[o] = k;
    }
  }
  for (int o = 0; o < OCS / 8; ++o) {
    const int oc = blockIdx.y * OCS + o * 8 + channel;
    for (int c = 0; c < 4; ++c) {
      const int ox = x0 + column + 4 * c;
      if (oc < OC && y0 + row < oh && ox < ow) y[((size_t)(image * OC + oc) * oh + y0 + row) * ow + ox] = sums[o][c];
    }
  }
}

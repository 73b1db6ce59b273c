// Escoin (Chen 2018) as a baseline of record: not shipped. CSR with stretched indices into a padded copy of the input, made by
// its own kernel; a block is 16 x 16 pixels of one output channel, the channel's row staged in shared memory 1024 nonzeros at
// a time, input through the read-only cache. The published code's faults (the last image of an odd batch, image 0 alone for
// other strides) are not repeated; its two images a thread are two loops in a row, which one image a block equals.
// Definitions: IC OC KH KW SH SW PT PL PB PR H W.
#define ROWS (PT + H + PB)
#define PITCH (PL + W + PR)
#define OH ((ROWS - KH) / SH + 1)
#define OW ((PITCH - KW) / SW + 1)
extern "C" __global__ void pad(const float* __restrict__ x, float* __restrict__ padded, int n) {
  const size_t total = (size_t)n * IC * ROWS * PITCH;
  for (size_t e = blockIdx.x * (size_t)blockDim.x + threadIdx.x; e < total; e += (size_t)gridDim.x * blockDim.x) {
    const int q = e % PITCH - PL, r = e / PITCH % ROWS - PT;
    const size_t plane = e / (ROWS * PITCH);
    padded[e] = q >= 0 && q < W && r >= 0 && r < H ? x[(plane * H + r) * W + q] : 0.f;
  }
}
extern "C" __global__ void __launch_bounds__(256) escoin(const float* __restrict__ padded, float* __restrict__ y,
    const int* __restrict__ offsets, const int* __restrict__ indices, const float* __restrict__ values) {
  __shared__ float weight[1024];
  __shared__ int index[1024];
  const int oc = blockIdx.y, image = blockIdx.z, tiles_x = (OW + 15) / 16, tid = threadIdx.x;
  const int ox = blockIdx.x % tiles_x * 16 + tid % 16, oy = blockIdx.x / tiles_x * 16 + tid / 16;
  const bool inside = ox < OW && oy < OH;
  const float* from = padded + (size_t)image * IC * ROWS * PITCH + (inside ? oy * SH * PITCH + ox * SW : 0);
  float sum = 0.f;
  const int end = offsets[oc + 1];
  for (int start = offsets[oc]; start < end; start += 1024) {
    const int count = end - start < 1024 ? end - start : 1024;
    __syncthreads();
    for (int k = tid; k < count; k += 256) { weight[k] = values[start + k]; index[k] = indices[start + k]; }
    __syncthreads();
    for (int k = 0; k < count; ++k) sum = fmaf(weight[k], __ldg(from + index[k]), sum);
  }
  if (inside) y[((size_t)(image * OC + oc) * OH + oy) * OW + ox] = sum;
}

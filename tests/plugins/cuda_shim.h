// CUDA C++ as C++: enough for plugins/direct.cu to run on a CPU, one operating-system thread per CUDA thread.
#pragma once
#include <barrier>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <thread>
#include <vector>

#define SPARSEDEPLOY_SHIM 1
#define __global__
#define __launch_bounds__(...)
#define DEVICE static inline
#define SHARED_MEMORY unsigned char* smem = shim_memory

struct Dim { int x, y, z; };
struct uint2 { unsigned x, y; };
struct alignas(16) uint4 { unsigned x, y, z, w; };
static inline uint2 make_uint2(unsigned x, unsigned y) { return {x, y}; }
static inline uint4 make_uint4(unsigned x, unsigned y, unsigned z, unsigned w) { return {x, y, z, w}; }

static thread_local Dim threadIdx, blockIdx;
static unsigned char* shim_memory;
static std::barrier<>* shim_barrier;
static void __syncthreads() { shim_barrier->arrive_and_wait(); }

static inline unsigned float_bits(float f) { unsigned u; std::memcpy(&u, &f, 4); return u; }
static inline float bits_float(unsigned u) { float f; std::memcpy(&f, &u, 4); return f; }

static inline float half_to_float(unsigned short h) {
  const unsigned sign = (h & 0x8000u) << 16, exponent = h >> 10 & 31, fraction = h & 1023;
  if (exponent == 31) return bits_float(sign | 0x7f800000u | fraction << 13);
  if (exponent == 0) return (sign ? -1.f : 1.f) * std::ldexp((float)fraction, -24);
  return bits_float(sign | (exponent + 112) << 23 | fraction << 13);
}

static inline unsigned short float_to_half(float f) {  // to nearest, ties to even
  const unsigned short sign = float_bits(f) >> 16 & 0x8000u;
  const float a = std::fabs(f);
  if (std::isnan(f)) return sign | 0x7e00u;
  if (a >= 65520.f) return sign | 0x7c00u;
  int exponent = 0;
  std::frexp(a, &exponent);
  const int unit = exponent < -13 ? -24 : exponent - 11;  // the value of the last bit is 2^unit
  const float scaled = std::nearbyint(std::ldexp(a, -unit));
  if (a == 0.f || scaled == 0.f) return sign;
  if (unit == -24) return sign | (unsigned short)scaled;
  return sign | (unsigned short)(((unit + 24) << 10) + (unsigned)scaled);
}

static inline unsigned fma_pair(unsigned a, unsigned b, unsigned c) {
  unsigned out = 0;
  for (int k = 0; k < 32; k += 16) {
    const double sum = (double)half_to_float(a >> k & 0xffff) * half_to_float(b >> k & 0xffff) + half_to_float(c >> k & 0xffff);
    out |= (unsigned)float_to_half((float)sum) << k;
  }
  return out;
}

// Runs `body` as every thread of every block; blocks one after another, their shared memory filled with NaN before each.
template <typename Body>
static void shim_grid(const int* grid, int threads, int shared_bytes, Body body) {
  std::vector<unsigned char> memory(shared_bytes + 16);
  shim_memory = memory.data() + (16 - (uintptr_t)memory.data() % 16) % 16;
  std::barrier<> barrier(threads);
  shim_barrier = &barrier;
  std::vector<std::thread> team;
  for (int t = 0; t < threads; ++t)
    team.emplace_back([=, &barrier] {
      threadIdx = {t, 0, 0};
      for (int bz = 0; bz < grid[2]; ++bz)
        for (int by = 0; by < grid[1]; ++by)
          for (int bx = 0; bx < grid[0]; ++bx) {
            if (t == 0) std::memset(shim_memory, 0xff, shared_bytes);
            barrier.arrive_and_wait();
            blockIdx = {bx, by, bz};
            body();
            barrier.arrive_and_wait();
          }
    });
  for (auto& one : team) one.join();
}

// What becomes of an item's sums: activated hidden values of gate and up, or what down gives.

#pragma once

#include <cuda_bf16.h>

#include "prefill_items.cuh"

namespace {

// Smaller and larger of two numbers, NaN if one is.
__device__ __forceinline__ float least(float a, float b) {
  float c;
  asm("min.NaN.f32 %0, %1, %2;" : "=f"(c) : "f"(a), "f"(b));
  return c;
}

__device__ __forceinline__ float most(float a, float b) {
  float c;
  asm("max.NaN.f32 %0, %1, %2;" : "=f"(c) : "f"(a), "f"(b));
  return c;
}

__device__ __forceinline__ float activated(float gate, float up, const Params& p) {
  gate = least(gate, p.limit);
  up = most(least(up, p.limit), -p.limit);
  return __fdividef(gate, 1.0f + __expf(-p.alpha * gate)) * (up + p.beta);
}

__device__ __forceinline__ uint32_t pack_half(float low, float high) {
  return bits(__floats2half2_rn(low, high));
}

__device__ __forceinline__ uint32_t pack_bf16(float low, float high) {
  const __nv_bfloat162 both = __floats2bfloat162_rn(low, high);
  return reinterpret_cast<const uint32_t&>(both);
}

// A lane's global scales by strip and row: g and g + 8.
template <typename S>
__device__ __forceinline__ void load_scales(const Params& p, const Item& item, int warp, int lane,
                                            float (&scales)[2][2]) {
  const Product& product = p.products[item.product];
  const int last = product.all_strips - 1;
#pragma unroll
  for (int which = 0; which < 2; ++which) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      // Of a warpgroup without strips: the last one's.
      const int strip = min(item.strips[which] + warp, last);
      scales[which][half] = product.global_scales[16 * strip + 8 * half + lane / 4];
    }
  }
}

// Hidden values of an item: fp16, a slab of 64 columns for each warpgroup.
template <int N>
__device__ __forceinline__ void store_hidden(const Params& p, const float* factors,
                                             const float (&scales)[2][2],
                                             const float (&sums)[2][N / 2], uint32_t to, int warp,
                                             int lane) {
  const int t = lane % 4, i = lane % 8, matrix = lane / 8;
  const float factor = p.products[kGated].factor;
  const int chunk = 2 * (warp % 4) + matrix % 2;
  to += (8 * (matrix / 2) + i) * kRowBytes + ((chunk ^ i) << 4);
#pragma unroll
  for (int j = 0; j < N / 8; j += 2) {
    uint32_t packed[2][2] = {};
#pragma unroll
    for (int k = 0; k < 2; ++k) {
      if (8 * (j + k) >= N) continue;
      const float2 f = *reinterpret_cast<const float2*>(factors + 8 * (j + k) + 2 * t);
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const float* s = &sums[half][4 * (j + k)];
        const float gate = scales[0][half], up = scales[1][half];
        const float a = activated(s[0] * (f.x * gate), s[2] * (f.x * up), p);
        const float b = activated(s[1] * (f.y * gate), s[3] * (f.y * up), p);
        packed[k][half] = pack_half(a * factor, b * factor);
      }
    }
    stmatrix_trans(to + j * 8 * kRowBytes, packed[0][0], packed[0][1], packed[1][0], packed[1][1]);
  }
}

// What the expert gives for an item's rows: bf16, two slabs of 64 columns for each warpgroup.
template <int N>
__device__ __forceinline__ void store_parts(const Params& p, int slab_bytes,
                                            const float (&scales)[2][2],
                                            const float (&sums)[2][N / 2], uint32_t to, int warp,
                                            int lane) {
  const int i = lane % 8, matrix = lane / 8, chunk = 2 * (warp % 4) + matrix % 2;
  const float factor = p.products[kDown].factor;
  to += matrix / 2 * slab_bytes + i * kRowBytes + ((chunk ^ i) << 4);
#pragma unroll
  for (int j = 0; j < N / 8; ++j) {
    uint32_t packed[2][2];
#pragma unroll
    for (int which = 0; which < 2; ++which) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const float* s = &sums[half][4 * j + 2 * which];
        const float a = factor * scales[which][half];
        packed[which][half] = pack_bf16(s[0] * a, s[1] * a);
      }
    }
    stmatrix_trans(to + j * 8 * kRowBytes, packed[0][0], packed[0][1], packed[1][0], packed[1][1]);
  }
}

}  // namespace

// A task's heads on their way out: queries as they are, K, V and index keys quantised into pages.

#pragma once

#include "insert_heads.cuh"

namespace {

template <typename T>
__device__ __forceinline__ void store(void* out, const Source& source, int64_t row, int first_head,
                                      const float (&x)[2][8]) {
  const int lane = threadIdx.x % 32, head = first_head + lane / 8;
  if (head >= source.heads) return;
  auto* at = reinterpret_cast<Raw<T>*>(static_cast<T*>(out) +
                                       (row * source.heads + head) * source.dim + 8 * (lane % 8));
  at[0] = narrow(x[0], T{});
  if (source.dim == 128) at[8] = narrow(x[1], T{});
}

// Two values as E4M3 bytes, saturating; NaN is 0x7F.
__device__ __forceinline__ uint32_t e4m3_pair(float low, float high) {
  return __nv_cvt_float2_to_fp8x2(make_float2(low, high), __NV_SATFINITE, __NV_E4M3);
}

__device__ __forceinline__ float from_e4m3(uint32_t code) {
  return __half2float(__half(__nv_cvt_fp8_to_halfraw(code, __NV_E4M3)));
}

// x / y, correctly rounded where it is finite and not minute; `reciprocal` is 1 / y but for its
// last bit, y within 2^+-50. Beyond 2^80 it is large enough to saturate every format, or NaN.
__device__ __forceinline__ float quotient(float x, float y, float reciprocal) {
  const float first = __fmul_rn(x, reciprocal);
  const float second = __fmaf_rn(__fmaf_rn(-y, first, x), reciprocal, first);
  const float third = __fmaf_rn(__fmaf_rn(-y, second, x), reciprocal, second);
  // The residues lose the sign of a zero.
  return copysignf(fabsf(x) < 0x1p80f ? third : first, x);
}

__device__ __forceinline__ float reciprocal_of(float y) {
  float first;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(first) : "f"(y));
  return __fmaf_rn(__fmaf_rn(-y, first, 1.0f), first, first);
}

// The code of E2M1 nearest to x, ties to even, saturating. Of NaN some code.
__device__ __forceinline__ uint32_t e2m1(float x) {
  const float a = fminf(fabsf(x), 6.0f);
  const uint32_t bits = __float_as_uint(a);
  // From 1 on, codes are the exponent and one bit; below, 2^22 has a step of a half.
  const uint32_t normal = ((bits + 0x1FFFFFu + ((bits >> 22) & 1)) >> 22) - 252;
  const uint32_t subnormal = __float_as_uint(__fadd_rn(a, 4194304.0f)) - 0x4A800000u;
  return (a < 1.0f ? subnormal : normal) | (__float_as_uint(x) >> 28 & 8);
}

// Eight neighbouring channels, of which `counted` says whether anyone keeps them, as NVFP4. Codes
// go to `codes`, the group's scale to `scale`. Returns how many were clipped. All lanes take part.
__device__ __forceinline__ int store_nvfp4(const float (&x)[8], const Pages& pages, uint8_t* codes,
                                           uint8_t* scale, bool counted) {
  // Magnitudes as integers: a NaN is above all of them.
  uint32_t largest = 0;
#pragma unroll
  for (int i = 0; i < 8; ++i) largest = max(largest, __float_as_uint(x[i]) & 0x7FFFFFFFu);
  largest = max(largest, __shfl_xor_sync(kAll, largest, 1));
  const float sixth = quotient(__uint_as_float(largest), 6.0f, 1.0f / 6.0f);
  const float ratio = quotient(sixth, pages.global_scale, pages.reciprocal);
  const uint32_t group_scale = e4m3_pair(ratio, 0.0f) & 0xFFu;
  const float step = __fmul_rn(from_e4m3(group_scale), pages.global_scale);
  if (!counted) return 0;
  const float reciprocal = reciprocal_of(step);
  uint32_t word = 0;
#pragma unroll
  for (int i = 0; i < 8; ++i) word |= e2m1(quotient(x[i], step, reciprocal)) << (4 * i);
  if (!(step > 0.0f)) word = 0;
  *reinterpret_cast<uint32_t*>(codes) = word;
  if (threadIdx.x % 2 == 0) *scale = static_cast<uint8_t>(group_scale);
  int clipped = 0;
  if (ratio > kClipsAbove) {
    const float most = __fmul_rn(kLargest, pages.global_scale);
#pragma unroll
    for (int i = 0; i < 8; ++i) clipped += quotient(fabsf(x[i]), most, reciprocal_of(most)) > 6.0f;
  }
  return clipped;
}

__device__ __forceinline__ int store_fp8(const float (&x)[8], const Pages& pages, uint8_t* codes) {
  uint32_t words[2] = {};
  int clipped = 0;
#pragma unroll
  for (int i = 0; i < 8; i += 2) {
    const float low = quotient(x[i], pages.global_scale, pages.reciprocal);
    const float high = quotient(x[i + 1], pages.global_scale, pages.reciprocal);
    clipped += (fabsf(low) > kClipsAbove) + (fabsf(high) > kClipsAbove);
    words[i / 4] |= e4m3_pair(low, high) << (8 * (i % 4));
  }
  *reinterpret_cast<uint2*>(codes) = make_uint2(words[0], words[1]);
  return clipped;
}

// Four heads of a token into their pages. Every lane of the warp takes part.
__device__ __forceinline__ void insert(const Pages& pages, const Source& source, int64_t page,
                                       int slot, int first_head, const float (&x)[2][8]) {
  const int lane = threadIdx.x % 8, head = first_head + threadIdx.x % 32 / 8;
  const bool real = head < source.heads;
  const int64_t place = page * pages.page_stride + head * pages.head_stride;
  int clipped = 0;
#pragma unroll
  for (int part = 0; part < 2; ++part) {
    const int channel = 64 * part + 8 * lane;
    if (channel >= source.dim) continue;  // the same for all lanes of the warp
    const int at = slot * source.dim + channel;
    uint8_t* codes = pages.codes + place;
    if (pages.format == kNvfp4) {
      clipped += store_nvfp4(x[part], pages, codes + at / 2,
                             pages.scales + place + at / 16, real);
    } else if (real && pages.format == kFp8) {
      clipped += store_fp8(x[part], pages, codes + at);
    } else if (real && pages.format == kBf16) {
      *reinterpret_cast<uint4*>(codes + 2 * at) = narrow(x[part], __nv_bfloat16{}).words;
    } else if (real) {
      auto* to = reinterpret_cast<float4*>(codes + 4 * at);
      const Raw<float> raw = narrow(x[part], 0.0f);
      to[0] = raw.low, to[1] = raw.high;
    }
  }
  if (clipped) {
    atomicAdd(reinterpret_cast<unsigned long long*>(pages.counts),
              static_cast<unsigned long long>(clipped));
  }
}

}  // namespace

// What the decode kernels of all storage formats are made of: barriers, copies, products, softmax.

#pragma once

#include <cuda_bf16.h>
#include <cuda_runtime.h>

#include <cstdint>

#include "../../csrc/hopper.cuh"

namespace {

constexpr int kWarps = 4;
constexpr int kStages = 2;
constexpr int kHeads = 16;
constexpr int kDim = 128;
constexpr int kBlock = 128;
constexpr float kNothing = -1.5e38f;  // below any score, and finite: exp2(-inf - it) is 0
constexpr float kLazy = 14.0f;        // weights may reach 2^14 before the sums are rescaled
constexpr unsigned kAll = 0xFFFFFFFFu;
constexpr int kRoomy = 3;  // CTAs of four warps on a multiprocessor where pairs are few

// Until pushes of the cluster's CTAs have come. barrier_wait is for this CTA's own copies: an acquire
// of the whole cluster drops L1.
__device__ __forceinline__ void barrier_wait_cluster(uint32_t bar, int parity) {
  asm volatile(
      "{\n"
      ".reg .pred done;\n"
      "again:\n"
      "mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 done, [%0], %1;\n"
      "@!done bra again;\n"
      "}\n" ::"r"(bar),
      "r"(parity)
      : "memory");
}

// The same place in the shared memory of another CTA of the cluster.
__device__ __forceinline__ uint32_t at_rank(uint32_t address, int rank) {
  uint32_t there;
  asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(there) : "r"(address), "r"(rank));
  return there;
}

__device__ __forceinline__ void push(uint32_t to, float4 v, uint32_t bar) {
  asm volatile(
      "st.async.shared::cluster.mbarrier::complete_tx::bytes.v4.f32 [%0], {%1, %2, %3, %4}, [%5];" ::"r"(
          to),
      "f"(v.x), "f"(v.y), "f"(v.z), "f"(v.w), "r"(bar)
      : "memory");
}

__device__ __forceinline__ void push(uint32_t to, float2 v, uint32_t bar) {
  asm volatile(
      "st.async.shared::cluster.mbarrier::complete_tx::bytes.v2.f32 [%0], {%1, %2}, [%3];" ::"r"(to),
      "f"(v.x), "f"(v.y), "r"(bar)
      : "memory");
}

// Into L2, where other launches' writes are seen whenever they come.
__device__ __forceinline__ void prefetch(const void* p) {
  asm volatile("prefetch.global.L2 [%0];" ::"l"(p));
}

// Which of its group's four warps this is.
template <int GROUPS>
__device__ __forceinline__ int warp_in_group() {
  return GROUPS == 1 ? threadIdx.x / 32 : threadIdx.x / 32 % kWarps;
}

// Shared memory by 32-bit addresses: a generic pointer costs its base again at every use.
__device__ __forceinline__ uint4 shared_16(uint32_t at) {
  uint4 v;
  asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
               : "r"(at));
  return v;
}

__device__ __forceinline__ uint2 shared_8(uint32_t at) {
  uint2 v;
  asm volatile("ld.shared.v2.u32 {%0, %1}, [%2];" : "=r"(v.x), "=r"(v.y) : "r"(at));
  return v;
}

// Not joined with its neighbour into one load: half the registers until the second is asked for.
__device__ __forceinline__ uint2 shared_8_alone(uint32_t at) {
  uint2 v;
  asm volatile("ld.volatile.shared.v2.u32 {%0, %1}, [%2];" : "=r"(v.x), "=r"(v.y) : "r"(at));
  return v;
}

__device__ __forceinline__ uint32_t shared_2(uint32_t at) {
  uint16_t v;
  asm volatile("ld.shared.u16 %0, [%1];" : "=h"(v) : "r"(at));
  return v;
}

__device__ __forceinline__ uint32_t shared_1(uint32_t at) {
  uint32_t v;
  asm volatile("ld.shared.u8 %0, [%1];" : "=r"(v) : "r"(at));
  return v;
}

__device__ __forceinline__ void clear_shared_8(uint32_t at) {
  asm volatile("st.shared.v2.u32 [%0], {%1, %1};" ::"r"(at), "r"(0) : "memory");
}

__device__ __forceinline__ uint32_t multiply(uint32_t a, uint32_t b) {
  uint32_t c;
  asm("mul.rn.f16x2 %0, %1, %2;" : "=r"(c) : "r"(a), "r"(b));
  return c;
}

// Two E4M3 bytes as two fp16, exactly.
__device__ __forceinline__ uint32_t from_e4m3(uint32_t pair) {
  uint32_t c;
  asm("cvt.rn.f16x2.e4m3x2 %0, %1;" : "=r"(c) : "h"(static_cast<uint16_t>(pair)));
  return c;
}

__device__ __forceinline__ uint32_t pack(float low, float high) {
  uint32_t c;
  asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(c) : "f"(high), "f"(low));
  return c;
}

__device__ __forceinline__ uint32_t pack_bf16(float low, float high) {
  uint32_t c;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(c) : "f"(high), "f"(low));
  return c;
}

__device__ __forceinline__ float exp2_approx(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

__device__ __forceinline__ void mma(float (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
  asm(
      "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, "
      "{%8, %9}, {%0, %1, %2, %3};"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

__device__ __forceinline__ void mma_bf16(float (&c)[4], const uint32_t (&a)[4], uint32_t b0,
                                         uint32_t b1) {
  asm(
      "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, "
      "{%8, %9}, {%0, %1, %2, %3};"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

// Eight bf16 values as fp32.
__device__ __forceinline__ void widen(uint4 raw, float (&x)[8]) {
  const uint32_t words[4] = {raw.x, raw.y, raw.z, raw.w};
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    x[2 * i] = __uint_as_float(words[i] << 16);
    x[2 * i + 1] = __uint_as_float(words[i] & 0xFFFF0000u);
  }
}

// The online softmax of one warp over its tokens: its largest score so far (not always the newest,
// see kLazy), the sum of weights and the weighted sum of V, rows g and g + 8.
struct Running {
  float m[2] = {kNothing, kNothing};
  float l[4] = {};
  float o[16][4] = {};
};

// Takes in the scores of TILES times eight tokens, times c: afterwards no weight is above 2^kLazy.
template <int TILES>
__device__ __forceinline__ void raise(const float (&s)[TILES][4], const float (&c)[2], Running& r) {
  float largest[2];
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    largest[h] = fmaxf(s[0][2 * h], s[0][2 * h + 1]);
#pragma unroll
    for (int n = 1; n < TILES; ++n) {
      largest[h] = fmaxf(largest[h], fmaxf(s[n][2 * h], s[n][2 * h + 1]));
    }
    largest[h] *= c[h];
  }
  if (__any_sync(kAll, largest[0] > r.m[0] + kLazy || largest[1] > r.m[1] + kLazy)) {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      largest[h] = fmaxf(largest[h], __shfl_xor_sync(kAll, largest[h], 1));
      largest[h] = fmaxf(largest[h], __shfl_xor_sync(kAll, largest[h], 2));
      const float m = fmaxf(r.m[h], largest[h]);
      const float shrink = exp2_approx(r.m[h] - m);
      r.m[h] = m;
      r.l[2 * h] *= shrink;
#pragma unroll
      for (int j = 0; j < 16; ++j) r.o[j][2 * h] *= shrink, r.o[j][2 * h + 1] *= shrink;
    }
  }
}

// The weight of a score of rows g + 8h.
__device__ __forceinline__ float weight(float score, const float (&c)[2], const Running& r, int h) {
  return exp2_approx(fmaf(score, c[h], -r.m[h]));
}

}  // namespace

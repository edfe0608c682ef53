// Blocks of an NVFP4 cache in the decode kernel: how they lie in shared memory and are multiplied.
//
// A block's K codes, K scales, V codes and V scales are one contiguous piece of a page row: one bulk
// copy. Each warp takes a quarter of its tokens.
//
// Exactness of K and V. An E2M1 code s|ee|m placed at bits 15 | 11 10 | 9 of an fp16 is
// value * 2^-14, subnormals included. An E4M3 scale is an fp16. Their product is a multiple of
// 2^-10 * 2^-14 = 2^-24, the smallest fp16, has at most 6 significant bits and is at most
// 2688 * 2^-14: HMUL2 rounds nothing. 2^14 comes back in the softmax factor and at the end; the
// sign, which `expand` turns around, in the queries and at the end.
//
// The order of the contracted axis is free as long as both operands agree. Lane (g, t) = (lane / 4,
// lane % 4) holds, as K, the 32 dims 32t .. 32t + 31 of one token in stored order, and, as V, the
// 16 dims 16g .. 16g + 15 (one scale group) of four tokens.

#pragma once

#include <cuda_fp16.h>

#include "decode_queries.cuh"

namespace {

// The two codes of each byte apart: with MASK 0x0F0F0F0F a word of the lower ones c = s|eem, with
// 0xF0F0F0F0 of the upper ones times 16, in both eem turned around (^ `turned`). LOP3 takes one
// constant; the other comes in a register.
template <uint32_t MASK>
__device__ __forceinline__ uint32_t pick(uint32_t codes, uint32_t turned) {
  uint32_t c;
  asm("lop3.b32 %0, %1, %2, %3, 0x6A;" : "=r"(c) : "r"(codes), "n"(MASK), "r"(turned));
  return c;
}

// Eight codes to four pairs of fp16, each times -2^-14 of its value: pair j is codes j and j + 4.
//
// A product brings both fields to where fp16 has them: 18 c = 16 c + 2 c, with c = 8 s + 7 - eem,
// has 7 - eem at bits 3 .. 1 and s at bit 7. Its 16 (8 s + s + 7 - eem) leaves the byte only for
// s = 1 and eem = 0: that makes +0 of -0, and sets no more than bit 0 of the next byte. The
// complement turns eem back and the sign around. This takes seven operations of the integer pipe,
// which bounds the loop together with the tensor cores; products are another pipe's.
__device__ __forceinline__ void expand(uint32_t codes, uint2 turned, uint32_t (&pairs)[4]) {
  const uint32_t even = pick<0x0F0F0F0Fu>(codes, turned.x);
  const uint32_t odd = pick<0xF0F0F0F0u>(codes, turned.y);
  pairs[0] = ~(4608u * even) & 0x8E008E00u;
  pairs[1] = ~(288u * odd) & 0x8E008E00u;
  pairs[2] = ~(18u * even) & 0x8E008E00u;
  pairs[3] = ~(odd + (odd >> 3)) & 0x8E008E00u;
}

struct Nvfp4 {
  static constexpr int kCtas = 4;  // on a multiprocessor: what 128 registers allow
  static constexpr int kStageTokens = kBlock;
  static constexpr int kTokens = kStageTokens / kWarps;
  static constexpr int kUnits = kTokens / 16;
  static constexpr int kTokenCodes = kDim / 2;
  static constexpr int kTokenScales = kDim / 16;
  static constexpr int kKeyScales = kBlock * kTokenCodes;
  static constexpr int kValues = kKeyScales + kBlock * kTokenScales;
  static constexpr int kValueScales = kValues + kBlock * kTokenCodes;
  static constexpr int kStageBytes = kValueScales + kBlock * kTokenScales;
  static constexpr bool kWideQueries = false, kNegated = true;
  static constexpr int kShift = 14;  // K and V are computed with as value * -2^-14

  static constexpr bool kOneCopy = true;

  // Copies a block into a stage; one lane calls it.
  static __device__ __forceinline__ void fetch(uint32_t to, const uint8_t* block, int, uint32_t bar) {
    barrier_expect(bar, kStageBytes);
    bulk_load(to, block, kStageBytes, bar);
  }

  // The dims of the contraction steps 2 word, 2 word + 1 that lane t holds are eight in a row.
  static __device__ __forceinline__ int first_dim(int word, int t) { return 32 * t + 8 * word; }

  // The j-th pair of these eight: step j / 2, register j % 2.
  static __device__ __forceinline__ int low(int j) { return j; }
  static __device__ __forceinline__ int high(int j) { return j + 4; }

  // Sums n of eight parts of a lane: float4 `chunk` of the head's dims is o[tile ..][column].
  // Dims 32t .. 32t + 15 are the even columns' 16 tiles, 32t + 16 .. the odd columns'.
  static __device__ __forceinline__ int chunk(int t, int n) { return 8 * t + n; }
  static __device__ __forceinline__ int tile(int n) { return 4 * (n % 4); }
  static __device__ __forceinline__ int column(int n) { return n / 4; }

  // Where a lane's part of its warp's first eight tokens begins, of K and of V. Neighbouring tokens
  // are swapped where g / 2 is odd, for V as for K, so that a load of V spreads over the banks.
  struct Lane {
    uint32_t key, value;
    uint2 turned;
  };

  template <int GROUPS>
  static __device__ __forceinline__ Lane lane(const Params& p) {
    const int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
    const int first = warp_in_group<GROUPS>() * kTokens;
    Lane at = {(first + (g ^ ((g >> 1) & 1))) * kTokenCodes + 16u * t,
               (first + 2 * t + (t & 1)) * kTokenCodes + 8u * g, p.turned};
    // Opaque, or the compiler computes them again: 20 instructions of every block.
    asm volatile("" : "+r"(at.key), "+r"(at.value), "+r"(at.turned.x), "+r"(at.turned.y));
    return at;
  }

  // A warp's tokens of a stage of which `limit` are seen, which are all but in the LAST. `queries`:
  // the lane's fragments. FEW registers are left where four warps share a scheduler.
  template <int GROUPS, bool LAST, bool FEW>
  static __device__ __forceinline__ void attend(uint32_t stage, int limit, uint32_t queries,
                                                const Lane& at, const float (&c)[2], Running& r) {
    const int first = warp_in_group<GROUPS>() * kTokens;
    if (LAST && limit < kBlock) {
      // Whatever lies in V after the row's position: codes are finite, so zero scales undo it. No
      // copy into this stage follows.
      const int token = first + static_cast<int>(threadIdx.x % 32);
      if (token >= limit) clear_shared_8(stage + kValueScales + token * kTokenScales);
      __syncwarp();
    }
    if (LAST && first >= limit) return;
    // Code bytes are 8 times scale bytes, for a token as for a lane's part of it.
    const uint32_t key_codes = stage + at.key, key_scales = stage + kKeyScales + at.key / 8;
    const uint32_t value_codes = stage + kValues + at.value;
    const uint32_t value_scales = stage + kValueScales + at.value / 8;
    float s[2 * kUnits][4] = {};
    uint4 k[2 * kUnits];
    __half2 key_scale[2 * kUnits];
#pragma unroll
    for (int n = 0; n < 2 * kUnits; ++n) {
      if constexpr (FEW) {
        const uint2 half = shared_8_alone(key_codes + 8 * n * kTokenCodes);
        k[n].x = half.x, k[n].y = half.y;
      } else {
        k[n] = shared_16(key_codes + 8 * n * kTokenCodes);
      }
      const uint32_t pair = from_e4m3(shared_2(key_scales + 8 * n * kTokenScales));
      key_scale[n] = reinterpret_cast<const __half2&>(pair);
    }
#pragma unroll
    for (int w = 0; w < 4; ++w) {
      if (FEW && w == 2) {
#pragma unroll
        for (int n = 0; n < 2 * kUnits; ++n) {
          const uint2 half = shared_8_alone(key_codes + 8 * n * kTokenCodes + 8);
          k[n].z = half.x, k[n].w = half.y;
        }
      }
      const uint4 low = shared_16(queries + 1024 * w), high = shared_16(queries + 1024 * w + 512);
      const uint32_t a[2][4] = {{low.x, low.y, low.z, low.w}, {high.x, high.y, high.z, high.w}};
#pragma unroll
      for (int n = 0; n < 2 * kUnits; ++n) {
        uint32_t f[4];
        expand(w == 0 ? k[n].x : w == 1 ? k[n].y : w == 2 ? k[n].z : k[n].w, at.turned, f);
#pragma unroll
        for (int j = 0; j < 4; ++j) {
          const __half2 product =
              __hmul2(reinterpret_cast<const __half2&>(f[j]),
                      w < 2 ? __low2half2(key_scale[n]) : __high2half2(key_scale[n]));
          f[j] = reinterpret_cast<const uint32_t&>(product);
        }
        mma(s[n], a[0], f[0], f[1]);
        mma(s[n], a[1], f[2], f[3]);
      }
    }
    if (LAST && limit < kBlock) {
      const int t = threadIdx.x % 4;
#pragma unroll
      for (int n = 0; n < 2 * kUnits; ++n) {
        const int token = first + 8 * n + 2 * t + (t & 1);
        if (token >= limit) s[n][0] = s[n][2] = -INFINITY;
        if ((token ^ 1) >= limit) s[n][1] = s[n][3] = -INFINITY;
      }
    }
    raise(s, c, r);
#pragma unroll
    for (int u = 0; u < kUnits; ++u) {
      uint32_t p[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int n = 2 * u + i / 2, h = i % 2;
        p[i] = pack(weight(s[n][2 * h], c, r, h), weight(s[n][2 * h + 1], c, r, h));
      }
      // The weights that `l` sums are the rounded ones.
      const uint32_t ones = 0x3C003C00u;
      mma(r.l, p, ones, ones);
      uint2 v[2][2];
      uint32_t scale[2];
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const uint32_t codes = (16 * u + 8 * i) * kTokenCodes, group = codes / 8;
        v[i][0] = shared_8(value_codes + codes);
        v[i][1] = shared_8((value_codes ^ kTokenCodes) + codes);
        scale[i] = from_e4m3(shared_1(value_scales + group) |
                             shared_1((value_scales ^ kTokenScales) + group) << 8);
      }
#pragma unroll
      for (int w = 0; w < 4; ++w) {
        // Four codes of one token and the same four of the next: a pair is one dim of both.
        uint32_t f[2][4];
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          const uint32_t a = w < 2 ? v[i][0].x : v[i][0].y, b = w < 2 ? v[i][1].x : v[i][1].y;
          expand(__byte_perm(a, b, w % 2 ? 0x7632 : 0x5410), at.turned, f[i]);
#pragma unroll
          for (int j = 0; j < 4; ++j) f[i][j] = multiply(f[i][j], scale[i]);
        }
#pragma unroll
        for (int j = 0; j < 4; ++j) mma(r.o[4 * w + j], p, f[0][j], f[1][j]);
      }
    }
  }
};

}  // namespace

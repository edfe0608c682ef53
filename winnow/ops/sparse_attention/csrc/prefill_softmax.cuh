// The step between the two products of prefill attention on Hopper, in registers: scores to weights,
// and sums to rows of 16-bit numbers. Shared by sparse and dense prefill.
//
// A warp of a warpgroup has one query row and its 16 heads: lane (g, t) = (lane / 4, lane % 4) has
// heads g and g + 8 (`h` = 0, 1), and of the columns 8j + 2t and 8j + 2t + 1.

#pragma once

#include "blocks.cuh"

namespace {

constexpr float kNothing = -1.5e38f;  // below any score, and finite: exp2(-inf - it) is 0
constexpr float kLazy = 8.0f;  // weights may reach 2^8 before the sums are rescaled

// Scores of tokens from `limit` on become -inf.
template <int kScores>
__device__ __forceinline__ void mask_from(float (&s)[kScores], int limit, int t) {
#pragma unroll
  for (int j = 0; j < kScores / 4; ++j) {
    if (8 * j + 2 * t >= limit) s[4 * j] = s[4 * j + 2] = -INFINITY;
    if (8 * j + 2 * t + 1 >= limit) s[4 * j + 1] = s[4 * j + 3] = -INFINITY;
  }
}

template <int kScores>
__device__ __forceinline__ float largest_of(const float (&s)[kScores], int h) {
  float m = s[2 * h];
#pragma unroll
  for (int j = 0; j < kScores / 4; ++j) m = fmaxf(m, fmaxf(s[4 * j + 2 * h], s[4 * j + 2 * h + 1]));
  m = fmaxf(m, __shfl_xor_sync(kAll, m, 1));
  return fmaxf(m, __shfl_xor_sync(kAll, m, 2));
}

// 2^(s * scale - largest) as the left operand of 16 tokens a product; the lane's share of their sums
// is added to `sum`.
template <bool kHalf, int kScores>
__device__ __forceinline__ void weigh(const float (&s)[kScores], float scale,
                                      const float (&largest)[2], float (&sum)[2],
                                      uint32_t (&weights)[kScores / 8][4]) {
#pragma unroll
  for (int j = 0; j < kScores / 4; ++j) {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const float x = exp2_approx(fmaf(s[4 * j + 2 * h], scale, -largest[h]));
      const float y = exp2_approx(fmaf(s[4 * j + 2 * h + 1], scale, -largest[h]));
      sum[h] += x + y;
      weights[j / 2][2 * (j % 2) + h] = pack<kHalf>(x, y);
    }
  }
}

// Weights of 64 more tokens; where their scores are much larger than `largest`, it is raised and what was
// summed is rescaled.
template <bool kHalf>
__device__ __forceinline__ void add_weights(const float (&s)[32], float scale, float (&largest)[2],
                                            float (&sum)[2], float (&o)[64], uint32_t (&w)[4][4]) {
  float highest[2];
#pragma unroll
  for (int h = 0; h < 2; ++h) highest[h] = largest_of(s, h) * scale;
  if (__any_sync(kAll, highest[0] > largest[0] + kLazy || highest[1] > largest[1] + kLazy)) {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const float m = fmaxf(largest[h], highest[h]);
      const float shrink = exp2_approx(largest[h] - m);
      largest[h] = m;
      sum[h] *= shrink;
#pragma unroll
      for (int j = 0; j < 16; ++j) o[4 * j + 2 * h] *= shrink, o[4 * j + 2 * h + 1] *= shrink;
    }
  }
  weigh<kHalf>(s, scale, largest, sum, w);
}

// The sum over the lanes of a head.
__device__ __forceinline__ float sum_over_lanes(float x) {
  x += __shfl_xor_sync(kAll, x, 1);
  return x + __shfl_xor_sync(kAll, x, 2);
}

// The 128 sums of heads g and g + 8 times `factor` to `row` [16 heads, 128], fp16 (`kHalf`) or bf16.
// Columns are permuted as Expansion says, so that a lane's are neighbours.
template <bool kHalf>
__device__ __forceinline__ void store_row(void* row, const float (&o)[64], int lane,
                                          const float (&factor)[2]) {
  uint4* to = static_cast<uint4*>(row) + lane / 4 * (kDim / 8) + lane % 4;
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    const int h = i / 4, first = i % 4 * 16 + 2 * h;
    uint32_t w[4];
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      w[j] = pack<kHalf>(o[first + 4 * j] * factor[h], o[first + 4 * j + 1] * factor[h]);
    }
    to[h * kDim + i % 4 * 4] = make_uint4(w[0], w[1], w[2], w[3]);
  }
}

}  // namespace

// A tile of sparse prefill attention on Hopper: what describes it, and what a warpgroup does with it.

#pragma once

#include "prefill_softmax.cuh"

namespace {

constexpr int kRows = 4;       // query rows of a tile
constexpr int kConsumers = 3;  // warpgroups with a tile each
constexpr int kStages = 2 * kConsumers;  // a stage is always of the same warpgroup
constexpr int kQueryHalf = kRows * kRowHalf;

// The tiles of one group of KV heads, as prefill_lists.cu numbers them. A bin of the group is
// (head, request, span); a tile has pairs of one bin.
struct Tiles {
  const int32_t* entries;  // [tiles, 4] pair << 8 | tokens it sees - 1; -1: no pair
  const int32_t* bins;     // [tiles]
  const int32_t* shares;   // [CTAs + 1] first tiles
  const int64_t* kv_lens;
  const int64_t* tables;
  int table_width, requests, rows, topk, first_head;
};

// What a tile works on: one block or two, by their numbers within the CTA, and its first pair's place
// in scratch.
struct Origin {
  int first, last, place;
};

// Of a CTA.
struct Shared {
  uint8_t keys[2][2][kHalfBytes];  // [buffer][half of the dims][token, 128 bytes]
  uint8_t values[2][2][kHalfBytes];
  uint8_t queries[kStages][2][kQueryHalf];
  int4 entries[kStages];
  Origin origins[kStages];
  uint64_t query_full[kStages], query_empty[kStages];
  uint64_t block_full[2], block_empty[2];
};

struct Attend {
  Tiles tiles;
  Stored pages;
  uint16_t* partial;
  float* logs;
  int first_row;
  float score_scale;   // makes scores exponents of 2
  float value_factor;  // of the sums of V
};

__device__ __forceinline__ uint64_t queries_of(const Shared& shared, int stage) {
  return operand(shared_address(shared.queries[stage][0]), 16);
}

__device__ __forceinline__ uint64_t keys_of(const Shared& shared, int buffer) {
  return operand(shared_address(shared.keys[buffer][0]), 16);
}

__device__ __forceinline__ uint64_t values_of(const Shared& shared, int buffer) {
  return operand(shared_address(shared.values[buffer][0]), kHalfBytes);
}

// Scores of 2 kScores tokens.
template <int kScores>
__device__ __forceinline__ void score(float (&s)[kScores], uint64_t q, uint64_t k) {
  wgmma_fence();
#pragma unroll
  for (int i = 0; i < kDim / 16; ++i) {
    const int inside = (i % 4) * 32;
    multiply_scores(s, advance(q, (i / 4) * kQueryHalf + inside),
                    advance(k, (i / 4) * kHalfBytes + inside), i > 0);
  }
  wgmma_commit();
  products_wait(s);
}

// Weighted sums of 16 kSteps tokens' values, added to `o` if `add`. To be waited for.
template <bool kHalf, int kSteps>
__device__ __forceinline__ void sum_values(float (&o)[64], const uint32_t (&weights)[kSteps][4],
                                           uint64_t v, bool add) {
  wgmma_fence();
#pragma unroll
  for (int i = 0; i < kSteps; ++i) {
    multiply_values<kHalf>(o, weights[i], advance(v, i * 2048), add || i > 0);
  }
  wgmma_commit();
}

// The largest score of each head, `least` if none is above -inf: any finite number keeps exponents
// from being NaN.
__device__ __forceinline__ void find_largest(const float (&s)[64], float scale, float least,
                                             float (&largest)[2]) {
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    const float m = largest_of(s, h);
    largest[h] = m == -INFINITY ? least : m * scale;
  }
}

// A pair's normalised result, and the logarithm of its sum over all lanes.
template <bool kHalf>
__device__ __forceinline__ void store_pair(const Attend& a, int64_t pair, int lane,
                                           const float (&o)[64], const float (&largest)[2],
                                           const float (&sum)[2]) {
  float over[2];
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    over[h] = sum[h] == 0.0f ? 0.0f : __fdividef(a.value_factor, sum[h]);
    if (lane % 4 == 0) {
      a.logs[pair * kHeads + lane / 4 + 8 * h] =
          sum[h] == 0.0f ? -INFINITY : largest[h] + __log2f(sum[h]);
    }
  }
  store_row<kHalf>(a.partial + pair * kRowValues, o, lane, over);
}

// Four rows against one block.
template <bool kHalf>
__device__ __forceinline__ void one_block(const Attend& a, Shared& shared, int stage,
                                          const Origin& origin, int entry, int lane) {
  const int buffer = origin.first % 2;
  float s[64], largest[2], sum[2] = {};
  score(s, queries_of(shared, stage), keys_of(shared, buffer));
  warp_arrive(shared.query_empty[stage], lane);
  const int limit = (entry & 255) + 1;
  if (limit < kBlock) mask_from(s, limit, lane % 4);
  find_largest(s, a.score_scale, 0.0f, largest);
  uint32_t weights[8][4];
  weigh<kHalf>(s, a.score_scale, largest, sum, weights);
  float o[64];
  sum_values<kHalf>(o, weights, values_of(shared, buffer), false);
#pragma unroll
  for (int h = 0; h < 2; ++h) sum[h] = sum_over_lanes(sum[h]);
  products_wait(o);
  if (entry >= 0) {
    store_pair<kHalf>(a, origin.place + (entry >> 8), lane, o, largest, sum);
  }
}

// Four rows against two blocks, of which they see all of the first. The second goes by halves: scores
// and weights of all its tokens would not fit the registers beside the sums.
template <bool kHalf>
__device__ __forceinline__ void both_blocks(const Attend& a, Shared& shared, int stage,
                                            const Origin& origin, int entry, int lane) {
  const int buffer = origin.first % 2;
  const uint64_t q = queries_of(shared, stage);
  float largest[2], sum[2] = {}, o[64];
  {
    float s[64];
    score(s, q, keys_of(shared, buffer));
    find_largest(s, a.score_scale, kNothing, largest);
    uint32_t weights[8][4];
    weigh<kHalf>(s, a.score_scale, largest, sum, weights);
    sum_values<kHalf>(o, weights, values_of(shared, buffer), false);
    products_wait(o);
  }
  const uint64_t k = keys_of(shared, 1 - buffer), v = values_of(shared, 1 - buffer);
#pragma unroll
  for (int first = 0; first < kBlock; first += kBlock / 2) {
    float s[32];
    score(s, q, advance(k, first * 128));
    if (first > 0) warp_arrive(shared.query_empty[stage], lane);
    const int limit = (entry & 255) + 1 - kBlock - first;
    if (limit < kBlock / 2) mask_from(s, limit, lane % 4);
    uint32_t weights[4][4];
    add_weights<kHalf>(s, a.score_scale, largest, sum, o, weights);
    sum_values<kHalf>(o, weights, advance(v, first * 128), true);
    products_wait(o);
  }
#pragma unroll
  for (int h = 0; h < 2; ++h) sum[h] = sum_over_lanes(sum[h]);
  if (entry >= 0) {
    store_pair<kHalf>(a, origin.place + (entry >> 8), lane, o, largest, sum);
  }
}

}  // namespace

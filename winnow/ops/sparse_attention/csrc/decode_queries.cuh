// What a launch of the decode kernels is given and holds in shared memory, and its queries.

#pragma once

#include "decode_device.cuh"

namespace {

constexpr int kChunks = kHeads * kDim / 4;  // float4s of one result

struct Params {
  const __nv_bfloat16* q;
  const int32_t* ids;
  const int64_t* positions;
  const int64_t* row_request;
  const int64_t* kv_lens;
  const int64_t* block_tables;
  const uint8_t* pages;
  void* out;
  int64_t q_row, q_head;           // elements
  int64_t table_width;             // blocks
  int64_t page_bytes, head_bytes;  // strides
  int pairs, kv_heads, group, topk;  // pairs of a row and a KV head
  float score_scale;  // log2(e) / sqrt(dim) * global scale of K
  float value_scale;  // global scale of V
  uint2 turned;       // see Nvfp4::pick
};

// GROUPS of four warps share a CTA's blocks; each group has stages of its own.
template <typename F, int GROUPS>
struct Shared {
  union {
    uint8_t stages[GROUPS][kStages][F::kStageBytes];
    float4 sums[GROUPS * kWarps][kChunks];  // once the last piece has been read
  };
  uint4 queries[8][32];  // fragments of every contraction step and lane
  float largest[kWarps][kHeads], m[GROUPS * kWarps][kHeads], l[GROUPS * kWarps][kHeads];
  const uint8_t* sources[GROUPS][32];
  uint64_t full[GROUPS][kStages], merged;
  int leavers[GROUPS][kStages];
  uint64_t left[GROUPS][kStages];  // see kEveryLane
};

// Its bytes, and where an inbox begins.
template <typename F, int GROUPS>
constexpr int kAlone = (sizeof(Shared<F, GROUPS>) + 127) / 128 * 128;

struct Inbox {  // this CTA's share of the heads, from all CTAs of the cluster in turn
  float4 sums[kChunks];
  float2 weights[kHeads];  // largest score and sum of weights
};

// The queries of rows g and g + 8 as the products take them. A warp of the first group
// prepares two of the eight contraction steps. `c` becomes what these rows' scores are multiplied
// by.
//
// For products in fp16 each head is scaled by a power of two that brings its largest value to 2^13:
// whatever the range of the queries, none overflows and bf16's bits are kept.
template <typename F, int GROUPS>
__device__ __forceinline__ void prepare_queries(const Params& p, Shared<F, GROUPS>& shared,
                                                int64_t row, int head, float (&c)[2]) {
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
  const bool prepares = GROUPS == 1 || warp < kWarps;
  uint4 raw[2];
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    const int member = g + 8 * h;
    const __nv_bfloat16* q =
        p.q + row * p.q_row + (head * p.group + member) * p.q_head + F::first_dim(warp, t);
    const bool read = prepares && member < p.group;
    raw[h] = read ? *reinterpret_cast<const uint4*>(q) : make_uint4(0, 0, 0, 0);
  }
  uint32_t a[2][4];
  if constexpr (F::kWideQueries) {
    c[0] = c[1] = p.score_scale;
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      a[0][h] = raw[h].x, a[0][2 + h] = raw[h].y;
      a[1][h] = raw[h].z, a[1][2 + h] = raw[h].w;
    }
  } else {
    float x[2][8];
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      widen(raw[h], x[h]);
      float largest = fabsf(x[h][0]);
#pragma unroll
      for (int i = 1; i < 8; ++i) largest = fmaxf(largest, fabsf(x[h][i]));
      largest = fmaxf(largest, __shfl_xor_sync(kAll, largest, 1));
      largest = fmaxf(largest, __shfl_xor_sync(kAll, largest, 2));
      if (prepares && t == 0) shared.largest[warp][g + 8 * h] = largest;
    }
    __syncthreads();
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      float largest = 0.0f;
#pragma unroll
      for (int w = 0; w < kWarps; ++w) largest = fmaxf(largest, shared.largest[w][g + 8 * h]);
      const int exponent = min(max(static_cast<int>(__float_as_uint(largest) >> 23), 14), 253);
      const float factor = __uint_as_float(static_cast<uint32_t>(267 - exponent) << 23 |
                                           static_cast<uint32_t>(F::kNegated) << 31);
      // Over the factor, and 2^kShift for how K is computed with.
      c[h] = p.score_scale *
             __uint_as_float(static_cast<uint32_t>(exponent - 13 + F::kShift) << 23);
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        a[j / 2][2 * (j % 2) + h] = pack(x[h][F::low(j)] * factor, x[h][F::high(j)] * factor);
      }
    }
  }
  if (prepares) {
#pragma unroll
    for (int k = 0; k < 2; ++k) {
      shared.queries[2 * warp + k][lane] = make_uint4(a[k][0], a[k][1], a[k][2], a[k][3]);
    }
  }
  __syncthreads();
}

}  // namespace

// The best topk - 1 blocks of each query column, and the current one.

#pragma once

#include "prefill_common.cuh"

namespace {

// Unsigned integers in the order of the scores: +0 ties with -0, and 0 is below every score.
__device__ uint32_t ordered(float score) {
  const uint32_t x = __float_as_uint(score + 0.0f);
  return x & 0x80000000u ? ~x : x | 0x80000000u;
}

// The score above which `ordered` is more than `key`; NaN, which nothing is above, if none is.
__device__ float above(uint32_t key) {
  ++key;
  return __uint_as_float(key & 0x80000000u ? key ^ 0x80000000u : ~key);
}

// A key and its block as one number, in the order of selection: of equal keys the lower id first.
__device__ uint64_t pair_of(uint32_t key, int id) {
  return static_cast<uint64_t>(key) << 32 | static_cast<uint32_t>(~id);
}

struct Choice {
  uint64_t pairs[kRanked];
  uint64_t best[kMaxTopk];
};

// The largest of 32 lanes' pairs.
__device__ uint64_t warp_best(uint64_t pair) {
  const uint32_t key = __reduce_max_sync(kAll, static_cast<uint32_t>(pair >> 32));
  const bool mine = static_cast<uint32_t>(pair >> 32) == key;
  const uint32_t low = __reduce_max_sync(kAll, mine ? static_cast<uint32_t>(pair) : 0u);
  return static_cast<uint64_t>(key) << 32 | low;
}

// The 32 lanes' numbers in descending order.
__device__ float sorted(float x, int lane) {
#pragma unroll
  for (int size = 2; size <= 32; size *= 2) {
#pragma unroll
    for (int distance = size / 2; distance > 0; distance /= 2) {
      const float other = __shfl_xor_sync(kAll, x, distance);
      const bool larger = ((lane & size) == 0) == ((lane & distance) == 0);
      x = larger ? fmaxf(x, other) : fminf(x, other);
    }
  }
  return x;
}

// The `wanted` best of a chunk of `count` scores and of the `listed` pairs in choice.best, into
// choice.best in order. held[4 j + i] of a lane is the score of block 128 j + 4 lane + i of the chunk,
// whose first is `base`; NaN from `count` on.
__device__ int merge(const float (&held)[kItems], const float* scores, int base, int count,
                     int listed, int wanted, Choice& choice) {
  const int lane = threadIdx.x % 32;
  float largest = -INFINITY;
#pragma unroll
  for (int i = 0; i < kItems; ++i) largest = fmaxf(largest, held[i]);
  float bound;
  if (listed == wanted) {
    // Ids grow from chunk to chunk: an equal score comes too late.
    bound = above(static_cast<uint32_t>(choice.best[wanted - 1] >> 32));
    if (!__any_sync(kAll, largest >= bound)) return listed;
  } else {
    // `wanted` lanes hold scores at least as large as the smallest of their maxima.
    bound = __shfl_sync(kAll, sorted(largest, lane), wanted - 1);
  }
  uint32_t hits = 0;
#pragma unroll
  for (int i = 0; i < kItems; ++i) hits |= held[i] >= bound ? 1u << i : 0u;
  const int own = __popc(hits);
  int place = own;
#pragma unroll
  for (int distance = 1; distance < 32; distance *= 2) {
    const int other = __shfl_up_sync(kAll, place, distance);
    if (lane >= distance) place += other;
  }
  const int found = __shfl_sync(kAll, place, 31) + listed;
  if (found <= kRanked) {
    place += listed - own;
    if (lane < listed) choice.pairs[lane] = choice.best[lane];
    for (; hits != 0; hits &= hits - 1) {
      const int i = __ffs(hits) - 1, within = i / 4 * 128 + 4 * lane + i % 4;
      // Read again: registers have no numbers that are found out.
      choice.pairs[place++] = pair_of(ordered(scores[within]), base + within);
    }
    __syncwarp();
    for (int first = 0; first < found; first += 32) {
      const uint64_t pair = first + lane < found ? choice.pairs[first + lane] : 0;
      int rank = 0;
      for (int i = 0; i < found; ++i) rank += choice.pairs[i] > pair;
      if (pair != 0 && rank < wanted) choice.best[rank] = pair;
    }
    __syncwarp();
    return min(found, wanted);
  }
  // Many ties, or scores that lie in order: `wanted` times the best of those after the one before.
  const uint64_t mine = lane < listed ? choice.best[lane] : 0;
  __syncwarp();
  uint64_t before = ~uint64_t{0};
  for (int turn = 0; turn < wanted; ++turn) {
    uint64_t pair = mine < before ? mine : 0;
#pragma unroll 4
    for (int within = lane; within < count; within += 32) {
      const uint64_t one = pair_of(ordered(scores[within]), base + within);
      if (one < before && one > pair) pair = one;
    }
    before = warp_best(pair);
    if (lane == 0) choice.best[turn] = before;
  }
  __syncwarp();
  return wanted;
}

// A warp a column.
__global__ void __launch_bounds__(kChooseWarps * 32)
    choose(Requests requests, int head_bits, const float* scores, int64_t stride, int32_t* ids) {
  __shared__ Choice choices[kChooseWarps];
  Choice& choice = choices[threadIdx.x / 32];
  const int lane = threadIdx.x % 32;
  const int64_t column = static_cast<int64_t>(blockIdx.x) * kChooseWarps + threadIdx.x / 32;
  const int row = requests.first_row + static_cast<int>(column >> head_bits);
  if (row >= requests.end_row) return;
  const bool known = requests.kv_lens[requests.row_request[row]] > 0;
  const int current = static_cast<int>(requests.positions[row] / kBlockTokens);
  const int wanted = requests.topk - 1;
  ids += ((static_cast<int64_t>(requests.first_row) << head_bits) + column) * requests.topk;
  if (!known || current <= wanted) {
    if (lane < requests.topk) ids[lane] = known && lane <= current ? lane : -1;
    return;
  }
  int listed = 0;
  for (int base = 0; base < current && wanted > 0; base += kChunk) {
    const float* chunk = scores + column * stride + base;
    const int count = min(current - base, kChunk);
    float held[kItems];
#pragma unroll
    for (int j = 0; j < kItems / 4; ++j) {
      // No load hangs on a condition: the last scores again beyond them.
      const float4* from = reinterpret_cast<const float4*>(chunk) + lane;
      const float4 four = from[32 * min(j, (count - 1) / 128)];
      held[4 * j] = four.x, held[4 * j + 1] = four.y;
      held[4 * j + 2] = four.z, held[4 * j + 3] = four.w;
    }
#pragma unroll
    for (int j = 0; j < kItems / 4; ++j) {
      if (128 * (j + 1) <= count) continue;
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        if (128 * j + 4 * lane + i >= count) held[4 * j + i] = NAN;
      }
    }
    listed = merge(held, chunk, base, count, listed, wanted, choice);
  }
  // Ascending, the current block last.
  const int id = lane < wanted ? static_cast<int>(~static_cast<uint32_t>(choice.best[lane])) : current;
  int place = 0;
  for (int i = 0; i < wanted; ++i) place += __shfl_sync(kAll, id, i) < id;
  if (lane <= wanted) ids[place] = id;
}

}  // namespace

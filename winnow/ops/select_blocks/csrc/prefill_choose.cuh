// The best topk - 1 blocks of each query column, and the current one.

#pragma once

#include "prefill_common.cuh"

namespace {

// Unsigned integers in the order of the scores: +0 ties with -0, and 0 is below every score.
__device__ uint32_t ordered(float score) {
  const uint32_t x = __float_as_uint(score + 0.0f);
  return x & 0x80000000u ? ~x : x | 0x80000000u;
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

// The `wanted` best of the keys of a chunk and of the `listed` pairs in choice.best, into
// choice.best in order. keys[4 j + i] of a lane has the id base + 128 j + 4 lane + i; 0 is no key.
__device__ int merge(uint32_t (&keys)[kItems], int base, int listed, int wanted, Choice& choice) {
  const int lane = threadIdx.x % 32;
  uint32_t largest = 0;
#pragma unroll
  for (int i = 0; i < kItems; ++i) largest = max(largest, keys[i]);
  uint32_t bound;
  if (listed == wanted) {
    // Ids grow from chunk to chunk: an equal key comes too late.
    bound = static_cast<uint32_t>(choice.best[wanted - 1] >> 32) + 1;
    if (!__any_sync(kAll, largest >= bound)) return listed;
  } else {
    // `wanted` lanes hold keys at least as large as the smallest of their maxima.
    int rank = 0;
#pragma unroll
    for (int i = 0; i < 32; ++i) {
      const uint32_t other = __shfl_sync(kAll, largest, i);
      rank += other > largest || (other == largest && i < lane);
    }
    bound = max(1u, __reduce_max_sync(kAll, rank == wanted - 1 ? largest : 0u));
  }
  int own = 0;
#pragma unroll
  for (int i = 0; i < kItems; ++i) own += keys[i] >= bound;
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
#pragma unroll
    for (int i = 0; i < kItems; ++i) {
      if (keys[i] >= bound)
        choice.pairs[place++] = pair_of(keys[i], base + i / 4 * 128 + 4 * lane + i % 4);
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
  // Many ties, or scores that lie in order: take the best of all `wanted` times.
  uint64_t mine = lane < listed ? choice.best[lane] : 0;
  __syncwarp();
  for (int turn = 0; turn < wanted; ++turn) {
    uint64_t pair = mine;
#pragma unroll
    for (int i = 0; i < kItems; ++i) {
      const uint64_t one = pair_of(keys[i], base + i / 4 * 128 + 4 * lane + i % 4);
      if (keys[i] != 0 && one > pair) pair = one;
    }
    const uint64_t best = warp_best(pair);
    if (lane == 0) choice.best[turn] = best;
    if (mine == best) mine = 0;
#pragma unroll
    for (int i = 0; i < kItems; ++i) {
      if (pair_of(keys[i], base + i / 4 * 128 + 4 * lane + i % 4) == best) keys[i] = 0;
    }
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
    const float4* from = reinterpret_cast<const float4*>(scores + column * stride + base) + lane;
    float4 fours[kItems / 4];
#pragma unroll
    for (int j = 0; j < kItems / 4; ++j) {
      // No load hangs on a condition: the last scores again beyond them.
      fours[j] = from[32 * min(j, (current - 1 - base) / 128)];
    }
    uint32_t keys[kItems];
#pragma unroll
    for (int j = 0; j < kItems / 4; ++j) {
      const float values[4] = {fours[j].x, fours[j].y, fours[j].z, fours[j].w};
#pragma unroll
      for (int i = 0; i < 4; ++i)
        keys[4 * j + i] = base + 128 * j + 4 * lane + i < current ? ordered(values[i]) : 0u;
    }
    listed = merge(keys, base, listed, wanted, choice);
  }
  // Ascending, the current block last.
  const int id = lane < wanted ? static_cast<int>(~static_cast<uint32_t>(choice.best[lane])) : current;
  int place = 0;
  for (int i = 0; i < wanted; ++i) place += __shfl_sync(kAll, id, i) < id;
  if (lane <= wanted) ids[place] = id;
}

}  // namespace

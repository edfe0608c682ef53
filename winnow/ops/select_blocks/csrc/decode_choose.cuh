// The best topk - 1 of a row's scored blocks, and the current block.
//
// One block of threads a (row, head). It is launched early and waits on the machine for the
// scores. A bound from maxima leaves few candidates, which are ranked by counting.

#pragma once

#include "decode_common.cuh"

namespace {

constexpr int kChooseThreads = 256;
constexpr int kChooseWarps = kChooseThreads / 32;
constexpr int kMaxTopk = 16;
constexpr int kRanked = 128;
// Blocks are split in parts only where there are at most half as many as warps.
constexpr int kMaxMultiprocessors = 256;
constexpr int kSplitItems = kMaxMultiprocessors * kWarps / 2 / kChooseThreads;

// Unsigned integers in the order of the scores: +0 ties with -0, and 0 is below every score.
__device__ uint32_t ordered(float score) {
  const uint32_t x = __float_as_uint(score + 0.0f);
  return x & 0x80000000u ? ~x : x | 0x80000000u;
}

__device__ float largest_of(float one) { return one; }
__device__ float largest_of(float2 two) { return fmaxf(two.x, two.y); }
__device__ float largest_of(float4 four) {
  return fmaxf(fmaxf(four.x, four.y), fmaxf(four.z, four.w));
}

// Keys of a thread's blocks from the scores of their parts; 0 from block `current` on. No load
// waits for another or hangs on a condition: one round trip to memory, not one an item.
template <typename Parts, int COUNT, int ITEMS>
__device__ void load_keys(const float* scores, int current, uint32_t (&keys)[ITEMS]) {
  Parts parts[COUNT];
#pragma unroll
  for (int i = 0; i < COUNT; ++i) {
    const int block = min(i * kChooseThreads + static_cast<int>(threadIdx.x), current - 1);
    parts[i] = reinterpret_cast<const Parts*>(scores)[block];
  }
#pragma unroll
  for (int i = 0; i < ITEMS; ++i) {
    const int block = i * kChooseThreads + threadIdx.x;
    keys[i] = i < COUNT && block < current ? ordered(largest_of(parts[min(i, COUNT - 1)])) : 0;
  }
}

// A key and its block as one number, in the order of selection: of equal keys the lower id first.
__device__ uint64_t pair_of(uint32_t key, int id) {
  return static_cast<uint64_t>(key) << 32 | static_cast<uint32_t>(~id);
}

// The pairs of one (row, head) that may be selected, and the blocks that are.
struct Choice {
  alignas(16) uint64_t pairs[kRanked];
  alignas(16) int selected[kMaxTopk];
  uint32_t group_keys[2 * kChooseWarps];
  int group_ids[kChooseWarps];
  int count;
};

// The largest key and, of those that hold it, the lowest id, in all lanes.
__device__ void warp_best(uint32_t& key, int& id) {
  const uint32_t largest = __reduce_max_sync(kAll, key);
  id = __reduce_min_sync(kAll, key == largest ? id : INT32_MAX);
  key = largest;
}

// Puts the keys of at least `bound` among the pairs, in any order, as long as there is room.
template <int ITEMS>
__device__ void collect(const uint32_t (&keys)[ITEMS], uint32_t bound, Choice& choice) {
  const int lane = threadIdx.x % 32;
  int own = 0;
#pragma unroll
  for (int i = 0; i < ITEMS; ++i) own += keys[i] >= bound;
  if (!__any_sync(kAll, own)) return;
  int before = own;
#pragma unroll
  for (int distance = 1; distance < 32; distance *= 2) {
    const int other = __shfl_up_sync(kAll, before, distance);
    if (lane >= distance) before += other;
  }
  int place = lane == 31 ? atomicAdd(&choice.count, before) : 0;
  place = __shfl_sync(kAll, place, 31) + before - own;
#pragma unroll
  for (int i = 0; i < ITEMS; ++i) {
    if (keys[i] >= bound) {
      if (place < kRanked) choice.pairs[place] = pair_of(keys[i], i * kChooseThreads + threadIdx.x);
      ++place;
    }
  }
}

// Ranks `count` pairs by counting those above each, four threads a pair; pairs beyond are 0.
__device__ void select_ranked(int count, int wanted, Choice& choice) {
  const int part = threadIdx.x % 4;
  for (int base = 0; base < count; base += kChooseThreads / 4) {
    const uint64_t own = choice.pairs[base + threadIdx.x / 4];
    int rank = 0;
    for (int i = part; i < count; i += 16) {
#pragma unroll
      for (int j = 0; j < 16; j += 4) rank += choice.pairs[i + j] > own;
    }
    rank += __shfl_xor_sync(kAll, rank, 1);
    rank += __shfl_xor_sync(kAll, rank, 2);
    if (part == 0 && own != 0 && rank < wanted)
      choice.selected[rank] = static_cast<int>(~static_cast<uint32_t>(own));
  }
}

// `wanted` < 16 best of the keys, into choice.selected in any order. Thread i's keys[j] has the
// id j * kChooseThreads + i; a key of 0 is no candidate; `candidates` > wanted ids have others.
template <int ITEMS>
__device__ void choose_best(uint32_t (&keys)[ITEMS], int candidates, int wanted, Choice& choice) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  static_assert(kRanked <= kChooseThreads, "candidates that all fit lie in keys[0]");
  if (candidates <= kRanked) {
    if (threadIdx.x < candidates) choice.pairs[threadIdx.x] = pair_of(keys[0], threadIdx.x);
    __syncthreads();
    select_ranked(candidates, wanted, choice);
    __syncthreads();
    return;
  }
  uint32_t largest = 0;
#pragma unroll
  for (int i = 0; i < ITEMS; ++i) largest = max(largest, keys[i]);
#pragma unroll
  for (int distance = 1; distance < 16; distance *= 2)
    largest = max(largest, __shfl_xor_sync(kAll, largest, distance));
  if (lane % 16 == 0) choice.group_keys[threadIdx.x / 16] = largest;
  __syncthreads();
  // Sixteen half warps hold sixteen keys at least as large as the smallest of their maxima, so
  // no smaller key is among the fifteen best.
  const uint32_t bound =
      max(1u, __reduce_min_sync(kAll, choice.group_keys[lane % (2 * kChooseWarps)]));
  collect<ITEMS>(keys, bound, choice);
  __syncthreads();
  if (choice.count <= kRanked) {
    select_ranked(choice.count, wanted, choice);
    __syncthreads();
    return;
  }
  // Many ties, or scores that lie in order: take the best of the block `wanted` times.
  for (int turn = 0; turn < wanted; ++turn) {
    uint32_t key = 0;
    int id = INT32_MAX;
#pragma unroll
    for (int i = 0; i < ITEMS; ++i) {
      if (keys[i] > key) key = keys[i], id = i * kChooseThreads + threadIdx.x;
    }
    warp_best(key, id);
    if (lane == 0) choice.group_keys[warp] = key, choice.group_ids[warp] = id;
    __syncthreads();
    key = choice.group_keys[lane % kChooseWarps], id = choice.group_ids[lane % kChooseWarps];
    warp_best(key, id);
    if (threadIdx.x == 0) choice.selected[turn] = id;
#pragma unroll
    for (int i = 0; i < ITEMS; ++i) {
      if (id == i * kChooseThreads + static_cast<int>(threadIdx.x)) keys[i] = 0;
    }
    __syncthreads();
  }
}

template <int ITEMS>
__global__ void __launch_bounds__(kChooseThreads)
    choose(Requests requests, Scores scores, int head_bits, int pass_bits, int workers,
           int32_t* ids) {
  static_assert(2 * kChooseWarps >= kMaxTopk - 1, "the bound needs a half warp for each rank");
  __shared__ Choice choice;
  const int64_t row = blockIdx.x >> head_bits;
  const int64_t kv_len = requests.kv_lens[requests.row_request[row]];
  const int current = static_cast<int>(requests.positions[row] / kBlockTokens);
  int units = 0;
  for (int i = threadIdx.x % 32; i < requests.count; i += 32)
    units += units_of(requests, i, pass_bits);
  const int part_bits = part_bits_of(__reduce_add_sync(kAll, units), workers);
  ids += static_cast<int64_t>(blockIdx.x) * requests.topk;
  if (threadIdx.x < kRanked) choice.pairs[threadIdx.x] = 0;
  if (threadIdx.x < kMaxTopk) choice.selected[threadIdx.x] = INT32_MAX;
  if (threadIdx.x == 0) choice.count = 0;
  // Also where no score is needed: what comes after this kernel relies on both having ended.
  asm volatile("griddepcontrol.wait;" ::: "memory");
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");

  const int ranked = requests.topk - 1, i = threadIdx.x;
  if (kv_len <= 0 || current <= ranked) {
    if (i < requests.topk) ids[i] = kv_len > 0 && i <= current ? i : -1;
    return;
  }
  if (ranked == 0) {
    if (i == 0) ids[0] = current;
    return;
  }
  const float* own = scores.data + blockIdx.x * scores.stride;
  uint32_t keys[ITEMS];
  if (part_bits == 0) {
    load_keys<float, ITEMS>(own, current, keys);
  } else if (part_bits == 1) {
    load_keys<float2, (ITEMS < kSplitItems ? ITEMS : kSplitItems)>(own, current, keys);
  } else {
    load_keys<float4, (ITEMS < kSplitItems ? ITEMS : kSplitItems)>(own, current, keys);
  }
  choose_best<ITEMS>(keys, current, ranked, choice);
  if (i < ranked) {
    const int id = choice.selected[i];
    int place = 0;
#pragma unroll
    for (int other = 0; other < kMaxTopk; ++other) place += choice.selected[other] < id;
    ids[place] = id;
  }
  if (i == ranked) ids[ranked] = current;
}

}  // namespace

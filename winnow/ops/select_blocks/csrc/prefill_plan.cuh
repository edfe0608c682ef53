// How the multiprocessors share the scoring: tiles of query columns, and where each CTA begins.

#pragma once

#include "prefill_common.cuh"

namespace {

// 256 query columns of one request: rows from first_row to end_row, and the blocks before the last
// row's own that are scored.
struct alignas(16) Tile {
  int request, first_row, end_row, blocks;
};

// A place in the work: a portion of a tile's blocks.
struct alignas(8) Place {
  int tile, portion;
};

struct Plan {
  Tile* tiles;
  Place* begins;      // [ctas + 1] where each CTA's work begins, and where all ends
  int32_t* portions;  // of all tiles before each
  int ctas;
};

// The sum over the threads before, and over all. Every thread of the block; all come here together.
__device__ int2 sums_before(int x, int (&warps)[kExpandThreads / 32]) {
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  int through = x;
#pragma unroll
  for (int distance = 1; distance < 32; distance *= 2) {
    const int other = __shfl_up_sync(kAll, through, distance);
    if (lane >= distance) through += other;
  }
  __syncthreads();
  if (lane == 31) warps[warp] = through;
  __syncthreads();
  int before = through - x, all = 0;
#pragma unroll
  for (int i = 0; i < kExpandThreads / 32; ++i) {
    before += i < warp ? warps[i] : 0;
    all += warps[i];
  }
  return {before, all};
}

// The last of `count` ascending numbers that is at most x; the first is.
template <typename Number>
__device__ int last_at_most(const Number* numbers, int count, int x) {
  int low = 0;
  for (int high = count; high - low > 1;) {
    const int middle = (low + high) / 2;
    (numbers[middle] <= x ? low : high) = middle;
  }
  return low;
}

// By one block: all tiles, and equal shares of their portions.
__device__ void make_plan(const Requests& requests, int tile_rows, Plan plan) {
  __shared__ int warps[kExpandThreads / 32];
  __shared__ int starts[kExpandThreads], firsts[kExpandThreads], ends[kExpandThreads];
  int tiles = 0, portions = 0;
  for (int base = 0; base < requests.count; base += kExpandThreads) {
    const int request = base + threadIdx.x;
    int first = 0, end = 0;
    int64_t kv_len = 0;
    if (request < requests.count) {
      kv_len = requests.kv_lens[request];
      first = max(static_cast<int>(requests.row_starts[request]), requests.first_row);
      end = min(static_cast<int>(requests.row_starts[request + 1]), requests.end_row);
    }
    const int rows = kv_len > 0 ? max(end - first, 0) : 0;
    const int2 found = sums_before((rows + tile_rows - 1) / tile_rows, warps);
    starts[threadIdx.x] = found.x, firsts[threadIdx.x] = first, ends[threadIdx.x] = end;
    __syncthreads();
    for (int at = 0; at < found.y; at += kExpandThreads) {
      const int number = at + threadIdx.x;
      Tile tile = {};
      if (number < found.y) {
        const int from = last_at_most(starts, kExpandThreads, number);
        tile.request = base + from;
        tile.first_row = firsts[from] + (number - starts[from]) * tile_rows;
        tile.end_row = min(ends[from], tile.first_row + tile_rows);
        const int past = static_cast<int>(requests.positions[tile.end_row - 1] / kBlockTokens);
        tile.blocks = past < requests.topk ? 0 : past;
      }
      const int2 sums = sums_before((tile.blocks + kPortion - 1) / kPortion, warps);
      if (number < found.y) {
        plan.tiles[tiles + number] = tile;
        plan.portions[tiles + number] = portions + sums.x;
      }
      portions += sums.y;
    }
    tiles += found.y;
    __syncthreads();
  }
  __syncthreads();
  for (int cta = threadIdx.x; cta <= plan.ctas; cta += kExpandThreads) {
    const int portion = static_cast<int>(int64_t{portions} * cta / plan.ctas);
    Place place = {tiles, 0};
    if (portion < portions) {
      place.tile = last_at_most(plan.portions, tiles, portion);
      place.portion = portion - plan.portions[place.tile];
    }
    plan.begins[cta] = place;
  }
}

// The tiles of which some blocks are this CTA's: work(tile, first block, end of the blocks).
template <typename Work>
__device__ __forceinline__ void for_own_tiles(const Plan& plan, const Work& work) {
  const Place begin = plan.begins[blockIdx.x], end = plan.begins[blockIdx.x + 1];
  for (int i = begin.tile; i < end.tile || (i == end.tile && end.portion > 0); ++i) {
    const Tile tile = plan.tiles[i];
    const int first = i == begin.tile ? begin.portion * kPortion : 0;
    const int blocks = i == end.tile ? end.portion * kPortion : tile.blocks;
    if (first < blocks) work(tile, first, blocks);
  }
}

}  // namespace

// The score of every block that is wholly in a row's past.
//
// The blocks of all requests form one list of units that is cut into equal ranges, one a warp, so
// that ragged lengths load the machine evenly. A warp copies its keys with the bulk copy engine
// into a ring of its own in shared memory and waits for no other warp.

#pragma once

#include "decode_keys.cuh"

namespace {

// Where a CTA's shared memory holds the rings' barriers, and then the requests' first units.
template <typename F>
constexpr int kBarriers = kWarps * F::kStages * F::kStageBytes;
template <typename F>
constexpr int kStarts = kBarriers<F> + kWarps * F::kStages * 8;

// Products of 16 tokens with the query columns, into the running maxima of a lane's columns.
template <typename F, int TILES, bool LOW>
__device__ void score_tile(const F& tile_keys, const Fragments<TILES, LOW>& queries,
                           float (&best)[TILES][2]) {
  // Two chains of sums where one would leave the tensor core waiting for itself; also where there
  // are more tiles, so that a row's scores do not depend on the rows beside it.
  float sums[TILES][2][4] = {};
#pragma unroll
  for (int word = 0; word < 4; ++word) {
    uint32_t keys[2][4];
    tile_keys.operands(word, keys);
#pragma unroll
    for (int step = 0; step < 2; ++step) {
      const int i = 4 * word + 2 * step;
#pragma unroll
      for (int tile = 0; tile < TILES; ++tile) {
        float(&sum)[4] = sums[tile][step];
        mma<F::kBf16>(sum, keys[step], queries.high[tile][i], queries.high[tile][i + 1]);
        if constexpr (LOW) {
          mma<F::kBf16>(sum, keys[step], queries.low[tile][i], queries.low[tile][i + 1]);
        }
      }
    }
  }
#pragma unroll
  for (int tile = 0; tile < TILES; ++tile) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      // fmaxf drops a NaN: the lowest of products.
      best[tile][i % 2] = fmaxf(best[tile][i % 2], sums[tile][0][i] + sums[tile][1][i]);
    }
  }
}

// The maximum over a warp's tokens, written for each column that is a row's.
template <int TILES>
__device__ void store_scores(const Scores& scores, const Queries& queries, int first_row,
                             int end_row, int place, float (&best)[TILES][2]) {
  const int g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
#pragma unroll
  for (int tile = 0; tile < TILES; ++tile) {
#pragma unroll
    for (int side = 0; side < 2; ++side) {
      float value = best[tile][side];
#pragma unroll
      for (int distance = 4; distance < 32; distance *= 2)
        value = fmaxf(value, __shfl_xor_sync(kAll, value, distance));
      const int column = 8 * tile + 2 * t + side;
      if (g == 0 && first_row + (column >> queries.head_bits) < end_row)
        scores.data[((first_row << queries.head_bits) + column) * scores.stride + place] = value;
    }
  }
}

// starts[r] = units before request r, for r up to requests.count, by one warp for its block.
__device__ void scan_units(const Requests& requests, int pass_bits, int* starts) {
  const int lane = threadIdx.x % 32;
  int before = 0;
  if (lane == 0) starts[0] = 0;
  for (int base = 0; base < requests.count; base += 32) {
    const int request = base + lane;
    int sum = request < requests.count ? units_of(requests, request, pass_bits) : 0;
#pragma unroll
    for (int distance = 1; distance < 32; distance *= 2) {
      const int other = __shfl_up_sync(kAll, sum, distance);
      if (lane >= distance) sum += other;
    }
    if (request < requests.count) starts[request + 1] = before + sum;
    before += __shfl_sync(kAll, sum, 31);
  }
}

// One lane's unit: part of a block of a request, for some of its rows.
struct Unit {
  int first_row, end_row;
  int64_t page;
  int place;  // of its score among a row's
  int part;
};

__device__ Unit resolve(const Requests& requests, const int* starts, int pass_bits, int part_bits,
                        int index) {
  const int whole = index >> part_bits;
  int low = 0, high = requests.count;
  while (high - low > 1) {
    const int middle = (low + high) / 2;
    (starts[middle] <= whole ? low : high) = middle;
  }
  const int blocks = scored_blocks(requests, requests.kv_lens[low]);
  int block = whole - starts[low], pass = 0;
  for (; block >= blocks; block -= blocks) ++pass;
  Unit unit;
  unit.page = requests.tables[low * requests.table_stride + block];
  unit.first_row = static_cast<int>(requests.row_starts[low]) + (pass << pass_bits);
  unit.end_row = static_cast<int>(requests.row_starts[low + 1]);
  unit.part = index & ((1 << part_bits) - 1);
  unit.place = (block << part_bits) + unit.part;
  return unit;
}

template <typename F, typename Q, int TILES>
__global__ void __launch_bounds__(kWarps * 32, 1)
    score(Keys keys, Queries queries, Requests requests, Scores scores) {
  constexpr bool kLow = sizeof(Q) == 4;
  extern __shared__ __align__(128) uint8_t shared[];
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  uint8_t* ring = shared + warp * F::kStages * F::kStageBytes;
  const uint32_t barriers = shared_address(shared + kBarriers<F>) + warp * F::kStages * 8;
  int* starts = reinterpret_cast<int*>(shared + kStarts<F>);
  if (lane == 0) {
    for (int i = 0; i < F::kStages; ++i) barrier_init(barriers + 8 * i, 1);
    barriers_made();
  }
  // The launch may begin before the one before it has ended.
  asm volatile("griddepcontrol.wait;" ::: "memory");
  // `choose` may take its place on the machine now: it waits for these scores by itself. Not sooner:
  // until then it reads what kernels before this one may write.
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
  const int pass_bits = pass_bits_of(TILES, queries.head_bits);
  if (warp == 0) scan_units(requests, pass_bits, starts);
  __syncthreads();

  const int workers = gridDim.x * kWarps, worker = warp * gridDim.x + blockIdx.x;
  const int part_bits = part_bits_of(starts[requests.count], workers);
  const int total = starts[requests.count] << part_bits;
  const int share = total / workers, rest = total % workers;
  const int first = worker * share + min(worker, rest), end = first + share + (worker < rest);
  const int unit_tokens = kBlockTokens >> part_bits;
  const int stage_tokens = min(unit_tokens, F::kStageTokens);
  const int stage_bits = __popc(unit_tokens / stage_tokens - 1);  // a unit has a power of 2 of them
  const int unit_stages = 1 << stage_bits;

  Fragments<TILES, kLow> fragments;
  int loaded_row = -1;
  uint32_t parity = 0;
  int slot = 0;
  for (int base = first; base < end; base += 32) {
    const int units = min(32, end - base), stages = units << stage_bits;
    Unit mine = {};
    if (lane < units) mine = resolve(requests, starts, pass_bits, part_bits, base + lane);
    // The lane that knows the page asks for it.
    auto fetch = [&](int stage, int to) {
      if (lane != stage >> stage_bits) return;
      const int token = mine.part * unit_tokens + (stage & (unit_stages - 1)) * stage_tokens;
      F::fetch(shared_address(ring + to * F::kStageBytes), keys, mine.page, token, stage_tokens,
               barriers + 8 * to);
    };
    fetch(0, slot);

    for (int unit = 0; unit < units; ++unit) {
      const int first_row = __shfl_sync(kAll, mine.first_row, unit);
      const int end_row = __shfl_sync(kAll, mine.end_row, unit);
      if (first_row != loaded_row) {
        load_fragments<F, Q, TILES>(queries, first_row, end_row, fragments);
        loaded_row = first_row;
      }
      // Not sooner: every warp's first stage goes before any warp's second, so that computing
      // begins while most of the keys are still on their way.
      if (unit == 0)
        for (int i = 1; i < min(F::kStages, stages); ++i) fetch(i, (slot + i) % F::kStages);
      float best[TILES][2];
#pragma unroll
      for (int tile = 0; tile < TILES; ++tile) best[tile][0] = best[tile][1] = -INFINITY;
      for (int part = 0; part < unit_stages; ++part) {
        const uint8_t* stage = ring + slot * F::kStageBytes;
        barrier_wait(barriers + 8 * slot, parity >> slot & 1);
#pragma unroll(TILES == 4 ? 1 : 2)
        for (int token = 0; token < stage_tokens; token += kTileTokens)
          score_tile<F, TILES, kLow>(F(stage, token), fragments, best);
        // Every lane has read the stage before the copy engine writes it again.
        __syncwarp();
        parity ^= 1u << slot;
        const int next = (unit << stage_bits) + part + F::kStages;
        if (next < stages) fetch(next, slot);
        slot = slot + 1 == F::kStages ? 0 : slot + 1;
      }
      store_scores<TILES>(scores, queries, first_row, end_row,
                          __shfl_sync(kAll, mine.place, unit), best);
    }
  }
}

}  // namespace

// What prefill.cu's CTAs work on: the arguments, the items and how they are handed out, and the
// feeding of rows. Knows nothing of weights' bits and of products.
//
// An item is some strips of 16 output columns by some rows of one expert. Items of gate and up come
// first, then those of down, in the same order of experts: the one with most rows first. They are
// handed out by a counter. An item of down waits until all of its expert's hidden values are
// stored, by whatever CTA; those were handed out before it, so that they do not wait for it.

#pragma once

#include <algorithm>
#include <cstdint>

#include "prefill_wgmma.cuh"

namespace {

constexpr int kRowBytes = 128;  // 64 fp16 of one row
constexpr int kTileCodes = 512, kTileScales = 64;
constexpr int kPairCodes = 4 * kTileCodes, kPairScales = 4 * kTileScales;
constexpr int kStages = 4;  // steps of rows ahead
constexpr int kAhead = 4;   // pairs of steps of weights ahead
constexpr int kSlots = 8;   // items known ahead, at most
constexpr int kTaken = 12;  // steps before an item's end at which the next one is taken
// An item may be a single pair of steps, and the one after the last copied must be known.
static_assert(kSlots > kAhead && kTaken > 2 * kAhead);
constexpr int kMaxExperts = 256;

// One of an expert's two products: gate and up with the activation, or down.
struct Product {
  const uint8_t* codes;        // packed, [matrices, strips, steps, 512]
  const uint8_t* scales;       // [matrices, strips, steps, 64]
  const float* global_scales;  // [matrices * strips * 16]
  const uint8_t* rows;         // [steps, capacity, 128]
  uint8_t* out;                // [slabs, capacity, 128]
  int strips, steps;
  float factor;  // of every hidden value, of every sum of down
};

enum Kind { kGated = 0, kDown = 1 };

struct Params {
  Product products[2];  // by kind
  const int* starts;    // [experts], multiples of 8
  const int* counts;
  const float* factors;  // [capacity], of the rows of gate and up
  int* next;             // 0 at launch
  int* done;             // [experts], 0 at launch: warpgroups' shares of hidden values
  int experts, capacity;
  float alpha, limit, beta;
};

// How a CTA is made of `GROUPS` warpgroups that multiply and one that has the feeding threads
// (since registers are moved between warpgroups), and for which numbers of rows it has loops.
template <int GROUPS, int... LOOPS>
struct Shape {
  static constexpr int kGroups = GROUPS, kWarps = 4 * GROUPS, kThreads = 128 * (GROUPS + 1);
  static constexpr int kRows = std::max({LOOPS...});  // of an item at most
  static constexpr int kStageBytes = kRows * kRowBytes;
  // What a CTA's registers at launch (168, 128 or 96 a thread) allow, with 24 of a feeding one.
  static constexpr int kRegisters = GROUPS == 2 ? 240 : GROUPS == 3 ? 160 : 112;
  // Room for the weights of one step instead of two, where others hide the wait for shared memory.
  static constexpr bool kLate = GROUPS > 2;

  // Rows that are multiplied where an item has `size`.
  static __device__ __forceinline__ int padded(int size) {
    int n = kRows;
    ((n = LOOPS >= size && LOOPS < n ? LOOPS : n), ...);
    return n;
  }

  // Tiles that an expert's matrix of so many strips has.
  static __device__ __forceinline__ int tiles(const Product& product, int kind) {
    const int own = kind == kGated ? kWarps : 2 * kWarps;
    return (product.strips + own - 1) / own;
  }
};

struct Item {
  int kind;
  int matrix;         // expert, -1: no more items
  int tile;           // which strips: 4 for each warpgroup of gate and up, 8 of down
  int row, valid, n;  // first row, rows that count, rows that are multiplied
};

template <typename S>
struct __align__(1024) Shared {
  static_assert(S::kStageBytes % 1024 == 0, "a swizzle begins at a multiple of 1,024");
  uint8_t rows[kStages][S::kStageBytes];
  uint8_t out[S::kGroups][2][S::kStageBytes];  // a warpgroup's slabs
  // A warp's own ring: two strips, two steps of 64 columns.
  uint8_t codes[S::kWarps][kAhead][kPairCodes];
  uint8_t scales[S::kWarps][kAhead][kPairScales];
  float factors[kSlots][S::kRows];
  Item items[kSlots];
  uint64_t full[kStages], empty[kStages], known[kSlots], taken[kSlots];
  uint64_t late[kSlots];  // the item's last rows are being fed
  int first[kMaxExperts];  // part of the rows of the expert of a rank, by falling number of rows
  int expert[kMaxExperts];
  int parts;  // of all
};

// A warp's strip, numbered through all matrices, which lie one after another; a gate's matrix is
// 2 * expert. The last tile may have warpgroups without strips: they repeat the last one.
template <typename S>
__device__ __forceinline__ int strip_of(const Params& p, const Item& item, int warp, int which) {
  const int own = S::kWarps * item.tile + warp, strips = p.products[item.kind].strips;
  if (item.kind == kGated) return (2 * item.matrix + which) * strips + min(own, strips - 1);
  return item.matrix * strips + min(2 * own, strips - 2) + which;
}

// Ranks the experts by their rows, and numbers the parts of these.
template <typename S>
__device__ __forceinline__ void list_parts(const Params& p, Shared<S>& shared) {
  for (int e = threadIdx.x; e < p.experts; e += S::kThreads) {
    const int own = p.counts[e];
    int rank = 0, before = 0, all = 0;
    for (int other = 0; other < p.experts; ++other) {
      const int count = p.counts[other], parts = (count + S::kRows - 1) / S::kRows;
      const bool ahead = count > own || (count == own && other < e);
      rank += ahead;
      before += ahead ? parts : 0;
      all += parts;
    }
    shared.first[rank] = before;
    shared.expert[rank] = e;
    shared.parts = all;
  }
}

// All items of gate and up come first, in the order of experts in which those of down follow.
template <typename S>
__device__ __forceinline__ Item find_item(const Params& p, const Shared<S>& shared, int number) {
  int kind = kGated, tiles = S::tiles(p.products[kGated], kGated);
  if (number >= shared.parts * tiles) {
    number -= shared.parts * tiles;
    kind = kDown, tiles = S::tiles(p.products[kDown], kDown);
    if (number >= shared.parts * tiles) return {kDown, -1, 0, 0, 0, 0};
  }
  // The last whose first item is not after `number`; experts without rows come after all items.
  int low = 0, high = p.experts;
  while (high - low > 1) {
    const int middle = (low + high) / 2;
    (shared.first[middle] * tiles <= number ? low : high) = middle;
  }
  const int expert = shared.expert[low], count = p.counts[expert];
  const int parts = (count + S::kRows - 1) / S::kRows, within = number - shared.first[low] * tiles;
  const int size = ((count + parts - 1) / parts + 7) / 8 * 8, part = within % parts;
  const int valid = min(size, count - part * size);
  const int row = p.starts[expert] + part * size;
  return {kind, expert, within / parts, row, valid, S::padded(size)};
}

// Hands out items, as late as the copies of weights allow: a thread.
template <typename S>
__device__ __forceinline__ void list(const Params& p, Shared<S>& shared) {
  const int pairs = min(p.products[kGated].steps, p.products[kDown].steps) / 2;
  const int before = (kAhead + pairs - 1) / pairs;  // items that copies may be ahead
  for (int i = 0;; ++i) {
    const int slot = i % kSlots;
    if (i >= before) barrier_wait(&shared.late[(i - before) % kSlots], (i - before) / kSlots % 2);
    const Item item = find_item(p, shared, atomicAdd(p.next, 1));
    barrier_wait(&shared.taken[slot], i / kSlots % 2 ^ 1);
    shared.items[slot] = item;
    barrier_arrive(shared_address(&shared.known[slot]));
    if (item.matrix < 0) break;
  }
}

// Feeds the items' rows: a thread.
template <typename S>
__device__ __forceinline__ void feed(const Params& p, Shared<S>& shared) {
  int stage = 0, parity = 1, slot = 0, slot_parity = 0;
  while (true) {
    barrier_wait(&shared.known[slot], slot_parity);
    const Item item = shared.items[slot];
    if (item.matrix < 0) break;
    const bool gated = item.kind == kGated;
    const Product& product = p.products[item.kind];
    if (!gated) {
      // Every warpgroup of every item of gate and up has stored its share of hidden values.
      const int parts = (p.counts[item.matrix] + S::kRows - 1) / S::kRows;
      const int shares = parts * S::kGroups * S::tiles(p.products[kGated], kGated);
      while (load_acquire(p.done + item.matrix) < shares) __nanosleep(100);
      asm volatile("fence.proxy.async;" ::: "memory");
    }
    const uint8_t* from = product.rows + int64_t{item.row} * kRowBytes;
#pragma unroll 1
    for (int step = 0; step < product.steps; ++step) {
      if (step == max(0, product.steps - kTaken)) {
        barrier_arrive(shared_address(&shared.late[slot]));
      }
      barrier_wait(&shared.empty[stage], parity);
      const bool first = gated && step == 0;
      barrier_expect(&shared.full[stage], item.n * (kRowBytes + (first ? 4 : 0)));
      bulk_load(shared.rows[stage], from, item.n * kRowBytes, &shared.full[stage]);
      if (first) {
        bulk_load(shared.factors[slot], p.factors + item.row, item.n * 4, &shared.full[stage]);
      }
      from += int64_t{p.capacity} * kRowBytes;
      if (++stage == kStages) stage = 0, parity ^= 1;
    }
    barrier_arrive(shared_address(&shared.taken[slot]));
    if (++slot == kSlots) slot = 0, slot_parity ^= 1;
  }
}

}  // namespace

// What prefill.cu's CTAs work on: the arguments, the items and how they are handed out, what feeds
// them and what stores their results. Knows nothing of weights' bits and of products.
//
// An item is some strips of 16 output columns by some rows of one expert. Items of gate and up come
// first, then those of down, in the same order of experts: the one with most rows first. They are
// handed out by a counter. An item of down waits until all of its expert's hidden values are
// stored, by whatever CTA; those were handed out before it, so that they do not wait for it.
//
// A shared expert, which all rows visit, may be one more expert, with matrices of its own width
// from stacks of its own. Its items come before the others' of their kind.

#pragma once

#include <cuda.h>

#include <algorithm>
#include <cstdint>

#include "prefill_wgmma.cuh"

namespace {

constexpr int kRowBytes = 128;  // 64 fp16 of one row
constexpr int kTileCodes = 512, kTileScales = 64;
constexpr int kPairCodes = 2 * kTileCodes, kPairScales = 2 * kTileScales;
constexpr int kSlots = 4;  // items known ahead, at most
constexpr int kTaken = 3;  // pairs of steps that an item still has to be fed when the next is taken
constexpr int kMaxExperts = 256;  // that are chosen
constexpr int kMaxShared = 227 * 1024;  // bytes of a CTA
constexpr int kOtherBytes = 4 * 1024;   // of these, at most, neither of stages nor of results

// One of an expert's two products: gate and up with the activation, or down.
struct Product {
  const float* global_scales;  // [all_strips * 16]
  const uint8_t* rows;         // [steps, capacity, 128]
  uint8_t* out;                // [slabs, capacity, 128]
  int strips, pairs;           // of a matrix; pairs of steps
  int all_strips;              // of all matrices
  float factor;                // of every hidden value, of every sum of down
};

enum Kind { kGated = 0, kDown = 1 };
constexpr int kShared = 2;  // a shared expert's products come after the others'
constexpr int kProducts = 4;

// Weights as the copy engine sees them, by product: packed codes [all_strips, steps * 512] and
// scales [all_strips, steps * 64]. A box is a pair of steps of a strip for each warp.
struct Maps {
  CUtensorMap codes[kProducts], scales[kProducts];
};

struct Params {
  Product products[kProducts];
  const int* starts;    // [experts + shared], multiples of 8
  const int* counts;
  const float* factors;  // [capacity], of the rows of gate and up
  int* next;             // 0 at launch
  int* done;             // [experts + shared], 0 at launch: items whose hidden values are stored
  int experts;           // that are chosen
  int shared;            // 1: the number after theirs is a shared expert's
  int capacity;
  float alpha, limit, beta;
};

// How a CTA is made of `GROUPS` warpgroups that multiply and one that has the threads beside them
// (since registers are moved between warpgroups), and for which numbers of rows it has loops.
template <int GROUPS, int... LOOPS>
struct Shape {
  static constexpr int kGroups = GROUPS, kWarps = 4 * GROUPS, kThreads = 128 * (GROUPS + 1);
  static constexpr int kRows = std::max({LOOPS...});  // of an item at most
  static constexpr int kStepBytes = kRows * kRowBytes;
  // What a CTA's registers at launch (168, 128 or 96 a thread) allow.
  static constexpr int kRegisters = GROUPS == 2 ? 240 : GROUPS == 3 ? 160 : 112;
  static constexpr int kOtherRegisters = GROUPS == 2 ? 24 : 32;
  // Pairs of steps ahead, as many as there is room for.
  static constexpr int kStageBytes = 2 * kStepBytes + 2 * kWarps * (kPairCodes + kPairScales);
  static constexpr int kStages =
      std::min(4, (kMaxShared - kOtherBytes - 2 * kGroups * kStepBytes) / kStageBytes);

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
  int kind, product;
  int expert;         // -1: no more items
  int tile;           // which strips: one a warp of gate and up each, two of down
  int strips[2];      // the first of those, numbered through all matrices, of which a warp has one
  int row, valid, n;  // first row, rows that count, rows that are multiplied
};

// A pair of steps of 64 columns: what an item's warps multiply.
template <typename S>
struct __align__(1024) Stage {
  static_assert(S::kStepBytes % 1024 == 0, "a swizzle begins at a multiple of 1,024");
  uint8_t rows[2][S::kStepBytes];
  uint8_t codes[2][S::kWarps][kPairCodes];  // of a warp's two strips
  uint8_t scales[2][S::kWarps][kPairScales];
};

template <typename S>
struct Shared {
  static_assert(sizeof(Stage<S>) == S::kStageBytes);
  Stage<S> stages[S::kStages];
  uint8_t out[S::kGroups][2][S::kStepBytes];  // a warpgroup's slabs
  float factors[kSlots][S::kRows];
  Item items[kSlots];
  uint64_t full[S::kStages], empty[S::kStages], known[kSlots], taken[kSlots];
  uint64_t late[kSlots];  // the item's last weights are being fed
  uint64_t stored, freed;  // an item's results lie in `out`; `out` may be written again
  int first[kMaxExperts];  // part of the rows of the expert of a rank, by falling number of rows
  uint16_t expert[kMaxExperts];
  int parts;  // of all
};

// Ranks the experts by their rows, and numbers the parts of these; not the shared one.
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

template <typename S>
__device__ __forceinline__ int parts_of(int rows) {
  return (rows + S::kRows - 1) / S::kRows;
}

// An expert's item by its number among those of the kind. Matrices lie one after another; a gate's
// is 2 * expert. The last tile may have warpgroups without strips: they multiply what follows and
// store nothing.
template <typename S>
__device__ __forceinline__ Item item_of(const Params& p, int kind, int expert, int number) {
  const bool shared = expert == p.experts;
  const int product = kind + (shared ? kShared : 0), matrix = shared ? 0 : expert;
  const int strips = p.products[product].strips, count = p.counts[expert];
  const int parts = parts_of<S>(count), part = number % parts, tile = number / parts;
  const int size = ((count + parts - 1) / parts + 7) / 8 * 8;
  const int first = kind == kGated ? 2 * matrix * strips + S::kWarps * tile
                                   : matrix * strips + S::kWarps * 2 * tile;
  const int second = first + (kind == kGated ? strips : S::kWarps);
  return {kind, product, expert, tile, {first, second}, p.starts[expert] + part * size,
          min(size, count - part * size), S::padded(size)};
}

// All items of gate and up come first, in the order of experts in which those of down follow.
template <typename S>
__device__ __forceinline__ Item find_item(const Params& p, const Shared<S>& shared, int number) {
  for (int kind = kGated; kind <= kDown; ++kind) {
    if (p.shared) {
      const int own =
          parts_of<S>(p.counts[p.experts]) * S::tiles(p.products[kind + kShared], kind);
      if (number < own) return item_of<S>(p, kind, p.experts, number);
      number -= own;
    }
    const int tiles = S::tiles(p.products[kind], kind);
    if (number < shared.parts * tiles) {
      // The last whose first item is not after `number`; experts without rows come after all items.
      int low = 0, high = p.experts;
      while (high - low > 1) {
        const int middle = (low + high) / 2;
        (shared.first[middle] * tiles <= number ? low : high) = middle;
      }
      return item_of<S>(p, kind, shared.expert[low], number - shared.first[low] * tiles);
    }
    number -= shared.parts * tiles;
  }
  return {kDown, kDown, -1, 0, {0, 0}, 0, 0, 0};
}

// Hands out items, as late as their feeding allows: a thread.
template <typename S>
__device__ __forceinline__ void list(const Params& p, Shared<S>& shared) {
  for (int i = 0;; ++i) {
    const int slot = i % kSlots;
    if (i > 0) barrier_wait(shared.late[(i - 1) % kSlots], (i - 1) / kSlots % 2);
    const Item item = find_item(p, shared, atomicAdd(p.next, 1));
    barrier_wait(shared.taken[slot], i / kSlots % 2 ^ 1);
    shared.items[slot] = item;
    barrier_arrive(shared.known[slot]);
    if (item.expert < 0) break;
  }
}

// Until the hidden values of every item of the expert are stored.
template <typename S>
__device__ __forceinline__ void wait_for_hidden(const Params& p, const Item& item) {
  const Product& gated = p.products[item.product - kDown + kGated];
  const int items = parts_of<S>(p.counts[item.expert]) * S::tiles(gated, kGated);
  while (load_acquire(p.done + item.expert) < items) __nanosleep(100);
  asm volatile("fence.proxy.async;" ::: "memory");
}

// Feeds the items' weights: a thread.
template <typename S>
__device__ __forceinline__ void feed_weights(const Params& p, const Maps& maps, Shared<S>& shared) {
  constexpr int kBytes = 2 * S::kWarps * (kPairCodes + kPairScales);
  int stage = 0, parity = 1, slot = 0, slot_parity = 0;
  while (true) {
    barrier_wait(shared.known[slot], slot_parity);
    const Item item = shared.items[slot];
    if (item.expert < 0) break;
    const CUtensorMap &codes = maps.codes[item.product], &scales = maps.scales[item.product];
    const int pairs = p.products[item.product].pairs, late = max(0, pairs - kTaken);
#pragma unroll 1
    for (int pair = 0; pair < pairs; ++pair) {
      if (pair == late) barrier_arrive(shared.late[slot]);
      Stage<S>& to = shared.stages[stage];
      const uint32_t full = shared_address(&shared.full[stage]);
      barrier_wait(shared.empty[stage], parity);
      barrier_expect(full, kBytes);
#pragma unroll
      for (int which = 0; which < 2; ++which) {
        tensor_load(shared_address(to.codes[which]), codes, pair * kPairCodes / 8,
                    item.strips[which], full);
        tensor_load(shared_address(to.scales[which]), scales, pair * kPairScales / 8,
                    item.strips[which], full);
      }
      if (++stage == S::kStages) stage = 0, parity ^= 1;
    }
    barrier_arrive(shared.taken[slot]);
    if (++slot == kSlots) slot = 0, slot_parity ^= 1;
  }
}

// Feeds the items' rows: a thread.
template <typename S>
__device__ __forceinline__ void feed_rows(const Params& p, Shared<S>& shared) {
  int stage = 0, parity = 1, slot = 0, slot_parity = 0;
  while (true) {
    barrier_wait(shared.known[slot], slot_parity);
    const Item item = shared.items[slot];
    if (item.expert < 0) break;
    const Product& product = p.products[item.product];
    if (item.kind == kDown) wait_for_hidden<S>(p, item);
    const int bytes = item.n * kRowBytes;
    const uint8_t* from = product.rows + int64_t{item.row} * kRowBytes;
#pragma unroll 1
    for (int pair = 0; pair < product.pairs; ++pair) {
      const uint32_t full = shared_address(&shared.full[stage]);
      const bool factors = item.kind == kGated && pair == 0;
      barrier_wait(shared.empty[stage], parity);
      barrier_expect(full, 2 * bytes + (factors ? item.n * 4 : 0));
#pragma unroll
      for (int step = 0; step < 2; ++step) {
        bulk_load(shared_address(shared.stages[stage].rows[step]), from, bytes, full);
        from += int64_t{p.capacity} * kRowBytes;
      }
      if (factors)
        bulk_load(shared_address(shared.factors[slot]), p.factors + item.row, item.n * 4, full);
      if (++stage == S::kStages) stage = 0, parity ^= 1;
    }
    barrier_arrive(shared.taken[slot]);
    if (++slot == kSlots) slot = 0, slot_parity ^= 1;
  }
}

// Stores what comes of the items: a thread.
template <typename S>
__device__ __forceinline__ void store(const Params& p, Shared<S>& shared) {
  for (uint32_t i = 0;; ++i) {
    const int slot = i % kSlots;
    barrier_wait(shared.known[slot], i / kSlots % 2);
    const Item item = shared.items[slot];
    if (item.expert < 0) break;
    const Product& product = p.products[item.product];
    const int sets = item.kind == kGated ? 1 : 2, slabs = product.strips / 4;
    barrier_wait(shared.stored, i % 2);
#pragma unroll 1
    for (int set = 0; set < sets; ++set) {
      for (int group = 0; group < S::kGroups; ++group) {
        const int slab = S::kGroups * (sets * item.tile + set) + group;
        if (slab >= slabs) break;
        bulk_store(product.out + (int64_t{slab} * p.capacity + item.row) * kRowBytes,
                   shared.out[group][set], item.valid * kRowBytes);
      }
    }
    bulk_commit();
    bulk_wait_read();
    barrier_arrive(shared.freed);
    barrier_arrive(shared.taken[slot]);
    if (item.kind == kGated) {
      // Bulk copies of other CTAs read these hidden values.
      bulk_wait();
      asm volatile("fence.proxy.async;" ::: "memory");
      add_release(p.done + item.expert);
    }
  }
  bulk_wait();
}

}  // namespace

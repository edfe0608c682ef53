// The experts' grouped products for many rows, on Hopper (sm_90a): wgmma on packed NVFP4 weights.
//
// Owns the two products (gate and up with the activation; down) over rows that lie ordered by
// expert. Who chose which expert, and the weighted sum, are prefill_rows.cu's.
//
// Weights are the A operand, from registers: a lane loads 16 bytes of a packed tile (16 rows x 64
// columns, see winnow/ops/fragments.py) and expands its codes into fp16 fragments, exactly. Rows
// are the N of m64nNk16, from shared memory. A CTA takes one item: strips of 16 output columns by
// some rows of one expert. Every warp owns two strips, hence two products a step of 16; a gate
// strip and its up strip are shuffled by name, so that a thread ends with gate and up of the same
// place. One more warp feeds a ring of row tiles: rows are stored as slabs of 64 columns, 128 bytes
// a row, already swizzled, so that a tile is one contiguous bulk copy.
//
// Many rows an expert: two warpgroups and items of up to 128 rows, whose sums fill the registers;
// tensor cores set the pace. Fewer rows: three or four warpgroups, whose latencies hide each
// other, and items of up to 64 or 40 rows. A number of rows has a loop of its own: a branch around
// the products costs more than the columns that it saves.
//
// Exactness: an E2M1 code's bits, moved, are the fp16 number code * 2^-14, and times an E4M3 scale
// a multiple of 2^-24 with at most 6 bits. Sums are fp32; the global scale and the rows' powers of
// two come in at the end.
//
// Items are handed out by a counter, experts with most rows first. Which CTA takes an item changes
// no result.

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include <cstdint>

#include "prefill_wgmma.cuh"

namespace {

constexpr int kRowBytes = 128;  // 64 fp16 of one row
constexpr int kTileCodes = 512, kTileScales = 64;
constexpr int kStages = 8;
constexpr int kSlots = 4;     // items known ahead
constexpr int kInFlight = 1;  // products of 16 columns under way while the next is expanded
constexpr int kAhead = 8;     // steps of weights asked into L2 at a time
constexpr int kMaxExperts = 256;

struct Params {
  const uint8_t* codes;        // packed, [matrices, strips, steps, 512]
  const uint8_t* scales;       // [matrices, strips, steps, 64]
  const float* global_scales;  // [matrices * strips * 16]
  const uint8_t* rows;         // [steps, capacity, 128]
  uint8_t* out;                // [slabs, capacity, 128]
  const int* starts;           // [experts], multiples of 8
  const int* counts;
  const float* factors;  // [capacity], of gate and up alone
  int* next;             // 0 at launch
  int experts, strips, steps, capacity;
  float alpha, limit, beta;
  float factor;  // of every sum of down, of every hidden value of gate and up
};

// How a CTA is made of `GROUPS` warpgroups that multiply and one that has the feeding warp (since
// registers are moved between warpgroups).
template <int GROUPS>
struct Shape {
  static constexpr int kGroups = GROUPS, kWarps = 4 * GROUPS, kThreads = 128 * (GROUPS + 1);
  static constexpr int kRows = GROUPS == 2 ? 128 : GROUPS == 3 ? 64 : 40;  // of an item at most
  static constexpr int kStageBytes = kRows * kRowBytes;
  // What a CTA's registers at launch (168, 128 or 96 a thread) allow, with 24 of a feeding one.
  static constexpr int kRegisters = GROUPS == 2 ? 240 : GROUPS == 3 ? 160 : 112;

  // Rows that are multiplied where an item has `size`: there is a loop for each.
  static __device__ __forceinline__ int padded(int size) {
    if (GROUPS == 2) return size <= 64 ? 64 : size <= 80 ? 80 : (size + 7) / 8 * 8;
    if (GROUPS == 3) return size <= 32 ? 32 : size <= 48 ? 48 : 64;
    return size <= 16 ? 16 : size <= 32 ? 32 : 40;
  }
};

struct Item {
  int matrix;         // expert, -1: no more items
  int tile;           // which strips: 4 for each warpgroup of gate and up, 8 of down
  int row, valid, n;  // first row, rows that count, rows that are multiplied
  int part;           // number of these rows among the expert's
};

template <typename S>
struct __align__(1024) Shared {
  static_assert(S::kStageBytes % 1024 == 0, "a swizzle begins at a multiple of 1,024");
  uint8_t rows[kStages][S::kStageBytes];
  uint8_t out[S::kGroups][2][S::kStageBytes];  // a warpgroup's slabs
  float factors[kSlots][S::kRows];
  Item items[kSlots];
  uint64_t full[kStages], empty[kStages], known[kSlots], taken[kSlots];
  int first[kMaxExperts];  // item of the expert of a rank, by falling number of rows
  int expert[kMaxExperts];
  int total;
};

__device__ __forceinline__ uint32_t bits(__half2 x) { return *reinterpret_cast<uint32_t*>(&x); }
__device__ __forceinline__ __half2 halves(uint32_t x) { return *reinterpret_cast<__half2*>(&x); }

// Two E4M3 bytes as two fp16.
__device__ __forceinline__ __half2 scale_pair(uint32_t pair) {
  uint32_t c;
  asm("cvt.rn.f16x2.e4m3x2 %0, %1;" : "=r"(c) : "h"(static_cast<uint16_t>(pair)));
  return halves(c);
}

// A lane's eight codes of a step of 16 as fragment registers: row g, row g + 8, then both in the
// upper half of the step's columns. Times the rows' scales.
__device__ __forceinline__ void expand(uint32_t word, __half2 upper, __half2 lower,
                                       uint32_t (&r)[4]) {
  constexpr uint32_t kPlaces = 0x8E008E00u;  // s ee m of both halves
  r[0] = bits(__hmul2(halves(word & kPlaces), upper));
  r[1] = bits(__hmul2(halves((word << 3) & kPlaces), lower));
  // A product moves sign and magnitude by different distances at once.
  r[2] = bits(__hmul2(halves(((word & 0x40384038u) * 66u) & kPlaces), upper));
  r[3] = bits(__hmul2(halves(((word & 0x20072007u) * 516u) & kPlaces), lower));
}

// One lane's part of a step of 64 columns of two strips.
struct Weights {
  uint4 codes[2];
  uint2 scales[2];
};

// Where a lane reads the first of its two strips of an item.
struct Source {
  const uint8_t* codes;
  const uint8_t* scales;
};

// A warp's strip, numbered through all matrices, which lie one after another; a gate's matrix is
// 2 * expert. The last tile may have warpgroups without strips: they repeat the last one.
template <bool GATED, typename S>
__device__ __forceinline__ int strip_of(const Params& p, const Item& item, int warp, int which) {
  const int own = S::kWarps * item.tile + warp;
  if (GATED) return (2 * item.matrix + which) * p.strips + min(own, p.strips - 1);
  return item.matrix * p.strips + min(2 * own, p.strips - 2) + which;
}

template <bool GATED, typename S>
__device__ __forceinline__ Source source_of(const Params& p, const Item& item, int warp, int lane) {
  const int64_t tile = int64_t{strip_of<GATED, S>(p, item, warp, 0)} * p.steps;
  return {p.codes + tile * kTileCodes + 16 * lane, p.scales + tile * kTileScales + 8 * (lane / 4)};
}

// The next step's weights; the other strip is `apart` tiles further.
__device__ __forceinline__ void load(Weights& w, Source& source, int apart) {
  w.codes[0] = load_16(source.codes);
  w.codes[1] = load_16(source.codes + apart * kTileCodes);
  w.scales[0] = load_8(source.scales);
  w.scales[1] = load_8(source.scales + apart * kTileScales);
  source.codes += kTileCodes;
  source.scales += kTileScales;
}

// What a warp that multiplies carries from item to item.
struct Walk {
  Weights weights[2];             // of the next two steps
  Source source;                  // of the step after them
  uint32_t steps = 0, items = 0;  // so far
};

// The slot of the walk's next item, once that is known.
template <typename S>
__device__ __forceinline__ int next_slot(Shared<S>& shared, const Walk& walk) {
  const int slot = walk.items % kSlots;
  barrier_wait(&shared.known[slot], walk.items / kSlots % 2);
  return slot;
}

__device__ __forceinline__ uint32_t word_of(const uint4& v, int i) {
  return i == 0 ? v.x : i == 1 ? v.y : i == 2 ? v.z : v.w;
}

// One step of 64 columns: four products of 16 for each of two strips. `rows`: the stage's address.
// `previous`: the barrier of the stage before, to be given back if `give`.
template <bool GATED, int N>
__device__ __forceinline__ void multiply_step(float (&sums)[2][N / 2], const Weights& w,
                                              uint32_t rows, uint32_t previous, bool give) {
  // 16 columns are two of a descriptor's units.
  const uint64_t first = descriptor(rows);
  __half2 scale[2][2][2];
#pragma unroll
  for (int which = 0; which < 2; ++which) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const uint32_t four = half == 0 ? w.scales[which].x : w.scales[which].y;
      scale[which][half][0] = scale_pair(four & 0xFFFF);
      scale[which][half][1] = scale_pair(four >> 16);
    }
  }
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    uint32_t a[2][4];
#pragma unroll
    for (int which = 0; which < 2; ++which) {
      const __half2 upper = scale[which][0][i / 2], lower = scale[which][1][i / 2];
      expand(word_of(w.codes[which], i), i % 2 ? __high2half2(upper) : __low2half2(upper),
             i % 2 ? __high2half2(lower) : __low2half2(lower), a[which]);
    }
    // Rows g of gate and up, then rows g + 8: a thread ends with both of one place.
    const uint32_t even[4] = {a[0][0], GATED ? a[1][0] : a[0][1], a[0][2],
                              GATED ? a[1][2] : a[0][3]};
    const uint32_t odd[4] = {GATED ? a[0][1] : a[1][0], a[1][1], GATED ? a[0][3] : a[1][2],
                             a[1][3]};
    wgmma_fence();
    multiply(sums[0], even, first + 2 * i);
    multiply(sums[1], odd, first + 2 * i);
    wgmma_commit();
    wgmma_wait<kInFlight>();
    // What came before these products has been read by now.
    if (i == kInFlight && give) barrier_arrive(previous);
  }
}

// Smaller and larger of two numbers, NaN if one is.
__device__ __forceinline__ float least(float a, float b) {
  float c;
  asm("min.NaN.f32 %0, %1, %2;" : "=f"(c) : "f"(a), "f"(b));
  return c;
}

__device__ __forceinline__ float most(float a, float b) {
  float c;
  asm("max.NaN.f32 %0, %1, %2;" : "=f"(c) : "f"(a), "f"(b));
  return c;
}

__device__ __forceinline__ float activated(float gate, float up, const Params& p) {
  gate = least(gate, p.limit);
  up = most(least(up, p.limit), -p.limit);
  return __fdividef(gate, 1.0f + __expf(-p.alpha * gate)) * (up + p.beta);
}

__device__ __forceinline__ uint32_t pack_half(float low, float high) {
  return bits(__floats2half2_rn(low, high));
}

__device__ __forceinline__ uint32_t pack_bf16(float low, float high) {
  const __nv_bfloat162 both = __floats2bfloat162_rn(low, high);
  return reinterpret_cast<const uint32_t&>(both);
}

// A lane's global scales by strip and row: g and g + 8.
template <bool GATED, typename S>
__device__ __forceinline__ void load_scales(const Params& p, const Item& item, int warp, int lane,
                                            float (&scales)[2][2]) {
#pragma unroll
  for (int which = 0; which < 2; ++which) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int strip = strip_of<GATED, S>(p, item, warp, which);
      scales[which][half] = p.global_scales[16 * strip + 8 * half + lane / 4];
    }
  }
}

// Hidden values of an item: fp16, a slab of 64 columns for each warpgroup.
template <int N>
__device__ __forceinline__ void store_hidden(const Params& p, const float* factors,
                                             const float (&scales)[2][2],
                                             const float (&sums)[2][N / 2], uint32_t to, int warp,
                                             int lane) {
  const int t = lane % 4, i = lane % 8, matrix = lane / 8;
  const int chunk = 2 * (warp % 4) + matrix % 2;
  to += (8 * (matrix / 2) + i) * kRowBytes + ((chunk ^ i) << 4);
#pragma unroll
  for (int j = 0; j < N / 8; j += 2) {
    uint32_t packed[2][2] = {};
#pragma unroll
    for (int k = 0; k < 2; ++k) {
      if (8 * (j + k) >= N) continue;
      const float2 f = *reinterpret_cast<const float2*>(factors + 8 * (j + k) + 2 * t);
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const float* s = &sums[half][4 * (j + k)];
        const float gate = scales[0][half], up = scales[1][half];
        const float a = activated(s[0] * (f.x * gate), s[2] * (f.x * up), p);
        const float b = activated(s[1] * (f.y * gate), s[3] * (f.y * up), p);
        packed[k][half] = pack_half(a * p.factor, b * p.factor);
      }
    }
    stmatrix_trans(to + j * 8 * kRowBytes, packed[0][0], packed[0][1], packed[1][0], packed[1][1]);
  }
}

// What the expert gives for an item's rows: bf16, two slabs of 64 columns for each warpgroup.
template <int N>
__device__ __forceinline__ void store_parts(const Params& p, int slab_bytes,
                                            const float (&scales)[2][2],
                                            const float (&sums)[2][N / 2], uint32_t to, int warp,
                                            int lane) {
  const int i = lane % 8, chunk = 4 * (warp % 2) + lane / 8;
  to += warp % 4 / 2 * slab_bytes + i * kRowBytes + ((chunk ^ i) << 4);
#pragma unroll
  for (int j = 0; j < N / 8; ++j) {
    uint32_t packed[2][2];
#pragma unroll
    for (int which = 0; which < 2; ++which) {
      const float* s = &sums[which][4 * j];
      const float a = p.factor * scales[which][0], b = p.factor * scales[which][1];
      packed[which][0] = pack_bf16(s[0] * a, s[1] * a);
      packed[which][1] = pack_bf16(s[2] * b, s[3] * b);
    }
    stmatrix_trans(to + j * 8 * kRowBytes, packed[0][0], packed[0][1], packed[1][0], packed[1][1]);
  }
}

// The item in `slot`, of N rows. Says whether there is another, whose first weights are loaded.
template <bool GATED, typename S, int N>
__device__ __forceinline__ bool run(const Params& p, Shared<S>& shared, int slot, Walk& walk,
                                    int warp, int lane) {
  float sums[2][N / 2] = {};
  const int apart = p.steps * (GATED ? p.strips : 1);
  bool more = true;
  ++walk.items;
  for (int step = 0; step < p.steps; step += 2) {
    if (step == p.steps - 2) {
      // From here on weights are the next item's.
      const Item& next = shared.items[next_slot(shared, walk)];
      more = next.matrix >= 0;
      if (more) walk.source = source_of<GATED, S>(p, next, warp, lane);
    }
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const uint32_t stage = walk.steps % kStages;
      barrier_wait(&shared.full[stage], walk.steps / kStages % 2);
      const uint32_t previous = shared_address(&shared.empty[(walk.steps - 1) % kStages]);
      multiply_step<GATED, N>(sums, walk.weights[half], shared_address(shared.rows[stage]),
                              previous, lane == 0 && (half > 0 || step > 0));
      if (more) load(walk.weights[half], walk.source, apart);
      ++walk.steps;
    }
  }
  const Item& item = shared.items[slot];
  float scales[2][2];
  load_scales<GATED, S>(p, item, warp, lane, scales);
  wgmma_wait<0>();
  if (lane == 0) barrier_arrive(shared_address(&shared.empty[(walk.steps - 1) % kStages]));

  const int group = warp / 4;
  const bool leader = threadIdx.x % 128 == 0;
  const uint32_t to = shared_address(shared.out[group][0]);
  if (leader) asm volatile("cp.async.bulk.wait_group.read 0;" ::: "memory");
  group_sync(group);
  if (GATED) {
    store_hidden<N>(p, shared.factors[slot], scales, sums, to, warp, lane);
  } else {
    store_parts<N>(p, S::kStageBytes, scales, sums, to, warp, lane);
  }
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
  group_sync(group);
  if (leader) {
    constexpr int kSlabs = GATED ? 1 : 2;
    const int first = (S::kGroups * item.tile + group) * kSlabs;
    // In slabs, of which 4 strips are one.
    if (first < p.strips / 4) {
#pragma unroll
      for (int slab = 0; slab < kSlabs; ++slab) {
        const int64_t place = first + slab;
        bulk_store(p.out + (place * p.capacity + item.row) * kRowBytes, shared.out[group][slab],
                   item.valid * kRowBytes);
      }
    }
    asm volatile("cp.async.bulk.commit_group;" ::: "memory");
    barrier_arrive(shared_address(&shared.taken[slot]));
  }
  return more;
}

// The loop for the item's number of rows.
template <bool GATED, typename S, int N, int... MORE>
__device__ __forceinline__ bool run_padded(int n, const Params& p, Shared<S>& shared, int slot,
                                           Walk& walk, int warp, int lane) {
  if constexpr (sizeof...(MORE) > 0) {
    if (n != N) return run_padded<GATED, S, MORE...>(n, p, shared, slot, walk, warp, lane);
  }
  return run<GATED, S, N>(p, shared, slot, walk, warp, lane);
}

template <bool GATED, typename S>
__device__ __forceinline__ void consume(const Params& p, Shared<S>& shared, int warp, int lane) {
  Walk walk;
  bool more = shared.items[next_slot(shared, walk)].matrix >= 0;
  if (more) {
    walk.source = source_of<GATED, S>(p, shared.items[0], warp, lane);
    const int apart = p.steps * (GATED ? p.strips : 1);
    load(walk.weights[0], walk.source, apart);
    load(walk.weights[1], walk.source, apart);
  }
  while (more) {
    const int slot = walk.items % kSlots, n = shared.items[slot].n;
    if constexpr (S::kGroups == 2) {
      more = run_padded<GATED, S, 128, 120, 112, 104, 96, 88, 80, 64>(n, p, shared, slot, walk,
                                                                      warp, lane);
    } else if constexpr (S::kGroups == 3) {
      more = run_padded<GATED, S, 32, 48, 64>(n, p, shared, slot, walk, warp, lane);
    } else {
      more = run_padded<GATED, S, 16, 32, 40>(n, p, shared, slot, walk, warp, lane);
    }
  }
  if (threadIdx.x % 128 == 0) asm volatile("cp.async.bulk.wait_group 0;" ::: "memory");
}

// Ranks the experts by their rows, and numbers their items, `tiles` for each part of their rows.
template <typename S>
__device__ __forceinline__ void list_items(const Params& p, Shared<S>& shared, int tiles) {
  for (int e = threadIdx.x; e < p.experts; e += S::kThreads) {
    const int own = p.counts[e];
    int rank = 0, before = 0, all = 0;
    for (int other = 0; other < p.experts; ++other) {
      const int count = p.counts[other], items = (count + S::kRows - 1) / S::kRows * tiles;
      const bool ahead = count > own || (count == own && other < e);
      rank += ahead;
      before += ahead ? items : 0;
      all += items;
    }
    shared.first[rank] = before;
    shared.expert[rank] = e;
    shared.total = all;
  }
}

template <typename S>
__device__ __forceinline__ Item find_item(const Params& p, const Shared<S>& shared, int tiles,
                                          int number) {
  if (number >= shared.total) return {-1, 0, 0, 0, 0, 0};
  // The last whose first item is not after `number`; experts without rows come after all items.
  int low = 0, high = p.experts;
  while (high - low > 1) {
    const int middle = (low + high) / 2;
    (shared.first[middle] <= number ? low : high) = middle;
  }
  const int expert = shared.expert[low], count = p.counts[expert];
  const int parts = (count + S::kRows - 1) / S::kRows, within = number - shared.first[low];
  const int size = ((count + parts - 1) / parts + 7) / 8 * 8, part = within % parts;
  const int valid = min(size, count - part * size);
  const int row = p.starts[expert] + part * size;
  return {expert, within / parts, row, valid, S::padded(size), part};
}

template <bool GATED, typename S>
__device__ __forceinline__ void feed(const Params& p, Shared<S>& shared, int tiles, int lane) {
  int stage = 0, parity = 1, slot = 0, slot_parity = 1;
  int number = lane == 0 ? atomicAdd(p.next, 1) : 0;
  while (true) {
    number = __shfl_sync(0xFFFFFFFFu, number, 0);
    const Item item = find_item(p, shared, tiles, number);
    if (lane == 0) {
      barrier_wait(&shared.taken[slot], slot_parity);
      shared.items[slot] = item;
      if (GATED && item.matrix >= 0) {
        barrier_expect(&shared.known[slot], item.n * 4);
        bulk_load(shared.factors[slot], p.factors + item.row, item.n * 4, &shared.known[slot]);
      } else {
        barrier_arrive(shared_address(&shared.known[slot]));
      }
      number = atomicAdd(p.next, 1);
    }
    __syncwarp();
    if (++slot == kSlots) slot = 0, slot_parity ^= 1;
    if (item.matrix < 0) break;
    // Lane i asks for strip i's weights some steps before they are loaded, for all of their parts.
    const int strip = strip_of<GATED, S>(p, item, lane / 2, lane % 2);
    const int64_t first = int64_t{strip} * p.steps;
    const uint8_t* from = p.rows + int64_t{item.row} * kRowBytes;
    for (int step = 0; step < p.steps; ++step) {
      if (kAhead > 0 && step % kAhead == 0 && lane < 2 * S::kWarps && item.part == 0) {
        const int steps = min(kAhead, p.steps - step);
        bulk_prefetch(p.codes + (first + step) * kTileCodes, steps * kTileCodes);
        bulk_prefetch(p.scales + (first + step) * kTileScales, steps * kTileScales);
      }
      if (lane == 0) {
        barrier_wait(&shared.empty[stage], parity);
        barrier_expect(&shared.full[stage], item.n * kRowBytes);
        bulk_load(shared.rows[stage], from, item.n * kRowBytes, &shared.full[stage]);
      }
      __syncwarp();
      from += int64_t{p.capacity} * kRowBytes;
      if (++stage == kStages) stage = 0, parity ^= 1;
    }
  }
}

template <bool GATED, typename S>
__global__ void __launch_bounds__(S::kThreads, 1) experts(const __grid_constant__ Params p) {
  extern __shared__ __align__(1024) uint8_t raw[];
  Shared<S>& shared = *reinterpret_cast<Shared<S>*>(raw);
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  constexpr int kStrips = GATED ? S::kWarps : 2 * S::kWarps;
  const int tiles = (p.strips + kStrips - 1) / kStrips;
  if (threadIdx.x == 0) {
    for (int i = 0; i < kStages; ++i) {
      barrier_init(&shared.full[i], 1);
      barrier_init(&shared.empty[i], S::kWarps);
    }
    for (int i = 0; i < kSlots; ++i) {
      barrier_init(&shared.known[i], 1);
      barrier_init(&shared.taken[i], S::kGroups);
    }
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
  }
  list_items(p, shared, tiles);
  __syncthreads();
  if (warp >= S::kWarps) {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 24;");
    if (warp == S::kWarps) feed<GATED>(p, shared, tiles, lane);
  } else {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(S::kRegisters));
    consume<GATED>(p, shared, warp, lane);
  }
}

template <bool GATED, int GROUPS>
cudaError_t launch(const Params& p, int multiprocessors, cudaStream_t stream) {
  using S = Shape<GROUPS>;
  constexpr int kBytes = sizeof(Shared<S>);
  auto* kernel = experts<GATED, S>;
  const cudaError_t error =
      cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kBytes);
  if (error != cudaSuccess) return error;
  kernel<<<multiprocessors, S::kThreads, kBytes, stream>>>(p);
  return cudaGetLastError();
}

}  // namespace

// One grouped product on `stream`; returns a cudaError_t. `gated`: gate and up with the activation
// (two matrices an expert, strips % 4 == 0), else down (one, strips % 8 == 0). `groups`: 2, 3 or 4
// warpgroups, for more than about 64 rows an expert, up to 64 and up to 40. `steps` even. `next`:
// an int that is 0. `factors` may be null where not gated.
extern "C" int winnow_moe_prefill(const uint8_t* codes, const uint8_t* scales,
                                  const float* global_scales, const uint8_t* rows, uint8_t* out,
                                  const int* starts, const int* counts, const float* factors,
                                  int* next, int gated, int groups, int experts, int strips,
                                  int steps, int capacity, float alpha, float limit, float beta,
                                  float factor, int multiprocessors, cudaStream_t stream) {
  if (experts > kMaxExperts || steps % 2 || strips % (gated ? 4 : 8)) return cudaErrorInvalidValue;
  const Params p = {codes,   scales, global_scales, rows,     out,   starts, counts, factors, next,
                    experts, strips, steps,         capacity, alpha, limit,  beta,   factor};
  switch (groups) {
    case 2:
      return gated ? launch<true, 2>(p, multiprocessors, stream)
                   : launch<false, 2>(p, multiprocessors, stream);
    case 3:
      return gated ? launch<true, 3>(p, multiprocessors, stream)
                   : launch<false, 3>(p, multiprocessors, stream);
    case 4:
      return gated ? launch<true, 4>(p, multiprocessors, stream)
                   : launch<false, 4>(p, multiprocessors, stream);
  }
  return cudaErrorInvalidValue;
}

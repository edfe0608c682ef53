// The experts for many rows, on Hopper (sm_90a): wgmma on packed NVFP4 weights.
//
// Owns both products (gate and up with the activation; down), in one launch, over rows that lie
// ordered by expert. Who chose which expert, and the weighted sum, are prefill_rows.cu's; items and
// the feeding of rows are prefill_items.cuh's.
//
// Weights are the A operand, from registers: a lane copies 16 bytes of a packed tile (16 rows x 64
// columns, see winnow/ops/fragments.py) into shared memory of its own, 8 steps ahead, and expands
// the codes into fp16 fragments, exactly. Rows are the N of m64nNk16, from shared memory. Every
// warp owns two strips, hence two products a step of 16; the strips' rows are shuffled by name, so
// that a thread ends with gate and up of the same place. Rows are stored as slabs of 64 columns,
// 128 bytes a row, already swizzled, so that a tile of rows is one contiguous bulk copy.
//
// Copies are cp.async: prefetched registers would share one scoreboard, on which a wait is a wait
// for all of them, and a bulk copy a strip costs the thread that starts it about 80 cycles.
//
// Many rows an expert: two warpgroups and items of up to 128 rows, whose sums fill the registers;
// tensor cores set the pace. Fewer rows: three or four warpgroups, whose latencies hide each
// other, and items of up to 64 or 40 rows. A number of rows has a loop of its own: a branch around
// the products costs more than the columns that it saves. More loops than these, or more products
// under way, take more registers than there are, and ptxas then serialises products (C7512).
//
// Exactness: an E2M1 code's bits, moved, are the fp16 number code * 2^-14, and times an E4M3 scale
// a multiple of 2^-24 with at most 6 bits. Sums are fp32; the global scale and the rows' powers of
// two come in at the end. Which CTA takes an item, and when, changes no result.

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include <cstdint>

#include "prefill_items.cuh"
#include "prefill_results.cuh"

namespace {

constexpr int kInFlight = 1;  // products of 16 columns under way while the next is expanded

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

// A lane's weights of one of two steps, from where its parts of them begin.
__device__ __forceinline__ void load(Weights& w, uint32_t codes, uint32_t scales, int half) {
#pragma unroll
  for (int which = 0; which < 2; ++which) {
    w.codes[which] = shared_16(codes + (2 * which + half) * kTileCodes);
    w.scales[which] = shared_8(scales + (2 * which + half) * kTileScales);
  }
}

// What a warp that multiplies carries from item to item.
struct Walk {
  uint32_t steps = 0, items = 0;  // multiplied so far
  int at = 0;                     // place in the ring of the pair of steps that is multiplied
  // Of what is copied, kAhead pairs before it is multiplied: items so far, pairs that are left of
  // the last one (-1: there was none), its kind; a lane's next 16 bytes of codes and of scales, in
  // units of these.
  uint32_t listed = 0;
  int left = 0;
  int kind, codes, scales;
};

// Starts the copy of the next pair of steps into the place of the ring that the walk is at.
template <typename S>
__device__ __forceinline__ void fetch(const Params& p, Shared<S>& shared, Walk& walk, int warp,
                                      int lane) {
  if (walk.left == 0) {
    const int slot = walk.listed % kSlots;
    barrier_wait(&shared.known[slot], walk.listed / kSlots % 2);
    const Item& item = shared.items[slot];
    walk.kind = item.kind;
    const int steps = p.products[item.kind].steps;
    walk.left = item.matrix < 0 ? -1 : steps / 2;
    walk.codes = strip_of<S>(p, item, warp, 0) * steps * (kTileCodes / 16) + lane;
    walk.scales = strip_of<S>(p, item, warp, lane / 8 % 2) * steps * (kTileScales / 16) + lane % 8;
    ++walk.listed;
  }
  if (walk.left > 0) {
    --walk.left;
    const Product& product = p.products[walk.kind];
    const uint32_t codes = shared_address(shared.codes[warp][walk.at]) + 16 * lane;
    const int apart =
        product.steps * (walk.kind == kGated ? product.strips : 1) * (kTileCodes / 16);
#pragma unroll
    for (int which = 0; which < 2; ++which) {
      const uint8_t* from = product.codes + int64_t{walk.codes + which * apart} * 16;
      copy_16(codes + 2 * which * kTileCodes, from);
      copy_16(codes + (2 * which + 1) * kTileCodes, from + kTileCodes);
    }
    if (lane < 16) {
      copy_16(shared_address(shared.scales[warp][walk.at]) + 16 * lane,
              product.scales + int64_t{walk.scales} * 16);
    }
    walk.codes += 2 * kTileCodes / 16;
    walk.scales += 2 * kTileScales / 16;
  }
  copies_commit();
}

__device__ __forceinline__ uint32_t word_of(const uint4& v, int i) {
  return i == 0 ? v.x : i == 1 ? v.y : i == 2 ? v.z : v.w;
}

// One step of 64 columns: four products of 16 for each of two strips. `rows`: the stage's address.
// `previous`: the barrier of the stage before, to be given back if `give`.
template <int N>
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
    // Rows g of both strips, then rows g + 8: a thread ends with gate and up of one place.
    const uint32_t even[4] = {a[0][0], a[1][0], a[0][2], a[1][2]};
    const uint32_t odd[4] = {a[0][1], a[1][1], a[0][3], a[1][3]};
    wgmma_fence();
    multiply(sums[0], even, first + 2 * i);
    multiply(sums[1], odd, first + 2 * i);
    wgmma_commit();
    wgmma_wait<kInFlight>();
    // What came before these products has been read by now.
    if (i == kInFlight && give) barrier_arrive(previous);
  }
}

// A lane's weights of a step of the pair that the walk is at.
template <typename S>
__device__ __forceinline__ void load(const Shared<S>& shared, const Walk& walk, Weights& w,
                                     int half, int warp, int lane) {
  load(w, shared_address(shared.codes[warp][walk.at]) + 16 * lane,
       shared_address(shared.scales[warp][walk.at]) + 8 * (lane / 4), half);
}

// The item in `slot`, of N rows.
template <typename S, int N>
__device__ __forceinline__ void run(const Params& p, Shared<S>& shared, int slot, Walk& walk,
                                    int warp, int lane) {
  float sums[2][N / 2] = {};
  Weights weights[S::kLate ? 1 : 2];
  if (!S::kLate) load(shared, walk, weights[0], 0, warp, lane);
  const int steps = p.products[shared.items[slot].kind].steps;
  for (int step = 0; step < steps; step += 2) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const uint32_t stage = walk.steps % kStages;
      barrier_wait(&shared.full[stage], walk.steps / kStages % 2);
      if (S::kLate) {
        if (half == 0) {
          copies_wait<kAhead - 1>();
          __syncwarp();
        }
        load(shared, walk, weights[0], half, warp, lane);
        if (half == 1) {
          __syncwarp();
          fetch(p, shared, walk, warp, lane);
          walk.at = walk.at + 1 == kAhead ? 0 : walk.at + 1;
        }
      } else if (half == 0) {
        load(shared, walk, weights[1], 1, warp, lane);
      } else {
        __syncwarp();  // all lanes have read
        fetch(p, shared, walk, warp, lane);
        copies_wait<kAhead - 1>();
        __syncwarp();  // scales are copied for one another
        walk.at = walk.at + 1 == kAhead ? 0 : walk.at + 1;
        if (step + 2 < steps) load(shared, walk, weights[0], 0, warp, lane);
      }
      const uint32_t previous = shared_address(&shared.empty[(walk.steps - 1) % kStages]);
      multiply_step<N>(sums, weights[S::kLate ? 0 : half], shared_address(shared.rows[stage]),
                       previous, lane == 0 && (half > 0 || step > 0));
      ++walk.steps;
    }
  }
  const Item& item = shared.items[slot];
  float scales[2][2];
  load_scales<S>(p, item, warp, lane, scales);
  wgmma_wait<0>();
  if (lane == 0) barrier_arrive(shared_address(&shared.empty[(walk.steps - 1) % kStages]));

  const int group = warp / 4;
  const int row = item.row, valid = item.valid, matrix = item.matrix;
  const bool gated = item.kind == kGated;
  const int slabs = gated ? 1 : 2, place = (S::kGroups * item.tile + group) * slabs;
  const Product& product = p.products[item.kind];
  const uint32_t to = shared_address(shared.out[group][0]);
  group_sync(group);
  if (gated) {
    store_hidden<N>(p, shared.factors[slot], scales, sums, to, warp, lane);
  } else {
    store_parts<N>(p, S::kStageBytes, scales, sums, to, warp, lane);
  }
  group_sync(group);
  const int thread = threadIdx.x % 128;
  if (thread == 0) barrier_arrive(shared_address(&shared.taken[slot]));
  // Ordinary stores: to wait for a bulk store would be to wait for the copies ahead, too.
  if (place < product.strips / 4) {
    for (int slab = 0; slab < slabs; ++slab) {
      uint8_t* out = product.out + (int64_t{place + slab} * p.capacity + row) * kRowBytes;
#pragma unroll
      for (int i = 0; i < (N + 15) / 16; ++i) {
        const int chunk = thread + 128 * i;
        if (chunk < 8 * valid) {
          const uint4 v = shared_16(to + slab * S::kStageBytes + 16 * chunk);
          *reinterpret_cast<uint4*>(out + 16 * chunk) = v;
        }
      }
    }
  }
  if (gated) {
    // Bulk copies of other CTAs read these hidden values.
    __threadfence();
    asm volatile("fence.proxy.async;" ::: "memory");
    group_sync(group);
    if (thread == 0) add_release(p.done + matrix);
  }
}

// The loop for the item's number of rows.
template <int GROUPS, int... LOOPS>
__device__ __forceinline__ void consume(const Params& p, Shared<Shape<GROUPS, LOOPS...>>& shared,
                                        int warp, int lane) {
  using S = Shape<GROUPS, LOOPS...>;
  Walk walk;
  for (int i = 0; i < kAhead; ++i) {
    walk.at = i;
    fetch(p, shared, walk, warp, lane);
  }
  copies_wait<kAhead - 1>();
  __syncwarp();
  walk.at = 0;
  while (true) {
    const int slot = walk.items % kSlots;
    barrier_wait(&shared.known[slot], walk.items / kSlots % 2);
    if (shared.items[slot].matrix < 0) break;
    const int n = shared.items[slot].n;
    ++walk.items;
    (void)((n == LOOPS && (run<S, LOOPS>(p, shared, slot, walk, warp, lane), true)) || ...);
  }
}

template <typename S>
__global__ void __launch_bounds__(S::kThreads, 1) experts(const __grid_constant__ Params p) {
  extern __shared__ __align__(1024) uint8_t raw[];
  Shared<S>& shared = *reinterpret_cast<Shared<S>*>(raw);
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  if (threadIdx.x == 0) {
    for (int i = 0; i < kStages; ++i) {
      barrier_init(&shared.full[i], 1);
      barrier_init(&shared.empty[i], S::kWarps);
    }
    for (int i = 0; i < kSlots; ++i) {
      barrier_init(&shared.known[i], 1);
      barrier_init(&shared.taken[i], S::kGroups + 1);
      barrier_init(&shared.late[i], 1);
    }
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
  }
  list_parts(p, shared);
  __syncthreads();
  if (warp >= S::kWarps) {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 24;");
    if (warp == S::kWarps && lane == 0) list(p, shared);
    if (warp == S::kWarps + 1 && lane == 0) feed(p, shared);
  } else {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(S::kRegisters));
    consume(p, shared, warp, lane);
  }
}

template <typename S>
cudaError_t launch(const Params& p, int multiprocessors, cudaStream_t stream) {
  constexpr int kBytes = sizeof(Shared<S>);
  auto* kernel = experts<S>;
  const cudaError_t error =
      cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kBytes);
  if (error != cudaSuccess) return error;
  kernel<<<multiprocessors, S::kThreads, kBytes, stream>>>(p);
  return cudaGetLastError();
}

using Fewest = Shape<4, 8, 40>;
using Few = Shape<4, 16, 40>;
using Some = Shape<3, 24, 32, 40, 48, 64>;
using Many = Shape<2, 64, 80, 88, 96, 104, 112, 120, 128>;

}  // namespace

// Both products of all experts on `stream`; returns a cudaError_t. `gate_up`: two matrices an
// expert, of `width` outputs each; `down`: one of `hidden` outputs. `rows` [hidden / 64, capacity,
// 128], `inner` [width / 64, capacity, 128], `out` like `rows`, which it may be. `next`: 1 +
// experts ints that are 0. `shape`: 0 to 3, for more and more rows an expert, about 4, 16, 44 and
// beyond; it changes no result.
extern "C" int winnow_moe_prefill(const uint8_t* gate_up_codes, const uint8_t* gate_up_scales,
                                  const float* gate_up_globals, const uint8_t* down_codes,
                                  const uint8_t* down_scales, const float* down_globals,
                                  const uint8_t* rows, uint8_t* inner, uint8_t* out,
                                  const int* starts, const int* counts, const float* factors,
                                  int* next, int shape, int experts, int hidden, int width,
                                  int capacity, float alpha, float limit, float beta,
                                  float inner_factor, float out_factor, int multiprocessors,
                                  cudaStream_t stream) {
  if (experts > kMaxExperts || hidden % 128 || width % 128) return cudaErrorInvalidValue;
  const Params p = {
      {{gate_up_codes, gate_up_scales, gate_up_globals, rows, inner, width / 16, hidden / 64,
        inner_factor},
       {down_codes, down_scales, down_globals, inner, out, hidden / 16, width / 64, out_factor}},
      starts, counts, factors, next, next + 1, experts, capacity, alpha, limit, beta};
  switch (shape) {
    case 0:
      return launch<Fewest>(p, multiprocessors, stream);
    case 1:
      return launch<Few>(p, multiprocessors, stream);
    case 2:
      return launch<Some>(p, multiprocessors, stream);
    case 3:
      return launch<Many>(p, multiprocessors, stream);
  }
  return cudaErrorInvalidValue;
}

// The experts for many rows, on Hopper (sm_90a): wgmma on packed NVFP4 weights.
//
// Owns both products (gate and up with the activation; down), in one launch, over rows that lie
// ordered by expert. That order and the weighted sum are prefill_rows.cu's; items, what feeds them
// and what stores their results are prefill_items.cuh's.
//
// Weights are the A operand, from registers: a lane reads 16 bytes of a packed tile (16 rows x 64
// columns, see winnow/ops/fragments.py) from shared memory and expands the codes into fp16
// fragments, exactly. Rows are the N of m64nNk16, from shared memory. Every warp owns two strips,
// hence two products a step of 16; the strips' rows are shuffled by name, so that a thread ends
// with gate and up of the same place. Rows are stored as slabs of 64 columns, 128 bytes a row,
// already swizzled, so that a tile of rows is one contiguous bulk copy.
//
// Whatever is not multiplying is done by threads of a warpgroup of their own, one each: items,
// weights (a box of a tensor map has those of all warps), rows, results.
//
// Many rows an expert: two warpgroups and items of up to 128 rows, whose sums fill the registers;
// tensor cores set the pace. Fewer rows: three or four warpgroups, whose latencies hide each
// other, and items of up to 80, 64 or 32 rows. A number of rows has a loop of its own: a branch
// around the products costs more than the columns that it saves. Most other sets of loops, and more
// products under way, make ptxas serialise products for want of registers (C7512).
//
// Exactness: an E2M1 code's bits, moved, are the fp16 number code * 2^-14, and times an E4M3 scale
// a multiple of 2^-24 with at most 6 bits. Sums are fp32; the global scale and the rows' powers of
// two come in at the end. Which CTA takes an item, and when, changes no result.

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include <cstdint>

#include "prefill_items.cuh"
#include "prefill_maps.cuh"
#include "prefill_results.cuh"

namespace {

constexpr int kInFlight = 1;  // products of 16 columns under way while the next is expanded

// Four E4M3 bytes as fp16.
__device__ __forceinline__ void convert(uint32_t four, __half2& low, __half2& high) {
  uint32_t a, b;
  from_e4m3(four, a, b);
  low = halves(a), high = halves(b);
}

// One lane's part of a step of 64 columns of two strips.
struct Weights {
  uint4 codes[2];
  uint2 scales[2];
};

// What a warp that multiplies carries from item to item.
struct Walk {
  int stage = 0, parity = 0;  // of the pair of steps that comes next
  uint32_t items = 0;         // multiplied so far
};

__device__ __forceinline__ uint32_t word_of(const uint4& v, int i) {
  return i == 0 ? v.x : i == 1 ? v.y : i == 2 ? v.z : v.w;
}

// One step of 64 columns: four products of 16 for each of two strips. `rows`: the stage's address.
// `previous`: the barrier of the stage before, to be given back if `give`: its products have ended
// by then, which every lane's share of its weights has gone into.
template <int N>
__device__ __forceinline__ void multiply_step(float (&sums)[2][N / 2], const Weights& w,
                                              uint32_t rows, uint32_t previous, bool give,
                                              int lane) {
  // 16 columns are two of a descriptor's units.
  const uint64_t first = descriptor(rows);
  __half2 scale[2][2][2];
#pragma unroll
  for (int which = 0; which < 2; ++which) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      convert(half == 0 ? w.scales[which].x : w.scales[which].y, scale[which][half][0],
              scale[which][half][1]);
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
    if (i == kInFlight && give) barrier_arrive_warp(previous, lane);
  }
}

// A lane's weights of one of a stage's two steps.
template <typename S>
__device__ __forceinline__ Weights load(const Stage<S>& stage, int step, int warp, int lane) {
  Weights w;
#pragma unroll
  for (int which = 0; which < 2; ++which) {
    w.codes[which] =
        shared_16(shared_address(stage.codes[which][warp]) + step * kTileCodes + 16 * lane);
    w.scales[which] =
        shared_8(shared_address(stage.scales[which][warp]) + step * kTileScales + lane / 4 * 8);
  }
  return w;
}

// The item in `slot`, of N rows.
template <typename S, int N>
__device__ __forceinline__ void run(const Params& p, Shared<S>& shared, int slot, Walk& walk,
                                    int warp, int lane) {
  float sums[2][N / 2] = {}, scales[2][2];
  const Item& item = shared.items[slot];
  const int pairs = p.products[item.product].pairs;
  load_scales<S>(p, item, warp, lane, scales);
  uint32_t previous = 0;
  for (int pair = 0; pair < pairs; ++pair) {
    const Stage<S>& stage = shared.stages[walk.stage];
    barrier_wait(shared.full[walk.stage], walk.parity);
    multiply_step<N>(sums, load<S>(stage, 0, warp, lane), shared_address(stage.rows[0]), previous,
                     pair > 0, lane);
    previous = shared_address(&shared.empty[walk.stage]);
    if (++walk.stage == S::kStages) walk.stage = 0, walk.parity ^= 1;
    multiply_step<N>(sums, load<S>(stage, 1, warp, lane), shared_address(stage.rows[1]), 0, false,
                     lane);
  }
  wgmma_wait<0>();
  barrier_arrive_warp(previous, lane);
  // The item before has left.
  barrier_wait(shared.freed, (walk.items & 1) ^ 1);
  const uint32_t to = shared_address(shared.out[warp / 4][0]);
  if (item.kind == kGated) {
    store_hidden<N>(p, shared.factors[slot], scales, sums, to, warp, lane);
  } else {
    store_parts<N>(p, S::kStepBytes, scales, sums, to, warp, lane);
  }
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
  __syncwarp();
  barrier_arrive_warp(shared_address(&shared.stored), lane);
}

// The loop for the item's number of rows.
template <int GROUPS, int... LOOPS>
__device__ __forceinline__ void consume(const Params& p, Shared<Shape<GROUPS, LOOPS...>>& shared,
                                        int warp, int lane) {
  using S = Shape<GROUPS, LOOPS...>;
  Walk walk;
  while (true) {
    const int slot = walk.items % kSlots;
    barrier_wait(shared.known[slot], walk.items / kSlots % 2);
    if (shared.items[slot].expert < 0) break;
    const int n = shared.items[slot].n;
    (void)((n == LOOPS && (run<S, LOOPS>(p, shared, slot, walk, warp, lane), true)) || ...);
    ++walk.items;
  }
}

template <typename S>
__global__ void __launch_bounds__(S::kThreads, 1)
    experts(const __grid_constant__ Params p, const __grid_constant__ Maps maps) {
  extern __shared__ __align__(1024) uint8_t raw[];
  Shared<S>& shared = *reinterpret_cast<Shared<S>*>(raw);
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  if (threadIdx.x == 0) {
    for (int i = 0; i < S::kStages; ++i) {
      barrier_init(shared.full[i], 2);
      barrier_init(shared.empty[i], kWarpArrivals * S::kWarps);
    }
    for (int i = 0; i < kSlots; ++i) {
      barrier_init(shared.known[i], 1);
      barrier_init(shared.taken[i], 3);
      barrier_init(shared.late[i], 1);
    }
    barrier_init(shared.stored, kWarpArrivals * S::kWarps);
    barrier_init(shared.freed, 1);
    barriers_made();
  }
  list_parts(p, shared);
  __syncthreads();
  if (warp >= S::kWarps) {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(S::kOtherRegisters));
    if (lane == 0 && warp == S::kWarps) list(p, shared);
    if (lane == 0 && warp == S::kWarps + 1) feed_weights(p, maps, shared);
    if (lane == 0 && warp == S::kWarps + 2) feed_rows(p, shared);
    if (lane == 0 && warp == S::kWarps + 3) store(p, shared);
  } else {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(S::kRegisters));
    consume(p, shared, warp, lane);
  }
}

template <typename S>
cudaError_t launch(const Params& p, const Packed& packed, int ctas, cudaStream_t stream) {
  constexpr int kBytes = sizeof(Shared<S>);
  static_assert(kBytes <= kMaxShared);
  Maps maps;
  cudaError_t error = describe(maps, p, packed, S::kWarps);
  if (error != cudaSuccess) return error;
  auto* kernel = experts<S>;
  error = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kBytes);
  if (error != cudaSuccess) return error;
  kernel<<<ctas, S::kThreads, kBytes, stream>>>(p, maps);
  return cudaGetLastError();
}

using Few = Shape<4, 8, 16, 24, 32>;
using Some = Shape<3, 8, 16, 24, 32, 40, 48, 64>;
using More = Shape<3, 56, 64, 72, 80>;
using Many = Shape<2, 64, 72, 80, 88, 96, 104, 112, 120, 128>;

}  // namespace

// Packed weights of one stack of matrices.
struct WinnowMoeStack {
  const uint8_t* codes;
  const uint8_t* scales;
  const float* globals;
};

// Both products of all experts on `stream`; returns a cudaError_t. `stacks`: gate_up, two matrices
// an expert, of `width` outputs each; down, one of `hidden` outputs; the same of a shared expert,
// `shared_width` wide, or none where that is 0. `rows` [hidden / 64, capacity, 128], `inner` [the
// larger width / 64, capacity, 128], `out` like `rows`, which it may be. Of `starts` and `counts` a
// shared expert has the last. `next`: an int for all and one for each expert, that are 0. `shape`:
// 0 to 3, for more and more rows an expert; it changes no result.
extern "C" int winnow_moe_prefill(const WinnowMoeStack* stacks, const uint8_t* rows, uint8_t* inner,
                                  uint8_t* out, const int* starts, const int* counts,
                                  const float* factors, int* next, int shape, int experts,
                                  int hidden, int width, int shared_width, int capacity,
                                  float alpha, float limit, float beta, float inner_factor,
                                  float out_factor, int ctas, cudaStream_t stream) {
  if (experts > kMaxExperts || hidden % 128 || width % 128 || shared_width % 128)
    return cudaErrorInvalidValue;
  Params p = {{}, starts, counts, factors, next, next + 1, experts, shared_width > 0, capacity,
              alpha, limit, beta};
  Packed packed = {};
  for (int i = 0; i < (p.shared ? kProducts : kShared); ++i) {
    const int inputs = i < kShared ? width : shared_width, matrices = i < kShared ? experts : 1;
    packed.codes[i] = stacks[i].codes, packed.scales[i] = stacks[i].scales;
    if (i % 2 == kGated) {
      const int strips = inputs / 16;
      p.products[i] = {stacks[i].globals, rows,   inner, strips, hidden / 128,
                       2 * matrices * strips, inner_factor};
    } else {
      const int strips = hidden / 16;
      p.products[i] = {stacks[i].globals, inner,  out, strips, inputs / 128,
                       matrices * strips, out_factor};
    }
  }
  switch (shape) {
    case 0:
      return launch<Few>(p, packed, ctas, stream);
    case 1:
      return launch<Some>(p, packed, ctas, stream);
    case 2:
      return launch<More>(p, packed, ctas, stream);
    case 3:
      return launch<Many>(p, packed, ctas, stream);
  }
  return cudaErrorInvalidValue;
}

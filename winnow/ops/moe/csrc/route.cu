// The router of the experts for many rows, on Hopper (sm_90a): scores and choice in one launch.
//
// A cluster of CTAs owns a tile of rows. Each CTA has all experts and some of the hidden columns
// (route_products.cuh); their sums meet in shared memory, and every CTA chooses for its share of
// the rows. Orders no pairs: prefill_rows.cu does.
//
// A row's bits hang on the hidden size alone: the columns are cut into kSections sections, whose
// sums are added two by two, these one after another to halves, and these. A CTA has one section,
// or such a two, or half of all.

#include <cuda_runtime.h>

#include <cstdint>

#include "route_products.cuh"

namespace {

constexpr unsigned kAll = 0xFFFFFFFFu;
constexpr int kMaxTaken = 8;

struct Params {
  const float* bias;
  int rows, slabs;  // of kColumns columns
  int experts, taken;
  int slots;  // of a row in what is written: `taken`, or one more for an expert that all rows visit
  float routed_scale;
  int* chosen;  // [rows, slots]
  float* shares;
};

// `RELEASE`: what was written before can be read after the others have waited.
template <bool RELEASE>
__device__ __forceinline__ void cluster_arrive() {
  if (RELEASE) {
    asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory");
  } else {
    asm volatile("barrier.cluster.arrive.relaxed.aligned;" ::: "memory");
  }
}

__device__ __forceinline__ void cluster_wait() {
  asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory");
}

// What lies at this address in the shared memory of another of the cluster's CTAs.
__device__ __forceinline__ float4 of_cta(uint32_t address, int cta) {
  uint32_t there;
  float4 v;
  asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(there) : "r"(address), "r"(cta));
  asm volatile("ld.shared::cluster.v4.f32 {%0, %1, %2, %3}, [%4];"
               : "=f"(v.x), "=f"(v.y), "=f"(v.z), "=f"(v.w)
               : "r"(there)
               : "memory");
  return v;
}

__device__ __forceinline__ float4 plus(float4 a, float4 b) {
  return make_float4(a.x + b.x, a.y + b.y, a.z + b.z, a.w + b.w);
}

// A lane's logits of a row: experts 128 i + 4 lane to 128 i + 4 lane + 3.
template <typename T>
__device__ __forceinline__ void gather_logits(Shared<T>& shared, int row, int lane,
                                              float (&logits)[T::kExperts / 32]) {
#pragma unroll
  for (int i = 0; i < T::kExperts / 128; ++i) {
    const uint32_t from = shared_address(&shared.sums[row][128 * i + 4 * lane]);
    float4 part[T::kCtas], half[2];
#pragma unroll
    for (int cta = 0; cta < T::kCtas; ++cta) part[cta] = of_cta(from, cta);
#pragma unroll
    for (int j = 0; j < T::kPairs; ++j) {
      if (T::kSectionsOwn == 1) part[j] = plus(part[2 * j], part[2 * j + 1]);
      float4& to = half[2 * j / T::kPairs];
      to = j % (T::kPairs / 2) == 0 ? part[j] : plus(to, part[j]);
    }
    const float4 all = plus(half[0], half[1]);
    logits[4 * i] = all.x, logits[4 * i + 1] = all.y;
    logits[4 * i + 2] = all.z, logits[4 * i + 3] = all.w;
  }
}

// A float's order as an unsigned integer's; above 0 for every number.
__device__ __forceinline__ uint32_t ordered(float x) {
  const uint32_t b = __float_as_uint(x);
  return b & 0x80000000u ? ~b : b | 0x80000000u;
}

// A lane's scores of a row and their ranks, 0 for what may not be chosen (any more).
template <int OWN>
struct Candidates {
  float scores[OWN];
  uint32_t ranks[OWN];
};

template <int OWN>
__device__ __forceinline__ Candidates<OWN> rank(const float (&logits)[OWN],
                                                const float (&bias)[OWN], unsigned there) {
  Candidates<OWN> c;
#pragma unroll
  for (int i = 0; i < OWN; ++i) {
    c.scores[i] = 1.0f / (1.0f + expf(-logits[i]));
    const float rank = c.scores[i] + bias[i];
    c.ranks[i] = there >> i & 1 ? ordered(rank == rank ? rank : -INFINITY) : 0u;
  }
  return c;
}

// A lane's i-th expert.
__device__ __forceinline__ int expert_at(int i, int lane) {
  return 128 * (i / 4) + 4 * lane + i % 4;
}

// The best of a warp's candidates, which then is none any more: lower ids first where equal.
template <int OWN>
__device__ __forceinline__ int take(Candidates<OWN>& c, int lane, float& score) {
  uint32_t best = 0;
  int index = INT32_MAX;
  float own = 0.0f;
#pragma unroll
  for (int i = 0; i < OWN; ++i) {
    // Ids rise with i, so an equal rank is not taken.
    if (c.ranks[i] > best) best = c.ranks[i], index = expert_at(i, lane), own = c.scores[i];
  }
  const uint32_t most = __reduce_max_sync(kAll, best);
  const int taken = __reduce_min_sync(kAll, best == most ? index : INT32_MAX);
  score = __shfl_sync(kAll, own, taken % 128 / 4);
#pragma unroll
  for (int i = 0; i < OWN; ++i) {
    if (expert_at(i, lane) == taken) c.ranks[i] = 0;
  }
  return taken;
}

// The CTA's share of the rows, kAtOnce of them a warp at a time, so that their latencies hide each
// other: the `taken` experts of the largest rank, best first, and their shares.
template <typename T>
__device__ __forceinline__ void choose_rows(const Params& p, Shared<T>& shared, int cta,
                                            int first_row, int warp, int lane) {
  constexpr int kOwn = T::kExperts / 32, kAtOnce = T::kAtOnce;
  float bias[kOwn];
  unsigned there = 0;
#pragma unroll
  for (int i = 0; i < kOwn; ++i) {
    const int expert = expert_at(i, lane);
    bias[i] = expert < p.experts ? p.bias[expert] : 0.0f;
    there |= (expert < p.experts) << i;
  }
  for (int first = kAtOnce * warp; first < T::kRowsOwn; first += kAtOnce * T::kWarps) {
    const int row = T::kRowsOwn * cta + first;
    if (first_row + row >= p.rows) break;
    Candidates<kOwn> c[kAtOnce];
    float logits[kAtOnce][kOwn];
#pragma unroll
    for (int j = 0; j < kAtOnce; ++j) gather_logits(shared, row + j, lane, logits[j]);
#pragma unroll
    for (int j = 0; j < kAtOnce; ++j) c[j] = rank(logits[j], bias, there);
    int own[kAtOnce] = {};
    float share[kAtOnce] = {}, total[kAtOnce] = {};
    for (int number = 0; number < p.taken; ++number) {
#pragma unroll
      for (int j = 0; j < kAtOnce; ++j) {
        float score;
        const int taken = take(c[j], lane, score);
        if (number == lane) own[j] = taken, share[j] = score;
        total[j] += score;
      }
    }
#pragma unroll
    for (int j = 0; j < kAtOnce; ++j) {
      if (first_row + row + j >= p.rows || lane >= p.slots) break;
      const int64_t at = static_cast<int64_t>(first_row + row + j) * p.slots + lane;
      p.chosen[at] = lane < p.taken ? own[j] : p.experts;
      p.shares[at] = lane < p.taken ? share[j] / total[j] * p.routed_scale : 1.0f;
    }
  }
}

// What orders the pairs may take its place on the machine: it waits for this launch by itself.
__device__ __forceinline__ void let_next_launch_begin() {
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
}

template <typename T>
__global__ void __launch_bounds__(T::kThreads, 1)
    route(const __grid_constant__ Params p, const __grid_constant__ CUtensorMap rows,
          const __grid_constant__ CUtensorMap router) {
  extern __shared__ __align__(1024) uint8_t raw[];
  Shared<T>& shared = *reinterpret_cast<Shared<T>*>(raw);
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int cta = blockIdx.x % T::kCtas, first_row = blockIdx.x / T::kCtas * T::kRows;
  const int first_section = cta * T::kSectionsOwn;
  if (threadIdx.x == 0) {
    tensor_prefetch(rows);
    tensor_prefetch(router);
    for (int i = 0; i < T::kStages; ++i) {
      barrier_init(shared.full[i], 1);
      barrier_init(shared.empty[i], kWarpArrivals * T::kWarps);
    }
    barriers_made();
  }
  __syncthreads();
  if (warp >= T::kWarps) {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(T::kOtherRegisters));
    if (warp == T::kWarps && lane == 0)
      feed(rows, router, p.slabs, shared, first_row, first_section);
    __syncwarp();
    cluster_arrive<false>();
    cluster_wait();
    cluster_arrive<false>();
  } else {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(T::kRegisters));
    multiply<T>(p.slabs, shared, first_section, warp, lane);
    let_next_launch_begin();
    cluster_arrive<true>();
    cluster_wait();
    choose_rows(p, shared, cta, first_row, warp, lane);
    __syncwarp();
    cluster_arrive<false>();
  }
  // No CTA leaves while others read its sums: who arrived has used what it read.
  cluster_wait();
}

// Boxes of 128 bytes by `box` rows of numbers [rows, columns], swizzled. What is not there is 0.
cudaError_t describe(CUtensorMap& map, CUtensorMapDataType type, int bytes, const void* from,
                     int columns, int rows, int64_t stride, int box) {
  Encode encode;
  const cudaError_t error = find_encode(&encode);
  if (error != cudaSuccess) return error;
  const cuuint64_t sizes[2] = {static_cast<cuuint64_t>(columns), static_cast<cuuint64_t>(rows)};
  const cuuint64_t strides[1] = {static_cast<cuuint64_t>(stride * bytes)};
  const cuuint32_t boxes[2] = {static_cast<cuuint32_t>(kRowBytes / bytes),
                               static_cast<cuuint32_t>(box)};
  const cuuint32_t steps[2] = {1, 1};
  const CUresult done = encode(&map, type, 2, const_cast<void*>(from), sizes, strides, boxes, steps,
                               CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B,
                               CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
                               CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  return done == CUDA_SUCCESS ? cudaSuccess : cudaErrorInvalidValue;
}

// Clusters of `grid` CTAs, and a kernel that may be of them.
template <typename T>
cudaError_t configure(cudaLaunchConfig_t& config, cudaLaunchAttribute& cluster, int grid) {
  constexpr int kBytes = sizeof(Shared<T>);
  static_assert(kBytes <= 227 * 1024);
  static_assert(sizeof(Shared<T>::sums) <= sizeof(Shared<T>::stages));
  cudaError_t error =
      cudaFuncSetAttribute(route<T>, cudaFuncAttributeMaxDynamicSharedMemorySize, kBytes);
  if (error != cudaSuccess) return error;
  error = cudaFuncSetAttribute(route<T>, cudaFuncAttributeNonPortableClusterSizeAllowed, 1);
  cluster.id = cudaLaunchAttributeClusterDimension;
  cluster.val.clusterDim.x = T::kCtas;
  cluster.val.clusterDim.y = cluster.val.clusterDim.z = 1;
  config.gridDim = grid;
  config.blockDim = T::kThreads;
  config.dynamicSmemBytes = kBytes;
  config.attrs = &cluster;
  config.numAttrs = 1;
  return error;
}

struct Inputs {
  const void* x;
  int64_t stride;
  const float* router;
};

template <typename T>
cudaError_t launch(const Params& p, const Inputs& inputs, cudaStream_t stream) {
  CUtensorMap rows, router;
  const int columns = p.slabs * kColumns;
  cudaError_t error = describe(rows, CU_TENSOR_MAP_DATA_TYPE_BFLOAT16, 2, inputs.x, columns, p.rows,
                               inputs.stride, T::kRows);
  if (error != cudaSuccess) return error;
  error = describe(router, CU_TENSOR_MAP_DATA_TYPE_FLOAT32, 4, inputs.router, columns, p.experts,
                   columns, T::kExperts);
  if (error != cudaSuccess) return error;
  cudaLaunchConfig_t config = {};
  cudaLaunchAttribute cluster = {};
  error = configure<T>(config, cluster, (p.rows + T::kRows - 1) / T::kRows * T::kCtas);
  if (error != cudaSuccess) return error;
  config.stream = stream;
  return cudaLaunchKernelEx(&config, route<T>, p, rows, router);
}

template <typename T>
cudaError_t count_clusters(int* count) {
  cudaLaunchConfig_t config = {};
  cudaLaunchAttribute cluster = {};
  const cudaError_t error = configure<T>(config, cluster, T::kCtas);
  return error != cudaSuccess ? error : cudaOccupancyMaxActiveClusters(count, route<T>, &config);
}

// For more and more rows; then the same for more than 128 experts.
using Few = Tile<2, 64, 1>;
using Some = Tile<2, 128, 2>;
using Many = Tile<2, 128, 8>;
using FewWide = Tile<4, 32, 1>;
using ManyWide = Tile<4, 32, 8>;

}  // namespace

// x: bf16 [rows, hidden], rows `stride` elements apart, 16-byte aligned like the stride in bytes;
// router: fp32 [experts, hidden]; hidden a multiple of 64, experts at most 256, taken at most 8.
// chosen, shares: [rows, slots]; slots is `taken`, or one more: then the last of every row is the
// number of experts, with a share of 1. `form`: 0 to 2, for more and more rows; it changes no
// result. Returns a cudaError_t.
extern "C" int winnow_moe_route(const void* x, int64_t stride, const float* router,
                                const float* bias, int rows, int hidden, int experts, int taken,
                                int slots, float routed_scale, int form, int* chosen,
                                float* shares, cudaStream_t stream) {
  if (experts > 256 || taken > kMaxTaken || taken > experts || hidden % kColumns ||
      (slots != taken && slots != taken + 1) || form < 0 || form > 2)
    return cudaErrorInvalidValue;
  const Params p = {bias, rows, hidden / kColumns, experts, taken, slots, routed_scale, chosen,
                    shares};
  const Inputs inputs = {x, stride, router};
  if (experts > 128)
    return form < 2 ? launch<FewWide>(p, inputs, stream) : launch<ManyWide>(p, inputs, stream);
  return form == 0   ? launch<Few>(p, inputs, stream)
         : form == 1 ? launch<Some>(p, inputs, stream)
                     : launch<Many>(p, inputs, stream);
}

// Into `count`, how many clusters of the first form the device can hold at a time: 0 where its
// parts have too few multiprocessors. Returns a cudaError_t.
extern "C" int winnow_moe_route_clusters(int experts, int* count) {
  return experts <= 128 ? count_clusters<Few>(count) : count_clusters<FewWide>(count);
}

// linear for a few rows of bf16 activations over packed MXFP8 weights, on Hopper (sm_90a).
//
// Work. A tile is up to 16 strips, one for each warp, by N rows. The CTAs of a cluster divide its K
// in slices. Each sends every other the sums that the other is to add up, into its shared memory;
// when all have come they are added, always in the order of K. Up to 48 rows a barrier there counts
// the bytes that come; at 64, where that is slower, it is a barrier of the cluster. Clusters take
// tiles in turn. Weights are asked for before the launch waits for the one before it.

#include "calls.cuh"
#include "cluster.cuh"

namespace {

// Places of 16 bytes a lane that a warp needs for sums of N rows: of every slice, those that one
// CTA adds up.
__host__ __device__ constexpr int places_of(int n, int slices) {
  return slices * ((n / 8 + slices - 1) / slices);
}

constexpr int kMostSlices = 4;

__host__ __device__ constexpr int most_places(int n) {
  int most = 0;
  for (int slices = 2; slices <= kMostSlices; ++slices)
    most = places_of(n, slices) > most ? places_of(n, slices) : most;
  return most;
}

// Behind them lies the barrier that counts what has come.
__host__ __device__ constexpr int sums_bytes(int n, int groups) {
  return 4 * groups * most_places(n) * 512;
}

// A CTA takes its slice of one tile after another.
struct Order {
  struct Place {
    int tile, piece;
  };
  int begin, end, apart;  // of the slice, and from tile to tile

  __device__ __forceinline__ bool step(Place& at) const {
    if (++at.piece < end) return false;
    at.piece = begin, at.tile += apart;
    return true;
  }
};

template <int N, int GROUPS, int DEPTH, bool WOVEN>
struct Slices : Kernel<Order, N, GROUPS, DEPTH, WOVEN, sums_bytes(N, GROUPS) + 16> {
  using Core = Kernel<Order, N, GROUPS, DEPTH, WOVEN, sums_bytes(N, GROUPS) + 16>;
  using Core::kWarps;
  static constexpr bool kCounted = N < 64;

  static __device__ __forceinline__ void run(const Work& work, int slices,
                                             const CUtensorMap& map) {
    extern __shared__ __align__(1024) uint8_t shared[];
    asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const int rank = blockIdx.x % slices, clusters = gridDim.x / slices;
    const int first = blockIdx.x / slices;
    const int begin = work.pieces * rank / slices;
    const Order order = {begin, work.pieces * (rank + 1) / slices, clusters};
    const int pieces = order.end - begin;
    const int turns = (tiles_of(work) - first + clusters - 1) / clusters;
    const uint32_t base = shared_address(shared);
    const uint32_t arrived = Core::parts(base) + sums_bytes(N, GROUPS);
    const bool feeds = threadIdx.x == kWarps * 32;
    if (feeds) {
      tensor_prefetch(map);
      barrier_init(arrived, 1);
      Core::make_ring(work, base);
    }
    __syncwarp();
    // Nobody sends to a CTA that has not begun.
    if (slices > 1) cluster_arrive_relaxed();
    const bool has_strips = warp / 4 < groups_of(work);
    typename Core::Walk walk = {};
    if (has_strips) walk = Core::begin(work, order, base, {first, begin}, turns * pieces);
    __syncthreads();
    asm volatile("griddepcontrol.wait;" ::: "memory");
    if (warp >= kWarps) {
      asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(Core::kFeedRegisters));
      typename Core::Feed to = {0, 1};
      for (int turn = 0; turn < turns; ++turn) {
        // A tile's activations come while the sums of the one before are added.
        const bool adds = turn > 0 && slices > 1;
        if (adds) cluster_wait(), cluster_arrive_relaxed();
        if (feeds) Core::feed(work, map, base, first + turn * clusters, begin, pieces, to);
        __syncwarp();
        if (adds && !kCounted) cluster_wait(), cluster_arrive_relaxed();
      }
      if (slices > 1 && !kCounted) cluster_wait(), cluster_arrive_relaxed(), cluster_wait();
      return;
    }
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(Core::kRegisters));
    const int each = places_of(N, slices) / slices;
    const uint32_t parts = Core::parts(base) + warp * (each * slices * 512) + lane * 16;
    // Where there are more slices than eights of columns, some CTAs add nothing. They expect no
    // bytes, so the barrier's phases would pass by a warp that has yet to look at the one before.
    const bool adds = N / 8 >= kMostSlices || rank < N / 8;
    for (int turn = 0; turn < turns; ++turn) {
      const int tile = first + turn * clusters;
      const Strip strip = strip_of(work, tile, warp);
      float sums[N / 2] = {};
      if (has_strips) Core::multiply(work, order, base, pieces, walk, sums);
      auto store_sum = [&](int n, float4 sum) {
        if (strip.there)
          store(*strip.matrix, work.rows, strip.number, tile % work.row_tiles * N + 8 * n, sum);
      };
      if (slices == 1) {
#pragma unroll
        for (int n = 0; n < N / 8; ++n)
          store_sum(n, {sums[4 * n], sums[4 * n + 1], sums[4 * n + 2], sums[4 * n + 3]});
        continue;
      }
      if (kCounted && adds && threadIdx.x == 0)
        barrier_expect(arrived, strips_of(work, tile) * slices * 512 *
                                    ((N / 8 - rank + slices - 1) / slices));
      __syncwarp();
      // The others have begun, and have added up the tile before.
      cluster_wait();
      // The adder of columns n is n % slices.
      int adder = 0, place = rank * each;
      if (strip.there) {
#pragma unroll
        for (int n = 0; n < N / 8; ++n) {
          const float4 sum = {sums[4 * n], sums[4 * n + 1], sums[4 * n + 2], sums[4 * n + 3]};
          const uint32_t there = address_there(parts + place * 512, adder);
          if constexpr (kCounted) send(there, sum, address_there(arrived, adder));
          else send(there, sum);
          if (++adder == slices) adder = 0, ++place;
        }
      }
      if constexpr (!kCounted) cluster_arrive(), cluster_wait();
      else if (adds) barrier_wait(arrived, turn % 2);
      for (int n = rank, at = 0; n < N / 8 && strip.there; n += slices, ++at) {
        float4 sum = read_sum(parts + at * 512);
#pragma unroll
        for (int i = 1; i < kMostSlices; ++i) {
          if (i == slices) break;
          const float4 one = read_sum(parts + (i * each + at) * 512);
          sum.x += one.x, sum.y += one.y, sum.z += one.z, sum.w += one.w;
        }
        store_sum(n, sum);
      }
      if (turn + 1 < turns) cluster_arrive();
    }
  }
};

template <int N, int GROUPS, int DEPTH, bool WOVEN>
__global__ void __launch_bounds__(Slices<N, GROUPS, DEPTH, WOVEN>::kThreads, 1)
    multiply_slices(const __grid_constant__ Work work, int slices,
                    const __grid_constant__ CUtensorMap map) {
  Slices<N, GROUPS, DEPTH, WOVEN>::run(work, slices, map);
}

using Kernels = void (*)(Work, int, CUtensorMap);

template <int N, int GROUPS, int DEPTH>
Variant<Kernels> variant(bool woven) {
  using K = Slices<N, GROUPS, DEPTH, true>;  // as large for either form
  const Kernels kernel = woven ? multiply_slices<N, GROUPS, DEPTH, true>
                               : multiply_slices<N, GROUPS, DEPTH, false>;
  return {kernel, N, GROUPS, K::kThreads, K::kBytes};
}

Variant<Kernels> variant_of(int columns, bool woven) {
  switch (columns) {
    case 8: return variant<8, 4, 2>(woven);
    case 16: return variant<16, 4, 2>(woven);
    case 32: return variant<32, 4, 2>(woven);
    case 48: return variant<48, 4, 2>(woven);
    case 64: return variant<64, 4, 2>(woven);
    default: return {};
  }
}

}  // namespace

// Clusters of `slices` CTAs that the device holds at once; negative: a cudaError_t.
extern "C" int winnow_linear_slices_clusters(int columns, int slices) {
  return clusters_at_once(variant_of(columns, true), slices);
}

// columns: 8, 16, 32, 48 or 64 rows are multiplied together. tiles: in which the strips are
// divided, of up to 16. clusters: at most one for each tile and its rows. Returns a cudaError_t.
extern "C" int winnow_linear_slices(const Product* product, int columns, int slices, int tiles,
                                    int clusters) {
  const auto chosen = variant_of(columns, product->woven != 0);
  if (slices < 1 || slices > kMostSlices || slices > product->pieces || clusters < 1)
    return cudaErrorInvalidValue;
  Work work;
  CUtensorMap map;
  const cudaError_t error = prepare(*product, chosen, tiles, nullptr, work, map);
  if (error != cudaSuccess) return error;
  return start(chosen, slices, clusters, product->early != 0, product->stream, work, slices, map);
}

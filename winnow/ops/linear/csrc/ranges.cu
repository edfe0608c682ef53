// linear for many rows of bf16 activations over packed MXFP8 weights, on Hopper (sm_90a).
//
// Work. A tile is up to 8 strips, one for each warp, by N rows; a unit is a piece of a tile's K.
// Every CTA has as many whole tiles as all can have. The units of the tiles that are left are
// numbered tile by tile and cut in equal ranges: each CTA leaves its shares of those tiles in
// scratch memory, and `add_parts`, launched behind, adds them in the order of K. Results depend on
// shapes alone.

#include "activations.cuh"
#include "product.cuh"

namespace {

// Tiles that are split, and who has which of their units. CTAs are numbered from 0.
struct Split {
  int first, tiles, pieces, ctas;

  // First unit of a CTA's range.
  __device__ __forceinline__ int begin(int cta) const {
    return static_cast<uint32_t>(tiles * pieces) * cta / ctas;
  }

  // The CTA whose range has the unit.
  __device__ __forceinline__ int owner(int unit) const {
    return (static_cast<uint32_t>(unit + 1) * ctas - 1) / static_cast<uint32_t>(tiles * pieces);
  }
};

__device__ __forceinline__ Split split_of(const Work& work, int ctas) {
  const int whole = tiles_of(work) / ctas * ctas;
  return {whole, tiles_of(work) - whole, work.pieces, ctas};
}

template <int N, int GROUPS, int DEPTH, bool WOVEN>
struct Ranges : Kernel<N, GROUPS, DEPTH, WOVEN, 0> {
  using Core = Kernel<N, GROUPS, DEPTH, WOVEN, 0>;
  using Core::kWarps;

  // A share of one tile's K is done: to the result if it is all, else to scratch memory. first: it
  // begins where K does. A CTA has at most one share that does and one that does not.
  static __device__ __forceinline__ void emit(const Work& work, int tile, bool whole, bool first,
                                              const float (&sums)[N / 2]) {
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const Strip strip = strip_of(work, tile, warp);
    if (!strip.there) return;
    if (whole) {
#pragma unroll
      for (int n = 0; n < N / 8; ++n)
        store(*strip.matrix, work.rows, strip.number, tile % work.row_tiles * N + 8 * n,
              {sums[4 * n], sums[4 * n + 1], sums[4 * n + 2], sums[4 * n + 3]});
      return;
    }
    float4* to = work.scratch +
                 (static_cast<int64_t>(blockIdx.x * 2 + first) * kWarps + warp) * (N / 8) * 32 +
                 lane;
#pragma unroll
    for (int n = 0; n < N / 8; ++n)
      __stcg(to + n * 32, {sums[4 * n], sums[4 * n + 1], sums[4 * n + 2], sums[4 * n + 3]});
  }

  static __device__ __forceinline__ void run(const Work& work, const CUtensorMap& map) {
    extern __shared__ __align__(1024) uint8_t shared[];
    asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
    const int warp = threadIdx.x / 32, cta = blockIdx.x, ctas = gridDim.x;
    const Split split = split_of(work, ctas);
    const int begin = split.begin(cta), turns = split.first / ctas;
    const Place then = {split.first + begin / work.pieces, begin % work.pieces, turns};
    const Order order = {0, work.pieces, ctas, turns, then};
    const int count = turns * work.pieces + split.begin(cta + 1) - begin;
    Place at = turns > 0 ? Place{cta, 0, 0} : then;
    const uint32_t base = shared_address(shared);
    if (threadIdx.x == kWarps * 32) Core::make_ring(work, base);
    const bool has_strips = warp / 4 < groups_of(work);
    typename Core::Walk walk = {};
    // Weights depend on no launch before.
    if (has_strips) walk = Core::begin(work, order, base, at, count);
    __syncthreads();
    asm volatile("griddepcontrol.wait;" ::: "memory");
    if (warp >= kWarps) {
      asm volatile("setmaxnreg.dec.sync.aligned.u32 24;");
      typename Core::Feed to = {at, 0, 1};
      if (threadIdx.x == kWarps * 32) Core::feed(work, map, order, base, count, to);
    } else {
      asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(Core::kRegisters));
      for (int left = has_strips ? count : 0; left > 0;) {
        const int some = min(work.pieces - at.piece, left);
        float sums[N / 2] = {};
        Core::multiply(work, order, base, some, walk, sums);
        emit(work, at.tile, some == work.pieces, at.piece == 0, sums);
        left -= some, at.piece = work.pieces - 1;
        step(order, at);
      }
    }
  }
};

template <int N, int GROUPS, int DEPTH, bool WOVEN>
__global__ void __launch_bounds__(Ranges<N, GROUPS, DEPTH, WOVEN>::kThreads, 1)
    multiply_ranges(const __grid_constant__ Work work, const __grid_constant__ CUtensorMap map) {
  Ranges<N, GROUPS, DEPTH, WOVEN>::run(work, map);
}

constexpr int kAddWarps = 8;
constexpr int kAddEights = 4;

// Adds the shares of split tiles. blockIdx.y: the CTA whose range ends in the tile and has its
// first unit. A warp: some eights of a strip's rows. strips: of a tile at most; eights: of rows.
__global__ void __launch_bounds__(kAddWarps * 32)
    add_parts(const __grid_constant__ Work work, int strips, int eights, int ctas) {
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
  const Split split = split_of(work, ctas);
  const int first = blockIdx.y, end = split.begin(first + 1), within = end / work.pieces;
  if (end % work.pieces == 0 || split.begin(first) > within * work.pieces) return;
  const int parts = split.owner((within + 1) * work.pieces - 1) - first + 1;
  const int item = (blockIdx.x * kAddWarps + threadIdx.x / 32) * kAddEights;
  if (item >= strips * eights) return;
  const int lane = threadIdx.x % 32, tile = split.first + within;
  const int row = (tile % work.row_tiles * eights + item % eights) * 8;
  const Strip strip = strip_of(work, tile, item / eights);
  if (!strip.there || row >= work.rows) return;
  const int64_t apart = static_cast<int64_t>(strips) * eights * 32;
  const float4* from = work.scratch + 2 * first * apart + item * 32 + lane;
  asm volatile("griddepcontrol.wait;" ::: "memory");
  float4 sums[kAddEights] = {};
  constexpr int kAtOnce = 4;
  for (int done = 0; done < parts; done += kAtOnce) {
    float4 some[kAtOnce][kAddEights];
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i)
#pragma unroll
      for (int n = 0; n < kAddEights; ++n)
        some[i][n] = done + i < parts
                         ? __ldcg(from + (done + i == 0 ? 1 : 2 * (done + i)) * apart + n * 32)
                         : float4{};
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i)
#pragma unroll
      for (int n = 0; n < kAddEights; ++n) {
        sums[n].x += some[i][n].x, sums[n].y += some[i][n].y;
        sums[n].z += some[i][n].z, sums[n].w += some[i][n].w;
      }
  }
#pragma unroll
  for (int n = 0; n < kAddEights; ++n)
    store(*strip.matrix, work.rows, strip.number, row + 8 * n, sums[n]);
}

using Kernels = void (*)(Work, CUtensorMap);

struct Variant {
  Kernels kernel;
  int groups, threads, bytes;
};

template <int N, int GROUPS, int DEPTH>
Variant variant(bool woven) {
  using K = Ranges<N, GROUPS, DEPTH, true>;  // as large for either form
  const Kernels kernel = woven ? multiply_ranges<N, GROUPS, DEPTH, true>
                               : multiply_ranges<N, GROUPS, DEPTH, false>;
  return {kernel, GROUPS, K::kThreads, K::kBytes};
}

Variant variant_of(int columns, bool woven) {
  switch (columns) {
    case 96: return variant<96, 2, 3>(woven);
    case 128: return variant<128, 2, 3>(woven);
    case 192: return variant<192, 2, 3>(woven);
    case 256: return variant<256, 2, 3>(woven);
    default: return {};
  }
}

}  // namespace

// x, matrices, outputs and early as for winnow_linear_slices. columns: 96, 128, 192 or 256 rows are
// multiplied together. tiles: in which the strips are divided, of up to 8. ctas: at most one for
// each piece of each tile and its rows. scratch: float [ctas * 2 * 128 * columns], null where no
// tile is split. Returns a cudaError_t.
extern "C" int winnow_linear_ranges(const void* x, int64_t x_stride, int rows, int pieces,
                                    const void* codes, const void* scales, void* out, int strips,
                                    const void* other_codes, const void* other_scales,
                                    void* other_out, int other_strips, int woven, float* scratch,
                                    int columns, int tiles, int ctas, int early,
                                    cudaStream_t stream) {
  const Variant chosen = variant_of(columns, woven != 0);
  if (chosen.kernel == nullptr || rows < 1 || pieces < 1 || tiles < 1 || ctas < 1)
    return cudaErrorInvalidValue;
  const Work work = {{matrix_of(codes, scales, out, strips),
                      matrix_of(other_codes, other_scales, other_out, other_strips)},
                     reinterpret_cast<float4*>(scratch),
                     rows,
                     pieces,
                     (rows + columns - 1) / columns,
                     tiles};
  if (groups_of(work) > chosen.groups) return cudaErrorInvalidValue;
  CUtensorMap map;
  cudaError_t error = describe(map, x, x_stride, rows, pieces * kPiece, columns);
  if (error != cudaSuccess) return error;
  Launch launch;
  configure(launch, 1, ctas, chosen.threads, chosen.bytes, early != 0, stream);
  error = start(chosen.kernel, launch, work, map);
  if (error != cudaSuccess || scratch == nullptr) return error;
  const int strips_each = 4 * chosen.groups, eights = columns / 8;
  const int warps = strips_each * eights / kAddEights;
  configure(launch, 1, (warps + kAddWarps - 1) / kAddWarps, kAddWarps * 32, 0, true, stream);
  launch.config.gridDim.y = ctas - 1;
  return cudaLaunchKernelEx(&launch.config, add_parts, work, strips_each, eights, ctas);
}

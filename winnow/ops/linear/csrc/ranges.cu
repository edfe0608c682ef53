// linear for many rows of bf16 activations over packed MXFP8 weights, on Hopper (sm_90a).
//
// Work. A tile is up to 8 strips, one for each warp, by N rows; a unit is a piece of a tile's K.
// Every CTA has as many whole tiles as all can have. Pairs of CTAs, which are clusters, have tiles
// together: one multiplies the first part of K and the other what follows, and each adds up half of
// the rows, for which the other's sums come into its shared memory. Either every two CTAs are a
// pair, or every tile is a pair's, and the grid's first CTAs have the rests of all. What is left is
// numbered tile by tile and cut in equal ranges (for one CTA of each pair where all are in pairs).
// Their sums are shares of tiles and go to scratch memory. They come first: pairs add the rests of
// their tiles, and warps that have nothing to multiply add the shares of other tiles meanwhile.
// Where all CTAs have nothing but shares, `add_parts`, launched behind, does. All of it is added in
// the order of K. Results depend on shapes alone.

#include "calls.cuh"
#include "cluster.cuh"
#include "shares.cuh"

namespace {

struct Division {
  int pieces;     // of a tile
  int turns;      // whole tiles of each CTA
  int alone;      // CTAs, the first, that are in no pair
  int cut, held;  // pieces of a pair's tile that its first CTA multiplies, and both
  Split split;
  Count* count;  // if others than `add_parts` add shares

  // Whether the split tiles are those of the pairs.
  __device__ __forceinline__ bool rests() const { return split.from > 0; }
};

// What a CTA does: its shares, its whole tiles, its part of the pair's tile.
struct Order {
  struct Place {
    int tile, piece, end, turn;  // turn: tiles before this one
  };
  const Division& division;
  bool paired, second;   // in a pair, and which of the two
  int member;            // of the split
  int tile, begin, end;  // where the shares begin; units from that tile's first on
  int shares;            // in how many tiles they are

  __device__ __forceinline__ explicit Order(const Division& division) : division(division) {
    const Split& split = division.split;
    const int cta = blockIdx.x;
    paired = cta >= division.alone, second = (cta - division.alone) % 2 != 0;
    member = division.alone > 0 ? cta : cta / 2;
    const bool shared = (division.alone > 0 ? !paired : second) && member < split.members;
    const int first = split.begin(member), within = first / split.pieces;
    tile = split.first + within, begin = first - within * split.pieces;
    end = shared ? split.begin(member + 1) - within * split.pieces : begin;
    shares = end > begin ? (end - 1) / split.pieces + 1 : 0;
  }

  __device__ __forceinline__ int tiles() const { return shares + division.turns + paired; }

  // Pieces of all of them.
  __device__ __forceinline__ int count() const {
    const int part = second ? division.held - division.cut : division.cut;
    return end - begin + division.turns * division.pieces + (paired ? part : 0);
  }

  __device__ __forceinline__ Place place(int turn) const {
    const Split& split = division.split;
    if (turn < shares)
      return {tile + turn, split.from + (turn > 0 ? 0 : begin),
              split.from + min(end - turn * split.pieces, split.pieces), turn};
    const int cta = blockIdx.x, ctas = gridDim.x;
    if (turn < shares + division.turns)
      return {cta + (turn - shares) * ctas, 0, division.pieces, turn};
    const int pair = division.turns * ctas + (cta - division.alone) / 2;
    if (second) return {pair, division.cut, division.held, turn};
    return {pair, 0, division.cut, turn};
  }

  __device__ __forceinline__ bool step(Place& at) const {
    if (++at.piece < at.end) return false;
    at = place(at.turn + 1);
    return true;
  }
};

// Behind the ring: one for what a CTA has done, and for every warp one that counts sums that come.
__host__ __device__ constexpr int barriers_bytes(int groups) { return (1 + 4 * groups) * 16; }

template <int N, int GROUPS, int DEPTH, bool WOVEN>
struct Ranges : Kernel<Order, N, GROUPS, DEPTH, WOVEN, barriers_bytes(GROUPS)> {
  using Core = Kernel<Order, N, GROUPS, DEPTH, WOVEN, barriers_bytes(GROUPS)>;
  using Core::kWarps;
  static constexpr int kHalf = N / 16;  // eights of rows that a CTA of a cluster adds up
  static_assert(2 * kWarps * kHalf * 512 <= Core::kRing * Core::kStage,
                "the ring holds sums that go and that come");

  static constexpr int kItems = kWarps * (N / 8);  // eights of rows of strips of a tile
  static constexpr int64_t kApart = kItems * 32;   // from one share to another
  static constexpr int kTaken = 4;  // eights of rows at a time
  static_assert(N / 8 % kTaken == 0, "of one strip");
  static constexpr int kComing = (kWarps + 1) * 32;

  // Where the shares of a tile lie in scratch memory, and in a share this lane's sums from eight
  // `n` of rows on.
  static __device__ __forceinline__ float4* shares_of(const Work& work, const Shares& shares) {
    return work.scratch + shares.first * kApart;
  }
  static __device__ __forceinline__ int item_of(int n) {
    return (threadIdx.x / 32 * (N / 8) + n) * 32 + threadIdx.x % 32;
  }

  // Until all shares are there. Their CTAs wait for nobody and are the grid's first, and the device
  // holds the whole grid at once: they begin before those that wait here, or else as soon as other
  // kernels leave their places.
  static __device__ __forceinline__ void wait_for_shares(const Division& division) {
    while (load_relaxed(&division.count->members) < division.split.members) __nanosleep(100);
    __threadfence();
    __syncwarp();
  }

  static __device__ __forceinline__ float4 eight(const float (&sums)[N / 2], int n) {
    return {sums[4 * n], sums[4 * n + 1], sums[4 * n + 2], sums[4 * n + 3]};
  }

  static __device__ __forceinline__ void store_eight(const Work& work, const Strip& strip,
                                                     int tile, int n, float4 sum) {
    store(*strip.matrix, work.rows, strip.number, tile % work.row_tiles * N + 8 * n, sum);
  }

  // A whole tile is done.
  static __device__ __forceinline__ void emit(const Work& work, const Strip& strip, int tile,
                                              const float (&sums)[N / 2]) {
    if (!strip.there) return;
#pragma unroll
    for (int n = 0; n < N / 8; ++n) store_eight(work, strip, tile, n, eight(sums, n));
  }

  // A share of a tile is. to: where this lane's begins in scratch memory.
  static __device__ __forceinline__ void leave(const Strip& strip, float4* to,
                                               const float (&sums)[N / 2]) {
    if (!strip.there) return;
#pragma unroll
    for (int n = 0; n < N / 8; ++n) __stcg(to + n * 32, eight(sums, n));
  }

  // The pair's tile is: sums come where the ring was, then shares of the rest from CTAs before.
  template <int RANK>
  static __device__ __forceinline__ void exchange(const Work& work, const Division& division,
                                                  const Strip& strip, int tile, uint32_t base,
                                                  const float (&sums)[N / 2]) {
    constexpr int kBytes = kHalf * 512;  // of a warp's half
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const uint32_t goes = base + warp * kBytes, comes = goes + kWarps * kBytes;
    const uint32_t bar = Core::parts(base) + 16 * (warp + 1);
    if (strip.there) {
#pragma unroll
      for (int n = 0; n < kHalf; ++n)
        write_sum(goes + n * 512 + lane * 16, eight(sums, (1 - RANK) * kHalf + n));
      asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
      __syncwarp();
      if (lane == 0) {
        barrier_expect(bar, kBytes);
        bulk_send(address_there(comes, 1 - RANK), goes, kBytes, address_there(bar, 1 - RANK));
      }
      __syncwarp();
      barrier_wait(bar, 0);
    }
    // The other CTA's sums have been read there: it may end.
    cluster_arrive_relaxed();
    if (strip.there) finish<RANK>(work, division, strip, tile, comes + lane * 16, sums);
    cluster_wait();
  }

  // Adds what came, and shares of the rest.
  template <int RANK>
  static __device__ __forceinline__ void finish(const Work& work, const Division& division,
                                                const Strip& strip, int tile, uint32_t came,
                                                const float (&sums)[N / 2]) {
    float4 all[kHalf];
#pragma unroll
    for (int n = 0; n < kHalf; ++n) {
      all[n] = eight(sums, RANK * kHalf + n);
      const float4 other = read_sum(came + n * 512);
      all[n].x += other.x, all[n].y += other.y, all[n].z += other.z, all[n].w += other.w;
    }
    if (division.rests()) {
      wait_for_shares(division);
      const Shares shares(division.split, tile);
      add_shares<kHalf, 1>(shares_of(work, shares) + item_of(RANK * kHalf), kApart, shares.count,
                           all);
    }
#pragma unroll
    for (int n = 0; n < kHalf; ++n) store_eight(work, strip, tile, RANK * kHalf + n, all[n]);
  }

  // This warp's sums are in scratch memory, for one of the adders to say so.
  static __device__ __forceinline__ void come() {
    asm volatile("barrier.arrive 1, %0;" ::"n"(kComing) : "memory");
  }

  // What the warps do that multiply nothing: first one of them says when this CTA's shares are all
  // there. When everybody's are, all take eights of rows of a strip to add up, until none is left.
  // They give up where the CTA has done all else (`done`) before, so nobody waits for a CTA that
  // cannot begin; the last CTA to have its shares there finds all, and leaves nothing.
  static __device__ __forceinline__ void add(const Work& work, const Division& division,
                                             const Order& order, bool says, uint32_t done) {
    const Split& split = division.split;
    const int lane = threadIdx.x % 32;
    if (says && order.shares > 0) {
      asm volatile("barrier.sync 1, %0;" ::"n"(kComing) : "memory");
      if (lane == 0) {
        __threadfence();
        atomicAdd(&division.count->members, 1);
      }
    }
    if (division.rests()) return;
    constexpr uint32_t kAll = 0xFFFFFFFFu;
    while (__shfl_sync(kAll, load_relaxed(&division.count->members), 0) < split.members) {
      if (__all_sync(kAll, barrier_is_over(done, 0))) return;
      __nanosleep(500);
    }
    __threadfence();
    __syncwarp();
    int taken = lane == 0 ? atomicAdd(&division.count->items, kTaken) : 0;
#pragma unroll 1
    while (true) {
      const int item = __shfl_sync(kAll, taken, 0);
      if (item >= split.tiles * kItems) return;
      // The next is asked for early.
      if (lane == 0) taken = atomicAdd(&division.count->items, kTaken);
      const int tile = split.first + item / kItems;
      const Shares shares(split, tile);
      const Strip strip = strip_of(work, tile, item % kItems / (N / 8));
      if (shares.count == 1 || !strip.there) continue;
#pragma unroll 1
      for (int i = item % kItems; i < item % kItems + kTaken; i += 2) {
        float4 sums[2] = {};
        add_shares<2, 4>(shares_of(work, shares) + i * 32 + lane, kApart, shares.count, sums);
#pragma unroll
        for (int n = 0; n < 2; ++n) store_eight(work, strip, tile, i % (N / 8) + n, sums[n]);
      }
    }
  }

  static __device__ __forceinline__ void run(const Work& work, const Division& division,
                                             const CUtensorMap& map) {
    extern __shared__ __align__(1024) uint8_t shared[];
    asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const Order order(division);
    const int tiles = order.tiles();
    typename Core::Place at = order.place(0);
    const uint32_t base = shared_address(shared);
    const uint32_t done = Core::parts(base);
    if (threadIdx.x == kWarps * 32) {
      tensor_prefetch(map);
      barrier_init(done, kWarps);
      for (int i = 0; i < kWarps; ++i) barrier_init(done + 16 * (i + 1), 1);
      Core::make_ring(work, base);
    }
    const bool has_strips = warp / 4 < groups_of(work);
    typename Core::Walk walk = {};
    // Weights depend on no launch before.
    if (has_strips) walk = Core::begin(work, order, base, at, order.count());
    __syncthreads();
    asm volatile("griddepcontrol.wait;" ::: "memory");
    if (warp >= kWarps) {
      asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(Core::kFeedRegisters));
      if (threadIdx.x == kWarps * 32) {
        typename Core::Feed to = {0, 1};
        for (; at.turn < tiles; at = order.place(at.turn + 1))
          Core::feed(work, map, base, at.tile, at.piece, at.end - at.piece, to);
      } else if (warp > kWarps && division.count != nullptr) {
        add(work, division, order, warp == kWarps + 1, done);
      }
      __syncwarp();
      if (order.paired)
        cluster_arrive_relaxed(), cluster_wait(), cluster_arrive_relaxed(), cluster_wait();
      return;
    }
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(Core::kRegisters));
    for (; at.turn < tiles; at = order.place(at.turn + 1)) {
      float sums[N / 2] = {};
      if (has_strips) Core::multiply(work, order, base, at.end - at.piece, walk, sums);
      if (at.turn == tiles - 1 && lane == 0) barrier_arrive(done);
      const Strip strip = strip_of(work, at.tile, warp);
      if (order.paired && at.turn == tiles - 1) {
        // The other CTA, too, is done with its ring.
        cluster_arrive_relaxed(), cluster_wait();
        if (order.second) exchange<1>(work, division, strip, at.tile, base, sums);
        else exchange<0>(work, division, strip, at.tile, base, sums);
      } else if (at.end - at.piece == work.pieces) {
        emit(work, strip, at.tile, sums);
      } else {
        const int share = order.member + at.tile - division.split.first;
        leave(strip, work.scratch + share * kApart + item_of(0), sums);
      }
      if (division.count != nullptr && at.turn == order.shares - 1) come();
    }
  }
};

template <int N, int GROUPS, int DEPTH, bool WOVEN>
__global__ void __launch_bounds__(Ranges<N, GROUPS, DEPTH, WOVEN>::kThreads, 1)
    multiply_ranges(const __grid_constant__ Work work, const __grid_constant__ Division division,
                    const __grid_constant__ CUtensorMap map) {
  Ranges<N, GROUPS, DEPTH, WOVEN>::run(work, division, map);
}

using Kernels = void (*)(Work, Division, CUtensorMap);

template <int N, int GROUPS, int DEPTH>
Variant<Kernels> variant(bool woven) {
  using K = Ranges<N, GROUPS, DEPTH, true>;  // as large for either form
  const Kernels kernel = woven ? multiply_ranges<N, GROUPS, DEPTH, true>
                               : multiply_ranges<N, GROUPS, DEPTH, false>;
  return {kernel, N, GROUPS, K::kThreads, K::kBytes};
}

Variant<Kernels> variant_of(int columns, bool woven) {
  switch (columns) {
    case 96: return variant<96, 2, 3>(woven);
    case 128: return variant<128, 2, 3>(woven);
    case 192: return variant<192, 2, 3>(woven);
    case 256: return variant<256, 2, 3>(woven);
    default: return {};
  }
}

}  // namespace

// Clusters of two CTAs that the device holds at once; negative: a cudaError_t.
extern "C" int winnow_linear_ranges_pairs(int columns) {
  return clusters_at_once(variant_of(columns, true), 2);
}

// columns: 96, 128, 192 or 256 rows are multiplied together. tiles: in which the strips are
// divided, of up to 8. ctas: at most one for each piece of each tile and its rows. held: where
// pairs of CTAs have tiles, the pieces of them that they multiply, and cut: those of the first CTA;
// else 0. Either all CTAs are in pairs, or all tiles are theirs. scratch: float [shares * 128 *
// columns + 2], null where no tile is split; shares: CTAs that have units of split tiles, and such
// tiles. Returns a cudaError_t.
extern "C" int winnow_linear_ranges(const Product* product, float* scratch, int columns, int tiles,
                                    int ctas, int cut, int held) {
  const auto chosen = variant_of(columns, product->woven != 0);
  const int pieces = product->pieces;
  if (ctas < 1 || held < 0 || held > pieces || (held > 0 ? cut < 1 || cut >= held : cut != 0))
    return cudaErrorInvalidValue;
  Work work;
  CUtensorMap map;
  cudaError_t error = prepare(*product, chosen, tiles, scratch, work, map);
  if (error != cudaSuccess) return error;
  const int turns = tiles_of(work) / ctas, rest = held > 0 ? pieces - held : 0;
  const int pairs = held == 0 ? 0 : rest > 0 ? tiles_of(work) : ctas / 2, alone = ctas - 2 * pairs;
  const int first = rest > 0 ? 0 : turns * ctas + pairs, left = tiles_of(work) - first;
  const int units = rest > 0 ? rest : pieces;  // of a split tile
  if (left < 0 || alone < (rest > 0 ? 1 : 0) || (rest > 0 && turns > 0) ||
      (pairs > 0 && alone % 2 != 0))
    return cudaErrorInvalidValue;
  // Each has a unit at least.
  const int members = max(1, min(rest > 0 ? alone : pairs > 0 ? pairs : ctas, left * units));
  const bool meanwhile = scratch != nullptr && turns + pairs > 0;
  const int values = (members + left) * 128 * columns;
  Count* count = meanwhile ? reinterpret_cast<Count*>(scratch + values) : nullptr;
  const Division division = {
      pieces, turns, alone, cut, held, {first, left, rest > 0 ? held : 0, units, members}, count};
  bool early = product->early != 0;
  Launch launch;
  if (meanwhile) {
    configure(launch, 1, 1, 32, 0, early, product->stream);
    error = cudaLaunchKernelEx(&launch.config, clear, count);
    if (error != cudaSuccess) return error;
    early = true;
  }
  const int together = pairs > 0 ? 2 : 1;
  error = start(chosen, together, ctas / together, early, product->stream, work, division, map);
  if (error != cudaSuccess || scratch == nullptr || meanwhile) return error;
  const int strips = 4 * chosen.groups, eights = columns / 8;
  const int warps = strips * eights / kAddEights;
  configure(launch, 1, (warps + kAddWarps - 1) / kAddWarps, kAddWarps * 32, 0, true,
            product->stream);
  launch.config.gridDim.y = left;
  return cudaLaunchKernelEx(&launch.config, add_parts, work, division.split, strips, eights);
}

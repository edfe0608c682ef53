// Before and after the products of prefill attention: which query rows selected each block, and the
// merging of a row's results over its blocks. Hopper (sm_90).
//
// A span is a block, or both of two neighbours, 2j and 2j + 1, that an early row selected: they share
// a result, and at the start of a sequence a quarter of all results is saved. Spans 3j, 3j + 1 and
// 3j + 2 of a table are the first, both and the second. A bin is a (KV head, request, span); a pair is a (row, KV head, k-th
// selected block), which stands for the first of both. KV heads are worked on in groups. The pairs of
// a bin fill tiles of four, and the tiles of a group are numbered through its bins. Atomics decide the
// order of pairs in a bin; no result depends on it.

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include <cstdint>

// Mirrored by `Lists` in hopper_prefill.py.
struct Lists {
  const int32_t* ids;  // [rows, kv_heads, topk]
  const int64_t* positions;
  const int64_t* row_request;
  const int64_t* kv_lens;
  int64_t table_width;
  int32_t rows, requests, kv_heads, topk, group_heads, max_tiles, ctas;
  int32_t* counts;      // [kv_heads * requests * spans] pairs of a bin
  int32_t* first_tile;  // the same
  int32_t* ranks;       // [rows, kv_heads, topk] a pair's place in its bin, -1 if it does not count
  int32_t* entries;     // [groups, max_tiles, 4] pair << 8 | tokens it sees - 1; -1: no pair
  int32_t* tile_bins;   // [groups, max_tiles] bin within the group
  int32_t* shares;      // [groups, ctas + 1] each CTA's first tile, and their number
};

namespace {

constexpr int kBlock = 128;
constexpr int kDim = 128;
constexpr int kHeads = 16;
constexpr int kTile = 4;
constexpr int kTogether = 4;
constexpr int kPairThreads = 128;
constexpr int kAtOnce = 8;  // places whose values are asked for before any is used
constexpr unsigned kAll = 0xFFFFFFFFu;
constexpr int kBothBlocks = 64;  // rows that see no more have spans of both blocks
constexpr int kCost = 4, kBothCost = 7;  // of a tile of one block and of both, about

__device__ __forceinline__ int spans_of(const Lists& l) {
  return (static_cast<int>(l.table_width) + 1) / 2 * 3;
}

// Up to four pairs of one row and KV head, which a thread takes together: four chains of loads and
// atomics at a time. A warp takes neighbouring rows, which often select the same blocks. `bins` are -1
// where a pair does not count: no block, a block after the row, a row of padding, no such pair, the
// second of both.
struct Pairs {
  int row, head, k, index;  // of the first, in `ids`
  int bins[kTogether];
  int64_t seen;  // tokens that the row sees
};

__device__ __forceinline__ Pairs pairs_of(const Lists& l) {
  const int parts = (l.topk + kTogether - 1) / kTogether;
  const int thread = blockIdx.x * blockDim.x + threadIdx.x;
  Pairs p;
  p.row = thread % l.rows;
  p.k = thread / l.rows % parts * kTogether;
  p.head = thread / l.rows / parts;
  p.index = (p.row * l.kv_heads + p.head) * l.topk + p.k;
  const bool real = p.head < l.kv_heads;
  const int64_t request = real ? l.row_request[p.row] : 0;
  p.seen = real && l.kv_lens[request] > 0 ? l.positions[p.row] + 1 : 0;
  int blocks[kTogether + 2];  // with those before and after
#pragma unroll
  for (int i = 0; i < kTogether + 2; ++i) {
    const int k = p.k + i - 1;
    const int64_t id = real && k >= 0 && k < l.topk ? l.ids[p.index + i - 1] : -1;
    const bool counts = id >= 0 && id < l.table_width && id * kBlock < p.seen;
    blocks[i] = counts ? static_cast<int>(id) : -1;
  }
  const int base = (p.head * l.requests + static_cast<int>(request)) * spans_of(l);
  const bool early = p.seen <= kBothBlocks * kBlock;
#pragma unroll
  for (int i = 0; i < kTogether; ++i) {
    const int id = blocks[i + 1];
    const bool first = early && id % 2 == 0 && blocks[i + 2] == id + 1;
    const bool second = early && id % 2 == 1 && blocks[i] == id - 1;
    p.bins[i] = id < 0 || second ? -1 : base + id / 2 * 3 + (first ? 1 : id % 2 * 2);
  }
  return p;
}

// Lanes of the same bin count together: where blocks are few, their counters are what all wait for.
__global__ void __launch_bounds__(kPairThreads) rank(const Lists l) {
  const Pairs p = pairs_of(l);
  const unsigned before = (1u << threadIdx.x % 32) - 1;
  unsigned same[kTogether];
  int places[kTogether];
#pragma unroll
  for (int i = 0; i < kTogether; ++i) {
    same[i] = __match_any_sync(kAll, p.bins[i]);
    places[i] = -1;
    if (p.bins[i] >= 0 && (same[i] & before) == 0) {
      places[i] = atomicAdd(l.counts + p.bins[i], __popc(same[i]));
    }
  }
#pragma unroll
  for (int i = 0; i < kTogether; ++i) {
    const int first = __shfl_sync(kAll, places[i], __ffs(same[i]) - 1);
    const int place = p.bins[i] < 0 ? -1 : first + __popc(same[i] & before);
    if (p.head < l.kv_heads && p.k + i < l.topk) l.ranks[p.index + i] = place;
  }
}

// Tiles, and what they cost `attend`.
struct Work {
  int tiles, cost;
};

__device__ __forceinline__ Work operator+(Work a, Work b) {
  return {a.tiles + b.tiles, a.cost + b.cost};
}

__device__ __forceinline__ Work through_lanes(Work x, int lane) {
  for (int d = 1; d < 32; d *= 2) {
    const Work below = {__shfl_up_sync(kAll, x.tiles, d), __shfl_up_sync(kAll, x.cost, d)};
    if (lane >= d) x = x + below;
  }
  return x;
}

__device__ __forceinline__ int cost_of_tile(int bin) { return bin % 3 == 1 ? kBothCost : kCost; }

__device__ __forceinline__ Work work_of(int bin, int count) {
  const int tiles = (count + kTile - 1) / kTile;
  return {tiles, tiles * cost_of_tile(bin)};
}

// First tiles of the CTAs whose shares of all work begin within a bin.
__device__ __forceinline__ void begin_shares(int32_t* shares, int ctas, int bin, Work before,
                                             Work own, Work all) {
  if (own.tiles == 0) return;
  int cta = static_cast<int>((int64_t{before.cost} * ctas + all.cost - 1) / all.cost);
  for (; cta < ctas; ++cta) {
    const int within = static_cast<int>(int64_t{all.cost} * cta / ctas) - before.cost;
    if (within >= own.cost) return;
    shares[cta] = before.tiles + within / cost_of_tile(bin);
  }
}

// The first tile of each of a group's bins and of each CTA; one block a group.
__global__ void __launch_bounds__(1024) number_tiles(const Lists l) {
  __shared__ Work warps[32];
  const int bins = l.group_heads * l.requests * spans_of(l);
  const int each = (bins + 1023) / 1024;
  const int begin = min(static_cast<int>(threadIdx.x) * each, bins), end = min(begin + each, bins);
  const int32_t* counts = l.counts + int64_t{blockIdx.x} * bins;
  int32_t* first = l.first_tile + int64_t{blockIdx.x} * bins;
  int32_t* shares = l.shares + int64_t{blockIdx.x} * (l.ctas + 1);
  Work own = {0, 0};
#pragma unroll 8
  for (int i = begin; i < end; ++i) own = own + work_of(i, counts[i]);
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const Work through = through_lanes(own, lane);
  if (lane == 31) warps[warp] = through;
  __syncthreads();
  if (warp == 0) warps[lane] = through_lanes(warps[lane], lane);
  __syncthreads();
  const Work all = warps[31];
  for (int i = threadIdx.x; i <= l.ctas; i += 1024) {
    if (all.tiles == 0 || i == l.ctas) shares[i] = all.tiles;
  }
  Work before = {through.tiles - own.tiles, through.cost - own.cost};
  if (warp > 0) before = before + warps[warp - 1];
#pragma unroll 4
  for (int i = begin; i < end; ++i) {
    const Work its = work_of(i, counts[i]);
    first[i] = before.tiles;
    begin_shares(shares, l.ctas, i, before, its, all);
    before = before + its;
  }
}

__global__ void __launch_bounds__(kPairThreads) fill(const Lists l) {
  const Pairs p = pairs_of(l);
  if (p.head >= l.kv_heads) return;
  const int group = p.head / l.group_heads;
  const int spans = spans_of(l), bins = l.group_heads * l.requests * spans;
  int places[kTogether], first[kTogether], counts[kTogether];
#pragma unroll
  for (int i = 0; i < kTogether; ++i) {
    // Bin 0 stands in for one that is not there, so that no load waits for a branch.
    const int bin = max(p.bins[i], 0);
    places[i] = l.ranks[min(p.index + i, l.rows * l.kv_heads * l.topk - 1)];
    first[i] = l.first_tile[bin];
    counts[i] = l.counts[bin];
  }
#pragma unroll
  for (int i = 0; i < kTogether; ++i) {
    if (p.bins[i] < 0) continue;
    const int span = p.bins[i] % spans, kind = span % 3;
    const int64_t rest = p.seen - (int64_t{span} / 3 * 2 + kind / 2) * kBlock;
    const int most = kind == 1 ? 2 * kBlock : kBlock;
    const int limit = static_cast<int>(rest < most ? rest : most);
    const int64_t tile = int64_t{group} * l.max_tiles + first[i] + places[i] / kTile;
    int32_t* entries = l.entries + kTile * tile;
    entries[places[i] % kTile] = (p.row * l.topk + p.k + i) << 8 | (limit - 1);
    if (places[i] % kTile == 0) l.tile_bins[tile] = p.bins[i] - group * bins;
    if (places[i] == counts[i] - 1) {
      for (int j = places[i] % kTile + 1; j < kTile; ++j) entries[j] = -1;
    }
  }
}

template <bool kHalf>
__device__ __forceinline__ float2 widen(uint32_t pair) {
  if constexpr (kHalf) return __half22float2(reinterpret_cast<const __half2&>(pair));
  return make_float2(__uint_as_float(pair << 16), __uint_as_float(pair & 0xFFFF0000u));
}

// A CTA merges one row of one KV head, 16 lanes a query head, places in their order.
template <bool kHalf>
__global__ void __launch_bounds__(16 * kHeads)
    combine(const Lists l, const uint16_t* __restrict__ partial, const float* __restrict__ logs,
            int group, float value_scale, __nv_bfloat16* __restrict__ out) {
  const int row = blockIdx.x, head = blockIdx.y, of_all = group * l.group_heads + head;
  const int member = threadIdx.x / 16, lane = threadIdx.x % 16;
  const int64_t place = (int64_t{head} * l.rows + row) * l.topk;
  const int32_t* ranks = l.ranks + (int64_t{row} * l.kv_heads + of_all) * l.topk;
  const auto* from = reinterpret_cast<const uint4*>(
      partial + (place * kHeads + member) * kDim + 8 * lane);
  logs += place * kHeads + member;
  float largest = -INFINITY, total = 0.0f, sums[8] = {};
  unsigned valid = 0;  // a bit for each place that counts: topk is at most 32
#pragma unroll 16
  for (int k = 0; k < l.topk; ++k) {
    const float log = logs[k * kHeads];
    const bool counts = ranks[k] >= 0;
    if (counts) largest = fmaxf(largest, log);
    valid |= static_cast<unsigned>(counts) << k;
  }
  // Beyond the last place that counts one that does is read again, so that no load waits for a branch
  // and none brings bytes that nobody uses.
  const int any = max(__ffs(valid) - 1, 0);
  for (unsigned left = valid; left != 0;) {
    uint4 raw[kAtOnce];
    float weights[kAtOnce];
    bool counts[kAtOnce];
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
      counts[i] = left != 0;
      const int k = counts[i] ? __ffs(left) - 1 : any;
      left &= left - 1;
      raw[i] = __ldcs(from + k * (kHeads * kDim / 8));
      weights[i] = exp2f(logs[k * kHeads] - largest);
    }
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
      if (!counts[i]) continue;
      total += weights[i];
      const uint32_t words[4] = {raw[i].x, raw[i].y, raw[i].z, raw[i].w};
#pragma unroll
      for (int w = 0; w < 4; ++w) {
        const float2 x = widen<kHalf>(words[w]);
        sums[2 * w] += weights[i] * x.x;
        sums[2 * w + 1] += weights[i] * x.y;
      }
    }
  }
  const float over = valid != 0 ? value_scale / total : 0.0f;  // a row of padding has no place
  __nv_bfloat162 words[4];
#pragma unroll
  for (int w = 0; w < 4; ++w) {
    words[w] = __floats2bfloat162_rn(sums[2 * w] * over, sums[2 * w + 1] * over);
  }
  *reinterpret_cast<uint4*>(out + ((int64_t{row} * l.kv_heads + of_all) * kHeads + member) * kDim +
                            8 * lane) = reinterpret_cast<const uint4&>(words);
}

}  // namespace

// Each function launches on `stream` and returns a cudaError_t.

// The lists of all groups.
extern "C" int winnow_prefill_lists(const Lists* lists, void* stream) {
  const Lists l = *lists;
  const auto s = static_cast<cudaStream_t>(stream);
  const int64_t bins = int64_t{l.kv_heads} * l.requests * ((l.table_width + 1) / 2 * 3);
  const cudaError_t error = cudaMemsetAsync(l.counts, 0, bins * sizeof(int32_t), s);
  if (error != cudaSuccess) return error;
  const int threads = l.rows * l.kv_heads * ((l.topk + kTogether - 1) / kTogether);
  const int blocks = (threads + kPairThreads - 1) / kPairThreads;
  rank<<<blocks, kPairThreads, 0, s>>>(l);
  number_tiles<<<l.kv_heads / l.group_heads, 1024, 0, s>>>(l);
  fill<<<blocks, kPairThreads, 0, s>>>(l);
  return cudaGetLastError();
}

// One group's results to `out`, bf16 [rows, kv_heads * 16, 128], contiguous. `partial` [group_heads,
// rows, topk, 16, 128] is fp16, or bf16 unless `half`; `logs` fp32 [group_heads, rows, topk, 16].
extern "C" int winnow_prefill_combine(const Lists* lists, int group, const void* partial,
                                      const void* logs, int half, float value_scale, void* out,
                                      void* stream) {
  const dim3 grid(lists->rows, lists->group_heads);
  auto* kernel = half ? combine<true> : combine<false>;
  kernel<<<grid, 16 * kHeads, 0, static_cast<cudaStream_t>(stream)>>>(
      *lists, static_cast<const uint16_t*>(partial), static_cast<const float*>(logs), group,
      value_scale, static_cast<__nv_bfloat16*>(out));
  return cudaGetLastError();
}

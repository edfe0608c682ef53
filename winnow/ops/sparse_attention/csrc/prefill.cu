// Attention of many query rows over selected blocks, on Hopper (sm_90a): blocks outside, rows inside.
//
// Rows that select a block are listed under it, so that K and V of a block are expanded to 16 bits
// in shared memory once for all of them. A tile is four query rows with their 16 heads: the M = 64
// of wgmma. It has one block, or both of two neighbours that all its rows selected; its normalised
// output and the logarithm of its sum go to the pair's own place in scratch, and `combine` merges the
// at most `topk` places of a row in fixed order. So results do not depend on the order of the lists,
// which atomics decide: a row of a product depends on no other row.
//
// `attend` is persistent: each CTA takes tiles of equal work. One warp fetches queries (tensor
// copies, 128-byte swizzle), three warps expand the next block while three warpgroups work on this
// one, a tile each.

#include "prefill_tile.cuh"

namespace {

constexpr int kExpanders = 3;  // warps
constexpr int kThreads = 128 * (kConsumers + 1);
constexpr int kProducerRegisters = 104;
constexpr int kConsumerRegisters = 136;

struct Share {
  int begin, end;
};

__device__ __forceinline__ Share share_of(const Tiles& tiles) {
  return {tiles.shares[blockIdx.x], tiles.shares[blockIdx.x + 1]};
}

// The blocks of a bin, numbered through heads, requests and their tables.
struct Span {
  int first, last;
};

__device__ __forceinline__ Span span_of(const Tiles& l, int bin) {
  const int spans = (l.table_width + 1) / 2 * 3;
  const int table = bin / spans, span = bin % spans, kind = span % 3;
  const int first = table * l.table_width + span / 3 * 2 + kind / 2;
  return {first, first + kind % 2};
}

// A stage that this warp may write: it has been read as often as it was written.
__device__ __forceinline__ int free_stage(const Shared& shared, int number) {
  const int stage = number % kStages, use = number / kStages;
  if (use > 0) barrier_wait(shared.query_empty[stage], (use - 1) & 1);
  return stage;
}

// One warp: the queries of each tile, eight tiles' entries at a time.
__device__ __forceinline__ void fetch_queries(const Attend& a, const CUtensorMap& map,
                                              Shared& shared, int lane) {
  const Tiles& l = a.tiles;
  const auto [begin, end] = share_of(l);
  int block = -1, newest = -1;  // the last block that the CTA needs by now: its number, and which
  for (int at = begin; at < end; at += 8) {
    const int tile = at + lane / 4;
    const int entry = tile < end ? l.entries[4 * tile + lane % 4] : -1;
    const Span span = span_of(l, tile < end ? l.bins[tile] : 0);
    const int row = (entry >> 8) / l.topk, head = span.first / (l.requests * l.table_width);
    for (int i = 0; i < 8 && at + i < end; ++i) {
      const int stage = free_stage(shared, at + i - begin);
      const int first = __shfl_sync(kAll, span.first, 4 * i);
      const int last = __shfl_sync(kAll, span.last, 4 * i);
      block += (first > newest) + (last > max(first, newest));
      newest = last;
      const bool mine = lane / 4 == i;
      const int rows_here = __popc(__ballot_sync(kAll, mine && entry >= 0));
      if (mine) reinterpret_cast<int*>(&shared.entries[stage])[lane % 4] = entry;
      if (lane == 4 * i) {
        shared.origins[stage] = {block - (last - first), block, head * l.rows * l.topk};
      }
      warp_expect(shared.query_full[stage], rows_here * 2 * kRowHalf, lane);
      if (mine && entry >= 0) {
        uint8_t* to = shared.queries[stage][0] + (lane % 4) * kRowHalf;
        const int from = (l.first_head + head) * kHeads;
        copy_queries(map, to, 0, from, a.first_row + row, shared.query_full[stage]);
        copy_queries(map, to + kQueryHalf, 64, from, a.first_row + row, shared.query_full[stage]);
      }
    }
  }
  // A last stage for each warpgroup without a tile, so that all let go of all blocks but the last.
  for (int i = 0; i < kConsumers; ++i) {
    const int stage = free_stage(shared, end - begin + i);
    if (lane == 0) shared.origins[stage] = {block, block, 0};
    warp_arrive(shared.query_full[stage], lane);
  }
}

// Three warps: K and V of one block.
template <Format kFormat>
__device__ __forceinline__ void expand_block(const Attend& a, Shared& shared, int id, int number,
                                             int thread) {
  const Tiles& l = a.tiles;
  const int of_head = id / l.table_width, within = id % l.table_width;
  const int head = of_head / l.requests, request = of_head % l.requests;
  const int64_t page = l.tables[int64_t{request} * l.table_width + within];
  const int64_t rest = l.kv_lens[request] - int64_t{within} * kBlock;
  const int valid = static_cast<int>(rest < kBlock ? rest : kBlock);
  const int64_t offset = page * a.pages.page_bytes + (l.first_head + head) * a.pages.head_bytes;
  const uint8_t* key_codes = a.pages.key_codes + offset;
  const uint8_t* key_steps = a.pages.key_scales + offset;
  const uint8_t* value_codes = a.pages.value_codes + offset;
  const uint8_t* value_steps = a.pages.value_scales + offset;
  Expansion<kFormat, kExpanders, kFormat == kBf16 ? 2 : 3> keys, values;
  keys.begin(key_codes, key_steps, valid, thread);
  values.begin(value_codes, value_steps, valid, thread);
  const int buffer = number % 2;
  if (number >= 2) barrier_wait(shared.block_empty[buffer], (number / 2 - 1) & 1);
  keys.template finish<false>(key_codes, key_steps, valid, shared.keys[buffer][0], thread);
  values.template finish<true>(value_codes, value_steps, valid, shared.values[buffer][0], thread);
  // The tensor cores read what ordinary stores wrote.
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
  warp_arrive(shared.block_full[buffer], thread % 32);
}

// Three warps: each block that the CTA's tiles need, one block ahead.
template <Format kFormat>
__device__ __forceinline__ void expand_blocks(const Attend& a, Shared& shared, int thread) {
  const Tiles& l = a.tiles;
  const auto [begin, end] = share_of(l);
  const int lane = thread % 32;
  int number = 0, newest = -1;
  for (int at = begin; at < end; at += 32) {
    // Beyond the last tile that tile again, which needs no other block.
    const Span span = span_of(l, l.bins[min(at + lane, end - 1)]);
    int before = __shfl_up_sync(kAll, span.last, 1);
    if (lane == 0) before = newest;
    newest = __shfl_sync(kAll, span.last, 31);
    const int first = max(span.first, before + 1);
    for (unsigned changes = __ballot_sync(kAll, first <= span.last); changes != 0;
         changes &= changes - 1) {
      const int from = __ffs(changes) - 1;
      const int last = __shfl_sync(kAll, span.last, from);
      for (int id = __shfl_sync(kAll, first, from); id <= last; ++id, ++number) {
        expand_block<kFormat>(a, shared, id, number, thread);
      }
    }
  }
}

// A warpgroup: every third tile. A warp has one query row; lane (g, t) = (lane / 4, lane % 4) has
// heads g and g + 8, and of the 128 columns 8j + 2t and 8j + 2t + 1.
template <Format kFormat>
__device__ __forceinline__ void consume(const Attend& a, Shared& shared, int group, int warp,
                                        int lane) {
  constexpr bool kHalf = kFormat != kBf16;
  const auto [begin, end] = share_of(a.tiles);
  int held = 0, ready = 0;  // the first block not let go of; blocks waited for
  for (int number = group;; number += kConsumers) {
    const int stage = number % kStages;
    barrier_wait(shared.query_full[stage], (number / kStages) & 1);
    const Origin origin = shared.origins[stage];
    const auto wait_through = [&](int last) {
#pragma unroll 1
      for (; ready <= last; ++ready) barrier_wait(shared.block_full[ready % 2], ready / 2 & 1);
    };
    // A block is waited for even if none of its tiles is this warpgroup's: its buffer counts one
    // release from everyone before it is filled again.
#pragma unroll 1
    for (; held < origin.first; ++held) {
      wait_through(held);
      warp_arrive(shared.block_empty[held % 2], lane);
    }
    if (number >= end - begin) return;
    wait_through(origin.last);
    const int entry = reinterpret_cast<const int*>(&shared.entries[stage])[warp];
    if (origin.first == origin.last) {
      one_block<kHalf>(a, shared, stage, origin, entry, lane);
    } else {
      both_blocks<kHalf>(a, shared, stage, origin, entry, lane);
    }
  }
}

template <Format kFormat>
__global__ void __launch_bounds__(kThreads, 1)
    attend(const __grid_constant__ CUtensorMap map, const __grid_constant__ Attend a) {
  extern __shared__ __align__(1024) uint8_t memory[];
  auto& shared = *reinterpret_cast<Shared*>(memory);
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  if (threadIdx.x == 0) {
    for (int i = 0; i < kStages; ++i) {
      barrier_init(shared.query_full[i], kWarpArrivals);
      barrier_init(shared.query_empty[i], 4 * kWarpArrivals);
    }
    for (int i = 0; i < 2; ++i) {
      barrier_init(shared.block_full[i], kExpanders * kWarpArrivals);
      barrier_init(shared.block_empty[i], 4 * kConsumers * kWarpArrivals);
    }
    barriers_made();
  }
  __syncthreads();
  if (warp < 4) {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kProducerRegisters));
    if (warp == 0) {
      fetch_queries(a, map, shared, lane);
    } else {
      expand_blocks<kFormat>(a, shared, threadIdx.x - 32);
    }
  } else {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kConsumerRegisters));
    consume<kFormat>(a, shared, warp / 4 - 1, warp % 4, lane);
  }
}

template <Format kFormat>
cudaError_t launch(const CUtensorMap& map, const Attend& a, int ctas, cudaStream_t stream) {
  const cudaError_t error = cudaFuncSetAttribute(
      attend<kFormat>, cudaFuncAttributeMaxDynamicSharedMemorySize, sizeof(Shared));
  if (error != cudaSuccess) return error;
  attend<kFormat><<<ctas, kThreads, sizeof(Shared), stream>>>(map, a);
  return cudaGetLastError();
}

}  // namespace

// One group's pairs to `partial` [heads, rows, topk, 16, 128], fp16 (bf16 if stored so), and `logs`
// [heads, rows, topk, 16]. `q` is the whole call's [all_rows, all_heads, 128], of which the lists'
// rows begin at `first_row`; codes and scales begin at page 0, KV head 0. `format`: 0 bf16, 1 fp8, 2
// nvfp4. Launches on `stream`; returns a cudaError_t.
extern "C" int winnow_prefill_attend(const void* entries, const void* bins, const void* shares,
                                     const void* kv_lens, const void* tables, int64_t table_width,
                                     int requests, int rows, int topk, int first_head,
                                     const void* q, int64_t q_row, int64_t q_head,
                                     int64_t all_rows, int all_heads, int first_row, int format,
                                     const void* key_codes, const void* key_scales,
                                     const void* value_codes, const void* value_scales,
                                     int64_t page_bytes, int64_t head_bytes, float score_scale,
                                     void* partial, void* logs, int ctas, void* stream) {
  Attend a;
  a.tiles = {static_cast<const int32_t*>(entries), static_cast<const int32_t*>(bins),
             static_cast<const int32_t*>(shares),  static_cast<const int64_t*>(kv_lens),
             static_cast<const int64_t*>(tables),  static_cast<int>(table_width),
             requests, rows, topk, first_head};
  a.pages = {static_cast<const uint8_t*>(key_codes), static_cast<const uint8_t*>(key_scales),
             static_cast<const uint8_t*>(value_codes), static_cast<const uint8_t*>(value_scales),
             page_bytes, head_bytes};
  a.partial = static_cast<uint16_t*>(partial);
  a.logs = static_cast<float*>(logs);
  a.first_row = first_row;
  a.score_scale = format == kNvfp4 ? score_scale * kKeyFactor : score_scale;
  a.value_factor = format == kNvfp4 ? kValueFactor : 1.0f;
  CUtensorMap map;
  const cudaError_t error = query_map(&map, q, all_rows, all_heads, q_row, q_head);
  if (error != cudaSuccess) return error;
  const auto s = static_cast<cudaStream_t>(stream);
  return format == kNvfp4 ? launch<kNvfp4>(map, a, ctas, s)
         : format == kFp8 ? launch<kFp8>(map, a, ctas, s)
                          : launch<kBf16>(map, a, ctas, s);
}

// Attention of many query rows over selected blocks, on Hopper (sm_90a): blocks outside, rows inside.
//
// Rows that select a block are listed under it, so that K and V of a block are expanded to 16 bits
// in shared memory once for all of them. A tile is four query rows with their 16 heads: the M = 64
// of wgmma. One tile against one block needs no running softmax: its normalised output and the
// logarithm of its sum go to the pair's own place in scratch, and `combine` merges the at most
// `topk` places of a row in fixed order. So results do not depend on the order of the lists, which
// atomics decide: a row of a product depends on no other row.
//
// `attend` is persistent: each CTA takes an equal share of the tiles. One warp fetches queries
// (tensor copies, 128-byte swizzle), three warps expand the next block while three warpgroups work
// on this one, a tile each.

#include "prefill_softmax.cuh"

namespace {

constexpr int kRows = 4;       // query rows of a tile
constexpr int kConsumers = 3;  // warpgroups with a tile each
constexpr int kStages = 2 * kConsumers;  // a stage is always of the same warpgroup
constexpr int kExpanders = 3;  // warps
constexpr int kThreads = 128 * (kConsumers + 1);
constexpr int kQueryHalf = kRows * kRowHalf;
constexpr int kProducerRegisters = 104;
constexpr int kConsumerRegisters = 136;

// The tiles of one group of KV heads, as prefill_lists.cu numbers them. A bin of the group is
// (head, request, block); a tile has pairs of one bin.
struct Tiles {
  const int32_t* entries;  // [tiles, 4] pair << 7 | tokens it sees - 1; -1: no pair
  const int32_t* bins;     // [tiles]
  const int32_t* count;
  const int64_t* kv_lens;
  const int64_t* tables;
  int table_width, requests, rows, topk, first_head;
};

struct Shared {
  uint8_t keys[2][2][kHalfBytes];  // [buffer][half of the dims][token, 128 bytes]
  uint8_t values[2][2][kHalfBytes];
  uint8_t queries[kStages][2][kQueryHalf];
  int4 entries[kStages];
  int2 origin[kStages];  // number of the block within the CTA; first pair's place in scratch
  uint64_t query_full[kStages], query_empty[kStages];
  uint64_t block_full[2], block_empty[2];
};

struct Attend {
  Tiles tiles;
  Stored pages;
  uint16_t* partial;
  float* logs;
  int first_row;
  float score_scale;   // makes scores exponents of 2
  float value_factor;  // of the sums of V
};

struct Share {
  int begin, end;
};

__device__ __forceinline__ Share share_of(const Tiles& tiles) {
  const int64_t count = *tiles.count;
  return {static_cast<int>(count * blockIdx.x / gridDim.x),
          static_cast<int>(count * (blockIdx.x + 1) / gridDim.x)};
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
  int block = -1, last_bin = -1;
  for (int at = begin; at < end; at += 8) {
    const int tile = at + lane / 4;
    const int entry = tile < end ? l.entries[4 * tile + lane % 4] : -1;
    const int bin = tile < end ? l.bins[tile] : -1;
    const int row = (entry >> 7) / l.topk, head = bin / (l.requests * l.table_width);
    for (int i = 0; i < 8 && at + i < end; ++i) {
      const int stage = free_stage(shared, at + i - begin);
      const int its_bin = __shfl_sync(kAll, bin, 4 * i);
      block += its_bin != last_bin;
      last_bin = its_bin;
      const bool mine = lane / 4 == i;
      const int rows_here = __popc(__ballot_sync(kAll, mine && entry >= 0));
      if (mine) reinterpret_cast<int*>(&shared.entries[stage])[lane % 4] = entry;
      if (lane == 4 * i) shared.origin[stage] = make_int2(block, head * l.rows * l.topk);
      __syncwarp();
      if (lane == 0) barrier_expect(shared.query_full[stage], rows_here * 2 * kRowHalf);
      __syncwarp();
      if (mine && entry >= 0) {
        uint8_t* to = shared.queries[stage][0] + (lane % 4) * kRowHalf;
        const int first = (l.first_head + head) * kHeads;
        copy_queries(map, to, 0, first, a.first_row + row, shared.query_full[stage]);
        copy_queries(map, to + kQueryHalf, 64, first, a.first_row + row, shared.query_full[stage]);
      }
    }
  }
  // A last stage for each warpgroup without a tile, so that all let go of all blocks but the last.
  for (int i = 0; i < kConsumers; ++i) {
    const int stage = free_stage(shared, end - begin + i);
    if (lane == 0) {
      shared.origin[stage] = make_int2(block, 0);
      barrier_arrive(shared.query_full[stage]);
    }
  }
}

// Three warps: K and V of each block that the CTA's tiles need, one block ahead.
template <Format kFormat>
__device__ __forceinline__ void expand_blocks(const Attend& a, Shared& shared, int thread) {
  const Tiles& l = a.tiles;
  const auto [begin, end] = share_of(l);
  const int lane = thread % 32;
  int block = 0, last_bin = -1;
  for (int at = begin; at < end; at += 32) {
    const int bin = at + lane < end ? l.bins[at + lane] : -1;
    int before = __shfl_up_sync(kAll, bin, 1);
    if (lane == 0) before = last_bin;
    last_bin = __shfl_sync(kAll, bin, 31);
    for (unsigned changes = __ballot_sync(kAll, bin >= 0 && bin != before); changes != 0;
         changes &= changes - 1, ++block) {
      const int its_bin = __shfl_sync(kAll, bin, __ffs(changes) - 1);
      const int of_head = its_bin / l.table_width, id = its_bin % l.table_width;
      const int head = of_head / l.requests, request = of_head % l.requests;
      const int64_t page = l.tables[int64_t{request} * l.table_width + id];
      const int64_t rest = l.kv_lens[request] - int64_t{id} * kBlock;
      const int valid = static_cast<int>(rest < kBlock ? rest : kBlock);
      const int64_t offset =
          page * a.pages.page_bytes + (l.first_head + head) * a.pages.head_bytes;
      const uint8_t* key_codes = a.pages.key_codes + offset;
      const uint8_t* key_steps = a.pages.key_scales + offset;
      const uint8_t* value_codes = a.pages.value_codes + offset;
      const uint8_t* value_steps = a.pages.value_scales + offset;
      Expansion<kFormat, kExpanders, kFormat == kBf16 ? 2 : 3> keys, values;
      keys.begin(key_codes, key_steps, valid, thread);
      values.begin(value_codes, value_steps, valid, thread);
      const int buffer = block % 2;
      if (block >= 2) barrier_wait(shared.block_empty[buffer], (block / 2 - 1) & 1);
      keys.template finish<false>(key_codes, key_steps, valid, shared.keys[buffer][0], thread);
      values.template finish<true>(value_codes, value_steps, valid, shared.values[buffer][0],
                                   thread);
      // The tensor cores read what ordinary stores wrote.
      asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
      __syncwarp();
      if (lane == 0) barrier_arrive(shared.block_full[buffer]);
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
  const int g = lane / 4, t = lane % 4;
  int block = 0;
  bool waited = false;
  for (int number = group;; number += kConsumers) {
    const int stage = number % kStages;
    barrier_wait(shared.query_full[stage], (number / kStages) & 1);
    const int2 origin = shared.origin[stage];
    // A block is waited for even if none of its tiles is this warpgroup's: its buffer counts one
    // release from everyone before it is filled again.
    for (; block < origin.x; ++block, waited = false) {
      if (!waited) barrier_wait(shared.block_full[block % 2], block / 2 & 1);
      if (lane == 0) barrier_arrive(shared.block_empty[block % 2]);
    }
    if (number >= end - begin) return;
    const int entry = reinterpret_cast<const int*>(&shared.entries[stage])[warp];
    if (!waited) barrier_wait(shared.block_full[block % 2], block / 2 & 1);
    waited = true;

    float s[64];
    const uint64_t q = operand(shared_address(shared.queries[stage][0]), 16);
    const uint64_t k = operand(shared_address(shared.keys[block % 2][0]), 16);
    const uint64_t v = operand(shared_address(shared.values[block % 2][0]), kHalfBytes);
    products_begin();
#pragma unroll
    for (int i = 0; i < kDim / 16; ++i) {
      const int inside = (i % 4) * 32;
      multiply_scores(s, advance(q, (i / 4) * kQueryHalf + inside),
                      advance(k, (i / 4) * kHalfBytes + inside), i > 0);
    }
    products_commit();
    products_wait(s);
    __syncwarp();
    if (lane == 0) barrier_arrive(shared.query_empty[stage]);

    const int limit = (entry & 127) + 1;
    if (limit < kBlock) mask_from(s, limit, t);
    float largest[2], sum[2] = {};
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const float m = largest_of(s, h);
      // Where nothing is above -inf, any finite number keeps exponents from being NaN.
      largest[h] = m == -INFINITY ? 0.0f : m * a.score_scale;
    }
    uint32_t p[8][4];
    weigh<kHalf>(s, a.score_scale, largest, sum, p);

    float o[64];
    products_begin();
#pragma unroll
    for (int i = 0; i < kBlock / 16; ++i) {
      multiply_values<kHalf>(o, p[i], advance(v, i * 2048), i > 0);
    }
    products_commit();
#pragma unroll
    for (int h = 0; h < 2; ++h) sum[h] = sum_over_lanes(sum[h]);
    products_wait(o);
    if (entry < 0) continue;
    const int64_t pair = origin.y + (entry >> 7);
    float over[2];
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      over[h] = sum[h] == 0.0f ? 0.0f : __fdividef(a.value_factor, sum[h]);
      if (t == 0) {
        a.logs[pair * kHeads + g + 8 * h] =
            sum[h] == 0.0f ? -INFINITY : largest[h] + __log2f(sum[h]);
      }
    }
    store_row<kHalf>(a.partial + pair * kRowValues, o, lane, over);
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
      barrier_init(shared.query_full[i], 1);
      barrier_init(shared.query_empty[i], 4);
    }
    for (int i = 0; i < 2; ++i) {
      barrier_init(shared.block_full[i], kExpanders);
      barrier_init(shared.block_empty[i], 4 * kConsumers);
    }
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
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
extern "C" int winnow_prefill_attend(const void* entries, const void* bins, const void* count,
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
             static_cast<const int32_t*>(count),   static_cast<const int64_t*>(kv_lens),
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

// Attention of many query rows over all visible tokens, on Hopper (sm_90a).
//
// A CTA takes twelve query rows of one request and the 16 heads of one KV head: three warpgroups of
// four rows each (M = 64) walk the request's blocks together, with a running softmax. Three warps
// expand the next block to 16 bits in shared memory while the warpgroups work on this one.

#include "prefill_softmax.cuh"

namespace {

constexpr int kRows = 4;       // query rows of a warpgroup
constexpr int kConsumers = 3;  // warpgroups
constexpr int kTile = kRows * kConsumers;
constexpr int kExpanders = 3;  // warps
constexpr int kThreads = 128 * (kConsumers + 1);
constexpr int kQueryHalf = kRows * kRowHalf;
constexpr int kTokens = 64;  // of a step

struct Params {
  Stored pages;
  const int64_t* positions;
  const int64_t* row_starts;
  const int64_t* kv_lens;
  const int64_t* tables;
  int64_t table_width;
  int rows, requests, kv_heads;
  float score_scale;  // makes scores exponents of 2
  float value_scale;
  __nv_bfloat16* out;
};

struct Shared {
  uint8_t keys[2][2][kHalfBytes];  // [buffer][half of the dims][token, 128 bytes]
  uint8_t values[2][2][kHalfBytes];
  uint8_t queries[kConsumers][2][kQueryHalf];
  uint64_t query_full, block_full[2], block_empty[2];
};

struct Tile {
  int request, first, end;  // rows
  int64_t visible;          // tokens that its last row sees; 0 for padding, or where no rows are
};

// Tile number `index` of the requests' rows, the last first: they see most. Every lane of a warp.
__device__ __forceinline__ Tile tile_of(const Params& p, int index, int lane) {
  int before = 0;
  for (int base = 0; base < p.requests; base += 32) {
    const int request = base + lane;
    const int first = request < p.requests ? static_cast<int>(p.row_starts[request]) : 0;
    const int end = request < p.requests ? static_cast<int>(p.row_starts[request + 1]) : 0;
    const int tiles = (end - first + kTile - 1) / kTile;
    int through = tiles;
    for (int d = 1; d < 32; d *= 2) {
      const int below = __shfl_up_sync(kAll, through, d);
      if (lane >= d) through += below;
    }
    const int mine = before + through - tiles;  // the request's first tile
    const unsigned found = __ballot_sync(kAll, index >= mine && index < mine + tiles);
    if (found != 0) {
      const int from = __ffs(found) - 1;
      const int its_first = __shfl_sync(kAll, first, from), its_end = __shfl_sync(kAll, end, from);
      const int its_tiles = __shfl_sync(kAll, tiles, from);
      const int number = its_tiles - 1 - (index - __shfl_sync(kAll, mine, from));
      Tile tile{base + from, its_first + number * kTile, 0, 0};
      tile.end = min(tile.first + kTile, its_end);
      if (p.kv_lens[tile.request] > 0) tile.visible = p.positions[tile.end - 1] + 1;
      return tile;
    }
    before += __shfl_sync(kAll, through, 31);
  }
  return {0, 0, 0, 0};
}

template <Format kFormat>
__device__ __forceinline__ void expand_blocks(const Params& p, const Tile& tile, Shared& shared,
                                              int thread) {
  const int64_t kv_len = p.kv_lens[tile.request];
  const int64_t* table = p.tables + tile.request * p.table_width;
  const int blocks = static_cast<int>((tile.visible + kBlock - 1) / kBlock);
  // K of the next block is on its way while V of this one is expanded, and V while K is.
  Expansion<kFormat, kExpanders, kFormat == kBf16 ? 2 : 3> keys, values;
  const auto valid_of = [&](int block) {
    const int64_t rest = kv_len - int64_t{block} * kBlock;
    return static_cast<int>(rest < kBlock ? rest : kBlock);
  };
  const auto offset_of = [&](int block) {
    return table[block] * p.pages.page_bytes + blockIdx.y * p.pages.head_bytes;
  };
  int64_t offset = 0;
  if (blocks > 0) {
    offset = offset_of(0);
    keys.begin(p.pages.key_codes + offset, p.pages.key_scales + offset, valid_of(0), thread);
  }
  for (int block = 0; block < blocks; ++block) {
    const int valid = valid_of(block), buffer = block % 2;
    const uint8_t *codes = p.pages.value_codes + offset, *steps = p.pages.value_scales + offset;
    values.begin(codes, steps, valid, thread);
    if (block >= 2) barrier_wait(shared.block_empty[buffer], (block / 2 - 1) & 1);
    keys.template finish<false>(p.pages.key_codes + offset, p.pages.key_scales + offset, valid,
                                shared.keys[buffer][0], thread);
    if (block + 1 < blocks) {
      offset = offset_of(block + 1);
      keys.begin(p.pages.key_codes + offset, p.pages.key_scales + offset, valid_of(block + 1),
                 thread);
    }
    values.template finish<true>(codes, steps, valid, shared.values[buffer][0], thread);
    // The tensor cores read what ordinary stores wrote.
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
    warp_arrive(shared.block_full[buffer], thread % 32);
  }
}

// A warpgroup: four of the tile's rows. A warp has one; lane (g, t) = (lane / 4, lane % 4) has heads
// g and g + 8, and of 128 columns 8j + 2t and 8j + 2t + 1.
template <Format kFormat>
__device__ __forceinline__ void consume(const Params& p, const Tile& tile, Shared& shared,
                                        int group, int warp, int lane) {
  constexpr bool kHalf = kFormat != kBf16;
  const int t = lane % 4;
  const int row = tile.first + group * kRows + warp;
  const int64_t visible = row < tile.end && tile.visible > 0 ? p.positions[row] + 1 : 0;
  const int blocks = static_cast<int>((tile.visible + kBlock - 1) / kBlock);
  float o[64], largest[2] = {kNothing, kNothing}, sum[2] = {};
#pragma unroll
  for (int i = 0; i < 64; ++i) o[i] = 0.0f;
  if (blocks > 0) barrier_wait(shared.query_full, 0);
  const uint64_t q = operand(shared_address(shared.queries[group][0]), 16);
  for (int block = 0; block < blocks; ++block) {
    const int buffer = block % 2;
    barrier_wait(shared.block_full[buffer], (block / 2) & 1);
    const uint64_t k = operand(shared_address(shared.keys[buffer][0]), 16);
    const uint64_t v = operand(shared_address(shared.values[buffer][0]), kHalfBytes);
    // Half the tokens at a time: scores, sums and weights of all would not fit the registers.
#pragma unroll
    for (int first = 0; first < kBlock; first += kTokens) {
      float s[32];
      wgmma_fence();
#pragma unroll
      for (int i = 0; i < kDim / 16; ++i) {
        const int inside = (i % 4) * 32;
        multiply_scores(s, advance(q, (i / 4) * kQueryHalf + inside),
                        advance(k, (i / 4) * kHalfBytes + first * 128 + inside), i > 0);
      }
      wgmma_commit();
      products_wait(s);
      const int64_t rest = visible - int64_t{block} * kBlock - first;
      if (rest < kTokens) mask_from(s, static_cast<int>(rest), t);
      uint32_t w[4][4];
      add_weights<kHalf>(s, p.score_scale, largest, sum, o, w);
      wgmma_fence();
#pragma unroll
      for (int i = 0; i < kTokens / 16; ++i) {
        multiply_values<kHalf>(o, w[i], advance(v, first * 128 + i * 2048), 1);
      }
      wgmma_commit();
      products_wait(o);
    }
    warp_arrive(shared.block_empty[buffer], lane);
  }
  if (row >= tile.end) return;
  float over[2];
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    const float total = sum_over_lanes(sum[h]);
    over[h] = visible > 0 ? p.value_scale / total : 0.0f;  // a row of padding sees nothing
  }
  store_row<false>(p.out + (int64_t{row} * p.kv_heads + blockIdx.y) * kRowValues, o, lane, over);
}

template <Format kFormat>
__global__ void __launch_bounds__(kThreads, 1)
    attend(const __grid_constant__ CUtensorMap map, const __grid_constant__ Params p) {
  extern __shared__ __align__(1024) uint8_t memory[];
  auto& shared = *reinterpret_cast<Shared*>(memory);
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  if (threadIdx.x == 0) {
    barrier_init(shared.query_full, kWarpArrivals);
    for (int i = 0; i < 2; ++i) {
      barrier_init(shared.block_full[i], kExpanders * kWarpArrivals);
      barrier_init(shared.block_empty[i], 4 * kConsumers * kWarpArrivals);
    }
    barriers_made();
  }
  const Tile tile = tile_of(p, blockIdx.x, lane);
  __syncthreads();
  if (tile.first >= tile.end) return;
  if (warp < 4) {
    if (warp > 0) {
      expand_blocks<kFormat>(p, tile, shared, threadIdx.x - 32);
    } else if (tile.visible > 0) {
      const int rows = tile.end - tile.first;
      warp_expect(shared.query_full, rows * 2 * kRowHalf, lane);
      if (lane < 2 * rows) {
        const int row = lane / 2, half = lane % 2;
        uint8_t* to = shared.queries[row / kRows][half] + (row % kRows) * kRowHalf;
        copy_queries(map, to, 64 * half, blockIdx.y * kHeads, tile.first + row, shared.query_full);
      }
    }
  } else {
    consume<kFormat>(p, tile, shared, warp / 4 - 1, warp % 4, lane);
  }
}

template <Format kFormat>
cudaError_t launch(const CUtensorMap& map, const Params& p, int tiles, cudaStream_t stream) {
  const cudaError_t error = cudaFuncSetAttribute(
      attend<kFormat>, cudaFuncAttributeMaxDynamicSharedMemorySize, sizeof(Shared));
  if (error != cudaSuccess) return error;
  attend<kFormat><<<dim3(tiles, p.kv_heads), kThreads, sizeof(Shared), stream>>>(map, p);
  return cudaGetLastError();
}

}  // namespace

// `q` [rows, kv_heads * 16, 128] in bf16, to `out`, contiguous; codes and scales begin at page 0, KV
// head 0. `format`: 0 bf16, 1 fp8, 2 nvfp4. `tiles`, at least ceil(rows of a request / 12) of all
// requests. Launches on `stream`; returns a cudaError_t.
extern "C" int winnow_dense_prefill(const void* q, int64_t q_row, int64_t q_head,
                                    const void* positions, const void* row_starts,
                                    const void* kv_lens, const void* tables, int64_t table_width,
                                    int rows, int requests, int kv_heads, int format,
                                    const void* key_codes, const void* key_scales,
                                    const void* value_codes, const void* value_scales,
                                    int64_t page_bytes, int64_t head_bytes, float score_scale,
                                    float value_scale, void* out, int tiles, void* stream) {
  Params p;
  p.pages = {static_cast<const uint8_t*>(key_codes), static_cast<const uint8_t*>(key_scales),
             static_cast<const uint8_t*>(value_codes), static_cast<const uint8_t*>(value_scales),
             page_bytes, head_bytes};
  p.positions = static_cast<const int64_t*>(positions);
  p.row_starts = static_cast<const int64_t*>(row_starts);
  p.kv_lens = static_cast<const int64_t*>(kv_lens);
  p.tables = static_cast<const int64_t*>(tables);
  p.table_width = table_width;
  p.rows = rows, p.requests = requests, p.kv_heads = kv_heads;
  p.score_scale = format == kNvfp4 ? score_scale * kKeyFactor : score_scale;
  p.value_scale = format == kNvfp4 ? value_scale * kValueFactor : value_scale;
  p.out = static_cast<__nv_bfloat16*>(out);
  CUtensorMap map;
  const cudaError_t error = query_map(&map, q, rows, kv_heads * kHeads, q_row, q_head);
  if (error != cudaSuccess) return error;
  const auto s = static_cast<cudaStream_t>(stream);
  return format == kNvfp4 ? launch<kNvfp4>(map, p, tiles, s)
         : format == kFp8 ? launch<kFp8>(map, p, tiles, s)
                          : launch<kBf16>(map, p, tiles, s);
}

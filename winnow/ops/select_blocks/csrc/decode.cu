// select_blocks for a few query rows a request, over NVFP4 index keys, on Hopper (sm_90a).
//
// Two kernels. `score` writes the score of every block that is wholly in a row's past, `choose`
// takes the best topk - 1 of them and the current block. The meaning is reference.py's.
//
// score: the blocks of all requests form one list of units that is cut into equal ranges, one a
// warp, so that ragged lengths load the machine evenly. A warp copies its keys with the bulk copy
// engine into a ring of its own in shared memory and waits for no other warp.
// Tokens are the M of mma.m16n8k16, query columns (row, head) its N. The order of K is free where
// keys and queries agree, and so is the order of tokens under a maximum: lane (g, t) = (lane / 4,
// lane % 4) reads dimensions 32 t .. 32 t + 31 of tokens g and g + 8 and gives them to the tensor
// core as they come.
//
// Exactness. A code's bits, moved, are the fp16 number code * 2^-14, subnormals included. With
// n = 2 |code| <= 12 and a scale of m * 2^-9 (m an integer of at most 4 significant bits) the
// product is n m 2^-24: an integer multiple of fp16's smallest number, at most 6 significant
// bits, at most 6 * 448 * 2^-14 < 1. So fp16 holds it exactly. A scale of NaN gives NaN. Queries
// are multiplied by a power of two that brings their largest magnitude into [2^14, 2^15), which
// changes no order: bf16 values are then exact in fp16 down to 2^-31 of the largest, and fp32
// values are the sum of two fp16 numbers but for 2^-22 of themselves or 2^-38 of the largest. The
// tensor core adds in fp32.
//
// choose: one block of threads a (row, head). It is launched early and waits on the machine for
// the scores. A bound from maxima leaves few candidates, which are ranked by counting.

#include <cuda_fp16.h>
#include <cuda_fp8.h>

#include <cstdint>

namespace {

constexpr int kBlockTokens = 128;
constexpr int kDim = 128;
constexpr int kTokenCodes = kDim / 2;
constexpr int kTokenScales = kDim / 16;
constexpr int kTileTokens = 16;
constexpr int kWarps = 16;
constexpr unsigned kAll = 0xFFFFFFFFu;

constexpr int kStages = 2;
constexpr int kStageTokens = 64;
constexpr int kStageCodes = kStageTokens * kTokenCodes;
constexpr int kStageBytes = kStageTokens * (kTokenCodes + kTokenScales);
constexpr int kRingBytes = kStages * kStageBytes;
constexpr int kBarriers = kWarps * kRingBytes;
constexpr int kStarts = kBarriers + kWarps * kStages * 8;

constexpr int kChooseThreads = 256;
constexpr int kChooseWarps = kChooseThreads / 32;
constexpr int kMaxTopk = 16;
constexpr int kRanked = 128;
// Blocks are split in parts only where there are at most half as many as warps.
constexpr int kMaxMultiprocessors = 256;
constexpr int kSplitItems = kMaxMultiprocessors * kWarps / 2 / kChooseThreads;

struct Keys {
  const uint8_t* codes;
  const uint8_t* scales;
  int64_t page_stride;
};

struct Queries {
  const void* data;
  int64_t row_stride;  // in elements
  int64_t head_stride;
  int head_bits;  // heads = 1 << head_bits; query column c is row c >> head_bits of a pass
};

struct Requests {
  const int64_t* positions;
  const int64_t* row_request;
  const int64_t* row_starts;
  const int64_t* kv_lens;
  const int64_t* tables;
  int64_t table_stride;
  int count;
  int topk;
};

struct Scores {
  float* data;  // [rows * heads, stride]: a block's parts one after another; their maximum counts
  int64_t stride;
};

// Blocks to be scored for a request: those before the last row's own, none where the selection
// is all visible blocks whatever the scores.
__device__ int scored_blocks(const Requests& requests, int64_t kv_len) {
  int64_t past = (kv_len - 1) / kBlockTokens;
  return kv_len > 0 && past >= requests.topk ? static_cast<int>(past) : 0;
}

// Units of one request: a block for each pass of 1 << pass_bits of its rows.
__device__ int units_of(const Requests& requests, int request, int pass_bits) {
  const int rows =
      static_cast<int>(requests.row_starts[request + 1] - requests.row_starts[request]);
  const int passes = (rows + (1 << pass_bits) - 1) >> pass_bits;
  return scored_blocks(requests, requests.kv_lens[request]) * passes;
}

// Rows of a pass, as a power of two, where it has `tiles` times 8 query columns.
__host__ __device__ int pass_bits_of(int tiles, int head_bits) {
  return (tiles == 1 ? 3 : tiles == 2 ? 4 : 5) - head_bits;
}

// A block is split among 1 << part_bits warps, for latency where there are few blocks.
__device__ int part_bits_of(int units, int workers) {
  return units <= workers / 4 ? 2 : units <= workers / 2 ? 1 : 0;
}

__device__ uint32_t shared_address(const void* pointer) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(pointer));
}

__device__ void barrier_init(uint32_t barrier) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;" ::"r"(barrier) : "memory");
}

__device__ void barrier_expect(uint32_t barrier, int bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes)
               : "memory");
}

__device__ void barrier_wait(uint32_t barrier, uint32_t parity) {
  asm volatile(
      "{\n"
      ".reg .pred done;\n"
      "again:\n"
      "mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
      "@!done bra again;\n"
      "}\n" ::"r"(barrier), "r"(parity)
      : "memory");
}

__device__ void bulk_copy(uint32_t to, const void* from, int bytes, uint32_t barrier) {
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];"
      ::"r"(to), "l"(from), "r"(bytes), "r"(barrier)
      : "memory");
}

__device__ void mma(float (&sum)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, "
      "{%8, %9}, {%0, %1, %2, %3};"
      : "+f"(sum[0]), "+f"(sum[1]), "+f"(sum[2]), "+f"(sum[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

__device__ uint32_t bits(__half2 x) { return *reinterpret_cast<uint32_t*>(&x); }
__device__ __half2 halves(uint32_t x) { return *reinterpret_cast<__half2*>(&x); }

// Eight codes as four fp16 pairs, pair j = codes (j, j + 4), each times the scale. A code's high
// byte in fp16 is s000eem0, so two codes share a byte-wise move before they are spread.
__device__ void expand(uint32_t word, __half2 scale, uint32_t (&pairs)[4]) {
  uint32_t even = ((word << 4) & 0x80808080u) | ((word << 1) & 0x0E0E0E0Eu);
  uint32_t odd = (word & 0x80808080u) | ((word >> 3) & 0x0E0E0E0Eu);
  pairs[0] = bits(__hmul2(halves(__byte_perm(even, 0, 0x2404)), scale));
  pairs[1] = bits(__hmul2(halves(__byte_perm(odd, 0, 0x2404)), scale));
  pairs[2] = bits(__hmul2(halves(even & 0xFF00FF00u), scale));
  pairs[3] = bits(__hmul2(halves(odd & 0xFF00FF00u), scale));
}

// Two E4M3 scales as fp16, exactly.
__device__ __half2 scale_pair(const uint8_t* scales) {
  return __half2(__nv_cvt_fp8x2_to_halfraw2(*reinterpret_cast<const uint16_t*>(scales), __NV_E4M3));
}

__device__ void load_query(const float* from, float (&to)[32]) {
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    float4 four = reinterpret_cast<const float4*>(from)[i];
    to[4 * i] = four.x, to[4 * i + 1] = four.y, to[4 * i + 2] = four.z, to[4 * i + 3] = four.w;
  }
}

struct Bf16 {
  uint16_t bits;
};

__device__ void load_query(const Bf16* from, float (&to)[32]) {
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    uint4 eight = reinterpret_cast<const uint4*>(from)[i];
    const uint32_t words[4] = {eight.x, eight.y, eight.z, eight.w};
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      to[8 * i + 2 * j] = __uint_as_float(words[j] << 16);
      to[8 * i + 2 * j + 1] = __uint_as_float(words[j] & 0xFFFF0000u);
    }
  }
}

// The power of two that brings the largest finite magnitude of a query into [2^14, 2^15).
__device__ float query_scale(const float (&query)[32]) {
  uint32_t largest = 0;
#pragma unroll
  for (int i = 0; i < 32; ++i) {
    uint32_t magnitude = __float_as_uint(query[i]) & 0x7FFFFFFFu;
    largest = max(largest, magnitude < 0x7F800000u ? magnitude : 0u);
  }
  largest = max(largest, __shfl_xor_sync(kAll, largest, 1));
  largest = max(largest, __shfl_xor_sync(kAll, largest, 2));
  int exponent = min(254, 268 - static_cast<int>(largest >> 23));
  return __uint_as_float(static_cast<uint32_t>(exponent) << 23);
}

// Query columns of one pass in the order in which `expand` gives key dimensions. LOW: what fp16
// leaves of fp32 values, as a second operand.
template <int TILES, bool LOW>
struct Fragments {
  uint32_t high[TILES][16];
  uint32_t low[LOW ? TILES : 1][LOW ? 16 : 1];
};

template <typename Q, int TILES>
__device__ void load_fragments(const Queries& queries, int first_row, int end_row,
                               Fragments<TILES, sizeof(Q) == 4>& fragments) {
  const int g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
#pragma unroll
  for (int tile = 0; tile < TILES; ++tile) {
    const int column = 8 * tile + g;
    const int row = first_row + (column >> queries.head_bits);
    const int head = column & ((1 << queries.head_bits) - 1);
    float query[32] = {};
    if (row < end_row) {
      load_query(static_cast<const Q*>(queries.data) + row * queries.row_stride +
                     head * queries.head_stride + 32 * t,
                 query);
    }
    const float scale = query_scale(query);
#pragma unroll
    for (int i = 0; i < 16; ++i) {
      const int first = 8 * (i / 4) + i % 4;
      const float a = query[first] * scale, b = query[first + 4] * scale;
      const __half2 high = __floats2half2_rn(a, b);
      fragments.high[tile][i] = bits(high);
      if constexpr (sizeof(Q) == 4) {
        const float2 back = __half22float2(high);
        // Infinity minus itself would turn an infinite score into NaN.
        fragments.low[tile][i] =
            bits(__floats2half2_rn(isinf(a) ? 0.0f : a - back.x, isinf(b) ? 0.0f : b - back.y));
      }
    }
  }
}

// Products of 16 tokens with the query columns, into the running maxima of a lane's columns.
template <int TILES, bool LOW>
__device__ void score_tile(const uint8_t* codes, const uint8_t* scales,
                           const Fragments<TILES, LOW>& queries, float (&best)[TILES][2]) {
  const int g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
  uint4 words[2];
  __half2 group_scales[2];
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int token = g + 8 * half;
    words[half] = *reinterpret_cast<const uint4*>(codes + token * kTokenCodes + 16 * t);
    group_scales[half] = scale_pair(scales + token * kTokenScales + 2 * t);
  }
  // Two chains of sums where one would leave the tensor core waiting for itself.
  constexpr int kChains = TILES == 1 ? 2 : 1;
  float sums[TILES][kChains][4] = {};
  const uint32_t upper[4] = {words[0].x, words[0].y, words[0].z, words[0].w};
  const uint32_t lower[4] = {words[1].x, words[1].y, words[1].z, words[1].w};
#pragma unroll
  for (int word = 0; word < 4; ++word) {
    uint32_t a[4], b[4];
    expand(upper[word],
           word < 2 ? __low2half2(group_scales[0]) : __high2half2(group_scales[0]), a);
    expand(lower[word],
           word < 2 ? __low2half2(group_scales[1]) : __high2half2(group_scales[1]), b);
#pragma unroll
    for (int step = 0; step < 2; ++step) {
      const uint32_t keys[4] = {a[2 * step], b[2 * step], a[2 * step + 1], b[2 * step + 1]};
      const int i = 4 * word + 2 * step;
#pragma unroll
      for (int tile = 0; tile < TILES; ++tile) {
        float(&sum)[4] = sums[tile][step % kChains];
        mma(sum, keys, queries.high[tile][i], queries.high[tile][i + 1]);
        if constexpr (LOW) mma(sum, keys, queries.low[tile][i], queries.low[tile][i + 1]);
      }
    }
  }
#pragma unroll
  for (int tile = 0; tile < TILES; ++tile) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const float product = sums[tile][0][i] + (kChains == 2 ? sums[tile][kChains - 1][i] : 0.0f);
      // fmaxf drops a NaN: the lowest of products.
      best[tile][i % 2] = fmaxf(best[tile][i % 2], product);
    }
  }
}

// The maximum over a warp's tokens, written for each column that is a row's.
template <int TILES>
__device__ void store_scores(const Scores& scores, const Queries& queries, int first_row,
                             int end_row, int place, float (&best)[TILES][2]) {
  const int g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
#pragma unroll
  for (int tile = 0; tile < TILES; ++tile) {
#pragma unroll
    for (int side = 0; side < 2; ++side) {
      float value = best[tile][side];
#pragma unroll
      for (int distance = 4; distance < 32; distance *= 2)
        value = fmaxf(value, __shfl_xor_sync(kAll, value, distance));
      const int column = 8 * tile + 2 * t + side;
      if (g == 0 && first_row + (column >> queries.head_bits) < end_row)
        scores.data[((first_row << queries.head_bits) + column) * scores.stride + place] = value;
    }
  }
}

// starts[r] = units before request r, for r up to requests.count, by one warp for its block.
__device__ void scan_units(const Requests& requests, int pass_bits, int* starts) {
  const int lane = threadIdx.x % 32;
  int before = 0;
  if (lane == 0) starts[0] = 0;
  for (int base = 0; base < requests.count; base += 32) {
    const int request = base + lane;
    int sum = request < requests.count ? units_of(requests, request, pass_bits) : 0;
#pragma unroll
    for (int distance = 1; distance < 32; distance *= 2) {
      const int other = __shfl_up_sync(kAll, sum, distance);
      if (lane >= distance) sum += other;
    }
    if (request < requests.count) starts[request + 1] = before + sum;
    before += __shfl_sync(kAll, sum, 31);
  }
}

// One lane's unit: part of a block of a request, for some of its rows.
struct Unit {
  int first_row, end_row;
  int64_t page;
  int place;  // of its score among a row's
  int part;
};

__device__ Unit resolve(const Requests& requests, const int* starts, int pass_bits, int part_bits,
                        int index) {
  const int whole = index >> part_bits;
  int low = 0, high = requests.count;
  while (high - low > 1) {
    const int middle = (low + high) / 2;
    (starts[middle] <= whole ? low : high) = middle;
  }
  const int blocks = scored_blocks(requests, requests.kv_lens[low]);
  int block = whole - starts[low], pass = 0;
  for (; block >= blocks; block -= blocks) ++pass;
  Unit unit;
  unit.page = requests.tables[low * requests.table_stride + block];
  unit.first_row = static_cast<int>(requests.row_starts[low]) + (pass << pass_bits);
  unit.end_row = static_cast<int>(requests.row_starts[low + 1]);
  unit.part = index & ((1 << part_bits) - 1);
  unit.place = (block << part_bits) + unit.part;
  return unit;
}

template <typename Q, int TILES>
__global__ void __launch_bounds__(kWarps * 32, 1)
    score(Keys keys, Queries queries, Requests requests, Scores scores) {
  constexpr bool kLow = sizeof(Q) == 4;
  extern __shared__ __align__(128) uint8_t shared[];
  // `choose` may take its place on the machine now: it waits for these scores by itself.
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  uint8_t* ring = shared + warp * kRingBytes;
  const uint32_t barriers = shared_address(shared + kBarriers) + warp * kStages * 8;
  int* starts = reinterpret_cast<int*>(shared + kStarts);
  if (lane == 0) {
    for (int i = 0; i < kStages; ++i) barrier_init(barriers + 8 * i);
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
  }
  const int pass_bits = pass_bits_of(TILES, queries.head_bits);
  if (warp == 0) scan_units(requests, pass_bits, starts);
  __syncthreads();

  const int workers = gridDim.x * kWarps, worker = warp * gridDim.x + blockIdx.x;
  const int part_bits = part_bits_of(starts[requests.count], workers);
  const int total = starts[requests.count] << part_bits;
  const int share = total / workers, rest = total % workers;
  const int first = worker * share + min(worker, rest), end = first + share + (worker < rest);
  const int unit_tokens = kBlockTokens >> part_bits;
  const int stage_tokens = min(unit_tokens, kStageTokens);
  const int stage_bits = unit_tokens > kStageTokens;  // a unit has 1 or 2 stages

  Fragments<TILES, kLow> fragments;
  int loaded_row = -1;
  uint32_t parity = 0;
  int slot = 0;
  for (int base = first; base < end; base += 32) {
    const int units = min(32, end - base), stages = units << stage_bits;
    Unit mine = {};
    if (lane < units) mine = resolve(requests, starts, pass_bits, part_bits, base + lane);
    const uint8_t* my_codes = keys.codes + mine.page * keys.page_stride;
    const uint8_t* my_scales = keys.scales + mine.page * keys.page_stride;
    // The lane that knows the page asks for it.
    auto fetch = [&](int stage, int to) {
      if (lane != stage >> stage_bits) return;
      const int token = mine.part * unit_tokens + (stage & stage_bits) * stage_tokens;
      const uint32_t barrier = barriers + 8 * to;
      const uint32_t place = shared_address(ring + to * kStageBytes);
      barrier_expect(barrier, stage_tokens * (kTokenCodes + kTokenScales));
      bulk_copy(place, my_codes + token * kTokenCodes, stage_tokens * kTokenCodes, barrier);
      bulk_copy(place + kStageCodes, my_scales + token * kTokenScales,
                stage_tokens * kTokenScales, barrier);
    };
    fetch(0, slot);

    for (int unit = 0; unit < units; ++unit) {
      const int first_row = __shfl_sync(kAll, mine.first_row, unit);
      const int end_row = __shfl_sync(kAll, mine.end_row, unit);
      if (first_row != loaded_row) {
        load_fragments<Q, TILES>(queries, first_row, end_row, fragments);
        loaded_row = first_row;
      }
      // Not sooner: every warp's first stage goes before any warp's second, so that computing
      // begins while most of the keys are still on their way.
      if (unit == 0)
        for (int i = 1; i < min(kStages, stages); ++i) fetch(i, (slot + i) % kStages);
      float best[TILES][2];
#pragma unroll
      for (int tile = 0; tile < TILES; ++tile) best[tile][0] = best[tile][1] = -INFINITY;
      for (int part = 0; part <= stage_bits; ++part) {
        const uint8_t* codes = ring + slot * kStageBytes;
        barrier_wait(barriers + 8 * slot, parity >> slot & 1);
#pragma unroll(TILES == 4 ? 1 : 2)
        for (int token = 0; token < stage_tokens; token += kTileTokens)
          score_tile<TILES, kLow>(codes + token * kTokenCodes,
                                  codes + kStageCodes + token * kTokenScales, fragments, best);
        // Every lane has read the stage before the copy engine writes it again.
        __syncwarp();
        parity ^= 1u << slot;
        const int next = (unit << stage_bits) + part + kStages;
        if (next < stages) fetch(next, slot);
        slot = slot + 1 == kStages ? 0 : slot + 1;
      }
      store_scores<TILES>(scores, queries, first_row, end_row,
                          __shfl_sync(kAll, mine.place, unit), best);
    }
  }
}

// Unsigned integers in the order of the scores: +0 ties with -0, and 0 is below every score.
__device__ uint32_t ordered(float score) {
  const uint32_t x = __float_as_uint(score + 0.0f);
  return x & 0x80000000u ? ~x : x | 0x80000000u;
}

__device__ float largest_of(float one) { return one; }
__device__ float largest_of(float2 two) { return fmaxf(two.x, two.y); }
__device__ float largest_of(float4 four) {
  return fmaxf(fmaxf(four.x, four.y), fmaxf(four.z, four.w));
}

// Keys of a thread's blocks from the scores of their parts; 0 from block `current` on. No load
// waits for another or hangs on a condition: one round trip to memory, not one an item.
template <typename Parts, int COUNT, int ITEMS>
__device__ void load_keys(const float* scores, int current, uint32_t (&keys)[ITEMS]) {
  Parts parts[COUNT];
#pragma unroll
  for (int i = 0; i < COUNT; ++i) {
    const int block = min(i * kChooseThreads + static_cast<int>(threadIdx.x), current - 1);
    parts[i] = reinterpret_cast<const Parts*>(scores)[block];
  }
#pragma unroll
  for (int i = 0; i < ITEMS; ++i) {
    const int block = i * kChooseThreads + threadIdx.x;
    keys[i] = i < COUNT && block < current ? ordered(largest_of(parts[min(i, COUNT - 1)])) : 0;
  }
}

// A key and its block as one number, in the order of selection: of equal keys the lower id first.
__device__ uint64_t pair_of(uint32_t key, int id) {
  return static_cast<uint64_t>(key) << 32 | static_cast<uint32_t>(~id);
}

// The pairs of one (row, head) that may be selected, and the blocks that are.
struct Choice {
  alignas(16) uint64_t pairs[kRanked];
  alignas(16) int selected[kMaxTopk];
  uint32_t group_keys[2 * kChooseWarps];
  int group_ids[kChooseWarps];
  int count;
};

// The largest key and, of those that hold it, the lowest id, in all lanes.
__device__ void warp_best(uint32_t& key, int& id) {
  const uint32_t largest = __reduce_max_sync(kAll, key);
  id = __reduce_min_sync(kAll, key == largest ? id : INT32_MAX);
  key = largest;
}

// Puts the keys of at least `bound` among the pairs, in any order, as long as there is room.
template <int ITEMS>
__device__ void collect(const uint32_t (&keys)[ITEMS], uint32_t bound, Choice& choice) {
  const int lane = threadIdx.x % 32;
  int own = 0;
#pragma unroll
  for (int i = 0; i < ITEMS; ++i) own += keys[i] >= bound;
  if (!__any_sync(kAll, own)) return;
  int before = own;
#pragma unroll
  for (int distance = 1; distance < 32; distance *= 2) {
    const int other = __shfl_up_sync(kAll, before, distance);
    if (lane >= distance) before += other;
  }
  int place = lane == 31 ? atomicAdd(&choice.count, before) : 0;
  place = __shfl_sync(kAll, place, 31) + before - own;
#pragma unroll
  for (int i = 0; i < ITEMS; ++i) {
    if (keys[i] >= bound) {
      if (place < kRanked) choice.pairs[place] = pair_of(keys[i], i * kChooseThreads + threadIdx.x);
      ++place;
    }
  }
}

// Ranks `count` pairs by counting those above each, four threads a pair; pairs beyond are 0.
__device__ void select_ranked(int count, int wanted, Choice& choice) {
  const int part = threadIdx.x % 4;
  for (int base = 0; base < count; base += kChooseThreads / 4) {
    const uint64_t own = choice.pairs[base + threadIdx.x / 4];
    int rank = 0;
    for (int i = part; i < count; i += 16) {
#pragma unroll
      for (int j = 0; j < 16; j += 4) rank += choice.pairs[i + j] > own;
    }
    rank += __shfl_xor_sync(kAll, rank, 1);
    rank += __shfl_xor_sync(kAll, rank, 2);
    if (part == 0 && own != 0 && rank < wanted)
      choice.selected[rank] = static_cast<int>(~static_cast<uint32_t>(own));
  }
}

// `wanted` < 16 best of the keys, into choice.selected in any order. Thread i's keys[j] has the
// id j * kChooseThreads + i; a key of 0 is no candidate; `candidates` > wanted ids have others.
template <int ITEMS>
__device__ void choose_best(uint32_t (&keys)[ITEMS], int candidates, int wanted, Choice& choice) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  static_assert(kRanked <= kChooseThreads, "candidates that all fit lie in keys[0]");
  if (candidates <= kRanked) {
    if (threadIdx.x < candidates) choice.pairs[threadIdx.x] = pair_of(keys[0], threadIdx.x);
    __syncthreads();
    select_ranked(candidates, wanted, choice);
    __syncthreads();
    return;
  }
  uint32_t largest = 0;
#pragma unroll
  for (int i = 0; i < ITEMS; ++i) largest = max(largest, keys[i]);
#pragma unroll
  for (int distance = 1; distance < 16; distance *= 2)
    largest = max(largest, __shfl_xor_sync(kAll, largest, distance));
  if (lane % 16 == 0) choice.group_keys[threadIdx.x / 16] = largest;
  __syncthreads();
  // Sixteen half warps hold sixteen keys at least as large as the smallest of their maxima, so
  // no smaller key is among the fifteen best.
  const uint32_t bound =
      max(1u, __reduce_min_sync(kAll, choice.group_keys[lane % (2 * kChooseWarps)]));
  collect<ITEMS>(keys, bound, choice);
  __syncthreads();
  if (choice.count <= kRanked) {
    select_ranked(choice.count, wanted, choice);
    __syncthreads();
    return;
  }
  // Many ties, or scores that lie in order: take the best of the block `wanted` times.
  for (int turn = 0; turn < wanted; ++turn) {
    uint32_t key = 0;
    int id = INT32_MAX;
#pragma unroll
    for (int i = 0; i < ITEMS; ++i) {
      if (keys[i] > key) key = keys[i], id = i * kChooseThreads + threadIdx.x;
    }
    warp_best(key, id);
    if (lane == 0) choice.group_keys[warp] = key, choice.group_ids[warp] = id;
    __syncthreads();
    key = choice.group_keys[lane % kChooseWarps], id = choice.group_ids[lane % kChooseWarps];
    warp_best(key, id);
    if (threadIdx.x == 0) choice.selected[turn] = id;
#pragma unroll
    for (int i = 0; i < ITEMS; ++i) {
      if (id == i * kChooseThreads + static_cast<int>(threadIdx.x)) keys[i] = 0;
    }
    __syncthreads();
  }
}

template <int ITEMS>
__global__ void __launch_bounds__(kChooseThreads)
    choose(Requests requests, Scores scores, int head_bits, int pass_bits, int workers,
           int32_t* ids) {
  static_assert(2 * kChooseWarps >= kMaxTopk - 1, "the bound needs a half warp for each rank");
  __shared__ Choice choice;
  const int64_t row = blockIdx.x >> head_bits;
  const int64_t kv_len = requests.kv_lens[requests.row_request[row]];
  const int current = static_cast<int>(requests.positions[row] / kBlockTokens);
  int units = 0;
  for (int i = threadIdx.x % 32; i < requests.count; i += 32)
    units += units_of(requests, i, pass_bits);
  const int part_bits = part_bits_of(__reduce_add_sync(kAll, units), workers);
  ids += static_cast<int64_t>(blockIdx.x) * requests.topk;
  if (threadIdx.x < kRanked) choice.pairs[threadIdx.x] = 0;
  if (threadIdx.x < kMaxTopk) choice.selected[threadIdx.x] = INT32_MAX;
  if (threadIdx.x == 0) choice.count = 0;
  // Also where no score is needed: what comes after this kernel relies on both having ended.
  asm volatile("griddepcontrol.wait;" ::: "memory");

  const int ranked = requests.topk - 1, i = threadIdx.x;
  if (kv_len <= 0 || current <= ranked) {
    if (i < requests.topk) ids[i] = kv_len > 0 && i <= current ? i : -1;
    return;
  }
  if (ranked == 0) {
    if (i == 0) ids[0] = current;
    return;
  }
  const float* own = scores.data + blockIdx.x * scores.stride;
  uint32_t keys[ITEMS];
  if (part_bits == 0) {
    load_keys<float, ITEMS>(own, current, keys);
  } else if (part_bits == 1) {
    load_keys<float2, (ITEMS < kSplitItems ? ITEMS : kSplitItems)>(own, current, keys);
  } else {
    load_keys<float4, (ITEMS < kSplitItems ? ITEMS : kSplitItems)>(own, current, keys);
  }
  choose_best<ITEMS>(keys, current, ranked, choice);
  if (i < ranked) {
    const int id = choice.selected[i];
    int place = 0;
#pragma unroll
    for (int other = 0; other < kMaxTopk; ++other) place += choice.selected[other] < id;
    ids[place] = id;
  }
  if (i == ranked) ids[ranked] = current;
}

using Score = void (*)(Keys, Queries, Requests, Scores);
using Choose = void (*)(Requests, Scores, int, int, int, int32_t*);

Score score_kernel(bool wide, int tiles) {
  if (wide) return tiles == 1 ? score<float, 1> : score<float, 2>;
  return tiles == 1 ? score<Bf16, 1> : tiles == 2 ? score<Bf16, 2> : score<Bf16, 4>;
}

Choose choose_kernel(int max_blocks) {
  if (max_blocks <= 4 * kChooseThreads) return choose<4>;
  if (max_blocks <= 16 * kChooseThreads) return choose<16>;
  return max_blocks <= 64 * kChooseThreads ? choose<64> : nullptr;
}

}  // namespace

// Scores a (row, head) needs room for: `winnow_select_decode`'s score_stride.
extern "C" int winnow_select_decode_stride(int max_blocks, int multiprocessors) {
  const int workers = multiprocessors * kWarps;
  const int split = 4 * max_blocks < workers ? 4 * max_blocks : workers;
  return ((max_blocks > split ? max_blocks : split) + 3) / 4 * 4;
}

// wide: queries are fp32, else bf16. tiles: query columns a pass / 8 (1, 2, 4; at most 2 if
// wide). heads: 1, 2, 4 or 8. Strides of queries and the table are in elements, of pages in
// bytes. scores: float [rows * heads, score_stride], need not be set. Returns a cudaError_t.
extern "C" int winnow_select_decode(
    const void* codes, const void* scales, int64_t page_stride, const void* queries,
    int64_t row_stride, int64_t head_stride, int rows, int heads, int wide, int tiles,
    const int64_t* positions, const int64_t* row_request, const int64_t* row_starts,
    const int64_t* kv_lens, const int64_t* tables, int64_t table_stride, int num_requests,
    int max_blocks, int topk, float* scores, int score_stride, int32_t* ids, int multiprocessors,
    cudaStream_t stream) {
  const Choose choose_blocks = choose_kernel(max_blocks);
  int head_bits = 0;
  while (1 << head_bits < heads) ++head_bits;
  if (choose_blocks == nullptr || topk < 1 || topk > kMaxTopk || 1 << head_bits != heads ||
      heads > 8 || multiprocessors > kMaxMultiprocessors)
    return cudaErrorInvalidValue;
  const Score score_blocks = score_kernel(wide != 0, tiles);
  const Requests requests = {positions, row_request,  row_starts,   kv_lens,
                             tables,    table_stride, num_requests, topk};
  const Scores room = {scores, score_stride};
  const int shared_bytes = kStarts + (num_requests + 1) * 4;
  cudaError_t error = cudaFuncSetAttribute(
      score_blocks, cudaFuncAttributeMaxDynamicSharedMemorySize, shared_bytes);
  if (error != cudaSuccess) return error;
  // Where the carve-outs agree, `choose` can wait on the machine while `score` still runs.
  for (const void* kernel : {(const void*)score_blocks, (const void*)choose_blocks}) {
    error = cudaFuncSetAttribute(kernel, cudaFuncAttributePreferredSharedMemoryCarveout,
                                 cudaSharedmemCarveoutMaxShared);
    if (error != cudaSuccess) return error;
  }
  score_blocks<<<multiprocessors, kWarps * 32, shared_bytes, stream>>>(
      {static_cast<const uint8_t*>(codes), static_cast<const uint8_t*>(scales), page_stride},
      {queries, row_stride, head_stride, head_bits}, requests, room);
  error = cudaGetLastError();
  if (error != cudaSuccess) return error;

  cudaLaunchAttribute early = {};
  early.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  early.val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t config = {};
  config.gridDim = rows * heads;
  config.blockDim = kChooseThreads;
  config.stream = stream;
  config.attrs = &early;
  config.numAttrs = 1;
  return cudaLaunchKernelEx(&config, choose_blocks, requests, room, head_bits,
                            pass_bits_of(tiles, head_bits), multiprocessors * kWarps, ids);
}

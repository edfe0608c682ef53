// select_blocks for many query rows a request, on Hopper (sm_90a).
//
// Three kernels. `expand` writes the index keys of each block as 16-bit numbers, in the order in
// which the tensor core reads them from shared memory; `score` multiplies tiles of query columns
// (row, head) by them and keeps each block's largest product; `choose` takes the best topk - 1
// blocks of each column and the current block. The meaning is reference.py's.
//
// score: a CTA holds 256 query columns of one request as A fragments in registers and walks over
// blocks, whose keys come by bulk copies into a ring of stages: a key is read from memory once for
// 256 columns. A warpgroup takes the maxima of 64 columns while the tensor core multiplies its
// other 64.
//
// Exactness. As in decode.cu: NVFP4 and FP8 keys are exact in fp16 (a code's bits are code * 2^-14
// there), queries are multiplied by a power of two of their column, and the tensor core adds in
// fp32. bf16 keys are multiplied by bf16 queries.

#include <cuda_fp16.h>
#include <cuda_fp8.h>

#include <cstdint>

namespace {

constexpr unsigned kAll = 0xFFFFFFFFu;
constexpr int kBlockTokens = 128;
constexpr int kDim = 128;
constexpr int kImageBytes = kBlockTokens * kDim * 2;
constexpr int kHalfBytes = kImageBytes / 2;  // 64 dimensions of every token: rows of 128 bytes
constexpr int kStages = 6;
constexpr int kGroups = 2;  // warpgroups
constexpr int kThreads = (kGroups + 1) * 128;  // the last warpgroup asks for keys
constexpr int kTileColumns = 128 * kGroups;
constexpr int kSteps = kDim / 16;
constexpr int kTurn = 8;  // blocks whose scores are written together: 32 bytes

constexpr int kExpandThreads = 256;
constexpr int kChooseWarps = 8;
constexpr int kMaxTopk = 16;
constexpr int kChunk = 1024;  // scores that a warp holds at once
constexpr int kItems = kChunk / 32;
constexpr int kRanked = 128;

enum Format { kNvfp4 = 0, kFp8 = 1, kBf16 = 2 };

struct Keys {
  const uint8_t* codes;
  const uint8_t* scales;
  int64_t page_stride;  // of both, in bytes
  int format;
};

struct Requests {
  const int64_t* positions;
  const int64_t* row_request;
  const int64_t* row_starts;
  const int64_t* kv_lens;
  const int64_t* tables;
  int64_t table_stride;
  int count;
  int max_blocks;
  int first_row, end_row;  // of this call
  int topk;
};

struct Queries {
  const uint16_t* data;  // bf16
  int64_t row_stride;    // in elements
  int64_t head_stride;
  int head_bits;  // heads = 1 << head_bits; column c of a tile is row c >> head_bits of it
};

__device__ uint32_t shared_address(const void* pointer) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(pointer));
}

__device__ void barrier_init(uint32_t barrier, int count) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(count) : "memory");
}

__device__ void barrier_expect(uint32_t barrier, int bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes)
               : "memory");
}

__device__ void barrier_arrive(uint32_t barrier) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
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

__device__ uint32_t bits(__half2 x) { return *reinterpret_cast<uint32_t*>(&x); }
__device__ __half2 halves(uint32_t x) { return *reinterpret_cast<__half2*>(&x); }

// Two neighbouring codes, the lower nibble first, as fp16 numbers code * 2^-14.
__device__ uint32_t moved(uint32_t codes) {
  return (codes & 0x7u) << 9 | (codes & 0x8u) << 12 | (codes & 0x70u) << 21 | (codes & 0x80u) << 24;
}

// Eight keys' numbers from dimension 8 * chunk on, as the tensor core takes them.
__device__ uint4 eight(const Keys& keys, int64_t page, int token, int chunk) {
  const uint8_t* codes = keys.codes + page * keys.page_stride;
  if (keys.format == kBf16)
    return *reinterpret_cast<const uint4*>(codes + (token * kDim + 8 * chunk) * 2);
  uint32_t out[4];
  if (keys.format == kFp8) {
    const uint2 words = *reinterpret_cast<const uint2*>(codes + token * kDim + 8 * chunk);
    const uint32_t both[2] = {words.x, words.y};
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const auto pair = static_cast<__nv_fp8x2_storage_t>(both[i / 2] >> 16 * (i % 2));
      out[i] = bits(__half2(__nv_cvt_fp8x2_to_halfraw2(pair, __NV_E4M3)));
    }
  } else {
    const uint8_t* scales = keys.scales + page * keys.page_stride;
    const uint32_t word =
        *reinterpret_cast<const uint32_t*>(codes + token * kDim / 2 + 4 * chunk);
    const __half2 scale = __half2half2(__half(
        __nv_cvt_fp8_to_halfraw(scales[token * (kDim / 16) + chunk / 2], __NV_E4M3)));
#pragma unroll
    for (int i = 0; i < 4; ++i)
      out[i] = bits(__hmul2(halves(moved(word >> 8 * i & 0xFFu)), scale));
  }
  return {out[0], out[1], out[2], out[3]};
}

// Images of a request's blocks that lie wholly in its last row's past: block x of request y.
__global__ void __launch_bounds__(kExpandThreads)
    expand(Keys keys, Requests requests, uint8_t* images) {
  const int block = blockIdx.x, request = blockIdx.y;
  if (block >= (requests.kv_lens[request] - 1) / kBlockTokens) return;
  const int64_t page = requests.tables[request * requests.table_stride + block];
  uint8_t* image = images + (static_cast<int64_t>(request) * requests.max_blocks + block) * kImageBytes;
#pragma unroll 4
  for (int i = threadIdx.x; i < kBlockTokens * kDim / 8; i += kExpandThreads) {
    const int token = i / (kDim / 8), chunk = i % (kDim / 8), row = token % 8;
    uint8_t* place = image + chunk / 8 * kHalfBytes + token * 128 + (chunk % 8 ^ row) * 16;
    *reinterpret_cast<uint4*>(place) = eight(keys, page, token, chunk);
  }
}

template <bool BF16>
__device__ __forceinline__ void wgmma(float (&d)[64], const uint32_t (&a)[4], uint64_t b,
                                      bool first) {
#define WINNOW_WGMMA(type)                                                                      \
  asm volatile(                                                                                 \
      "{\n"                                                                                     \
      ".reg .pred keep;\n"                                                                      \
      "setp.ne.b32 keep, %69, 0;\n"                                                             \
      "wgmma.mma_async.sync.aligned.m64n128k16.f32." type "." type " "                          \
      "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "                 \
      "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, "        \
      "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, "        \
      "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63}, "       \
      "{%64, %65, %66, %67}, %68, keep, 1, 1, 0;\n"                                             \
      "}\n"                                                                                     \
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]),     \
        "+f"(d[7]), "+f"(d[8]), "+f"(d[9]), "+f"(d[10]), "+f"(d[11]), "+f"(d[12]), "+f"(d[13]), \
        "+f"(d[14]), "+f"(d[15]), "+f"(d[16]), "+f"(d[17]), "+f"(d[18]), "+f"(d[19]),           \
        "+f"(d[20]), "+f"(d[21]), "+f"(d[22]), "+f"(d[23]), "+f"(d[24]), "+f"(d[25]),           \
        "+f"(d[26]), "+f"(d[27]), "+f"(d[28]), "+f"(d[29]), "+f"(d[30]), "+f"(d[31]),           \
        "+f"(d[32]), "+f"(d[33]), "+f"(d[34]), "+f"(d[35]), "+f"(d[36]), "+f"(d[37]),           \
        "+f"(d[38]), "+f"(d[39]), "+f"(d[40]), "+f"(d[41]), "+f"(d[42]), "+f"(d[43]),           \
        "+f"(d[44]), "+f"(d[45]), "+f"(d[46]), "+f"(d[47]), "+f"(d[48]), "+f"(d[49]),           \
        "+f"(d[50]), "+f"(d[51]), "+f"(d[52]), "+f"(d[53]), "+f"(d[54]), "+f"(d[55]),           \
        "+f"(d[56]), "+f"(d[57]), "+f"(d[58]), "+f"(d[59]), "+f"(d[60]), "+f"(d[61]),           \
        "+f"(d[62]), "+f"(d[63])                                                                \
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(first ? 0 : 1))
  if constexpr (BF16) {
    WINNOW_WGMMA("bf16");
  } else {
    WINNOW_WGMMA("f16");
  }
#undef WINNOW_WGMMA
}

template <int LEFT>
__device__ __forceinline__ void wgmma_wait() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(LEFT) : "memory");
}

// After a wait: nothing that reads these sums may be moved before it.
__device__ __forceinline__ void settle(float (&d)[64]) {
#pragma unroll
  for (int i = 0; i < 64; ++i) asm volatile("" : "+f"(d[i])::"memory");
}

// Rows of 128 bytes, swizzled by 128 bytes, eight rows 1,024 bytes apart.
__device__ __forceinline__ uint64_t descriptor(uint32_t address) {
  return static_cast<uint64_t>((address & 0x3FFFFu) >> 4) | 1ull << 16 | 64ull << 32 | 1ull << 62;
}

// 64 query columns by the 128 keys of a stage.
template <bool BF16>
__device__ __forceinline__ void multiply(float (&d)[64], const uint32_t (&a)[kSteps][4],
                                         uint32_t stage) {
  asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
#pragma unroll
  for (int step = 0; step < kSteps; ++step)
    wgmma<BF16>(d, a[step], descriptor(stage + step / 4 * kHalfBytes + step % 4 * 32), step == 0);
  asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}

// A fragments of the columns of rows `upper` and `lower` (g and g + 8 of a warp's 16), or zeros
// from row `end` on.
template <bool BF16>
__device__ void load_queries(const Queries& queries, int column, int first_row, int end_row,
                             uint32_t (&a)[kSteps][4]) {
  const int t = threadIdx.x % 4;
#pragma unroll
  for (int side = 0; side < 2; ++side) {
    const int own = column + 8 * side;
    const int row = first_row + (own >> queries.head_bits);
    const int head = own & ((1 << queries.head_bits) - 1);
    const uint16_t* from =
        queries.data + row * queries.row_stride + head * queries.head_stride + 2 * t;
    uint32_t words[2 * kSteps];
#pragma unroll
    for (int i = 0; i < 2 * kSteps; ++i)
      words[i] = row < end_row ? *reinterpret_cast<const uint32_t*>(from + 8 * i) : 0u;
    if constexpr (!BF16) {
      uint32_t largest = 0;
#pragma unroll
      for (int i = 0; i < 2 * kSteps; ++i) {
        const uint32_t low = words[i] & 0x7FFFu, high = words[i] >> 16 & 0x7FFFu;
        largest = max(largest, low < 0x7F80u ? low : 0u);
        largest = max(largest, high < 0x7F80u ? high : 0u);
      }
      largest = max(largest, __shfl_xor_sync(kAll, largest, 1));
      largest = max(largest, __shfl_xor_sync(kAll, largest, 2));
      const float factor = __uint_as_float(min(254u, 268u - (largest >> 7)) << 23);
#pragma unroll
      for (int i = 0; i < 2 * kSteps; ++i)
        words[i] = bits(__floats2half2_rn(__uint_as_float(words[i] << 16) * factor,
                                          __uint_as_float(words[i] & 0xFFFF0000u) * factor));
    }
#pragma unroll
    for (int step = 0; step < kSteps; ++step) {
      a[step][side] = words[2 * step];
      a[step][2 + side] = words[2 * step + 1];
    }
  }
}

// The largest product of each of a lane's two columns, equal in the four lanes of a row. A NaN is
// dropped: the lowest of products.
__device__ __forceinline__ float2 largest_of(const float (&d)[64]) {
  float upper = -INFINITY, lower = -INFINITY;
#pragma unroll
  for (int i = 0; i < 64; i += 4) {
    upper = fmaxf(upper, fmaxf(d[i], d[i + 1]));
    lower = fmaxf(lower, fmaxf(d[i + 2], d[i + 3]));
  }
#pragma unroll
  for (int distance = 1; distance < 4; distance *= 2) {
    upper = fmaxf(upper, __shfl_xor_sync(kAll, upper, distance));
    lower = fmaxf(lower, __shfl_xor_sync(kAll, lower, distance));
  }
  return {upper, lower};
}

// The request of a tile, and its rows.
struct Tile {
  int request, first_row, end_row;
};

// By one warp: 32 requests at a time.
__device__ Tile locate(const Requests& requests, int tile_rows, int index) {
  const int lane = threadIdx.x % 32;
  for (int base = 0; base < requests.count; base += 32) {
    const int request = base + lane;
    int first = 0, end = 0;
    if (request < requests.count) {
      first = max(static_cast<int>(requests.row_starts[request]), requests.first_row);
      end = min(static_cast<int>(requests.row_starts[request + 1]), requests.end_row);
    }
    const int own = end > first ? (end - first + tile_rows - 1) / tile_rows : 0;
    int sum = own;
#pragma unroll
    for (int distance = 1; distance < 32; distance *= 2) {
      const int other = __shfl_up_sync(kAll, sum, distance);
      if (lane >= distance) sum += other;
    }
    const uint32_t reached = __ballot_sync(kAll, index < sum);
    if (reached != 0) {
      const int at = __ffs(reached) - 1;
      const int start = __shfl_sync(kAll, first, at) +
                        (index - __shfl_sync(kAll, sum - own, at)) * tile_rows;
      return {base + at, start, min(__shfl_sync(kAll, end, at), start + tile_rows)};
    }
    index -= __shfl_sync(kAll, sum, 31);
  }
  return {-1, 0, 0};
}

template <bool BF16>
__global__ void __launch_bounds__(kThreads, 1)
    score(Queries queries, Requests requests, const uint8_t* images, float* scores,
          int64_t stride) {
  extern __shared__ __align__(1024) uint8_t shared[];
  __shared__ alignas(8) uint64_t barriers[2 * kStages];
  __shared__ Tile tile;
  const uint32_t full = shared_address(barriers), empty = full + 8 * kStages;
  const uint32_t ring = shared_address(shared);
  if (threadIdx.x == 0) {
    for (int i = 0; i < kStages; ++i)
      barrier_init(full + 8 * i, 1), barrier_init(empty + 8 * i, kGroups);
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
  }
  if (threadIdx.x < 32) {
    const Tile found = locate(requests, kTileColumns >> queries.head_bits, blockIdx.x);
    if (threadIdx.x == 0) tile = found;
  }
  __syncthreads();
  if (tile.request < 0 || requests.kv_lens[tile.request] <= 0) return;
  // Blocks before the last row's own; the CTAs of one tile divide them by whole turns.
  const int past = static_cast<int>(requests.positions[tile.end_row - 1] / kBlockTokens);
  const int turns = (past + kTurn - 1) / kTurn, parts = gridDim.y, part = blockIdx.y;
  const int begin = turns * part / parts * kTurn;
  const int end = min(past, turns * (part + 1) / parts * kTurn);
  if (begin >= end || past < requests.topk) return;
  const uint8_t* own =
      images + (static_cast<int64_t>(tile.request) * requests.max_blocks + begin) * kImageBytes;
  const int blocks = end - begin;
  if (threadIdx.x >= kGroups * 128) {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 24;");
    if (threadIdx.x == kGroups * 128) {
      for (int block = 0; block < blocks; ++block) {
        const int stage = block % kStages;
        if (block >= kStages) barrier_wait(empty + 8 * stage, (block / kStages + 1) & 1);
        barrier_expect(full + 8 * stage, kImageBytes);
        bulk_copy(ring + stage * kImageBytes, own + static_cast<int64_t>(block) * kImageBytes,
                  kImageBytes, full + 8 * stage);
      }
    }
    return;
  }
  asm volatile("setmaxnreg.inc.sync.aligned.u32 240;");

  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, g = lane / 4, t = lane % 4;
  const int column = warp / 4 * 128 + warp % 4 * 16 + g;
  uint32_t a[2][kSteps][4];
#pragma unroll
  for (int half = 0; half < 2; ++half)
    load_queries<BF16>(queries, column + 64 * half, tile.first_row, tile.end_row, a[half]);
  // A lane keeps blocks 2 t and 2 t + 1 of a turn, of columns (half, side).
  float2 kept[2][2];
  float* rows[2][2];
#pragma unroll
  for (int half = 0; half < 2; ++half) {
#pragma unroll
    for (int side = 0; side < 2; ++side) {
      const int local = column + 64 * half + 8 * side;
      const bool real = tile.first_row + (local >> queries.head_bits) < tile.end_row;
      const int64_t place =
          (static_cast<int64_t>(tile.first_row - requests.first_row) << queries.head_bits) + local;
      rows[half][side] = real ? scores + place * stride + begin + 2 * t : nullptr;
    }
  }
  auto keep = [&](int half, int block, float2 found) {
    const int within = block % kTurn;
    if (within / 2 == t) {
      (within % 2 ? kept[half][0].y : kept[half][0].x) = found.x;
      (within % 2 ? kept[half][1].y : kept[half][1].x) = found.y;
    }
    if (within == kTurn - 1 || block == blocks - 1) {
#pragma unroll
      for (int side = 0; side < 2; ++side) {
        if (rows[half][side] != nullptr)
          *reinterpret_cast<float2*>(rows[half][side] + block / kTurn * kTurn) = kept[half][side];
      }
    }
  };

  int stage = 0;
  uint32_t phase = 0;
  for (int block = 0; block < blocks; ++block) {
    float first[64], second[64];
    barrier_wait(full + 8 * stage, phase);
    multiply<BF16>(first, a[0], ring + stage * kImageBytes);
    multiply<BF16>(second, a[1], ring + stage * kImageBytes);
    // The maxima of one while the other is multiplied; the other warpgroup has the tensor core
    // while this one is behind its second.
    wgmma_wait<1>();
    settle(first);
    const float2 upper = largest_of(first);
    wgmma_wait<0>();
    settle(second);
    if (threadIdx.x % 128 == 0) barrier_arrive(empty + 8 * stage);
    const float2 lower = largest_of(second);
    keep(0, block, upper);
    keep(1, block, lower);
    if (++stage == kStages) stage = 0, phase ^= 1;
  }
}

// Unsigned integers in the order of the scores: +0 ties with -0, and 0 is below every score.
__device__ uint32_t ordered(float score) {
  const uint32_t x = __float_as_uint(score + 0.0f);
  return x & 0x80000000u ? ~x : x | 0x80000000u;
}

// A key and its block as one number, in the order of selection: of equal keys the lower id first.
__device__ uint64_t pair_of(uint32_t key, int id) {
  return static_cast<uint64_t>(key) << 32 | static_cast<uint32_t>(~id);
}

struct Choice {
  uint64_t pairs[kRanked];
  uint64_t best[kMaxTopk];
};

// The largest of 32 lanes' pairs.
__device__ uint64_t warp_best(uint64_t pair) {
  const uint32_t key = __reduce_max_sync(kAll, static_cast<uint32_t>(pair >> 32));
  const bool mine = static_cast<uint32_t>(pair >> 32) == key;
  const uint32_t low = __reduce_max_sync(kAll, mine ? static_cast<uint32_t>(pair) : 0u);
  return static_cast<uint64_t>(key) << 32 | low;
}

// The `wanted` best of the keys of a chunk and of the `listed` pairs in choice.best, into
// choice.best in order. keys[4 j + i] of a lane has the id base + 128 j + 4 lane + i; 0 is no key.
__device__ int merge(uint32_t (&keys)[kItems], int base, int listed, int wanted, Choice& choice) {
  const int lane = threadIdx.x % 32;
  uint32_t largest = 0;
#pragma unroll
  for (int i = 0; i < kItems; ++i) largest = max(largest, keys[i]);
  uint32_t bound;
  if (listed == wanted) {
    // Ids grow from chunk to chunk: an equal key comes too late.
    bound = static_cast<uint32_t>(choice.best[wanted - 1] >> 32) + 1;
    if (!__any_sync(kAll, largest >= bound)) return listed;
  } else {
    // `wanted` lanes hold keys at least as large as the smallest of their maxima.
    int rank = 0;
#pragma unroll
    for (int i = 0; i < 32; ++i) {
      const uint32_t other = __shfl_sync(kAll, largest, i);
      rank += other > largest || (other == largest && i < lane);
    }
    bound = max(1u, __reduce_max_sync(kAll, rank == wanted - 1 ? largest : 0u));
  }
  int own = 0;
#pragma unroll
  for (int i = 0; i < kItems; ++i) own += keys[i] >= bound;
  int place = own;
#pragma unroll
  for (int distance = 1; distance < 32; distance *= 2) {
    const int other = __shfl_up_sync(kAll, place, distance);
    if (lane >= distance) place += other;
  }
  const int found = __shfl_sync(kAll, place, 31) + listed;
  if (found <= kRanked) {
    place += listed - own;
    if (lane < listed) choice.pairs[lane] = choice.best[lane];
#pragma unroll
    for (int i = 0; i < kItems; ++i) {
      if (keys[i] >= bound)
        choice.pairs[place++] = pair_of(keys[i], base + i / 4 * 128 + 4 * lane + i % 4);
    }
    __syncwarp();
    for (int first = 0; first < found; first += 32) {
      const uint64_t pair = first + lane < found ? choice.pairs[first + lane] : 0;
      int rank = 0;
      for (int i = 0; i < found; ++i) rank += choice.pairs[i] > pair;
      if (pair != 0 && rank < wanted) choice.best[rank] = pair;
    }
    __syncwarp();
    return min(found, wanted);
  }
  // Many ties, or scores that lie in order: take the best of all `wanted` times.
  uint64_t mine = lane < listed ? choice.best[lane] : 0;
  __syncwarp();
  for (int turn = 0; turn < wanted; ++turn) {
    uint64_t pair = mine;
#pragma unroll
    for (int i = 0; i < kItems; ++i) {
      const uint64_t one = pair_of(keys[i], base + i / 4 * 128 + 4 * lane + i % 4);
      if (keys[i] != 0 && one > pair) pair = one;
    }
    const uint64_t best = warp_best(pair);
    if (lane == 0) choice.best[turn] = best;
    if (mine == best) mine = 0;
#pragma unroll
    for (int i = 0; i < kItems; ++i) {
      if (pair_of(keys[i], base + i / 4 * 128 + 4 * lane + i % 4) == best) keys[i] = 0;
    }
  }
  __syncwarp();
  return wanted;
}

// A warp a column.
__global__ void __launch_bounds__(kChooseWarps * 32)
    choose(Requests requests, int head_bits, const float* scores, int64_t stride, int32_t* ids) {
  __shared__ Choice choices[kChooseWarps];
  Choice& choice = choices[threadIdx.x / 32];
  const int lane = threadIdx.x % 32;
  const int64_t column = static_cast<int64_t>(blockIdx.x) * kChooseWarps + threadIdx.x / 32;
  const int row = requests.first_row + static_cast<int>(column >> head_bits);
  if (row >= requests.end_row) return;
  const bool known = requests.kv_lens[requests.row_request[row]] > 0;
  const int current = static_cast<int>(requests.positions[row] / kBlockTokens);
  const int wanted = requests.topk - 1;
  ids += ((static_cast<int64_t>(requests.first_row) << head_bits) + column) * requests.topk;
  if (!known || current <= wanted) {
    if (lane < requests.topk) ids[lane] = known && lane <= current ? lane : -1;
    return;
  }
  int listed = 0;
  for (int base = 0; base < current && wanted > 0; base += kChunk) {
    const float4* from = reinterpret_cast<const float4*>(scores + column * stride + base) + lane;
    float4 fours[kItems / 4];
#pragma unroll
    for (int j = 0; j < kItems / 4; ++j) {
      // No load hangs on a condition: the last scores again beyond them.
      fours[j] = from[32 * min(j, (current - 1 - base) / 128)];
    }
    uint32_t keys[kItems];
#pragma unroll
    for (int j = 0; j < kItems / 4; ++j) {
      const float values[4] = {fours[j].x, fours[j].y, fours[j].z, fours[j].w};
#pragma unroll
      for (int i = 0; i < 4; ++i)
        keys[4 * j + i] = base + 128 * j + 4 * lane + i < current ? ordered(values[i]) : 0u;
    }
    listed = merge(keys, base, listed, wanted, choice);
  }
  // Ascending, the current block last.
  const int id = lane < wanted ? static_cast<int>(~static_cast<uint32_t>(choice.best[lane])) : current;
  int place = 0;
  for (int i = 0; i < wanted; ++i) place += __shfl_sync(kAll, id, i) < id;
  if (lane <= wanted) ids[place] = id;
}

}  // namespace

// codes, scales: keys of page 0, rows of pages page_stride bytes apart; format: 0 nvfp4, 1 fp8,
// 2 bf16. queries: bf16, strides in elements, 4-byte aligned. heads: 1, 2, 4 or 8. images:
// 32,768 bytes for each (request, block), 128-byte aligned. scores: float [(end_row - first_row) *
// heads, stride], stride a multiple of 128 and at least max_blocks; neither need be set. tiles: at
// least those of all requests of 256 / heads rows each; parts: CTAs of a tile. Returns a
// cudaError_t.
extern "C" int winnow_select_prefill(
    const void* codes, const void* scales, int64_t page_stride, int format, const void* queries,
    int64_t row_stride, int64_t head_stride, int heads, const int64_t* positions,
    const int64_t* row_request, const int64_t* row_starts, const int64_t* kv_lens,
    const int64_t* tables, int64_t table_stride, int num_requests, int max_blocks, int topk,
    int first_row, int end_row, void* images, float* score_data, int64_t stride, int tiles,
    int parts, int expanded, int32_t* ids, cudaStream_t stream) {
  int head_bits = 0;
  while (1 << head_bits < heads) ++head_bits;
  if (1 << head_bits != heads || heads > 8 || topk < 1 || topk > kMaxTopk || stride % 128 ||
      stride < max_blocks || format < kNvfp4 || format > kBf16 || end_row <= first_row)
    return cudaErrorInvalidValue;
  const Keys keys = {static_cast<const uint8_t*>(codes), static_cast<const uint8_t*>(scales),
                     page_stride, format};
  const Requests requests = {positions,    row_request,  row_starts, kv_lens,   tables, table_stride,
                             num_requests, max_blocks, first_row, end_row, topk};
  const Queries held = {static_cast<const uint16_t*>(queries), row_stride, head_stride, head_bits};
  uint8_t* room = static_cast<uint8_t*>(images);
  if (!expanded) {
    expand<<<dim3(max_blocks, num_requests), kExpandThreads, 0, stream>>>(keys, requests, room);
    const cudaError_t error = cudaGetLastError();
    if (error != cudaSuccess) return error;
  }
  const auto score_blocks = format == kBf16 ? score<true> : score<false>;
  constexpr int kSharedBytes = kStages * kImageBytes;
  cudaError_t error = cudaFuncSetAttribute(
      score_blocks, cudaFuncAttributeMaxDynamicSharedMemorySize, kSharedBytes);
  if (error != cudaSuccess) return error;
  score_blocks<<<dim3(tiles, parts), kThreads, kSharedBytes, stream>>>(held, requests, room,
                                                                      score_data, stride);
  error = cudaGetLastError();
  if (error != cudaSuccess) return error;
  const int64_t columns = static_cast<int64_t>(end_row - first_row) << head_bits;
  choose<<<static_cast<unsigned>((columns + kChooseWarps - 1) / kChooseWarps), kChooseWarps * 32, 0,
           stream>>>(requests, head_bits, score_data, stride, ids);
  return cudaGetLastError();
}

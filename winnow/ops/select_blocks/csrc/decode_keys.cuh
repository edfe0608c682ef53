// Index keys in the formats of their cache: how a warp's ring holds them, how they become the
// operands of products, and the queries in the order of dimensions that this gives.
//
// Tokens are the M of mma.m16n8k16, query columns (row, head) its N. The order of K is free where
// keys and queries agree, and so is the order of tokens under a maximum: lane (g, t) = (lane / 4,
// lane % 4) reads 32 dimensions of tokens that it calls g and g + 8 and gives them to the tensor
// core as they come.
//
// Exactness of NVFP4. A code's bits, moved, are the fp16 number code * 2^-14, subnormals included.
// With n = 2 |code| <= 12 and a scale of m * 2^-9 (m an integer of at most 4 significant bits) the
// product is n m 2^-24: an integer multiple of fp16's smallest number, at most 6 significant
// bits, at most 6 * 448 * 2^-14 < 1. So fp16 holds it exactly. A scale of NaN gives NaN. E4M3
// values of fp8 keys are fp16 numbers. For both, queries are multiplied by a power of two that
// brings their largest magnitude into [2^14, 2^15), which changes no order: bf16 values are then
// exact in fp16 down to 2^-31 of the largest, and fp32 values are the sum of two fp16 numbers but
// for 2^-22 of themselves or 2^-38 of the largest. bf16 keys multiply with bf16 queries as both
// are. The tensor core adds in fp32.

#pragma once

#include <cuda_fp16.h>
#include <cuda_fp8.h>

#include "../../csrc/hopper.cuh"
#include "decode_common.cuh"

namespace {

constexpr int kTileTokens = 16;

struct Queries {
  const void* data;
  int64_t row_stride;  // in elements
  int64_t head_stride;
  int head_bits;  // heads = 1 << head_bits; query column c is row c >> head_bits of a pass
};

template <bool BF16>
__device__ void mma(float (&sum)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
  if constexpr (BF16) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, "
        "{%8, %9}, {%0, %1, %2, %3};"
        : "+f"(sum[0]), "+f"(sum[1]), "+f"(sum[2]), "+f"(sum[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
  } else {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, "
        "{%8, %9}, {%0, %1, %2, %3};"
        : "+f"(sum[0]), "+f"(sum[1]), "+f"(sum[2]), "+f"(sum[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
  }
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

__device__ uint4 shared_16(const uint8_t* at) { return *reinterpret_cast<const uint4*>(at); }

__device__ uint32_t word_of(const uint4& words, int i) {
  return i == 0 ? words.x : i == 1 ? words.y : i == 2 ? words.z : words.w;
}

// Index keys of a layer in page 0, and the bytes from page to page.
struct Keys {
  const uint8_t* codes;
  const uint8_t* scales;  // of NVFP4
  int64_t page_stride;
};

// Each format: a ring of kStages stages of kStageTokens tokens; `fetch` copies some tokens of a page
// into one, `rows` gives eight contraction steps of a tile's keys, two for each word.
struct Nvfp4 {
  static constexpr int kStages = 2;
  static constexpr int kStageTokens = 64;
  static constexpr int kTokenCodes = kDim / 2;
  static constexpr int kTokenScales = kDim / 16;
  static constexpr int kStageCodes = kStageTokens * kTokenCodes;
  static constexpr int kStageBytes = kStageCodes + kStageTokens * kTokenScales;
  static constexpr bool kBf16 = false;

  static __device__ void fetch(uint32_t to, const Keys& keys, int64_t page, int token, int count,
                               uint32_t barrier) {
    barrier_expect(barrier, count * (kTokenCodes + kTokenScales));
    bulk_load(to, keys.codes + page * keys.page_stride + token * kTokenCodes,
              count * kTokenCodes, barrier);
    bulk_load(to + kStageCodes, keys.scales + page * keys.page_stride + token * kTokenScales,
              count * kTokenScales, barrier);
  }

  // Dimensions 8 word .. of a lane's 32, and which of them are the pair j of a word.
  static __device__ int first_dim(int word, int t) { return 32 * t + 8 * word; }
  static __device__ int low(int j) { return j; }
  static __device__ int high(int j) { return j + 4; }

  uint4 words[2];
  __half2 group_scales[2];

  // A tile's keys in this lane, of a stage's tokens from `token` on.
  __device__ Nvfp4(const uint8_t* stage, int token) {
    const int g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int own = token + g + 8 * half;
      words[half] = shared_16(stage + own * kTokenCodes + 16 * t);
      group_scales[half] = scale_pair(stage + kStageCodes + own * kTokenScales + 2 * t);
    }
  }

  // The A operands of steps 2 word and 2 word + 1.
  __device__ void operands(int word, uint32_t (&keys)[2][4]) const {
    uint32_t a[4], b[4];
    expand(word_of(words[0], word),
           word < 2 ? __low2half2(group_scales[0]) : __high2half2(group_scales[0]), a);
    expand(word_of(words[1], word),
           word < 2 ? __low2half2(group_scales[1]) : __high2half2(group_scales[1]), b);
#pragma unroll
    for (int step = 0; step < 2; ++step) {
      keys[step][0] = a[2 * step], keys[step][1] = b[2 * step];
      keys[step][2] = a[2 * step + 1], keys[step][3] = b[2 * step + 1];
    }
  }
};

// fp8 and bf16. A stage is two halves of tokens, the second 64 bytes further in the banks: even g
// are tokens of the first, odd ones of the second, so that the lanes served together, two tokens
// and four chunks each, spread over all banks though a token is as long as all of them.
template <bool BF16>
struct Wide {
  static constexpr int kStages = 3;
  static constexpr int kTokenBytes = BF16 ? 2 * kDim : kDim;
  static constexpr int kStageTokens = 4096 / kTokenBytes;
  static constexpr int kHalf = kStageTokens / 2 * kTokenBytes + 64;
  static constexpr int kStageBytes = 2 * kHalf;
  static constexpr bool kBf16 = BF16;
  static constexpr int kChunks = kTokenBytes / 64;

  static __device__ void fetch(uint32_t to, const Keys& keys, int64_t page, int token, int count,
                               uint32_t barrier) {
    const uint8_t* from = keys.codes + page * keys.page_stride + token * kTokenBytes;
    const int half = count / 2 * kTokenBytes;
    barrier_expect(barrier, 2 * half);
    bulk_load(to, from, half, barrier);
    bulk_load(to + kHalf, from + half, half, barrier);
  }

  static __device__ int first_dim(int word, int t) {
    return BF16 ? 32 * word + 8 * t : 64 * (word / 2) + 16 * t + 8 * (word % 2);
  }
  static __device__ int low(int j) { return 2 * j; }
  static __device__ int high(int j) { return 2 * j + 1; }

  uint4 chunks[2][kChunks];

  __device__ Wide(const uint8_t* stage, int token) {
    const int g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
    const uint8_t* own = stage + g % 2 * kHalf + (token / 2 + g / 2) * kTokenBytes + 16 * t;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
#pragma unroll
      for (int chunk = 0; chunk < kChunks; ++chunk)
        chunks[half][chunk] = shared_16(own + 4 * half * kTokenBytes + 64 * chunk);
    }
  }

  __device__ void operands(int word, uint32_t (&keys)[2][4]) const {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
#pragma unroll
      for (int step = 0; step < 2; ++step) {
        if constexpr (BF16) {
          keys[step][half] = word_of(chunks[half][word], 2 * step);
          keys[step][2 + half] = word_of(chunks[half][word], 2 * step + 1);
        } else {
          const uint32_t four = word_of(chunks[half][word / 2], 2 * (word % 2) + step);
          from_e4m3(four, keys[step][half], keys[step][2 + half]);
        }
      }
    }
  }
};

struct Bf16 {
  uint16_t bits;
};

__device__ void load_eight(const float* from, float (&to)[8]) {
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const float4 four = reinterpret_cast<const float4*>(from)[i];
    to[4 * i] = four.x, to[4 * i + 1] = four.y, to[4 * i + 2] = four.z, to[4 * i + 3] = four.w;
  }
}

__device__ void load_eight(const Bf16* from, float (&to)[8]) {
  const uint4 eight = *reinterpret_cast<const uint4*>(from);
#pragma unroll
  for (int j = 0; j < 4; ++j) {
    to[2 * j] = __uint_as_float(word_of(eight, j) << 16);
    to[2 * j + 1] = __uint_as_float(word_of(eight, j) & 0xFFFF0000u);
  }
}

// The power of two that brings the largest finite magnitude of a query into [2^14, 2^15).
__device__ float query_scale(const float (&query)[4][8]) {
  uint32_t largest = 0;
#pragma unroll
  for (int i = 0; i < 32; ++i) {
    uint32_t magnitude = __float_as_uint(query[i / 8][i % 8]) & 0x7FFFFFFFu;
    largest = max(largest, magnitude < 0x7F800000u ? magnitude : 0u);
  }
  largest = max(largest, __shfl_xor_sync(kAll, largest, 1));
  largest = max(largest, __shfl_xor_sync(kAll, largest, 2));
  int exponent = min(254, 268 - static_cast<int>(largest >> 23));
  return __uint_as_float(static_cast<uint32_t>(exponent) << 23);
}

// Query columns of one pass in the order in which the keys' operands give dimensions. LOW: what
// fp16 leaves of fp32 values, as a second operand.
template <int TILES, bool LOW>
struct Fragments {
  uint32_t high[TILES][16];
  uint32_t low[LOW ? TILES : 1][LOW ? 16 : 1];
};

template <typename F, typename Q, int TILES>
__device__ void load_fragments(const Queries& queries, int first_row, int end_row,
                               Fragments<TILES, sizeof(Q) == 4>& fragments) {
  const int g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
#pragma unroll
  for (int tile = 0; tile < TILES; ++tile) {
    const int column = 8 * tile + g;
    const int row = first_row + (column >> queries.head_bits);
    const int head = column & ((1 << queries.head_bits) - 1);
    float query[4][8] = {};
    if (row < end_row) {
      const Q* from = static_cast<const Q*>(queries.data) + row * queries.row_stride +
                      head * queries.head_stride;
#pragma unroll
      for (int word = 0; word < 4; ++word) load_eight(from + F::first_dim(word, t), query[word]);
    }
    const float scale = F::kBf16 ? 1.0f : query_scale(query);
#pragma unroll
    for (int i = 0; i < 16; ++i) {
      const float a = query[i / 4][F::low(i % 4)] * scale;
      const float b = query[i / 4][F::high(i % 4)] * scale;
      if constexpr (F::kBf16) {
        static_assert(sizeof(Q) == 2, "bf16 keys take bf16 queries");
        fragments.high[tile][i] = __byte_perm(__float_as_uint(a), __float_as_uint(b), 0x7632);
      } else {
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
}

}  // namespace

// Blocks of an fp8 or bf16 cache in the decode kernel: how they lie in shared memory and are
// multiplied.
//
// E4M3 values are fp16 numbers, so fp8 multiplies with queries and weights in fp16 as NVFP4 does;
// bf16 multiplies with the queries' own bf16 and with weights split into two bf16 numbers.
//
// Where tokens lie. A stage holds K and V of kStageTokens tokens, each in eight segments that are
// copied apart: column g of a product's eight is the segment, its n-th token belongs to tile n, of
// which a warp takes a quarter. Segments begin 64 bytes apart in the banks within the pairs 2t,
// 2t + 1 and 32 bytes from pair to pair: then the lanes of K (tokens g, chunks t) and those of V
// (chunks g, tokens 2t or 2t + 1) that are served together spread over all banks, though a token is
// as long as all banks.

#pragma once

#include "decode_queries.cuh"

namespace {

template <bool BF16>
struct Wide {
  static constexpr int kCtas = 3;  // on a multiprocessor: what shared memory allows
  static constexpr int kStageTokens = BF16 ? kBlock / 2 : kBlock;
  static constexpr int kTokenBytes = BF16 ? 2 * kDim : kDim;
  static constexpr int kTiles = kStageTokens / 8 / kWarps;  // of a warp
  static constexpr int kSegment = kStageTokens / 8 * kTokenBytes;
  static constexpr int kValues = 8 * kSegment + 640;  // from the stage's begin
  static constexpr int kStageBytes = 2 * kValues;
  static constexpr int kChunks = kTokenBytes / 64;  // of 16 bytes, that a lane holds of a token's K
  static constexpr bool kWideQueries = BF16, kNegated = false;
  static constexpr int kShift = 0;

  static __device__ __forceinline__ uint32_t begin_of(int segment) {
    return segment * (kSegment + 64) + segment / 2 * 32;
  }

  static constexpr bool kOneCopy = false;

  // Copies a part of a block into a stage; all lanes of a warp call it.
  static __device__ __forceinline__ void fetch(uint32_t to, const uint8_t* block, int part,
                                               uint32_t bar) {
    const int lane = threadIdx.x % 32;
    if (lane == 0) barrier_expect(bar, 2 * kStageTokens * kTokenBytes);
    __syncwarp();
    const int segment = lane % 8, values = lane / 8;
    if (lane < 16) {
      bulk_load(to + values * kValues + begin_of(segment),
           block + values * kBlock * kTokenBytes + part * 8 * kSegment + segment * kSegment,
           kSegment, bar);
    }
  }

  static __device__ __forceinline__ int first_dim(int word, int t) {
    return BF16 ? 32 * word + 8 * t : 64 * (word / 2) + 16 * t + 8 * (word % 2);
  }
  static __device__ __forceinline__ int low(int j) { return 2 * j; }
  static __device__ __forceinline__ int high(int j) { return 2 * j + 1; }

  // A lane's V is dims 16g .. 16g + 15 in fp8, 8g .. 8g + 7 and 64 + 8g .. in bf16.
  static __device__ __forceinline__ int chunk(int t, int n) {
    return BF16 ? 16 * (n / 4) + 4 * t + n % 4 : 8 * t + n;
  }
  static __device__ __forceinline__ int tile(int n) {
    return BF16 ? 8 * (n / 4) + 4 * (n % 2) : 4 * (n % 4);
  }
  static __device__ __forceinline__ int column(int n) { return BF16 ? n / 2 % 2 : n / 4; }

  struct Lane {};  // computed again at every stage
  template <int GROUPS>
  static __device__ __forceinline__ Lane lane(const Params&) {
    return {};
  }

  template <int GROUPS, bool LAST, bool>
  static __device__ __forceinline__ void attend(uint32_t stage, int limit, uint32_t queries, Lane,
                                                const float (&c)[2], Running& r) {
    const int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
    const int warp = warp_in_group<GROUPS>();
    const int first = warp * kTiles;  // tile
    if (LAST && limit < kStageTokens) clear_unseen(stage + kValues, first, limit, lane);
    float s[kTiles][4] = {};
    scores(stage + begin_of(g) + first * kTokenBytes + 16 * t, queries, s);
    if (LAST && limit < kStageTokens) {
#pragma unroll
      for (int n = 0; n < kTiles; ++n) {
        const int token = 2 * t * (kStageTokens / 8) + first + n;
        if (token >= limit) s[n][0] = s[n][2] = -INFINITY;
        if (token + kStageTokens / 8 >= limit) s[n][1] = s[n][3] = -INFINITY;
      }
    }
    raise(s, c, r);
    const uint32_t values = stage + kValues + first * kTokenBytes + 16 * g;
    const uint32_t even = values + begin_of(2 * t), odd = values + begin_of(2 * t + 1);
#pragma unroll
    for (int u = 0; u < kTiles / 2; ++u) {
      const uint32_t at = 2 * u * kTokenBytes;
      float w[2][4];
#pragma unroll
      for (int i = 0; i < 2; ++i) {
#pragma unroll
        for (int j = 0; j < 4; ++j) w[i][j] = weight(s[2 * u + i][j], c, r, j / 2);
      }
      if constexpr (BF16) {
        add_values_bf16(even + at, odd + at, w, r);
      } else {
        add_values_fp8(even + at, odd + at, w, r);
      }
    }
  }

 private:
  // Whatever lies in V after the row's position may be NaN, which no weight undoes. Only the last
  // part of the last block has such tokens, so no copy into this stage follows.
  static __device__ __forceinline__ void clear_unseen(uint32_t values, int first, int limit,
                                                      int lane) {
    constexpr int kPieces = kTokenBytes / 8;
    for (int i = lane; i < 8 * kTiles * kPieces; i += 32) {
      const int segment = i / (kTiles * kPieces), n = first + i / kPieces % kTiles;
      if (segment * (kStageTokens / 8) + n >= limit) {
        clear_shared_8(values + begin_of(segment) + n * kTokenBytes + 8 * (i % kPieces));
      }
    }
    __syncwarp();
  }

  static __device__ __forceinline__ void scores(uint32_t keys, uint32_t queries,
                                                float (&s)[kTiles][4]) {
#pragma unroll
    for (int chunk = 0; chunk < kChunks; ++chunk) {
      uint4 k[kTiles];
#pragma unroll
      for (int n = 0; n < kTiles; ++n) k[n] = shared_16(keys + n * kTokenBytes + 64 * chunk);
#pragma unroll
      for (int i = 0; i < (BF16 ? 2 : 4); ++i) {
        const uint4 q = shared_16(queries + 512 * ((BF16 ? 2 : 4) * chunk + i));
        const uint32_t a[4] = {q.x, q.y, q.z, q.w};
#pragma unroll
        for (int n = 0; n < kTiles; ++n) {
          if constexpr (BF16) {
            mma_bf16(s[n], a, i ? k[n].z : k[n].x, i ? k[n].w : k[n].y);
          } else {
            const uint32_t word = i == 0 ? k[n].x : i == 1 ? k[n].y : i == 2 ? k[n].z : k[n].w;
            uint32_t low, high;
            from_e4m3(word, low, high);
            mma(s[n], a, low, high);
          }
        }
      }
    }
  }

  // Weights of two tiles, rows g and g + 8 of each.
  static __device__ __forceinline__ void add_values_fp8(uint32_t even, uint32_t odd,
                                                        const float (&w)[2][4], Running& r) {
    const uint32_t p[4] = {pack(w[0][0], w[0][1]), pack(w[0][2], w[0][3]), pack(w[1][0], w[1][1]),
                           pack(w[1][2], w[1][3])};
    const uint32_t ones = 0x3C003C00u;
    mma(r.l, p, ones, ones);
    uint4 v[2][2];
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      v[i][0] = shared_16(even + i * kTokenBytes);
      v[i][1] = shared_16(odd + i * kTokenBytes);
    }
#pragma unroll
    for (int word = 0; word < 4; ++word) {
      uint32_t f[2][4];
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const uint32_t a = word_of(v[i][0], word), b = word_of(v[i][1], word);
        const uint32_t low = __byte_perm(a, b, 0x5140), high = __byte_perm(a, b, 0x7362);
        from_e4m3(low, f[i][0], f[i][1]);
        from_e4m3(high, f[i][2], f[i][3]);
      }
#pragma unroll
      for (int j = 0; j < 4; ++j) mma(r.o[4 * word + j], p, f[0][j], f[1][j]);
    }
  }

  // A weight is the sum of two bf16 numbers but for 2^-17 of itself.
  static __device__ __forceinline__ void add_values_bf16(uint32_t even, uint32_t odd,
                                                         const float (&w)[2][4], Running& r) {
    uint32_t high[4], low[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const float a = w[i / 2][2 * (i % 2)], b = w[i / 2][2 * (i % 2) + 1];
      high[i] = pack_bf16(a, b);
      low[i] = pack_bf16(a - __uint_as_float(high[i] << 16),
                         b - __uint_as_float(high[i] & 0xFFFF0000u));
    }
    const uint32_t ones = 0x3F803F80u;
    mma_bf16(r.l, high, ones, ones);
    mma_bf16(r.l, low, ones, ones);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      uint4 v[2][2];
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        v[i][0] = shared_16(even + i * kTokenBytes + 128 * half);
        v[i][1] = shared_16(odd + i * kTokenBytes + 128 * half);
      }
#pragma unroll
      for (int word = 0; word < 4; ++word) {
#pragma unroll
        for (int j = 0; j < 2; ++j) {
          uint32_t f[2];
#pragma unroll
          for (int i = 0; i < 2; ++i) {
            f[i] = __byte_perm(word_of(v[i][0], word), word_of(v[i][1], word), j ? 0x7632 : 0x5410);
          }
          mma_bf16(r.o[8 * half + 2 * word + j], high, f[0], f[1]);
          mma_bf16(r.o[8 * half + 2 * word + j], low, f[0], f[1]);
        }
      }
    }
  }

  static __device__ __forceinline__ uint32_t word_of(const uint4& words, int i) {
    return i == 0 ? words.x : i == 1 ? words.y : i == 2 ? words.z : words.w;
  }
};

}  // namespace

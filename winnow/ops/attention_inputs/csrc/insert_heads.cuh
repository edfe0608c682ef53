// Arguments of the insertion, and a task's heads on their way from memory through norm and rotation.

#pragma once

#include <cuda_bf16.h>
#include <cuda_fp8.h>

#include <cstdint>

namespace {

constexpr int kWarps = 4;
constexpr int kHeads = 4;  // of a task
constexpr int kBlockTokens = 128;
constexpr unsigned kAll = 0xFFFFFFFFu;
constexpr float kClipsAbove = 464.0f;  // halfway to the 480 that E4M3 lacks
constexpr float kLargest = 448.0f;

enum Format : int { kFp32, kBf16, kFp8, kNvfp4 };

// K, V or index keys of a layer. Strides are in bytes; a token's scales are scale_bytes apart.
struct Pages {
  uint8_t* codes;
  uint8_t* scales;
  int64_t page_stride, head_stride;
  int64_t* counts;  // values clipped, values written
  float global_scale, reciprocal;  // the latter rounded once
  int format;
};

// Projected values [rows, heads, dim] of one kind, heads one after another.
struct Source {
  const void* data;
  int64_t row_stride;  // elements
  const float* norm;   // [dim], without the added 1
  int heads, dim;
};

enum Kind : int { kQuery, kKey, kValue, kIndexQuery, kIndexKey, kKinds };

struct Params {
  Source sources[kKinds];  // those of the index have no heads without one
  Pages pages[kKinds];     // of what is inserted
  void* q_out;        // [rows, heads, dim]
  void* index_q_out;
  const float* cos;  // [rows, half]
  const float* sin;
  const int64_t* positions;
  const int64_t* row_request;
  const int64_t* kv_lens;
  const int64_t* tables;
  int64_t table_stride;
  float eps;
  int half;  // channels i < half are rotated with i + half: 8, 16 or 32
};

template <typename T>
struct Raw;  // eight values as they are loaded

template <>
struct Raw<__nv_bfloat16> {
  uint4 words;
};

template <>
struct Raw<float> {
  float4 low, high;
};

template <typename T>
struct Loaded {
  Raw<T> part[2];
};

__device__ __forceinline__ void widen(const Raw<__nv_bfloat16>& raw, float (&x)[8]) {
  const uint32_t words[4] = {raw.words.x, raw.words.y, raw.words.z, raw.words.w};
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    x[2 * i] = __uint_as_float(words[i] << 16);
    x[2 * i + 1] = __uint_as_float(words[i] & 0xFFFF0000u);
  }
}

__device__ __forceinline__ void widen(const Raw<float>& raw, float (&x)[8]) {
  x[0] = raw.low.x, x[1] = raw.low.y, x[2] = raw.low.z, x[3] = raw.low.w;
  x[4] = raw.high.x, x[5] = raw.high.y, x[6] = raw.high.z, x[7] = raw.high.w;
}

__device__ __forceinline__ Raw<__nv_bfloat16> narrow(const float (&x)[8], __nv_bfloat16) {
  uint32_t words[4];
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const __nv_bfloat162 pair = __floats2bfloat162_rn(x[2 * i], x[2 * i + 1]);
    words[i] = reinterpret_cast<const uint32_t&>(pair);
  }
  return {make_uint4(words[0], words[1], words[2], words[3])};
}

__device__ __forceinline__ Raw<float> narrow(const float (&x)[8], float) {
  return {make_float4(x[0], x[1], x[2], x[3]), make_float4(x[4], x[5], x[6], x[7])};
}

// Heads of a task that there are; the others' lanes work on zeros and store nothing.
template <typename T>
__device__ __forceinline__ Loaded<T> load(const Source& from, int64_t row, int first_head) {
  const int lane = threadIdx.x % 32, head = first_head + lane / 8;
  Loaded<T> values = {};
  if (head < from.heads) {
    const auto* at = reinterpret_cast<const Raw<T>*>(
        static_cast<const T*>(from.data) + row * from.row_stride + int64_t{head} * from.dim +
        8 * (lane % 8));
    values.part[0] = at[0];
    if (from.dim == 128) values.part[1] = at[8];
  }
  return values;
}

// What a lane multiplies its channels by: 1 + the norm's weight.
struct Weights {
  float part[2][8];
};

__device__ __forceinline__ Weights load_weights(const Source& from) {
  Weights weights = {};
#pragma unroll
  for (int part = 0; part < 2; ++part) {
    if (part == 0 || from.dim == 128) {
      const auto* at = reinterpret_cast<const float4*>(from.norm + 64 * part +
                                                       8 * (threadIdx.x % 8));
      widen(Raw<float>{at[0], at[1]}, weights.part[part]);
#pragma unroll
      for (int i = 0; i < 8; ++i) weights.part[part][i] = __fadd_rn(1.0f, weights.part[part][i]);
    }
  }
  return weights;
}

// A row's angles for a lane's first eight channels.
struct Angles {
  float cos[8], sin[8];
};

__device__ __forceinline__ Angles load_angles(const Params& p, int64_t row) {
  Angles angles;
  const int64_t at = row * p.half + 8 * (threadIdx.x % 8) % p.half;
  const auto* cos = reinterpret_cast<const float4*>(p.cos + at);
  const auto* sin = reinterpret_cast<const float4*>(p.sin + at);
  widen(Raw<float>{cos[0], cos[1]}, angles.cos);
  widen(Raw<float>{sin[0], sin[1]}, angles.sin);
  return angles;
}

// Four heads, normed and rotated, in fp32. Every lane of the warp takes part.
template <typename T>
__device__ __forceinline__ void norm_rotate(const Loaded<T>& from, const Source& source,
                                            const Weights& weights, const Angles& angles,
                                            const Params& p, float (&x)[2][8]) {
  widen(from.part[0], x[0]);
  widen(from.part[1], x[1]);
  float sum = 0.0f;
#pragma unroll
  for (int i = 0; i < 8; ++i) sum += x[0][i] * x[0][i] + x[1][i] * x[1][i];
  sum += __shfl_xor_sync(kAll, sum, 1);
  sum += __shfl_xor_sync(kAll, sum, 2);
  sum += __shfl_xor_sync(kAll, sum, 4);
  // dim is a power of two: its reciprocal is exact.
  const float scale = rsqrtf(__fadd_rn(sum * (source.dim == 128 ? 0x1p-7f : 0x1p-6f), p.eps));
#pragma unroll
  for (int part = 0; part < 2; ++part) {
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      x[part][i] = __fmul_rn(__fmul_rn(x[part][i], scale), weights.part[part][i]);
    }
  }
  const int lane = threadIdx.x % 8, lanes = p.half / 8;
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    const float other = __shfl_xor_sync(kAll, x[0][i], lanes);
    const float own = __fmul_rn(x[0][i], angles.cos[i]);
    const float turned = __fmul_rn(other, angles.sin[i]);
    const float sum_of_both = lane < lanes ? __fsub_rn(own, turned) : __fadd_rn(own, turned);
    if (lane < 2 * lanes) x[0][i] = sum_of_both;
  }
}

}  // namespace

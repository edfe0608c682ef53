// Packed MXFP8 weights to bf16 rows, at the speed of memory, for products of many rows.
//
// Knows the layout of winnow/ops/fragments_mxfp8.py, plain and woven. Values are the format's,
// rounded to bf16 once: code * 2^(byte - 127), NaN for byte 255.

#include <cuda_fp16.h>

#include "packed.cuh"

namespace {

constexpr int kWarps = 8;
constexpr int kWovenBias = 88;  // of scale bytes

template <bool WOVEN>
__device__ float scale_of(uint32_t byte) {
  const uint32_t exponent = WOVEN ? byte - kWovenBias : byte;
  return __uint_as_float(byte == 255 ? 0x7FC00000u : exponent == 0 ? 0x00400000u : exponent << 23);
}

// The first two codes of a word (SECOND: the other two) by their scale.
template <bool WOVEN, bool SECOND>
__device__ uint32_t bf16_pair(uint32_t word, float scale) {
  float2 values;
  if constexpr (WOVEN) {
    constexpr float kUp = 0x1p120f;
    const uint32_t pair = SECOND ? second_pair<true>(word) : first_pair<true>(word);
    values = {__uint_as_float(pair << 16) * kUp, __uint_as_float(pair & 0xFFFF0000u) * kUp};
  } else {
    uint32_t pair;
    asm("cvt.rn.f16x2.e4m3x2 %0, %1;"
        : "=r"(pair)
        : "h"(static_cast<uint16_t>(SECOND ? word >> 16 : word)));
    values = __half22float2(*reinterpret_cast<const __half2*>(&pair));
  }
  const __nv_bfloat162 rounded = __floats2bfloat162_rn(values.x * scale, values.y * scale);
  return *reinterpret_cast<const uint32_t*>(&rounded);
}

// Word j of lane t among four lanes to word t of lane j.
__device__ void transpose(uint32_t (&words)[4], int t) {
#pragma unroll
  for (int distance = 1; distance < 4; distance *= 2) {
    const bool upper = t & distance;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      if (i & distance) continue;
      const uint32_t sent = upper ? words[i] : words[i + distance];
      const uint32_t got = __shfl_xor_sync(0xFFFFFFFFu, sent, distance);
      (upper ? words[i] : words[i + distance]) = got;
    }
  }
}

// A warp a piece.
template <bool WOVEN>
__global__ void __launch_bounds__(kWarps * 32)
    expand(const uint8_t* codes, const uint8_t* scales, __nv_bfloat16* out, int64_t num_pieces,
           int pieces) {
  const int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
  const int64_t piece = static_cast<int64_t>(blockIdx.x) * kWarps + threadIdx.x / 32;
  if (piece >= num_pieces) return;
  const uint4* from = reinterpret_cast<const uint4*>(codes + piece * kPieceCodes) + lane;
  uint4 words[kTiles];
#pragma unroll
  for (int i = 0; i < kTiles; ++i) words[i] = __ldg(from + i * 32);
  const uint2 bytes = __ldg(reinterpret_cast<const uint2*>(scales + piece * kPieceScales) + g);
  const int64_t columns = static_cast<int64_t>(pieces) * kPiece;
  __nv_bfloat16* upper =
      out + (piece / pieces * kStripRows + g) * columns + piece % pieces * kPiece + 8 * t;
#pragma unroll
  for (int i = 0; i < kTiles; ++i) {
    const float first = scale_of<WOVEN>(bytes.x >> 8 * i & 0xFF);
    const float second = scale_of<WOVEN>(bytes.y >> 8 * i & 0xFF);
    // A word is two codes of row g and the same two columns of row g + 8.
    uint32_t held[4] = {words[i].x, words[i].y, words[i].z, words[i].w};
    transpose(held, t);
    uint32_t rows[2][4];
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      rows[0][j] = bf16_pair<WOVEN, false>(held[j], first);
      rows[1][j] = bf16_pair<WOVEN, true>(held[j], second);
    }
#pragma unroll
    for (int half = 0; half < 2; ++half)
      *reinterpret_cast<uint4*>(upper + half * 8 * columns + 32 * i) = {
          rows[half][0], rows[half][1], rows[half][2], rows[half][3]};
  }
}

}  // namespace

// out: bf16 [16 strips, 128 pieces], 16-byte aligned. Returns a cudaError_t.
extern "C" int winnow_linear_expand(const void* codes, const void* scales, int woven, void* out,
                                    int64_t strips, int pieces, cudaStream_t stream) {
  const int64_t total = strips * pieces;
  if (total == 0) return cudaSuccess;
  const auto kernel = woven ? expand<true> : expand<false>;
  kernel<<<static_cast<unsigned>((total + kWarps - 1) / kWarps), kWarps * 32, 0, stream>>>(
      static_cast<const uint8_t*>(codes), static_cast<const uint8_t*>(scales),
      static_cast<__nv_bfloat16*>(out), total, pieces);
  return cudaGetLastError();
}

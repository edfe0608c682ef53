// Packed MXFP8 weights to bf16 rows, at the speed of memory, for products of many rows.
//
// Knows the layout of winnow/ops/fragments_mxfp8.py. Values are the format's, rounded to bf16
// once: code * 2^(byte - 127), NaN for byte 255.

#include <cuda_fp16.h>

#include "packed.cuh"

namespace {

constexpr int kWarps = 8;

__device__ float scale_of(uint32_t byte) {
  return __uint_as_float(byte == 255 ? 0x7FC00000u : byte == 0 ? 0x00400000u : byte << 23);
}

__device__ uint32_t bf16_pair(uint32_t codes, float scale) {
  uint32_t pair;
  asm("cvt.rn.f16x2.e4m3x2 %0, %1;" : "=r"(pair) : "h"(static_cast<uint16_t>(codes)));
  const float2 values = __half22float2(*reinterpret_cast<const __half2*>(&pair));
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
    const float first = scale_of(bytes.x >> 8 * i & 0xFF);
    const float second = scale_of(bytes.y >> 8 * i & 0xFF);
    // A word is two codes of row g and the same two columns of row g + 8.
    uint32_t held[4] = {words[i].x, words[i].y, words[i].z, words[i].w};
    transpose(held, t);
    *reinterpret_cast<uint4*>(upper + 32 * i) = {
        bf16_pair(held[0], first), bf16_pair(held[1], first), bf16_pair(held[2], first),
        bf16_pair(held[3], first)};
    *reinterpret_cast<uint4*>(upper + 8 * columns + 32 * i) = {
        bf16_pair(held[0] >> 16, second), bf16_pair(held[1] >> 16, second),
        bf16_pair(held[2] >> 16, second), bf16_pair(held[3] >> 16, second)};
  }
}

}  // namespace

// out: bf16 [16 strips, 128 pieces], 16-byte aligned. Returns a cudaError_t.
extern "C" int winnow_linear_expand(const void* codes, const void* scales, void* out,
                                    int64_t strips, int pieces, cudaStream_t stream) {
  const int64_t total = strips * pieces;
  if (total == 0) return cudaSuccess;
  expand<<<static_cast<unsigned>((total + kWarps - 1) / kWarps), kWarps * 32, 0, stream>>>(
      static_cast<const uint8_t*>(codes), static_cast<const uint8_t*>(scales),
      static_cast<__nv_bfloat16*>(out), total, pieces);
  return cudaGetLastError();
}

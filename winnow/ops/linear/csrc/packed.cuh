// The layout of winnow/ops/fragments_mxfp8.py as the kernels over packed MXFP8 weights see it.

#pragma once

#include <cuda_bf16.h>

#include <cstdint>

namespace {

constexpr int kStripRows = 16;
constexpr int kPiece = 128;
constexpr int kTiles = 4;  // of 32 columns a piece
constexpr int kTileBytes = 512;
constexpr int kPieceCodes = kTiles * kTileBytes;
constexpr int kPieceScales = 64;

// Where two bf16 numbers have what two E4M3 codes have.
constexpr uint32_t kPairBits = 0x87F087F0u;

// Bytes 0 and 1 (SELECTOR 0x9180) or 2 and 3 (0xB3A2) with their signs extended to 16 bits.
template <uint32_t SELECTOR>
__device__ __forceinline__ uint32_t extended(uint32_t word) {
  uint32_t wide;
  asm("prmt.b32 %0, %1, 0, %2;" : "=r"(wide) : "r"(word), "n"(SELECTOR));
  return wide;
}

// The first two codes of a word of four, and the other two, as bf16 numbers times 2^-120.
template <bool WOVEN>
__device__ __forceinline__ uint32_t first_pair(uint32_t word) {
  return (WOVEN ? word : extended<0x9180>(word) << 4) & kPairBits;
}

template <bool WOVEN>
__device__ __forceinline__ uint32_t second_pair(uint32_t word) {
  return (WOVEN ? word << 4 ^ word >> 4 : extended<0xB3A2>(word) << 4) & kPairBits;
}

}  // namespace

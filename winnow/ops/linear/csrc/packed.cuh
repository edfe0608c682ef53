// What the kernels over packed MXFP8 weights share: the layout of winnow/ops/fragments_mxfp8.py as
// they see it, and how they are launched.

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

struct Matrix {
  const uint8_t* codes;
  const uint8_t* scales;
  __nv_bfloat16* out;  // [rows, width]
  int strips;
  int width;
};

// Launch attributes: clusters, and the start before the launch before has ended.
struct Launch {
  cudaLaunchAttribute attributes[2];
  cudaLaunchConfig_t config;
};

void configure(Launch& launch, int slices, int clusters, int threads, int shared_bytes, bool early,
               cudaStream_t stream) {
  launch = {};
  launch.attributes[0].id = cudaLaunchAttributeClusterDimension;
  launch.attributes[0].val.clusterDim.x = slices;
  launch.attributes[0].val.clusterDim.y = launch.attributes[0].val.clusterDim.z = 1;
  launch.attributes[1].id = cudaLaunchAttributeProgrammaticStreamSerialization;
  launch.attributes[1].val.programmaticStreamSerializationAllowed = 1;
  launch.config.gridDim = clusters * slices;
  launch.config.blockDim = threads;
  launch.config.dynamicSmemBytes = shared_bytes;
  launch.config.stream = stream;
  launch.config.attrs = launch.attributes;
  launch.config.numAttrs = early ? 2 : 1;
}

// Clusters of a configuration that the device holds at once; negative: a cudaError_t.
template <typename Kernel>
int clusters_at_once(Kernel kernel, const Launch& launch) {
  cudaError_t error =
      cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                           static_cast<int>(launch.config.dynamicSmemBytes));
  int clusters = 0;
  if (error == cudaSuccess)
    error = cudaOccupancyMaxActiveClusters(&clusters, kernel, &launch.config);
  return error == cudaSuccess ? clusters : -static_cast<int>(error);
}

// Starts a kernel that may need more shared memory than it gets unasked.
template <typename Kernel, typename... Arguments>
cudaError_t start(Kernel kernel, const Launch& launch, const Arguments&... arguments) {
  const cudaError_t error =
      cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                           static_cast<int>(launch.config.dynamicSmemBytes));
  return error == cudaSuccess ? cudaLaunchKernelEx(&launch.config, kernel, arguments...) : error;
}

}  // namespace

// What the kernels over packed MXFP8 weights share: the layout of winnow/ops/fragments_mxfp8.py as
// they see it, how it is loaded and converted, and how clusters are launched.

#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>

namespace {

constexpr unsigned kAll = 0xFFFFFFFFu;
constexpr int kStripRows = 16;
constexpr int kPiece = 128;
constexpr int kTiles = 4;  // of 32 columns a piece
constexpr int kTileBytes = 512;
constexpr int kPieceCodes = kTiles * kTileBytes;
constexpr int kPieceScales = 64;
constexpr int kMaxSlices = 8;

struct Matrix {
  const uint8_t* codes;
  const uint8_t* scales;
  __nv_bfloat16* out;  // [rows, width]
  int strips;
  int width;
};

// One piece of a strip, a lane's share.
struct Held {
  uint4 codes[kTiles];
  uint2 scales;
};

// Loads where `wanted`, with no branch: what is held stays otherwise.
__device__ __forceinline__ void load_codes(uint4& to, const uint8_t* from, bool wanted) {
  asm volatile(
      "{\n"
      ".reg .pred wanted;\n"
      "setp.ne.u32 wanted, %5, 0;\n"
      "@wanted ld.global.nc.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];\n"
      "}\n"
      : "+r"(to.x), "+r"(to.y), "+r"(to.z), "+r"(to.w)
      : "l"(from), "r"(static_cast<uint32_t>(wanted)));
}

__device__ __forceinline__ void load_scales(uint2& to, const uint8_t* from, bool wanted) {
  asm volatile(
      "{\n"
      ".reg .pred wanted;\n"
      "setp.ne.u32 wanted, %3, 0;\n"
      "@wanted ld.global.nc.L1::no_allocate.v2.u32 {%0, %1}, [%2];\n"
      "}\n"
      : "+r"(to.x), "+r"(to.y)
      : "l"(from), "r"(static_cast<uint32_t>(wanted)));
}

// Two E4M3 codes as fp16, exactly.
__device__ __forceinline__ uint32_t halves_of(uint32_t codes) {
  uint32_t pair;
  asm("cvt.rn.f16x2.e4m3x2 %0, %1;" : "=r"(pair) : "h"(static_cast<uint16_t>(codes)));
  return pair;
}

// Byte `tile` of four E8M0 scales, as the exponent of an fp32 number.
__device__ __forceinline__ uint32_t exponent_of(uint32_t scales, int tile) {
  return (tile < 3 ? scales << (23 - 8 * tile) : scales >> 1) & 0x7F800000u;
}

// What this CTA wrote to global memory is seen by the cluster's others afterwards.
__device__ __forceinline__ void cluster_barrier() {
  asm volatile(
      "barrier.cluster.arrive.release.aligned;\n"
      "barrier.cluster.wait.acquire.aligned;" ::: "memory");
}

// Launch attributes of both kernels: clusters, and the start before the launch before has ended.
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

template <typename Kernel, typename Work>
cudaError_t start(Kernel kernel, const Launch& launch, const Work& work) {
  const cudaError_t error =
      cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                           static_cast<int>(launch.config.dynamicSmemBytes));
  return error == cudaSuccess ? cudaLaunchKernelEx(&launch.config, kernel, work) : error;
}

}  // namespace

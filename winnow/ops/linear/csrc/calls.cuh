// How slices.cu and ranges.cu are called: what both are given, and how they begin.

#pragma once

#include "product.cuh"

// x: bf16 [rows, 128 pieces], 16-byte aligned as its rows are, x_stride in elements. Two packed
// matrices with as many columns (the second with no strips, if there is one alone), both woven or
// neither. early: start before the launch before this one has ended (its results may be x, but not
// weights).
struct Product {
  Matrix matrices[2];
  const void* x;
  int64_t x_stride;
  int rows, pieces, woven, early;
  cudaStream_t stream;
};

namespace {

// A kernel for `columns` rows together.
template <typename Kernel>
struct Variant {
  Kernel kernel;
  int columns, groups, threads, bytes;
};

// Boxes of 64 columns by `box` rows of bf16 [rows, columns]; rows that are not there are 0. Strides
// are counted in elements.
cudaError_t describe(CUtensorMap& map, const void* x, int64_t x_stride, int rows, int columns,
                     int box) {
  Encode encode;
  const cudaError_t error = find_encode(&encode);
  if (error != cudaSuccess) return error;
  const cuuint64_t sizes[2] = {static_cast<cuuint64_t>(columns), static_cast<cuuint64_t>(rows)};
  // One row may have any stride.
  const cuuint64_t strides[1] = {static_cast<cuuint64_t>(rows > 1 ? x_stride : columns) * 2};
  const cuuint32_t boxes[2] = {64, static_cast<cuuint32_t>(box)}, steps[2] = {1, 1};
  const CUresult done = encode(&map, CU_TENSOR_MAP_DATA_TYPE_BFLOAT16, 2, const_cast<void*>(x),
                               sizes, strides, boxes, steps, CU_TENSOR_MAP_INTERLEAVE_NONE,
                               CU_TENSOR_MAP_SWIZZLE_128B, CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
                               CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  return done == CUDA_SUCCESS ? cudaSuccess : cudaErrorInvalidValue;
}

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

// Lets a kernel have more shared memory than it gets unasked.
template <typename Kernel>
cudaError_t allow(const Variant<Kernel>& variant) {
  return cudaFuncSetAttribute(variant.kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                              variant.bytes);
}

// Clusters of `slices` CTAs that the device holds at once; negative: a cudaError_t.
template <typename Kernel>
int clusters_at_once(const Variant<Kernel>& variant, int slices) {
  if (variant.kernel == nullptr) return -cudaErrorInvalidValue;
  Launch launch;
  configure(launch, slices, 1, variant.threads, variant.bytes, false, nullptr);
  cudaError_t error = allow(variant);
  int clusters = 0;
  if (error == cudaSuccess)
    error = cudaOccupancyMaxActiveClusters(&clusters, variant.kernel, &launch.config);
  return error == cudaSuccess ? clusters : -static_cast<int>(error);
}

template <typename Kernel, typename... Arguments>
cudaError_t start(const Variant<Kernel>& variant, int slices, int clusters, bool early,
                  cudaStream_t stream, const Arguments&... arguments) {
  Launch launch;
  configure(launch, slices, clusters, variant.threads, variant.bytes, early, stream);
  const cudaError_t error = allow(variant);
  if (error != cudaSuccess) return error;
  return cudaLaunchKernelEx(&launch.config, variant.kernel, arguments...);
}

// What a kernel is told; an error if it cannot be. tiles: in which the strips are divided.
template <typename Kernel>
cudaError_t prepare(const Product& product, const Variant<Kernel>& variant, int tiles,
                    float* scratch, Work& work, CUtensorMap& map) {
  if (variant.kernel == nullptr || product.rows < 1 || product.pieces < 1 || tiles < 1)
    return cudaErrorInvalidValue;
  work = {{product.matrices[0], product.matrices[1]},
          reinterpret_cast<float4*>(scratch),
          product.rows,
          product.pieces,
          (product.rows + variant.columns - 1) / variant.columns,
          tiles};
  if (groups_of(work) > variant.groups) return cudaErrorInvalidValue;
  return describe(map, product.x, product.x_stride, product.rows, product.pieces * kPiece,
                  variant.columns);
}

}  // namespace

// How the copy engine sees activations.

#pragma once

#include "../../csrc/hopper.cuh"

namespace {

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

}  // namespace

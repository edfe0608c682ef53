// How the copy engine sees packed weights: maps of the two products' codes and scales.

#pragma once

#include "prefill_items.cuh"

namespace {

// Boxes of `box_bytes` by `box` rows of bytes [rows, row_bytes], in elements of eight bytes, as a
// box has at most 256 a row. What is not there is 0.
cudaError_t describe(CUtensorMap& map, const void* from, int row_bytes, int rows, int box_bytes,
                     int box) {
  Encode encode;
  const cudaError_t error = find_encode(&encode);
  if (error != cudaSuccess) return error;
  const cuuint64_t sizes[2] = {static_cast<cuuint64_t>(row_bytes / 8),
                               static_cast<cuuint64_t>(rows)};
  const cuuint64_t strides[1] = {static_cast<cuuint64_t>(row_bytes)};
  const cuuint32_t boxes[2] = {static_cast<cuuint32_t>(box_bytes / 8),
                               static_cast<cuuint32_t>(box)};
  const cuuint32_t steps[2] = {1, 1};
  const CUresult done =
      encode(&map, CU_TENSOR_MAP_DATA_TYPE_UINT64, 2, const_cast<void*>(from), sizes, strides,
             boxes, steps, CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_NONE,
             CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  return done == CUDA_SUCCESS ? cudaSuccess : cudaErrorInvalidValue;
}

struct Packed {
  const uint8_t *codes[kProducts], *scales[kProducts];
};

// Maps of whose boxes each of `warps` warps has a strip.
cudaError_t describe(Maps& maps, const Params& p, const Packed& packed, int warps) {
  for (int i = 0; i < (p.shared ? kProducts : kShared); ++i) {
    const Product& product = p.products[i];
    cudaError_t error = describe(maps.codes[i], packed.codes[i], product.pairs * kPairCodes,
                                 product.all_strips, kPairCodes, warps);
    if (error != cudaSuccess) return error;
    error = describe(maps.scales[i], packed.scales[i], product.pairs * kPairScales,
                     product.all_strips, kPairScales, warps);
    if (error != cudaSuccess) return error;
  }
  return cudaSuccess;
}

}  // namespace

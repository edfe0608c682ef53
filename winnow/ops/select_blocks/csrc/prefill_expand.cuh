// Index keys of each block as 16-bit numbers, in the order in which the tensor core reads them; and the
// plan of the scoring, made beside.

#pragma once

#include "prefill_plan.cuh"

namespace {

// Two neighbouring codes, the lower nibble first, as fp16 numbers code * 2^-14.
__device__ uint32_t moved(uint32_t codes) {
  return (codes & 0x7u) << 9 | (codes & 0x8u) << 12 | (codes & 0x70u) << 21 | (codes & 0x80u) << 24;
}

// Eight keys' numbers from dimension 8 * chunk on, as the tensor core takes them.
__device__ uint4 eight(const Keys& keys, int64_t page, int token, int chunk) {
  const uint8_t* codes = keys.codes + page * keys.page_stride;
  if (keys.format == kBf16)
    return *reinterpret_cast<const uint4*>(codes + (token * kDim + 8 * chunk) * 2);
  uint32_t out[4];
  if (keys.format == kFp8) {
    const uint2 words = *reinterpret_cast<const uint2*>(codes + token * kDim + 8 * chunk);
    const uint32_t both[2] = {words.x, words.y};
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const auto pair = static_cast<__nv_fp8x2_storage_t>(both[i / 2] >> 16 * (i % 2));
      out[i] = bits(__half2(__nv_cvt_fp8x2_to_halfraw2(pair, __NV_E4M3)));
    }
  } else {
    const uint8_t* scales = keys.scales + page * keys.page_stride;
    const uint32_t word =
        *reinterpret_cast<const uint32_t*>(codes + token * kDim / 2 + 4 * chunk);
    const __half2 scale = __half2half2(__half(
        __nv_cvt_fp8_to_halfraw(scales[token * (kDim / 16) + chunk / 2], __NV_E4M3)));
#pragma unroll
    for (int i = 0; i < 4; ++i)
      out[i] = bits(__hmul2(halves(moved(word >> 8 * i & 0xFFu)), scale));
  }
  return {out[0], out[1], out[2], out[3]};
}

// CTA (0, 0) makes the plan. The others: images of a request's blocks that lie wholly in its last row's
// past, block x - 1 of request y.
__global__ void __launch_bounds__(kExpandThreads)
    prepare(Keys keys, Requests requests, int tile_rows, Plan plan, uint8_t* images) {
  const int block = static_cast<int>(blockIdx.x) - 1, request = blockIdx.y;
  if (block < 0) {
    if (request == 0) make_plan(requests, tile_rows, plan);
    return;
  }
  if (block >= (requests.kv_lens[request] - 1) / kBlockTokens) return;
  const int64_t page = requests.tables[request * requests.table_stride + block];
  uint8_t* image = images + (static_cast<int64_t>(request) * requests.max_blocks + block) * kImageBytes;
#pragma unroll 4
  for (int i = threadIdx.x; i < kBlockTokens * kDim / 8; i += kExpandThreads) {
    const int token = i / (kDim / 8), chunk = i % (kDim / 8), row = token % 8;
    uint8_t* place = image + chunk / 8 * kHalfBytes + token * 128 + (chunk % 8 ^ row) * 16;
    *reinterpret_cast<uint4*>(place) = eight(keys, page, token, chunk);
  }
}

}  // namespace

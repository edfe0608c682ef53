// What the kernels of select_blocks share: the requests, their blocks as one list, and the scores.

#pragma once

#include <cuda_runtime.h>

#include <cstdint>

namespace {

constexpr int kBlockTokens = 128;
constexpr int kDim = 128;
constexpr int kWarps = 16;
constexpr unsigned kAll = 0xFFFFFFFFu;

struct Requests {
  const int64_t* positions;
  const int64_t* row_request;
  const int64_t* row_starts;
  const int64_t* kv_lens;
  const int64_t* tables;
  int64_t table_stride;
  int count;
  int topk;
};

struct Scores {
  float* data;  // [rows * heads, stride]: a block's parts one after another; their maximum counts
  int64_t stride;
};

// Blocks to be scored for a request: those before the last row's own, none where the selection
// is all visible blocks whatever the scores.
__device__ int scored_blocks(const Requests& requests, int64_t kv_len) {
  int64_t past = (kv_len - 1) / kBlockTokens;
  return kv_len > 0 && past >= requests.topk ? static_cast<int>(past) : 0;
}

// Units of one request: a block for each pass of 1 << pass_bits of its rows.
__device__ int units_of(const Requests& requests, int request, int pass_bits) {
  const int rows =
      static_cast<int>(requests.row_starts[request + 1] - requests.row_starts[request]);
  const int passes = (rows + (1 << pass_bits) - 1) >> pass_bits;
  return scored_blocks(requests, requests.kv_lens[request]) * passes;
}

// Rows of a pass, as a power of two, where it has `tiles` times 8 query columns.
__host__ __device__ int pass_bits_of(int tiles, int head_bits) {
  return (tiles == 1 ? 3 : tiles == 2 ? 4 : 5) - head_bits;
}

// A block is split among 1 << part_bits warps, for latency where there are few blocks.
__device__ int part_bits_of(int units, int workers) {
  return units <= workers / 4 ? 2 : units <= workers / 2 ? 1 : 0;
}

}  // namespace

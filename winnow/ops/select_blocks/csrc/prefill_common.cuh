// Sizes, arguments and machine instructions that the kernels of prefill selection share.

#pragma once

#include <cuda_fp16.h>
#include <cuda_fp8.h>

#include <cstdint>

#include "../../csrc/hopper.cuh"

namespace {

constexpr unsigned kAll = 0xFFFFFFFFu;
constexpr int kBlockTokens = 128;
constexpr int kDim = 128;
constexpr int kImageBytes = kBlockTokens * kDim * 2;
constexpr int kHalfBytes = kImageBytes / 2;  // 64 dimensions of every token: rows of 128 bytes
constexpr int kStages = 6;
constexpr int kGroups = 2;  // warpgroups
constexpr int kThreads = (kGroups + 1) * 128;  // the last warpgroup asks for keys
constexpr int kTileColumns = 128 * kGroups;
constexpr int kSteps = kDim / 16;
constexpr int kTurn = 8;  // blocks whose scores are written together: 32 bytes
constexpr int kPortion = 2;  // of them a lane writes; shares of the work are so many or a multiple

constexpr int kExpandThreads = 256;
constexpr int kChooseWarps = 8;
constexpr int kMaxTopk = 16;
constexpr int kChunk = 1024;  // scores that a warp holds at once
constexpr int kItems = kChunk / 32;
constexpr int kRanked = 128;

enum Format { kNvfp4 = 0, kFp8 = 1, kBf16 = 2 };

struct Keys {
  const uint8_t* codes;
  const uint8_t* scales;
  int64_t page_stride;  // of both, in bytes
  int format;
};

struct Requests {
  const int64_t* positions;
  const int64_t* row_request;
  const int64_t* row_starts;
  const int64_t* kv_lens;
  const int64_t* tables;
  int64_t table_stride;
  int count;
  int max_blocks;
  int first_row, end_row;  // of this call
  int topk;
};

struct Queries {
  const uint16_t* data;  // bf16
  int64_t row_stride;    // in elements
  int64_t head_stride;
  int head_bits;  // heads = 1 << head_bits; column c of a tile is row c >> head_bits of it
};

__device__ uint32_t bits(__half2 x) { return *reinterpret_cast<uint32_t*>(&x); }
__device__ __half2 halves(uint32_t x) { return *reinterpret_cast<__half2*>(&x); }

}  // namespace

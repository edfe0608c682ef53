// Sizes, arguments and machine instructions that the kernels of prefill selection share.

#pragma once

#include <cuda_fp16.h>
#include <cuda_fp8.h>

#include <cstdint>

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

__device__ uint32_t shared_address(const void* pointer) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(pointer));
}

__device__ void barrier_init(uint32_t barrier, int count) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(count) : "memory");
}

__device__ void barrier_expect(uint32_t barrier, int bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes)
               : "memory");
}

__device__ void barrier_arrive(uint32_t barrier) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
}

__device__ void barrier_wait(uint32_t barrier, uint32_t parity) {
  asm volatile(
      "{\n"
      ".reg .pred done;\n"
      "again:\n"
      "mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
      "@!done bra again;\n"
      "}\n" ::"r"(barrier), "r"(parity)
      : "memory");
}

__device__ void bulk_copy(uint32_t to, const void* from, int bytes, uint32_t barrier) {
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];"
      ::"r"(to), "l"(from), "r"(bytes), "r"(barrier)
      : "memory");
}

__device__ uint32_t bits(__half2 x) { return *reinterpret_cast<uint32_t*>(&x); }
__device__ __half2 halves(uint32_t x) { return *reinterpret_cast<__half2*>(&x); }

}  // namespace

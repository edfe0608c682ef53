// The products of route.cu: rows by the router's numbers, over a CTA's share of the hidden columns.
// Knows nothing of clusters and of choices.
//
// Exactness. The router's fp32 numbers are three bf16 numbers each, made in registers, so that
// products with bf16 rows are exact on tensor cores; they are the A operand. The largest parts have
// sums of their own, since tensor cores cut off what lies below a sum's last bit.

#pragma once

#include <algorithm>
#include <cstdint>

#include "prefill_wgmma.cuh"

namespace {

constexpr int kSections = 16;
constexpr int kColumns = 64;     // of a stage
constexpr int kBoxColumns = 32;  // of the router's numbers in 128 bytes
constexpr int kRowBytes = 128;
constexpr int kStageRoom = 216 * 1024;

WINNOW_PRODUCT_OF(multiply_bf16, "bf16", 32, 16, WINNOW_LIST_16, 16, 17, 18, 19, 20)
WINNOW_PRODUCT_OF(multiply_bf16, "bf16", 64, 32, WINNOW_LIST_32, 32, 33, 34, 35, 36)
WINNOW_PRODUCT_OF(multiply_bf16, "bf16", 128, 64, WINNOW_LIST_64, 64, 65, 66, 67, 68)

// How a CTA is made: `GROUPS` warpgroups of 64 experts each, and one that has the thread that feeds
// them, since registers are moved between warpgroups.
template <int GROUPS, int ROWS, int SECTIONS>
struct Tile {
  static constexpr int kRows = ROWS, kSectionsOwn = SECTIONS, kExperts = 64 * GROUPS;
  static constexpr int kWarps = 4 * GROUPS, kThreads = 128 * (GROUPS + 1);
  static constexpr int kCtas = kSections / SECTIONS, kRowsOwn = ROWS / kCtas;
  static constexpr int kPairs = std::min(kCtas, kSections / 2);  // of sections, or sums of these
  static constexpr int kAtOnce = std::clamp(kRowsOwn / kWarps, 1, 4);  // rows that a warp decides
  static constexpr int kRowsBytes = ROWS * kRowBytes, kBoxBytes = kExperts * kRowBytes;
  static constexpr int kStageBytes = kRowsBytes + 2 * kBoxBytes;
  // A CTA of many sections keeps the first of two in shared memory.
  static constexpr int kHeld = SECTIONS > 2 ? ROWS / 2 : 1, kMultipliers = 32 * kWarps;
  static constexpr int kStages = std::min(6, (kStageRoom - 4 * kHeld * kMultipliers) / kStageBytes);
  // What a CTA's registers at launch (168 or 96 a thread) allow.
  static constexpr int kRegisters = GROUPS == 2 ? 240 : 112;
  static constexpr int kOtherRegisters = GROUPS == 2 ? 24 : 32;
  // Of a row's sums. Four more than the experts, so that a warp's stores meet different banks.
  static constexpr int kPitch = kExperts + 4;
};

template <typename T>
struct __align__(1024) Stage {
  uint8_t rows[T::kRowsBytes];
  uint8_t router[2][T::kBoxBytes];
};

template <typename T>
struct Shared {
  union {
    Stage<T> stages[T::kStages];
    float sums[T::kRows][T::kPitch];  // once all stages have been multiplied
  };
  float held[T::kHeld][T::kMultipliers];
  uint64_t full[T::kStages], empty[T::kStages];
};

// Of `slabs` of kColumns columns, a section's first.
__device__ __forceinline__ int first_slab(int slabs, int section) {
  return section * slabs / kSections;
}

// Feeds what the CTA multiplies: a thread.
template <typename T>
__device__ __forceinline__ void feed(const CUtensorMap& rows, const CUtensorMap& router,
                                     int slabs, Shared<T>& shared, int first_row,
                                     int first_section) {
  int stage = 0, parity = 1;
  const int end = first_slab(slabs, first_section + T::kSectionsOwn);
#pragma unroll 1
  for (int slab = first_slab(slabs, first_section); slab < end; ++slab) {
    Stage<T>& to = shared.stages[stage];
    const uint32_t full = shared_address(&shared.full[stage]);
    barrier_wait(shared.empty[stage], parity);
    barrier_expect(full, T::kStageBytes);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      tensor_load(shared_address(to.router[half]), router, kColumns * slab + kBoxColumns * half, 0,
                  full);
    }
    tensor_load(shared_address(to.rows), rows, kColumns * slab, first_row, full);
    if (++stage == T::kStages) stage = 0, parity ^= 1;
  }
}

// Two fp32 numbers as three registers of bf16 parts of both, the largest first. Each part is cut
// off, not rounded: eight bits, three times, are all there are. A part may be 0, so where a row has
// an infinity its scores may be NaN instead; such a row's output is NaN either way.
__device__ __forceinline__ void split(uint2 w, uint32_t& high, uint32_t& middle, uint32_t& low) {
  constexpr uint32_t kUpper = 0xFFFF0000u, kBoth = 0x7632;
  high = __byte_perm(w.x, w.y, kBoth);
  const float a = __uint_as_float(w.x) - __uint_as_float(w.x & kUpper);
  const float b = __uint_as_float(w.y) - __uint_as_float(w.y & kUpper);
  const uint32_t x = __float_as_uint(a), y = __float_as_uint(b);
  middle = __byte_perm(x, y, kBoth);
  low = __byte_perm(__float_as_uint(a - __uint_as_float(x & kUpper)),
                    __float_as_uint(b - __uint_as_float(y & kUpper)), kBoth);
}

// Which of eight experts is a fragment's row g: a half warp's four then lie in different banks.
__device__ __forceinline__ int expert_of(int g) { return g % 4 * 2 + g / 4; }

// What a warp carries from section to section.
struct Walk {
  int stage = 0, parity = 0;
};

// One section of a warp's 16 experts by the tile's rows.
template <typename T>
__device__ __forceinline__ void multiply_section(int slabs, Shared<T>& shared, int section,
                                                 Walk& walk, uint32_t lane_at, int lane,
                                                 float (&sums)[T::kRows / 2]) {
  constexpr int kSums = T::kRows / 2;
  float high[kSums] = {}, rest[kSums] = {};
  uint32_t previous = 0;
  const int first = first_slab(slabs, section), end = first_slab(slabs, section + 1);
  for (int slab = first; slab < end; ++slab) {
    Stage<T>& stage = shared.stages[walk.stage];
    barrier_wait(shared.full[walk.stage], walk.parity);
    const uint64_t rows = descriptor(shared_address(stage.rows));
#pragma unroll
    for (int i = 0; i < kColumns / 16; ++i) {
      uint32_t parts[3][4];
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const uint32_t from = (shared_address(stage.router[i / 2]) + lane_at) ^
                              (i % 2 * 4 + half * 2) << 4;
#pragma unroll
        for (int row = 0; row < 2; ++row) {
          split(shared_8(from + row * 8 * kRowBytes), parts[0][2 * half + row],
                parts[1][2 * half + row], parts[2][2 * half + row]);
        }
      }
      // 16 columns are two of a descriptor's units.
      wgmma_fence();
      multiply_bf16(high, parts[0], rows + 2 * i);
      multiply_bf16(rest, parts[1], rows + 2 * i);
      multiply_bf16(rest, parts[2], rows + 2 * i);
      wgmma_commit();
      wgmma_wait<1>();
      // What came before these products has been read by now.
      if (i == 0 && slab > first) barrier_arrive_warp(previous, lane);
    }
    previous = shared_address(&shared.empty[walk.stage]);
    if (++walk.stage == T::kStages) walk.stage = 0, walk.parity ^= 1;
  }
  wgmma_wait<0>();
  if (end > first) barrier_arrive_warp(previous, lane);
#pragma unroll
  for (int i = 0; i < kSums; ++i) sums[i] = high[i] + rest[i];
}

// A CTA's sums over its sections, into its shared memory.
template <typename T>
__device__ __forceinline__ void multiply(int slabs, Shared<T>& shared, int first_section, int warp,
                                         int lane) {
  const int t = lane % 4, own = expert_of(lane / 4), expert = 16 * warp + own;
  // Chunks of 16 bytes lie where the copy engine's swizzle puts them.
  const uint32_t lane_at = expert * kRowBytes + ((t / 2 ^ own) << 4) + t % 2 * 8;
  constexpr int kSums = T::kRows / 2;
  float sums[kSums] = {}, part[kSums];
  Walk walk;
#pragma unroll 1
  for (int section = first_section; section < first_section + T::kSectionsOwn; ++section) {
    multiply_section<T>(slabs, shared, section, walk, lane_at, lane, part);
    const bool held = T::kSectionsOwn > 2 && section % 2 == 0;
#pragma unroll
    for (int i = 0; i < kSums; ++i) {
      if (held) {
        shared.held[i][threadIdx.x] = part[i];
      } else {
        sums[i] += T::kSectionsOwn > 2 ? shared.held[i][threadIdx.x] + part[i] : part[i];
      }
    }
  }
  // They lie where stages did, which all warps have read by now.
  asm volatile("bar.sync 1, %0;" ::"n"(32 * T::kWarps) : "memory");
#pragma unroll
  for (int j = 0; j < T::kRows / 8; ++j) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
#pragma unroll
      for (int c = 0; c < 2; ++c)
        shared.sums[8 * j + 2 * t + c][expert + 8 * half] = sums[4 * j + 2 * half + c];
    }
  }
}

}  // namespace

// Products of tiles of query columns with the blocks' keys, and each block's largest one.

#pragma once

#include "prefill_common.cuh"

namespace {

template <bool BF16>
__device__ __forceinline__ void wgmma(float (&d)[64], const uint32_t (&a)[4], uint64_t b,
                                      bool first) {
#define WINNOW_WGMMA(type)                                                                      \
  asm volatile(                                                                                 \
      "{\n"                                                                                     \
      ".reg .pred keep;\n"                                                                      \
      "setp.ne.b32 keep, %69, 0;\n"                                                             \
      "wgmma.mma_async.sync.aligned.m64n128k16.f32." type "." type " "                          \
      "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "                 \
      "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, "        \
      "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, "        \
      "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63}, "       \
      "{%64, %65, %66, %67}, %68, keep, 1, 1, 0;\n"                                             \
      "}\n"                                                                                     \
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]),     \
        "+f"(d[7]), "+f"(d[8]), "+f"(d[9]), "+f"(d[10]), "+f"(d[11]), "+f"(d[12]), "+f"(d[13]), \
        "+f"(d[14]), "+f"(d[15]), "+f"(d[16]), "+f"(d[17]), "+f"(d[18]), "+f"(d[19]),           \
        "+f"(d[20]), "+f"(d[21]), "+f"(d[22]), "+f"(d[23]), "+f"(d[24]), "+f"(d[25]),           \
        "+f"(d[26]), "+f"(d[27]), "+f"(d[28]), "+f"(d[29]), "+f"(d[30]), "+f"(d[31]),           \
        "+f"(d[32]), "+f"(d[33]), "+f"(d[34]), "+f"(d[35]), "+f"(d[36]), "+f"(d[37]),           \
        "+f"(d[38]), "+f"(d[39]), "+f"(d[40]), "+f"(d[41]), "+f"(d[42]), "+f"(d[43]),           \
        "+f"(d[44]), "+f"(d[45]), "+f"(d[46]), "+f"(d[47]), "+f"(d[48]), "+f"(d[49]),           \
        "+f"(d[50]), "+f"(d[51]), "+f"(d[52]), "+f"(d[53]), "+f"(d[54]), "+f"(d[55]),           \
        "+f"(d[56]), "+f"(d[57]), "+f"(d[58]), "+f"(d[59]), "+f"(d[60]), "+f"(d[61]),           \
        "+f"(d[62]), "+f"(d[63])                                                                \
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(first ? 0 : 1))
  if constexpr (BF16) {
    WINNOW_WGMMA("bf16");
  } else {
    WINNOW_WGMMA("f16");
  }
#undef WINNOW_WGMMA
}

template <int LEFT>
__device__ __forceinline__ void wgmma_wait() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(LEFT) : "memory");
}

// After a wait: nothing that reads these sums may be moved before it.
__device__ __forceinline__ void settle(float (&d)[64]) {
#pragma unroll
  for (int i = 0; i < 64; ++i) asm volatile("" : "+f"(d[i])::"memory");
}

// Rows of 128 bytes, swizzled by 128 bytes, eight rows 1,024 bytes apart.
__device__ __forceinline__ uint64_t descriptor(uint32_t address) {
  return static_cast<uint64_t>((address & 0x3FFFFu) >> 4) | 1ull << 16 | 64ull << 32 | 1ull << 62;
}

// 64 query columns by the 128 keys of a stage.
template <bool BF16>
__device__ __forceinline__ void multiply(float (&d)[64], const uint32_t (&a)[kSteps][4],
                                         uint32_t stage) {
  asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
#pragma unroll
  for (int step = 0; step < kSteps; ++step)
    wgmma<BF16>(d, a[step], descriptor(stage + step / 4 * kHalfBytes + step % 4 * 32), step == 0);
  asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}

// A fragments of the columns of rows `upper` and `lower` (g and g + 8 of a warp's 16), or zeros
// from row `end` on.
template <bool BF16>
__device__ void load_queries(const Queries& queries, int column, int first_row, int end_row,
                             uint32_t (&a)[kSteps][4]) {
  const int t = threadIdx.x % 4;
#pragma unroll
  for (int side = 0; side < 2; ++side) {
    const int own = column + 8 * side;
    const int row = first_row + (own >> queries.head_bits);
    const int head = own & ((1 << queries.head_bits) - 1);
    const uint16_t* from =
        queries.data + row * queries.row_stride + head * queries.head_stride + 2 * t;
    uint32_t words[2 * kSteps];
#pragma unroll
    for (int i = 0; i < 2 * kSteps; ++i)
      words[i] = row < end_row ? *reinterpret_cast<const uint32_t*>(from + 8 * i) : 0u;
    if constexpr (!BF16) {
      uint32_t largest = 0;
#pragma unroll
      for (int i = 0; i < 2 * kSteps; ++i) {
        const uint32_t low = words[i] & 0x7FFFu, high = words[i] >> 16 & 0x7FFFu;
        largest = max(largest, low < 0x7F80u ? low : 0u);
        largest = max(largest, high < 0x7F80u ? high : 0u);
      }
      largest = max(largest, __shfl_xor_sync(kAll, largest, 1));
      largest = max(largest, __shfl_xor_sync(kAll, largest, 2));
      const float factor = __uint_as_float(min(254u, 268u - (largest >> 7)) << 23);
#pragma unroll
      for (int i = 0; i < 2 * kSteps; ++i)
        words[i] = bits(__floats2half2_rn(__uint_as_float(words[i] << 16) * factor,
                                          __uint_as_float(words[i] & 0xFFFF0000u) * factor));
    }
#pragma unroll
    for (int step = 0; step < kSteps; ++step) {
      a[step][side] = words[2 * step];
      a[step][2 + side] = words[2 * step + 1];
    }
  }
}

// The largest product of each of a lane's two columns, equal in the four lanes of a row. A NaN is
// dropped: the lowest of products.
__device__ __forceinline__ float2 largest_of(const float (&d)[64]) {
  float upper = -INFINITY, lower = -INFINITY;
#pragma unroll
  for (int i = 0; i < 64; i += 4) {
    upper = fmaxf(upper, fmaxf(d[i], d[i + 1]));
    lower = fmaxf(lower, fmaxf(d[i + 2], d[i + 3]));
  }
#pragma unroll
  for (int distance = 1; distance < 4; distance *= 2) {
    upper = fmaxf(upper, __shfl_xor_sync(kAll, upper, distance));
    lower = fmaxf(lower, __shfl_xor_sync(kAll, lower, distance));
  }
  return {upper, lower};
}

// The request of a tile, and its rows.
struct Tile {
  int request, first_row, end_row;
};

// By one warp: 32 requests at a time.
__device__ Tile locate(const Requests& requests, int tile_rows, int index) {
  const int lane = threadIdx.x % 32;
  for (int base = 0; base < requests.count; base += 32) {
    const int request = base + lane;
    int first = 0, end = 0;
    if (request < requests.count) {
      first = max(static_cast<int>(requests.row_starts[request]), requests.first_row);
      end = min(static_cast<int>(requests.row_starts[request + 1]), requests.end_row);
    }
    const int own = end > first ? (end - first + tile_rows - 1) / tile_rows : 0;
    int sum = own;
#pragma unroll
    for (int distance = 1; distance < 32; distance *= 2) {
      const int other = __shfl_up_sync(kAll, sum, distance);
      if (lane >= distance) sum += other;
    }
    const uint32_t reached = __ballot_sync(kAll, index < sum);
    if (reached != 0) {
      const int at = __ffs(reached) - 1;
      const int start = __shfl_sync(kAll, first, at) +
                        (index - __shfl_sync(kAll, sum - own, at)) * tile_rows;
      return {base + at, start, min(__shfl_sync(kAll, end, at), start + tile_rows)};
    }
    index -= __shfl_sync(kAll, sum, 31);
  }
  return {-1, 0, 0};
}

template <bool BF16>
__global__ void __launch_bounds__(kThreads, 1)
    score(Queries queries, Requests requests, const uint8_t* images, float* scores,
          int64_t stride) {
  extern __shared__ __align__(1024) uint8_t shared[];
  __shared__ alignas(8) uint64_t barriers[2 * kStages];
  __shared__ Tile tile;
  const uint32_t full = shared_address(barriers), empty = full + 8 * kStages;
  const uint32_t ring = shared_address(shared);
  if (threadIdx.x == 0) {
    for (int i = 0; i < kStages; ++i)
      barrier_init(full + 8 * i, 1), barrier_init(empty + 8 * i, kGroups);
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
  }
  if (threadIdx.x < 32) {
    const Tile found = locate(requests, kTileColumns >> queries.head_bits, blockIdx.x);
    if (threadIdx.x == 0) tile = found;
  }
  __syncthreads();
  if (tile.request < 0 || requests.kv_lens[tile.request] <= 0) return;
  // Blocks before the last row's own; the CTAs of one tile divide them by whole turns.
  const int past = static_cast<int>(requests.positions[tile.end_row - 1] / kBlockTokens);
  const int turns = (past + kTurn - 1) / kTurn, parts = gridDim.y, part = blockIdx.y;
  const int begin = turns * part / parts * kTurn;
  const int end = min(past, turns * (part + 1) / parts * kTurn);
  if (begin >= end || past < requests.topk) return;
  const uint8_t* own =
      images + (static_cast<int64_t>(tile.request) * requests.max_blocks + begin) * kImageBytes;
  const int blocks = end - begin;
  if (threadIdx.x >= kGroups * 128) {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 24;");
    if (threadIdx.x == kGroups * 128) {
      for (int block = 0; block < blocks; ++block) {
        const int stage = block % kStages;
        if (block >= kStages) barrier_wait(empty + 8 * stage, (block / kStages + 1) & 1);
        barrier_expect(full + 8 * stage, kImageBytes);
        bulk_copy(ring + stage * kImageBytes, own + static_cast<int64_t>(block) * kImageBytes,
                  kImageBytes, full + 8 * stage);
      }
    }
    return;
  }
  asm volatile("setmaxnreg.inc.sync.aligned.u32 240;");

  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, g = lane / 4, t = lane % 4;
  const int column = warp / 4 * 128 + warp % 4 * 16 + g;
  uint32_t a[2][kSteps][4];
#pragma unroll
  for (int half = 0; half < 2; ++half)
    load_queries<BF16>(queries, column + 64 * half, tile.first_row, tile.end_row, a[half]);
  // A lane keeps blocks 2 t and 2 t + 1 of a turn, of columns (half, side).
  float2 kept[2][2];
  float* rows[2][2];
#pragma unroll
  for (int half = 0; half < 2; ++half) {
#pragma unroll
    for (int side = 0; side < 2; ++side) {
      const int local = column + 64 * half + 8 * side;
      const bool real = tile.first_row + (local >> queries.head_bits) < tile.end_row;
      const int64_t place =
          (static_cast<int64_t>(tile.first_row - requests.first_row) << queries.head_bits) + local;
      rows[half][side] = real ? scores + place * stride + begin + 2 * t : nullptr;
    }
  }
  auto keep = [&](int half, int block, float2 found) {
    const int within = block % kTurn;
    if (within / 2 == t) {
      (within % 2 ? kept[half][0].y : kept[half][0].x) = found.x;
      (within % 2 ? kept[half][1].y : kept[half][1].x) = found.y;
    }
    if (within == kTurn - 1 || block == blocks - 1) {
#pragma unroll
      for (int side = 0; side < 2; ++side) {
        if (rows[half][side] != nullptr)
          *reinterpret_cast<float2*>(rows[half][side] + block / kTurn * kTurn) = kept[half][side];
      }
    }
  };

  int stage = 0;
  uint32_t phase = 0;
  for (int block = 0; block < blocks; ++block) {
    float first[64], second[64];
    barrier_wait(full + 8 * stage, phase);
    multiply<BF16>(first, a[0], ring + stage * kImageBytes);
    multiply<BF16>(second, a[1], ring + stage * kImageBytes);
    // The maxima of one while the other is multiplied; the other warpgroup has the tensor core
    // while this one is behind its second.
    wgmma_wait<1>();
    settle(first);
    const float2 upper = largest_of(first);
    wgmma_wait<0>();
    settle(second);
    if (threadIdx.x % 128 == 0) barrier_arrive(empty + 8 * stage);
    const float2 lower = largest_of(second);
    keep(0, block, upper);
    keep(1, block, lower);
    if (++stage == kStages) stage = 0, phase ^= 1;
  }
}

}  // namespace

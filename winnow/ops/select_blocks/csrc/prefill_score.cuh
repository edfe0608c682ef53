// Products of tiles of query columns with the blocks' keys, and each block's largest one.

#pragma once

#include "prefill_plan.cuh"

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
  wgmma_fence();
#pragma unroll
  for (int step = 0; step < kSteps; ++step)
    wgmma<BF16>(d, a[step], descriptor(stage + step / 4 * kHalfBytes + step % 4 * 32), step == 0);
  wgmma_commit();
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

// The blocks of a CTA through a ring of stages: its next stage, and how often the ring has been round.
struct Ring {
  uint32_t stages, full, empty;  // addresses
  int stage = 0;
  uint32_t round = 0;

  __device__ __forceinline__ uint32_t keys() const { return stages + stage * kImageBytes; }
  __device__ __forceinline__ void advance() {
    if (++stage == kStages) stage = 0, ++round;
  }
};

// One thread: keys of blocks from `first` to `end`.
__device__ __forceinline__ void fetch(Ring& ring, const uint8_t* images, int first, int end) {
  for (int block = first; block < end; ++block, ring.advance()) {
    const uint32_t full = ring.full + 8 * ring.stage;
    if (ring.round > 0) barrier_wait(ring.empty + 8 * ring.stage, (ring.round + 1) & 1);
    barrier_expect(full, kImageBytes);
    bulk_load(ring.keys(), images + static_cast<int64_t>(block) * kImageBytes, kImageBytes, full);
  }
}

// A warpgroup: 128 of the tile's columns, by blocks from a portion's first on.
template <bool BF16>
__device__ __forceinline__ void multiply_blocks(Ring& ring, const Queries& queries,
                                                const Tile& tile, int first_block, int end_block,
                                                float* scores, int64_t stride) {
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
      rows[half][side] = real ? scores + local * stride + 2 * t : nullptr;
    }
  }
  auto keep = [&](int half, int block, float2 found) {
    const int within = block % kTurn;
    if (within / 2 == t) {
      (within % 2 ? kept[half][0].y : kept[half][0].x) = found.x;
      (within % 2 ? kept[half][1].y : kept[half][1].x) = found.y;
    }
    if (within == kTurn - 1 || block == end_block - 1) {
      const int turn = block - within, own = turn + kPortion * t;
      if (own < first_block || own > block) return;
#pragma unroll
      for (int side = 0; side < 2; ++side) {
        if (rows[half][side] != nullptr)
          *reinterpret_cast<float2*>(rows[half][side] + turn) = kept[half][side];
      }
    }
  };

  for (int block = first_block; block < end_block; ++block, ring.advance()) {
    float first[64], second[64];
    barrier_wait(ring.full + 8 * ring.stage, ring.round & 1);
    multiply<BF16>(first, a[0], ring.keys());
    multiply<BF16>(second, a[1], ring.keys());
    // The maxima of one while the other is multiplied; the other warpgroup has the tensor core
    // while this one is behind its second.
    wgmma_wait<1>();
    settle(first);
    const float2 upper = largest_of(first);
    wgmma_wait<0>();
    settle(second);
    if (threadIdx.x % 128 == 0) barrier_arrive(ring.empty + 8 * ring.stage);
    const float2 lower = largest_of(second);
    keep(0, block, upper);
    keep(1, block, lower);
  }
}

template <bool BF16>
__global__ void __launch_bounds__(kThreads, 1)
    score(Queries queries, Requests requests, Plan plan, const uint8_t* images, float* scores,
          int64_t stride) {
  extern __shared__ __align__(1024) uint8_t shared[];
  __shared__ alignas(8) uint64_t barriers[2 * kStages];
  Ring ring{shared_address(shared), shared_address(barriers),
            shared_address(barriers) + 8 * kStages};
  if (threadIdx.x == 0) {
    for (int i = 0; i < kStages; ++i)
      barrier_init(ring.full + 8 * i, 1), barrier_init(ring.empty + 8 * i, kGroups);
    barriers_made();
  }
  __syncthreads();
  if (threadIdx.x >= kGroups * 128) {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 24;");
    if (threadIdx.x != kGroups * 128) return;
    for_own_tiles(plan, [&](const Tile& tile, int first, int end) {
      const int64_t before = static_cast<int64_t>(tile.request) * requests.max_blocks;
      fetch(ring, images + before * kImageBytes, first, end);
    });
  } else {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 240;");
    for_own_tiles(plan, [&](const Tile& tile, int first, int end) {
      const int64_t column = static_cast<int64_t>(tile.first_row - requests.first_row)
                             << queries.head_bits;
      multiply_blocks<BF16>(ring, queries, tile, first, end, scores + column * stride, stride);
    });
  }
}

}  // namespace

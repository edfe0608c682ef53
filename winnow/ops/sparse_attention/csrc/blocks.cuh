// What attention of many query rows needs inside a CTA on Hopper (sm_90a): barriers, wgmma on tiles of
// 64 x 128, and blocks of a cache expanded to its operands in shared memory.
//
// Exactness. K becomes bf16 and V fp16 (bf16 where stored so). An E2M1 code placed in the low
// exponent bits of a bf16 or fp16 is its value times 2^-126 or 2^-14, subnormals included; its E4M3
// scale times 2^118 or 2^7 is exact too, and their product has at most 6 significant bits, far from
// either end of the range. Left over are the factors 2^-8 of K and 2^-7 of V.

#pragma once

#include <cuda.h>
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include <cstdint>

#include "../../csrc/hopper.cuh"

namespace {

constexpr int kBlock = 128;
constexpr int kDim = 128;
constexpr int kHeads = 16;
constexpr int kHalfBytes = kBlock * 128;  // 64 of a block's 128 dims, 16 bits each
constexpr int kRowHalf = kHeads * 128;  // the same of a query row
constexpr int kRowValues = kHeads * kDim;
constexpr unsigned kAll = 0xFFFFFFFFu;
constexpr float kKeyFactor = 0x1p8f, kValueFactor = 0x1p7f;  // of NVFP4

enum Format { kBf16, kFp8, kNvfp4 };

struct Stored {
  const uint8_t* key_codes;
  const uint8_t* key_scales;
  const uint8_t* value_codes;
  const uint8_t* value_scales;
  int64_t page_bytes, head_bytes;
};

// A warp's arrival, after what all its lanes did before.
__device__ __forceinline__ void warp_arrive(const uint64_t& bar, int lane) {
  __syncwarp();
  if (lane < kWarpArrivals) barrier_arrive(bar);
}

// The same, and the barrier's phase waits for `bytes` of copies, which may begin hereafter.
__device__ __forceinline__ void warp_expect(const uint64_t& bar, int bytes, int lane) {
  __syncwarp();
  if (lane == 0) {
    barrier_expect(bar, bytes);
  } else if (lane < kWarpArrivals) {
    barrier_arrive(bar);
  }
  __syncwarp();
}

__device__ __forceinline__ void copy_queries(const CUtensorMap& map, void* to, int dim, int head,
                                             int row, const uint64_t& bar) {
  asm volatile(
      "cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes "
      "[%0], [%1, {%2, %3, %4}], [%5];" ::"r"(shared_address(to)),
      "l"(reinterpret_cast<uint64_t>(&map)), "r"(dim), "r"(head), "r"(row),
      "r"(shared_address(&bar))
      : "memory");
}

__device__ __forceinline__ float exp2_approx(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

// An operand in shared memory, of rows of 128 bytes in the 128-byte swizzle; eight of them are 1024
// bytes. If these are 64 columns of a transposed operand, the next 64 are `leading` bytes on. The
// address is the same in every lane: by a shuffle the compiler sees it, and keeps the operand in
// uniform registers.
__device__ __forceinline__ uint64_t operand(uint32_t address, int leading) {
  const uint32_t low = address >> 4 | static_cast<uint32_t>(leading >> 4) << 16;
  return uint64_t{0x40000000u | 1024 >> 4} << 32 | __shfl_sync(kAll, low, 0);
}

__device__ __forceinline__ uint64_t advance(uint64_t operand, int bytes) {
  return operand + (bytes >> 4);
}

#define WINNOW_8(x, i) \
  "+f"(x[i]), "+f"(x[i + 1]), "+f"(x[i + 2]), "+f"(x[i + 3]), "+f"(x[i + 4]), "+f"(x[i + 5]), \
      "+f"(x[i + 6]), "+f"(x[i + 7])
#define WINNOW_64(x) \
  WINNOW_8(x, 0), WINNOW_8(x, 8), WINNOW_8(x, 16), WINNOW_8(x, 24), WINNOW_8(x, 32), \
      WINNOW_8(x, 40), WINNOW_8(x, 48), WINNOW_8(x, 56)
#define WINNOW_SUMS \
  "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, " \
  "%20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, %32, %33, %34, %35, %36, %37, " \
  "%38, %39, %40, %41, %42, %43, %44, %45, %46, %47, %48, %49, %50, %51, %52, %53, %54, %55, " \
  "%56, %57, %58, %59, %60, %61, %62, %63}"

#define WINNOW_32(x) WINNOW_8(x, 0), WINNOW_8(x, 8), WINNOW_8(x, 16), WINNOW_8(x, 24)

// s [64 x 128] (+)= q [64 x 16] k [128 x 16]^T, bf16 in shared memory.
__device__ __forceinline__ void multiply_scores(float (&s)[64], uint64_t q, uint64_t k, int add) {
  asm volatile(
      "{\n"
      ".reg .pred p;\n"
      "setp.ne.b32 p, %66, 0;\n"
      "wgmma.mma_async.sync.aligned.m64n128k16.f32.bf16.bf16 " WINNOW_SUMS
      ", %64, %65, p, 1, 1, 0, 0;\n"
      "}\n"
      : WINNOW_64(s)
      : "l"(q), "l"(k), "r"(add));
}

// The same with 64 of the tokens.
__device__ __forceinline__ void multiply_scores(float (&s)[32], uint64_t q, uint64_t k, int add) {
  asm volatile(
      "{\n"
      ".reg .pred p;\n"
      "setp.ne.b32 p, %34, 0;\n"
      "wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 "
      "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, "
      "%20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31}, %32, %33, p, 1, 1, 0, 0;\n"
      "}\n"
      : WINNOW_32(s)
      : "l"(q), "l"(k), "r"(add));
}

// o [64 x 128] (+)= p [64 x 16] v [16 x 128], p in registers.
template <bool kHalf>
__device__ __forceinline__ void multiply_values(float (&o)[64], const uint32_t (&p)[4], uint64_t v,
                                                int add) {
  if constexpr (kHalf) {
    asm volatile(
        "{\n"
        ".reg .pred p;\n"
        "setp.ne.b32 p, %69, 0;\n"
        "wgmma.mma_async.sync.aligned.m64n128k16.f32.f16.f16 " WINNOW_SUMS
        ", {%64, %65, %66, %67}, %68, p, 1, 1, 1;\n"
        "}\n"
        : WINNOW_64(o)
        : "r"(p[0]), "r"(p[1]), "r"(p[2]), "r"(p[3]), "l"(v), "r"(add));
  } else {
    asm volatile(
        "{\n"
        ".reg .pred p;\n"
        "setp.ne.b32 p, %69, 0;\n"
        "wgmma.mma_async.sync.aligned.m64n128k16.f32.bf16.bf16 " WINNOW_SUMS
        ", {%64, %65, %66, %67}, %68, p, 1, 1, 1;\n"
        "}\n"
        : WINNOW_64(o)
        : "r"(p[0]), "r"(p[1]), "r"(p[2]), "r"(p[3]), "l"(v), "r"(add));
  }
}

// Until all but the last `kPending` groups of products are done, `sums` among them.
template <int kPending = 0>
__device__ __forceinline__ void products_wait(float (&sums)[64]) {
  asm volatile("wgmma.wait_group.sync.aligned %64;" : WINNOW_64(sums) : "n"(kPending) : "memory");
}

__device__ __forceinline__ void products_wait(float (&sums)[32]) {
  asm volatile("wgmma.wait_group.sync.aligned 0;" : WINNOW_32(sums)::"memory");
}

template <bool kHalf>
__device__ __forceinline__ uint32_t pack(float low, float high) {
  uint32_t c;
  if constexpr (kHalf) {
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(c) : "f"(high), "f"(low));
  } else {
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(c) : "f"(high), "f"(low));
  }
  return c;
}

__device__ __forceinline__ uint32_t from_e4m3(uint32_t pair) {
  uint32_t c;
  asm("cvt.rn.f16x2.e4m3x2 %0, %1;" : "=r"(c) : "h"(static_cast<uint16_t>(pair)));
  return c;
}

__device__ __forceinline__ float2 widen(uint32_t halves) {
  return __half22float2(reinterpret_cast<const __half2&>(halves));
}

template <bool kHalf>
__device__ __forceinline__ uint32_t multiply(uint32_t a, uint32_t b) {
  uint32_t c;
  if constexpr (kHalf) {
    asm("mul.rn.f16x2 %0, %1, %2;" : "=r"(c) : "r"(a), "r"(b));
  } else {
    asm("mul.rn.bf16x2 %0, %1, %2;" : "=r"(c) : "r"(a), "r"(b));
  }
  return c;
}

// Eight codes to four pairs in their order, as above: value * 2^-14 in fp16, * 2^-126 in bf16.
template <bool kHalf>
__device__ __forceinline__ void spread(uint32_t codes, uint32_t (&pairs)[4]) {
  constexpr int kMagnitude = kHalf ? 9 : 6;
  constexpr uint32_t kMask = 0x00070007u << kMagnitude;
  uint32_t w[4];  // w[j]: codes j and j + 4
#pragma unroll
  for (int j = 0; j < 4; ++j) {
    const int by = kMagnitude - 4 * j;
    const uint32_t moved = by >= 0 ? codes << by : codes >> -by;
    w[j] = (moved & kMask) | ((codes << (12 - 4 * j)) & 0x80008000u);
  }
  pairs[0] = __byte_perm(w[0], w[1], 0x5410);
  pairs[1] = __byte_perm(w[2], w[3], 0x5410);
  pairs[2] = __byte_perm(w[0], w[1], 0x7632);
  pairs[3] = __byte_perm(w[2], w[3], 0x7632);
}

// 32 stored values of one token.
template <Format kFormat>
struct Piece {
  static constexpr int kLoads = kFormat == kBf16 ? 4 : kFormat == kFp8 ? 2 : 1;
  uint4 raw[kLoads];
  uint32_t scales;

  __device__ __forceinline__ void load(const uint8_t* codes, const uint8_t* steps, int token,
                                       int quarter) {
#pragma unroll
    for (int i = 0; i < kLoads; ++i) {
      raw[i] = reinterpret_cast<const uint4*>(codes)[(4 * token + quarter) * kLoads + i];
    }
    if constexpr (kFormat == kNvfp4) {
      scales = reinterpret_cast<const uint16_t*>(steps)[4 * token + quarter];
    }
  }

  // pairs[t][j]: values 8t + 2j and 8t + 2j + 1, in fp16 (`kHalf`) or bf16.
  template <bool kHalf>
  __device__ __forceinline__ void expand(uint32_t (&pairs)[4][4]) const {
    const uint32_t* words = reinterpret_cast<const uint32_t*>(raw);
    if constexpr (kFormat == kNvfp4) {
      const float2 steps = widen(from_e4m3(scales));
      const float factor = kHalf ? 0x1p7f : 0x1p118f;
      const uint32_t low = pack<kHalf>(steps.x * factor, steps.x * factor);
      const uint32_t high = pack<kHalf>(steps.y * factor, steps.y * factor);
#pragma unroll
      for (int t = 0; t < 4; ++t) {
        spread<kHalf>(words[t], pairs[t]);
#pragma unroll
        for (int j = 0; j < 4; ++j) {
          pairs[t][j] = multiply<kHalf>(pairs[t][j], t < 2 ? low : high);
        }
      }
    } else if constexpr (kFormat == kFp8) {
#pragma unroll
      for (int i = 0; i < 8; ++i) {
        uint32_t(&own)[4] = pairs[i / 2];
        uint32_t &low = own[2 * (i % 2)], &high = own[2 * (i % 2) + 1];
        from_e4m3(words[i], low, high);
        if constexpr (!kHalf) {
          const float2 first = widen(low), second = widen(high);
          low = pack<false>(first.x, first.y), high = pack<false>(second.x, second.y);
        }
      }
    } else {
#pragma unroll
      for (int i = 0; i < 16; ++i) pairs[i / 4][i % 4] = words[i];
    }
  }
};

// One block's K or V on its way to shared memory, by the threads of `kWarps` warps. A thread's first
// `kAtOnce` loads may be asked for long before they are expanded.
template <Format kFormat, int kWarps, int kAtOnce>
class Expansion {
 public:
  // Tokens from `valid` on are not read.
  __device__ __forceinline__ void begin(const uint8_t* codes, const uint8_t* steps, int valid,
                                        int thread) {
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) load(i, thread + i * 32 * kWarps, codes, steps, valid);
  }

  // What `begin` began. Tokens from `valid` on become zeros: what their slots hold must not meet a
  // weight of zero. V's columns change places within 32 dims so that a thread's sums are
  // neighbours: columns 8j + 2t, + 1 hold dims 8t + 2j, + 1.
  template <bool kValue>
  __device__ __forceinline__ void finish(const uint8_t* codes, const uint8_t* steps, int valid,
                                         uint8_t* to, int thread) {
    constexpr bool kHalf = kValue && kFormat != kBf16;
#pragma unroll 1
    for (int first = 0; first < kJobs; first += kAtOnce) {
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i) {
        const int job = thread + (first + i) * 32 * kWarps;
        const int token = token_of(job), quarter = quarter_of(job);
        if (job >= 4 * kBlock) break;
        uint32_t pairs[4][4] = {};
        if (token < valid) pieces[i].template expand<kHalf>(pairs);
        if (first + kAtOnce < kJobs) load(i, job + kAtOnce * 32 * kWarps, codes, steps, valid);
        uint8_t* row = to + (quarter / 2) * kHalfBytes + token * 128;
#pragma unroll
        for (int c = 0; c < 4; ++c) {
          const int chunk = (4 * (quarter % 2) + c) ^ (token % 8);
          *reinterpret_cast<uint4*>(row + 16 * chunk) =
              kValue ? make_uint4(pairs[0][c], pairs[1][c], pairs[2][c], pairs[3][c])
                     : make_uint4(pairs[c][0], pairs[c][1], pairs[c][2], pairs[c][3]);
        }
      }
    }
  }

 private:
  static constexpr int kJobs = (4 * kBlock + 32 * kWarps - 1) / (32 * kWarps);  // of a thread
  static_assert(kJobs % kAtOnce == 0);
  Piece<kFormat> pieces[kAtOnce];

  // Eight lanes take four tokens and both quarters of a half, whose stores meet all banks.
  static __device__ __forceinline__ int token_of(int job) { return job / 2 % kBlock; }
  static __device__ __forceinline__ int quarter_of(int job) {
    return job / (2 * kBlock) * 2 + job % 2;
  }

  __device__ __forceinline__ void load(int i, int job, const uint8_t* codes, const uint8_t* steps,
                                       int valid) {
    if (job < 4 * kBlock && token_of(job) < valid) {
      pieces[i].load(codes, steps, token_of(job), quarter_of(job));
    }
  }
};

// Boxes of 16 heads of a row and 64 dims, in the swizzle of `operand`.
cudaError_t query_map(CUtensorMap* map, const void* q, int64_t rows, int heads, int64_t row_stride,
                      int64_t head_stride) {
  Encode encode;
  const cudaError_t error = find_encode(&encode);
  if (error != cudaSuccess) return error;
  const cuuint64_t sizes[3] = {kDim, static_cast<cuuint64_t>(heads),
                               static_cast<cuuint64_t>(rows)};
  const cuuint64_t strides[2] = {static_cast<cuuint64_t>(head_stride) * 2,
                                 static_cast<cuuint64_t>(row_stride) * 2};
  const cuuint32_t box[3] = {64, kHeads, 1}, steps[3] = {1, 1, 1};
  const CUresult result = encode(
      map, CU_TENSOR_MAP_DATA_TYPE_BFLOAT16, 3, const_cast<void*>(q), sizes, strides, box, steps,
      CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B, CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
      CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  return result == CUDA_SUCCESS ? cudaSuccess : cudaErrorInvalidValue;
}

}  // namespace

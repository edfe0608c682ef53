// What prefill.cu is made of besides: bulk stores, transposing stores, and products of a warpgroup
// with one operand in registers. Knows nothing of experts.

#pragma once

#include <cuda_fp16.h>

#include <cstdint>

#include "../../csrc/hopper.cuh"
#include "expand.cuh"

namespace {

// A warp's arrival, of which a barrier counts kWarpArrivals.
__device__ __forceinline__ void barrier_arrive_warp(uint32_t bar, int lane) {
  if (kEveryLane || lane == 0) barrier_arrive(bar);
}

__device__ __forceinline__ void bulk_store(void* to, const void* from, int bytes) {
  asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;" ::"l"(to),
               "r"(shared_address(from)), "r"(bytes)
               : "memory");
}

__device__ __forceinline__ void bulk_commit() {
  asm volatile("cp.async.bulk.commit_group;" ::: "memory");
}

// Until bulk stores have read what they store; until it is stored.
__device__ __forceinline__ void bulk_wait_read() {
  asm volatile("cp.async.bulk.wait_group.read 0;" ::: "memory");
}

__device__ __forceinline__ void bulk_wait() {
  asm volatile("cp.async.bulk.wait_group 0;" ::: "memory");
}

// For what other multiprocessors write and read within one launch.
__device__ __forceinline__ void add_release(int* to) {
  asm volatile("red.release.gpu.global.add.s32 [%0], 1;" ::"l"(to) : "memory");
}

__device__ __forceinline__ int load_acquire(const int* from) {
  int v;
  asm volatile("ld.acquire.gpu.global.s32 %0, [%1];" : "=r"(v) : "l"(from) : "memory");
  return v;
}

__device__ __forceinline__ uint4 shared_16(uint32_t from) {
  uint4 v;
  asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
               : "r"(from)
               : "memory");
  return v;
}

__device__ __forceinline__ uint2 shared_8(uint32_t from) {
  uint2 v;
  asm volatile("ld.shared.v2.u32 {%0, %1}, [%2];" : "=r"(v.x), "=r"(v.y) : "r"(from) : "memory");
  return v;
}

__device__ __forceinline__ void stmatrix_trans(uint32_t to, uint32_t a, uint32_t b, uint32_t c,
                                               uint32_t d) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(to),
               "r"(a), "r"(b), "r"(c), "r"(d)
               : "memory");
}

// The tensor cores' view of a stage: rows of 128 bytes, swizzled, groups of 8 rows 1,024 apart.
__device__ __forceinline__ uint64_t descriptor(uint32_t address) {
  constexpr uint32_t kUpper = 1024 >> 4 | 1u << 30;
  return uint64_t{kUpper} << 32 | (address >> 4 | 1u << 16);
}

#define WINNOW_SUMS_8(d, i)                                                                   \
  "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3]), "+f"(d[i + 4]), "+f"(d[i + 5]), \
      "+f"(d[i + 6]), "+f"(d[i + 7])
#define WINNOW_SUMS_12(d, i) WINNOW_SUMS_8(d, i), WINNOW_SUMS_4(d, i + 8)
#define WINNOW_SUMS_16(d, i) WINNOW_SUMS_8(d, i), WINNOW_SUMS_8(d, i + 8)
#define WINNOW_SUMS_20(d, i) WINNOW_SUMS_16(d, i), WINNOW_SUMS_4(d, i + 16)
#define WINNOW_SUMS_24(d, i) WINNOW_SUMS_16(d, i), WINNOW_SUMS_8(d, i + 16)
#define WINNOW_SUMS_32(d, i) WINNOW_SUMS_16(d, i), WINNOW_SUMS_16(d, i + 16)
#define WINNOW_SUMS_40(d, i) WINNOW_SUMS_32(d, i), WINNOW_SUMS_8(d, i + 32)
#define WINNOW_SUMS_48(d, i) WINNOW_SUMS_32(d, i), WINNOW_SUMS_16(d, i + 32)
#define WINNOW_SUMS_56(d, i) WINNOW_SUMS_48(d, i), WINNOW_SUMS_8(d, i + 48)
#define WINNOW_SUMS_4(d, i) "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3])
#define WINNOW_SUMS_44(d, i) WINNOW_SUMS_40(d, i), WINNOW_SUMS_4(d, i + 40)
#define WINNOW_SUMS_52(d, i) WINNOW_SUMS_48(d, i), WINNOW_SUMS_4(d, i + 48)
#define WINNOW_SUMS_28(d, i) WINNOW_SUMS_24(d, i), WINNOW_SUMS_4(d, i + 24)
#define WINNOW_SUMS_36(d, i) WINNOW_SUMS_32(d, i), WINNOW_SUMS_4(d, i + 32)
#define WINNOW_SUMS_60(d, i) WINNOW_SUMS_56(d, i), WINNOW_SUMS_4(d, i + 56)
#define WINNOW_SUMS_64(d, i) WINNOW_SUMS_32(d, i), WINNOW_SUMS_32(d, i + 32)

// d += a rows: 64 output columns by 16 times 16 columns of 2 * COUNT rows, whose descriptor is
// `rows`. Under way until wgmma_wait says that it is done.
#define WINNOW_PRODUCT_OF(name, type, n, count, sums, a0, a1, a2, a3, desc)                     \
  __device__ __forceinline__ void name(float (&d)[count], const uint32_t (&a)[4],               \
                                       uint64_t rows) {                                         \
    asm volatile("wgmma.mma_async.sync.aligned.m64n" #n "k16.f32." type "." type " {" sums       \
                 "}, {%" #a0 ", %" #a1 ", %" #a2 ", %" #a3 "}, %" #desc ", 1, 1, 1, 0;"          \
                 : WINNOW_SUMS_##count(d, 0)                                                    \
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(rows));                      \
  }
#define WINNOW_PRODUCT(...) WINNOW_PRODUCT_OF(multiply, "f16", __VA_ARGS__)

#define WINNOW_LIST_4 "%0, %1, %2, %3"
WINNOW_PRODUCT(8, 4, WINNOW_LIST_4, 4, 5, 6, 7, 8)
#define WINNOW_LIST_8 \
  "%0, %1, %2, %3, %4, %5, %6, %7"
WINNOW_PRODUCT(16, 8, WINNOW_LIST_8, 8, 9, 10, 11, 12)
#define WINNOW_LIST_12 \
  WINNOW_LIST_8 ", " \
  "%8, %9, %10, %11"
WINNOW_PRODUCT(24, 12, WINNOW_LIST_12, 12, 13, 14, 15, 16)
#define WINNOW_LIST_16 \
  WINNOW_LIST_8 ", " \
  "%8, %9, %10, %11, %12, %13, %14, %15"
WINNOW_PRODUCT(32, 16, WINNOW_LIST_16, 16, 17, 18, 19, 20)
#define WINNOW_LIST_20 \
  WINNOW_LIST_16 ", " \
  "%16, %17, %18, %19"
WINNOW_PRODUCT(40, 20, WINNOW_LIST_20, 20, 21, 22, 23, 24)
#define WINNOW_LIST_24 \
  WINNOW_LIST_20 ", " \
  "%20, %21, %22, %23"
WINNOW_PRODUCT(48, 24, WINNOW_LIST_24, 24, 25, 26, 27, 28)
#define WINNOW_LIST_28 \
  WINNOW_LIST_24 ", " \
  "%24, %25, %26, %27"
WINNOW_PRODUCT(56, 28, WINNOW_LIST_28, 28, 29, 30, 31, 32)
#define WINNOW_LIST_32 \
  WINNOW_LIST_24 ", " \
  "%24, %25, %26, %27, %28, %29, %30, %31"
WINNOW_PRODUCT(64, 32, WINNOW_LIST_32, 32, 33, 34, 35, 36)
#define WINNOW_LIST_36 \
  WINNOW_LIST_32 ", " \
  "%32, %33, %34, %35"
WINNOW_PRODUCT(72, 36, WINNOW_LIST_36, 36, 37, 38, 39, 40)
#define WINNOW_LIST_40 \
  WINNOW_LIST_32 ", " \
  "%32, %33, %34, %35, %36, %37, %38, %39"
WINNOW_PRODUCT(80, 40, WINNOW_LIST_40, 40, 41, 42, 43, 44)
#define WINNOW_LIST_44 \
  WINNOW_LIST_40 ", " \
  "%40, %41, %42, %43"
WINNOW_PRODUCT(88, 44, WINNOW_LIST_44, 44, 45, 46, 47, 48)
#define WINNOW_LIST_48 \
  WINNOW_LIST_44 ", " \
  "%44, %45, %46, %47"
WINNOW_PRODUCT(96, 48, WINNOW_LIST_48, 48, 49, 50, 51, 52)
#define WINNOW_LIST_52 \
  WINNOW_LIST_48 ", " \
  "%48, %49, %50, %51"
WINNOW_PRODUCT(104, 52, WINNOW_LIST_52, 52, 53, 54, 55, 56)
#define WINNOW_LIST_56 \
  WINNOW_LIST_52 ", " \
  "%52, %53, %54, %55"
WINNOW_PRODUCT(112, 56, WINNOW_LIST_56, 56, 57, 58, 59, 60)
#define WINNOW_LIST_60 \
  WINNOW_LIST_56 ", " \
  "%56, %57, %58, %59"
WINNOW_PRODUCT(120, 60, WINNOW_LIST_60, 60, 61, 62, 63, 64)
#define WINNOW_LIST_64 \
  WINNOW_LIST_60 ", " \
  "%60, %61, %62, %63"
WINNOW_PRODUCT(128, 64, WINNOW_LIST_64, 64, 65, 66, 67, 68)

}  // namespace

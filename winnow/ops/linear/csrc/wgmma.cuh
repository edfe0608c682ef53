// Products of a warpgroup with one operand in registers. Knows nothing of weights.

#pragma once

#include <cstdint>

namespace {

// Rows of 128 bytes, swizzled by 128 bytes, groups of eight rows 1,024 bytes apart.
__device__ __forceinline__ uint64_t descriptor(uint32_t address) {
  return static_cast<uint64_t>(address >> 4) | 1ull << 16 | 64ull << 32 | 1ull << 62;
}

#define WINNOW_SUMS_4(d, i) "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3])
#define WINNOW_SUMS_8(d, i) WINNOW_SUMS_4(d, i), WINNOW_SUMS_4(d, i + 4)
#define WINNOW_SUMS_16(d, i) WINNOW_SUMS_8(d, i), WINNOW_SUMS_8(d, i + 8)
#define WINNOW_SUMS_24(d, i) WINNOW_SUMS_16(d, i), WINNOW_SUMS_8(d, i + 16)
#define WINNOW_SUMS_32(d, i) WINNOW_SUMS_16(d, i), WINNOW_SUMS_16(d, i + 16)
#define WINNOW_SUMS_48(d, i) WINNOW_SUMS_32(d, i), WINNOW_SUMS_16(d, i + 32)
#define WINNOW_SUMS_64(d, i) WINNOW_SUMS_32(d, i), WINNOW_SUMS_32(d, i + 32)
#define WINNOW_SUMS_96(d, i) WINNOW_SUMS_64(d, i), WINNOW_SUMS_32(d, i + 64)
#define WINNOW_SUMS_128(d, i) WINNOW_SUMS_64(d, i), WINNOW_SUMS_64(d, i + 64)

// sums += a b in bf16: 64 rows of a by 2 * COUNT rows of b (its descriptor), 16 columns of K.
#define WINNOW_MULTIPLY(COUNT, N, NAMES, A, B)                                                  \
  __device__ __forceinline__ void wgmma(float(&d)[COUNT], const uint32_t(&a)[4], uint64_t b) { \
    asm volatile("wgmma.mma_async.sync.aligned.m64n" N "k16.f32.bf16.bf16 {" NAMES             \
                 "}, {" A "}, " B ", 1, 1, 1, 0;"                                              \
                 : WINNOW_SUMS_##COUNT(d, 0)                                                    \
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));                         \
  }

#define WINNOW_NAMES_4 "%0, %1, %2, %3"
#define WINNOW_NAMES_8 WINNOW_NAMES_4 ", %4, %5, %6, %7"
#define WINNOW_NAMES_16 WINNOW_NAMES_8 ", %8, %9, %10, %11, %12, %13, %14, %15"
#define WINNOW_NAMES_24 WINNOW_NAMES_16 ", %16, %17, %18, %19, %20, %21, %22, %23"
#define WINNOW_NAMES_32 WINNOW_NAMES_24 ", %24, %25, %26, %27, %28, %29, %30, %31"
#define WINNOW_NAMES_48 \
  WINNOW_NAMES_32 ", %32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45" \
  ", %46, %47"
#define WINNOW_NAMES_64 \
  WINNOW_NAMES_48 ", %48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61" \
  ", %62, %63"
#define WINNOW_NAMES_96 \
  WINNOW_NAMES_64 ", %64, %65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77" \
  ", %78, %79, %80, %81, %82, %83, %84, %85, %86, %87, %88, %89, %90, %91" \
  ", %92, %93, %94, %95"
#define WINNOW_NAMES_128 \
  WINNOW_NAMES_96 ", %96, %97, %98, %99, %100, %101, %102, %103, %104, %105, %106, %107" \
  ", %108, %109, %110, %111, %112, %113, %114, %115, %116, %117, %118, %119" \
  ", %120, %121, %122, %123, %124, %125, %126, %127"

WINNOW_MULTIPLY(4, "8", WINNOW_NAMES_4, "%4, %5, %6, %7", "%8")
WINNOW_MULTIPLY(8, "16", WINNOW_NAMES_8, "%8, %9, %10, %11", "%12")
WINNOW_MULTIPLY(16, "32", WINNOW_NAMES_16, "%16, %17, %18, %19", "%20")
WINNOW_MULTIPLY(24, "48", WINNOW_NAMES_24, "%24, %25, %26, %27", "%28")
WINNOW_MULTIPLY(32, "64", WINNOW_NAMES_32, "%32, %33, %34, %35", "%36")
WINNOW_MULTIPLY(48, "96", WINNOW_NAMES_48, "%48, %49, %50, %51", "%52")
WINNOW_MULTIPLY(64, "128", WINNOW_NAMES_64, "%64, %65, %66, %67", "%68")
WINNOW_MULTIPLY(96, "192", WINNOW_NAMES_96, "%96, %97, %98, %99", "%100")
WINNOW_MULTIPLY(128, "256", WINNOW_NAMES_128, "%128, %129, %130, %131", "%132")

}  // namespace

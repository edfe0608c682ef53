// Packed weights from memory to the tensor cores, a warp at a time (sm_90): copies, unpacking and
// the products of a slot of a ring. Knows no expert.
//
// A slot holds 128 columns: of two strips of 16 NVFP4 rows (codes, codes, scales, scales), or of
// one strip in MXFP8 (codes, scales), in the orders of fragments.py and fragments_mxfp8.py.

#pragma once

#include <cuda_fp16.h>

#include <cstdint>

#include "../../csrc/hopper.cuh"
#include "expand.cuh"

namespace {

constexpr int kBlock = 128;  // columns of a slot
constexpr int kSlotCodes = 2048;
constexpr int kSlotBytes = kSlotCodes + 256;  // in MXFP8 the last 192 are not used

// Copies run behind; they are waited for in groups, oldest first.
__device__ __forceinline__ void end_group() { asm volatile("cp.async.commit_group;" ::: "memory"); }

template <int NEWER>
__device__ __forceinline__ void wait_all_but() {
  asm volatile("cp.async.wait_group %0;" ::"n"(NEWER) : "memory");
}

// Where a lane's part of slot after slot comes from, by copies without branches: the machine wants
// three instructions before each copy that does not follow another. Slots are counted up to zero,
// the end of a run, so that an address takes one instruction.
struct SlotSource {
  // Of the run's end.
  const uint8_t* codes;
  const uint8_t* second;        // codes of the other strip, or tile
  const uint8_t* scales;
  int codes_step, scales_step;  // to the next slot
  bool scaled;                  // whether this lane copies scales

  // To block `end` of the strip that lies `at` rows times columns behind the first; `gap`: from
  // there to the other strip.
  __device__ __forceinline__ void set(const uint8_t* all_codes, const uint8_t* all_scales, bool mx,
                                      int64_t at, int end, int gap) {
    const int lane = threadIdx.x % 32;
    codes_step = mx ? 2048 : 1024, scales_step = mx ? 64 : 128;
    scaled = lane < (mx ? 4 : 16);
    codes = all_codes + at * (mx ? 16 : 8) + end * codes_step + 16 * lane;
    second = codes + (mx ? 1024 : 8 * int64_t(gap));
    scales = all_scales + end * scales_step +
             (mx ? at / 2 + 16 * lane : at + 16 * (lane % 8) + (lane < 8 ? 0 : gap));
  }

  // Slot `number`. `to`: this lane's place in it.
  __device__ __forceinline__ void copy(int number, uint32_t to) const {
    asm volatile(
        "{\n"
        ".reg .pred scaled;\n"
        "setp.ne.u32 scaled, %4, 0;\n"
        "cp.async.cg.shared.global [%0], [%1], 16;\n"
        "cp.async.cg.shared.global [%0 + 512], [%1 + 512], 16;\n"
        "cp.async.cg.shared.global [%0 + 1024], [%2], 16;\n"
        "cp.async.cg.shared.global [%0 + 1536], [%2 + 512], 16;\n"
        "@scaled cp.async.cg.shared.global [%0 + 2048], [%3], 16;\n"
        "}\n" ::"r"(to),
        "l"(codes + int64_t(number) * codes_step), "l"(second + int64_t(number) * codes_step),
        "l"(scales + int64_t(number) * scales_step), "r"(static_cast<uint32_t>(scaled))
        : "memory");
  }
};

__device__ __forceinline__ uint4 shared_16(uint32_t at) {
  uint4 v;
  asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
               : "r"(at));
  return v;
}

__device__ __forceinline__ uint2 shared_8(uint32_t at) {
  uint2 v;
  asm volatile("ld.shared.v2.u32 {%0, %1}, [%2];" : "=r"(v.x), "=r"(v.y) : "r"(at));
  return v;
}

__device__ __forceinline__ void mma(float (&c)[4], const uint32_t (&a)[4], uint32_t b0,
                                    uint32_t b1) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, "
      "{%8, %9}, {%0, %1, %2, %3};"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

// Where a token's activations lie, this lane's of a tile of 32 columns in one piece.
struct Row {
  const uint4* base;

  // Of two tiles.
  __device__ __forceinline__ void load(uint4 (&x)[2], int tile) const {
    x[0] = base[4 * tile], x[1] = base[4 * tile + 4];
  }
};

using Sums = float[2][4];  // of two strips times eight tokens

// Half a slot, 64 columns, of both strips. `codes` and `scales`: this lane's of the slot's first
// strip.
__device__ __forceinline__ void multiply(Sums& sums, uint32_t codes, uint32_t scales, int half,
                                         const uint4 (&x)[2]) {
  uint4 raw[2];
  uint32_t upper[2][2], lower[2][2];
#pragma unroll
  for (int strip = 0; strip < 2; ++strip) {
    raw[strip] = shared_16(codes + 1024 * strip + 512 * half);
    const uint2 eight = shared_8(scales + 128 * strip + 64 * half);
    from_e4m3(eight.x, upper[strip][0], upper[strip][1]);
    from_e4m3(eight.y, lower[strip][0], lower[strip][1]);
  }
#pragma unroll
  for (int two = 0; two < 2; ++two) {
#pragma unroll
    for (int strip = 0; strip < 2; ++strip) {
      const __half2 u = halves(upper[strip][two]), l = halves(lower[strip][two]);
      uint32_t a[4];
      expand(two ? raw[strip].z : raw[strip].x, __low2half2(u), __low2half2(l), a);
      mma(sums[strip], a, x[two].x, x[two].y);
      expand(two ? raw[strip].w : raw[strip].y, __high2half2(u), __high2half2(l), a);
      mma(sums[strip], a, x[two].z, x[two].w);
    }
  }
}

// The same of one strip in MXFP8: two tiles of 32 columns, each with a scale for a row.
__device__ __forceinline__ void multiply_mx(float (&sums)[4], uint32_t codes, uint32_t scales,
                                            int half, const uint4 (&x)[2]) {
  const uint2 eight = shared_8(scales);
#pragma unroll
  for (int two = 0; two < 2; ++two) {
    const uint4 raw = shared_16(codes + 1024 * half + 512 * two);
    const int shift = 8 * (2 * half + two);
    const float upper = __uint_as_float((eight.x >> shift & 255u) << 23);
    const float lower = __uint_as_float((eight.y >> shift & 255u) << 23);
    uint32_t first[4], second[4];
    from_e4m3(raw.x, first[0], first[1]);
    from_e4m3(raw.y, first[2], first[3]);
    from_e4m3(raw.z, second[0], second[1]);
    from_e4m3(raw.w, second[2], second[3]);
    float c[4] = {};
    mma(c, first, x[two].x, x[two].y);
    mma(c, second, x[two].z, x[two].w);
    sums[0] += upper * c[0], sums[1] += upper * c[1];
    sums[2] += lower * c[2], sums[3] += lower * c[3];
  }
}

}  // namespace

// Packed NVFP4 codes as the registers of a fragment, in fp16: see winnow/ops/fragments.py.

#pragma once

#include <cuda_fp16.h>

#include <cstdint>

namespace {

__device__ __forceinline__ uint32_t bits(__half2 x) { return *reinterpret_cast<uint32_t*>(&x); }
__device__ __forceinline__ __half2 halves(uint32_t x) { return *reinterpret_cast<__half2*>(&x); }

// A lane's eight codes of 16 columns: row g, row g + 8, then both in the upper half of the columns.
// Times the scales of row g and of row g + 8.
__device__ __forceinline__ void expand(uint32_t word, __half2 upper, __half2 lower,
                                       uint32_t (&r)[4]) {
  constexpr uint32_t kPlaces = 0x8E008E00u;  // s ee m of both halves
  r[0] = bits(__hmul2(halves(word & kPlaces), upper));
  r[1] = bits(__hmul2(halves((word << 3) & kPlaces), lower));
  // A product moves sign and magnitude by different distances at once.
  r[2] = bits(__hmul2(halves(((word & 0x40384038u) * 66u) & kPlaces), upper));
  r[3] = bits(__hmul2(halves(((word & 0x20072007u) * 516u) & kPlaces), lower));
}

}  // namespace

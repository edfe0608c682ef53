// The processor's vectors, and what kernels do with single ones.

#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <vector>

#if defined(__FMA__)
#include <immintrin.h>
#elif defined(__aarch64__)
#include <arm_neon.h>
#endif

namespace {

// The widest vector of the processor, and how many of them its registers hold: wider ones, or more
// at once, would live in memory.
#if defined(__AVX512F__)
constexpr int kVectorBytes = 64, kRegisters = 32;
#elif defined(__AVX__)
constexpr int kVectorBytes = 32, kRegisters = 16;
#elif defined(__aarch64__)
constexpr int kVectorBytes = 16, kRegisters = 32;
#else
constexpr int kVectorBytes = 16, kRegisters = 16;
#endif

typedef float vec __attribute__((vector_size(kVectorBytes), aligned(4), may_alias));
typedef int32_t ints __attribute__((vector_size(kVectorBytes), aligned(4)));
typedef float v8 __attribute__((vector_size(32), aligned(4)));
typedef float v4 __attribute__((vector_size(16), aligned(4)));

constexpr int64_t kBlock = 128;
constexpr int64_t kLanes = kVectorBytes / sizeof(float);
constexpr float kInf = std::numeric_limits<float>::infinity();

inline vec load(const float* p) { return *reinterpret_cast<const vec*>(p); }
inline void store(float* p, vec v) { *reinterpret_cast<vec*>(p) = v; }
inline vec splat(float x) { return x - vec{}; }

// a * b + c, rounded once where the processor can.
inline vec fused(vec a, vec b, vec c) {
#if defined(__AVX512F__)
  return (vec)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
#elif defined(__FMA__)
  return (vec)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c);
#elif defined(__aarch64__)
  return (vec)vfmaq_f32((float32x4_t)c, (float32x4_t)a, (float32x4_t)b);
#else
  return a * b + c;
#endif
}

inline vec load_part(const float* p, int64_t count) {
  vec v{};
  std::memcpy(&v, p, count * sizeof(float));
  return v;
}

inline v4 quarter(vec v) {
  if constexpr (kLanes == 4) {
    v4 same;
    std::memcpy(&same, &v, sizeof same);
    return same;
  } else {
    v8 h;
    if constexpr (kLanes == 8) {
      std::memcpy(&h, &v, sizeof h);
    } else {
      v8 parts[kLanes / 8];
      std::memcpy(parts, &v, sizeof parts);
      h = parts[0] + parts[kLanes / 8 - 1];
    }
    return __builtin_shufflevector(h, h, 0, 1, 2, 3) + __builtin_shufflevector(h, h, 4, 5, 6, 7);
  }
}

// Sums of four vectors' lanes; each sum has the same order in every place.
inline v4 sums(vec a, vec b, vec c, vec d) {
  v4 p = quarter(a), q = quarter(b), r = quarter(c), s = quarter(d);
  v4 pq = __builtin_shufflevector(p, q, 0, 4, 1, 5) + __builtin_shufflevector(p, q, 2, 6, 3, 7);
  v4 rs = __builtin_shufflevector(r, s, 0, 4, 1, 5) + __builtin_shufflevector(r, s, 2, 6, 3, 7);
  return __builtin_shufflevector(pq, rs, 0, 1, 4, 5) + __builtin_shufflevector(pq, rs, 2, 3, 6, 7);
}

inline float sum(vec v) { return sums(v, v, v, v)[0]; }

// exp for x <= 0 or NaN: Cephes' reduction and polynomial, relative error below 2e-7.
inline vec exp_nonpositive(vec x) {
  vec bounded = x < -87.0f ? splat(-87.0f) : x;
  // Rounds to the nearest integer.
  vec shifted = fused(bounded, splat(1.44269504088896341f), splat(12582912.0f));
  vec n = shifted - 12582912.0f;
  vec r = fused(n, splat(2.12194440e-4f), fused(n, splat(-0.693359375f), bounded));
  vec p = splat(1.9875691500e-4f);
  p = fused(p, r, splat(1.3981999507e-3f));
  p = fused(p, r, splat(8.3334519073e-3f));
  p = fused(p, r, splat(4.1665795894e-2f));
  p = fused(p, r, splat(1.6666665459e-1f));
  p = fused(p, r, splat(5.0000001201e-1f));
  p = fused(p, r * r, r) + 1.0f;
  ints bits;
  std::memcpy(&bits, &shifted, sizeof bits);
  bits = (bits - 0x4b400000 + 127) << 23;
  vec power;
  std::memcpy(&power, &bits, sizeof power);
  return x < -87.0f ? vec{} : p * power;
}

}  // namespace

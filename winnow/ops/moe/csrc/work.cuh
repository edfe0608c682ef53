// What the experts' kernels at decode are given, how it is cut in units, and where sums go (sm_90).
// Multiplies nothing.

#pragma once

#include <cuda_fp16.h>

#include "choice.cuh"
#include "tiles.cuh"

namespace {

constexpr int kWarps = kThreads / 32;
constexpr int kCtas = 2;             // on a multiprocessor
constexpr float kCodes = 16384.0f;   // undoes the 2^-14 of unpacked codes

// One stack of packed matrices, [matrices][2 * units strips of 16 rows][columns].
struct Stack {
  const uint8_t* codes;
  const uint8_t* scales;
  const float* globals;  // fp32 [matrices, rows]; null: MXFP8
  int columns;
  int units;
  uint32_t by_units;  // for quotient()
};

// For n / d with n * d below 2^32: the inverse of d, which is at least 2. A division takes twenty
// instructions, one behind the other, while a warp that begins has nothing else to do.
__host__ __device__ constexpr uint32_t inverse(uint32_t d) {
  return 0xFFFFFFFFu / d + 1;
}

__device__ __forceinline__ int quotient(int n, uint32_t by) {
  return static_cast<int>(__umulhi(static_cast<uint32_t>(n), by));
}

struct GateUp {
  Scores scores;
  const __half* x;  // the activations in fp16, in the order of fragments.py's tiles
  const float* unscale;
  float alpha, limit, beta, hidden_scale;
  __half* hidden;         // [pairs by place, routed width]
  __half* shared_hidden;  // [rows, shared width]
};

struct Down {
  const __half* hidden;
  const __half* shared_hidden;
  float hidden_unscale;
  float* parts;  // [pairs + rows, hidden]
};

struct Params {
  Stack routed, shared;
  Shape shape;
  Plan plan;
  uint32_t by_ctas;  // for quotient()
  GateUp up;
  Down down;
};

__host__ __device__ __forceinline__ int shared_chunks(const Shape& s) {
  return (s.rows + s.chunk - 1) / s.chunk;
}

// Where column k of a row of activations lies among those of its tile; see fragments.py.
__device__ __forceinline__ int in_fragments(int k) {
  return (k & ~31) | ((k >> 1) & 3) << 3 | ((k >> 4) & 1) << 2 | ((k >> 3) & 1) << 1 | (k & 1);
}

// What a unit is: two strips of a matrix, and a chunk of tokens.
struct Unit {
  bool is_shared;
  int matrix, index;  // index: of its pair of strips
  int first, tokens;  // first: place in the order, or the shared expert's first token
};

__device__ __forceinline__ float activated(float gate, float up, const GateUp& f) {
  // Comparisons, as maxima and minima would lose a NaN.
  gate = gate > f.limit ? f.limit : gate;
  up = up > f.limit ? f.limit : up < -f.limit ? -f.limit : up;
  return gate / (1.0f + __expf(-f.alpha * gate)) * (up + f.beta);
}

// One token's way from sums to memory.
template <bool DOWN>
struct Target {
  bool wanted;
  float factor;
  float* part;     // DOWN: the token's row
  __half* hidden;  // else

  __device__ __forceinline__ void set(const Params& p, const Pairs& pairs, const Unit& unit,
                                      int token) {
    wanted = token < unit.tokens;
    const int place = unit.first + (wanted ? token : 0);
    if constexpr (DOWN) {
      const int pair = unit.is_shared ? p.shape.rows * p.shape.taken + place : pairs.order[place];
      factor = p.down.hidden_unscale * (unit.is_shared ? 1.0f : pairs.shares[place]);
      part = p.down.parts + int64_t(pair) * p.shape.hidden;
    } else {
      factor = p.up.unscale[unit.is_shared ? place : pairs.order[place] / p.shape.taken];
      hidden = (unit.is_shared ? p.up.shared_hidden : p.up.hidden) +
               int64_t(place) * 16 * (unit.is_shared ? p.shared : p.routed).units;
    }
  }

  // Row `row` (0 to 15) of the two strips of the pair `index`.
  __device__ __forceinline__ void put(const Params& p, int index, int row, float2 globals, float a,
                                      float b) const {
    if (!wanted) return;
    if constexpr (DOWN) {
      part[32 * index + row] = factor * (globals.x * a);
      part[32 * index + row + 16] = factor * (globals.y * b);
    } else {
      const float value = activated(factor * (globals.x * a), factor * (globals.y * b), p.up);
      hidden[in_fragments(16 * index + row)] = __float2half_rn(value * p.up.hidden_scale);
    }
  }
};

// The global scales of row `row` of a pair's two strips; `own`: its matrix's, null if it has none.
template <bool DOWN>
__device__ __forceinline__ float2 globals_of(const float* own, int units, int index, int row) {
  if (own == nullptr) return make_float2(1.0f, 1.0f);
  own += (DOWN ? 32 : 16) * index + row;
  return make_float2(kCodes * own[0], kCodes * own[DOWN ? 16 : 16 * units]);
}

}  // namespace

// Quantised values in fp32, exactly as winnow/ops/codec defines them.

#pragma once

#include "cpu_vectors.h"

namespace {

enum WeightFormat : int { kMxfp8 = 0, kNvfp4 = 1 };

// What codes stand for: of E4M3 and of E8M0, 256 values each.
struct CodeTables {
  const float *e4m3, *e8m0;
};

// Values of E2M1 codes, and the two of every byte of them, low nibble first.
struct CodePairs {
  float single[16] = {0.0f,  0.5f,  1.0f,  1.5f,  2.0f,  3.0f,  4.0f,  6.0f,
                      -0.0f, -0.5f, -1.0f, -1.5f, -2.0f, -3.0f, -4.0f, -6.0f};
  float of[256][2];
  CodePairs() {
    for (int byte = 0; byte < 256; ++byte)
      for (int half = 0; half < 2; ++half) of[byte][half] = single[byte >> 4 * half & 15];
  }
};

// out [depth] of E2M1 codes, two a byte, and E4M3 scales, one for 16: (code * scale) is exact, times
// `global` is rounded once.
inline void expand_nvfp4(const uint8_t* codes, const uint8_t* scales, int64_t depth, float global,
                         const CodeTables& tables, float* out) {
  static const CodePairs pairs;
  for (int64_t g = 0; g < depth / 16; ++g) {
    float* to = out + 16 * g;
    const float scale = tables.e4m3[scales[g]];
    if constexpr (kLanes == 16) {
      ints places;
      for (int k = 0; k < 8; ++k) {
        places[2 * k] = codes[8 * g + k] & 15;
        places[2 * k + 1] = codes[8 * g + k] >> 4;
      }
      store(to, __builtin_shuffle(load(pairs.single), places) * scale * global);
    } else {
      for (int k = 0; k < 8; ++k) std::memcpy(to + 2 * k, pairs.of[codes[8 * g + k]], 8);
      for (int k = 0; k < 16; k += kLanes) store(to + k, load(to + k) * scale * global);
    }
  }
}

// out [depth] of E4M3 codes and E8M0 scales, one for 32.
inline void expand_mxfp8(const uint8_t* codes, const uint8_t* scales, int64_t depth,
                         const CodeTables& tables, float* out) {
  for (int64_t g = 0; g < depth / 32; ++g) {
    const float scale = tables.e8m0[scales[g]];
    for (int k = 0; k < 32; ++k) out[32 * g + k] = tables.e4m3[codes[32 * g + k]] * scale;
  }
}

}  // namespace

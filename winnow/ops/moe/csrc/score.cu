// The router's scores and the activations in fp16, on Hopper (sm_90): the first of a mixture of
// experts' launches at decode. Chooses no expert: decode.cu does.
//
// A block of threads multiplies eight rows with one or four of the router's, or converts one row. A
// row in fp16 is the row times a power of two that brings its largest finite magnitude into [2^14,
// 2^15): bf16 values are exact down to 2^-31 of the largest, and vanish below 2^-39 of it.

#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include <cstdint>

namespace {

constexpr int kThreads = 256;
constexpr int kRows = 8;
constexpr unsigned kAll = 0xFFFFFFFFu;

struct Rows {
  const uint16_t* data;  // bf16
  int64_t stride;        // elements
  int count, hidden;
};

struct Converted {
  __half* x;       // [rows, hidden], in the order of fragments.py's tiles
  float* unscale;  // [rows]: the inverse of a row's power of two
};

__device__ float widen(uint32_t bf16) { return __uint_as_float(bf16 << 16); }

// From N sums a lane (a power of two up to 32) to one: lane i of the first N gets the warp's total
// of sum i.
template <int N>
__device__ float reduce(float (&sums)[N]) {
  const int lane = threadIdx.x % 32;
#pragma unroll
  for (int half = N / 2; half > 0; half /= 2) {
    const bool upper = lane & half;
#pragma unroll
    for (int i = 0; i < half; ++i) {
      const float sent = upper ? sums[i] : sums[i + half];
      const float kept = upper ? sums[i + half] : sums[i];
      sums[i] = kept + __shfl_xor_sync(kAll, sent, half);
    }
  }
#pragma unroll
  for (int distance = N; distance < 32; distance *= 2)
    sums[0] += __shfl_xor_sync(kAll, sums[0], distance);
  return sums[0];
}

// What comes before may still write the rows, and read what is set to zeros here.
__device__ __forceinline__ void wait_for_launch_ahead() {
  asm volatile("griddepcontrol.wait;" ::: "memory");
}

// Eight rows times EXPERTS of the router's.
template <int EXPERTS>
__device__ void score_rows(const Rows& x, const float* router, int experts, float* logits) {
  constexpr int kSums = EXPERTS * kRows;
  constexpr int kAhead = EXPERTS == 1 ? 6 : 2;     // loads of a thread, of each row, at a time
  constexpr int kTogether = EXPERTS == 1 ? 4 : 1;  // rows
  __shared__ float totals[kThreads / 32][kSums];
  const int first_row = blockIdx.y * kRows, first_expert = (blockIdx.x - kRows) * EXPERTS;
  float sums[kSums] = {};
  for (int start = 4 * threadIdx.x; start < x.hidden; start += 4 * kThreads * kAhead) {
    float4 w[kAhead][EXPERTS];
#pragma unroll
    for (int step = 0; step < kAhead; ++step) {
      const int k = start + 4 * kThreads * step;
#pragma unroll
      for (int e = 0; e < EXPERTS; ++e) {
        const int expert = min(first_expert + e, experts - 1);
        w[step][e] = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
        if (k < x.hidden)
          w[step][e] = *reinterpret_cast<const float4*>(router + int64_t(expert) * x.hidden + k);
      }
    }
    wait_for_launch_ahead();
    // Rows in groups: what all of one need is on its way before the first is used.
#pragma unroll
    for (int group = 0; group < kRows && first_row + group < x.count; group += kTogether) {
      uint2 raw[kTogether][kAhead];
#pragma unroll
      for (int i = 0; i < kTogether; ++i) {
        const uint16_t* row = x.data + (first_row + group + i) * x.stride;
#pragma unroll
        for (int step = 0; step < kAhead; ++step) {
          const int k = start + 4 * kThreads * step;
          raw[i][step] = make_uint2(0, 0);
          if (first_row + group + i < x.count && k < x.hidden)
            raw[i][step] = *reinterpret_cast<const uint2*>(row + k);
        }
      }
#pragma unroll
      for (int r = 0; r < kRows; ++r) {
        const int i = r % kTogether;
        if (r / kTogether * kTogether != group || first_row + r >= x.count) continue;
#pragma unroll
        for (int step = 0; step < kAhead; ++step) {
#pragma unroll
          for (int e = 0; e < EXPERTS; ++e) {
            float& sum = sums[EXPERTS * r + e];
            sum += widen(raw[i][step].x) * w[step][e].x;
            sum += widen(raw[i][step].x >> 16) * w[step][e].y;
            sum += widen(raw[i][step].y) * w[step][e].z;
            sum += widen(raw[i][step].y >> 16) * w[step][e].w;
          }
        }
      }
    }
  }
  const float total_of_warp = reduce<kSums>(sums);
  if (threadIdx.x % 32 < kSums) totals[threadIdx.x / 32][threadIdx.x % 32] = total_of_warp;
  __syncthreads();
  if (threadIdx.x >= kSums) return;
  float total = 0.0f;
#pragma unroll
  for (int w = 0; w < kThreads / 32; ++w) total += totals[w][threadIdx.x];
  const int row = first_row + threadIdx.x / EXPERTS;
  const int expert = first_expert + threadIdx.x % EXPERTS;
  if (row < x.count && expert < experts) logits[int64_t(row) * experts + expert] = total;
}

// Columns 8 c .. 8 c + 7 of a tile of 64 lie, by pairs, in four lanes' parts (see fragments.py).
__device__ void store_fragments(__half* row, int column, const uint32_t (&pairs)[4]) {
  __half* tile = row + (column & ~31) + ((column >> 4) & 1) * 4 + ((column >> 3) & 1) * 2;
#pragma unroll
  for (int t = 0; t < 4; ++t) *reinterpret_cast<uint32_t*>(tile + 8 * t) = pairs[t];
}

__device__ void convert_row(const Rows& x, int row, const Converted& out) {
  __shared__ uint32_t largest_of[kThreads / 32];
  const uint16_t* from = x.data + row * x.stride;
  uint32_t largest = 0;
  for (int k = 8 * threadIdx.x; k < x.hidden; k += 8 * kThreads) {
    const uint4 raw = *reinterpret_cast<const uint4*>(from + k);
#pragma unroll
    for (uint32_t word : {raw.x, raw.y, raw.z, raw.w}) {
      for (uint32_t magnitude : {word & 0x7FFFu, (word >> 16) & 0x7FFFu})
        largest = max(largest, magnitude < 0x7F80u ? magnitude : 0u);
    }
  }
  largest = __reduce_max_sync(kAll, largest);
  if (threadIdx.x % 32 == 0) largest_of[threadIdx.x / 32] = largest;
  __syncthreads();
#pragma unroll
  for (int w = 0; w < kThreads / 32; ++w) largest = max(largest, largest_of[w]);
  // Both the factor and its inverse stay normal numbers.
  const int exponent = min(252, 268 - static_cast<int>(largest >> 7));
  const float factor = __uint_as_float(static_cast<uint32_t>(exponent) << 23);
  if (threadIdx.x == 0)
    out.unscale[row] = __uint_as_float(static_cast<uint32_t>(254 - exponent) << 23);
  for (int k = 8 * threadIdx.x; k < x.hidden; k += 8 * kThreads) {
    const uint4 raw = *reinterpret_cast<const uint4*>(from + k);
    const uint32_t words[4] = {raw.x, raw.y, raw.z, raw.w};
    uint32_t pairs[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const __half2 pair =
          __floats2half2_rn(widen(words[i]) * factor, widen(words[i] >> 16) * factor);
      pairs[i] = reinterpret_cast<const uint32_t&>(pair);
    }
    store_fragments(out.x + int64_t(row) * x.hidden, k, pairs);
  }
}

template <int EXPERTS>
__global__ void __launch_bounds__(kThreads, EXPERTS == 1 ? 2 : 3)
    score(Rows x, const float* router, int experts, float* logits, Converted converted,
          int* zeros, int num_zeros) {
  // The experts' kernel may take its place on the machine: it waits for this one by itself.
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
  // Those that convert come first: they take longer.
  if (static_cast<int>(blockIdx.x) < kRows) {
    wait_for_launch_ahead();
    const int row = blockIdx.y * kRows + blockIdx.x;
    if (row < x.count) convert_row(x, row, converted);
  } else {
    score_rows<EXPERTS>(x, router, experts, logits);
  }
  if (blockIdx.x == 0 && blockIdx.y == 0) {
    for (int i = threadIdx.x; i < num_zeros; i += kThreads) zeros[i] = 0;
  }
}

}  // namespace

// x: bf16 [rows, hidden], 16-byte aligned rows `stride` elements apart; router: fp32 [experts,
// hidden]; hidden a multiple of 64. logits: fp32 [rows, experts]. Sets `zeros`. Returns a
// cudaError_t.
extern "C" int winnow_moe_score(const void* x, int64_t stride, const float* router, int rows,
                                int hidden, int experts, float* logits, void* converted,
                                float* unscale, int* zeros, int num_zeros,
                                cudaStream_t stream) {
  cudaLaunchAttribute early = {};
  early.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  early.val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t config = {};
  // Few rows: short loads on many multiprocessors. More: rows read less often.
  const int each = rows <= 2 * kRows ? 1 : 4;
  config.gridDim = dim3((experts + each - 1) / each + kRows, (rows + kRows - 1) / kRows);
  config.blockDim = kThreads;
  config.stream = stream;
  config.attrs = &early;
  config.numAttrs = 1;
  return cudaLaunchKernelEx(
      &config, each == 1 ? score<1> : score<4>,
      Rows{static_cast<const uint16_t*>(x), stride, rows, hidden}, router, experts, logits,
      Converted{static_cast<__half*>(converted), unscale}, zeros, num_zeros);
}

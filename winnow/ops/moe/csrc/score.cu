// The router's scores and the activations in fp16, on Hopper (sm_90): the first of a mixture of
// experts' launches at decode. Chooses no expert: decode.cu does.
//
// A block of threads multiplies eight rows with one of the router's, or converts one row. A
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
  int* given;      // [2]: set to zero
};

__device__ float widen(uint32_t bf16) { return __uint_as_float(bf16 << 16); }

// From kRows sums a lane to one: lane i of the first kRows gets the warp's total of sum i.
__device__ __forceinline__ float reduce(float (&sums)[kRows]) {
  const int lane = threadIdx.x % 32;
#pragma unroll
  for (int half = kRows / 2; half > 0; half /= 2) {
    const bool upper = lane & half;
#pragma unroll
    for (int i = 0; i < half; ++i) {
      const float sent = upper ? sums[i] : sums[i + half];
      const float kept = upper ? sums[i + half] : sums[i];
      sums[i] = kept + __shfl_xor_sync(kAll, sent, half);
    }
  }
#pragma unroll
  for (int distance = kRows; distance < 32; distance *= 2)
    sums[0] += __shfl_xor_sync(kAll, sums[0], distance);
  return sums[0];
}

// What comes before may still write the rows, and read what is written here.
__device__ __forceinline__ void wait_for_launch_ahead() {
  asm volatile("griddepcontrol.wait;" ::: "memory");
}

// Four columns of one of the router's rows; zeros past the last.
__device__ __forceinline__ float4 router_at(const float* router, int expert, int hidden, int k) {
  if (k >= hidden) return make_float4(0.0f, 0.0f, 0.0f, 0.0f);
  return *reinterpret_cast<const float4*>(router + int64_t(expert) * hidden + k);
}

__device__ __forceinline__ void add_product(float& sum, const uint2& x, const float4& w) {
  sum += widen(x.x) * w.x;
  sum += widen(x.x >> 16) * w.y;
  sum += widen(x.y) * w.z;
  sum += widen(x.y >> 16) * w.w;
}

// Eight rows times one of the router's.
__device__ void score_rows(const Rows& x, const float* router, int experts, float* logits) {
  constexpr int kAhead = 6;     // loads of a thread, of each row, at a time
  constexpr int kTogether = 4;  // rows
  const int first_row = blockIdx.y * kRows, expert = blockIdx.x - kRows;
  __shared__ float totals[kThreads / 32][kRows];
  float sums[kRows] = {};
  for (int start = 4 * threadIdx.x; start < x.hidden; start += 4 * kThreads * kAhead) {
    float4 w[kAhead];
#pragma unroll
    for (int step = 0; step < kAhead; ++step)
      w[step] = router_at(router, expert, x.hidden, start + 4 * kThreads * step);
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
        for (int step = 0; step < kAhead; ++step)
          add_product(sums[r], raw[i][step], w[step]);
      }
    }
  }
  const float total_of_warp = reduce(sums);
  if (threadIdx.x % 32 < kRows) totals[threadIdx.x / 32][threadIdx.x % 32] = total_of_warp;
  __syncthreads();
  if (threadIdx.x >= kRows) return;
  float total = 0.0f;
#pragma unroll
  for (int w = 0; w < kThreads / 32; ++w) total += totals[w][threadIdx.x];
  const int row = first_row + threadIdx.x;
  if (row < x.count) logits[int64_t(row) * experts + expert] = total;
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

__global__ void __launch_bounds__(kThreads, 2)
    score(Rows x, const float* router, int experts, float* logits, Converted converted) {
  // The experts' kernel may take its place on the machine: it waits for this one by itself.
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
  // Those that convert come first: they take longer.
  if (static_cast<int>(blockIdx.x) < kRows) {
    wait_for_launch_ahead();
    const int row = blockIdx.y * kRows + blockIdx.x;
    if (row == 0 && threadIdx.x < 2) converted.given[threadIdx.x] = 0;
    if (row < x.count) convert_row(x, row, converted);
  } else {
    score_rows(x, router, experts, logits);
  }
}

}  // namespace

// x: bf16 [rows, hidden], 16-byte aligned rows `stride` elements apart; router: fp32 [experts,
// hidden]; hidden a multiple of 64. logits: fp32 [rows, experts]. given: two counters, set to zero.
// early: start before the launch ahead has ended; its results may be x, but neither the router nor
// the experts' weights, which the launch behind this one reads before it waits. Returns a
// cudaError_t.
extern "C" int winnow_moe_score(const void* x, int64_t stride, const float* router, int rows,
                                int hidden, int experts, float* logits, void* converted,
                                float* unscale, int* given, int early, cudaStream_t stream) {
  cudaLaunchAttribute begins = {};
  begins.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  begins.val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t config = {};
  config.gridDim = dim3(experts + kRows, (rows + kRows - 1) / kRows);
  config.blockDim = kThreads;
  config.stream = stream;
  config.attrs = &begins;
  config.numAttrs = early;
  return cudaLaunchKernelEx(
      &config, score,
      Rows{static_cast<const uint16_t*>(x), stride, rows, hidden}, router, experts, logits,
      Converted{static_cast<__half*>(converted), unscale, given});
}

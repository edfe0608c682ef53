// Root-mean-square norm of rows, or of the sums of two rows, on Hopper.
//
// A CTA has one row, a thread eight of its values, read and written 16 bytes at a time. The order of
// the sum of squares follows the width alone, so a row's result is the same in any batch. Rounding is
// the reference's: the sum is rounded to bf16 and normed as rounded, in fp32, and rounded once.

#include <cuda_bf16.h>

#include <cstdint>

namespace {

constexpr int kValues = 8;  // of a thread
constexpr int kMaxWarps = 32;
constexpr unsigned kAll = 0xFFFFFFFFu;

struct Params {
  const __nv_bfloat16* x;      // [rows, width], rows x_stride elements apart
  const __nv_bfloat16* delta;  // likewise, or null
  const float* weight;         // [width], without the added 1
  __nv_bfloat16* total;        // [rows, width]: x + delta; null without a delta
  __nv_bfloat16* out;          // [rows, width]
  int64_t x_stride, delta_stride;
  float eps;
  int width;
};

__device__ __forceinline__ void widen(const uint4& raw, float (&x)[kValues]) {
  const uint32_t words[4] = {raw.x, raw.y, raw.z, raw.w};
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    x[2 * i] = __uint_as_float(words[i] << 16);
    x[2 * i + 1] = __uint_as_float(words[i] & 0xFFFF0000u);
  }
}

__device__ __forceinline__ uint4 narrow(const float (&x)[kValues]) {
  uint32_t words[4];
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const __nv_bfloat162 pair = __floats2bfloat162_rn(x[2 * i], x[2 * i + 1]);
    words[i] = reinterpret_cast<const uint32_t&>(pair);
  }
  return make_uint4(words[0], words[1], words[2], words[3]);
}

__device__ __forceinline__ float warp_sum(float value) {
#pragma unroll
  for (int step = 16; step; step /= 2) value += __shfl_xor_sync(kAll, value, step);
  return value;
}

template <bool SUM>
__global__ void __launch_bounds__(32 * kMaxWarps, 2) norm_rows(const __grid_constant__ Params p) {
  __shared__ float sums[kMaxWarps];
  // What follows asks for its weights meanwhile; it waits for this launch by itself.
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
  const int column = kValues * threadIdx.x, lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const int64_t row = blockIdx.x;
  const bool inside = column < p.width;
  float4 weight[2] = {};
  if (inside) {
    const auto* at = reinterpret_cast<const float4*>(p.weight + column);
    weight[0] = __ldg(at), weight[1] = __ldg(at + 1);
  }
  asm volatile("griddepcontrol.wait;" ::: "memory");

  uint4 raw = {}, raw_delta = {};
  if (inside) {
    raw = *reinterpret_cast<const uint4*>(p.x + row * p.x_stride + column);
    if (SUM) raw_delta = *reinterpret_cast<const uint4*>(p.delta + row * p.delta_stride + column);
  }
  float x[kValues];
  widen(raw, x);
  if (SUM) {
    float delta[kValues];
    widen(raw_delta, delta);
#pragma unroll
    for (int i = 0; i < kValues; ++i) x[i] = __fadd_rn(x[i], delta[i]);
    raw = narrow(x);
    if (inside) *reinterpret_cast<uint4*>(p.total + row * p.width + column) = raw;
    widen(raw, x);
  }
  float sum = 0.0f;
#pragma unroll
  for (int i = 0; i < kValues; ++i) sum += x[i] * x[i];
  sum = warp_sum(sum);
  if (lane == 0) sums[warp] = sum;
  __syncthreads();
  sum = warp_sum(lane < blockDim.x / 32 ? sums[lane] : 0.0f);
  // Exact operations, so that a row of zeros or of huge values ends as it does in the reference.
  const float mean = __fdiv_rn(sum, static_cast<float>(p.width));
  const float scale = __fdiv_rn(1.0f, __fsqrt_rn(__fadd_rn(mean, p.eps)));
  const float factors[kValues] = {weight[0].x, weight[0].y, weight[0].z, weight[0].w,
                                  weight[1].x, weight[1].y, weight[1].z, weight[1].w};
#pragma unroll
  for (int i = 0; i < kValues; ++i)
    x[i] = __fmul_rn(__fmul_rn(x[i], scale), __fadd_rn(1.0f, factors[i]));
  if (inside) *reinterpret_cast<uint4*>(p.out + row * p.width + column) = narrow(x);
}

}  // namespace

// Launches on `stream`; returns a cudaError_t. `width` is a multiple of 8 up to 8192, every row 16-
// byte aligned. Without `delta`, `total` is not written.
extern "C" int winnow_norm(const void* x, int64_t x_stride, const void* delta,
                           int64_t delta_stride, const float* weight, void* total, void* out,
                           int rows, int width, float eps, cudaStream_t stream) {
  cudaLaunchAttribute early = {};
  early.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  early.val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t config = {};
  config.gridDim = rows;
  config.blockDim = (width / kValues + 31) / 32 * 32;
  config.stream = stream;
  config.attrs = &early;
  config.numAttrs = 1;
  const Params p = {static_cast<const __nv_bfloat16*>(x), static_cast<const __nv_bfloat16*>(delta),
                    weight, static_cast<__nv_bfloat16*>(total), static_cast<__nv_bfloat16*>(out),
                    x_stride, delta_stride, eps, width};
  return cudaLaunchKernelEx(&config, delta ? norm_rows<true> : norm_rows<false>, p);
}

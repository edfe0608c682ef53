// Experts for few tokens on Hopper (sm_90a): choice, gate and up with the activation, down with
// the weighted sum. score.cu has run before. Three launches, each waiting on the machine for the
// one before it.
//
// Weights are the A operand of mma.m16n8k16 in fp16, packed as in fragments.py (NVFP4) and
// fragments_mxfp8.py (the shared expert's MXFP8); tokens are its N, in eights. A unit of work is a
// chunk of an expert's tokens times two strips of 16 weight rows: gate and up of the same outputs,
// or two neighbours of down. The shared expert is one that every token visits.
//
// The units are cut evenly among the CTAs, but for a rest that goes to those that are fast, and
// their bytes stream through rings in shared memory across the ends of units (split.cuh).
//
// Exactness. code * 2^-14 * scale is exact in fp16. An activation is fp16 times a power of two of
// its row (score.cu), a hidden one times a constant that its bound allows. Sums are fp32.
//
// What is chosen and computed depends on no timing: every sum has a fixed order. Only who computes
// one of the last units does, which an atomic addition gives.

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include <cstdint>

#include "split.cuh"

namespace {

// Behind the rings (and the warps' sums): chunks, then the pairs' order, weights and choices.
int shared_bytes(const Shape& s) {
  return kRingsBytes + 16 * max_chunks(s) + 9 * s.rows * s.taken + 16;
}

__device__ __forceinline__ void wait_for_launch_ahead() {
  asm volatile("griddepcontrol.wait;" ::: "memory");
}

__device__ __forceinline__ void let_next_launch_begin() {
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
}

// The chunks of tokens, their number and the pairs in their order, as they were found. Down reads
// them, and asks for units, before it waits for gate and up: the first CTA of these, which writes
// them, has made them visible and let no launch begin before that, and the counters' zeros are
// older than every CTA's wait. So nothing may be launched between the two.
__device__ __forceinline__ int read_chunks(const Params& p, int4* chunks, const Pairs& pairs) {
  const int num_chunks = __ldcg(p.plan.chunks);
  // All that there may be, so that nothing waits for the number.
  for (int i = threadIdx.x; i < max_chunks(p.shape); i += kThreads)
    chunks[i] = __ldcg(reinterpret_cast<const int4*>(p.plan.chunks + 4) + i);
  for (int i = threadIdx.x; i < p.shape.rows * p.shape.taken; i += kThreads) {
    pairs.order[i] = __ldcg(p.plan.order + i);
    pairs.shares[i] = __ldcg(p.plan.share + i);
  }
  __syncthreads();
  return num_chunks;
}

// The same, found by every CTA for itself; one also writes them for down. Where a CTA begins early,
// its first warp does that alone.
__device__ __forceinline__ int find_chunks(const Params& p, int4* chunks, const Pairs& pairs,
                                           bool early) {
  const int num_chunks = arrange(p.shape, p.up.scores, pairs, chunks);
  if (!early) __syncthreads();
  if (blockIdx.x == 0) {
    publish(p.shape, p.plan, pairs, chunks, num_chunks);
    __threadfence();
    __syncthreads();
  }
  return num_chunks;
}

template <bool DOWN, bool GIVES>
__global__ void __launch_bounds__(kThreads, kCtas) experts(const __grid_constant__ Params p) {
  extern __shared__ __align__(128) uint8_t shared[];
  int4* chunks = reinterpret_cast<int4*>(shared + kRingsBytes);
  const Inbox inbox(shared + kWarps * kRingBytes);
  Ring ring;
  ring.base = ring.at = shared_address(shared + threadIdx.x / 32 * kRingBytes);
  Stream<DOWN, GIVES> stream;
  const uint32_t lane_ring = ring.base + 16 * (threadIdx.x % 32);
  const bool first_warp = threadIdx.x < 32;
  const Pairs pairs(chunks + max_chunks(p.shape), p.shape.rows * p.shape.taken);
  if (DOWN && GIVES && first_warp && units_are_long(p)) stream.ask(p, 0);
  // Weights are asked for before the launch ahead of this one has ended: of the shared expert at
  // once, of the others as soon as it is known which are chosen. How many are is known of one row.
  Range r = cut<GIVES>(p, p.shape.rows == 1 ? p.shape.taken : 0);
  int end = r.num_shared, filled = 0;
  // A group for a slot: none for what cannot be asked for yet.
  for (; filled < kStages &&
         stream.fill(p, r, chunks, inbox, end, lane_ring + filled * kSlotBytes);
       ++filled)
    end_group();
  bool early = false;
  if (DOWN) {
    const int num_chunks = read_chunks(p, chunks, pairs);
    if (p.shape.rows > 1) r = cut<GIVES>(p, num_chunks);
  } else {
    wait_for_launch_ahead();
    if (GIVES && first_warp && units_are_long(p)) stream.ask(p, 0);
    // The first CTA writes what is found: it has no business to begin early.
    early = begins_early(p, r) && blockIdx.x != 0;
    if (early) __syncthreads();
    if (!early || first_warp) {
      const int num_chunks = find_chunks(p, chunks, pairs, early);
      if (p.shape.rows > 1) r = cut<GIVES>(p, num_chunks);
      if (first_warp) inbox.chosen();
    }
  }
  stream.pass_on(inbox);
  if (!early) end = r.end();
  for (; filled < kStages; ++filled) {
    stream.fill(p, r, chunks, inbox, end, lane_ring + filled * kSlotBytes);
    end_group();
  }
  if (DOWN) wait_for_launch_ahead();
  let_next_launch_begin();
  for (int number = 0; number < end;) {
    const Unit unit = unit_of<GIVES>(p, r, chunks, inbox, number);
    serve(p, r, chunks, pairs, unit, number, end, stream, ring, inbox);
  }
}

// out = the parts of a row's choices in their order, then the shared expert's.
__global__ void __launch_bounds__(kThreads)
    combine(Shape s, const float* parts, __nv_bfloat16* out) {
  let_next_launch_begin();
  wait_for_launch_ahead();
  const int column = 4 * (blockIdx.x * kThreads + threadIdx.x), row = blockIdx.y;
  if (column >= s.hidden) return;
  // All are on their way before the first is used.
  float4 own[kMaxTaken + 1];
#pragma unroll
  for (int i = 0; i <= kMaxTaken; ++i) {
    if (i > s.taken) continue;
    const int64_t part = i < s.taken ? row * s.taken + i : s.rows * s.taken + row;
    own[i] = *reinterpret_cast<const float4*>(parts + part * s.hidden + column);
  }
  float4 sum = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
#pragma unroll
  for (int i = 0; i <= kMaxTaken; ++i) {
    if (i <= s.taken)
      sum.x += own[i].x, sum.y += own[i].y, sum.z += own[i].z, sum.w += own[i].w;
  }
  const __nv_bfloat162 low = __floats2bfloat162_rn(sum.x, sum.y);
  const __nv_bfloat162 high = __floats2bfloat162_rn(sum.z, sum.w);
  *reinterpret_cast<uint2*>(out + int64_t(row) * s.hidden + column) = make_uint2(
      reinterpret_cast<const uint32_t&>(low), reinterpret_cast<const uint32_t&>(high));
}

template <typename... Args>
cudaError_t launch(void (*kernel)(Args...), dim3 grid, int bytes, cudaStream_t stream,
                   const Args&... args) {
  cudaError_t error =
      cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes);
  if (error != cudaSuccess) return error;
  cudaLaunchAttribute early = {};
  early.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  early.val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t config = {};
  config.gridDim = grid;
  config.blockDim = kThreads;
  config.dynamicSmemBytes = bytes;
  config.stream = stream;
  config.attrs = &early;
  config.numAttrs = 1;
  return cudaLaunchKernelEx(&config, kernel, args...);
}

// The kernel that gives units if there may be enough of them: the other one's loops are shorter.
template <bool DOWN>
auto experts_for(const Params& p, int ctas) {
  const int most = min(p.shape.experts, p.shape.rows * p.shape.taken) * p.routed.units;
  const bool gives = units_are_long(p) && most / ctas >= kManyUnits;
  return gives ? experts<DOWN, true> : experts<DOWN, false>;
}

cudaError_t run(Params p, const Stack (&down)[2], __nv_bfloat16* out, int multiprocessors,
                cudaStream_t stream) {
  const Shape& s = p.shape;
  const dim3 grid(kCtas * multiprocessors);
  p.by_ctas = inverse(grid.x);
  cudaError_t error = launch(experts_for<false>(p, grid.x), grid, shared_bytes(s), stream, p);
  if (error != cudaSuccess) return error;
  p.routed = down[0], p.shared = down[1];
  error = launch(experts_for<true>(p, grid.x), grid, shared_bytes(s), stream, p);
  if (error != cudaSuccess) return error;
  const int blocks = (s.hidden + 4 * kThreads - 1) / (4 * kThreads);
  return launch(combine, dim3(blocks, s.rows), 0, stream, s,
                static_cast<const float*>(p.down.parts), out);
}

}  // namespace

// What a call needs beside its inputs and its output; all in device memory, none needs be set.
struct WinnowMoeScratch {
  const float* logits;     // [rows, experts], of winnow_moe_score
  const void* x;           // fp16 [rows, hidden], of winnow_moe_score
  const float* unscale;    // [rows], of winnow_moe_score
  int* chunks;             // 4 + 4 * (min(experts, pairs) + pairs / 8), [1] and [2] zeros, of score
  int* order;              // [pairs]
  float* share;            // [pairs]
  void* hidden;            // fp16 [pairs, width]
  void* shared_hidden;     // fp16 [rows, shared width]
  float* parts;            // [pairs + rows, hidden]
};

// Packed weights: codes, scales and globals (null: MXFP8) of one stack.
struct WinnowMoeStack {
  const void* codes;
  const void* scales;
  const float* globals;
};

struct WinnowMoeShape {
  int rows, taken, experts, hidden, width, shared_width;
};

struct WinnowMoeNumbers {
  float routed_scale, alpha, limit, beta;
  float hidden_scale;  // a power of two; hidden activations times it are below fp16's largest
};

// hidden and widths: multiples of 128.
// out: bf16 [rows, hidden]. Returns a cudaError_t.
extern "C" int winnow_moe_decode(const WinnowMoeStack* gate_up, const WinnowMoeStack* down,
                                 const WinnowMoeStack* shared_gate_up,
                                 const WinnowMoeStack* shared_down, const float* bias,
                                 const WinnowMoeShape* shape, const WinnowMoeNumbers* numbers,
                                 const WinnowMoeScratch* scratch, void* out, int multiprocessors,
                                 cudaStream_t stream) {
  const WinnowMoeShape& s = *shape;
  const WinnowMoeNumbers& n = *numbers;
  const WinnowMoeScratch& room = *scratch;
  if (s.rows < 1 || s.taken > kMaxTaken || s.taken > s.experts ||
      s.experts > 32 * kMaxLaneExperts || s.rows * s.taken >= 1 << 16 || s.hidden % kBlock ||
      s.width % kBlock || s.shared_width % kBlock)
    return cudaErrorInvalidValue;
  const auto stack = [](const WinnowMoeStack& w, int columns, int units) {
    return Stack{static_cast<const uint8_t*>(w.codes), static_cast<const uint8_t*>(w.scales),
                 w.globals, columns, units,
                 inverse(units)};
  };
  auto* hidden = static_cast<__half*>(room.hidden);
  auto* shared_hidden = static_cast<__half*>(room.shared_hidden);
  Params p;
  p.routed = stack(*gate_up, s.hidden, s.width / 16);
  p.shared = stack(*shared_gate_up, s.hidden, s.shared_width / 16);
  p.shape = {s.rows, s.taken, s.experts, s.hidden, kTokens};
  p.plan = {room.chunks, room.order, room.share};
  p.up = {{room.logits, bias, n.routed_scale},
          static_cast<const __half*>(room.x), room.unscale,
          n.alpha, n.limit, n.beta, n.hidden_scale, hidden, shared_hidden};
  p.down = {hidden, shared_hidden, 1.0f / n.hidden_scale, room.parts};
  const Stack downs[2] = {stack(*down, s.width, s.hidden / 32),
                          stack(*shared_down, s.shared_width, s.hidden / 32)};
  auto* result = static_cast<__nv_bfloat16*>(out);
  return run(p, downs, result, multiprocessors, stream);
}

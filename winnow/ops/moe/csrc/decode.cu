// Experts for few tokens on Hopper (sm_90a): choice, gate and up with the activation, down with
// the weighted sum. score.cu has run before. Three launches, each waiting on the machine for the
// one before it.
//
// Weights are the A operand of mma.m16n8k16 in fp16, packed as in fragments.py (NVFP4) and
// fragments_mxfp8.py (the shared expert's MXFP8); tokens are its N, in eights. A unit of work is a
// chunk of an expert's tokens times two strips of 16 weight rows: gate and up of the same outputs,
// or two neighbours of down. The shared expert is one that every token visits.
//
// The units are cut evenly among the CTAs, and their bytes stream through rings in shared memory
// across the ends of units. With few tokens the warps of a CTA share a unit's columns (split.cuh),
// else each has strips of its own and they share the activations (tile.cuh).
//
// Exactness. code * 2^-14 * scale is exact in fp16. An activation is fp16 times a power of two of
// its row (score.cu), a hidden one times a constant that its bound allows. Sums are fp32.
//
// What is chosen and computed depends on no timing: no atomics, every sum in a fixed order.

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include <cstdint>

#include "split.cuh"
#include "tile.cuh"

namespace {

// Rings (and the warps' sums), then chunks, then (gate and up) the order, the choices and their
// weights.
template <bool SPLIT>
constexpr int kRings = SPLIT ? kSplitBytes : kTileBytes;

template <bool SPLIT>
int shared_bytes(const Shape& s, bool down) {
  return kRings<SPLIT> + 16 * (max_chunks(s) + shared_chunks(s)) +
         (down ? 0 : 9 * s.rows * s.taken + 16);
}

// The chunks of tokens, their number and the pairs' order: chosen here, or read.
template <bool DOWN>
__device__ __forceinline__ int find_chunks(const Params& p, int4* chunks, const int*& order) {
  if constexpr (DOWN) {
    const int num_chunks = __ldcg(p.plan.chunks);
    for (int i = threadIdx.x; i < num_chunks; i += kThreads)
      chunks[i] = __ldcg(reinterpret_cast<const int4*>(p.plan.chunks + 4) + i);
    __syncthreads();
    order = p.plan.order;
    return num_chunks;
  } else {
    int* places = reinterpret_cast<int*>(chunks + max_chunks(p.shape));
    const int pairs = p.shape.rows * p.shape.taken;
    float* shares = reinterpret_cast<float*>(places + pairs);
    auto* chosen = reinterpret_cast<uint8_t*>(places + 2 * pairs);
    order = places;
    return arrange(p.shape, p.up.scores, p.plan, chosen, shares, places, chunks);
  }
}

__device__ __forceinline__ void wait_for_launch_ahead() {
  asm volatile("griddepcontrol.wait;" ::: "memory");
}

__device__ __forceinline__ void let_next_launch_begin() {
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
}

template <bool DOWN>
__device__ __forceinline__ void split_units(const Params& p, uint8_t* shared, int4* chunks) {
  const Inbox inbox(shared + kWarps * kRingBytes);
  Ring ring;
  ring.base = ring.at = shared_address(shared + threadIdx.x / 32 * kRingBytes);
  Stream<DOWN> stream;
  stream.begin(ring.base);
  // Weights are asked for before the launch ahead of this one has ended: of the shared expert by
  // gate and up, whose other units are not chosen yet; all by down, which finds them chosen.
  const int* order;
  int num_chunks = DOWN ? find_chunks<DOWN>(p, chunks, order) : 0;
  Range r = cut(p, num_chunks);
  int end = r.num_shared + r.num_routed, filled = 0;
  // A group for a slot: none for what cannot be asked for yet.
  for (; filled < kStages && stream.fill(p, r, chunks, end, ring.base); ++filled) end_group();
  wait_for_launch_ahead();
  if (!DOWN) {
    num_chunks = find_chunks<DOWN>(p, chunks, order);
    r = cut(p, num_chunks);
    end = r.num_shared + r.num_routed;
  }
  for (; filled < kStages; ++filled) {
    stream.fill(p, r, chunks, end, ring.base);
    end_group();
  }
  let_next_launch_begin();
  for (int number = 0; number < end;) {
    const Unit unit = unit_of(p, r, chunks, number);
    serve(p, r, chunks, order, unit, number, end, stream, ring, inbox);
  }
}

template <bool DOWN>
__device__ __forceinline__ void tile_units(const Params& p, uint8_t* shared, int4* chunks) {
  if (!DOWN) wait_for_launch_ahead();
  const int* order;
  const int ahead = shared_chunks(p.shape);
  const int num_chunks = ahead + find_chunks<DOWN>(p, chunks + ahead, order);
  for (int i = threadIdx.x; i < ahead; i += kThreads) {
    const int first = i * p.shape.chunk;
    chunks[i] = make_int4(-1, first, min(p.shape.chunk, p.shape.rows - first), 0);
  }
  __syncthreads();
  const Work work(p, chunks, num_chunks);
  if (!DOWN) let_next_launch_begin();
  TileStream<DOWN> stream;
  stream.ring = stream.stage = shared_address(shared);
  stream.next = work.start_of(p, blockIdx.x);
  stream.to = work.start_of(p, blockIdx.x + 1);
  stream.left = 0;
  Place at = stream.next;
  if constexpr (DOWN) {
    // Weights are asked for before the launch ahead of this one has ended, activations after it.
    TokenPart parts[kTileStages - 1] = {};
#pragma unroll
    for (int i = 0; i < kTileStages - 1; ++i) stream.fill(p, work, order, &parts[i]);
    wait_for_launch_ahead();
    let_next_launch_begin();
#pragma unroll
    for (int i = 0; i < kTileStages - 1; ++i) {
      if (parts[i].wanted) copy_16(parts[i].to, parts[i].from);
      end_group();
    }
  } else {
    for (int i = 0; i < kTileStages - 1; ++i) {
      stream.fill(p, work, order);
      end_group();
    }
  }
  uint32_t slot = stream.ring;
  while (!(at == stream.to)) {
    const int end = work.end_of_part(p, at, stream.to);
    if (eights_of(chunks[at.chunk].z) > 1) {
      serve_tile<DOWN, 2>(p, work, order, at, end, stream, slot);
    } else {
      serve_tile<DOWN, 1>(p, work, order, at, end, stream, slot);
    }
    work.skip(p, at, end);
  }
}

template <bool DOWN, bool SPLIT>
__global__ void __launch_bounds__(kThreads, kCtas) experts(const __grid_constant__ Params p) {
  extern __shared__ __align__(128) uint8_t shared[];
  int4* chunks = reinterpret_cast<int4*>(shared + kRings<SPLIT>);
  if constexpr (SPLIT) {
    split_units<DOWN>(p, shared, chunks);
  } else {
    tile_units<DOWN>(p, shared, chunks);
  }
}

// out = the parts of a row's choices in their order, then the shared expert's.
__global__ void __launch_bounds__(kThreads)
    combine(Shape s, const float* parts, __nv_bfloat16* out) {
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
  asm volatile("griddepcontrol.wait;" ::: "memory");
  const int column = 4 * (blockIdx.x * kThreads + threadIdx.x), row = blockIdx.y;
  if (column >= s.hidden) return;
  float4 sum = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
  for (int i = 0; i <= s.taken; ++i) {
    const int64_t part = i < s.taken ? row * s.taken + i : s.rows * s.taken + row;
    const float4 v = *reinterpret_cast<const float4*>(parts + part * s.hidden + column);
    sum.x += v.x, sum.y += v.y, sum.z += v.z, sum.w += v.w;
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

template <bool SPLIT>
cudaError_t run(Params p, const Stack (&down)[2], __nv_bfloat16* out, int multiprocessors,
                cudaStream_t stream) {
  const Shape& s = p.shape;
  const dim3 grid(kCtas * multiprocessors);
  cudaError_t error =
      launch(experts<false, SPLIT>, grid, shared_bytes<SPLIT>(s, false), stream, p);
  if (error != cudaSuccess) return error;
  p.routed = down[0], p.shared = down[1], p.handover.done += grid.x;
  error = launch(experts<true, SPLIT>, grid, shared_bytes<SPLIT>(s, true), stream, p);
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
  int* chunks;             // 4 + 4 * (min(experts, pairs) + pairs / 8)
  int* order;              // [pairs]
  float* share;            // [pairs]
  void* hidden;            // fp16 [pairs, width]
  void* shared_hidden;     // fp16 [rows, shared width]
  float* parts;            // [pairs + rows, hidden]
  // Unless split: fp32 [2 * multiprocessors, 128, 256] and [4 * multiprocessors], zeros by
  // winnow_moe_score.
  void* handover;
  int* done;
};

// Packed weights: codes, scales and globals (null: MXFP8) of one stack.
struct WinnowMoeStack {
  const void* codes;
  const void* scales;
  const float* globals;
};

struct WinnowMoeShape {
  int rows, taken, experts, hidden, width, shared_width, split;
};

struct WinnowMoeNumbers {
  float routed_scale, alpha, limit, beta;
  float hidden_scale;  // a power of two; hidden activations times it are below fp16's largest
};

// hidden and widths: multiples of 128. split: for few rows, see split.cuh.
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
                 w.globals, columns, units};
  };
  auto* hidden = static_cast<__half*>(room.hidden);
  auto* shared_hidden = static_cast<__half*>(room.shared_hidden);
  Params p;
  p.routed = stack(*gate_up, s.hidden, s.width / 16);
  p.shared = stack(*shared_gate_up, s.hidden, s.shared_width / 16);
  p.shape = {s.rows, s.taken, s.experts, s.hidden, s.split ? kSplitTokens : kTileTokens};
  p.plan = {room.chunks, room.order, room.share};
  p.up = {{room.logits, bias, n.routed_scale},
          static_cast<const __half*>(room.x), room.unscale,
          n.alpha, n.limit, n.beta, n.hidden_scale, hidden, shared_hidden};
  p.down = {hidden, shared_hidden, 1.0f / n.hidden_scale, room.parts};
  p.handover = {static_cast<float4*>(room.handover), room.done};
  const Stack downs[2] = {stack(*down, s.width, s.hidden / 32),
                          stack(*shared_down, s.shared_width, s.hidden / 32)};
  auto* result = static_cast<__nv_bfloat16*>(out);
  return s.split ? run<true>(p, downs, result, multiprocessors, stream)
                 : run<false>(p, downs, result, multiprocessors, stream);
}

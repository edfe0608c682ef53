// What surrounds the experts' products of prefill.cu for many rows, on Hopper (sm_90a).
//
// Owns the router's choice, the order of pairs by expert, the copies of rows in that order, and the
// weighted sum. A pair is a row and one of its chosen experts: pair p is row p / taken. A pair's
// place is where its row lies in the order; an expert's places begin at a multiple of 8 and leave
// gaps. Everything is found on the device, in an order that depends on the pairs alone: no atomics.
//
// Slabs: places are stored as [columns / 64][capacity][128 bytes], the 16-byte chunk c of a row at
// chunk c ^ (place % 8): what the tensor cores call a swizzle of 128 bytes.

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include <cstdint>

namespace {

constexpr unsigned kAll = 0xFFFFFFFFu;
constexpr int kMaxExperts = 256;
constexpr int kMaxTaken = 8;
constexpr int kParts = 3;  // bf16 numbers that add up to an fp32 one
constexpr int kChooseWarps = 8;
constexpr int kOrderThreads = 1024, kOrderWarps = kOrderThreads / 32;
constexpr int kChunks = 4;  // of 16 bytes, a thread's share of a row

// fp32 numbers as three bf16 parts, the largest first; 24 bits in all.
__global__ void split(const float* from, __nv_bfloat16* to, int count) {
  const int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i >= count) return;
  float left = from[i];
#pragma unroll
  for (int part = 0; part < kParts; ++part) {
    const __nv_bfloat16 rounded = __float2bfloat16_rn(left);
    to[part * count + i] = rounded;
    left -= __bfloat162float(rounded);
  }
}

// A warp a row: the `taken` experts of the largest rank, lower ids first where equal, and their
// shares. logits [rows, kParts * experts], parts to be added.
__global__ void __launch_bounds__(32 * kChooseWarps)
    choose(const float* logits, const float* bias, int rows, int experts, int taken,
           float routed_scale, int* chosen, float* shares) {
  const int row = blockIdx.x * kChooseWarps + threadIdx.x / 32, lane = threadIdx.x % 32;
  if (row >= rows) return;
  constexpr int kOwn = kMaxExperts / 32;
  logits += static_cast<int64_t>(row) * kParts * experts;
  float scores[kOwn], ranks[kOwn];
  unsigned free = 0;
#pragma unroll
  for (int i = 0; i < kOwn; ++i) {
    const int expert = 32 * i + lane;
    if (expert < experts) {
      const float logit =
          (logits[2 * experts + expert] + logits[experts + expert]) + logits[expert];
      scores[i] = 1.0f / (1.0f + expf(-logit));
      const float rank = scores[i] + bias[expert];
      ranks[i] = rank == rank ? rank : -INFINITY;
      free |= 1u << i;
    }
  }
  int own = 0;
  float share = 0.0f, total = 0.0f;
  for (int number = 0; number < taken; ++number) {
    float best = -INFINITY, score = 0.0f;
    int index = INT32_MAX;
#pragma unroll
    for (int i = 0; i < kOwn; ++i) {
      // Ids rise with i, so an equal rank is not taken, but for the first of the lowest rank.
      if ((free >> i & 1) && (ranks[i] > best || index == INT32_MAX)) {
        best = ranks[i], index = 32 * i + lane, score = scores[i];
      }
    }
#pragma unroll
    for (int distance = 16; distance > 0; distance /= 2) {
      const float other = __shfl_xor_sync(kAll, best, distance);
      const float other_score = __shfl_xor_sync(kAll, score, distance);
      const int other_index = __shfl_xor_sync(kAll, index, distance);
      if (other_index != INT32_MAX &&
          (index == INT32_MAX || other > best || (other == best && other_index < index))) {
        best = other, score = other_score, index = other_index;
      }
    }
    if (index % 32 == lane) free &= ~(1u << index / 32);
    if (number == lane) own = index, share = score;
    total += score;
  }
  if (lane < taken) {
    chosen[static_cast<int64_t>(row) * taken + lane] = own;
    shares[static_cast<int64_t>(row) * taken + lane] = share / total * routed_scale;
  }
}

// A block an expert: where its places begin, how many it has, and each of its pairs' place. Sets
// the counters of work to 0, one of all and one of each expert.
__global__ void __launch_bounds__(kOrderThreads)
    order(const int* __restrict__ chosen, int pairs, int* __restrict__ starts,
          int* __restrict__ counts, int* __restrict__ places, int* __restrict__ next) {
  __shared__ int smaller[kOrderWarps], equal[kOrderWarps];
  const int expert = blockIdx.x, warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  if (threadIdx.x == 0) next[1 + expert] = 0;
  if (threadIdx.x == 0 && expert == 0) next[0] = 0;
  const int share = (pairs + kOrderThreads - 1) / kOrderThreads * 32;  // of a warp
  const int first = warp * share, end = min(first + share, pairs);
  int before = 0, own = 0;
#pragma unroll 8
  for (int base = first; base < end; base += 32) {
    const int other = base + lane < end ? chosen[base + lane] : INT32_MAX;
    before += other < expert;
    own += other == expert;
  }
  before = __reduce_add_sync(kAll, before), own = __reduce_add_sync(kAll, own);
  if (lane == 0) smaller[warp] = before, equal[warp] = own;
  __syncthreads();
  // Lane i has warp i's numbers.
  const int all = __reduce_add_sync(kAll, equal[lane]);
  // The gaps before: at most 7 an expert, so no two experts' places meet.
  const int start = (__reduce_add_sync(kAll, smaller[lane]) + 7) / 8 * 8 + 8 * expert;
  int place = start + __reduce_add_sync(kAll, lane < warp ? equal[lane] : 0);
  if (threadIdx.x == 0) starts[expert] = start, counts[expert] = all;
  if (own == 0) return;
#pragma unroll 8
  for (int base = first; base < end; base += 32) {
    const bool mine = base + lane < end && chosen[base + lane] == expert;
    const unsigned mask = __ballot_sync(kAll, mine);
    if (mine) places[base + lane] = place + __popc(mask & ((1u << lane) - 1));
    place += __popc(mask);
  }
}

__device__ __forceinline__ int64_t chunk_at(int chunk, int place, int capacity) {
  return (static_cast<int64_t>(chunk / 8) * capacity + place) * 128 + ((chunk ^ place) % 8) * 16;
}

__device__ __forceinline__ uint32_t largest_of(uint32_t largest, uint32_t pair) {
  // Infinities and NaN stay what they are and give no factor.
  const uint32_t low = pair & 0x7FFFu, high = pair >> 16 & 0x7FFFu;
  return max(largest, max(low < 0x7F80u ? low : 0u, high < 0x7F80u ? high : 0u));
}

__device__ __forceinline__ uint32_t narrow(uint32_t pair, float factor) {
  const __half2 both = __floats2half2_rn(__uint_as_float(pair << 16) * factor,
                                         __uint_as_float(pair & 0xFFFF0000u) * factor);
  return reinterpret_cast<const uint32_t&>(both);
}

// A block a row: the row as fp16 in the slabs of each of its places, times the power of two that
// brings its largest magnitude into [2^14, 2^15), so that bf16 values down to 2^-31 of it are
// exact; and what undoes that, with the 2^14 of unpacked codes.
__global__ void gather(const uint16_t* x, int64_t stride, int chunks, const int* places, int taken,
                       int capacity, uint8_t* slabs, float* factors) {
  __shared__ uint32_t largest[32];
  const int64_t row = blockIdx.x;
  const int lane = threadIdx.x % 32, warps = blockDim.x / 32;
  uint4 own[kChunks];
  uint32_t most = 0;
#pragma unroll
  for (int i = 0; i < kChunks; ++i) {
    const int chunk = threadIdx.x + i * blockDim.x;
    own[i] = chunk < chunks ? reinterpret_cast<const uint4*>(x + row * stride)[chunk]
                            : make_uint4(0, 0, 0, 0);
  }
#pragma unroll
  for (int i = 0; i < kChunks; ++i) {
    most = largest_of(largest_of(most, own[i].x), own[i].y);
    most = largest_of(largest_of(most, own[i].z), own[i].w);
  }
  most = __reduce_max_sync(kAll, most);
  if (lane == 0) largest[threadIdx.x / 32] = most;
  __syncthreads();
  most = __reduce_max_sync(kAll, lane < warps ? largest[lane] : 0u);
  // Exponent fields: 141 is 2^14. A row of zeros or of subnormals takes the largest factor.
  const int exponent = min(252, 268 - static_cast<int>(most >> 7));
  const float factor = __uint_as_float(static_cast<uint32_t>(exponent) << 23);
  const float undo = __uint_as_float(static_cast<uint32_t>(268 - exponent) << 23);
  if (static_cast<int>(threadIdx.x) < taken) factors[places[row * taken + threadIdx.x]] = undo;
  for (int choice = 0; choice < taken; ++choice) {
    const int place = places[row * taken + choice];
#pragma unroll
    for (int i = 0; i < kChunks; ++i) {
      const int chunk = threadIdx.x + i * blockDim.x;
      if (chunk < chunks) {
        *reinterpret_cast<uint4*>(slabs + chunk_at(chunk, place, capacity)) =
            make_uint4(narrow(own[i].x, factor), narrow(own[i].y, factor),
                       narrow(own[i].z, factor), narrow(own[i].w, factor));
      }
    }
  }
}

__device__ __forceinline__ void add(float (&sum)[8], uint4 v, float weight) {
  const uint32_t words[4] = {v.x, v.y, v.z, v.w};
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    sum[2 * i] = fmaf(weight, __uint_as_float(words[i] << 16), sum[2 * i]);
    sum[2 * i + 1] = fmaf(weight, __uint_as_float(words[i] & 0xFFFF0000u), sum[2 * i + 1]);
  }
}

// A block a row: what its experts gave, by their shares in the order of its choices, plus the
// shared expert's.
template <int TAKEN>
__global__ void combine(const uint8_t* slabs, int capacity, const int* places, const float* shares,
                        int taken, const uint4* shared, int chunks, uint4* out) {
  const int64_t row = blockIdx.x;
  if (TAKEN > 0) taken = TAKEN;
  constexpr int kHeld = TAKEN > 0 ? TAKEN : kMaxTaken;
  int place[kHeld];
  float share[kHeld];
#pragma unroll
  for (int choice = 0; choice < kHeld; ++choice) {
    if (choice < taken) {
      place[choice] = places[row * taken + choice];
      share[choice] = shares[row * taken + choice];
    }
  }
  for (int chunk = threadIdx.x; chunk < chunks; chunk += blockDim.x) {
    uint4 parts[kHeld];
#pragma unroll
    for (int choice = 0; choice < kHeld; ++choice) {
      if (choice < taken) {
        parts[choice] =
            *reinterpret_cast<const uint4*>(slabs + chunk_at(chunk, place[choice], capacity));
      }
    }
    const uint4 own = shared[row * chunks + chunk];
    float sum[8] = {};
#pragma unroll
    for (int choice = 0; choice < kHeld; ++choice) {
      if (choice < taken) add(sum, parts[choice], share[choice]);
    }
    add(sum, own, 1.0f);
    uint32_t words[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const __nv_bfloat162 both = __floats2bfloat162_rn(sum[2 * i], sum[2 * i + 1]);
      words[i] = reinterpret_cast<const uint32_t&>(both);
    }
    out[row * chunks + chunk] = make_uint4(words[0], words[1], words[2], words[3]);
  }
}

// Threads of a block that has a row of `chunks` chunks.
int threads_of(int chunks) { return ((chunks + kChunks - 1) / kChunks + 31) / 32 * 32; }

}  // namespace

// All launch on `stream` and return a cudaError_t. Numbers of columns are multiples of 64 up to
// 32,768, experts at most 256, taken at most 8.

extern "C" int winnow_moe_split(const float* from, void* to, int count, cudaStream_t stream) {
  split<<<(count + 255) / 256, 256, 0, stream>>>(from, static_cast<__nv_bfloat16*>(to), count);
  return cudaGetLastError();
}

extern "C" int winnow_moe_choose(const float* logits, const float* bias, int rows, int experts,
                                 int taken, float routed_scale, int* chosen, float* shares,
                                 cudaStream_t stream) {
  if (experts > kMaxExperts || taken > kMaxTaken || taken > experts) return cudaErrorInvalidValue;
  choose<<<(rows + kChooseWarps - 1) / kChooseWarps, 32 * kChooseWarps, 0, stream>>>(
      logits, bias, rows, experts, taken, routed_scale, chosen, shares);
  return cudaGetLastError();
}

extern "C" int winnow_moe_order(const int* chosen, int pairs, int experts, int* starts, int* counts,
                                int* places, int* next, cudaStream_t stream) {
  order<<<experts, kOrderThreads, 0, stream>>>(chosen, pairs, starts, counts, places, next);
  return cudaGetLastError();
}

extern "C" int winnow_moe_gather(const void* x, int64_t stride, int rows, int columns,
                                 const int* places, int taken, int capacity, void* slabs,
                                 float* factors, cudaStream_t stream) {
  const int chunks = columns / 8;
  gather<<<rows, threads_of(chunks), 0, stream>>>(static_cast<const uint16_t*>(x), stride, chunks,
                                                  places, taken, capacity,
                                                  static_cast<uint8_t*>(slabs), factors);
  return cudaGetLastError();
}

extern "C" int winnow_moe_combine(const void* slabs, int capacity, const int* places,
                                  const float* shares, int taken, const void* shared, int rows,
                                  int columns, void* out, cudaStream_t stream) {
  const int chunks = columns / 8;
  auto* kernel = taken == 4 ? combine<4> : combine<0>;
  kernel<<<rows, threads_of(chunks), 0, stream>>>(
      static_cast<const uint8_t*>(slabs), capacity, places, shares, taken,
      static_cast<const uint4*>(shared), chunks, static_cast<uint4*>(out));
  return cudaGetLastError();
}

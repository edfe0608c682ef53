// What surrounds the experts' products of prefill.cu for many rows, on Hopper (sm_90a).
//
// Owns the order of pairs by expert, the copies of rows in that order, and the weighted sum, once
// route.cu has chosen. A pair is a row and one of the experts it visits: pair p is row p / slots. A
// pair's place is where its row lies in the order; an expert's places begin at a multiple of 8 and
// leave gaps. Everything is found on the device, in an order that depends on the pairs alone: no
// atomics.
//
// Slabs: places are stored as [columns / 64][capacity][128 bytes], the 16-byte chunk c of a row at
// chunk c ^ (place % 8): what the tensor cores call a swizzle of 128 bytes.

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include <cstdint>

namespace {

constexpr unsigned kAll = 0xFFFFFFFFu;
constexpr int kMaxSlots = 9;  // experts that a row visits
constexpr int kOrderThreads = 1024, kOrderWarps = kOrderThreads / 32;
constexpr int kChunks = 4;  // of 16 bytes, a thread's share of a row

// Where an expert's places begin if so many pairs are of those before it: the gaps are at most 7
// places an expert, so no two experts' meet.
__device__ __forceinline__ int start_of(int before, int expert) {
  return (before + 7) / 8 * 8 + 8 * expert;
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
  const int start = start_of(__reduce_add_sync(kAll, smaller[lane]), expert);
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

// What a block has of a row in bf16, and the power of two that brings the row's largest magnitude
// into [2^14, 2^15), so that bf16 values down to 2^-31 of it are exact in fp16.
struct Row {
  uint4 own[kChunks];
  int exponent;

  // A thread's part, and the largest magnitude of its warp's into `largest`.
  __device__ __forceinline__ void load(const uint16_t* row, int chunks, uint32_t* largest) {
    uint32_t most = 0;
#pragma unroll
    for (int i = 0; i < kChunks; ++i) {
      const int chunk = threadIdx.x + i * blockDim.x;
      own[i] = chunk < chunks ? reinterpret_cast<const uint4*>(row)[chunk] : make_uint4(0, 0, 0, 0);
    }
#pragma unroll
    for (int i = 0; i < kChunks; ++i) {
      most = largest_of(largest_of(most, own[i].x), own[i].y);
      most = largest_of(largest_of(most, own[i].z), own[i].w);
    }
    most = __reduce_max_sync(kAll, most);
    if (threadIdx.x % 32 == 0) largest[threadIdx.x / 32] = most;
  }

  // Once every warp's largest magnitude is there.
  __device__ __forceinline__ void scale(const uint32_t* largest) {
    const uint32_t lane = threadIdx.x % 32;
    const uint32_t most = __reduce_max_sync(kAll, lane < blockDim.x / 32 ? largest[lane] : 0u);
    // Exponent fields: 141 is 2^14. A row of zeros or of subnormals takes the largest factor.
    exponent = min(252, 268 - static_cast<int>(most >> 7));
  }

  // What undoes the factor, with the 2^14 of unpacked codes.
  __device__ __forceinline__ float undo() const {
    return __uint_as_float(static_cast<uint32_t>(268 - exponent) << 23);
  }

  __device__ __forceinline__ void store(int chunks, int place, int capacity, uint8_t* slabs) const {
    const float factor = __uint_as_float(static_cast<uint32_t>(exponent) << 23);
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
};

// A block a row: the row as fp16 in the slabs of each of its places.
__global__ void gather(const uint16_t* x, int64_t stride, int chunks, const int* places, int slots,
                       int capacity, uint8_t* slabs, float* factors) {
  __shared__ uint32_t largest[32];
  const int64_t row = blockIdx.x;
  Row own;
  own.load(x + row * stride, chunks, largest);
  __syncthreads();
  own.scale(largest);
  if (static_cast<int>(threadIdx.x) < slots)
    factors[places[row * slots + threadIdx.x]] = own.undo();
  for (int slot = 0; slot < slots; ++slot)
    own.store(chunks, places[row * slots + slot], capacity, slabs);
}

// May begin before the launch ahead of it has ended, and waits for it here: nothing is written
// before. The compiler may not read sooner what that launch writes, so `place` has no __restrict__
// on it.
__device__ __forceinline__ void wait_for_launch_ahead() {
  asm volatile("griddepcontrol.wait;" ::: "memory");
}

// `order` and `gather` in one launch, for few rows, with the same result: a block a row, which
// counts all pairs for its own, and behind these a warp an expert.
__global__ void place(const uint16_t* x, int64_t stride, int chunks, const int* chosen, int rows,
                      int slots, int experts, int capacity, int* __restrict__ starts,
                      int* __restrict__ counts, int* __restrict__ places, int* __restrict__ next,
                      uint8_t* slabs, float* factors) {
  __shared__ uint32_t largest[32], found[kMaxSlots][32];
  __shared__ int own_places[kMaxSlots];
  const int row = blockIdx.x, pairs = rows * slots;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, warps = blockDim.x / 32;
  if (row >= rows) {
    wait_for_launch_ahead();
    const int expert = (row - rows) * warps + warp;
    if (expert >= experts) return;
    int before = 0, own = 0;
#pragma unroll 8
    for (int pair = lane; pair < pairs; pair += 32) {
      before += chosen[pair] < expert;
      own += chosen[pair] == expert;
    }
    before = __reduce_add_sync(kAll, before), own = __reduce_add_sync(kAll, own);
    if (lane == 0) {
      starts[expert] = start_of(before, expert), counts[expert] = own, next[1 + expert] = 0;
      if (expert == 0) next[0] = 0;
    }
    return;
  }
  Row own;
  own.load(x + row * stride, chunks, largest);
  wait_for_launch_ahead();
  int expert[kMaxSlots];
  uint32_t counted[kMaxSlots];  // pairs of lower experts; in the upper half, of the same, before
#pragma unroll
  for (int slot = 0; slot < kMaxSlots; ++slot) {
    expert[slot] = slot < slots ? chosen[row * slots + slot] : 0;
    counted[slot] = 0;
  }
  constexpr int kAhead = 4;
  for (int base = threadIdx.x; base < pairs; base += kAhead * blockDim.x) {
    int others[kAhead];
#pragma unroll
    for (int i = 0; i < kAhead; ++i) {
      const int pair = base + i * blockDim.x;
      others[i] = pair < pairs ? chosen[pair] : INT32_MAX;
    }
#pragma unroll
    for (int slot = 0; slot < kMaxSlots; ++slot) {
      if (slot >= slots) break;
#pragma unroll
      for (int i = 0; i < kAhead; ++i) {
        const bool before = base + i * blockDim.x < row * slots + slot;
        counted[slot] += others[i] < expert[slot];
        counted[slot] += others[i] == expert[slot] && before ? 1u << 16 : 0u;
      }
    }
  }
#pragma unroll
  for (int slot = 0; slot < kMaxSlots; ++slot) {
    if (slot < slots) {
      const uint32_t all = __reduce_add_sync(kAll, counted[slot]);
      if (lane == 0) found[slot][warp] = all;
    }
  }
  __syncthreads();
  own.scale(largest);
  if (static_cast<int>(threadIdx.x) < slots) {
    uint32_t all = 0;
    for (int i = 0; i < warps; ++i) all += found[threadIdx.x][i];
    const int64_t pair = static_cast<int64_t>(row) * slots + threadIdx.x;
    const int place = start_of(all & 0xFFFFu, chosen[pair]) + static_cast<int>(all >> 16);
    places[pair] = own_places[threadIdx.x] = place;
    factors[place] = own.undo();
  }
  __syncthreads();
  for (int slot = 0; slot < slots; ++slot) own.store(chunks, own_places[slot], capacity, slabs);
}

__device__ __forceinline__ void add(float (&sum)[8], uint4 v, float weight) {
  const uint32_t words[4] = {v.x, v.y, v.z, v.w};
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    sum[2 * i] = fmaf(weight, __uint_as_float(words[i] << 16), sum[2 * i]);
    sum[2 * i + 1] = fmaf(weight, __uint_as_float(words[i] & 0xFFFF0000u), sum[2 * i + 1]);
  }
}

// A block a row: what its experts gave, by their shares in the order of its choices, plus `added`,
// if there is.
template <int SLOTS>
__global__ void combine(const uint8_t* slabs, int capacity, const int* places, const float* shares,
                        int slots, const uint4* added, int chunks, uint4* out) {
  const int64_t row = blockIdx.x;
  if (SLOTS > 0) slots = SLOTS;
  constexpr int kHeld = SLOTS > 0 ? SLOTS : kMaxSlots;
  int place[kHeld];
  float share[kHeld];
#pragma unroll
  for (int slot = 0; slot < kHeld; ++slot) {
    if (slot < slots) {
      place[slot] = places[row * slots + slot];
      share[slot] = shares[row * slots + slot];
    }
  }
  for (int chunk = threadIdx.x; chunk < chunks; chunk += blockDim.x) {
    uint4 parts[kHeld];
#pragma unroll
    for (int slot = 0; slot < kHeld; ++slot) {
      if (slot < slots) {
        parts[slot] =
            *reinterpret_cast<const uint4*>(slabs + chunk_at(chunk, place[slot], capacity));
      }
    }
    const uint4 own =
        added != nullptr ? added[row * chunks + chunk] : make_uint4(0, 0, 0, 0);
    float sum[8] = {};
#pragma unroll
    for (int slot = 0; slot < kHeld; ++slot) {
      if (slot < slots) add(sum, parts[slot], share[slot]);
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
// 32,768; `slots`, the experts that a row visits, at most 9.

extern "C" int winnow_moe_order(const int* chosen, int pairs, int experts, int* starts, int* counts,
                                int* places, int* next, cudaStream_t stream) {
  order<<<experts, kOrderThreads, 0, stream>>>(chosen, pairs, starts, counts, places, next);
  return cudaGetLastError();
}

extern "C" int winnow_moe_gather(const void* x, int64_t stride, int rows, int columns,
                                 const int* places, int slots, int capacity, void* slabs,
                                 float* factors, cudaStream_t stream) {
  const int chunks = columns / 8;
  gather<<<rows, threads_of(chunks), 0, stream>>>(static_cast<const uint16_t*>(x), stride, chunks,
                                                  places, slots, capacity,
                                                  static_cast<uint8_t*>(slabs), factors);
  return cudaGetLastError();
}

// The order and the gathering of fewer than 65,536 pairs in one launch, to the same bits. The
// launch ahead on the stream may not write the rows.
extern "C" int winnow_moe_place(const void* x, int64_t stride, int rows, int columns,
                                const int* chosen, int slots, int experts, int capacity,
                                int* starts, int* counts, int* places, int* next, void* slabs,
                                float* factors, cudaStream_t stream) {
  if (rows * slots >= 1 << 16 || slots > kMaxSlots) return cudaErrorInvalidValue;
  const int chunks = columns / 8, threads = threads_of(chunks), warps = threads / 32;
  cudaLaunchAttribute early = {};
  early.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  early.val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t config = {};
  config.gridDim = rows + (experts + warps - 1) / warps;
  config.blockDim = threads;
  config.stream = stream;
  config.attrs = &early;
  config.numAttrs = 1;
  return cudaLaunchKernelEx(&config, place, static_cast<const uint16_t*>(x), stride, chunks, chosen,
                            rows, slots, experts, capacity, starts, counts, places, next,
                            static_cast<uint8_t*>(slabs), factors);
}

// `added` [rows, columns] or null.
extern "C" int winnow_moe_combine(const void* slabs, int capacity, const int* places,
                                  const float* shares, int slots, const void* added, int rows,
                                  int columns, void* out, cudaStream_t stream) {
  if (slots > kMaxSlots) return cudaErrorInvalidValue;
  const int chunks = columns / 8;
  auto* kernel = slots == 4 ? combine<4> : slots == 5 ? combine<5> : combine<0>;
  kernel<<<rows, threads_of(chunks), 0, stream>>>(
      static_cast<const uint8_t*>(slabs), capacity, places, shares, slots,
      static_cast<const uint4*>(added), chunks, static_cast<uint4*>(out));
  return cudaGetLastError();
}

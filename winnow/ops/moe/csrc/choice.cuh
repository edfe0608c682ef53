// The choice of experts from the router's scores, and the order of tokens by expert (sm_90).
// A block of threads finds all of it alone. Multiplies nothing.

#pragma once

#include <cuda_runtime.h>

#include <cstdint>

namespace {

constexpr int kThreads = 256;
constexpr int kMaxTaken = 8;
constexpr int kMaxLaneExperts = 8;
constexpr int kFewPairs = 64;
constexpr unsigned kAll = 0xFFFFFFFFu;

struct Shape {
  int rows, taken, experts, hidden;
  int chunk;  // tokens of a unit at most
};

struct Plan {
  // [0]: how many; [1], [2]: how many units were given, of gate and up and of down; from [4] on, an
  // int4 each: expert, first place, tokens, 0.
  int* chunks;
  int* order;    // [pairs]: the pairs by expert, then by number
  float* share;  // [pairs]: their weights in the sum, in that order
};

struct Scores {
  const float* logits;  // [rows, experts]
  const float* bias;
  float routed_scale;
};

__host__ __device__ int max_chunks(const Shape& s) {
  const int pairs = s.rows * s.taken;
  return min(s.experts, pairs) + pairs / s.chunk;
}

// A float's order as an unsigned integer's; above 0 for every number.
__device__ __forceinline__ uint32_t ordered(float x) {
  const uint32_t b = __float_as_uint(x);
  return b & 0x80000000u ? ~b : b | 0x80000000u;
}

// The best experts of each row and their weights; a warp a row. LANE_EXPERTS: of a lane, at most.
template <int LANE_EXPERTS>
__device__ void choose(const Shape& s, const Scores& from, uint8_t* chosen,
                       float* shares) {
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int experts = s.experts, taken = s.taken;
  // A row's scores come while the one before it is decided.
  float bias[LANE_EXPERTS], logits[LANE_EXPERTS];
  const auto load = [&](int row) {
#pragma unroll
    for (int i = 0; i < LANE_EXPERTS; ++i) {
      const int expert = lane + 32 * i;
      if (expert < experts && row < s.rows)
        logits[i] = from.logits[int64_t(row) * experts + expert];
    }
  };
#pragma unroll
  for (int i = 0; i < LANE_EXPERTS; ++i) {
    const int expert = lane + 32 * i;
    bias[i] = expert < experts ? from.bias[expert] : 0.0f;
  }
  load(warp);
  for (int row = warp; row < s.rows; row += kThreads / 32) {
    float scores[LANE_EXPERTS];
    uint32_t ranks[LANE_EXPERTS];
#pragma unroll
    for (int i = 0; i < LANE_EXPERTS; ++i) {
      scores[i] = 0.0f, ranks[i] = 0;
      if (lane + 32 * i < experts) {
        scores[i] = 1.0f / (1.0f + expf(-logits[i]));
        const float rank = scores[i] + bias[i];
        ranks[i] = ordered(rank == rank ? rank : -INFINITY);
      }
    }
    load(row + kThreads / 32);
    int mine = 0;  // lane i: what was chosen i-th
    for (int choice = 0; choice < taken; ++choice) {
      uint32_t best = 0;
#pragma unroll
      for (int i = 0; i < LANE_EXPERTS; ++i) best = max(best, ranks[i]);
      const uint32_t largest = __reduce_max_sync(kAll, best);
      // Of equals the lowest expert.
      int index = 0;
#pragma unroll
      for (int i = LANE_EXPERTS - 1; i >= 0; --i) {
        const unsigned equal = __ballot_sync(kAll, ranks[i] == largest);
        if (equal) index = 32 * i + __ffs(equal) - 1;
      }
#pragma unroll
      for (int i = 0; i < LANE_EXPERTS; ++i) {
        if (index == lane + 32 * i) ranks[i] = 0;
      }
      if (lane == choice) mine = index;
    }
    float own = 0.0f, total = 0.0f;
#pragma unroll
    for (int i = 0; i < LANE_EXPERTS; ++i) {
      const float score = __shfl_sync(kAll, scores[i], mine % 32);
      if (mine / 32 == i) own = score;
    }
    for (int choice = 0; choice < taken; ++choice) total += __shfl_sync(kAll, own, choice);
    if (lane < taken) {
      chosen[row * taken + lane] = static_cast<uint8_t>(mine);
      shares[row * taken + lane] = own / total * from.routed_scale;
    }
  }
}

// Sums of two numbers, each below 2^16, of the threads before this one, and of all.
__device__ uint32_t before(uint32_t own, uint32_t* rooms, uint32_t& all) {
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  uint32_t sum = own;
#pragma unroll
  for (int distance = 1; distance < 32; distance *= 2) {
    const uint32_t other = __shfl_up_sync(kAll, sum, distance);
    if (lane >= distance) sum += other;
  }
  if (lane == 31) rooms[warp] = sum;
  __syncthreads();
  uint32_t ahead = 0;
  all = 0;
#pragma unroll
  for (int w = 0; w < kThreads / 32; ++w) {
    ahead += w < warp ? rooms[w] : 0;
    all += rooms[w];
  }
  return ahead + sum - own;
}

// Which of four experts, a byte each, are `expert`: 0xFF in their bytes.
__device__ __forceinline__ uint32_t equal_bytes(uint32_t four, int expert) {
  return __vcmpeq4(four, static_cast<uint32_t>(expert) * 0x01010101u);
}

// A CTA's own pairs, in shared memory.
struct Pairs {
  uint8_t* chosen;  // 16-byte aligned
  int* order;
  float* shares;  // of pairs by number; where read again, of pairs in their order

  // `room` has 9 bytes a pair and 16 besides.
  __device__ __forceinline__ Pairs(void* room, int pairs)
      : chosen(static_cast<uint8_t*>(room)),
        order(reinterpret_cast<int*>(chosen + (pairs + 15) / 16 * 16)),
        shares(reinterpret_cast<float*>(order + pairs)) {}
};

// The order of up to kFewPairs pairs, where an expert's are one chunk, and the chunks. Gives their
// number. Every warp counts, the first one writes.
__device__ int order_few(const Shape& s, const Pairs& own, int4* chunks) {
  const int lane = threadIdx.x % 32, pairs = s.rows * s.taken;
  // Experts that were chosen, a bit each.
  uint32_t touched[kMaxLaneExperts];
  int experts[kFewPairs / 32];
#pragma unroll
  for (int i = 0; i < kFewPairs / 32; ++i)
    experts[i] = lane + 32 * i < pairs ? own.chosen[lane + 32 * i] : -1;
#pragma unroll
  for (int word = 0; word < kMaxLaneExperts; ++word) {
    uint32_t bits = 0;
#pragma unroll
    for (int i = 0; i < kFewPairs / 32; ++i)
      if (experts[i] >> 5 == word) bits |= 1u << (experts[i] & 31);
    touched[word] = __reduce_or_sync(kAll, bits);
  }
  int num_chunks = 0;
#pragma unroll
  for (int word = 0; word < kMaxLaneExperts; ++word) num_chunks += __popc(touched[word]);
  if (threadIdx.x >= 32) return num_chunks;
#pragma unroll
  for (int i = 0; i < kFewPairs / 32; ++i) {
    const int expert = experts[i], pair = lane + 32 * i;
    if (expert < 0) continue;
    int less = 0, equal = 0, equal_before = 0;
#pragma unroll 4
    for (int other = 0; other < pairs; ++other) {
      const int its = own.chosen[other];
      less += its < expert;
      equal += its == expert;
      equal_before += its == expert && other < pair;
    }
    own.order[less + equal_before] = pair;
    if (equal_before) continue;
    int chunk = 0;
#pragma unroll
    for (int word = 0; word < kMaxLaneExperts; ++word) {
      const uint32_t lower = expert >> 5 > word    ? ~0u
                             : expert >> 5 == word ? (1u << (expert & 31)) - 1
                                                   : 0u;
      chunk += __popc(touched[word] & lower);
    }
    chunks[chunk] = make_int4(expert, less, equal, 0);
  }
  return num_chunks;
}

// The pairs by expert and the chunks of experts' tokens, by every CTA for itself, of a single row
// by its first warp alone. Gives the number of chunks; the barrier behind it is the caller's.
__device__ int arrange(const Shape& s, const Scores& from, const Pairs& own, int4* chunks) {
  __shared__ uint32_t rooms[kThreads / 32];
  const int pairs = s.rows * s.taken, expert = threadIdx.x;
  if (s.experts <= 32 * kMaxLaneExperts / 2) {
    choose<kMaxLaneExperts / 2>(s, from, own.chosen, own.shares);
  } else {
    choose<kMaxLaneExperts>(s, from, own.chosen, own.shares);
  }
  if (pairs <= kFewPairs && s.rows <= s.chunk) {
    if (s.rows > 1) {
      __syncthreads();
    } else {
      // The first warp has chosen alone.
      if (threadIdx.x >= 32) return s.taken;
      __syncwarp();
    }
    return order_few(s, own, chunks);
  }
  __syncthreads();
  // Four pairs at a time; what lies past the last is nobody's.
  const int fours = pairs / 4, rest = pairs % 4;
  const auto* words = reinterpret_cast<const uint32_t*>(own.chosen);
  const uint32_t last = rest ? words[fours] : 0, real = (1u << 8 * rest) - 1;
  int count = 0;
  if (expert < s.experts) {
    for (int i = 0; i < fours; ++i) count += __popc(equal_bytes(words[i], expert));
    count = (count + __popc(equal_bytes(last, expert) & real)) / 8;
  }
  const int own_chunks = (count + s.chunk - 1) / s.chunk;
  uint32_t all;
  const uint32_t ahead = before(static_cast<uint32_t>(own_chunks << 16 | count), rooms, all);
  int place = static_cast<int>(ahead & 0xFFFFu);
  for (int i = 0; i < own_chunks; ++i) {
    const int done = i * s.chunk;
    chunks[(ahead >> 16) + i] = make_int4(expert, place + done, min(count - done, s.chunk), 0);
  }
  for (int i = 0, end = place + count; place < end; ++i) {
    uint32_t found = i < fours ? equal_bytes(words[i], expert) : equal_bytes(last, expert) & real;
    for (; found; found &= ~(0xFFu << (__ffs(found) - 1)))
      own.order[place++] = 4 * i + __ffs(found) / 8;
  }
  return static_cast<int>(all >> 16);
}

// What `arrange` found, for the launches that follow.
__device__ void publish(const Shape& s, const Plan& plan, const Pairs& own, const int4* chunks,
                        int num_chunks) {
  const int pairs = s.rows * s.taken;
  if (threadIdx.x == 0) plan.chunks[0] = num_chunks;
  for (int i = threadIdx.x; i < num_chunks; i += kThreads)
    reinterpret_cast<int4*>(plan.chunks + 4)[i] = chunks[i];
  for (int i = threadIdx.x; i < pairs; i += kThreads) {
    plan.order[i] = own.order[i];
    plan.share[i] = own.shares[own.order[i]];
  }
}

}  // namespace

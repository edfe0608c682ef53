// Units in which every warp of a CTA has strips of its own, over all columns (sm_90a): for more
// tokens. The warps go through the columns together and share the tokens' activations, which come
// with the weights into a ring of stages in shared memory.
//
// The CTAs' shares are equal in cost and may end in the middle of a unit: a CTA whose share begins
// there leaves its sums for the one that began it. A strip's columns are eight sections: shares end
// between them, and their sums are added in their order, so that a token's result does not hang on
// where units are cut.

#pragma once

#include "work.cuh"

namespace {

constexpr int kTileStages = 3;
constexpr int kTileTokens = 16;  // of a unit at most
constexpr int kSections = 8;     // of a strip's columns
constexpr int kTokenBytes = 2 * kBlock;  // of a stage
constexpr int kStageBytes = kWarps * kSlotBytes + kTileTokens * kTokenBytes;
constexpr int kTileBytes = kTileStages * kStageBytes;

__device__ __forceinline__ int eights_of(int tokens) { return tokens > 8 ? 2 : 1; }

// A section of a unit of a chunk: of its warps' two strips, or of one of them in MXFP8, whose units
// have twice as many.
struct Place {
  int chunk, unit, section;

  __device__ __forceinline__ bool operator==(const Place& other) const {
    return chunk == other.chunk && unit == other.unit && section == other.section;
  }
  __device__ __forceinline__ bool in_unit_of(const Place& other) const {
    return chunk == other.chunk && unit == other.unit;
  }
};

// All chunks, each with what those before it cost.
struct Work {
  const int4* chunks;  // matrix (-1: the shared expert), first place, tokens, cost before it
  int num_chunks, cost;

  __device__ __forceinline__ static const Stack& stack_of(const Params& p, const int4& chunk) {
    return chunk.x < 0 ? p.shared : p.routed;
  }

  __device__ __forceinline__ static int units_of(const Stack& stack) {
    return (stack.units + kWarps - 1) / kWarps;
  }

  __device__ __forceinline__ static int sections_of(const Stack& stack) {
    return stack.globals == nullptr ? 2 * kSections : kSections;
  }

  // The first stage, a block of 128 columns of a strip, of its section `section`.
  __device__ __forceinline__ static int stage_of(const Stack& stack, int section) {
    return stack.columns / kBlock * section / kSections;
  }

  // Of a section: about its cycles. Several chunks read the shared expert, all but the first from
  // L2.
  __device__ __forceinline__ static int section_cost(const Stack& stack, const int4& chunk) {
    const int eights = eights_of(chunk.z);
    return stack.columns / kBlock * (chunk.x < 0 ? 16 + 4 * eights : 16 + 10 * eights);
  }

  // Fills in the costs of `chunks`.
  __device__ Work(const Params& p, int4* chunks, int num_chunks)
      : chunks(chunks), num_chunks(num_chunks), cost(0) {
    __shared__ uint32_t rooms[kThreads / 32];
    for (int start = 0; start < num_chunks; start += kThreads) {
      const int i = start + threadIdx.x;
      uint32_t own = 0, all;
      if (i < num_chunks) {
        const Stack& stack = stack_of(p, chunks[i]);
        own = units_of(stack) * sections_of(stack) * section_cost(stack, chunks[i]);
      }
      const uint32_t ahead = before(own, rooms, all);
      if (i < num_chunks) chunks[i].w = cost + static_cast<int>(ahead);
      cost += static_cast<int>(all);
      __syncthreads();
    }
  }

  // Where the share of CTA `cta` begins, and that of the one before it ends.
  __device__ __forceinline__ Place start_of(const Params& p, int cta) const {
    const int at = static_cast<int>(int64_t(cost) * cta / gridDim.x);
    if (at >= cost) return {num_chunks, 0, 0};
    int low = 0, high = num_chunks;
    while (high - low > 1) {
      const int middle = (low + high) / 2;
      (chunks[middle].w <= at ? low : high) = middle;
    }
    const Stack& stack = stack_of(p, chunks[low]);
    const int section = (at - chunks[low].w) / section_cost(stack, chunks[low]);
    return {low, section / sections_of(stack), section % sections_of(stack)};
  }

  // Where the part of a unit that begins at `at` ends in a share that ends at `to`.
  __device__ __forceinline__ int end_of_part(const Params& p, const Place& at,
                                             const Place& to) const {
    return at.in_unit_of(to) ? to.section : sections_of(stack_of(p, chunks[at.chunk]));
  }

  __device__ __forceinline__ void skip(const Params& p, Place& at, int section) const {
    const Stack& stack = stack_of(p, chunks[at.chunk]);
    at.section = section;
    if (section < sections_of(stack)) return;
    at.section = 0;
    if (++at.unit == units_of(stack)) at.unit = 0, ++at.chunk;
  }
};

// 16 bytes of a token's activations on their way into a stage.
struct TokenPart {
  bool wanted;
  uint32_t to;
  const uint8_t* from;
};

// A CTA's stream of weights and activations into its ring, a thread's part of it.
template <bool DOWN>
struct TileStream {
  uint32_t ring, stage;   // the ring's beginning; the next stage to be filled
  Place next, to;         // what follows those at hand; where the share ends
  int left;               // stages at hand
  SlotSource source;      // of this lane
  bool wanted;            // this thread's 16 bytes of a token's activations
  const uint8_t* x;
  uint32_t x_to;          // their place in a stage

  // The next stages of one strip or of two; false if there are none.
  __device__ __forceinline__ bool advance(const Params& p, const Work& work, const int* order) {
    do {
      if (next == to) return false;
      const int4 chunk = work.chunks[next.chunk];
      const bool is_shared = chunk.x < 0;
      const Stack& stack = Work::stack_of(p, chunk);
      // Warps beyond the last strip repeat it: what they compute is not used.
      const int index =
          min(kWarps * next.unit + static_cast<int>(threadIdx.x) / 32, stack.units - 1);
      const int strip = next.section >= kSections;
      const int end = min(work.end_of_part(p, next, to), kSections * (strip + 1));
      const int block = Work::stage_of(stack, next.section - kSections * strip);
      left = Work::stage_of(stack, end - kSections * strip) - block;
      const int gap = (DOWN ? 1 : stack.units) * stack.columns;
      const int64_t at =
          int64_t((is_shared ? 0 : chunk.x) * 2 * stack.units + (DOWN ? 2 : 1) * index) *
              stack.columns +
          strip * gap;
      source.set(stack.codes, stack.scales, stack.globals == nullptr, at, block, gap);
      const __half* from = !DOWN ? p.up.x : is_shared ? p.down.shared_hidden : p.down.hidden;
      const int token = threadIdx.x / 16, piece = threadIdx.x % 16;
      wanted = token < chunk.z;
      const int place = chunk.y + (wanted ? token : 0);
      const int row = DOWN || is_shared ? place : order[place] / p.shape.taken;
      x = reinterpret_cast<const uint8_t*>(from + int64_t(row) * stack.columns) +
          kTokenBytes * block + 16 * piece;
      // Piece 4 * tile + t of token 8 * i + g goes where lane (g, t) reads tile `tile` of eight i.
      x_to = kWarps * kSlotBytes + piece / 4 * (512 * eights_of(chunk.z)) + token / 8 * 512 +
             token % 8 * 64 + piece % 4 * 16;
      work.skip(p, next, end);
    } while (left == 0);
    return true;
  }

  // Asks for the next stage's bytes, if there are any. If `later`, that gets this thread's part of
  // a token, which is not asked for yet.
  __device__ __forceinline__ void fill(const Params& p, const Work& work, const int* order,
                                       TokenPart* later = nullptr) {
    if (left == 0 && !advance(p, work, order)) return;
    const TokenPart part = {wanted, stage + x_to, x};
    if (later != nullptr) *later = part;
    source.copy(stage + threadIdx.x / 32 * kSlotBytes, wanted && later == nullptr, part.to, x);
    x += kTokenBytes;
    stage = stage + kStageBytes == ring + kTileBytes ? ring : stage + kStageBytes;
    --left;
  }
};

// Until the stage whose turn it is has come; nobody reads the one that is filled next any more.
template <bool DOWN>
__device__ __forceinline__ void turn(const Params& p, const Work& work, const int* order,
                                     TileStream<DOWN>& stream) {
  wait_all_but<kTileStages - 2>();
  __syncthreads();
  stream.fill(p, work, order);
  end_group();
}

// What a CTA leaves for the one that began its first unit: each section's sums.
template <int NT>
struct Shares {
  // Of a CTA, in float4s: all sections of two strips.
  static constexpr int kRoom = 2 * kSections * kThreads * kTileTokens / 8;
  float4* room;  // of the first CTA, of this thread
  int* done;     // of each CTA, 0 at first

  __device__ __forceinline__ explicit Shares(const Params& p)
      : room(p.handover.rooms + threadIdx.x), done(p.handover.done) {}

  // `number`: of the strip's section among those of both strips.
  __device__ __forceinline__ float4* place(int cta, int number, int i) const {
    return room + int64_t(cta) * kRoom + (number * NT + i) * kThreads;
  }

  __device__ __forceinline__ void leave(const float (&sums)[NT][4], int number) const {
#pragma unroll
    for (int i = 0; i < NT; ++i)
      __stcg(place(blockIdx.x, number, i),
             make_float4(sums[i][0], sums[i][1], sums[i][2], sums[i][3]));
  }

  __device__ __forceinline__ void all_left() const {
    __threadfence();
    __syncthreads();
    if (threadIdx.x == 0)
      asm volatile("st.release.gpu.s32 [%0], 1;" ::"l"(done + blockIdx.x) : "memory");
  }

  // Adds the sections of all that follow this CTA in the unit `at`; they run, or have run: all CTAs
  // have room on the machine at once.
  __device__ __forceinline__ void collect(const Params& p, const Work& work, const Place& at,
                                          bool mx, Sums<NT>& sums) const {
    Place from = work.start_of(p, blockIdx.x + 1);
    for (int cta = blockIdx.x + 1; from.in_unit_of(at); ++cta) {
      const Place to = work.start_of(p, cta + 1);
      if (from == to) continue;
      if (threadIdx.x == 0) {
        int ready;
        do {
          asm volatile("ld.acquire.gpu.s32 %0, [%1];" : "=r"(ready) : "l"(done + cta) : "memory");
        } while (!ready);
      }
      __syncthreads();
      const int end = work.end_of_part(p, from, to);
      for (int section = from.section; section < end; ++section) {
        const auto take = [&](float (&of_strip)[NT][4], int number) {
#pragma unroll
          for (int i = 0; i < NT; ++i) {
            const float4 v = __ldcg(place(cta, number, i));
            of_strip[i][0] += v.x, of_strip[i][1] += v.y;
            of_strip[i][2] += v.z, of_strip[i][3] += v.w;
          }
        };
        if (!mx) {
          take(sums[0], 2 * section), take(sums[1], 2 * section + 1);
        } else if (section < kSections) {
          take(sums[0], section);
        } else {
          take(sums[1], section);
        }
      }
      from = to;
    }
  }
};

// The unit `at`, from its section there to `end`. `slot`, the stage of the ring whose turn it is,
// goes round.
template <bool DOWN, int NT>
__device__ __forceinline__ void serve_tile(const Params& p, const Work& work, const int* order,
                                           const Place& at, int end, TileStream<DOWN>& stream,
                                           uint32_t& slot) {
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
  const int4 chunk = work.chunks[at.chunk];
  const Stack& stack = Work::stack_of(p, chunk);
  const uint32_t last = stream.ring + kTileBytes - kStageBytes;
  const Shares<NT> shares(p);
  const bool mx = stack.globals == nullptr;
  const uint32_t own = warp * kSlotBytes, tokens = kWarps * kSlotBytes + 16 * lane;
  Tokens<NT> none[1];
  Sums<NT> sums = {};
  for (int section = at.section; section < end; ++section) {
    Sums<NT> part = {};
    const int in_strip = section % kSections;
    int left = Work::stage_of(stack, in_strip + 1) - Work::stage_of(stack, in_strip);
    for (; left > 0; --left) {
      turn(p, work, order, stream);
      const uint32_t codes = slot + own + 16 * lane;
      const uint32_t scales = slot + own + kSlotCodes + lane / 4 * 8;
      const SharedRows<NT> rows = {slot + tokens};
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        if (mx) {
          multiply_mx<NT, false>(part[0], codes, scales, half, none, rows);
        } else {
          multiply<NT, false>(part, codes, scales, half, none, rows);
        }
      }
      slot = slot == last ? stream.ring : slot + kStageBytes;
    }
    const auto take = [&](float (&of_strip)[NT][4], const float (&of_section)[NT][4], int number) {
      if (at.section > 0) return shares.leave(of_section, number);
#pragma unroll
      for (int i = 0; i < NT; ++i) {
#pragma unroll
        for (int j = 0; j < 4; ++j) of_strip[i][j] += of_section[i][j];
      }
    };
    if (!mx) {
      take(sums[0], part[0], 2 * section), take(sums[1], part[1], 2 * section + 1);
    } else if (section < kSections) {
      take(sums[0], part[0], section);
    } else {
      take(sums[1], part[0], section);
    }
  }
  if (at.section > 0) return shares.all_left();
  if (end < Work::sections_of(stack)) shares.collect(p, work, at, mx, sums);
  const int index = kWarps * at.unit + warp;
  if (index >= stack.units) return;
  const Unit unit = {chunk.x < 0, max(chunk.x, 0), index, chunk.y, chunk.z};
  const float* globals = stack.globals;
  if (globals != nullptr) globals += int64_t(unit.matrix) * 32 * stack.units;
  const float2 two[2] = {globals_of<DOWN>(globals, stack.units, index, g),
                         globals_of<DOWN>(globals, stack.units, index, g + 8)};
#pragma unroll
  for (int i = 0; i < NT; ++i) {
#pragma unroll
    for (int odd = 0; odd < 2; ++odd) {
      Target<DOWN> to;
      to.set(p, order, unit, 8 * i + 2 * t + odd);
#pragma unroll
      for (int half = 0; half < 2; ++half)
        to.put(p, index, g + 8 * half, two[half], sums[0][i][2 * half + odd],
               sums[1][i][2 * half + odd]);
    }
  }
}

}  // namespace

// Units in which every warp of a CTA has strips of its own, over all columns (sm_90): for more
// tokens. The warps go through the columns together and share the tokens' activations, which come
// with the weights into a ring of stages in shared memory.

#pragma once

#include "work.cuh"

namespace {

constexpr int kTileStages = 3;
constexpr int kTokenBytes = 2 * kBlock;  // of a stage

__host__ __device__ __forceinline__ int stage_bytes(const Shape& s) {
  return kWarps * kSlotBytes + max(s.chunk, s.shared_chunk) * kTokenBytes;
}

__host__ __device__ __forceinline__ int eights_of(int tokens) {
  return tokens > 16 ? 4 : tokens > 8 ? 2 : 1;
}

// A CTA's stream of weights and activations into its ring, a thread's part of it.
template <bool DOWN>
struct TileStream {
  uint32_t ring, stage;   // the ring's beginning; the next stage to be filled
  int number, index;      // of the unit at hand; index: of this warp's pair of strips
  int blocks, left;       // of a strip, and those not asked for yet
  bool mx, second, idle;  // second: the other strip's turn (MXFP8); idle: a warp without strips
  int gap;                // from the first strip to the second, in strips times K
  const uint8_t* codes;   // of this lane
  const uint8_t* scales;  // of this lane
  // This thread's 16 bytes of one token's activations, and of another's `apart` bytes further on:
  // `pieces` of the two are wanted.
  const uint8_t* x;
  int apart, pieces;
  uint32_t x_to;  // their place in a stage

  __device__ __forceinline__ void begin(uint32_t at) {
    ring = stage = at;
    number = index = -1, blocks = left = 0, mx = false;
  }

  // The next strips; false if there are none.
  __device__ __forceinline__ bool advance(const Params& p, const Range& r, const int4* chunks,
                                          const int* order, int end) {
    const int lane = threadIdx.x % 32;
    if (mx && !second) {
      second = true, left = blocks;
      codes += 16 * int64_t(gap) - 2048 * blocks, scales += gap / 2 - 64 * blocks;
      x -= kTokenBytes * blocks;
      return true;
    }
    if (number + 1 >= end) return false;
    ++number;
    const bool is_shared = number < r.num_shared;
    const Stack& stack = is_shared ? p.shared : p.routed;
    // The first warp's pair decides for all of them.
    const int next = index + kWarps, first_next = next - int(threadIdx.x) / 32;
    if (number > 0 && first_next < stack.units && is_shared == (number - 1 < r.num_shared)) {
      const int ahead = kWarps * (DOWN ? 2 : 1) * stack.columns;
      index = next;
      if (mx) {
        codes += 16 * int64_t(ahead - gap) - 2048 * blocks;
        scales += (ahead - gap) / 2 - 64 * blocks;
      } else {
        codes += 8 * int64_t(ahead) - 1024 * blocks, scales += ahead - 128 * blocks;
      }
      x -= kTokenBytes * blocks;
    } else {
      const Unit unit = unit_of<1>(p, r, chunks, number);
      index = kWarps * unit.index + threadIdx.x / 32;
      blocks = stack.columns / kBlock;
      mx = stack.globals == nullptr;
      gap = (DOWN ? 1 : stack.units) * stack.columns;
      const int64_t at = int64_t(unit.matrix * 2 * stack.units + (DOWN ? 2 : 1) * index) *
                         stack.columns;
      codes = stack.codes + at * (mx ? 16 : 8) + 16 * lane;
      scales = stack.scales +
               (mx ? at / 2 + 16 * lane : at + 16 * (lane % 8) + (lane < 8 ? 0 : gap));
      const __half* from = !DOWN ? p.up.x : is_shared ? p.down.shared_hidden : p.down.hidden;
      const int token = threadIdx.x / 16, further = token + kThreads / 16;
      pieces = (token < unit.tokens) + (further < unit.tokens);
      const auto row_of = [&](int token) {
        const int place = unit.first + min(token, unit.tokens - 1);
        return DOWN || is_shared ? place : order[place] / p.shape.taken;
      };
      const int row = row_of(token);
      apart = (row_of(further) - row) * stack.columns * 2;
      x = reinterpret_cast<const uint8_t*>(from + int64_t(row) * stack.columns) +
          16 * (threadIdx.x % 16);
      // Piece 4 * tile + t of token 8 * i + g goes where lane (g, t) reads tile `tile` of eight i.
      x_to = kWarps * kSlotBytes + threadIdx.x % 16 / 4 * (512 * eights_of(unit.tokens)) +
             token / 8 * 512 + token % 8 * 64 + threadIdx.x % 4 * 16;
    }
    idle = index >= stack.units;
    second = false, left = blocks;
    return true;
  }

  // Asks for the next stage's bytes, if there are any.
  __device__ __forceinline__ void fill(const Params& p, const Range& r, const int4* chunks,
                                       const int* order, int end) {
    if (left == 0 && !advance(p, r, chunks, order, end)) return;
    if (!idle) {
      const uint32_t slot = stage + threadIdx.x / 32 * kSlotBytes + 16 * (threadIdx.x % 32);
      copy_slot(slot, codes, scales, mx, gap);
    }
    if (pieces > 0) copy_16(stage + x_to, x);
    if (pieces > 1) copy_16(stage + x_to + kThreads / 128 * 512, x + apart);
    x += kTokenBytes;
    const int bytes = stage_bytes(p.shape);
    stage = stage + bytes == ring + kTileStages * bytes ? ring : stage + bytes;
    --left;
  }
};

// The units from `number` on that are of one chunk of one matrix; `number` moves past them, `stage`
// (the one whose turn it is) goes round.
template <bool DOWN, int NT>
__device__ __forceinline__ void serve_tile(const Params& p, const Range& r, const int4* chunks,
                                           const int* order, const Unit& unit, int& number, int end,
                                           TileStream<DOWN>& stream, uint32_t& stage) {
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
  const Stack& stack = unit.is_shared ? p.shared : p.routed;
  const int blocks = stack.columns / kBlock, bytes = stage_bytes(p.shape);
  const bool mx = stack.globals == nullptr;
  const float* globals = stack.globals;
  if (globals != nullptr) globals += int64_t(unit.matrix) * 32 * stack.units;
  const int limit = unit.is_shared ? r.num_shared : end;
  Tokens<NT> none[1];
  for (int index = kWarps * unit.index + warp; index - warp < stack.units && number < limit;
       index += kWarps, ++number) {
    const bool idle = index >= stack.units;
    Sums<NT> sums = {};
#pragma unroll
    for (int strip = 0; strip < 2; ++strip) {
      if (strip == 1 && !mx) break;
      for (int left = blocks; left > 0; --left) {
        wait_all_but<kTileStages - 2>();
        // All bytes of this stage are there, and nobody reads the one before it any more.
        __syncthreads();
        stream.fill(p, r, chunks, order, end);
        end_group();
        if (!idle) {
          const uint32_t slot = stage + warp * kSlotBytes;
          const uint32_t codes = slot + 16 * lane, scales = slot + kSlotCodes + lane / 4 * 8;
          const SharedRows<NT> rows = {stage + kWarps * kSlotBytes + 16 * lane};
#pragma unroll
          for (int half = 0; half < 2; ++half) {
            if (mx) {
              multiply_mx<NT, false>(sums[strip], codes, scales, half, none, rows);
            } else if (strip == 0) {
              multiply<NT, false>(sums, codes, scales, half, none, rows);
            }
          }
        }
        stage = stage + bytes == stream.ring + kTileStages * bytes ? stream.ring : stage + bytes;
      }
    }
    if (idle) continue;
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
}

}  // namespace

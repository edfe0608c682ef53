// A CTA's units, whose columns its warps divide among themselves (sm_90): with few tokens there are
// few units. Activations come from global memory through L1.

#pragma once

#include "work.cuh"

namespace {

constexpr int kStages = 3;  // slots of a warp's ring
constexpr int kRingBytes = kStages * kSlotBytes;
constexpr int kRooms = 2;

constexpr int kTokens = 8;  // of a unit at most

// The sums of all warps, two strips times a unit's tokens: a room. Rooms are taken in turn.
constexpr int kRoomBytes = kWarps * 128 * kTokens;
constexpr int kRingsBytes = kWarps * kRingBytes + kRooms * (kRoomBytes + 16);

// Where the warps leave a unit's sums for the one that adds them up, so that none waits for the
// slowest: unit n's room is n % kRooms, its reader warp n % kWarps.
struct Inbox {
  static constexpr int kSize = kRoomBytes / 16;  // of a room, in float4s
  float4* rooms;
  uint32_t barriers;  // of each room: full, then read

  __device__ __forceinline__ explicit Inbox(uint8_t* shared) {
    rooms = reinterpret_cast<float4*>(shared);
    barriers = shared_address(rooms + kRooms * kSize);
    if (threadIdx.x == 0) {
      for (int i = 0; i < kRooms; ++i)
        barrier_init(barriers + 16 * i, kThreads), barrier_init(barriers + 16 * i + 8, 32);
    }
  }

  __device__ __forceinline__ float4* room(int unit) const { return rooms + unit % kRooms * kSize; }

  __device__ __forceinline__ uint32_t full(int unit) const { return barriers + unit % kRooms * 16; }

  // Until the last unit that had this room has been read.
  __device__ __forceinline__ void wait_to_write(int unit) const {
    if (unit >= kRooms) barrier_wait(full(unit) + 8, (unit / kRooms - 1) & 1);
  }

  __device__ __forceinline__ void wait_to_read(int unit) const {
    barrier_wait(full(unit), unit / kRooms & 1);
  }

  // Every lane arrives for itself: racecheck does not see what one does for all.
  __device__ __forceinline__ void written(int unit) const {
    barrier_arrive(full(unit));
  }

  __device__ __forceinline__ void read(int unit) const {
    barrier_arrive(full(unit) + 8);
  }
};

// A CTA's units: its share of the shared expert's, then of the routed.
struct Range {
  int first_shared, num_shared;
  int first_routed, num_routed;
};

__device__ __forceinline__ Range cut(const Params& p, int chunks) {
  const int cta = blockIdx.x, ctas = gridDim.x;
  const int shared_units = shared_chunks(p.shape) * p.shared.units;
  const int routed_units = chunks * p.routed.units;
  Range r;
  r.first_shared = static_cast<int64_t>(shared_units) * cta / ctas;
  r.num_shared = static_cast<int64_t>(shared_units) * (cta + 1) / ctas - r.first_shared;
  // Counted from the other end: who has one more of the one has one less of the other.
  const int other = ctas - 1 - cta;
  r.first_routed = static_cast<int64_t>(routed_units) * other / ctas;
  r.num_routed = static_cast<int64_t>(routed_units) * (other + 1) / ctas - r.first_routed;
  return r;
}

__device__ __forceinline__ Unit unit_of(const Params& p, const Range& r, const int4* chunks,
                                        int number) {
  Unit unit;
  unit.is_shared = number < r.num_shared;
  const int units = (unit.is_shared ? p.shared : p.routed).units;
  const int at = unit.is_shared ? r.first_shared + number : r.first_routed + number - r.num_shared;
  const int chunk = at / units;
  unit.index = at - chunk * units;
  if (unit.is_shared) {
    unit.matrix = 0;
    unit.first = chunk * p.shape.chunk;
    unit.tokens = min(p.shape.chunk, p.shape.rows - unit.first);
  } else {
    const int4 c = chunks[chunk];
    unit.matrix = c.x, unit.first = c.y, unit.tokens = c.z;
  }
  return unit;
}

// A warp's blocks of 128 columns of a unit.
__device__ __forceinline__ int first_block(const Stack& stack, int warp) {
  return stack.columns / kBlock * warp / kWarps;
}

// A warp's stream of weights into its ring: NVFP4 block by block, MXFP8 strip by strip.
template <bool DOWN>
struct Stream {
  int number = -1;             // of the unit whose strips are at hand
  int matrix, index, units;    // of that unit; units: of its matrix
  bool mx = false, second;     // second: the other strip's turn (MXFP8)
  int slot = 0;                // of the next slot at hand, counted up to zero, where none is left
  SlotSource source;

  // The next strips; false if there are none.
  __device__ __forceinline__ bool advance(const Params& p, const Range& r, const int4* chunks,
                                          int end) {
    do {
      const bool turn = mx && !second;
      if (!turn) {
        if (number + 1 >= end) return false;
        ++number;
        if (number > 0 && number != r.num_shared && index + 1 < units) {
          ++index;
        } else {
          const Unit unit = unit_of(p, r, chunks, number);
          matrix = unit.matrix, index = unit.index;
        }
      }
      second = turn;
      const Stack& stack = number < r.num_shared ? p.shared : p.routed;
      units = stack.units, mx = stack.globals == nullptr;
      const int warp = threadIdx.x / 32, last = first_block(stack, warp + 1);
      const int gap = (DOWN ? 1 : units) * stack.columns;
      const int64_t at =
          int64_t(matrix * 2 * units + (DOWN ? 2 : 1) * index) * stack.columns + (second ? gap : 0);
      source.set(stack.codes, stack.scales, mx, at, last, gap);
      slot = first_block(stack, warp) - last;
    } while (slot == 0);
    return true;
  }

  // Asks for the next slot's bytes, to this lane's place `to`; false where there are none.
  __device__ __forceinline__ bool fill(const Params& p, const Range& r, const int4* chunks,
                                       int end, uint32_t to) {
    if (slot == 0 && !advance(p, r, chunks, end)) return false;
    source.copy(slot++, to);
    return true;
  }
};

// What a warp reads from: its ring, and the slot whose turn it is.
struct Ring {
  uint32_t base, at;

  __device__ __forceinline__ void next() {
    at += kSlotBytes;
    if (at == base + kRingBytes) at = base;
  }
};

// The sums of a warp's part of a unit, and its ring filled again behind it.
template <bool DOWN, bool MX>
__device__ __forceinline__ void accumulate(Sums& sums, const Row& row, int blocks,
                                           Stream<DOWN>& stream, Ring& ring, const Params& p,
                                           const Range& r, const int4* chunks, int end) {
  const int lane = threadIdx.x % 32;
  uint4 even[2], odd[2];
  Row here = row;
  if (blocks > 0) here.load(even, 0);
#pragma unroll
  for (int strip = 0; strip < (MX ? 2 : 1); ++strip) {
    here.base = row.base;
    for (int left = blocks; left > 0; --left) {
      const uint32_t codes = ring.at + 16 * lane;
      const uint32_t scales = ring.at + kSlotCodes + lane / 4 * 8;
      here.load(odd, 2);
      wait_all_but<kStages - 1>();
      __syncwarp();
      if constexpr (MX) {
        multiply_mx(sums[strip], codes, scales, 0, even);
      } else {
        multiply(sums, codes, scales, 0, even);
      }
      // Past the last block: what the other strip begins with.
      const uint4* then = left > 1 ? here.base + 16 : row.base;
      here.base = then, here.load(even, 0);
      if constexpr (MX) {
        multiply_mx(sums[strip], codes, scales, 1, odd);
      } else {
        multiply(sums, codes, scales, 1, odd);
      }
      __syncwarp();
      stream.fill(p, r, chunks, end, codes);
      end_group();
      ring.next();
    }
  }
}

// The units from `number` on that are of one chunk of one matrix; `number` moves past them.
template <bool DOWN>
__device__ __forceinline__ void serve(const Params& p, const Range& r, const int4* chunks,
                                      const int* order, const Unit& unit, int& number, int end,
                                      Stream<DOWN>& stream, Ring& ring, const Inbox& inbox) {
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
  const Stack& stack = unit.is_shared ? p.shared : p.routed;
  const int first = first_block(stack, warp);
  const int blocks = first_block(stack, warp + 1) - first;
  const __half* x = !DOWN ? p.up.x : unit.is_shared ? p.down.shared_hidden : p.down.hidden;
  // A token beyond the chunk is another one's copy: what is computed of it is not used.
  const int place = unit.first + min(g, unit.tokens - 1);
  const int token_row = DOWN || unit.is_shared ? place : order[place] / p.shape.taken;
  const Row row = {reinterpret_cast<const uint4*>(x) + token_row * (stack.columns / 8) +
                   first * (kBlock / 8) + t};
  const float* globals = stack.globals;
  if (globals != nullptr) globals += int64_t(unit.matrix) * 32 * stack.units;
  Target<DOWN> targets[2];
#pragma unroll
  for (int i = 0; i < 2; ++i) targets[i].set(p, order, unit, 2 * t + i);
  const int limit = unit.is_shared ? r.num_shared : end;
  for (int index = unit.index; index < stack.units && number < limit; ++index, ++number) {
    const bool reader = number % kWarps == warp;
    float2 own[2];
    if (reader) {
      own[0] = globals_of<DOWN>(globals, stack.units, index, g);
      own[1] = globals_of<DOWN>(globals, stack.units, index, g + 8);
    }
    Sums sums = {};
    if (stack.globals == nullptr) {
      accumulate<DOWN, true>(sums, row, blocks, stream, ring, p, r, chunks, end);
    } else {
      accumulate<DOWN, false>(sums, row, blocks, stream, ring, p, r, chunks, end);
    }
    float4* room = inbox.room(number) + lane;
    inbox.wait_to_write(number);
#pragma unroll
    for (int strip = 0; strip < 2; ++strip)
      room[(warp * 2 + strip) * 32] =
          make_float4(sums[strip][0], sums[strip][1], sums[strip][2], sums[strip][3]);
    inbox.written(number);
    if (!reader) continue;
    inbox.wait_to_read(number);
    float4 total[2] = {};
#pragma unroll
    for (int w = 0; w < kWarps; ++w) {
#pragma unroll
      for (int strip = 0; strip < 2; ++strip) {
        const float4 part = room[(w * 2 + strip) * 32];
        total[strip].x += part.x, total[strip].y += part.y;
        total[strip].z += part.z, total[strip].w += part.w;
      }
    }
    targets[0].put(p, index, g, own[0], total[0].x, total[1].x);
    targets[1].put(p, index, g, own[0], total[0].y, total[1].y);
    targets[0].put(p, index, g + 8, own[1], total[0].z, total[1].z);
    targets[1].put(p, index, g + 8, own[1], total[0].w, total[1].w);
    inbox.read(number);
  }
}

}  // namespace

// A CTA's units, whose columns its warps divide among themselves (sm_90): with few tokens there are
// few units. Activations come from global memory through L1.
//
// Where memory is full, some multiprocessors get a quarter more of it than others. With many units
// a CTA (GIVES) only most of them are dealt out beforehand: the last are given one by one to the
// CTAs that ask, each for one unit beyond the one whose weights it begins to fetch. Who computes a
// unit changes nothing in its sums.

#pragma once

#include <climits>

#include "work.cuh"

namespace {

constexpr int kStages = 3;  // slots of a warp's ring
constexpr int kRingBytes = kStages * kSlotBytes;
constexpr int kRooms = 2;

constexpr int kTokens = 8;  // of a unit at most

constexpr int kManyUnits = 10;  // routed ones a CTA: with fewer none are given
constexpr int kDealt = 95;      // hundredths of the units' bytes, less a unit a CTA

// The sums of all warps, two strips times a unit's tokens: a room. Rooms are taken in turn.
constexpr int kRoomBytes = kWarps * 128 * kTokens;
// Units that were given, until all warps have begun them; each with a barrier.
constexpr int kGiven = 8;
constexpr int kInboxBytes = kRooms * (kRoomBytes + 16) + kGiven * 12 + 16;
constexpr int kRingsBytes = kWarps * kRingBytes + kInboxBytes;

// A CTA's units: first those of the shared expert and of the routed ones that it has beforehand,
// then those that are given.
struct Range {
  int first_shared, num_shared;
  int first_routed, num_dealt;  // num_dealt: of all units that it has beforehand
  int first_given, num_given;   // of the routed units, those given to all CTAs
  bool gives;

  // How many units there are, as far as is known.
  __device__ __forceinline__ int end() const { return gives ? INT_MAX : num_dealt; }
};

// Where the warps leave a unit's sums for the one that adds them up, so that none waits for the
// slowest: unit n's room is n % kRooms, its reader warp n % kWarps.
struct Inbox {
  static constexpr int kSize = kRoomBytes / 16;  // of a room, in float4s
  float4* rooms;
  uint32_t barriers;  // of each room: full, then read; of each given unit; of the choice

  __device__ __forceinline__ explicit Inbox(uint8_t* shared) {
    rooms = reinterpret_cast<float4*>(shared);
    barriers = shared_address(rooms + kRooms * kSize);
    const int which = threadIdx.x;
    if (which <= 2 * kRooms + kGiven)
      barrier_init(barriers + 8 * which, which >= 2 * kRooms + kGiven ? 32
                                         : which >= 2 * kRooms        ? 1
                                         : which % 2                  ? 32
                                                                      : kThreads);
  }

  __device__ __forceinline__ uint32_t given(int number) const {
    return barriers + kRooms * 16 + number % kGiven * 8;
  }

  __device__ __forceinline__ uint32_t chosen_barrier() const {
    return barriers + kRooms * 16 + kGiven * 8;
  }

  // Given unit `number` of this CTA: which it is of those that are given.
  __device__ __forceinline__ int* unit(int number) const {
    return reinterpret_cast<int*>(rooms + kRooms * kSize + kRooms + kGiven / 2 + 1) +
           number % kGiven;
  }

  __device__ __forceinline__ void give(int number, int unit_given) const {
    *unit(number) = unit_given;
    barrier_arrive(given(number));
  }

  __device__ __forceinline__ int take(int number) const {
    barrier_wait(given(number), number / kGiven & 1);
    return *unit(number);
  }

  // Experts are chosen, by this CTA's first warp.
  __device__ __forceinline__ void chosen() const { barrier_arrive(chosen_barrier()); }

  __device__ __forceinline__ void wait_for_choice() const { barrier_wait(chosen_barrier(), 0); }

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

// A warp's blocks of 128 columns of a unit.
__device__ __forceinline__ int first_block(const Stack& stack, int warp) {
  return stack.columns / kBlock * warp / kWarps;
}

// Bytes of a block of 128 columns of a unit, in pieces of 192: two slots of 2,112 or one of 2,304.
__device__ __forceinline__ int block_cost(const Stack& stack) {
  return stack.globals == nullptr ? 22 : 12;
}

// Where part `part` begins of `each` things for everyone and `more` besides.
__device__ __forceinline__ int begins(const Params& p, int each, int more, int part) {
  return each * part + quotient(more * part, p.by_ctas);
}

// Whether every warp has so many blocks of a unit that it begins none but the next before it has
// ended it: then units may be given, and a CTA may begin early.
__host__ __device__ __forceinline__ bool units_are_long(const Params& p) {
  return min(p.routed.columns, p.shared.columns) >= kBlock * kWarps * kStages;
}

template <bool GIVES>
__device__ __forceinline__ Range cut(const Params& p, int chunks) {
  const int cta = blockIdx.x, ctas = gridDim.x;
  const int shared_units = shared_chunks(p.shape) * p.shared.units;
  const int routed_units = chunks * p.routed.units;
  const int few = quotient(shared_units, p.by_ctas), more = shared_units - few * ctas;
  Range r;
  r.first_shared = begins(p, few, more, cta);
  r.num_shared = begins(p, few, more, cta + 1) - r.first_shared;
  r.first_given = routed_units, r.num_given = 0;
  const int each = quotient(routed_units, p.by_ctas);
  if (!GIVES || each < kManyUnits || !units_are_long(p)) {
    // Counted from the other end: who has one more of the one has one less of the other.
    const int besides = routed_units - each * ctas, other = ctas - 1 - cta;
    r.first_routed = begins(p, each, besides, other);
    r.num_dealt = r.num_shared + begins(p, each, besides, other + 1) - r.first_routed;
    r.gives = false;
    return r;
  }
  // Of a CTA's bytes a part is dealt: as many routed units as there is room for beside `few` shared
  // ones, or one more.
  const int cost = block_cost(p.routed) * (p.routed.columns / kBlock);
  const int shared_cost = block_cost(p.shared) * (p.shared.columns / kBlock);
  const int all = few * shared_cost + more * shared_cost / ctas + each * cost;
  const int room = all / 100 * kDealt - cost - few * shared_cost;
  int beside_few = max(room, 0) / cost, beside_more = max(room - shared_cost, 0) / cost;
  int dealt = beside_few * (ctas - more) + beside_more * more;
  if (dealt > routed_units) dealt = beside_few = beside_more = 0;
  // Of the CTAs before this one, so many have one shared unit more.
  const int more_before = r.first_shared - few * cta;
  r.first_routed = beside_few * (cta - more_before) + beside_more * more_before;
  r.num_dealt = r.num_shared + (r.num_shared > few ? beside_more : beside_few);
  r.first_given = dealt;
  r.num_given = routed_units - dealt;
  r.gives = true;
  return r;
}

// The unit at place `at` of the shared or of the routed ones.
__device__ __forceinline__ Unit unit_at(const Params& p, const int4* chunks, bool is_shared,
                                        int at) {
  Unit unit;
  unit.is_shared = is_shared;
  const int units = (is_shared ? p.shared : p.routed).units;
  const int chunk = quotient(at, (is_shared ? p.shared : p.routed).by_units);
  unit.index = at - chunk * units;
  if (is_shared) {
    unit.matrix = 0;
    unit.first = chunk * p.shape.chunk;
    unit.tokens = min(p.shape.chunk, p.shape.rows - unit.first);
  } else {
    const int4 c = chunks[chunk];
    unit.matrix = c.x, unit.first = c.y, unit.tokens = c.z;
  }
  return unit;
}

template <bool GIVES>
__device__ __forceinline__ Unit unit_of(const Params& p, const Range& r, const int4* chunks,
                                        const Inbox& inbox, int number) {
  const bool is_shared = number < r.num_shared;
  const bool dealt = !GIVES || number < r.num_dealt;
  const int at = is_shared ? r.first_shared + number
                 : dealt   ? r.first_routed + number - r.num_shared
                           : r.first_given + *inbox.unit(number - r.num_dealt);
  return unit_at(p, chunks, is_shared, at);
}

// A warp's stream of weights into its ring: NVFP4 block by block, MXFP8 strip by strip.
template <bool DOWN, bool GIVES>
struct Stream {
  int number = -1;             // of the unit whose strips are at hand
  int matrix, index, units;    // of that unit; units: of its matrix
  bool mx = false, second;     // second: the other strip's turn (MXFP8)
  int slot = 0;                // of the next slot at hand, counted up to zero, where none is left
  SlotSource source;
  int asked_for = -1;          // the given unit that this warp has asked for and not passed on
  int answer;

  // Asks for given unit `which` of this CTA.
  __device__ __forceinline__ void ask(const Params& p, int which) {
    asked_for = which;
    if (threadIdx.x % 32 == 0) answer = atomicAdd(p.plan.chunks + (DOWN ? 2 : 1), 1);
  }

  // Passes it on to all warps: later, as it is on its way for a while.
  __device__ __forceinline__ void pass_on(const Inbox& inbox) {
    if (!GIVES || asked_for < 0) return;
    if (threadIdx.x % 32 == 0) inbox.give(asked_for, answer);
    asked_for = -1;
  }

  // The next strips; false if there are none.
  __device__ __forceinline__ bool advance(const Params& p, const Range& r, const int4* chunks,
                                          const Inbox& inbox, int& end) {
    do {
      const bool turn = mx && !second;
      if (!turn) {
        if (number + 1 >= end) return false;
        const int given = GIVES ? number + 1 - r.num_dealt : -1;
        if (given >= 0 && inbox.take(given) >= r.num_given) {
          end = number + 1;
          return false;
        }
        ++number;
        if (given < 0 && number > 0 && number != r.num_shared && index + 1 < units) {
          ++index;
        } else {
          const Unit unit = unit_of<GIVES>(p, r, chunks, inbox, number);
          matrix = unit.matrix, index = unit.index;
        }
        if (given >= 0 && threadIdx.x / 32 == given % kWarps) ask(p, given + 1);
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
                                       const Inbox& inbox, int& end, uint32_t to) {
    if (slot == 0 && !advance(p, r, chunks, inbox, end)) return false;
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

// Whether a CTA's first shared unit may begin before experts are chosen: its first strips then last
// until they are, and its second ones fill the rings.
__device__ __forceinline__ bool begins_early(const Params& p, const Range& r) {
  return p.shape.rows == 1 && r.num_shared > 0 && p.shared.globals == nullptr && units_are_long(p);
}

// The sums of a warp's part of a unit, and its ring filled again behind it.
template <bool DOWN, bool GIVES, bool MX>
__device__ __forceinline__ void accumulate(Sums& sums, const Row& row, int blocks,
                                           Stream<DOWN, GIVES>& stream, Ring& ring, const Params& p,
                                           const Range& r, const int4* chunks, const Inbox& inbox,
                                           int& end) {
  const int lane = threadIdx.x % 32;
  uint4 even[2], odd[2];
  Row here = row;
  if (blocks > 0) here.load(even, 0);
#pragma unroll
  for (int strip = 0; strip < (MX ? 2 : 1); ++strip) {
    here.base = row.base;
    if (!DOWN && MX && strip == 1 && end == r.num_shared) inbox.wait_for_choice(), end = r.end();
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
      stream.pass_on(inbox);
      stream.fill(p, r, chunks, inbox, end, codes);
      end_group();
      ring.next();
    }
  }
}

// The units from `number` on that are of one chunk of one matrix; `number` moves past them.
template <bool DOWN, bool GIVES>
__device__ __forceinline__ void serve(const Params& p, const Range& r, const int4* chunks,
                                      const Pairs& pairs, const Unit& unit, int& number, int& end,
                                      Stream<DOWN, GIVES>& stream, Ring& ring, const Inbox& inbox) {
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
  const Stack& stack = unit.is_shared ? p.shared : p.routed;
  const int first = first_block(stack, warp);
  const int blocks = first_block(stack, warp + 1) - first;
  const __half* x = !DOWN ? p.up.x : unit.is_shared ? p.down.shared_hidden : p.down.hidden;
  // A token beyond the chunk is another one's copy: what is computed of it is not used.
  const int place = unit.first + min(g, unit.tokens - 1);
  const int token_row = DOWN || unit.is_shared ? place : pairs.order[place] / p.shape.taken;
  const Row row = {reinterpret_cast<const uint4*>(x) + token_row * (stack.columns / 8) +
                   first * (kBlock / 8) + t};
  const float* globals = stack.globals;
  if (globals != nullptr) globals += int64_t(unit.matrix) * 32 * stack.units;
  Target<DOWN> targets[2];
#pragma unroll
  for (int i = 0; i < 2; ++i) targets[i].set(p, pairs, unit, 2 * t + i);
  const int limit = number < r.num_shared            ? r.num_shared
                    : !GIVES || number < r.num_dealt ? r.num_dealt
                                                     : number + 1;
  for (int index = unit.index; index < stack.units && number < limit; ++index, ++number) {
    const bool reader = number % kWarps == warp;
    float2 own[2];
    if (reader) {
      own[0] = globals_of<DOWN>(globals, stack.units, index, g);
      own[1] = globals_of<DOWN>(globals, stack.units, index, g + 8);
    }
    Sums sums = {};
    if (stack.globals == nullptr) {
      accumulate<DOWN, GIVES, true>(sums, row, blocks, stream, ring, p, r, chunks, inbox, end);
    } else {
      accumulate<DOWN, GIVES, false>(sums, row, blocks, stream, ring, p, r, chunks, inbox, end);
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

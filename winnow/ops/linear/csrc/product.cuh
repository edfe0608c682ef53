// What slices.cu and ranges.cu share: products of bf16 rows with packed MXFP8 weights on Hopper
// (sm_90a), by wgmma with the weights in registers.
//
// Weights are the A operand, in the order of winnow/ops/fragments_mxfp8.py. A warp of a warpgroup
// has a strip of 16 output columns; its lanes copy what they will use to places of their own in
// shared memory, some pieces ahead, and expand codes to bf16 in registers. Rows of activations are
// the N of the product, as they are: one thread has the copy engine bring slabs of 64 columns,
// swizzled, to a ring in shared memory that the CTA's warpgroups share.
//
// Exactness. An E4M3 code's bits, moved, are the bf16 number code * 2^-120; times 2^(s - 39) it is
// the weight times 2^-32, exactly while the weight is at least 2^-94 (or 0). Sums are fp32.
// Scale bytes from 167 on are too large for this and give inf or NaN, as 255 should; woven, 255 is
// infinity, and makes NaN of the codes beside it, which are 0.

#pragma once

#include "../../csrc/hopper.cuh"
#include "packed.cuh"
#include "wgmma.cuh"

// Outside the namespace, as what a C function is given has to be.
struct Matrix {
  const uint8_t* codes;
  const uint8_t* scales;
  __nv_bfloat16* out;  // [rows, width]
  int strips, width;   // 16 columns of `out` a strip
};

namespace {

constexpr int kSharedBytes = 226 << 10;
constexpr float kBack = 4294967296.0f;  // 2^32

// Tiles are numbered so that those of one range of strips follow each other.
struct Work {
  Matrix matrices[2];
  float4* scratch;
  int rows;
  int pieces;        // K / 128
  int row_tiles;     // of N rows
  int column_tiles;  // strips of both matrices divide into so many, as evenly as they can
};

__host__ __device__ __forceinline__ int strips_of(const Work& work) {
  return work.matrices[0].strips + work.matrices[1].strips;
}

__host__ __device__ __forceinline__ int tiles_of(const Work& work) {
  return work.column_tiles * work.row_tiles;
}

__device__ __forceinline__ int strips_of(const Work& work, int tile) {
  const int strips = strips_of(work), column = tile / work.row_tiles;
  return strips * (column + 1) / work.column_tiles - strips * column / work.column_tiles;
}

// Warpgroups of a CTA that have strips in one of its tiles.
__host__ __device__ __forceinline__ int groups_of(const Work& work) {
  return ((strips_of(work) + work.column_tiles - 1) / work.column_tiles + 3) / 4;
}

// Columns 8 n .. 8 n + 7 of a tile's rows by the strip's, as the tensor core holds them.
__device__ __forceinline__ void store(const Matrix& m, int rows, int strip, int first_row,
                                      float4 sum) {
  const int lane = threadIdx.x % 32, row = first_row + lane / 4;
  uint32_t pair[2];
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const __nv_bfloat162 values =
        half ? __floats2bfloat162_rn(sum.z * kBack, sum.w * kBack)
             : __floats2bfloat162_rn(sum.x * kBack, sum.y * kBack);
    // From two rows of one column to two columns of one row.
    asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;"
                 : "=r"(pair[half])
                 : "r"(*reinterpret_cast<const uint32_t*>(&values)));
  }
  if (row >= rows) return;
  __nv_bfloat16* out =
      m.out + static_cast<int64_t>(row) * m.width + strip * kStripRows + lane % 4 * 2;
  *reinterpret_cast<uint32_t*>(out) = pair[0];
  *reinterpret_cast<uint32_t*>(out + 8) = pair[1];
}

// A strip of a tile.
struct Strip {
  const Matrix* matrix;
  int number;  // in its matrix
  bool there;  // or, if not, the place of another
};

__device__ __forceinline__ Strip strip_of(const Work& work, int tile, int within) {
  const int strips = strips_of(work), before = work.matrices[0].strips;
  const int column = min(tile / work.row_tiles, work.column_tiles - 1);
  const int number = strips * column / work.column_tiles + within;
  const bool there = number < strips * (column + 1) / work.column_tiles;
  const int place = min(number, strips - 1);
  return place < before ? Strip{&work.matrices[0], place, there}
                        : Strip{&work.matrices[1], place - before, there};
}

// Of a row's four scales 0 and 2, or 1 and 3, as bf16 factors 2^(s - 39).
template <bool WOVEN>
__device__ __forceinline__ uint32_t factors_of(uint32_t scales, int odd) {
  if constexpr (WOVEN) return (odd ? scales >> 1 : scales << 7) & 0x7F807F80u;
  uint32_t factors;
  asm("mad.lo.u32 %0, %1, 128, %2;"
      : "=r"(factors)
      : "r"(scales >> 8 * odd & 0x00FF00FFu), "r"(0x2C002C00u));
  return __vminu2(factors, 0x7FC07FC0u);
}

// The lower or upper of two factors, twice: what the multiplication takes by itself.
__device__ __forceinline__ uint32_t twice(uint32_t factors, bool upper) {
  const auto both = *reinterpret_cast<const __nv_bfloat162*>(&factors);
  const __nv_bfloat162 one = upper ? __high2bfloat162(both) : __low2bfloat162(both);
  return *reinterpret_cast<const uint32_t*>(&one);
}

__device__ __forceinline__ uint32_t times(uint32_t pair, uint32_t factor) {
  uint32_t product;
  asm("mul.rn.bf16x2 %0, %1, %2;" : "=r"(product) : "r"(pair), "r"(factor));
  return product;
}

// 16 columns of a tile as a fragment: rows g, g + 8, then both in the upper half of the columns.
template <bool WOVEN>
__device__ __forceinline__ void expand(uint32_t low, uint32_t high, uint32_t upper, uint32_t lower,
                                       uint32_t (&a)[4]) {
  a[0] = times(first_pair<WOVEN>(low), upper), a[1] = times(second_pair<WOVEN>(low), lower);
  a[2] = times(first_pair<WOVEN>(high), upper), a[3] = times(second_pair<WOVEN>(high), lower);
}

// Copies where `wanted`: 16 or 8 bytes into shared memory, asynchronously.
template <int BYTES>
__device__ __forceinline__ void copy(uint32_t to, const uint8_t* from, bool wanted) {
  if constexpr (BYTES == 16)
    asm volatile(
        "{\n"
        ".reg .pred wanted;\n"
        "setp.ne.u32 wanted, %2, 0;\n"
        "@wanted cp.async.cg.shared.global [%0], [%1], 16;\n"
        "}\n" ::"r"(to), "l"(from), "r"(static_cast<uint32_t>(wanted))
        : "memory");
  else
    asm volatile(
        "{\n"
        ".reg .pred wanted;\n"
        "setp.ne.u32 wanted, %2, 0;\n"
        "@wanted cp.async.ca.shared.global [%0], [%1], 8;\n"
        "}\n" ::"r"(to), "l"(from), "r"(static_cast<uint32_t>(wanted))
        : "memory");
}

__device__ __forceinline__ void copy_commit() {
  asm volatile("cp.async.commit_group;" ::: "memory");
}

template <int LEFT>
__device__ __forceinline__ void copy_wait() {
  asm volatile("cp.async.wait_group %0;" ::"n"(LEFT) : "memory");
}

__device__ __forceinline__ uint4 read_16(uint32_t from) {
  uint4 v;
  asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
               : "r"(from));
  return v;
}

__device__ __forceinline__ uint2 read_8(uint32_t from) {
  uint2 v;
  asm volatile("ld.shared.v2.u32 {%0, %1}, [%2];" : "=r"(v.x), "=r"(v.y) : "r"(from));
  return v;
}

// Order: in which a CTA takes pieces of tiles. Its `Place` has the `tile` and the `piece`, and
// `step` moves one on to the next piece and says whether that is another tile's.
// PARTS: bytes of shared memory that are kept for something else.
template <typename Order, int N, int GROUPS, int DEPTH, bool WOVEN, int PARTS>
struct Kernel {
  using Place = typename Order::Place;
  static constexpr int kWarps = 4 * GROUPS, kThreads = 128 * (GROUPS + 1);
  // What a CTA's registers at launch (168 or 96 a thread) allow.
  static constexpr int kRegisters = GROUPS == 2 ? 216 : 112;
  static constexpr int kFeedRegisters = GROUPS == 2 ? 72 : 24;
  static_assert(GROUPS == 2 || GROUPS == 4, "registers are for so many");
  // Activations come by stages: a piece, or half of one where many rows need the room.
  static constexpr int kSlab = N * 128;             // bytes of 64 columns
  static constexpr int kStages = N <= 128 ? 1 : 2;  // of a piece
  static constexpr int kStage = 2 / kStages * kSlab;
  // A warp's copy of a piece: four tiles, then 8 bytes of scales a lane.
  static constexpr int kHeld = kPieceCodes + 32 * 8;
  static constexpr int kHeldBytes = DEPTH * kWarps * kHeld;
  static constexpr int kFit = (kSharedBytes - kHeldBytes - PARTS) / (kStage + 16);
  static constexpr int kRing = kFit < 16 ? kFit : 16;  // stages
  static constexpr int kBytes = kRing * (kStage + 16) + kHeldBytes + PARTS;
  static_assert(kRing >= 2, "a stage is filled while another is read");

  // Shared memory: stages, what warps hold, barriers, PARTS.
  static __device__ __forceinline__ uint32_t parts(uint32_t base) {
    return base + kRing * (kStage + 16) + kHeldBytes;
  }
  static __device__ __forceinline__ uint32_t full(uint32_t base, int slot) {
    return base + kRing * kStage + kHeldBytes + slot * 16;
  }
  static __device__ __forceinline__ uint32_t empty(uint32_t base, int slot) {
    return full(base, slot) + 8;
  }

  // Where one thread is in the ring that feeds it.
  struct Feed {
    int slot, parity;
  };

  // Brings the activations of a tile's pieces from `piece` on.
  static __device__ __forceinline__ void feed(const Work& work, const CUtensorMap& map,
                                              uint32_t base, int tile, int piece, int count,
                                              Feed& to) {
    const int row = tile % work.row_tiles * N, end = piece + count;
#pragma unroll 1  // registers are few
    for (; piece < end; ++piece) {
#pragma unroll
      for (int stage = 0; stage < kStages; ++stage) {
        const uint32_t bar = full(base, to.slot);
        barrier_wait(empty(base, to.slot), to.parity);
        barrier_expect(bar, kStage);
#pragma unroll
        for (int slab = 0; slab < 2 / kStages; ++slab)
          tensor_load(base + to.slot * kStage + slab * kSlab, map,
                      piece * kPiece + (stage + slab) * 64, row, bar);
        if (++to.slot == kRing) to.slot = 0, to.parity ^= 1;
      }
    }
  }

  // A warp has read a stage.
  static __device__ __forceinline__ void release(uint32_t base, int slot) {
    if (threadIdx.x % 32 == 0) barrier_arrive(empty(base, slot));
  }

  // Where a warp is in its copies and in the ring.
  struct Walk {
    const uint8_t* codes;  // a lane's, of the next piece to copy
    const uint8_t* scales;
    Place next;
    int to_copy;
    bool there;  // whether this warp has a strip of next.tile
    uint32_t held;  // address of a lane's copy of the next piece to multiply
    int held_slot;
    int slot, parity;
  };

  static __device__ __forceinline__ void seek(const Work& work, Walk& walk) {
    const int lane = threadIdx.x % 32;
    const Strip strip = strip_of(work, walk.next.tile, threadIdx.x / 32);
    const int64_t at = static_cast<int64_t>(strip.number) * work.pieces + walk.next.piece;
    walk.codes = strip.matrix->codes + at * kPieceCodes + lane * 16;
    walk.scales = strip.matrix->scales + at * kPieceScales + lane / 4 * 8;
    walk.there = strip.there;
  }

  // Copies the next piece to where it will be held, if there is one.
  static __device__ __forceinline__ void copy_next(const Work& work, const Order& order,
                                                   uint32_t to, Walk& walk) {
    const bool more = walk.there && walk.to_copy > 0;
    copy<8>(to + scales_apart(), walk.scales, more);
#pragma unroll
    for (int i = 0; i < kTiles; ++i)
      copy<16>(to + i * kTileBytes, walk.codes + i * kTileBytes, more);
    copy_commit();
    --walk.to_copy;
    walk.codes += kPieceCodes, walk.scales += kPieceScales;
    if (order.step(walk.next)) seek(work, walk);
  }

  // From a lane's codes to its scales.
  static __device__ __forceinline__ int scales_apart() {
    return kPieceCodes - static_cast<int>(threadIdx.x) % 32 * 8;
  }

  // Asks for the first pieces of weights.
  static __device__ __forceinline__ Walk begin(const Work& work, const Order& order, uint32_t base,
                                               const Place& first, int count) {
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    Walk walk = {};
    walk.next = first, walk.to_copy = count;
    walk.held = base + kRing * kStage + warp * kHeld + lane * 16;
    seek(work, walk);
#pragma unroll 1
    for (int d = 0; d < DEPTH; ++d)
      copy_next(work, order, walk.held + d * kWarps * kHeld, walk);
    return walk;
  }

  // Makes the ring's barriers.
  static __device__ __forceinline__ void make_ring(const Work& work, uint32_t base) {
    for (int slot = 0; slot < kRing; ++slot) {
      barrier_init(full(base, slot), 1);
      barrier_init(empty(base, slot), 4 * groups_of(work));
    }
    barriers_made();
  }

  // Adds a piece's products to `sums`. rows: the descriptor of the ring. give: slot of the stage
  // before, to be given back, or -1. Returns the slot of this piece's last stage.
  static __device__ __forceinline__ int multiply(Walk& walk, uint32_t base, uint64_t rows, int give,
                                                 uint32_t (&a)[2][2][4], float (&sums)[N / 2]) {
    copy_wait<DEPTH - 1>();
    const uint2 scales = read_8(walk.held + scales_apart());
    uint4 codes[2] = {read_16(walk.held), read_16(walk.held + kTileBytes)};
    const uint32_t upper[2] = {factors_of<WOVEN>(scales.x, 0), factors_of<WOVEN>(scales.x, 1)};
    const uint32_t lower[2] = {factors_of<WOVEN>(scales.y, 0), factors_of<WOVEN>(scales.y, 1)};
#pragma unroll
    for (int i = 0; i < kTiles; ++i) {
      const uint32_t up = twice(upper[i % 2], i >= 2), low = twice(lower[i % 2], i >= 2);
      const uint4 w = codes[i % 2];
      // The products of two tiles ago have read their registers, and a stage that they end.
      wgmma_wait<1>();
      if (i == 1 || i == kTiles / kStages + 1) {
        if (give >= 0) release(base, give);
      }
      uint32_t(&now)[2][4] = a[i % 2];
      expand<WOVEN>(w.x, w.y, up, low, now[0]);
      expand<WOVEN>(w.z, w.w, up, low, now[1]);
      if (i < 2) codes[i] = read_16(walk.held + (i + 2) * kTileBytes);
      constexpr int kEach = kTiles / kStages;  // tiles of a stage
      if (i % kEach == 0) barrier_wait(full(base, walk.slot), walk.parity);
      const int within = i % kEach / 2 * (kSlab / 16) + i % 2 * 4;
      const uint64_t b = rows + static_cast<uint32_t>(walk.slot * (kStage / 16) + within);
      wgmma_fence();
      wgmma(sums, now[0], b);
      wgmma(sums, now[1], b + 2);
      wgmma_commit();
      if (i % kEach == kEach - 1) {
        give = walk.slot;
        if (++walk.slot == kRing) walk.slot = 0, walk.parity ^= 1;
      }
    }
    return give;
  }

  // All of `count` pieces of a tile.
  static __device__ __forceinline__ void multiply(const Work& work, const Order& order,
                                                  uint32_t base, int count, Walk& walk,
                                                  float (&sums)[N / 2]) {
    const uint64_t rows = descriptor(base);
    uint32_t a[2][2][4];
    int give = -1;
    for (int i = 0; i < count; ++i) {
      give = multiply(walk, base, rows, give, a, sums);
      copy_next(work, order, walk.held, walk);
      walk.held += kWarps * kHeld;
      if (++walk.held_slot == DEPTH) walk.held_slot = 0, walk.held -= kHeldBytes;
    }
    wgmma_wait<0>();
    release(base, give);
  }
};

}  // namespace

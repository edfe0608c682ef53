// linear for a few rows of bf16 activations over packed MXFP8 weights, on Hopper (sm_90a).
//
// Weights are the A operand of mma.m16n8k16 in the order of winnow/ops/fragments_mxfp8.py, rows of
// activations its N. Weights go from memory to registers, since no two warps share one; the
// activations of a block of threads lie in shared memory as fp16.
//
// Work. A cluster of CTAs shares strips of 16 output columns; each CTA has its slice of K, each
// warp of a CTA (slot, part): a slot takes every slots-th group of STRIPS strips of the cluster,
// its parts divide the slice. Parts are added in shared memory, slices through global memory after
// a barrier of the cluster: always in the order of K, so a result does not depend on timing.
// Weights are asked for before the launch waits for the one before it.
//
// Exactness. E4M3 is exact in fp16. Activations are multiplied by a power of two, one for each
// (row, part), that brings the largest finite magnitude into [2^14, 2^15): bf16 values are then
// exact down to 2^-31 of the largest and vanish below 2^-39 of it. The tensor core's fp32 sums of
// 32 columns are multiplied by the weights' scale and added up in fp32. A scale byte of 0 counts
// as 0 (2^-127 in the format: no weight above 2^-118), and 255, NaN, must be in the codes.

#include "packed.cuh"

namespace {

constexpr int kMaxPartPieces = 16;
constexpr int kChunks = kMaxPartPieces * kPiece / 8 / 32;  // of 8 activations a lane

// Matrices with one K, multiplied by the same activations.
struct Work {
  Matrix matrices[2];
  const uint16_t* x;  // bf16 [rows, K]
  int64_t x_stride;   // in elements
  float* scratch;     // [slices, strips of all, NT, 128] where there are several slices
  int rows;
  int pieces;  // K / 128
  int slices;  // CTAs of a cluster
  int parts;   // warps of a slot, a power of two
};

__device__ __forceinline__ uint4 load_shared(uint32_t from) {
  uint4 v;
  asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
               : "r"(from));
  return v;
}

// sum = a b + sum, or a b alone.
__device__ __forceinline__ void mma(float (&sum)[4], const uint32_t (&a)[4], uint32_t b0,
                                    uint32_t b1) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, "
      "{%8, %9}, {%0, %1, %2, %3};"
      : "+f"(sum[0]), "+f"(sum[1]), "+f"(sum[2]), "+f"(sum[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

__device__ __forceinline__ void mma_first(float (&sum)[4], const uint32_t (&a)[4], uint32_t b0,
                                          uint32_t b1) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, "
      "{%8, %9}, {%10, %10, %10, %10};"
      : "=f"(sum[0]), "=f"(sum[1]), "=f"(sum[2]), "=f"(sum[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1), "f"(0.0f));
}

// Strips that a warp multiplies together. The second is the first again where there is none.
struct Group {
  const uint8_t* codes;   // a lane's, of the first strip and piece 0
  const uint8_t* scales;
  int next_codes, next_scales;  // bytes to the second strip
};

template <int NT, int STRIPS, int WARPS, int DEPTH>
struct Kernel {
  // Groups never reach over the end of a matrix.
  static __device__ __forceinline__ int groups_of(const Matrix& m) {
    return (m.strips + STRIPS - 1) / STRIPS;
  }

  static __device__ __forceinline__ Group locate(const Work& work, int group) {
    const int lane = threadIdx.x % 32;
    const int before = groups_of(work.matrices[0]);
    const Matrix& m = group < before ? work.matrices[0] : work.matrices[1];
    const int strip = (group < before ? group : group - before) * STRIPS;
    const int64_t at = static_cast<int64_t>(strip) * work.pieces;
    const bool both = STRIPS == 2 && strip + 1 < m.strips;
    return {m.codes + at * kPieceCodes + lane * 16, m.scales + at * kPieceScales + lane / 4 * 8,
            both ? work.pieces * kPieceCodes : 0, both ? work.pieces * kPieceScales : 0};
  }

  static __device__ __forceinline__ void fetch_scales(const Group& from, int piece, bool wanted,
                                                      Held (&to)[STRIPS]) {
#pragma unroll
    for (int s = 0; s < STRIPS; ++s)
      load_scales(to[s].scales, from.scales + piece * kPieceScales + s * from.next_scales, wanted);
  }

  static __device__ __forceinline__ void fetch_tile(const Group& from, int piece, int tile,
                                                    bool wanted, Held (&to)[STRIPS]) {
#pragma unroll
    for (int s = 0; s < STRIPS; ++s)
      load_codes(to[s].codes[tile],
                 from.codes + (piece * kPieceCodes + s * from.next_codes) + tile * kTileBytes,
                 wanted);
  }

  // Adds a piece's products to `sums`, and fills what it held with a later piece (if `more`) as
  // soon as registers are free. rows[n]: shared address of a lane's activations of columns n.
  static __device__ __forceinline__ void multiply(Held (&held)[STRIPS], bool more,
                                                  const Group& from, int piece,
                                                  const uint32_t (&rows)[NT], uint32_t offset,
                                                  float (&sums)[STRIPS][NT][4]) {
    uint2 scales[STRIPS];
#pragma unroll
    for (int s = 0; s < STRIPS; ++s) scales[s] = held[s].scales;
    fetch_scales(from, piece, more, held);
#pragma unroll
    for (int i = 0; i < kTiles; ++i) {
      uint32_t first[STRIPS][4], second[STRIPS][4];
      float upper[STRIPS], lower[STRIPS];
#pragma unroll
      for (int s = 0; s < STRIPS; ++s) {
        const uint4 w = held[s].codes[i];
        first[s][0] = halves_of(w.x), first[s][1] = halves_of(w.x >> 16);
        first[s][2] = halves_of(w.y), first[s][3] = halves_of(w.y >> 16);
        second[s][0] = halves_of(w.z), second[s][1] = halves_of(w.z >> 16);
        second[s][2] = halves_of(w.w), second[s][3] = halves_of(w.w >> 16);
        upper[s] = __uint_as_float(exponent_of(scales[s].x, i));
        lower[s] = __uint_as_float(exponent_of(scales[s].y, i));
      }
      fetch_tile(from, piece, i, more, held);
#pragma unroll
      for (int n = 0; n < NT; ++n) {
        const uint4 x = load_shared(rows[n] + offset + i * 64);
#pragma unroll
        for (int s = 0; s < STRIPS; ++s) {
          float product[4];
          mma_first(product, first[s], x.x, x.y);
          mma(product, second[s], x.z, x.w);
          float(&sum)[4] = sums[s][n];
          sum[0] = fmaf(product[0], upper[s], sum[0]), sum[1] = fmaf(product[1], upper[s], sum[1]);
          sum[2] = fmaf(product[2], lower[s], sum[2]), sum[3] = fmaf(product[3], lower[s], sum[3]);
        }
      }
    }
  }

  // Columns 8 n .. 8 n + 7 of activations by the strip's rows, as the tensor core holds them.
  static __device__ __forceinline__ void store(const Work& work, int group, int s, int n,
                                               float4 sum) {
    const int g = threadIdx.x % 32 / 4, row = 8 * n + threadIdx.x % 4 * 2;
    const int before = groups_of(work.matrices[0]);
    const Matrix& m = group < before ? work.matrices[0] : work.matrices[1];
    const int strip = (group < before ? group : group - before) * STRIPS + s;
    if (strip >= m.strips) return;
    __nv_bfloat16* out = m.out + static_cast<int64_t>(row) * m.width + strip * kStripRows + g;
    if (row < work.rows) {
      out[0] = __float2bfloat16_rn(sum.x);
      out[8] = __float2bfloat16_rn(sum.z);
    }
    if (row + 1 < work.rows) {
      out[m.width] = __float2bfloat16_rn(sum.y);
      out[m.width + 8] = __float2bfloat16_rn(sum.w);
    }
  }

  // Pieces before part `part` of this CTA's slice, within the slice.
  static __device__ __forceinline__ int first_piece(int begin, int end, int part, int parts) {
    return (end - begin) * part / parts;
  }

  // Activations of a CTA's slice as fp16 in shared memory, [rows] of `stride` bytes, and what
  // undoes their factors.
  static __device__ void convert(const Work& work, int begin, int end, int stride, uint8_t* to,
                                 float* undo) {
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    for (int item = warp; item < work.rows * work.parts; item += WARPS) {
      const int row = item / work.parts, part = item % work.parts;
      const int first = first_piece(begin, end, part, work.parts);
      const int chunks = (first_piece(begin, end, part + 1, work.parts) - first) * (kPiece / 8);
      const uint4* from = reinterpret_cast<const uint4*>(work.x + row * work.x_stride) +
                          (begin + first) * (kPiece / 8);
      uint4 held[kChunks];
#pragma unroll
      for (int i = 0; i < kChunks; ++i) {
        const int chunk = 32 * i + lane;
        held[i] = chunk < chunks ? from[chunk] : uint4{};
      }
      uint32_t largest = 0;
#pragma unroll
      for (int i = 0; i < kChunks; ++i) {
        for (uint32_t word : {held[i].x, held[i].y, held[i].z, held[i].w}) {
          const uint32_t low = word & 0x7FFFu, high = word >> 16 & 0x7FFFu;
          largest = max(largest, low < 0x7F80u ? low : 0u);
          largest = max(largest, high < 0x7F80u ? high : 0u);
        }
      }
      // At most 2^126, so that its inverse is a normal number.
      const uint32_t exponent = min(253u, 268u - (__reduce_max_sync(kAll, largest) >> 7));
      const float factor = __uint_as_float(exponent << 23);
      if (lane == 0) undo[part * 8 * NT + row] = __uint_as_float((254 - exponent) << 23);
      uint32_t* place = reinterpret_cast<uint32_t*>(to + row * stride) + first * (kPiece / 2);
#pragma unroll
      for (int i = 0; i < kChunks; ++i) {
        // Pair j of this quarter of a tile is lane t = j's: a lane reads its four at once.
        const int chunk = 32 * i + lane, at = chunk / 4 * 16 + chunk % 4;
        const uint32_t words[4] = {held[i].x, held[i].y, held[i].z, held[i].w};
#pragma unroll
        for (int j = 0; j < 4; ++j) {
          const __half2 pair = __floats2half2_rn(__uint_as_float(words[j] << 16) * factor,
                                                 __uint_as_float(words[j] & 0xFFFF0000u) * factor);
          if (chunk < chunks) place[at + 4 * j] = *reinterpret_cast<const uint32_t*>(&pair);
        }
      }
    }
  }

  static __device__ void run(const Work& work) {
    extern __shared__ __align__(128) uint8_t shared[];
    asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    const int g = lane / 4, t = lane % 4;
    const int rank = work.slices == 1 ? 0 : blockIdx.x % work.slices;
    const int cluster = blockIdx.x / work.slices, clusters = gridDim.x / work.slices;
    const int begin = work.pieces * rank / work.slices;
    const int end = work.pieces * (rank + 1) / work.slices;
    const int slots = WARPS / work.parts, slot = warp / work.parts, part = warp % work.parts;
    const int first = first_piece(begin, end, part, work.parts);
    const int pieces = first_piece(begin, end, part + 1, work.parts) - first;
    const int groups = groups_of(work.matrices[0]) + groups_of(work.matrices[1]);
    const int stride = (work.pieces + work.slices - 1) / work.slices * kPiece * 2 + 64;
    float* undo = reinterpret_cast<float*>(shared + work.rows * stride);
    float4* parts_sums = reinterpret_cast<float4*>(undo + work.parts * 8 * NT);

    // The slot's groups of this cluster: group, group + step, ...
    int group = cluster + slot * clusters;
    const int step = slots * clusters;
    const int turns = slot < slots && group < groups ? (groups - group + step - 1) / step : 0;
    const int total = turns * pieces;
    Held held[DEPTH][STRIPS] = {};
    Group source = {};
    int next_group = group, next_piece = 0;
    // Moves on to the next piece to be asked for; its place within the slice.
    auto advance = [&]() {
      if (next_piece == 0) source = locate(work, next_group), next_group += step;
      const int piece = begin + first + next_piece;
      next_piece = next_piece + 1 == pieces ? 0 : next_piece + 1;
      return piece;
    };
#pragma unroll
    for (int d = 0; d < DEPTH; ++d) {
      if (d < total) {
        const int piece = advance();
        fetch_scales(source, piece, true, held[d]);
#pragma unroll
        for (int i = 0; i < kTiles; ++i) fetch_tile(source, piece, i, true, held[d]);
      }
    }
    asm volatile("griddepcontrol.wait;" ::: "memory");
    convert(work, begin, end, stride, shared, undo);
    __syncthreads();

    const uint32_t base = static_cast<uint32_t>(__cvta_generic_to_shared(shared));
    uint32_t rows[NT];
#pragma unroll
    for (int n = 0; n < NT; ++n)
      rows[n] = base + min(8 * n + g, work.rows - 1) * stride + first * kPiece * 2 + t * 16;
    const int all_strips = groups * STRIPS;
    float4* scratch = reinterpret_cast<float4*>(work.scratch) +
                      static_cast<int64_t>(rank) * all_strips * NT * 32 + lane;
    auto emit = [&](int s, int n, float4 sum) {
      if (work.slices == 1)
        store(work, group, s, n, sum);
      else
        __stcg(scratch + (static_cast<int64_t>(group * STRIPS + s) * NT + n) * 32, sum);
    };
    float sums[STRIPS][NT][4] = {};
    int piece = 0, turn = 0;
    for (int done = 0; done < total; done += DEPTH) {
#pragma unroll
      for (int d = 0; d < DEPTH; ++d) {
        if (done + d >= total) break;
        const bool more = done + d + DEPTH < total;
        int next = 0;
        if (more) next = advance();
        multiply(held[d], more, source, next, rows, piece * kPiece * 2, sums);
        if (++piece < pieces) continue;
        // A group's K is done: add the parts.
        piece = 0;
        float4* mine = parts_sums + ((turn & 1) * WARPS + slot * work.parts) * STRIPS * NT * 32;
#pragma unroll
        for (int s = 0; s < STRIPS; ++s) {
#pragma unroll
          for (int n = 0; n < NT; ++n) {
            const float2 back =
                *reinterpret_cast<const float2*>(undo + (part * NT + n) * 8 + 2 * t);
            float(&sum)[4] = sums[s][n];
            const float4 scaled = {sum[0] * back.x, sum[1] * back.y, sum[2] * back.x,
                                   sum[3] * back.y};
            sum[0] = sum[1] = sum[2] = sum[3] = 0.0f;
            if (work.parts == 1)
              emit(s, n, scaled);
            else
              mine[((part * STRIPS + s) * NT + n) * 32 + lane] = scaled;
          }
        }
        if (work.parts > 1) {
          asm volatile("bar.sync %0, %1;" ::"r"(slot + 1), "r"(work.parts * 32) : "memory");
          // Two buffers: who writes this one again has passed the other's barrier.
          for (int i = (part + turn) % work.parts; i < STRIPS * NT; i += work.parts) {
            float4 sum = {};
            for (int p = 0; p < work.parts; ++p) {
              const float4 one = mine[(p * STRIPS * NT + i) * 32 + lane];
              sum.x += one.x, sum.y += one.y, sum.z += one.z, sum.w += one.w;
            }
            emit(i / NT, i % NT, sum);
          }
        }
        group += step, ++turn;
      }
    }
    if (work.slices == 1) return;

    cluster_barrier();
    const int own = (groups - cluster + clusters - 1) / clusters * STRIPS * NT;
    const int64_t slice_stride = static_cast<int64_t>(all_strips) * NT * 32;
    const float4* slices = reinterpret_cast<const float4*>(work.scratch) + lane;
    for (int i = rank * WARPS + warp; i < own; i += work.slices * WARPS) {
      const int turn_group = cluster + i / (STRIPS * NT) * clusters;
      const int within = i % (STRIPS * NT);
      const float4* from = slices + (static_cast<int64_t>(turn_group) * STRIPS * NT + within) * 32;
      float4 sum = {};
      for (int slice = 0; slice < work.slices; ++slice) {
        const float4 one = __ldcg(from + slice * slice_stride);
        sum.x += one.x, sum.y += one.y, sum.z += one.z, sum.w += one.w;
      }
      store(work, turn_group, within / NT, within % NT, sum);
    }
  }

  static int shared_bytes(const Work& work) {
    const int stride = (work.pieces + work.slices - 1) / work.slices * kPiece * 2 + 64;
    const int sums = work.parts > 1 ? 2 * WARPS * STRIPS * NT * 512 : 0;
    return work.rows * stride + work.parts * 8 * NT * 4 + sums;
  }
};

template <int NT, int STRIPS, int WARPS, int DEPTH>
__global__ void __launch_bounds__(WARPS * 32, 1) multiply_rows(const __grid_constant__ Work work) {
  Kernel<NT, STRIPS, WARPS, DEPTH>::run(work);
}

struct Variant {
  void (*kernel)(Work);
  int (*shared_bytes)(const Work&);
  int warps;
};

template <int NT, int STRIPS, int WARPS, int DEPTH>
Variant variant() {
  return {multiply_rows<NT, STRIPS, WARPS, DEPTH>, Kernel<NT, STRIPS, WARPS, DEPTH>::shared_bytes,
          WARPS};
}

// By groups of 8 rows. Few rows leave registers for more weights under way.
Variant variant_of(int row_tiles) {
  switch (row_tiles) {
    case 1: return variant<1, 1, 16, 3>();
    case 2: return variant<2, 1, 16, 3>();
    default: return {};
  }
}

}  // namespace

// Clusters of `slices` CTAs that the device holds at once, negative: a cudaError_t.
extern "C" int winnow_linear_clusters(int row_tiles, int rows, int pieces, int slices, int parts) {
  const Variant chosen = variant_of(row_tiles);
  Work work = {};
  work.rows = rows, work.pieces = pieces, work.slices = slices, work.parts = parts;
  Launch launch;
  configure(launch, slices, 1, chosen.warps * 32, chosen.shared_bytes(work), false, nullptr);
  return clusters_at_once(chosen.kernel, launch);
}

// x: bf16 [rows, 128 pieces], rows 16-byte aligned, x_stride in elements. Two packed matrices with
// as many columns (the second with no strips, if there is one alone), and their outputs
// [rows, 16 strips]. row_tiles: 1 or 2 groups of 8 rows. scratch: float
// [slices * 128 * row_tiles * strips of both], not read where slices is 1. early: start before the launch before this one has ended (its results may be x, but not
// weights). Returns a cudaError_t.
extern "C" int winnow_linear_decode(
    const void* x, int64_t x_stride, int rows, int pieces, const void* codes, const void* scales,
    void* out, int strips, const void* other_codes, const void* other_scales, void* other_out,
    int other_strips, float* scratch, int row_tiles, int slices, int parts, int clusters,
    int early, cudaStream_t stream) {
  const Variant chosen = variant_of(row_tiles);
  if (chosen.kernel == nullptr || rows < 1 || rows > 8 * row_tiles || parts > chosen.warps ||
      slices < 1 || slices > kMaxSlices ||
      (parts & (parts - 1)) != 0 || slices * parts > pieces ||
      pieces > kMaxPartPieces * slices * parts || clusters < 1)
    return cudaErrorInvalidValue;
  const Work work = {
      {{static_cast<const uint8_t*>(codes), static_cast<const uint8_t*>(scales),
        static_cast<__nv_bfloat16*>(out), strips, strips * kStripRows},
       {static_cast<const uint8_t*>(other_codes), static_cast<const uint8_t*>(other_scales),
        static_cast<__nv_bfloat16*>(other_out), other_strips, other_strips * kStripRows}},
      static_cast<const uint16_t*>(x),
      x_stride,
      scratch,
      rows,
      pieces,
      slices,
      parts};
  Launch launch;
  configure(launch, slices, clusters, chosen.warps * 32, chosen.shared_bytes(work), early != 0,
            stream);
  return start(chosen.kernel, launch, work);
}

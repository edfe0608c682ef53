// linear for 9 to 64 rows of bf16 activations over packed MXFP8 weights, on Hopper (sm_90a).
//
// As decode.cu, with wgmma in place of mma: its B operand, the activations, is read from shared
// memory by the tensor core itself, once for 64 output columns, and not once a warp. Weights are
// the A operand from registers, in the order of winnow/ops/fragments_mxfp8.py: a warp of a
// warpgroup holds a strip of 16.
//
// Work. A cluster of CTAs shares quads of four strips; each CTA has its slice of K and its
// warpgroups take quads in turn. Slices are added through global memory after a barrier of the
// cluster, in the order of K. Weights are asked for before the launch waits for the one before it.
//
// Exactness. As in decode.cu, but for the scales: in a piece of 128 columns a row's codes are
// multiplied, in fp16, by 2^(s - largest s of the piece), and the piece's fp32 sum by the largest.
// That is exact where scales of a piece differ by up to 2^15; a weight below that is rounded to a
// multiple of 2^-24 of the largest scale, less than 2^-30 of the weights beside it that are not
// small.

#include "packed.cuh"

namespace {

constexpr int kQuad = 4;  // strips of a warpgroup
constexpr int kGroups = 2;  // warpgroups
constexpr int kWarps = 4 * kGroups;
constexpr int kDepth = 3;  // pieces of weights under way, a warp
constexpr int kLoads = 12;         // of 16 bytes that a lane has under way when it converts

struct Work {
  Matrix matrices[2];
  const uint16_t* x;  // bf16 [rows, K]
  int64_t x_stride;   // in elements
  float* scratch;     // [slices, strips of all quads, N / 8, 128]
  int rows;
  int pieces;  // K / 128
  int slices;  // CTAs of a cluster
};

__device__ __forceinline__ uint32_t scaled(uint32_t codes, __half2 factor) {
  const uint32_t pair = halves_of(codes);
  const __half2 product = __hmul2(*reinterpret_cast<const __half2*>(&pair), factor);
  return *reinterpret_cast<const uint32_t*>(&product);
}

__device__ __forceinline__ uint32_t largest_of(uint32_t scales) {
  return max(max(exponent_of(scales, 0), exponent_of(scales, 1)),
             max(exponent_of(scales, 2), exponent_of(scales, 3)));
}

// 2^(scale - largest), in both halves; 0 below 2^-24.
__device__ __forceinline__ __half2 factor_of(uint32_t scales, int tile, uint32_t largest) {
  const int exponent = static_cast<int>(0x3F800000u + exponent_of(scales, tile) - largest);
  return __float2half2_rn(__int_as_float(max(exponent, 0)));
}

__device__ __forceinline__ void wgmma_fence() {
  asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
}

__device__ __forceinline__ void wgmma_commit() {
  asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}

template <int LEFT>
__device__ __forceinline__ void wgmma_wait() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(LEFT) : "memory");
}

// sums (+)= a b: 64 rows of weights by N rows of activations, 16 columns of K. keep: add.
__device__ __forceinline__ void wgmma(float (&d)[8], const uint32_t (&a)[4], uint64_t b, int keep) {
  asm volatile(
      "{\n"
      ".reg .pred keep;\n"
      "setp.ne.b32 keep, %13, 0;\n"
      "wgmma.mma_async.sync.aligned.m64n16k16.f32.f16.f16 "
      "{%0, %1, %2, %3, %4, %5, %6, %7}, {%8, %9, %10, %11}, %12, keep, 1, 1, 0;\n"
      "}\n"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]),
        "+f"(d[7])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(keep));
}

__device__ __forceinline__ void wgmma(float (&d)[16], const uint32_t (&a)[4], uint64_t b,
                                      int keep) {
  asm volatile(
      "{\n"
      ".reg .pred keep;\n"
      "setp.ne.b32 keep, %21, 0;\n"
      "wgmma.mma_async.sync.aligned.m64n32k16.f32.f16.f16 "
      "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15}, "
      "{%16, %17, %18, %19}, %20, keep, 1, 1, 0;\n"
      "}\n"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]),
        "+f"(d[7]), "+f"(d[8]), "+f"(d[9]), "+f"(d[10]), "+f"(d[11]), "+f"(d[12]), "+f"(d[13]),
        "+f"(d[14]), "+f"(d[15])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(keep));
}

__device__ __forceinline__ void wgmma(float (&d)[32], const uint32_t (&a)[4], uint64_t b,
                                      int keep) {
  asm volatile(
      "{\n"
      ".reg .pred keep;\n"
      "setp.ne.b32 keep, %37, 0;\n"
      "wgmma.mma_async.sync.aligned.m64n64k16.f32.f16.f16 "
      "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "
      "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31}, "
      "{%32, %33, %34, %35}, %36, keep, 1, 1, 0;\n"
      "}\n"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]),
        "+f"(d[7]), "+f"(d[8]), "+f"(d[9]), "+f"(d[10]), "+f"(d[11]), "+f"(d[12]), "+f"(d[13]),
        "+f"(d[14]), "+f"(d[15]), "+f"(d[16]), "+f"(d[17]), "+f"(d[18]), "+f"(d[19]), "+f"(d[20]),
        "+f"(d[21]), "+f"(d[22]), "+f"(d[23]), "+f"(d[24]), "+f"(d[25]), "+f"(d[26]), "+f"(d[27]),
        "+f"(d[28]), "+f"(d[29]), "+f"(d[30]), "+f"(d[31])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(keep));
}

// Activations by rows of 128 bytes, swizzled by 128 bytes, eight rows 1,024 bytes apart.
__device__ __forceinline__ uint64_t descriptor(uint32_t address) {
  return static_cast<uint64_t>((address & 0x3FFFFu) >> 4) | 1ull << 16 | 64ull << 32 | 1ull << 62;
}

struct Strip {
  const uint8_t* codes;  // a lane's, of piece 0
  const uint8_t* scales;
};

__device__ __forceinline__ int quads_of(const Matrix& m) {
  return (m.strips + kQuad - 1) / kQuad;
}

// This warp's strip of a quad, which never reaches over the end of a matrix; the last strip again
// where there are fewer than four.
__device__ __forceinline__ Strip locate(const Work& work, int quad) {
  const int lane = threadIdx.x % 32, before = quads_of(work.matrices[0]);
  const Matrix& m = quad < before ? work.matrices[0] : work.matrices[1];
  const int first = (quad < before ? quad : quad - before) * kQuad;
  const int strip = min(first + static_cast<int>(threadIdx.x) / 32 % kQuad, m.strips - 1);
  const int64_t at = static_cast<int64_t>(strip) * work.pieces;
  return {m.codes + at * kPieceCodes + lane * 16, m.scales + at * kPieceScales + lane / 4 * 8};
}

template <int N>
struct Kernel {
  static constexpr int kBlockBytes = N * 128;

  // Strip s of a quad by activation rows 8 n .. 8 n + 7.
  static __device__ __forceinline__ void store(const Work& work, int quad, int s, int n,
                                               float4 sum) {
    const int g = threadIdx.x % 32 / 4, row = 8 * n + threadIdx.x % 4 * 2;
    const int before = quads_of(work.matrices[0]);
    const Matrix& m = quad < before ? work.matrices[0] : work.matrices[1];
    const int strip = (quad < before ? quad : quad - before) * kQuad + s;
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

  // A slice's activations as fp16 in the order of `descriptor`, and what undoes their factors.
  // EACH: 16-byte loads of a lane for one row. Several rows are under way at once.
  template <int EACH>
  static __device__ __forceinline__ void convert(const Work& work, int begin, int pieces,
                                                 uint8_t* to, float* undo) {
    constexpr int kRows = kLoads / EACH;
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, chunks = pieces * (kPiece / 8);
    for (int base = warp; base < work.rows; base += kRows * kWarps) {
      uint4 held[kRows][EACH];
#pragma unroll
      for (int r = 0; r < kRows; ++r) {
        const int row = min(base + r * kWarps, work.rows - 1);
        const uint4* from = reinterpret_cast<const uint4*>(work.x + row * work.x_stride) +
                            begin * (kPiece / 8);
#pragma unroll
        for (int i = 0; i < EACH; ++i)
          held[r][i] = 32 * i + lane < chunks ? from[32 * i + lane] : uint4{};
      }
#pragma unroll
      for (int r = 0; r < kRows; ++r) {
        const int row = base + r * kWarps;
        uint32_t largest = 0;
#pragma unroll
        for (int i = 0; i < EACH; ++i) {
          for (uint32_t word : {held[r][i].x, held[r][i].y, held[r][i].z, held[r][i].w}) {
            const uint32_t low = word & 0x7FFFu, high = word >> 16 & 0x7FFFu;
            largest = max(largest, low < 0x7F80u ? low : 0u);
            largest = max(largest, high < 0x7F80u ? high : 0u);
          }
        }
        // At most 2^126, so that its inverse is a normal number.
        const uint32_t exponent = min(253u, 268u - (__reduce_max_sync(kAll, largest) >> 7));
        const float factor = __uint_as_float(exponent << 23);
        if (row >= work.rows) continue;
        if (lane == 0) undo[row] = __uint_as_float((254 - exponent) << 23);
        uint8_t* place = to + row / 8 * 1024 + row % 8 * 128;
#pragma unroll
        for (int i = 0; i < EACH; ++i) {
          const int chunk = 32 * i + lane;
          uint32_t words[4] = {held[r][i].x, held[r][i].y, held[r][i].z, held[r][i].w};
#pragma unroll
          for (uint32_t& word : words) {
            const __half2 pair = __floats2half2_rn(__uint_as_float(word << 16) * factor,
                                                   __uint_as_float(word & 0xFFFF0000u) * factor);
            word = *reinterpret_cast<const uint32_t*>(&pair);
          }
          if (chunk < chunks)
            *reinterpret_cast<uint4*>(place + chunk / 8 * kBlockBytes + (chunk % 8 ^ row % 8) * 16) =
                {words[0], words[1], words[2], words[3]};
        }
      }
    }
  }

  // Adds a piece's products to `sums`, and fills what it held with a later piece (if `more`) as
  // soon as registers are free.
  static __device__ __forceinline__ void multiply(Held& held, bool more, const Strip& from,
                                                  int piece, uint32_t address,
                                                  float (&sums)[N / 2]) {
    const uint2 scales = held.scales;
    load_scales(held.scales, from.scales + piece * kPieceScales, more);
    const uint32_t upper = largest_of(scales.x), lower = largest_of(scales.y);
    float products[N / 2];
    uint32_t a[2][2][4];
#pragma unroll
    for (int i = 0; i < kTiles; ++i) {
      const __half2 first = factor_of(scales.x, i, upper), second = factor_of(scales.y, i, lower);
      const uint4 w = held.codes[i];
      // The product of two tiles ago has read its registers.
      if (i >= 2) wgmma_wait<1>();
      uint32_t(&now)[2][4] = a[i % 2];
      now[0][0] = scaled(w.x, first), now[0][1] = scaled(w.x >> 16, second);
      now[0][2] = scaled(w.y, first), now[0][3] = scaled(w.y >> 16, second);
      now[1][0] = scaled(w.z, first), now[1][1] = scaled(w.z >> 16, second);
      now[1][2] = scaled(w.w, first), now[1][3] = scaled(w.w >> 16, second);
      load_codes(held.codes[i], from.codes + piece * kPieceCodes + i * kTileBytes, more);
      const uint64_t b = descriptor(address + i / 2 * kBlockBytes + i % 2 * 64);
      wgmma_fence();
      wgmma(products, now[0], b, i > 0);
      wgmma(products, now[1], b + 2, 1);
      wgmma_commit();
    }
    wgmma_wait<0>();
    const float up = __uint_as_float(upper), low = __uint_as_float(lower);
#pragma unroll
    for (int j = 0; j < N / 2; j += 4) {
      sums[j] = fmaf(products[j], up, sums[j]), sums[j + 1] = fmaf(products[j + 1], up, sums[j + 1]);
      sums[j + 2] = fmaf(products[j + 2], low, sums[j + 2]);
      sums[j + 3] = fmaf(products[j + 3], low, sums[j + 3]);
    }
  }

  static __device__ __forceinline__ void run(const Work& work) {
    extern __shared__ __align__(1024) uint8_t shared[];
    asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, t = lane % 4;
    const int rank = blockIdx.x % work.slices;
    const int cluster = blockIdx.x / work.slices, clusters = gridDim.x / work.slices;
    const int begin = work.pieces * rank / work.slices;
    const int pieces = work.pieces * (rank + 1) / work.slices - begin;
    const int quads = quads_of(work.matrices[0]) + quads_of(work.matrices[1]);
    const int blocks = 2 * ((work.pieces + work.slices - 1) / work.slices);
    float* undo = reinterpret_cast<float*>(shared + blocks * kBlockBytes);

    // The warpgroup's quads of this cluster: quad, quad + step, ...
    int quad = cluster + warp / 4 * clusters;
    const int step = kGroups * clusters;
    const int turns = quad < quads ? (quads - quad + step - 1) / step : 0;
    const int total = turns * pieces;
    Held held[kDepth] = {};
    Strip source = {};
    int next_quad = quad, next_piece = 0;
    // Moves on to the next piece to be asked for; its place within K.
    auto advance = [&]() {
      if (next_piece == 0) source = locate(work, next_quad), next_quad += step;
      const int piece = begin + next_piece;
      next_piece = next_piece + 1 == pieces ? 0 : next_piece + 1;
      return piece;
    };
#pragma unroll
    for (int d = 0; d < kDepth; ++d) {
      if (d < total) {
        const int piece = advance();
        load_scales(held[d].scales, source.scales + piece * kPieceScales, true);
#pragma unroll
        for (int i = 0; i < kTiles; ++i)
          load_codes(held[d].codes[i], source.codes + piece * kPieceCodes + i * kTileBytes, true);
      }
    }
    asm volatile("griddepcontrol.wait;" ::: "memory");
    const int each = (pieces * (kPiece / 8) + 31) / 32;
    if (each <= 3)
      convert<3>(work, begin, pieces, shared, undo);
    else if (each <= 6)
      convert<6>(work, begin, pieces, shared, undo);
    else
      convert<12>(work, begin, pieces, shared, undo);
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
    __syncthreads();

    const uint32_t base = static_cast<uint32_t>(__cvta_generic_to_shared(shared));
    float4* scratch = reinterpret_cast<float4*>(work.scratch) + lane;
    const int64_t slice_stride = static_cast<int64_t>(quads) * kQuad * (N / 8) * 32;
    float sums[N / 2] = {};
    int piece = 0;
    for (int done = 0; done < total; done += kDepth) {
#pragma unroll
      for (int d = 0; d < kDepth; ++d) {
        if (done + d >= total) break;
        const bool more = done + d + kDepth < total;
        int next = 0;
        if (more) next = advance();
        multiply(held[d], more, source, next, base + piece * 2 * kBlockBytes, sums);
        if (++piece < pieces) continue;
        piece = 0;
        float4* place = scratch + rank * slice_stride +
                        static_cast<int64_t>(quad * kQuad + warp % 4) * (N / 8) * 32;
#pragma unroll
        for (int n = 0; n < N / 8; ++n) {
          const float2 back = *reinterpret_cast<const float2*>(undo + 8 * n + 2 * t);
          const float4 sum = {sums[4 * n] * back.x, sums[4 * n + 1] * back.y,
                              sums[4 * n + 2] * back.x, sums[4 * n + 3] * back.y};
          sums[4 * n] = sums[4 * n + 1] = sums[4 * n + 2] = sums[4 * n + 3] = 0.0f;
          if (work.slices == 1)
            store(work, quad, warp % 4, n, sum);
          else
            __stcg(place + n * 32, sum);
        }
        quad += step;
      }
    }
    if (work.slices == 1) return;

    cluster_barrier();
    const int own = (quads - cluster + clusters - 1) / clusters * kQuad * (N / 8);
    for (int i = rank * kWarps + warp; i < own; i += work.slices * kWarps) {
      const int at = cluster + i / (kQuad * (N / 8)) * clusters, within = i % (kQuad * (N / 8));
      const float4* from = scratch + (static_cast<int64_t>(at) * kQuad * (N / 8) + within) * 32;
      float4 sum = {};
      for (int slice = 0; slice < work.slices; ++slice) {
        const float4 one = __ldcg(from + slice * slice_stride);
        sum.x += one.x, sum.y += one.y, sum.z += one.z, sum.w += one.w;
      }
      store(work, at, within / (N / 8), within % (N / 8), sum);
    }
  }
};

template <int N>
__global__ void __launch_bounds__(kWarps * 32, 1) multiply_rows(const __grid_constant__ Work work) {
  Kernel<N>::run(work);
}

using Kernels = void (*)(Work);

Kernels kernel_of(int columns) {
  return columns == 16   ? multiply_rows<16>
         : columns == 32 ? multiply_rows<32>
         : columns == 64 ? multiply_rows<64>
                         : nullptr;
}

int shared_bytes(int columns, int pieces, int slices) {
  return 2 * ((pieces + slices - 1) / slices) * columns * 128 + columns * 4;
}

}  // namespace

// Clusters of `slices` CTAs that the device holds at once; negative: a cudaError_t.
extern "C" int winnow_linear_wide_clusters(int columns, int pieces, int slices) {
  Launch launch;
  configure(launch, slices, 1, kWarps * 32, shared_bytes(columns, pieces, slices), false, nullptr);
  return clusters_at_once(kernel_of(columns), launch);
}

// As winnow_linear_decode. columns: 16, 32 or 64, at least the rows. scratch: float
// [slices * 16 * columns * (strips of both, each rounded up to a multiple of 4)].
extern "C" int winnow_linear_wide(const void* x, int64_t x_stride, int rows, int pieces,
                                  const void* codes, const void* scales, void* out, int strips,
                                  const void* other_codes, const void* other_scales,
                                  void* other_out, int other_strips, float* scratch, int columns,
                                  int slices, int clusters, int early, cudaStream_t stream) {
  const Kernels kernel = kernel_of(columns);
  if (kernel == nullptr || rows < 1 || rows > columns || slices < 1 ||
      slices > kMaxSlices || slices > pieces ||
      (pieces + slices - 1) / slices * (kPiece / 8) > 32 * kLoads || clusters < 1)
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
      slices};
  Launch launch;
  configure(launch, slices, clusters, kWarps * 32, shared_bytes(columns, pieces, slices),
            early != 0, stream);
  return start(kernel, launch, work);
}

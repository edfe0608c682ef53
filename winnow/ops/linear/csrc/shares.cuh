// Shares of tiles whose K several CTAs divide, in scratch memory: whose they are and their
// addition. Knows nothing of products.

#pragma once

#include "product.cuh"

namespace {

// Tiles that are split, from piece `from` on, which leaves `pieces` of each, and who has which of
// these units. Members are numbered from 0.
struct Split {
  int first, tiles, from, pieces, members;

  // First unit of a member's range.
  __device__ __forceinline__ int begin(int member) const {
    return static_cast<uint32_t>(tiles * pieces) * member / members;
  }

  // The member whose range has the unit.
  __device__ __forceinline__ int owner(int unit) const {
    return (static_cast<uint32_t>(unit + 1) * members - 1) /
           static_cast<uint32_t>(tiles * pieces);
  }
};

// The shares of a split tile. They are numbered by tile, then by member: from one to the next
// either is another, so a share's number is both together.
struct Shares {
  int first, count;

  __device__ __forceinline__ Shares(const Split& split, int tile) {
    const int within = tile - split.first, begin = within * split.pieces;
    const int member = split.owner(begin);
    first = within + member;
    count = split.owner(begin + split.pieces - 1) - member + 1;
  }
};

// Adds COUNT eights of rows of shares, in the order of K, AT_ONCE being asked for at once. from: a
// lane's place in the first; apart: from one share to the next.
template <int COUNT, int AT_ONCE>
__device__ __forceinline__ void add_shares(const float4* from, int64_t apart, int shares,
                                           float4 (&sums)[COUNT]) {
#pragma unroll 1
  for (int done = 0; done < shares; done += AT_ONCE) {
    float4 some[AT_ONCE][COUNT];
#pragma unroll
    for (int i = 0; i < AT_ONCE; ++i)
#pragma unroll
      for (int n = 0; n < COUNT; ++n)
        some[i][n] =
            done + i < shares ? __ldcg(from + (done + i) * apart + n * 32) : float4{};
#pragma unroll
    for (int i = 0; i < AT_ONCE; ++i)
#pragma unroll
      for (int n = 0; n < COUNT; ++n) {
        sums[n].x += some[i][n].x, sums[n].y += some[i][n].y;
        sums[n].z += some[i][n].z, sums[n].w += some[i][n].w;
      }
  }
}

// What others count up; nothing of what they did before need be seen yet.
__device__ __forceinline__ int load_relaxed(const int* from) {
  int v;
  asm volatile("ld.relaxed.gpu.global.s32 %0, [%1];" : "=r"(v) : "l"(from) : "memory");
  return v;
}

constexpr int kAddWarps = 8;
constexpr int kAddEights = 4;

// Adds the shares of split tiles, one for each blockIdx.y. A warp: some eights of a strip's rows.
// strips: of a tile at most; eights: of rows.
__global__ void __launch_bounds__(kAddWarps * 32)
    add_parts(const __grid_constant__ Work work, const Split split, int strips, int eights) {
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
  const int tile = split.first + blockIdx.y;
  const Shares shares(split, tile);
  const int item = (blockIdx.x * kAddWarps + threadIdx.x / 32) * kAddEights;
  if (shares.count == 1 || item >= strips * eights) return;
  const int row = (tile % work.row_tiles * eights + item % eights) * 8;
  const Strip strip = strip_of(work, tile, item / eights);
  if (!strip.there || row >= work.rows) return;
  const int64_t apart = static_cast<int64_t>(strips) * eights * 32;
  asm volatile("griddepcontrol.wait;" ::: "memory");
  float4 sums[kAddEights] = {};
  add_shares<kAddEights, 4>(work.scratch + shares.first * apart + item * 32 + threadIdx.x % 32,
                            apart, shares.count, sums);
#pragma unroll
  for (int n = 0; n < kAddEights; ++n)
    store(*strip.matrix, work.rows, strip.number, row + 8 * n, sums[n]);
}

// How far the addition of shares is that goes on while others multiply.
struct Count {
  int members;  // whose shares are all there
  int items;    // taken to be added up
};

// Nothing behind this starts its work before the launch before has ended: it is taken for that one.
__global__ void __launch_bounds__(32) clear(Count* count) {
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
  asm volatile("griddepcontrol.wait;" ::: "memory");
  if (threadIdx.x == 0) *count = {0, 0};
}

// Whether a barrier's phase of this parity is over.
__device__ __forceinline__ bool barrier_is_over(uint32_t bar, int parity) {
  uint32_t over;
  asm volatile(
      "{\n"
      ".reg .pred over;\n"
      "mbarrier.test_wait.parity.shared::cta.b64 over, [%1], %2;\n"
      "selp.u32 %0, 1, 0, over;\n"
      "}\n"
      : "=r"(over)
      : "r"(bar), "r"(parity)
      : "memory");
  return over != 0;
}

}  // namespace

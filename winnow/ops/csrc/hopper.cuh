// Hopper's instructions that several ops' kernels are made of: barriers in shared memory, what the
// copy engine brings, and the order of a warpgroup's products. Knows nothing of what they are for.

#pragma once

#include <cuda.h>
#include <cuda_runtime.h>

#include <cstdint>

namespace {

// compute-sanitizer's racecheck follows a barrier's arrivals by thread: in the build for it every
// lane arrives for itself where else one does for its warp.
#ifdef WINNOW_EVERY_LANE_ARRIVES
constexpr bool kEveryLane = true;
#else
constexpr bool kEveryLane = false;
#endif
constexpr int kWarpArrivals = kEveryLane ? 32 : 1;  // of a warp, as a barrier counts them

__device__ __forceinline__ uint32_t shared_address(const void* p) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(p));
}

// Barriers of this CTA, by their addresses.
__device__ __forceinline__ void barrier_init(uint32_t bar, int arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(bar), "r"(arrivals));
}

__device__ __forceinline__ void barrier_arrive(uint32_t bar) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(bar) : "memory");
}

__device__ __forceinline__ void barrier_expect(uint32_t bar, int bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(bar), "r"(bytes)
               : "memory");
}

__device__ __forceinline__ void barrier_wait(uint32_t bar, int parity) {
  asm volatile(
      "{\n"
      ".reg .pred done;\n"
      "again:\n"
      "mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
      "@!done bra again;\n"
      "}\n" ::"r"(bar),
      "r"(parity)
      : "memory");
}

// The same by themselves.
__device__ __forceinline__ void barrier_init(const uint64_t& bar, int arrivals) {
  barrier_init(shared_address(&bar), arrivals);
}

__device__ __forceinline__ void barrier_arrive(const uint64_t& bar) {
  barrier_arrive(shared_address(&bar));
}

__device__ __forceinline__ void barrier_expect(const uint64_t& bar, int bytes) {
  barrier_expect(shared_address(&bar), bytes);
}

__device__ __forceinline__ void barrier_wait(const uint64_t& bar, int parity) {
  barrier_wait(shared_address(&bar), parity);
}

// Barriers that were made are seen by the copy engine and by the cluster's other CTAs.
__device__ __forceinline__ void barriers_made() {
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}

__device__ __forceinline__ void bulk_load(uint32_t to, const void* from, int bytes, uint32_t bar) {
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];"
      ::"r"(to), "l"(from), "r"(bytes), "r"(bar)
      : "memory");
}

// A box of the map at (column, row).
__device__ __forceinline__ void tensor_load(uint32_t to, const CUtensorMap& map, int column,
                                            int row, uint32_t bar) {
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes "
      "[%0], [%1, {%2, %3}], [%4];" ::"r"(to),
      "l"(&map), "r"(column), "r"(row), "r"(bar)
      : "memory");
}

// Has the map fetched before its first use.
__device__ __forceinline__ void tensor_prefetch(const CUtensorMap& map) {
  asm volatile("prefetch.tensormap [%0];" ::"l"(&map) : "memory");
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

// Four E4M3 bytes as two pairs of fp16, exactly: the conversion takes either half of a register as it
// is, where one is asked for by its name.
__device__ __forceinline__ void from_e4m3(uint32_t four, uint32_t& low, uint32_t& high) {
  asm("{\n"
      ".reg .b16 l, h;\n"
      "mov.b32 {l, h}, %2;\n"
      "cvt.rn.f16x2.e4m3x2 %0, l;\n"
      "cvt.rn.f16x2.e4m3x2 %1, h;\n"
      "}\n"
      : "=r"(low), "=r"(high)
      : "r"(four));
}

using Encode = CUresult (*)(CUtensorMap*, CUtensorMapDataType, cuuint32_t, void*, const cuuint64_t*,
                            const cuuint64_t*, const cuuint32_t*, const cuuint32_t*,
                            CUtensorMapInterleave, CUtensorMapSwizzle, CUtensorMapL2promotion,
                            CUtensorMapFloatOOBfill);

// The driver's function that describes a tensor to the copy engine: libraries need no libcuda.
cudaError_t find_encode(Encode* encode) {
  static Encode found = nullptr;
  if (found == nullptr) {
    void* function = nullptr;
    cudaDriverEntryPointQueryResult result;
#if CUDART_VERSION >= 12050
    const cudaError_t error = cudaGetDriverEntryPointByVersion(
        "cuTensorMapEncodeTiled", &function, 12000, cudaEnableDefault, &result);
#else
    const cudaError_t error =
        cudaGetDriverEntryPoint("cuTensorMapEncodeTiled", &function, cudaEnableDefault, &result);
#endif
    if (error != cudaSuccess) return error;
    if (result != cudaDriverEntryPointSuccess) return cudaErrorNotSupported;
    found = reinterpret_cast<Encode>(function);
  }
  *encode = found;
  return cudaSuccess;
}

}  // namespace

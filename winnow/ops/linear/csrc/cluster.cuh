// What the CTAs of a cluster say and send to each other. Knows nothing of what is sent.

#pragma once

#include <cstdint>

namespace {

__device__ __forceinline__ void cluster_arrive() {
  asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory");
}

// Publishes nothing but barriers that were made.
__device__ __forceinline__ void cluster_arrive_relaxed() {
  asm volatile("barrier.cluster.arrive.relaxed.aligned;" ::: "memory");
}

__device__ __forceinline__ void cluster_wait() {
  asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory");
}

// The address that the cluster's CTA `rank` has at `here`.
__device__ __forceinline__ uint32_t address_there(uint32_t here, int rank) {
  uint32_t there;
  asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(there) : "r"(here), "r"(rank));
  return there;
}

// 16 bytes into another CTA's shared memory.
__device__ __forceinline__ void send(uint32_t there, float4 v) {
  asm volatile("st.shared::cluster.v4.f32 [%0], {%1, %2, %3, %4};" ::"r"(there), "f"(v.x),
               "f"(v.y), "f"(v.z), "f"(v.w)
               : "memory");
}

// The same, counted by that CTA's barrier.
__device__ __forceinline__ void send(uint32_t there, float4 v, uint32_t bar_there) {
  asm volatile(
      "st.async.shared::cluster.mbarrier::complete_tx::bytes.v4.f32 [%0], {%1, %2, %3, %4}, [%5];"
      ::"r"(there), "f"(v.x), "f"(v.y), "f"(v.z), "f"(v.w), "r"(bar_there)
      : "memory");
}

// Many at once from this CTA's shared memory; what threads wrote there needs a proxy fence first.
__device__ __forceinline__ void bulk_send(uint32_t there, uint32_t from, int bytes,
                                          uint32_t bar_there) {
  asm volatile(
      "cp.async.bulk.shared::cluster.shared::cta.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];"
      ::"r"(there), "r"(from), "r"(bytes), "r"(bar_there)
      : "memory");
}

__device__ __forceinline__ void write_sum(uint32_t to, float4 v) {
  asm volatile("st.shared.v4.f32 [%0], {%1, %2, %3, %4};" ::"r"(to), "f"(v.x), "f"(v.y), "f"(v.z),
               "f"(v.w)
               : "memory");
}

__device__ __forceinline__ float4 read_sum(uint32_t from) {
  float4 v;
  asm volatile("ld.shared.v4.f32 {%0, %1, %2, %3}, [%4];"
               : "=f"(v.x), "=f"(v.y), "=f"(v.z), "=f"(v.w)
               : "r"(from));
  return v;
}

}  // namespace

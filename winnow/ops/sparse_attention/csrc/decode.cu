// Attention of single query rows over selected blocks of a paged cache, on Hopper (sm_90).
//
// A cluster serves one (row, KV head): its query heads are the M = 16 rows of mma.m16n8k16 (fp32
// sums). A block's K and V are one contiguous piece of a page row, brought by bulk copies a stage
// at a time; each of four warps takes a quarter of a stage's tokens. A CTA is one such group of
// warps, or two that take blocks in turn where a multiprocessor has room for them. With many pairs
// a cluster is one CTA; with few, its CTAs share the pair's blocks and push their results into each
// other's shared memory. Nothing stays in global memory between launches.
//
// What hangs on the storage format is in decode_nvfp4.cuh and decode_wide.cuh.

#include <algorithm>

#include "decode_nvfp4.cuh"
#include "decode_queries.cuh"
#include "decode_wide.cuh"

namespace {

// Where lane (g, t) writes and a reader finds float4 `chunk` of a head's 128 sums: bank conflicts
// between the heads g, g + 1 and the four t go away.
__device__ __forceinline__ int place(int head, int chunk) {
  return head * (kDim / 4) + (chunk ^ (((chunk >> 3) + 4 * (head & 1)) & 7));
}

__device__ __forceinline__ float4 operator*(float s, float4 v) {
  return make_float4(s * v.x, s * v.y, s * v.z, s * v.w);
}

__device__ __forceinline__ void add(float4& sum, float4 v) {
  sum.x += v.x, sum.y += v.y, sum.z += v.z, sum.w += v.w;
}

__device__ __forceinline__ void store(__nv_bfloat16* out, float4 v) {
  const __nv_bfloat162 low = __floats2bfloat162_rn(v.x, v.y), high = __floats2bfloat162_rn(v.z, v.w);
  uint2 both;
  both.x = reinterpret_cast<const uint32_t&>(low);
  both.y = reinterpret_cast<const uint32_t&>(high);
  *reinterpret_cast<uint2*>(out) = both;
}

__device__ __forceinline__ void store(float* out, float4 v) { *reinterpret_cast<float4*>(out) = v; }

template <typename Out>
__device__ __forceinline__ void finish(Out* out, int chunk, const Params& p, float4 o, float l) {
  const float over = l == 0.0f ? 0.0f : 1.0f / l;
  // A sum of nothing is +0 whatever the sign of the scale.
  float4 v = p.value_scale * (over * o);
  add(v, make_float4(0.0f, 0.0f, 0.0f, 0.0f));
  if (chunk / 32 < p.group) store(out + 4 * chunk, v);
}

// Of PARTS partial results, one a lane with its largest score and sum of weights: `m` and `l` of
// all together, and the weight of this lane's.
template <int PARTS>
__device__ __forceinline__ float weigh(float own_m, float own_l, float& m, float& l) {
  m = own_m;
#pragma unroll
  for (int i = 1; i < PARTS; i *= 2) m = fmaxf(m, __shfl_xor_sync(kAll, m, i));
  const float weight = exp2_approx(own_m - m);
  l = weight * own_l;
#pragma unroll
  for (int i = 1; i < PARTS; i *= 2) l += __shfl_xor_sync(kAll, l, i);
  return weight;
}

// MANY pairs: each has one CTA, and F::kCtas share a multiprocessor. Else kRoomy do, whose warps
// have more registers.
template <typename F, typename Out, int GROUPS, bool MANY>
__global__ void __launch_bounds__(32 * kWarps * GROUPS, (MANY ? F::kCtas : kRoomy) / GROUPS)
    decode(const Params p) {
  constexpr int kTeam = GROUPS * kWarps;
  constexpr int kParts = kBlock / F::kStageTokens;  // stages of a block
  extern __shared__ __align__(128) uint8_t memory[];
  auto& shared = *reinterpret_cast<Shared<F, GROUPS>*>(memory);
  auto& inbox = *reinterpret_cast<Inbox*>(memory + kAlone<F, GROUPS>);
  int splits = 1, rank = 0;
  if constexpr (!MANY) {
    asm("mov.u32 %0, %%cluster_nctaid.x;" : "=r"(splits));
    asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
  }
  const int pair = blockIdx.x / splits;
  const int head = pair % p.kv_heads;
  const int64_t row = pair / p.kv_heads;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
  // The same in every lane: by a shuffle the compiler sees it.
  const int group = GROUPS == 1 ? 0 : __shfl_sync(kAll, warp / kWarps, 0);
  const uint32_t full = shared_address(shared.full[group]);
  const uint32_t left = shared_address(shared.left[group]);
  const uint32_t stages = shared_address(shared.stages[group]);

  if (threadIdx.x == 0) {
    for (int i = 0; i < GROUPS * kStages; ++i) {
      barrier_init(shared_address(&shared.full[0][i]), 1);
      shared.leavers[0][i] = 0;
      if (kEveryLane) barrier_init(shared_address(&shared.left[0][i]), 32 * kWarps);
    }
    barrier_init(shared_address(&shared.merged), 1);
    barriers_made();
    barrier_expect(shared_address(&shared.merged), sizeof(Inbox));
    // While the launch before this one runs: what is read first after the wait, and the constants
    // that say where it lies.
    prefetch(p.ids + pair * int64_t{p.topk});
    prefetch(p.positions + row);
    prefetch(p.row_request + row);
    prefetch(p.kv_lens);
    prefetch(p.block_tables);
    prefetch(p.q + row * p.q_row + head * p.group * p.q_head);
  }
  __syncthreads();
  if (splits > 1) asm volatile("barrier.cluster.arrive.relaxed.aligned;" ::: "memory");
  // The launch may begin before the one before it has ended (see `launch`).
  asm volatile("griddepcontrol.wait;" ::: "memory");
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");

  // Lane i knows the i-th block of this group: those of all ranks take blocks in turn.
  const int nth = rank * GROUPS + group + lane * splits * GROUPS;
  const int64_t id = nth < p.topk ? p.ids[pair * int64_t{p.topk} + nth] : -1;
  const int64_t position = p.positions[row], request = p.row_request[row];
  const bool listed = id >= 0 && id * kBlock <= position && id < p.table_width;
  // Both asked for at once: the copies wait for two loads, one after another, and not for three.
  const int64_t kv_len = p.kv_lens[request];
  const int64_t page = listed ? p.block_tables[request * p.table_width + id] : 0;
  const bool visible = listed && kv_len > 0;
  const int count = __popc(__ballot_sync(kAll, visible));
  const int last_limit = __shfl_sync(
      kAll, static_cast<int>(min(position + 1 - id * kBlock, int64_t{kBlock})), max(count - 1, 0));
  const int parts = (last_limit + F::kStageTokens - 1) / F::kStageTokens;  // of the last block
  const int total = count ? (count - 1) * kParts + parts : 0;
  if (warp == group * kWarps) {
    const uint8_t* source = nullptr;
    if (visible) {
      source = p.pages + page * p.page_bytes + head * p.head_bytes;
      shared.sources[group][lane] = source;
    }
    if constexpr (F::kOneCopy) {
      if (lane < min(kStages, total)) {
        F::fetch(stages + lane * F::kStageBytes, source, 0, full + 8 * lane);
      }
    } else {
#pragma unroll
      for (int i = 0; i < kStages; ++i) {
        const auto* block = reinterpret_cast<const uint8_t*>(
            __shfl_sync(kAll, reinterpret_cast<uint64_t>(source), i / kParts));
        if (i < total) F::fetch(stages + i * F::kStageBytes, block, i % kParts, full + 8 * i);
      }
    }
  }
  float c[2];
  prepare_queries(p, shared, row, head, c);

  const uint32_t queries = shared_address(&shared.queries[0][lane]);
  const auto at = F::template lane<GROUPS>(p);
  Running r;
  for (int i = 0; i < total - 1; ++i) {
    const int slot = i % kStages;
    barrier_wait(full + 8 * slot, (i / kStages) & 1);
    F::template attend<GROUPS, false, MANY>(stages + slot * F::kStageBytes, F::kStageTokens,
                                            queries, at, c, r);
    if (kEveryLane) barrier_arrive(left + 8 * slot);
    __syncwarp();
    constexpr bool kOne = F::kOneCopy;
    if (i + kStages < total && (!kOne || lane == 0)) {
      // The last warp to leave a slot refills it. racecheck does not follow the counter that says
      // which is the last: in its build every lane also arrives at a barrier of the slot.
      uint32_t before = 0;
      if (lane == 0) {
        asm volatile("atom.acq_rel.cta.shared::cta.inc.u32 %0, [%1], %2;"
                     : "=r"(before)
                     : "r"(shared_address(&shared.leavers[group][slot])), "n"(kWarps - 1)
                     : "memory");
      }
      if constexpr (!kOne) before = __shfl_sync(kAll, before, 0);
      if (before == kWarps - 1) {
        if (kEveryLane) barrier_wait(left + 8 * slot, (i / kStages) & 1);
        const int next = i + kStages;
        F::fetch(stages + slot * F::kStageBytes, shared.sources[group][next / kParts],
                 next % kParts, full + 8 * slot);
      }
    }
  }
  // The last stage, which may have tokens that the row does not see, has code of its own: every
  // other one goes without asking.
  if (total > 0) {
    const int slot = (total - 1) % kStages;
    barrier_wait(full + 8 * slot, ((total - 1) / kStages) & 1);
    F::template attend<GROUPS, true, MANY>(stages + slot * F::kStageBytes,
                                           last_limit - (parts - 1) * F::kStageTokens, queries, at,
                                           c, r);
  }

  // Merge the warps.
  __syncthreads();
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    const int member = g + 8 * h;
    if (t == 0) shared.m[warp][member] = r.m[h], shared.l[warp][member] = r.l[2 * h];
#pragma unroll
    for (int n = 0; n < 8; ++n) {
      const int j = F::tile(n), e = 2 * h + F::column(n);
      shared.sums[warp][place(member, F::chunk(t, n))] =
          make_float4(r.o[j][e], r.o[j + 1][e], r.o[j + 2][e], r.o[j + 3][e]);
    }
  }
  __syncthreads();
  Out* out = static_cast<Out*>(p.out) + int64_t{pair} * p.group * kDim;
  const int heads = kHeads >> (__ffs(splits) - 1);  // that each CTA writes
  // The other CTAs' inboxes are ready once they have begun.
  if (splits > 1) asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory");
  // A warp's heads are every kTeam-th. Half a warp weighs all warps' parts of them.
  const int part = lane % kTeam, weighed = warp + lane % kHeads / kTeam * kTeam;
  float m, l;
  const float weight = weigh<kTeam>(shared.m[part][weighed], shared.l[part][weighed], m, l);
#pragma unroll
  for (int n = 0; n < kHeads / kTeam; ++n) {
    const int member = warp + n * kTeam, from = place(member, lane);
    float4 o = make_float4(0, 0, 0, 0);
#pragma unroll
    for (int w = 0; w < kTeam; ++w) {
      add(o, __shfl_sync(kAll, weight, n * kTeam + w) * shared.sums[w][from]);
    }
    const float all_m = __shfl_sync(kAll, m, n * kTeam), all_l = __shfl_sync(kAll, l, n * kTeam);
    if (splits == 1) {
      finish(out, 32 * member + lane, p, o, all_l);
    } else {
      const int owner = member * splits / kHeads, to = rank * heads + (member & (heads - 1));
      const uint32_t bar = at_rank(shared_address(&shared.merged), owner);
      push(at_rank(shared_address(&inbox.sums[32 * to + lane]), owner), o, bar);
      if (lane == 0) {
        push(at_rank(shared_address(&inbox.weights[to]), owner), make_float2(all_m, all_l), bar);
      }
    }
  }
  if (splits == 1) return;

  // Merge the CTAs: each writes its share.
  barrier_wait_cluster(shared_address(&shared.merged), 0);
  for (int member = warp; member < heads; member += kTeam) {
    const int sender = lane % kHeads;
    float2 own = make_float2(kNothing, 0.0f);
    if (sender < splits) own = inbox.weights[sender * heads + member];
    const float weight = weigh<kHeads>(own.x, own.y, m, l);
    float4 o = make_float4(0, 0, 0, 0);
#pragma unroll 2
    for (int from = 0; from < splits; ++from) {
      add(o, __shfl_sync(kAll, weight, from) * inbox.sums[32 * (from * heads + member) + lane]);
    }
    finish(out, 32 * (rank * heads + member) + lane, p, o, l);
  }
}

// The even share of a multiprocessor in `ctas`, the bytes of shared memory of which it holds no
// more than that many, and the most that a CTA may have. A launch begins as the one before it
// leaves, on some multiprocessors sooner than on others, and those would take more CTAs than their
// share.
struct Share {
  int ctas, bytes, most;
};

cudaError_t even_share(int ctas, Share* share) {
  int device, processors, available, reserved;
  cudaError_t error = cudaGetDevice(&device);
  if (error != cudaSuccess) return error;
  const auto get = [&](int* value, cudaDeviceAttr attribute) {
    if (error == cudaSuccess) error = cudaDeviceGetAttribute(value, attribute, device);
  };
  get(&processors, cudaDevAttrMultiProcessorCount);
  get(&available, cudaDevAttrMaxSharedMemoryPerMultiprocessor);
  get(&reserved, cudaDevAttrReservedSharedMemoryPerBlock);
  get(&share->most, cudaDevAttrMaxSharedMemoryPerBlockOptin);
  if (error != cudaSuccess) return error;
  share->ctas = (ctas + processors - 1) / processors;
  share->bytes = std::min(available / (share->ctas + 1) + 1 - reserved, share->most);
  return cudaSuccess;
}

template <typename F, typename Out, int GROUPS, bool MANY>
cudaError_t launch(const Params& p, int splits, const Share& share, cudaStream_t stream) {
  constexpr int kShared = kAlone<F, GROUPS>;
  auto* kernel = decode<F, Out, GROUPS, MANY>;
  cudaError_t error =
      cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, share.most);
  if (error == cudaSuccess) {
    error = cudaFuncSetAttribute(kernel, cudaFuncAttributeNonPortableClusterSizeAllowed, 1);
  }
  if (error != cudaSuccess) return error;
  cudaLaunchAttribute attributes[2];
  // The kernel itself waits for the one before it, and lets the next begin.
  attributes[0].id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attributes[0].val.programmaticStreamSerializationAllowed = 1;
  attributes[1].id = cudaLaunchAttributeClusterDimension;
  attributes[1].val.clusterDim = {static_cast<unsigned>(splits), 1, 1};
  cudaLaunchConfig_t config = {};
  config.gridDim = dim3(p.pairs * splits);
  config.blockDim = dim3(32 * kWarps * GROUPS);
  // A cluster needs as many free multiprocessors side by side: it must not be kept from sharing.
  config.dynamicSmemBytes =
      splits > 1 ? kShared + int{sizeof(Inbox)} : std::max(kShared, share.bytes);
  config.stream = stream;
  config.attrs = attributes;
  config.numAttrs = MANY ? 1 : 2;
  return cudaLaunchKernelEx(&config, kernel, p);
}

template <typename F, typename Out, int GROUPS>
cudaError_t launch(const Params& p, int splits, cudaStream_t stream) {
  Share share;
  const cudaError_t error = even_share(p.pairs, &share);
  if (error != cudaSuccess) return error;
  return splits == 1 && share.ctas > kRoomy / GROUPS
             ? launch<F, Out, GROUPS, true>(p, splits, share, stream)
             : launch<F, Out, GROUPS, false>(p, splits, share, stream);
}

template <typename F, int GROUPS>
cudaError_t launch(const Params& p, bool fp32_out, int splits, cudaStream_t stream) {
  return fp32_out ? launch<F, float, GROUPS>(p, splits, stream)
                  : launch<F, __nv_bfloat16, GROUPS>(p, splits, stream);
}

template <typename F>
cudaError_t launch(Params& p, bool fp32_out, int splits, int groups, cudaStream_t stream) {
  p.value_scale *= F::kNegated ? -(1 << F::kShift) : 1 << F::kShift;
  p.turned = make_uint2(0x07070707u, 0x70707070u);
  return groups == 1 ? launch<F, 1>(p, fp32_out, splits, stream)
                     : launch<F, 2>(p, fp32_out, splits, stream);
}

}  // namespace

// Launches on `stream`; returns a cudaError_t. `format`: 1 bf16, 2 fp8, 3 nvfp4. `splits`, the CTAs
// of a (row, KV head): 1, 2, 4, 8 or 16; `groups` of four warps in each: 1 or 2. `pages` is where
// the layer's first KV head begins in page 0. `out` is contiguous.
extern "C" int winnow_sparse_decode(const void* q, int64_t q_row, int64_t q_head, const void* ids,
                                    const void* positions, const void* row_request,
                                    const void* kv_lens, const void* block_tables,
                                    int64_t table_width, const void* pages, int64_t page_bytes,
                                    int64_t head_bytes, int format, void* out, int fp32_out,
                                    int64_t rows, int kv_heads, int group, int topk,
                                    float score_scale, float value_scale, int splits,
                                    int groups, void* stream) {
  Params p;
  p.q = static_cast<const __nv_bfloat16*>(q);
  p.ids = static_cast<const int32_t*>(ids);
  p.positions = static_cast<const int64_t*>(positions);
  p.row_request = static_cast<const int64_t*>(row_request);
  p.kv_lens = static_cast<const int64_t*>(kv_lens);
  p.block_tables = static_cast<const int64_t*>(block_tables);
  p.pages = static_cast<const uint8_t*>(pages);
  p.out = out;
  p.q_row = q_row, p.q_head = q_head;
  p.table_width = table_width;
  p.page_bytes = page_bytes, p.head_bytes = head_bytes;
  p.pairs = static_cast<int>(rows * kv_heads);
  p.kv_heads = kv_heads, p.group = group, p.topk = topk;
  p.score_scale = score_scale, p.value_scale = value_scale;
  const auto s = static_cast<cudaStream_t>(stream);
  const bool wide = fp32_out != 0;
  switch (format) {
    case 1: return launch<Wide<true>>(p, wide, splits, groups, s);
    case 2: return launch<Wide<false>>(p, wide, splits, groups, s);
    case 3: return launch<Nvfp4>(p, wide, splits, groups, s);
    default: return cudaErrorInvalidValue;
  }
}

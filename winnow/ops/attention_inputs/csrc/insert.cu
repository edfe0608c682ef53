// Norm, rotation, quantisation and insertion of what the projections of attention give, on Hopper.
//
// A task is four heads of one row: a warp takes one at a time, eight lanes a head. Lane l of a head
// holds channels 8l .. 8l + 7 and, of heads of 128, 64 + 8l .. 64 + 8l + 7: accesses are 16 bytes,
// the rotated channels are spread over all lanes, and a channel's partner is in another lane at the
// same place. Two neighbouring lanes hold an NVFP4 group.
//
// Bits are the reference's but for the order of the sum of squares and the reciprocal root, since
// every other operation is rounded as it does: no product is fused with a sum, quotients are
// correctly rounded, K and index keys are rounded to the projection's dtype before they are stored.

#include "insert_store.cuh"

namespace {

template <typename T>
__device__ __forceinline__ void round_to(float (&x)[2][8]) {
#pragma unroll
  for (int part = 0; part < 2; ++part) widen(narrow(x[part], T{}), x[part]);
}

__device__ __forceinline__ int tasks_of(const Source& source) {
  return (source.heads + kHeads - 1) / kHeads;
}

// A task that is not the queries'.
struct Other {
  int kind, first_head;
};

__device__ __forceinline__ int others_of(const Params& p) {
  return 2 * tasks_of(p.sources[kKey]) + tasks_of(p.sources[kIndexQuery]) +
         tasks_of(p.sources[kIndexKey]);
}

// Heads of K, of V, index queries, the index key; from `others` on, no heads.
__device__ __forceinline__ Other other_of(const Params& p, int task, int others) {
  const int k_tasks = tasks_of(p.sources[kKey]), index_tasks = tasks_of(p.sources[kIndexQuery]);
  if (task < k_tasks) return {kKey, kHeads * task};
  if (task < 2 * k_tasks) return {kValue, kHeads * (task - k_tasks)};
  task -= 2 * k_tasks;
  if (task < index_tasks) return {kIndexQuery, kHeads * task};
  return {kIndexKey, task == index_tasks ? 0 : kHeads};
}

// blockIdx.x is the row; blockIdx.y its part of the tasks, of which a warp takes every so many-th.
// UNROLL: query tasks that a warp loads before it begins. Many warps a multiprocessor with two each
// are faster at thousands of rows than fewer with four.
template <typename T, int UNROLL>
__global__ void __launch_bounds__(32 * kWarps, UNROLL > 1 && sizeof(T) == 2 ? 6 : 1)
    insert_rows(const __grid_constant__ Params p) {
  const int64_t row = blockIdx.x;
  // The same for all lanes, which the compiler must see to shuffle without care.
  const int own_warp = __shfl_sync(kAll, static_cast<int>(threadIdx.x) / 32, 0);
  const int warp = blockIdx.y * kWarps + own_warp, warps = gridDim.y * kWarps;
  // Read while launches ahead may still run, back to the last one that was not begun early itself.
  // None of them writes these: they make the projections, and norms and experts before.
  const int64_t position = p.positions[row], request = p.row_request[row];
  const Angles angles = load_angles(p, row);
  const int slot = static_cast<int>(position % kBlockTokens);
  int64_t page = p.tables[request * p.table_stride + position / kBlockTokens];
  if (p.kv_lens[request] <= 0) page = 0;
  const Source& q = p.sources[kQuery];
  Weights weights = load_weights(q);
  asm volatile("griddepcontrol.wait;" ::: "memory");
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");

  // The other tasks follow the queries' in the same order of warps.
  const int q_tasks = tasks_of(q), others = others_of(p);
  int task = (warp + warps - q_tasks % warps) % warps;
  Other other = other_of(p, task, others);
  Loaded<T> next = load<T>(p.sources[other.kind], row, other.first_head);

  float x[2][8];
  for (int base = warp; base < q_tasks; base += UNROLL * warps) {
    Loaded<T> loaded[UNROLL];
#pragma unroll
    for (int i = 0; i < UNROLL; ++i) loaded[i] = load<T>(q, row, kHeads * (base + i * warps));
#pragma unroll
    for (int i = 0; i < UNROLL; ++i) {
      norm_rotate(loaded[i], q, weights, angles, p, x);
      store<T>(p.q_out, q, row, kHeads * (base + i * warps), x);
    }
  }
  while (task < others) {
    const Source& source = p.sources[other.kind];
    if (other.kind == kValue) {
      widen(next.part[0], x[0]);
      widen(next.part[1], x[1]);
    } else {
      weights = load_weights(source);
      norm_rotate(next, source, weights, angles, p, x);
    }
    if (other.kind == kIndexQuery) {
      store<T>(p.index_q_out, source, row, other.first_head, x);
    } else {
      round_to<T>(x);
      insert(p.pages[other.kind], source, page, slot, other.first_head, x);
    }
    task += warps;
    other = other_of(p, task, others);
    next = load<T>(p.sources[other.kind], row, other.first_head);
  }
  if (row == 0 && blockIdx.y == 0 && threadIdx.x < kKinds) {
    const Source& source = p.sources[threadIdx.x];
    int64_t* counts = p.pages[threadIdx.x].counts;
    if (counts != nullptr) {
      atomicAdd(reinterpret_cast<unsigned long long*>(counts + 1),
                static_cast<unsigned long long>(gridDim.x) * source.heads * source.dim);
    }
  }
}

template <typename T>
cudaError_t launch(const Params& p, int rows, int parts, int early, cudaStream_t stream) {
  cudaLaunchAttribute begins = {};
  begins.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  begins.val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t config = {};
  config.gridDim = dim3(rows, parts);
  config.blockDim = dim3(32 * kWarps);
  config.stream = stream;
  config.attrs = &begins;
  config.numAttrs = early;
  return cudaLaunchKernelEx(&config, parts > 1 ? insert_rows<T, 1> : insert_rows<T, 2>, p);
}

}  // namespace

// K, V or index keys as the caller describes them.
struct WinnowPages {
  void* codes;
  void* scales;
  int64_t page_stride, head_stride;  // bytes
  void* counts;
  float global_scale;
  int format;
};

struct WinnowInsert {
  const void* qkv;    // [rows, (heads + 2 kv_heads) * dim], in row_stride elements
  const void* index;  // [rows, (index_heads + 1) * index_dim], or null
  int64_t qkv_stride, index_stride;
  const float *q_norm, *k_norm, *index_q_norm, *index_k_norm;
  void *q_out, *index_q_out;
  const float *cos, *sin;
  const int64_t *positions, *row_request, *kv_lens, *tables;
  int64_t table_stride;
  WinnowPages key, value, index_pages;
  float eps;
  int fp32, rows, heads, kv_heads, dim, index_heads, index_dim, half;
  int parts;  // CTAs that share a row
  int early;  // no launch right ahead writes positions, row_request, kv_lens, tables, cos or sin
};

namespace {

Pages pages_of(const WinnowPages& from) {
  return {static_cast<uint8_t*>(from.codes), static_cast<uint8_t*>(from.scales), from.page_stride,
          from.head_stride, static_cast<int64_t*>(from.counts), from.global_scale,
          1.0f / from.global_scale, from.format};
}

template <typename T>
Params params_of(const WinnowInsert& a) {
  const T* qkv = static_cast<const T*>(a.qkv);
  const T* index = static_cast<const T*>(a.index);
  const int index_heads = index ? a.index_heads : 0;
  Params p = {};
  const T* v = qkv + (a.heads + a.kv_heads) * a.dim;
  const T* index_key = index + index_heads * a.index_dim;
  p.sources[kQuery] = {qkv, a.qkv_stride, a.q_norm, a.heads, a.dim};
  p.sources[kKey] = {qkv + a.heads * a.dim, a.qkv_stride, a.k_norm, a.kv_heads, a.dim};
  p.sources[kValue] = {v, a.qkv_stride, nullptr, a.kv_heads, a.dim};
  p.sources[kIndexQuery] = {index, a.index_stride, a.index_q_norm, index_heads, a.index_dim};
  p.sources[kIndexKey] = {index_key, a.index_stride, a.index_k_norm, index ? 1 : 0, a.index_dim};
  p.q_out = a.q_out, p.index_q_out = a.index_q_out;
  p.cos = a.cos, p.sin = a.sin;
  p.positions = a.positions, p.row_request = a.row_request, p.kv_lens = a.kv_lens;
  p.tables = a.tables, p.table_stride = a.table_stride;
  p.pages[kKey] = pages_of(a.key), p.pages[kValue] = pages_of(a.value);
  if (index) p.pages[kIndexKey] = pages_of(a.index_pages);
  p.eps = a.eps, p.half = a.half;
  return p;
}

}  // namespace

// Launches on `stream`; returns a cudaError_t. dim and index_dim are 64 or 128, half 8, 16 or 32.
extern "C" int winnow_insert(const WinnowInsert* a, void* stream) {
  const auto s = static_cast<cudaStream_t>(stream);
  return a->fp32
             ? launch<float>(params_of<float>(*a), a->rows, a->parts, a->early, s)
             : launch<__nv_bfloat16>(params_of<__nv_bfloat16>(*a), a->rows, a->parts, a->early, s);
}

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

#include <cuda_bf16.h>
#include <cuda_fp8.h>

#include <cstdint>

namespace {

constexpr int kWarps = 4;
constexpr int kHeads = 4;  // of a task
constexpr int kBlockTokens = 128;
constexpr unsigned kAll = 0xFFFFFFFFu;
constexpr float kClipsAbove = 464.0f;  // halfway to the 480 that E4M3 lacks
constexpr float kLargest = 448.0f;

enum Format : int { kFp32, kBf16, kFp8, kNvfp4 };

// K, V or index keys of a layer. Strides are in bytes; a token's scales are scale_bytes apart.
struct Pages {
  uint8_t* codes;
  uint8_t* scales;
  int64_t page_stride, head_stride;
  int64_t* counts;  // values clipped, values written
  float global_scale, reciprocal;  // the latter rounded once
  int format;
};

// Projected values [rows, heads, dim] of one kind, heads one after another.
struct Source {
  const void* data;
  int64_t row_stride;  // elements
  const float* norm;   // [dim], without the added 1
  int heads, dim;
};

enum Kind : int { kQuery, kKey, kValue, kIndexQuery, kIndexKey, kKinds };

struct Params {
  Source sources[kKinds];  // those of the index have no heads without one
  Pages pages[kKinds];     // of what is inserted
  void* q_out;        // [rows, heads, dim]
  void* index_q_out;
  const float* cos;  // [rows, half]
  const float* sin;
  const int64_t* positions;
  const int64_t* row_request;
  const int64_t* kv_lens;
  const int64_t* tables;
  int64_t table_stride;
  float eps;
  int half;  // channels i < half are rotated with i + half: 8, 16 or 32
};

template <typename T>
struct Raw;  // eight values as they are loaded

template <>
struct Raw<__nv_bfloat16> {
  uint4 words;
};

template <>
struct Raw<float> {
  float4 low, high;
};

template <typename T>
struct Loaded {
  Raw<T> part[2];
};

__device__ __forceinline__ void widen(const Raw<__nv_bfloat16>& raw, float (&x)[8]) {
  const uint32_t words[4] = {raw.words.x, raw.words.y, raw.words.z, raw.words.w};
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    x[2 * i] = __uint_as_float(words[i] << 16);
    x[2 * i + 1] = __uint_as_float(words[i] & 0xFFFF0000u);
  }
}

__device__ __forceinline__ void widen(const Raw<float>& raw, float (&x)[8]) {
  x[0] = raw.low.x, x[1] = raw.low.y, x[2] = raw.low.z, x[3] = raw.low.w;
  x[4] = raw.high.x, x[5] = raw.high.y, x[6] = raw.high.z, x[7] = raw.high.w;
}

__device__ __forceinline__ Raw<__nv_bfloat16> narrow(const float (&x)[8], __nv_bfloat16) {
  uint32_t words[4];
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const __nv_bfloat162 pair = __floats2bfloat162_rn(x[2 * i], x[2 * i + 1]);
    words[i] = reinterpret_cast<const uint32_t&>(pair);
  }
  return {make_uint4(words[0], words[1], words[2], words[3])};
}

__device__ __forceinline__ Raw<float> narrow(const float (&x)[8], float) {
  return {make_float4(x[0], x[1], x[2], x[3]), make_float4(x[4], x[5], x[6], x[7])};
}

// Heads of a task that there are; the others' lanes work on zeros and store nothing.
template <typename T>
__device__ __forceinline__ Loaded<T> load(const Source& from, int64_t row, int first_head) {
  const int lane = threadIdx.x % 32, head = first_head + lane / 8;
  Loaded<T> values = {};
  if (head < from.heads) {
    const auto* at = reinterpret_cast<const Raw<T>*>(
        static_cast<const T*>(from.data) + row * from.row_stride + int64_t{head} * from.dim +
        8 * (lane % 8));
    values.part[0] = at[0];
    if (from.dim == 128) values.part[1] = at[8];
  }
  return values;
}

// What a lane multiplies its channels by: 1 + the norm's weight.
struct Weights {
  float part[2][8];
};

__device__ __forceinline__ Weights load_weights(const Source& from) {
  Weights weights = {};
#pragma unroll
  for (int part = 0; part < 2; ++part) {
    if (part == 0 || from.dim == 128) {
      const auto* at = reinterpret_cast<const float4*>(from.norm + 64 * part +
                                                       8 * (threadIdx.x % 8));
      widen(Raw<float>{at[0], at[1]}, weights.part[part]);
#pragma unroll
      for (int i = 0; i < 8; ++i) weights.part[part][i] = __fadd_rn(1.0f, weights.part[part][i]);
    }
  }
  return weights;
}

// A row's angles for a lane's first eight channels.
struct Angles {
  float cos[8], sin[8];
};

__device__ __forceinline__ Angles load_angles(const Params& p, int64_t row) {
  Angles angles;
  const int64_t at = row * p.half + 8 * (threadIdx.x % 8) % p.half;
  const auto* cos = reinterpret_cast<const float4*>(p.cos + at);
  const auto* sin = reinterpret_cast<const float4*>(p.sin + at);
  widen(Raw<float>{cos[0], cos[1]}, angles.cos);
  widen(Raw<float>{sin[0], sin[1]}, angles.sin);
  return angles;
}

// Four heads, normed and rotated, in fp32. Every lane of the warp takes part.
template <typename T>
__device__ __forceinline__ void norm_rotate(const Loaded<T>& from, const Source& source,
                                            const Weights& weights, const Angles& angles,
                                            const Params& p, float (&x)[2][8]) {
  widen(from.part[0], x[0]);
  widen(from.part[1], x[1]);
  float sum = 0.0f;
#pragma unroll
  for (int i = 0; i < 8; ++i) sum += x[0][i] * x[0][i] + x[1][i] * x[1][i];
  sum += __shfl_xor_sync(kAll, sum, 1);
  sum += __shfl_xor_sync(kAll, sum, 2);
  sum += __shfl_xor_sync(kAll, sum, 4);
  // dim is a power of two: its reciprocal is exact.
  const float scale = rsqrtf(__fadd_rn(sum * (source.dim == 128 ? 0x1p-7f : 0x1p-6f), p.eps));
#pragma unroll
  for (int part = 0; part < 2; ++part) {
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      x[part][i] = __fmul_rn(__fmul_rn(x[part][i], scale), weights.part[part][i]);
    }
  }
  const int lane = threadIdx.x % 8, lanes = p.half / 8;
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    const float other = __shfl_xor_sync(kAll, x[0][i], lanes);
    const float own = __fmul_rn(x[0][i], angles.cos[i]);
    const float turned = __fmul_rn(other, angles.sin[i]);
    const float sum_of_both = lane < lanes ? __fsub_rn(own, turned) : __fadd_rn(own, turned);
    if (lane < 2 * lanes) x[0][i] = sum_of_both;
  }
}

template <typename T>
__device__ __forceinline__ void store(void* out, const Source& source, int64_t row, int first_head,
                                      const float (&x)[2][8]) {
  const int lane = threadIdx.x % 32, head = first_head + lane / 8;
  if (head >= source.heads) return;
  auto* at = reinterpret_cast<Raw<T>*>(static_cast<T*>(out) +
                                       (row * source.heads + head) * source.dim + 8 * (lane % 8));
  at[0] = narrow(x[0], T{});
  if (source.dim == 128) at[8] = narrow(x[1], T{});
}

// Two values as E4M3 bytes, saturating; NaN is 0x7F.
__device__ __forceinline__ uint32_t e4m3_pair(float low, float high) {
  return __nv_cvt_float2_to_fp8x2(make_float2(low, high), __NV_SATFINITE, __NV_E4M3);
}

__device__ __forceinline__ float from_e4m3(uint32_t code) {
  return __half2float(__half(__nv_cvt_fp8_to_halfraw(code, __NV_E4M3)));
}

// x / y, correctly rounded where it is finite and not minute; `reciprocal` is 1 / y but for its
// last bit, y within 2^+-50. Beyond 2^80 it is large enough to saturate every format, or NaN.
__device__ __forceinline__ float quotient(float x, float y, float reciprocal) {
  const float first = __fmul_rn(x, reciprocal);
  const float second = __fmaf_rn(__fmaf_rn(-y, first, x), reciprocal, first);
  const float third = __fmaf_rn(__fmaf_rn(-y, second, x), reciprocal, second);
  // The residues lose the sign of a zero.
  return copysignf(fabsf(x) < 0x1p80f ? third : first, x);
}

__device__ __forceinline__ float reciprocal_of(float y) {
  float first;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(first) : "f"(y));
  return __fmaf_rn(__fmaf_rn(-y, first, 1.0f), first, first);
}

// The code of E2M1 nearest to x, ties to even, saturating. Of NaN some code.
__device__ __forceinline__ uint32_t e2m1(float x) {
  const float a = fminf(fabsf(x), 6.0f);
  const uint32_t bits = __float_as_uint(a);
  // From 1 on, codes are the exponent and one bit; below, 2^22 has a step of a half.
  const uint32_t normal = ((bits + 0x1FFFFFu + ((bits >> 22) & 1)) >> 22) - 252;
  const uint32_t subnormal = __float_as_uint(__fadd_rn(a, 4194304.0f)) - 0x4A800000u;
  return (a < 1.0f ? subnormal : normal) | (__float_as_uint(x) >> 28 & 8);
}

// Eight neighbouring channels, of which `counted` says whether anyone keeps them, as NVFP4. Codes
// go to `codes`, the group's scale to `scale`. Returns how many were clipped. All lanes take part.
__device__ __forceinline__ int store_nvfp4(const float (&x)[8], const Pages& pages, uint8_t* codes,
                                           uint8_t* scale, bool counted) {
  // Magnitudes as integers: a NaN is above all of them.
  uint32_t largest = 0;
#pragma unroll
  for (int i = 0; i < 8; ++i) largest = max(largest, __float_as_uint(x[i]) & 0x7FFFFFFFu);
  largest = max(largest, __shfl_xor_sync(kAll, largest, 1));
  const float sixth = quotient(__uint_as_float(largest), 6.0f, 1.0f / 6.0f);
  const float ratio = quotient(sixth, pages.global_scale, pages.reciprocal);
  const uint32_t group_scale = e4m3_pair(ratio, 0.0f) & 0xFFu;
  const float step = __fmul_rn(from_e4m3(group_scale), pages.global_scale);
  if (!counted) return 0;
  const float reciprocal = reciprocal_of(step);
  uint32_t word = 0;
#pragma unroll
  for (int i = 0; i < 8; ++i) word |= e2m1(quotient(x[i], step, reciprocal)) << (4 * i);
  if (!(step > 0.0f)) word = 0;
  *reinterpret_cast<uint32_t*>(codes) = word;
  if (threadIdx.x % 2 == 0) *scale = static_cast<uint8_t>(group_scale);
  int clipped = 0;
  if (ratio > kClipsAbove) {
    const float most = __fmul_rn(kLargest, pages.global_scale);
#pragma unroll
    for (int i = 0; i < 8; ++i) clipped += quotient(fabsf(x[i]), most, reciprocal_of(most)) > 6.0f;
  }
  return clipped;
}

__device__ __forceinline__ int store_fp8(const float (&x)[8], const Pages& pages, uint8_t* codes) {
  uint32_t words[2] = {};
  int clipped = 0;
#pragma unroll
  for (int i = 0; i < 8; i += 2) {
    const float low = quotient(x[i], pages.global_scale, pages.reciprocal);
    const float high = quotient(x[i + 1], pages.global_scale, pages.reciprocal);
    clipped += (fabsf(low) > kClipsAbove) + (fabsf(high) > kClipsAbove);
    words[i / 4] |= e4m3_pair(low, high) << (8 * (i % 4));
  }
  *reinterpret_cast<uint2*>(codes) = make_uint2(words[0], words[1]);
  return clipped;
}

// Four heads of a token into their pages. Every lane of the warp takes part.
__device__ __forceinline__ void insert(const Pages& pages, const Source& source, int64_t page,
                                       int slot, int first_head, const float (&x)[2][8]) {
  const int lane = threadIdx.x % 8, head = first_head + threadIdx.x % 32 / 8;
  const bool real = head < source.heads;
  const int64_t place = page * pages.page_stride + head * pages.head_stride;
  int clipped = 0;
#pragma unroll
  for (int part = 0; part < 2; ++part) {
    const int channel = 64 * part + 8 * lane;
    if (channel >= source.dim) continue;  // the same for all lanes of the warp
    const int at = slot * source.dim + channel;
    uint8_t* codes = pages.codes + place;
    if (pages.format == kNvfp4) {
      clipped += store_nvfp4(x[part], pages, codes + at / 2,
                             pages.scales + place + at / 16, real);
    } else if (real && pages.format == kFp8) {
      clipped += store_fp8(x[part], pages, codes + at);
    } else if (real && pages.format == kBf16) {
      *reinterpret_cast<uint4*>(codes + 2 * at) = narrow(x[part], __nv_bfloat16{}).words;
    } else if (real) {
      auto* to = reinterpret_cast<float4*>(codes + 4 * at);
      const Raw<float> raw = narrow(x[part], 0.0f);
      to[0] = raw.low, to[1] = raw.high;
    }
  }
  if (clipped) {
    atomicAdd(reinterpret_cast<unsigned long long*>(pages.counts),
              static_cast<unsigned long long>(clipped));
  }
}

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
  // These were there before the launch that this one may overlap: it made the projections alone.
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
cudaError_t launch(const Params& p, int rows, int parts, cudaStream_t stream) {
  cudaLaunchAttribute early = {};
  early.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  early.val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t config = {};
  config.gridDim = dim3(rows, parts);
  config.blockDim = dim3(32 * kWarps);
  config.stream = stream;
  config.attrs = &early;
  config.numAttrs = 1;
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
  return a->fp32 ? launch<float>(params_of<float>(*a), a->rows, a->parts, s)
                 : launch<__nv_bfloat16>(params_of<__nv_bfloat16>(*a), a->rows, a->parts, s);
}

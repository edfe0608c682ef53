// Attention of single query rows over selected blocks of an NVFP4 cache, on Hopper (sm_90).
//
// A cluster serves one (row, KV head): its query heads are the M = 16 rows of mma.m16n8k16 (fp16
// inputs, fp32 sums). Each of a CTA's four warps takes a quarter of every block's tokens. A block's
// K codes, K scales, V codes and V scales are one contiguous piece of a page row: one bulk copy. With
// many pairs a cluster is one CTA; with few, its CTAs share the pair's blocks and push their results
// into each other's shared memory. Nothing stays in global memory between launches.
//
// Exactness of K and V. An E2M1 code s|ee|m placed at bits 15 | 11 10 | 9 of an fp16 is
// value * 2^-14, subnormals included. An E4M3 scale is an fp16. Their product is a multiple of
// 2^-10 * 2^-14 = 2^-24, the smallest fp16, has at most 6 significant bits and is at most
// 2688 * 2^-14: HMUL2 rounds nothing. 2^14 comes back in the softmax factor and at the end.
//
// The order of the contracted axis is free as long as both operands agree. Lane (g, t) = (lane / 4,
// lane % 4) holds, as K, the 32 dims 32t .. 32t + 31 of one token in stored order, and, as V, the
// 16 dims 16g .. 16g + 15 (one scale group) of four tokens.

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include <cstdint>

namespace {

constexpr int kWarps = 4;
constexpr int kStages = 2;
constexpr int kCtas = 4;  // on a multiprocessor: what 128 registers allow
constexpr int kHeads = 16;
constexpr int kDim = 128;
constexpr int kBlock = 128;
constexpr int kTokens = kBlock / kWarps;
constexpr int kUnits = kTokens / 16;
constexpr int kTokenCodes = kDim / 2;
constexpr int kTokenScales = kDim / 16;
constexpr int kKeyScales = kBlock * kTokenCodes;
constexpr int kValues = kKeyScales + kBlock * kTokenScales;
constexpr int kValueScales = kValues + kBlock * kTokenCodes;
constexpr int kPieceBytes = kValueScales + kBlock * kTokenScales;
constexpr int kChunks = kHeads * kDim / 4;  // float4s of one result
constexpr int kInboxBytes = kChunks * (16 + 8);  // and each one's largest score and sum
constexpr float kNothing = -1.5e38f;  // below any score, and finite: exp2(-inf - it) is 0
constexpr float kLazy = 14.0f;        // weights may reach 2^14 before the sums are rescaled
constexpr unsigned kAll = 0xFFFFFFFFu;

struct Params {
  const __nv_bfloat16* q;
  const int32_t* ids;
  const int64_t* positions;
  const int64_t* row_request;
  const int64_t* kv_lens;
  const int64_t* block_tables;
  const uint8_t* pages;
  void* out;
  int64_t q_row, q_head;           // elements
  int64_t table_width;             // blocks
  int64_t page_bytes, head_bytes;  // strides
  int pairs, kv_heads, group, topk;  // pairs of a row and a KV head
  float score_scale;  // log2(e) / sqrt(dim) * global scale of K
  float value_scale;  // global scale of V
};

__device__ __forceinline__ uint32_t shared_address(const void* p) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(p));
}

__device__ __forceinline__ void barrier_init(uint32_t bar, int arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(bar), "r"(arrivals));
}

// What a barrier of this CTA's copies waits for; an acquire of the whole cluster would drop L1.
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

__device__ __forceinline__ void barrier_wait_cluster(uint32_t bar, int parity) {
  asm volatile(
      "{\n"
      ".reg .pred done;\n"
      "again:\n"
      "mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 done, [%0], %1;\n"
      "@!done bra again;\n"
      "}\n" ::"r"(bar),
      "r"(parity)
      : "memory");
}

__device__ __forceinline__ void barrier_expect(uint32_t bar, int bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(bar), "r"(bytes)
               : "memory");
}

// The same place in the shared memory of another CTA of the cluster.
__device__ __forceinline__ uint32_t at_rank(uint32_t address, int rank) {
  uint32_t there;
  asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(there) : "r"(address), "r"(rank));
  return there;
}

__device__ __forceinline__ void push(uint32_t to, float4 v, uint32_t bar) {
  asm volatile(
      "st.async.shared::cluster.mbarrier::complete_tx::bytes.v4.f32 [%0], {%1, %2, %3, %4}, [%5];" ::"r"(
          to),
      "f"(v.x), "f"(v.y), "f"(v.z), "f"(v.w), "r"(bar)
      : "memory");
}

__device__ __forceinline__ void push(uint32_t to, float2 v, uint32_t bar) {
  asm volatile(
      "st.async.shared::cluster.mbarrier::complete_tx::bytes.v2.f32 [%0], {%1, %2}, [%3];" ::"r"(to),
      "f"(v.x), "f"(v.y), "r"(bar)
      : "memory");
}

__device__ __forceinline__ void copy(uint32_t to, const void* from, int bytes, uint32_t bar) {
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(
          to),
      "l"(from), "r"(bytes), "r"(bar)
      : "memory");
}

// Shared memory by 32-bit addresses: a generic pointer costs its base again at every use.
__device__ __forceinline__ uint4 shared_16(uint32_t at) {
  uint4 v;
  asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
               : "r"(at));
  return v;
}

__device__ __forceinline__ uint2 shared_8(uint32_t at) {
  uint2 v;
  asm volatile("ld.shared.v2.u32 {%0, %1}, [%2];" : "=r"(v.x), "=r"(v.y) : "r"(at));
  return v;
}

__device__ __forceinline__ uint32_t shared_2(uint32_t at) {
  uint16_t v;
  asm volatile("ld.shared.u16 %0, [%1];" : "=h"(v) : "r"(at));
  return v;
}

__device__ __forceinline__ uint32_t shared_1(uint32_t at) {
  uint32_t v;
  asm volatile("ld.shared.u8 %0, [%1];" : "=r"(v) : "r"(at));
  return v;
}

__device__ __forceinline__ uint32_t multiply(uint32_t a, uint32_t b) {
  uint32_t c;
  asm("mul.rn.f16x2 %0, %1, %2;" : "=r"(c) : "r"(a), "r"(b));
  return c;
}

// Two E4M3 bytes as two fp16.
__device__ __forceinline__ uint32_t scales(uint32_t pair) {
  uint32_t c;
  asm("cvt.rn.f16x2.e4m3x2 %0, %1;" : "=r"(c) : "h"(static_cast<uint16_t>(pair)));
  return c;
}

__device__ __forceinline__ uint32_t pack(float low, float high) {
  uint32_t c;
  asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(c) : "f"(high), "f"(low));
  return c;
}

__device__ __forceinline__ float exp2_approx(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

// Eight codes to four pairs of fp16, each times 2^-14 of its value: pair j is codes j and j + 4.
// Codes 0 2 4 6 and 1 3 5 7 first become the upper bytes of their fp16, four in a word.
__device__ __forceinline__ void expand(uint32_t codes, uint32_t (&pairs)[4]) {
  const uint32_t even = ((codes << 4) & 0x80808080u) | ((codes << 1) & 0x0E0E0E0Eu);
  const uint32_t odd = (codes & 0x80808080u) | ((codes >> 3) & 0x0E0E0E0Eu);
  pairs[0] = __byte_perm(even, 0, 0x2404);
  pairs[1] = __byte_perm(odd, 0, 0x2404);
  pairs[2] = even & 0xFF00FF00u;
  pairs[3] = odd & 0xFF00FF00u;
}

__device__ __forceinline__ void mma(float (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
  asm(
      "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, "
      "{%8, %9}, {%0, %1, %2, %3};"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

// Eight bf16 values as fp32.
__device__ __forceinline__ void widen(uint4 raw, float (&x)[8]) {
  const uint32_t words[4] = {raw.x, raw.y, raw.z, raw.w};
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    x[2 * i] = __uint_as_float(words[i] << 16);
    x[2 * i + 1] = __uint_as_float(words[i] & 0xFFFF0000u);
  }
}

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
  const float over = l == 0.0f ? 0.0f : 16384.0f / l;
  if (chunk / 32 < p.group) store(out + 4 * chunk, p.value_scale * (over * o));
}

// The online softmax of one warp over its tokens: its largest score so far (not always the newest,
// see kLazy), the sum of weights and the weighted sum of V, rows g and g + 8.
struct Running {
  float m[2] = {kNothing, kNothing};
  float l[4] = {};
  float o[16][4] = {};
};

// The warp's tokens of a block, from `first`. The weights that `l` sums are the rounded ones.
__device__ __forceinline__ void attend(uint32_t piece, int first, int limit, int t, uint32_t key,
                                       uint32_t value, uint32_t q, const float (&c)[2],
                                       Running& r) {
  // Code bytes are 8 times scale bytes, for a token as for a lane's part of it.
  const uint32_t key_codes = piece + (first * kTokenCodes + key);
  const uint32_t key_scales = piece + kKeyScales + (first * kTokenCodes + key) / 8;
  const uint32_t value_codes = piece + kValues + (first * kTokenCodes + value);
  const uint32_t value_scales = piece + kValueScales + (first * kTokenCodes + value) / 8;
  float s[2 * kUnits][4] = {};
  uint4 k[2 * kUnits];
  uint32_t key_scale[2 * kUnits][2];
#pragma unroll
  for (int n = 0; n < 2 * kUnits; ++n) {
    k[n] = shared_16(key_codes + 8 * n * kTokenCodes);
    const uint32_t pair = scales(shared_2(key_scales + 8 * n * kTokenScales));
    key_scale[n][0] = __byte_perm(pair, 0, 0x1010);
    key_scale[n][1] = __byte_perm(pair, 0, 0x3232);
  }
#pragma unroll
  for (int w = 0; w < 4; ++w) {
    const uint4 low = shared_16(q + 1024 * w), high = shared_16(q + 1024 * w + 512);
    const uint32_t a[2][4] = {{low.x, low.y, low.z, low.w}, {high.x, high.y, high.z, high.w}};
#pragma unroll
    for (int n = 0; n < 2 * kUnits; ++n) {
      uint32_t f[4];
      expand(w == 0 ? k[n].x : w == 1 ? k[n].y : w == 2 ? k[n].z : k[n].w, f);
#pragma unroll
      for (int j = 0; j < 4; ++j) f[j] = multiply(f[j], key_scale[n][w / 2]);
      mma(s[n], a[0], f[0], f[1]);
      mma(s[n], a[1], f[2], f[3]);
    }
  }
  if (limit < kBlock) {
#pragma unroll
    for (int n = 0; n < 2 * kUnits; ++n) {
      const int token = first + 8 * n + 2 * t + (t & 1);
      if (token >= limit) s[n][0] = s[n][2] = -INFINITY;
      if ((token ^ 1) >= limit) s[n][1] = s[n][3] = -INFINITY;
    }
  }

  float largest[2];
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    largest[h] = fmaxf(s[0][2 * h], s[0][2 * h + 1]);
#pragma unroll
    for (int n = 1; n < 2 * kUnits; ++n) {
      largest[h] = fmaxf(largest[h], fmaxf(s[n][2 * h], s[n][2 * h + 1]));
    }
    largest[h] *= c[h];
  }
  if (__any_sync(kAll, largest[0] > r.m[0] + kLazy || largest[1] > r.m[1] + kLazy)) {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      largest[h] = fmaxf(largest[h], __shfl_xor_sync(kAll, largest[h], 1));
      largest[h] = fmaxf(largest[h], __shfl_xor_sync(kAll, largest[h], 2));
      const float m = fmaxf(r.m[h], largest[h]);
      const float shrink = exp2_approx(r.m[h] - m);
      r.m[h] = m;
      r.l[2 * h] *= shrink;
#pragma unroll
      for (int j = 0; j < 16; ++j) r.o[j][2 * h] *= shrink, r.o[j][2 * h + 1] *= shrink;
    }
  }

#pragma unroll
  for (int u = 0; u < kUnits; ++u) {
    uint32_t p[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int n = 2 * u + i / 2, h = i % 2;
      p[i] = pack(exp2_approx(fmaf(s[n][2 * h], c[h], -r.m[h])),
                  exp2_approx(fmaf(s[n][2 * h + 1], c[h], -r.m[h])));
    }
    const uint32_t ones = 0x3C003C00u;
    mma(r.l, p, ones, ones);

    uint2 v[2][2];
    uint32_t scale[2];
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const uint32_t codes = (16 * u + 8 * i) * kTokenCodes, group = codes / 8;
      v[i][0] = shared_8(value_codes + codes);
      v[i][1] = shared_8((value_codes ^ kTokenCodes) + codes);
      scale[i] = scales(shared_1(value_scales + group) |
                        shared_1((value_scales ^ kTokenScales) + group) << 8);
    }
#pragma unroll
    for (int w = 0; w < 4; ++w) {
      // Four codes of one token and the same four of the next: a pair is one dim of both.
      uint32_t f[2][4];
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const uint32_t a = w < 2 ? v[i][0].x : v[i][0].y, b = w < 2 ? v[i][1].x : v[i][1].y;
        expand(__byte_perm(a, b, w % 2 ? 0x7632 : 0x5410), f[i]);
#pragma unroll
        for (int j = 0; j < 4; ++j) f[i][j] = multiply(f[i][j], scale[i]);
      }
#pragma unroll
      for (int j = 0; j < 4; ++j) mma(r.o[4 * w + j], p, f[0][j], f[1][j]);
    }
  }
}

struct Shared {
  union {
    uint8_t pieces[kStages][kPieceBytes];
    float4 sums[kWarps][kChunks];  // once the last piece has been read
  };
  uint4 queries[8][32];  // fragments of every contraction step and lane
  float largest[kWarps][kHeads], m[kWarps][kHeads], l[kWarps][kHeads];
  const uint8_t* sources[32];
  uint64_t full[kStages], merged;
  int leavers[kStages];
};

struct Inbox {  // from the CTAs of the cluster, and each one's largest score and sum
  float4 sums[kChunks];
  float2 weights[kChunks];
};

// The queries as fp16, each head scaled by a power of two that brings its largest value to 2^13:
// whatever the range of the queries, no fp16 overflows and bf16's bits are kept. A warp prepares two
// of the eight contraction steps. `c` becomes what the scores of heads g and g + 8 are multiplied by.
__device__ __forceinline__ void prepare_queries(const Params& p, Shared& shared, int64_t row,
                                                int head, float (&c)[2]) {
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
  float x[2][8];
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    const int member = g + 8 * h;
    const __nv_bfloat16* q =
        p.q + row * p.q_row + (head * p.group + member) * p.q_head + 32 * t + 8 * warp;
    widen(member < p.group ? *reinterpret_cast<const uint4*>(q) : make_uint4(0, 0, 0, 0), x[h]);
    float largest = fabsf(x[h][0]);
#pragma unroll
    for (int i = 1; i < 8; ++i) largest = fmaxf(largest, fabsf(x[h][i]));
    largest = fmaxf(largest, __shfl_xor_sync(kAll, largest, 1));
    largest = fmaxf(largest, __shfl_xor_sync(kAll, largest, 2));
    if (t == 0) shared.largest[warp][member] = largest;
  }
  __syncthreads();
  uint32_t a[2][4];
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    float largest = 0.0f;
#pragma unroll
    for (int w = 0; w < kWarps; ++w) largest = fmaxf(largest, shared.largest[w][g + 8 * h]);
    const int exponent = min(max(static_cast<int>(__float_as_uint(largest) >> 23), 14), 253);
    const float factor = __uint_as_float(static_cast<uint32_t>(267 - exponent) << 23);
    // 2^14 for the codes' 2^-14, over the factor.
    c[h] = p.score_scale * __uint_as_float(static_cast<uint32_t>(exponent + 1) << 23);
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      // Pair j of word w is dims j and j + 4: contraction step 2w + j / 2, register j % 2.
      a[j / 2][2 * (j % 2) + h] = pack(x[h][j] * factor, x[h][j + 4] * factor);
    }
  }
#pragma unroll
  for (int k = 0; k < 2; ++k) {
    shared.queries[2 * warp + k][lane] = make_uint4(a[k][0], a[k][1], a[k][2], a[k][3]);
  }
  __syncthreads();
}

template <typename Out>
__global__ void __launch_bounds__(32 * kWarps, kCtas) decode(const Params p) {
  extern __shared__ __align__(128) uint8_t memory[];
  auto& shared = *reinterpret_cast<Shared*>(memory);
  auto& inbox = *reinterpret_cast<Inbox*>(memory + (sizeof(Shared) + 127) / 128 * 128);
  int splits, rank;
  asm("mov.u32 %0, %%cluster_nctaid.x;" : "=r"(splits));
  asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
  const int pair = blockIdx.x / splits;
  const int head = pair % p.kv_heads;
  const int64_t row = pair / p.kv_heads;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
  const uint32_t full = shared_address(shared.full), slots = shared_address(shared.pieces);

  if (threadIdx.x == 0) {
    for (int i = 0; i < kStages; ++i) {
      barrier_init(full + 8 * i, 1);
      shared.leavers[i] = 0;
    }
    barrier_init(shared_address(&shared.merged), 1);
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    barrier_expect(shared_address(&shared.merged), kInboxBytes);
  }
  __syncthreads();
  if (splits > 1) asm volatile("barrier.cluster.arrive.relaxed.aligned;" ::: "memory");
  // The launch may begin before the one before it has ended (see `launch`).
  asm volatile("griddepcontrol.wait;" ::: "memory");
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");

  // Lane i knows the i-th block of this CTA: the ranks take blocks in turn.
  const int at = rank + lane * splits;
  const int64_t id = at < p.topk ? p.ids[pair * int64_t{p.topk} + at] : -1;
  const int64_t position = p.positions[row], request = p.row_request[row];
  const bool visible =
      id >= 0 && id * kBlock <= position && id < p.table_width && p.kv_lens[request] > 0;
  const int count = __popc(__ballot_sync(kAll, visible));
  if (warp == 0 && visible) {
    const uint8_t* source = p.pages +
                            p.block_tables[request * p.table_width + id] * p.page_bytes +
                            head * p.head_bytes;
    shared.sources[lane] = source;
    if (lane < kStages) {
      barrier_expect(full + 8 * lane, kPieceBytes);
      copy(slots + lane * kPieceBytes, source, kPieceBytes, full + 8 * lane);
    }
  }
  const int last_limit = __shfl_sync(
      kAll, static_cast<int>(min(position + 1 - id * kBlock, int64_t{kBlock})), max(count - 1, 0));
  float c[2];
  prepare_queries(p, shared, row, head, c);

  // Where a lane's part of eight tokens begins. Neighbouring tokens are swapped where g / 2 is odd,
  // for V as for K, so that a load of V spreads over the banks.
  const uint32_t key = (g ^ ((g >> 1) & 1)) * kTokenCodes + 16 * t;
  const uint32_t value = (2 * t + (t & 1)) * kTokenCodes + 8 * g;
  const uint32_t queries = shared_address(&shared.queries[0][lane]);
  const int first = warp * kTokens;
  Running r;
  for (int i = 0; i < count; ++i) {
    const int slot = i % kStages;
    const int limit = i == count - 1 ? last_limit : kBlock;
    barrier_wait(full + 8 * slot, (i / kStages) & 1);
    if (limit < kBlock) {
      // Whatever lies in V after the row's position: codes are finite, so zero scales undo it. Only
      // the last block has such tokens, so no copy into this slot follows.
      if (first + lane >= limit) {
        uint8_t* scale = shared.pieces[slot] + kValueScales + (first + lane) * kTokenScales;
        *reinterpret_cast<uint2*>(scale) = make_uint2(0, 0);
      }
      __syncwarp();
    }
    if (first < limit) attend(slots + slot * kPieceBytes, first, limit, t, key, value, queries, c, r);
    __syncwarp();
    if (lane == 0 && i + kStages < count) {
      // The last warp to leave a slot refills it.
      int before;
      asm volatile("atom.acq_rel.cta.shared::cta.add.u32 %0, [%1], 1;"
                   : "=r"(before)
                   : "r"(shared_address(&shared.leavers[slot]))
                   : "memory");
      if (before % kWarps == kWarps - 1) {
        barrier_expect(full + 8 * slot, kPieceBytes);
        copy(slots + slot * kPieceBytes, shared.sources[i + kStages], kPieceBytes,
             full + 8 * slot);
      }
    }
  }

  // Merge the warps.
  __syncthreads();
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    const int member = g + 8 * h;
    if (t == 0) shared.m[warp][member] = r.m[h], shared.l[warp][member] = r.l[2 * h];
#pragma unroll
    for (int n = 0; n < 8; ++n) {
      // Dims 32t .. 32t + 15 are the even columns' 16 tiles, 32t + 16 .. the odd columns'.
      const int j = 4 * (n % 4), e = 2 * h + n / 4;
      shared.sums[warp][place(member, 8 * t + n)] =
          make_float4(r.o[j][e], r.o[j + 1][e], r.o[j + 2][e], r.o[j + 3][e]);
    }
  }
  __syncthreads();
  Out* out = static_cast<Out*>(p.out) + int64_t{pair} * p.group * kDim;
  const int share = kChunks / splits;  // float4s of the result that each CTA writes
  // The other CTAs' inboxes are ready once they have begun.
  if (splits > 1) asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory");
#pragma unroll
  for (int n = 0; n < kChunks / (32 * kWarps); ++n) {
    const int i = threadIdx.x + n * 32 * kWarps, member = i / 32, from = place(member, lane);
    float m = shared.m[0][member], l = 0.0f;
    float4 o = make_float4(0, 0, 0, 0);
#pragma unroll
    for (int w = 1; w < kWarps; ++w) m = fmaxf(m, shared.m[w][member]);
#pragma unroll
    for (int w = 0; w < kWarps; ++w) {
      const float weight = exp2_approx(shared.m[w][member] - m);
      l += weight * shared.l[w][member];
      add(o, weight * shared.sums[w][from]);
    }
    if (splits == 1) {
      finish(out, i, p, o, l);
    } else {
      const int owner = i / share, to = rank * share + i % share;
      const uint32_t bar = at_rank(shared_address(&shared.merged), owner);
      push(at_rank(shared_address(&inbox.sums[to]), owner), o, bar);
      push(at_rank(shared_address(&inbox.weights[to]), owner), make_float2(m, l), bar);
    }
  }
  if (splits == 1) return;

  // Merge the CTAs: each writes its share.
  barrier_wait_cluster(shared_address(&shared.merged), 0);
  for (int i = threadIdx.x; i < share; i += 32 * kWarps) {
    float m = kNothing, l = 0.0f;
    float4 o = make_float4(0, 0, 0, 0);
    for (int from = 0; from < splits; ++from) m = fmaxf(m, inbox.weights[from * share + i].x);
    for (int from = 0; from < splits; ++from) {
      const float2 weights = inbox.weights[from * share + i];
      const float weight = exp2_approx(weights.x - m);
      l += weight * weights.y;
      add(o, weight * inbox.sums[from * share + i]);
    }
    finish(out, rank * share + i, p, o, l);
  }
}

template <typename Out>
cudaError_t launch(const Params& p, int splits, cudaStream_t stream) {
  constexpr int kAlone = (sizeof(Shared) + 127) / 128 * 128, kBytes = kAlone + sizeof(Inbox);
  auto* kernel = decode<Out>;
  cudaError_t error =
      cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kBytes);
  if (error == cudaSuccess) {
    error = cudaFuncSetAttribute(kernel, cudaFuncAttributeNonPortableClusterSizeAllowed, 1);
  }
  if (error != cudaSuccess) return error;
  cudaLaunchAttribute attributes[2];
  attributes[0].id = cudaLaunchAttributeClusterDimension;
  attributes[0].val.clusterDim = {static_cast<unsigned>(splits), 1, 1};
  // The kernel itself waits for the one before it, and lets the next begin.
  attributes[1].id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attributes[1].val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t config = {};
  config.gridDim = dim3(p.pairs * splits);
  config.blockDim = dim3(32 * kWarps);
  config.dynamicSmemBytes = splits > 1 ? kBytes : kAlone;
  config.stream = stream;
  config.attrs = attributes;
  config.numAttrs = 2;
  return cudaLaunchKernelEx(&config, kernel, p);
}

}  // namespace

// Launches on `stream`; returns a cudaError_t. `splits`, the CTAs of a (row, KV head): 1, 2, 4, 8 or
// 16. `pages` is where the layer's first KV head begins in page 0. `out` is contiguous.
extern "C" int winnow_sparse_decode(const void* q, int64_t q_row, int64_t q_head, const void* ids,
                                    const void* positions, const void* row_request,
                                    const void* kv_lens, const void* block_tables,
                                    int64_t table_width, const void* pages, int64_t page_bytes,
                                    int64_t head_bytes, void* out, int fp32_out, int64_t rows,
                                    int kv_heads, int group, int topk, float score_scale,
                                    float value_scale, int splits, int multiprocessors,
                                    void* stream) {
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
  return fp32_out ? launch<float>(p, splits, s)
                  : launch<__nv_bfloat16>(p, splits, s);
}

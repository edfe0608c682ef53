// Attention of single query rows over selected blocks of an NVFP4 cache, on Hopper (sm_90).
//
// One (row, KV head) at a time is the work of a cluster: its query heads are the M = 16 rows of
// mma.m16n8k16 (fp16 inputs, fp32 sums). In a CTA one warp loads and four compute, each a quarter
// of every block's tokens. A block's K codes, K scales, V codes and V scales are one contiguous
// piece of a page row: one bulk copy. With many pairs a cluster is one CTA that stays for several
// pairs; with few, the CTAs of a cluster share the pair's blocks and push their results into each
// other's shared memory. Nothing stays in global memory between launches.
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
#include <cuda_runtime.h>
#include <cstdint>

namespace {

constexpr int kWarps = 4;  // that compute; one more loads
constexpr int kStages = 3;
constexpr int kCtas = 2;  // on a multiprocessor
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
  int64_t q_row, q_head;             // strides in elements
  int64_t table_width;               // blocks
  int64_t page_bytes, head_bytes;    // strides
  int pairs, kv_heads, group, topk;  // pairs of a row and a KV head
  float score_scale;                 // log2(e) / sqrt(dim) * global scale of K
  float value_scale;                 // global scale of V
};

__device__ __forceinline__ uint32_t shared_address(const void* p) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(p));
}

__device__ __forceinline__ void barrier_init(uint64_t* bar, int arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;"
               : : "r"(shared_address(bar)), "r"(arrivals));
}

__device__ __forceinline__ void barrier_arrive(uint32_t bar) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(bar) : "memory");
}

__device__ __forceinline__ void barrier_wait(uint32_t bar, int parity) {
  asm volatile(
      "{\n.reg .pred done;\nagain:\n"
      "mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
      "@!done bra again;\n}\n" : : "r"(bar), "r"(parity) : "memory");
}

// For what other CTAs push: the wider acquire, which drops L1.
__device__ __forceinline__ void barrier_wait_cluster(uint32_t bar, int parity) {
  asm volatile(
      "{\n.reg .pred done;\nagain:\n"
      "mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 done, [%0], %1;\n"
      "@!done bra again;\n}\n" : : "r"(bar), "r"(parity) : "memory");
}

__device__ __forceinline__ void barrier_expect(uint32_t bar, int bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;"
               : : "r"(bar), "r"(bytes) : "memory");
}

// The same place in the shared memory of another CTA of the cluster.
__device__ __forceinline__ uint32_t at_rank(uint32_t address, int rank) {
  uint32_t there;
  asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(there) : "r"(address), "r"(rank));
  return there;
}

__device__ __forceinline__ void push(uint32_t to, float4 v, uint32_t bar) {
  asm volatile(
      "st.async.shared::cluster.mbarrier::complete_tx::bytes.v4.f32 [%0], {%1, %2, %3, %4}, [%5];"
      : : "r"(to), "f"(v.x), "f"(v.y), "f"(v.z), "f"(v.w), "r"(bar) : "memory");
}

__device__ __forceinline__ void push(uint32_t to, float2 v, uint32_t bar) {
  asm volatile(
      "st.async.shared::cluster.mbarrier::complete_tx::bytes.v2.f32 [%0], {%1, %2}, [%3];"
      : : "r"(to), "f"(v.x), "f"(v.y), "r"(bar) : "memory");
}

__device__ __forceinline__ void copy(uint32_t to, const void* from, int bytes, uint32_t bar) {
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];"
      : : "r"(to), "l"(from), "r"(bytes), "r"(bar) : "memory");
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

__device__ __forceinline__ void mma(float (&c)[4], const uint32_t (&a)[4], uint32_t b0,
                                    uint32_t b1) {
  asm(
      "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, "
      "{%8, %9}, {%0, %1, %2, %3};"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

// A head's 32 dims of this lane as fp16, scaled by a power of two that brings the head's largest
// value to 2^13: whatever the range of the queries, no fp16 overflows and bf16's bits are kept.
// Returns 2^14 times the inverse of that power: what the scores must be multiplied by.
__device__ __forceinline__ float load_query(uint32_t q, bool present, int half,
                                            uint32_t (&a)[8][4]) {
  uint4 raw[4] = {};
  if (present) {
#pragma unroll
    for (int w = 0; w < 4; ++w) raw[w] = shared_16(q + 16 * w);
  }
  float x[32], largest = 0.0f;
#pragma unroll
  for (int w = 0; w < 4; ++w) {
    const uint32_t words[4] = {raw[w].x, raw[w].y, raw[w].z, raw[w].w};
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      x[8 * w + i] = __uint_as_float(i % 2 ? words[i / 2] & 0xFFFF0000u : words[i / 2] << 16);
    }
  }
#pragma unroll
  for (int i = 0; i < 32; ++i) largest = fmaxf(largest, fabsf(x[i]));
  largest = fmaxf(largest, __shfl_xor_sync(kAll, largest, 1));
  largest = fmaxf(largest, __shfl_xor_sync(kAll, largest, 2));
  const int exponent = min(max(static_cast<int>(__float_as_uint(largest) >> 23), 14), 253);
  const float factor = __uint_as_float(static_cast<uint32_t>(267 - exponent) << 23);
#pragma unroll
  for (int i = 0; i < 16; ++i) {
    // Pair j of word w is dims j and j + 4, contraction step 2w + j / 2, register j % 2.
    const int w = i / 4, j = i % 4, x0 = 8 * w + j;
    a[2 * w + j / 2][2 * (j % 2) + half] = pack(x[x0] * factor, x[x0 + 4] * factor);
  }
  return __uint_as_float(static_cast<uint32_t>(exponent + 1) << 23);
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
  const __nv_bfloat162 both[2] = {__floats2bfloat162_rn(v.x, v.y), __floats2bfloat162_rn(v.z, v.w)};
  *reinterpret_cast<uint2*>(out) = *reinterpret_cast<const uint2*>(both);
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
                                       uint32_t value, const uint32_t (&q)[8][4],
                                       const float (&c)[2], Running& r) {
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
#pragma unroll
    for (int n = 0; n < 2 * kUnits; ++n) {
      uint32_t f[4];
      expand(w == 0 ? k[n].x : w == 1 ? k[n].y : w == 2 ? k[n].z : k[n].w, f);
#pragma unroll
      for (int j = 0; j < 4; ++j) f[j] = multiply(f[j], key_scale[n][w / 2]);
      mma(s[n], q[2 * w], f[0], f[1]);
      mma(s[n], q[2 * w + 1], f[2], f[3]);
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
    mma(r.l, p, 0x3C003C00u, 0x3C003C00u);  // fp16 ones

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
  uint8_t pieces[kStages][kPieceBytes];
  float4 sums[kWarps][kChunks];
  __nv_bfloat16 queries[2][kHeads][kDim];
  float4 inbox[kChunks];  // from the CTAs of the cluster, and each one's largest score and sum:
  float2 inbox_weights[kChunks];
  float m[kWarps][kHeads], l[kWarps][kHeads];
  int2 headers[2];  // blocks of this CTA; tokens of the last one that the row sees
  uint64_t full[kStages], empty[kStages], header_full[2], header_empty[2], merged;
};

__device__ __forceinline__ void consumers_sync() {
  asm volatile("bar.sync 1, %0;" ::"n"(32 * kWarps) : "memory");
}

// The loading warp: runs ahead of the others through rows and blocks as far as there is room.
__device__ __forceinline__ void produce(const Params& p, Shared& shared, int splits, int rank) {
  const int lane = threadIdx.x % 32;
  int slot = 0, phase = 1;  // the first round finds every slot empty
  for (int pair = blockIdx.x / splits, k = 0; pair < p.pairs; pair += gridDim.x / splits, ++k) {
    const int h = k & 1;
    const int head = pair % p.kv_heads;
    const int64_t row = pair / p.kv_heads;
    const uint32_t header_full = shared_address(&shared.header_full[h]);
    barrier_wait(shared_address(&shared.header_empty[h]), ((k >> 1) & 1) ^ 1);
    if (lane == 0) {
      asm volatile("mbarrier.expect_tx.relaxed.cta.shared::cta.b64 [%0], %1;"
                   : : "r"(header_full), "r"(p.group * kDim * 2) : "memory");
    }
    __syncwarp();
    if (lane < p.group) {
      const __nv_bfloat16* q = p.q + row * p.q_row + (head * p.group + lane) * p.q_head;
      copy(shared_address(&shared.queries[h][lane]), q, kDim * 2, header_full);
    }

    // Lane i knows the i-th block of this CTA: the ranks take blocks in turn.
    const int at = rank + lane * splits;
    const int64_t id = at < p.topk ? p.ids[pair * int64_t{p.topk} + at] : -1;
    const int64_t position = p.positions[row], request = p.row_request[row];
    const bool visible =
        id >= 0 && id * kBlock <= position && id < p.table_width && p.kv_lens[request] > 0;
    const uint8_t* source = nullptr;
    if (visible) {
      const int64_t page = p.block_tables[request * p.table_width + id];
      source = p.pages + page * p.page_bytes + head * p.head_bytes;
    }
    const int limit = static_cast<int>(min(position + 1 - id * kBlock, int64_t{kBlock}));
    const int count = __popc(__ballot_sync(kAll, visible));
    const int last = __shfl_sync(kAll, limit, max(count - 1, 0));
    if (lane == 0) {
      shared.headers[h] = make_int2(count, last);
      barrier_arrive(header_full);
    }
    for (int i = 0; i < count; ++i) {
      barrier_wait(shared_address(&shared.empty[slot]), phase);
      if (lane == i) {
        const uint32_t full = shared_address(&shared.full[slot]);
        barrier_expect(full, kPieceBytes);
        copy(shared_address(shared.pieces[slot]), source, kPieceBytes, full);
      }
      __syncwarp();
      if (++slot == kStages) slot = 0, phase ^= 1;
    }
  }
}

template <typename Out>
__device__ __forceinline__ void consume(const Params& p, Shared& shared, int splits, int rank) {
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
  // Where a lane's part of eight tokens begins. Neighbouring tokens are swapped where g / 2 is odd,
  // for V as for K, so that a load of V spreads over the banks.
  const uint32_t key = (g ^ ((g >> 1) & 1)) * kTokenCodes + 16 * t;
  const uint32_t value = (2 * t + (t & 1)) * kTokenCodes + 8 * g;
  const int first = warp * kTokens;
  int slot = 0, phase = 0;
  for (int pair = blockIdx.x / splits, k = 0; pair < p.pairs; pair += gridDim.x / splits, ++k) {
    const int h = k & 1;
    barrier_wait(shared_address(&shared.header_full[h]), (k >> 1) & 1);
    const int count = shared.headers[h].x, last_limit = shared.headers[h].y;
    uint32_t q[8][4];
    float c[2];
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int member = g + 8 * half;
      c[half] = p.score_scale * load_query(shared_address(&shared.queries[h][member][32 * t]),
                                           member < p.group, half, q);
    }
    __syncwarp();
    if (lane == 0) barrier_arrive(shared_address(&shared.header_empty[h]));

    Running r;
    for (int i = 0; i < count; ++i) {
      const uint32_t piece = shared_address(shared.pieces[slot]);
      const int limit = i == count - 1 ? last_limit : kBlock;
      barrier_wait(shared_address(&shared.full[slot]), phase);
      if (limit < kBlock) {
        // Whatever lies in V after the row's position: codes are finite, so zero scales undo it.
        if (first + lane >= limit) {
          uint8_t* scale = shared.pieces[slot] + kValueScales + (first + lane) * kTokenScales;
          *reinterpret_cast<uint2*>(scale) = make_uint2(0, 0);
        }
        asm volatile("fence.proxy.async.shared::cta;" ::: "memory");  // before the next copy
        __syncwarp();
      }
      if (first < limit) attend(piece, first, limit, t, key, value, q, c, r);
      __syncwarp();
      if (lane == 0) barrier_arrive(shared_address(&shared.empty[slot]));
      if (++slot == kStages) slot = 0, phase ^= 1;
    }

    // Merge the warps.
    consumers_sync();  // the last merge has been read
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int member = g + 8 * half;
      if (t == 0) shared.m[warp][member] = r.m[half], shared.l[warp][member] = r.l[2 * half];
#pragma unroll
      for (int n = 0; n < 8; ++n) {
        // Dims 32t .. 32t + 15 are the even columns' 16 tiles, 32t + 16 .. the odd columns'.
        const int j = 4 * (n % 4), e = 2 * half + n / 4;
        shared.sums[warp][place(member, 8 * t + n)] =
            make_float4(r.o[j][e], r.o[j + 1][e], r.o[j + 2][e], r.o[j + 3][e]);
      }
    }
    consumers_sync();
    Out* out = static_cast<Out*>(p.out) + int64_t{pair} * p.group * kDim;
    const int share = kChunks / splits;  // float4s of the result that each CTA writes
    // The other CTAs' inboxes are ready once they have begun.
    if (splits > 1) asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory");
#pragma unroll
    for (int n = 0; n < kChunks / (32 * kWarps); ++n) {
      const int i = threadIdx.x + n * 32 * kWarps, member = i / 32, at = place(member, lane);
      float m = shared.m[0][member], l = 0.0f;
      float4 o = make_float4(0, 0, 0, 0);
#pragma unroll
      for (int w = 1; w < kWarps; ++w) m = fmaxf(m, shared.m[w][member]);
#pragma unroll
      for (int w = 0; w < kWarps; ++w) {
        const float weight = exp2_approx(shared.m[w][member] - m);
        l += weight * shared.l[w][member];
        add(o, weight * shared.sums[w][at]);
      }
      if (splits == 1) {
        finish(out, i, p, o, l);
      } else {
        const int owner = i / share, to = rank * share + i % share;
        const uint32_t bar = at_rank(shared_address(&shared.merged), owner);
        push(at_rank(shared_address(&shared.inbox[to]), owner), o, bar);
        push(at_rank(shared_address(&shared.inbox_weights[to]), owner), make_float2(m, l), bar);
      }
    }
    if (splits == 1) continue;
    // Merge the CTAs: each writes its share. One row and KV head a cluster here.
    barrier_wait_cluster(shared_address(&shared.merged), 0);
    for (int i = threadIdx.x; i < share; i += 32 * kWarps) {
      float m = kNothing, l = 0.0f;
      float4 o = make_float4(0, 0, 0, 0);
      for (int k = 0; k < splits; ++k) m = fmaxf(m, shared.inbox_weights[k * share + i].x);
      for (int k = 0; k < splits; ++k) {
        const float2 weights = shared.inbox_weights[k * share + i];
        const float weight = exp2_approx(weights.x - m);
        l += weight * weights.y;
        add(o, weight * shared.inbox[k * share + i]);
      }
      finish(out, rank * share + i, p, o, l);
    }
    return;
  }
}

template <typename Out>
__global__ void __launch_bounds__(32 * (kWarps + 1), kCtas) decode(const Params p) {
  extern __shared__ __align__(128) uint8_t memory[];
  auto& shared = *reinterpret_cast<Shared*>(memory);
  int splits, rank;
  asm("mov.u32 %0, %%cluster_nctaid.x; mov.u32 %1, %%cluster_ctarank;" : "=r"(splits), "=r"(rank));
  if (threadIdx.x == 0) {
    for (int i = 0; i < kStages; ++i) {
      barrier_init(&shared.full[i], 1), barrier_init(&shared.empty[i], kWarps);
    }
    for (int i = 0; i < 2; ++i) {
      barrier_init(&shared.header_full[i], 1), barrier_init(&shared.header_empty[i], kWarps);
    }
    barrier_init(&shared.merged, 1);
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    barrier_expect(shared_address(&shared.merged), kInboxBytes);
  }
  __syncthreads();
  if (splits > 1) asm volatile("barrier.cluster.arrive.relaxed.aligned;" ::: "memory");
  // The launch may begin before the one before it has ended (see `launch`).
  asm volatile("griddepcontrol.wait;" ::: "memory");
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
  if (threadIdx.x / 32 == kWarps) produce(p, shared, splits, rank);
  else consume<Out>(p, shared, splits, rank);
}

template <typename Out>
cudaError_t launch(const Params& p, int splits, int multiprocessors, cudaStream_t stream) {
  constexpr int kBytes = sizeof(Shared);
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
  const int room = kCtas * multiprocessors;
  cudaLaunchConfig_t config = {};
  config.gridDim = dim3(splits > 1 ? p.pairs * splits : p.pairs < room ? p.pairs : room);
  config.blockDim = dim3(32 * (kWarps + 1));
  config.dynamicSmemBytes = kBytes;
  config.stream = stream;
  config.attrs = attributes;
  config.numAttrs = 2;
  return cudaLaunchKernelEx(&config, kernel, p);
}

}  // namespace

// Launches on `stream`; returns a cudaError_t. `splits`, the CTAs of a (row, KV head): 1, 2, 4, 8
// or 16. `pages` is where the layer's first KV head begins in page 0. `out` is contiguous.
extern "C" int winnow_sparse_decode(
    const __nv_bfloat16* q, int64_t q_row, int64_t q_head, const int32_t* ids,
    const int64_t* positions, const int64_t* row_request, const int64_t* kv_lens,
    const int64_t* block_tables, int64_t table_width, const uint8_t* pages, int64_t page_bytes,
    int64_t head_bytes, void* out, int fp32_out, int64_t rows, int kv_heads, int group, int topk,
    float score_scale, float value_scale, int splits, int multiprocessors, cudaStream_t stream) {
  const int pairs = static_cast<int>(rows * kv_heads);
  const Params p = {q,          ids,         positions, row_request, kv_lens, block_tables, pages,
                    out,        q_row,       q_head,    table_width, page_bytes, head_bytes, pairs,
                    kv_heads,   group,       topk,      score_scale, value_scale};
  return fp32_out ? launch<float>(p, splits, multiprocessors, stream)
                  : launch<__nv_bfloat16>(p, splits, multiprocessors, stream);
}

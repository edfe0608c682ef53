// Kernels of the CPU backend, in fp32. Every result of a row is computed by the same operations in
// the same order however many rows stand beside it: that, and not a library, is what makes a
// request's tokens independent of its batch and of its chunks.
//
// Built by winnow/ops/native.py with -march=native; vector types let the compiler choose the
// instructions. Contraction and reassociation are off: a compiler that fuses a product and a sum in
// one place and not in another (GCC's tuning for Zen does) would break that promise. `fused` says
// where they are fused.

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <vector>

#if defined(__FMA__)
#include <immintrin.h>
#elif defined(__aarch64__)
#include <arm_neon.h>
#endif

namespace {

// The widest vector of the processor, and how many of them its registers hold: wider ones, or more
// at once, would live in memory.
#if defined(__AVX512F__)
constexpr int kVectorBytes = 64, kRegisters = 32;
#elif defined(__AVX__)
constexpr int kVectorBytes = 32, kRegisters = 16;
#elif defined(__aarch64__)
constexpr int kVectorBytes = 16, kRegisters = 32;
#else
constexpr int kVectorBytes = 16, kRegisters = 16;
#endif

typedef float vec __attribute__((vector_size(kVectorBytes), aligned(4), may_alias));
typedef int32_t ints __attribute__((vector_size(kVectorBytes), aligned(4)));
typedef float v8 __attribute__((vector_size(32), aligned(4)));
typedef float v4 __attribute__((vector_size(16), aligned(4)));

constexpr int64_t kBlock = 128;
constexpr int64_t kLanes = kVectorBytes / sizeof(float);
constexpr float kInf = std::numeric_limits<float>::infinity();

inline vec load(const float* p) { return *reinterpret_cast<const vec*>(p); }
inline void store(float* p, vec v) { *reinterpret_cast<vec*>(p) = v; }
inline vec splat(float x) { return x - vec{}; }

// a * b + c, rounded once where the processor can.
inline vec fused(vec a, vec b, vec c) {
#if defined(__AVX512F__)
  return (vec)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
#elif defined(__FMA__)
  return (vec)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c);
#elif defined(__aarch64__)
  return (vec)vfmaq_f32((float32x4_t)c, (float32x4_t)a, (float32x4_t)b);
#else
  return a * b + c;
#endif
}

inline vec load_part(const float* p, int64_t count) {
  vec v{};
  std::memcpy(&v, p, count * sizeof(float));
  return v;
}

inline v4 quarter(vec v) {
  if constexpr (kLanes == 4) {
    v4 same;
    std::memcpy(&same, &v, sizeof same);
    return same;
  } else {
    v8 h;
    if constexpr (kLanes == 8) {
      std::memcpy(&h, &v, sizeof h);
    } else {
      v8 parts[kLanes / 8];
      std::memcpy(parts, &v, sizeof parts);
      h = parts[0] + parts[kLanes / 8 - 1];
    }
    return __builtin_shufflevector(h, h, 0, 1, 2, 3) + __builtin_shufflevector(h, h, 4, 5, 6, 7);
  }
}

// Sums of four vectors' lanes; each sum has the same order in every place.
inline v4 sums(vec a, vec b, vec c, vec d) {
  v4 p = quarter(a), q = quarter(b), r = quarter(c), s = quarter(d);
  v4 pq = __builtin_shufflevector(p, q, 0, 4, 1, 5) + __builtin_shufflevector(p, q, 2, 6, 3, 7);
  v4 rs = __builtin_shufflevector(r, s, 0, 4, 1, 5) + __builtin_shufflevector(r, s, 2, 6, 3, 7);
  return __builtin_shufflevector(pq, rs, 0, 1, 4, 5) + __builtin_shufflevector(pq, rs, 2, 3, 6, 7);
}

inline float sum(vec v) { return sums(v, v, v, v)[0]; }

// exp for x <= 0 or NaN: Cephes' reduction and polynomial, relative error below 2e-7.
inline vec exp_nonpositive(vec x) {
  vec bounded = x < -87.0f ? splat(-87.0f) : x;
  // Rounds to the nearest integer.
  vec shifted = fused(bounded, splat(1.44269504088896341f), splat(12582912.0f));
  vec n = shifted - 12582912.0f;
  vec r = fused(n, splat(2.12194440e-4f), fused(n, splat(-0.693359375f), bounded));
  vec p = splat(1.9875691500e-4f);
  p = fused(p, r, splat(1.3981999507e-3f));
  p = fused(p, r, splat(8.3334519073e-3f));
  p = fused(p, r, splat(4.1665795894e-2f));
  p = fused(p, r, splat(1.6666665459e-1f));
  p = fused(p, r, splat(5.0000001201e-1f));
  p = fused(p, r * r, r) + 1.0f;
  ints bits;
  std::memcpy(&bits, &shifted, sizeof bits);
  bits = (bits - 0x4b400000 + 127) << 23;
  vec power;
  std::memcpy(&power, &bits, sizeof power);
  return x < -87.0f ? vec{} : p * power;
}

// out[i][j] = x[i] . w[j] for MR rows and 4 * NQ columns: lanes run along K and are summed last.
template <int MR, int NQ = 1>
inline void dots(const float* x, int64_t ldx, const float* w, int64_t ldw, int64_t depth,
                 v4 out[MR * NQ]) {
  constexpr int NC = 4 * NQ;
  vec acc[MR][NC] = {};
  int64_t k = 0;
  for (; k + kLanes <= depth; k += kLanes) {
    vec b[NC];
    for (int j = 0; j < NC; ++j) b[j] = load(w + j * ldw + k);
    for (int i = 0; i < MR; ++i) {
      vec a = load(x + i * ldx + k);
      for (int j = 0; j < NC; ++j) acc[i][j] = fused(a, b[j], acc[i][j]);
    }
  }
  if (k < depth) {
    for (int i = 0; i < MR; ++i) {
      vec a = load_part(x + i * ldx + k, depth - k);
      for (int j = 0; j < NC; ++j)
        acc[i][j] = fused(a, load_part(w + j * ldw + k, depth - k), acc[i][j]);
    }
  }
  for (int i = 0; i < MR; ++i)
    for (int q = 0; q < NC; q += 4)
      out[i * NQ + q / 4] = sums(acc[i][q], acc[i][q + 1], acc[i][q + 2], acc[i][q + 3]);
}

// Rows of a tile: their sums, four a row, stay in registers.
constexpr int64_t kRowTile = kRegisters == 32 ? 6 : 3;

// The same for up to kRowTile rows and up to four columns; missing columns repeat the last one.
inline void dots_any(int64_t rows, const float* x, int64_t ldx, const float* w, int64_t ldw,
                     int64_t columns, int64_t depth, v4* out) {
  if (columns < 4) {
    for (int64_t j = 0; j < columns; ++j) {
      v4 one[kRowTile] = {};
      dots_any(rows, x, ldx, w + j * ldw, 0, 4, depth, one);
      for (int64_t i = 0; i < rows; ++i) out[i][j] = one[i][0];
    }
    return;
  }
  switch (rows) {
    case 1: return dots<1>(x, ldx, w, ldw, depth, out);
    case 2: return dots<2>(x, ldx, w, ldw, depth, out);
    case kRowTile: return dots<kRowTile>(x, ldx, w, ldw, depth, out);
    default: break;
  }
  if constexpr (kRowTile == 6) {
    if (rows == 3) return dots<3>(x, ldx, w, ldw, depth, out);
    if (rows == 4) return dots<4>(x, ldx, w, ldw, depth, out);
    if (rows == 5) return dots<5>(x, ldx, w, ldw, depth, out);
  }
}

// out[rows][columns] = x w^T, a panel of w that fits the second-level cache.
void panel(const float* x, int64_t ldx, int64_t rows, const float* w, int64_t ldw, int64_t columns,
           int64_t depth, float* out, int64_t ldo) {
  for (int64_t i = 0; i < rows; i += kRowTile) {
    int64_t m = std::min(kRowTile, rows - i), j = 0;
    // A row alone would wait for each sum: more columns keep more sums going.
    constexpr int kWide = kRegisters / 8;
    for (; m == 1 && j + 4 * kWide <= columns; j += 4 * kWide) {
      v4 wide[kWide] = {};
      dots<1, kWide>(x + i * ldx, ldx, w + j * ldw, ldw, depth, wide);
      std::memcpy(out + i * ldo + j, wide, sizeof wide);
    }
    for (; j < columns; j += 4) {
      int64_t n = std::min<int64_t>(4, columns - j);
      v4 tile[kRowTile] = {};
      dots_any(m, x + i * ldx, ldx, w + j * ldw, ldw, n, depth, tile);
      for (int64_t r = 0; r < m; ++r)
        std::memcpy(out + (i + r) * ldo + j, &tile[r], n * sizeof(float));
    }
  }
}

// acc[i] = acc[i] * decay[i] + sum over t of p[i][t] v[t], tokens in ascending order.
template <int MR, int NV>
inline void weigh(const float* p, int64_t ldp, const float* v, int64_t dim, int64_t tokens,
                  const float* decay, float* acc, int64_t lda) {
  vec sum[MR][NV];
  for (int i = 0; i < MR; ++i)
    for (int n = 0; n < NV; ++n) sum[i][n] = load(acc + i * lda + n * kLanes) * decay[i];
  for (int64_t t = 0; t < tokens; ++t) {
    vec b[NV];
    for (int n = 0; n < NV; ++n) b[n] = load(v + t * dim + n * kLanes);
    for (int i = 0; i < MR; ++i)
      for (int n = 0; n < NV; ++n) sum[i][n] = fused(splat(p[i * ldp + t]), b[n], sum[i][n]);
  }
  for (int i = 0; i < MR; ++i)
    for (int n = 0; n < NV; ++n) store(acc + i * lda + n * kLanes, sum[i][n]);
}

template <int NV>
void weigh_rows(int64_t rows, const float* p, const float* v, int64_t dim, int64_t tokens,
                const float* decay, float* acc) {
  constexpr int kRows = kRegisters / 8;
  int64_t i = 0;
  for (; i + kRows <= rows; i += kRows)
    weigh<kRows, NV>(p + i * kBlock, kBlock, v, dim, tokens, decay + i, acc + i * dim, dim);
  for (; i < rows; ++i)
    weigh<1, NV>(p + i * kBlock, kBlock, v, dim, tokens, decay + i, acc + i * dim, dim);
}

// One online-softmax step of `rows` queries over one block's first `tokens` tokens.
void attend_block(const float* q, int64_t rows, int64_t dim, const float* keys,
                  const float* values, int64_t tokens, float* scores, float* best, float* total,
                  float* decay, float* acc) {
  panel(q, dim, rows, keys, dim, tokens, dim, scores, kBlock);
  for (int64_t i = 0; i < rows; ++i) {
    float* s = scores + i * kBlock;
    std::fill(s + tokens, s + kBlock, -kInf);
    float top = best[i];
    for (int64_t t = 0; t < tokens; ++t) top = s[t] > top ? s[t] : top;
    decay[i] = std::exp(best[i] - top);
    vec part{};
    for (int64_t t = 0; t < kBlock; t += kLanes) {
      vec p = exp_nonpositive(load(s + t) - top);
      store(s + t, p);
      part += p;
    }
    total[i] = total[i] * decay[i] + sum(part);
    best[i] = top;
  }
  int64_t d = 0;
  for (; d + 4 * kLanes <= dim; d += 4 * kLanes)
    weigh_rows<4>(rows, scores, values + d, dim, tokens, decay, acc + d);
  for (; d < dim; d += kLanes) weigh_rows<1>(rows, scores, values + d, dim, tokens, decay, acc + d);
}

inline const float* at(const int64_t* addresses, int64_t i) {
  return reinterpret_cast<const float*>(addresses[i]);
}

}  // namespace

extern "C" {

// out [rows, columns] = x [rows, depth] w [columns, depth]^T for several groups of rows: group g
// has counts[g] consecutive rows of x and its own w at address weights[g].
void winnow_linear(const float* x, int64_t depth, const int64_t* weights, const int64_t* counts,
                   int64_t groups, int64_t columns, float* out, int threads) {
  int64_t rows = 0;
  for (int64_t g = 0; g < groups; ++g) rows += counts[g];
  int64_t width = std::max<int64_t>(4, (1 << 15) / std::max<int64_t>(depth, 1) / 4 * 4);
  width = std::min(width, std::max<int64_t>(4, (columns / (2 * threads) + 3) / 4 * 4));
  const int64_t height = 96;
  struct Task {
    int64_t row, rows, column, group;
  };
  std::vector<Task> tasks;
  for (int64_t g = 0, first = 0; g < groups; first += counts[g++])
    for (int64_t i = 0; i < counts[g]; i += height)
      for (int64_t j = 0; j < columns; j += width)
        tasks.push_back({first + i, std::min(height, counts[g] - i), j, g});
  const bool small = rows * columns * depth < (1 << 16);
#pragma omp parallel for num_threads(threads) schedule(dynamic) if (!small)
  for (size_t n = 0; n < tasks.size(); ++n) {
    const Task& t = tasks[n];
    panel(x + t.row * depth, depth, t.rows, at(weights, t.group) + t.column * depth, depth,
          std::min(width, columns - t.column), depth, out + t.row * columns + t.column, columns);
  }
}

// scores [queries, ld]: scores[i][b] = max over the 128 keys [128, dim] at keys[b] of q[i] . key,
// for blocks b < current[i]. A NaN product never wins.
void winnow_block_scores(const float* q, int64_t queries, int64_t dim, const int64_t* keys,
                         int64_t first, int64_t blocks, const int64_t* current, float* scores,
                         int64_t ld, int threads) {
#pragma omp parallel for num_threads(threads) schedule(dynamic) if (queries * blocks > 8)
  for (int64_t b = 0; b < blocks; ++b) {
    for (int64_t i = 0; i < queries; i += kRowTile) {
      int64_t m = std::min(kRowTile, queries - i);
      if (*std::max_element(current + i, current + i + m) <= first + b) continue;
      v4 best[kRowTile];
      for (auto& row : best) row = v4{} - kInf;
      for (int64_t j = 0; j < kBlock; j += 4) {
        v4 tile[kRowTile] = {};
        dots_any(m, q + i * dim, dim, at(keys, b) + j * dim, dim, 4, dim, tile);
        for (int64_t r = 0; r < m; ++r) best[r] = tile[r] > best[r] ? tile[r] : best[r];
      }
      for (int64_t r = 0; r < m; ++r) {
        float top = best[r][0];
        for (int n = 1; n < 4; ++n) top = best[r][n] > top ? best[r][n] : top;
        scores[(i + r) * ld + first + b] = top;
      }
    }
  }
}

// ids [queries, topk]: block current[i] and the topk - 1 best of the blocks before it, ascending,
// tail -1; the lower block wins ties.
void winnow_top_blocks(const float* scores, int64_t queries, int64_t ld, const int64_t* current,
                       int64_t topk, int32_t* ids, int threads) {
#pragma omp parallel for num_threads(threads) if (queries > 64)
  for (int64_t i = 0; i < queries; ++i) {
    const float* s = scores + i * ld;
    int32_t* chosen = ids + i * topk;
    int64_t count = 0;
    for (int64_t b = 0; b < current[i] && topk > 1; ++b) {
      if (count == topk - 1 && !(s[b] > s[chosen[count - 1]])) continue;
      int64_t place = count < topk - 1 ? count++ : count - 1;
      for (; place > 0 && s[b] > s[chosen[place - 1]]; --place) chosen[place] = chosen[place - 1];
      chosen[place] = static_cast<int32_t>(b);
    }
    std::sort(chosen, chosen + count);
    chosen[count++] = static_cast<int32_t>(current[i]);
    std::fill(chosen + count, chosen + topk, -1);
  }
}

// out [rows, kv_heads, group, dim] = softmax(q k) v over lists of blocks, q scaled already. The list
// of (row, head) begins at lists[row * kv_heads + head] and has counts[...] blocks, each 128
// tokens [128, dim] at keys[...] and values[...]; of the last one tokens 0 .. positions % 128 are
// seen. A count of 0 gives zeros.
void winnow_attend(const float* q, int64_t rows, int64_t kv_heads, int64_t group, int64_t dim,
                   const int64_t* positions, const int64_t* lists, const int64_t* counts,
                   const int64_t* keys, const int64_t* values, float* out, int threads) {
  const int64_t together = std::max<int64_t>(1, 16 / group);
  const int64_t tiles = (rows + together - 1) / together;
#pragma omp parallel num_threads(threads)
  {
    std::vector<float> scores(together * group * kBlock), best(together * group);
    std::vector<float> total(best), decay(best), query(together * group * dim), acc(query);
#pragma omp for schedule(dynamic)
    for (int64_t task = 0; task < kv_heads * tiles; ++task) {
      const int64_t head = task / tiles, end = std::min(rows, (task % tiles + 1) * together);
      for (int64_t row = task % tiles * together, next; row < end; row = next) {
        // Rows with the same list share its whole blocks; the last block each sees in part.
        const int64_t list = lists[row * kv_heads + head], count = counts[row * kv_heads + head];
        for (next = row + 1; next < end && lists[next * kv_heads + head] == list &&
                             counts[next * kv_heads + head] == count;)
          ++next;
        const int64_t m = (next - row) * group;
        for (int64_t r = row; r < next; ++r)
          std::memcpy(&query[(r - row) * group * dim], q + (r * kv_heads + head) * group * dim,
                      group * dim * sizeof(float));
        std::fill(best.begin(), best.end(), -kInf);
        std::fill(total.begin(), total.end(), 0.0f);
        std::fill(acc.begin(), acc.end(), 0.0f);
        for (int64_t b = 0; b + 1 < count; ++b)
          attend_block(query.data(), m, dim, at(keys, list + b), at(values, list + b), kBlock,
                       scores.data(), best.data(), total.data(), decay.data(), acc.data());
        for (int64_t r = row; r < next; ++r) {
          const int64_t i = (r - row) * group;
          if (count > 0)
            attend_block(&query[i * dim], group, dim, at(keys, list + count - 1),
                         at(values, list + count - 1), positions[r] % kBlock + 1, &scores[i * kBlock],
                         &best[i], &total[i], &decay[i], &acc[i * dim]);
          for (int64_t g = 0; g < group; ++g)
            for (int64_t d = 0; d < dim; ++d)
              out[((r * kv_heads + head) * group + g) * dim + d] =
                  count > 0 ? acc[(i + g) * dim + d] / total[i + g] : 0.0f;
        }
      }
    }
  }
}

// Gemma's norm of each of rows * heads vectors, then rotation of the first 2 * half channels by
// the row's cos and sin [rows, half]; half 0 rotates nothing. x and out have the row strides given.
void winnow_norm_rotate(const float* x, int64_t rows, int64_t heads, int64_t dim, int64_t ldx,
                        const float* weight, float eps, const float* cosines, const float* sines,
                        int64_t half, float* out, int64_t ldo, int threads) {
#pragma omp parallel for num_threads(threads) if (rows * heads * dim > (1 << 16))
  for (int64_t n = 0; n < rows * heads; ++n) {
    const int64_t row = n / heads, head = n % heads;
    const float* in = x + row * ldx + head * dim;
    float* to = out + row * ldo + head * dim;
    vec squares{};
    int64_t k = 0;
    for (; k + kLanes <= dim; k += kLanes) squares = fused(load(in + k), load(in + k), squares);
    vec rest = load_part(in + k, dim - k);
    squares = fused(rest, rest, squares);
    const float scale = 1.0f / std::sqrt(sum(squares) / static_cast<float>(dim) + eps);
    for (int64_t d = 0; d < dim; ++d) to[d] = in[d] * scale * (1.0f + weight[d]);
    const float *c = cosines + row * half, *s = sines + row * half;
    for (int64_t d = 0; d < half; ++d) {
      const float a = to[d], b = to[d + half];
      to[d] = a * c[d] - b * s[d];
      to[d + half] = b * c[d] + a * s[d];
    }
  }
}

// out [blocks, 128, dim] from blocks of E2M1 codes, two a byte, and E4M3 scales, one for 16 values:
// (code * scale) exactly, times `global`, rounded once.
void winnow_expand_nvfp4(const int64_t* codes, const int64_t* scales, int64_t blocks, int64_t dim,
                         const float* e4m3, float global, float* out, int threads) {
  typedef float group __attribute__((vector_size(64), aligned(4), may_alias));
  typedef int32_t nibbles __attribute__((vector_size(64), aligned(4)));
  const group table = {0.0f, 0.5f, 1.0f, 1.5f, 2.0f, 3.0f, 4.0f, 6.0f,
                       -0.0f, -0.5f, -1.0f, -1.5f, -2.0f, -3.0f, -4.0f, -6.0f};
  const int64_t groups = kBlock * dim / 16;
#pragma omp parallel for num_threads(threads) if (blocks > 2)
  for (int64_t b = 0; b < blocks; ++b) {
    const uint8_t* code = reinterpret_cast<const uint8_t*>(codes[b]);
    const uint8_t* scale = reinterpret_cast<const uint8_t*>(scales[b]);
    for (int64_t g = 0; g < groups; ++g) {
      float* to = out + (b * groups + g) * 16;
      if constexpr (kLanes == 16) {
        nibbles places;
        for (int k = 0; k < 8; ++k) {
          places[2 * k] = code[g * 8 + k] & 15;
          places[2 * k + 1] = code[g * 8 + k] >> 4;
        }
        *reinterpret_cast<group*>(to) = __builtin_shuffle(table, places) * e4m3[scale[g]] * global;
      } else {
        for (int k = 0; k < 8; ++k) {
          to[2 * k] = table[code[g * 8 + k] & 15] * e4m3[scale[g]] * global;
          to[2 * k + 1] = table[code[g * 8 + k] >> 4] * e4m3[scale[g]] * global;
        }
      }
    }
  }
}

// out [blocks, 128, dim] from blocks of E4M3 codes, times `global`.
void winnow_expand_fp8(const int64_t* codes, int64_t blocks, int64_t dim, const float* e4m3,
                       float global, float* out, int threads) {
#pragma omp parallel for num_threads(threads) if (blocks > 2)
  for (int64_t b = 0; b < blocks; ++b) {
    const uint8_t* code = reinterpret_cast<const uint8_t*>(codes[b]);
    for (int64_t k = 0; k < kBlock * dim; ++k) out[b * kBlock * dim + k] = e4m3[code[k]] * global;
  }
}

// Copy values [rows, heads, bytes] to their tokens: row r to base + pages[r] * page_stride + h *
// head_stride + offsets[r] * bytes.
void winnow_scatter(const uint8_t* values, int64_t rows, int64_t heads, int64_t bytes,
                    const int64_t* pages, const int64_t* offsets, uint8_t* base,
                    int64_t page_stride, int64_t head_stride) {
  for (int64_t r = 0; r < rows; ++r)
    for (int64_t h = 0; h < heads; ++h)
      std::memcpy(base + pages[r] * page_stride + h * head_stride + offsets[r] * bytes,
                  values + (r * heads + h) * bytes, bytes);
}

// out [rows, width] = g sigmoid(alpha g) (u + beta) with [g | u] = x [rows, 2 width], g at most limit
// and u within +-limit.
void winnow_activation(const float* x, int64_t rows, int64_t width, float alpha, float limit,
                       float beta, float* out, int threads) {
#pragma omp parallel for num_threads(threads) if (rows * width > (1 << 15))
  for (int64_t row = 0; row < rows; ++row) {
    const float *gates = x + row * 2 * width, *ups = gates + width;
    for (int64_t k = 0; k < width; k += kLanes) {
      const int64_t count = std::min(kLanes, width - k);
      vec g = load_part(gates + k, count), u = load_part(ups + k, count);
      g = g > limit ? splat(limit) : g;
      u = u > limit ? splat(limit) : u < -limit ? splat(-limit) : u;
      vec z = g * alpha;
      vec e = exp_nonpositive(z > 0.0f ? -z : z);
      vec sigmoid = (z > 0.0f ? splat(1.0f) : e) / (1.0f + e);
      vec y = g * sigmoid * (u + beta);
      std::memcpy(out + row * width + k, &y, count * sizeof(float));
    }
  }
}

}  // extern "C"

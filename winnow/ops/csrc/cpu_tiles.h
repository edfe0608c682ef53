// Products of a few rows with a few columns, and steps of attention over one block.

#pragma once

#include "cpu_vectors.h"

namespace {

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

// out [rows, columns] = x [rows, depth] w^T for several groups of rows: group g has counts[g]
// consecutive rows of x. weight(g, column, width): rows column .. column + width of its w, [width,
// depth], good until the same thread asks again.
template <typename Weight>
void multiply(const float* x, int64_t depth, const int64_t* counts, int64_t groups, int64_t columns,
              float* out, int threads, const Weight& weight) {
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
    const int64_t own = std::min(width, columns - t.column);
    panel(x + t.row * depth, depth, t.rows, weight(t.group, t.column, own), depth, own, depth,
          out + t.row * columns + t.column, columns);
  }
}

}  // namespace

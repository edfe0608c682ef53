// Kernels of the CPU backend, in fp32. Every result of a row is computed by the same operations in
// the same order however many rows stand beside it: that, and not a library, is what makes a
// request's tokens independent of its batch and of its chunks.
//
// Built by winnow/ops/native.py with -march=native; vector types let the compiler choose the
// instructions. Contraction and reassociation are off: a compiler that fuses a product and a sum in
// one place and not in another (GCC's tuning for Zen does) would break that promise. `fused` says
// where they are fused.

#include "cpu_tiles.h"
#include "cpu_weights.h"

extern "C" {

// out [rows, columns] = x [rows, depth] w [columns, depth]^T for several groups of rows: group g
// has counts[g] consecutive rows of x and its own w at address weights[g].
void winnow_linear(const float* x, int64_t depth, const int64_t* weights, const int64_t* counts,
                   int64_t groups, int64_t columns, float* out, int threads) {
  multiply(x, depth, counts, groups, columns, out, threads,
           [=](int64_t group, int64_t column, int64_t) {
             return at(weights, group) + column * depth;
           });
}

// The same with w of quantised weights, whose rows are expanded where they are multiplied. codes[g]
// and scales[g] are addresses; globals[g] too, of a float for each row of w (format kNvfp4).
void winnow_linear_quantised(const float* x, int64_t depth, int format, const int64_t* codes,
                             const int64_t* scales, const int64_t* globals, const float* e4m3,
                             const float* e8m0, const int64_t* counts, int64_t groups,
                             int64_t columns, float* out, int threads) {
  const CodeTables tables{e4m3, e8m0};
  multiply(x, depth, counts, groups, columns, out, threads,
           [=](int64_t group, int64_t column, int64_t width) -> const float* {
             thread_local std::vector<float> rows;
             rows.resize(width * depth);
             const auto* code = reinterpret_cast<const uint8_t*>(codes[group]);
             const auto* scale = reinterpret_cast<const uint8_t*>(scales[group]);
             for (int64_t i = 0; i < width; ++i) {
               const int64_t row = column + i;
               float* to = rows.data() + i * depth;
               if (format == kMxfp8) {
                 expand_mxfp8(code + row * depth, scale + row * (depth / 32), depth, tables, to);
               } else {
                 expand_nvfp4(code + row * (depth / 2), scale + row * (depth / 16), depth,
                              at(globals, group)[row], tables, to);
               }
             }
             return rows.data();
           });
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

// out [blocks, 128, dim] from blocks of E2M1 codes and E4M3 scales: see expand_nvfp4.
void winnow_expand_nvfp4(const int64_t* codes, const int64_t* scales, int64_t blocks, int64_t dim,
                         const float* e4m3, float global, float* out, int threads) {
  const CodeTables tables{e4m3, nullptr};
#pragma omp parallel for num_threads(threads) if (blocks > 2)
  for (int64_t b = 0; b < blocks; ++b)
    expand_nvfp4(reinterpret_cast<const uint8_t*>(codes[b]),
                 reinterpret_cast<const uint8_t*>(scales[b]), kBlock * dim, global, tables,
                 out + b * kBlock * dim);
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

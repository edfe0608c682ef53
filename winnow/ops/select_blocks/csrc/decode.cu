// select_blocks for a few query rows a request, over a paged index cache, on Hopper (sm_90a).
//
// Two kernels. `score` (decode_score.cuh) writes the score of every block that is wholly in a row's
// past, `choose` (decode_choose.cuh) takes the best topk - 1 of them and the current block. The
// meaning is reference.py's. What hangs on the storage format is in decode_keys.cuh.

#include "decode_choose.cuh"
#include "decode_score.cuh"

namespace {

using Score = void (*)(Keys, Queries, Requests, Scores);
using Choose = void (*)(Requests, Scores, int, int, int, int32_t*);

// A kernel of `score`, and the bytes of shared memory that it takes beside the requests'.
struct Scorer {
  Score kernel;
  int shared_bytes;
};

template <typename F>
Scorer scorer_of(bool wide, int tiles) {
  Score kernel = tiles == 1   ? score<F, Bf16, 1>
                 : tiles == 2 ? score<F, Bf16, 2>
                              : score<F, Bf16, 4>;
  if constexpr (!F::kBf16) {
    if (wide) kernel = tiles == 1 ? score<F, float, 1> : score<F, float, 2>;
  } else if (wide) {
    kernel = nullptr;
  }
  return {kernel, kStarts<F>};
}

Scorer scorer_of(int format, bool wide, int tiles) {
  switch (format) {
    case 1: return scorer_of<Wide<true>>(wide, tiles);
    case 2: return scorer_of<Wide<false>>(wide, tiles);
    case 3: return scorer_of<Nvfp4>(wide, tiles);
    default: return {nullptr, 0};
  }
}

Choose choose_kernel(int max_blocks) {
  if (max_blocks <= 4 * kChooseThreads) return choose<4>;
  if (max_blocks <= 16 * kChooseThreads) return choose<16>;
  return max_blocks <= 64 * kChooseThreads ? choose<64> : nullptr;
}

}  // namespace

// Scores a (row, head) needs room for: `winnow_select_decode`'s score_stride.
extern "C" int winnow_select_decode_stride(int max_blocks, int multiprocessors) {
  const int workers = multiprocessors * kWarps;
  const int split = 4 * max_blocks < workers ? 4 * max_blocks : workers;
  return ((max_blocks > split ? max_blocks : split) + 3) / 4 * 4;
}

// format: 1 bf16 (then queries are bf16), 2 fp8, 3 nvfp4. wide: queries are fp32, else bf16. tiles:
// query columns a pass / 8 (1, 2, 4; at most 2 if wide). heads: 1, 2, 4 or 8. Strides of queries and
// the table are in elements, of pages in bytes. scores: float [rows * heads, score_stride], need not
// be set. Returns a cudaError_t.
extern "C" int winnow_select_decode(
    const void* codes, const void* scales, int64_t page_stride, int format, const void* queries,
    int64_t row_stride, int64_t head_stride, int rows, int heads, int wide, int tiles,
    const int64_t* positions, const int64_t* row_request, const int64_t* row_starts,
    const int64_t* kv_lens, const int64_t* tables, int64_t table_stride, int num_requests,
    int max_blocks, int topk, float* scores, int score_stride, int32_t* ids, int multiprocessors,
    cudaStream_t stream) {
  const Choose choose_blocks = choose_kernel(max_blocks);
  const Scorer scorer = scorer_of(format, wide != 0, tiles);
  int head_bits = 0;
  while (1 << head_bits < heads) ++head_bits;
  if (choose_blocks == nullptr || topk < 1 || topk > kMaxTopk || 1 << head_bits != heads ||
      heads > 8 || multiprocessors > kMaxMultiprocessors || scorer.kernel == nullptr)
    return cudaErrorInvalidValue;
  const Score score_blocks = scorer.kernel;
  const Requests requests = {positions, row_request,  row_starts,   kv_lens,
                             tables,    table_stride, num_requests, topk};
  const Scores room = {scores, score_stride};
  const int shared_bytes = scorer.shared_bytes + (num_requests + 1) * 4;
  cudaError_t error = cudaFuncSetAttribute(
      score_blocks, cudaFuncAttributeMaxDynamicSharedMemorySize, shared_bytes);
  if (error != cudaSuccess) return error;
  // Where the carve-outs agree, `choose` can wait on the machine while `score` still runs.
  for (const void* kernel : {(const void*)score_blocks, (const void*)choose_blocks}) {
    error = cudaFuncSetAttribute(kernel, cudaFuncAttributePreferredSharedMemoryCarveout,
                                 cudaSharedmemCarveoutMaxShared);
    if (error != cudaSuccess) return error;
  }
  // Both kernels wait by themselves for the one before, and let the next begin.
  cudaLaunchAttribute early = {};
  early.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  early.val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t config = {};
  config.gridDim = multiprocessors;
  config.blockDim = kWarps * 32;
  config.dynamicSmemBytes = shared_bytes;
  config.stream = stream;
  config.attrs = &early;
  config.numAttrs = 1;
  const Keys keys = {static_cast<const uint8_t*>(codes), static_cast<const uint8_t*>(scales),
                     page_stride};
  const Queries columns = {queries, row_stride, head_stride, head_bits};
  error = cudaLaunchKernelEx(&config, score_blocks, keys, columns, requests, room);
  if (error != cudaSuccess) return error;
  config.gridDim = rows * heads;
  config.blockDim = kChooseThreads;
  config.dynamicSmemBytes = 0;
  return cudaLaunchKernelEx(&config, choose_blocks, requests, room, head_bits,
                            pass_bits_of(tiles, head_bits), multiprocessors * kWarps, ids);
}

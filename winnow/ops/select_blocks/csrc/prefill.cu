// select_blocks for many query rows a request, on Hopper (sm_90a).
//
// Three kernels. `prepare` writes the index keys of each block as 16-bit numbers, in the order in
// which the tensor core reads them from shared memory; `score` multiplies tiles of query columns
// (row, head) by them and keeps each block's largest product; `choose` takes the best topk - 1
// blocks of each column and the current block. The meaning is reference.py's.
//
// score: a CTA holds 256 query columns of one request as A fragments in registers and walks over
// blocks, whose keys come by bulk copies into a ring of stages: a key is read from memory once for
// 256 columns. A warpgroup takes the maxima of 64 columns while the tensor core multiplies its
// other 64. `prepare` plans it: a CTA a multiprocessor, all with as many blocks, so that most begin
// within a tile and end within the next.
//
// Exactness. As in decode.cu: NVFP4 and FP8 keys are exact in fp16 (a code's bits are code * 2^-14
// there), queries are multiplied by a power of two of their column, and the tensor core adds in
// fp32. bf16 keys are multiplied by bf16 queries.

#include "prefill_choose.cuh"
#include "prefill_expand.cuh"
#include "prefill_score.cuh"

// codes, scales: keys of page 0, rows of pages page_stride bytes apart; format: 0 nvfp4, 1 fp8,
// 2 bf16. queries: bf16, strides in elements, 4-byte aligned. heads: 1, 2, 4 or 8. images:
// 32,768 bytes for each (request, block), 128-byte aligned. scores: float [(end_row - first_row) *
// heads, stride], stride a multiple of 128 and at least max_blocks; neither need be set. tiles: at
// least those of all requests of 256 / heads rows each; plan: 20 bytes for each and 8 for each of
// ctas + 1, 16-byte aligned. Returns a cudaError_t.
extern "C" int winnow_select_prefill(
    const void* codes, const void* scales, int64_t page_stride, int format, const void* queries,
    int64_t row_stride, int64_t head_stride, int heads, const int64_t* positions,
    const int64_t* row_request, const int64_t* row_starts, const int64_t* kv_lens,
    const int64_t* tables, int64_t table_stride, int num_requests, int max_blocks, int topk,
    int first_row, int end_row, void* images, float* score_data, int64_t stride,
    void* plan_data, int tiles, int ctas, int expanded, int32_t* ids, cudaStream_t stream) {
  int head_bits = 0;
  while (1 << head_bits < heads) ++head_bits;
  if (1 << head_bits != heads || heads > 8 || topk < 1 || topk > kMaxTopk || stride % 128 ||
      stride < max_blocks || format < kNvfp4 || format > kBf16 || end_row <= first_row)
    return cudaErrorInvalidValue;
  const Keys keys = {static_cast<const uint8_t*>(codes), static_cast<const uint8_t*>(scales),
                     page_stride, format};
  const Requests requests = {positions,    row_request,  row_starts, kv_lens,   tables, table_stride,
                             num_requests, max_blocks, first_row, end_row, topk};
  const Queries held = {static_cast<const uint16_t*>(queries), row_stride, head_stride, head_bits};
  uint8_t* room = static_cast<uint8_t*>(images);
  Plan plan;
  plan.tiles = static_cast<Tile*>(plan_data);
  plan.begins = reinterpret_cast<Place*>(plan.tiles + tiles);
  plan.portions = reinterpret_cast<int32_t*>(plan.begins + ctas + 1);
  plan.ctas = ctas;
  prepare<<<dim3(1 + (expanded ? 0 : max_blocks), num_requests), kExpandThreads, 0, stream>>>(
      keys, requests, kTileColumns >> head_bits, plan, room);
  cudaError_t error = cudaGetLastError();
  if (error != cudaSuccess) return error;
  const auto score_blocks = format == kBf16 ? score<true> : score<false>;
  constexpr int kSharedBytes = kStages * kImageBytes;
  error = cudaFuncSetAttribute(
      score_blocks, cudaFuncAttributeMaxDynamicSharedMemorySize, kSharedBytes);
  if (error != cudaSuccess) return error;
  score_blocks<<<ctas, kThreads, kSharedBytes, stream>>>(held, requests, plan, room, score_data,
                                                        stride);
  error = cudaGetLastError();
  if (error != cudaSuccess) return error;
  const int64_t columns = static_cast<int64_t>(end_row - first_row) << head_bits;
  choose<<<static_cast<unsigned>((columns + kChooseWarps - 1) / kChooseWarps), kChooseWarps * 32, 0,
           stream>>>(requests, head_bits, score_data, stride, ids);
  return cudaGetLastError();
}

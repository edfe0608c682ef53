"""`sparse_attention` in Triton: one program for each row and KV head walks its list of blocks.

Serves every format, decode and prefill alike; rows that share blocks each read them, from L2
where they are near in time. Lengths and tables are read on the device and the grid depends on
shapes alone, so a CUDA graph may hold a call.
"""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from winnow.ops.batch import Batch
from winnow.ops.paged import LayerPages
from winnow.ops.triton_codec import round_to
from winnow.ops.triton_pages import BLOCK, Stored, channels, compute_dtype
from winnow.ops.triton_softmax import attend_tokens

_TILE_TOKENS = {tl.bfloat16: 64, tl.float32: 32}
"""What registers allow; products in fp32 are not the tensor cores', so their code is longer."""


def sparse_attention(q: Tensor, ids: Tensor, batch: Batch, pages: LayerPages) -> Tensor:
    """See `winnow.ops.sparse_attention.SparseAttention`; every tensor on one device."""
    rows, heads, dim = q.shape
    kv_heads, topk = ids.shape[1:]
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    if not rows:
        return out
    q = q if q.stride(2) == 1 else q.contiguous()
    key, value = Stored.of(pages.key), Stored.of(pages.value)
    dtype = compute_dtype(q, pages.key, pages.value)
    _attend[rows, kv_heads](
        q, q.stride(0), q.stride(1), ids.contiguous(), out,
        batch.positions, batch.row_request, batch.kv_lens,
        batch.block_tables, batch.block_tables.stride(0),
        key.codes, key.scales, key.page_stride, key.head_stride,
        value.codes, value.scales, value.page_stride, value.head_stride,
        math.log2(math.e) * dim**-0.5 * pages.key.global_scale, pages.value.global_scale,
        KV_HEADS=kv_heads, GROUP=heads // kv_heads, TOPK=topk, DIM=dim,
        KEY_FORMAT=key.format, VALUE_FORMAT=value.format, DTYPE=dtype,
        TILE_M=max(16, triton.next_power_of_2(heads // kv_heads)),
        TILE_T=_TILE_TOKENS[dtype], LISTED=triton.next_power_of_2(topk),
        num_warps=4,
    )  # fmt: skip
    return out


@triton.jit(do_not_specialize=["table_stride"])
def _attend(
    q, q_row_stride, q_head_stride, ids, out,
    positions, row_request, kv_lens, tables, table_stride,
    key_codes, key_scales, key_page_stride, key_head_stride,
    value_codes, value_scales, value_page_stride, value_head_stride,
    score_scale, value_scale,
    KV_HEADS: tl.constexpr, GROUP: tl.constexpr, TOPK: tl.constexpr, DIM: tl.constexpr,
    KEY_FORMAT: tl.constexpr, VALUE_FORMAT: tl.constexpr, DTYPE: tl.constexpr,
    TILE_M: tl.constexpr, TILE_T: tl.constexpr, LISTED: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    kv_head = tl.program_id(1).to(tl.int64)
    request = tl.load(row_request + row)
    visible = tl.where(tl.load(kv_lens + request) > 0, tl.load(positions + row) + 1, 0)
    listed = tl.arange(0, LISTED)
    ids += (row * KV_HEADS + kv_head) * TOPK
    chosen = tl.load(ids + listed, mask=listed < TOPK, other=-1)
    count = tl.where(visible > 0, tl.sum((chosen >= 0).to(tl.int32), 0), 0)
    member = tl.arange(0, TILE_M)
    mine = (member < GROUP)[:, None]
    first_channels = channels(0, DIM, KEY_FORMAT)[None, :]
    second_channels = channels(1, DIM, KEY_FORMAT)[None, :]
    q += row * q_row_stride + (kv_head * GROUP + member)[:, None] * q_head_stride
    first_q = round_to(tl.load(q + first_channels, mask=mine, other=0).to(tl.float32), DTYPE)
    second_q = round_to(tl.load(q + second_channels, mask=mine, other=0).to(tl.float32), DTYPE)
    first_out = tl.zeros((TILE_M, DIM // 2), tl.float32)
    second_out = tl.zeros((TILE_M, DIM // 2), tl.float32)
    maxima = tl.full((TILE_M,), float("-inf"), tl.float32)
    sums = tl.zeros((TILE_M,), tl.float32)
    seen = tl.full((TILE_M,), 0, tl.int64) + visible
    key_codes += kv_head * key_head_stride
    value_codes += kv_head * value_head_stride
    for step in range(count * (BLOCK // TILE_T)):
        listed_at = step * TILE_T // BLOCK
        block = tl.load(ids + listed_at).to(tl.int64)
        page = tl.load(tables + request * table_stride + block)
        tokens = step * TILE_T - listed_at * BLOCK + tl.arange(0, TILE_T)
        key_steps = key_codes
        value_steps = value_codes
        if KEY_FORMAT == "nvfp4":
            key_steps = key_scales + kv_head * key_head_stride + page * key_page_stride
        if VALUE_FORMAT == "nvfp4":
            value_steps = value_scales + kv_head * value_head_stride + page * value_page_stride
        first_out, second_out, maxima, sums = attend_tokens(
            first_out, second_out, maxima, sums, first_q, second_q,
            key_codes + page * key_page_stride, key_steps,
            value_codes + page * value_page_stride, value_steps,
            tokens, block * BLOCK, seen, visible, score_scale,
            DIM, KEY_FORMAT, VALUE_FORMAT, DTYPE,
        )  # fmt: skip
    # Padding saw nothing: 0 / 0 there.
    factor = tl.where(visible > 0, value_scale / sums, 0.0)[:, None]
    out += (row * KV_HEADS * GROUP + kv_head * GROUP + member)[:, None] * DIM
    kind = out.dtype.element_ty
    first_channels = channels(0, DIM, VALUE_FORMAT)[None, :]
    second_channels = channels(1, DIM, VALUE_FORMAT)[None, :]
    tl.store(out + first_channels, round_to(first_out * factor, kind), mask=mine)
    tl.store(out + second_channels, round_to(second_out * factor, kind), mask=mine)

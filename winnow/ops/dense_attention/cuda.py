"""`dense_attention` in Triton: tiles of a request's rows walk all of its blocks.

The query heads of a KV head share a tile, so K and V are read once for them and for the tile's
rows. Lengths and tables are read on the device and the grid depends on shapes alone, so a CUDA
graph may hold a call. In decode one program walks a whole sequence.
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
from winnow.ops.triton_pages import (
    BLOCK,
    Stored,
    channels,
    compute_dtype,
    num_tiles,
    request_lanes,
    tile_of_rows,
    tile_rows,
)
from winnow.ops.triton_softmax import attend_tokens

_MAX_TILE = {tl.bfloat16: 64, tl.float32: 16}
"""Rows of a tile's products: query rows times the heads of a KV head. Products in fp32 are not the
tensor cores': small tiles keep their code short."""


def dense_attention(q: Tensor, batch: Batch, pages: LayerPages) -> Tensor:
    """See `winnow.ops.dense_attention.DenseAttention`; every tensor on one device."""
    rows, heads, dim = q.shape
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    if not rows:
        return out
    q = q if q.stride(2) == 1 else q.contiguous()
    key, value = Stored.of(pages.key), Stored.of(pages.value)
    kv_heads = key.codes.shape[1]
    group = triton.next_power_of_2(heads // kv_heads)
    dtype = compute_dtype(q, pages.key, pages.value)
    in_tile = tile_rows(batch, _MAX_TILE[dtype] // group)
    tile_m = max(16, in_tile * group)
    _attend[num_tiles(rows, batch.num_requests, in_tile), kv_heads](
        q, q.stride(0), q.stride(1), out,
        batch.positions, batch.row_request, batch.row_starts, batch.kv_lens,
        batch.block_tables, batch.block_tables.stride(0), rows, batch.num_requests,
        key.codes, key.scales, key.page_stride, key.head_stride,
        value.codes, value.scales, value.page_stride, value.head_stride,
        math.log2(math.e) * dim**-0.5 * pages.key.global_scale, pages.value.global_scale,
        KV_HEADS=kv_heads, GROUP=heads // kv_heads, MEMBERS=group, DIM=dim,
        KEY_FORMAT=key.format, VALUE_FORMAT=value.format, DTYPE=dtype,
        TILE_ROWS=in_tile, TILE_M=tile_m,
        TILE_T=64 if dtype == tl.bfloat16 else 32,
        REQUESTS=request_lanes(batch.num_requests, in_tile),
        num_warps=4,
    )  # fmt: skip
    return out


@triton.jit(do_not_specialize=["table_stride", "num_rows", "num_requests"])
def _attend(
    q, q_row_stride, q_head_stride, out,
    positions, row_request, row_starts, kv_lens, tables, table_stride, num_rows, num_requests,
    key_codes, key_scales, key_page_stride, key_head_stride,
    value_codes, value_scales, value_page_stride, value_head_stride,
    score_scale, value_scale,
    KV_HEADS: tl.constexpr, GROUP: tl.constexpr, MEMBERS: tl.constexpr, DIM: tl.constexpr,
    KEY_FORMAT: tl.constexpr, VALUE_FORMAT: tl.constexpr, DTYPE: tl.constexpr,
    TILE_ROWS: tl.constexpr, TILE_M: tl.constexpr, TILE_T: tl.constexpr, REQUESTS: tl.constexpr,
):  # fmt: skip
    request, begin, end = tile_of_rows(
        tl.program_id(0).to(tl.int64), row_starts, row_request, 0, num_rows, num_requests,
        TILE_ROWS, REQUESTS,
    )  # fmt: skip
    kv_head = tl.program_id(1).to(tl.int64)
    lane = tl.arange(0, TILE_M)
    rows = begin + lane // MEMBERS
    member = lane % MEMBERS
    real = (rows < end) & (member < GROUP)
    known = tl.load(kv_lens + request) > 0
    visible = tl.load(positions + rows, mask=real & known, other=-1) + 1
    most_visible = tl.max(visible, 0)
    mine = real[:, None]
    first_channels = channels(0, DIM, KEY_FORMAT)[None, :]
    second_channels = channels(1, DIM, KEY_FORMAT)[None, :]
    q += (rows * q_row_stride + (kv_head * GROUP + member) * q_head_stride)[:, None]
    first_q = round_to(tl.load(q + first_channels, mask=mine, other=0).to(tl.float32), DTYPE)
    second_q = round_to(tl.load(q + second_channels, mask=mine, other=0).to(tl.float32), DTYPE)
    first_out = tl.zeros((TILE_M, DIM // 2), tl.float32)
    second_out = tl.zeros((TILE_M, DIM // 2), tl.float32)
    maxima = tl.full((TILE_M,), float("-inf"), tl.float32)
    sums = tl.zeros((TILE_M,), tl.float32)
    key_codes += kv_head * key_head_stride
    value_codes += kv_head * value_head_stride
    for step in range((most_visible + TILE_T - 1) // TILE_T):
        block = step * TILE_T // BLOCK
        page = tl.load(tables + request * table_stride + block)
        tokens = step * TILE_T - block * BLOCK + tl.arange(0, TILE_T)
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
            tokens, block * BLOCK, visible, most_visible, score_scale,
            DIM, KEY_FORMAT, VALUE_FORMAT, DTYPE,
        )  # fmt: skip
    # Padding saw nothing: 0 / 0 there.
    factor = tl.where(visible > 0, value_scale / sums, 0.0)[:, None]
    out += (rows * (KV_HEADS * GROUP) + kv_head * GROUP + member)[:, None] * DIM
    kind = out.dtype.element_ty
    first_channels = channels(0, DIM, VALUE_FORMAT)[None, :]
    second_channels = channels(1, DIM, VALUE_FORMAT)[None, :]
    tl.store(out + first_channels, round_to(first_out * factor, kind), mask=mine)
    tl.store(out + second_channels, round_to(second_out * factor, kind), mask=mine)

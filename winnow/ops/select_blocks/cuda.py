"""`select_blocks` in Triton: scores of whole blocks into memory, then one selection a row and head.

The current block is always selected, so only blocks wholly in a row's past are scored and no
token needs a mask. Grids depend on shapes alone and nothing is read back, so a CUDA graph may hold
a call.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from winnow.ops.batch import Batch
from winnow.ops.paged import Paged
from winnow.ops.triton_codec import dot, round_to
from winnow.ops.triton_pages import (
    BLOCK,
    Stored,
    channels,
    compute_dtype,
    load_halves,
    num_tiles,
    request_lanes,
    tile_of_rows,
    tile_rows,
)
from winnow.spec.model import BLOCK_TOKENS

_CHUNK = 32
"""Blocks that one program scores."""
_MAX_SCORES = 1 << 26
"""Scores in memory at a time (256 MiB): a long prompt's rows are taken in turns."""
_MIN_ROWS = 64
"""Rows that are always taken together, however many blocks they see."""
_MAX_TILE = {tl.bfloat16: 64, tl.float32: 16}
"""Query rows times heads in a program, and the tokens they meet at a time: products in fp32 are not
the tensor cores', and small tiles keep their code short."""
_TILE_TOKENS = {tl.bfloat16: BLOCK_TOKENS, tl.float32: 32}
_MIN_COLUMNS = 64
_MANY_BLOCKS = 4096
"""Above this, a row's scores need the registers of more warps."""


def select_blocks(index_q: Tensor, index: Paged, batch: Batch, topk: int) -> Tensor:
    """See `winnow.ops.select_blocks.SelectBlocks`; every tensor on one device.

    The keys' global scale is left out: it is positive, so it changes no order. Where two blocks'
    scores differ by the rounding of fp32 sums alone, either may be selected.
    """
    rows, heads, _ = index_q.shape
    ids = torch.empty(rows, heads, topk, dtype=torch.int32, device=index_q.device)
    max_blocks = batch.block_tables.shape[1]
    step = max(_MIN_ROWS, _MAX_SCORES // max(1, heads * max_blocks))
    for first in range(0, rows, step):
        end = min(first + step, rows)
        scores = torch.empty(
            (end - first) * heads, max_blocks, dtype=torch.float32, device=index_q.device
        )
        _score_rows(index_q, index, batch, scores, first, end)
        _select[end - first, heads](
            scores, max_blocks, ids, batch.positions, batch.row_request, batch.kv_lens, first,
            HEADS=heads, TOPK=topk, LISTED=triton.next_power_of_2(topk),
            COLUMNS=max(_MIN_COLUMNS, triton.next_power_of_2(max_blocks)),
            num_warps=16 if max_blocks > _MANY_BLOCKS else 4,
        )  # fmt: skip
    return ids


def _score_rows(
    index_q: Tensor, index: Paged, batch: Batch, scores: Tensor, first: int, end: int
) -> None:
    """Scores of rows first .. end - 1, fp32 [rows * heads, blocks]; blocks not wholly in a row's
    past keep what they held."""
    heads, dim = index_q.shape[1:]
    index_q = index_q if index_q.stride(2) == 1 else index_q.contiguous()
    keys = Stored.of(index)
    members = triton.next_power_of_2(heads)
    dtype = compute_dtype(index_q, index)
    in_tile = tile_rows(batch, _MAX_TILE[dtype] // members)
    tiles = num_tiles(end - first, batch.num_requests, in_tile)
    _score[tiles, triton.cdiv(scores.shape[1], _CHUNK)](
        index_q, index_q.stride(0), index_q.stride(1), scores, scores.shape[1],
        batch.positions, batch.row_request, batch.row_starts, batch.kv_lens,
        batch.block_tables, batch.block_tables.stride(0), first, end, batch.num_requests,
        keys.codes, keys.scales, keys.page_stride,
        HEADS=heads, MEMBERS=members, DIM=dim, FORMAT=keys.format, DTYPE=dtype,
        TILE_ROWS=in_tile, TILE_M=max(16, in_tile * members), CHUNK=_CHUNK,
        REQUESTS=request_lanes(batch.num_requests, in_tile), TILE_T=_TILE_TOKENS[dtype],
        num_warps=4,
    )  # fmt: skip


@triton.jit(
    do_not_specialize=["num_columns", "table_stride", "first_row", "end_row", "num_requests"]
)
def _score(
    q, q_row_stride, q_head_stride, scores, num_columns,
    positions, row_request, row_starts, kv_lens, tables, table_stride,
    first_row, end_row, num_requests, codes, scales, page_stride,
    HEADS: tl.constexpr, MEMBERS: tl.constexpr, DIM: tl.constexpr, FORMAT: tl.constexpr,
    DTYPE: tl.constexpr, TILE_ROWS: tl.constexpr, TILE_M: tl.constexpr, CHUNK: tl.constexpr,
    TILE_T: tl.constexpr, REQUESTS: tl.constexpr,
):  # fmt: skip
    request, begin, end = tile_of_rows(
        tl.program_id(0).to(tl.int64), row_starts, row_request, first_row, end_row, num_requests,
        TILE_ROWS, REQUESTS,
    )  # fmt: skip
    lane = tl.arange(0, TILE_M)
    rows = begin + lane // MEMBERS
    member = lane % MEMBERS
    real = (rows < end) & (member < HEADS)
    known = tl.load(kv_lens + request) > 0
    current = tl.load(positions + rows, mask=real & known, other=0) // BLOCK
    first_block = tl.program_id(1) * CHUNK
    last_block = tl.minimum(tl.max(current, 0), first_block + CHUNK)
    mine = real[:, None]
    q += (rows * q_row_stride + member * q_head_stride)[:, None]
    first_channels = channels(0, DIM, FORMAT)[None, :]
    second_channels = channels(1, DIM, FORMAT)[None, :]
    first_q = round_to(tl.load(q + first_channels, mask=mine, other=0).to(tl.float32), DTYPE)
    second_q = round_to(tl.load(q + second_channels, mask=mine, other=0).to(tl.float32), DTYPE)
    scores += ((rows - first_row) * HEADS + member) * num_columns
    for block in range(first_block, last_block):
        page = tl.load(tables + request * table_stride + block)
        steps = codes
        if FORMAT == "nvfp4":
            steps = scales + page * page_stride
        highest = tl.full((TILE_M,), float("-inf"), tl.float32)
        for first_token in range(0, BLOCK, TILE_T):
            tokens = first_token + tl.arange(0, TILE_T)
            first, second = load_halves(
                codes + page * page_stride, steps, tokens, tokens >= 0, DIM, FORMAT, DTYPE
            )
            products = tl.zeros((TILE_M, TILE_T), tl.float32)
            products = dot(first_q, tl.trans(first), products)
            products = dot(second_q, tl.trans(second), products)
            products = tl.where(products == products, products, float("-inf"))
            highest = tl.maximum(highest, tl.max(products, 1))
        tl.store(scores + block, highest, mask=real & (block < current))


@triton.jit(do_not_specialize=["num_columns", "first_row"])
def _select(
    scores, num_columns, ids, positions, row_request, kv_lens, first_row,
    HEADS: tl.constexpr, TOPK: tl.constexpr, LISTED: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    place = tl.program_id(0).to(tl.int64) * HEADS + tl.program_id(1)
    row = first_row + tl.program_id(0).to(tl.int64)
    known = tl.load(kv_lens + tl.load(row_request + row)) > 0
    current = tl.where(known, tl.load(positions + row) // BLOCK, -1)
    block = tl.arange(0, COLUMNS)
    past = block < current
    found = tl.load(scores + place * num_columns + block, mask=past, other=0.0)
    # Integers in the order of the scores; -0 counts as +0. No score has the lowest of them, not
    # even -inf, so it marks what cannot be chosen.
    lowest: tl.constexpr = -2147483648
    bits = tl.where(found == 0.0, 0.0, found).to(tl.int32, bitcast=True)
    order = tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)
    order = tl.where(past, order, lowest)
    chosen = block < 0
    for _ in range(TOPK - 1):
        best, winner = tl.max(order, 0, return_indices=True, return_indices_tie_break_left=True)
        won = (block == winner) & (best > lowest)
        chosen = chosen | won
        order = tl.where(won, lowest, order)
    counted = chosen.to(tl.int32)
    ids += (row * HEADS + tl.program_id(1)) * TOPK
    tl.store(ids + tl.cumsum(counted, 0) - 1, block, mask=chosen)
    # The current block comes last of those selected, then the tail.
    total = tl.sum(counted, 0)
    slot = tl.arange(0, LISTED)
    rest = tl.where((slot == total) & known, current, -1).to(tl.int32)
    tl.store(ids + slot, rest, mask=(slot >= total) & (slot < TOPK))

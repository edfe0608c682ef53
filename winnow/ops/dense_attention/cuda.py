"""`dense_attention` in Triton: large tiles of a request's rows for prefill, shared ones for decode.

The query heads of a KV head share a tile, so K and V are read once for them and for the tile's
rows. Where tiles are few, several programs share a tile's blocks and a second kernel merges what
they found, in fixed order. Lengths and tables are read on the device and grids depend on shapes
alone, so a CUDA graph may hold a call.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cache

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
)
from winnow.ops.triton_softmax import attend_tokens

PROGRAMS = 4
"""Wanted on each multiprocessor."""
MOST_SPLITS = 128
"""Of a tile's blocks: what the merge looks through."""
_MULTIPROCESSORS = 132
_TILE_PRODUCTS = (16, 64, 128)
"""Rows of a tile's products that have a layout of warps: query rows times heads of a KV head.
Products in fp32 are not the tensor cores': only the first, which keeps their code short."""


@dataclass(frozen=True)
class Plan:
    """How a call is cut: query rows of a tile, rows of its products, programs that share its
    blocks, tokens of a step, warps and stages of a program."""

    tile_rows: int
    products: int
    splits: int
    tokens: int
    warps: int
    stages: int


def plan_for(
    rows: int,
    requests: int,
    group: int,
    kv_heads: int,
    blocks: int,
    multiprocessors: int,
    wide: bool = False,
) -> Plan:
    """The plan of `rows` rows in `requests` requests of up to `blocks` blocks; `group` query heads
    a KV head, a power of 2; `wide` for products in fp32. From shapes alone, which a captured graph
    fixes."""
    average = rows / max(requests, 1)
    fitting = [n for n in _TILE_PRODUCTS[: 1 if wide else None] if n >= group] or [group]
    products = next((n for n in fitting if n >= average * group), fitting[-1])
    tile_rows = products // group
    if average <= 1:
        tile_rows = 1
    tiles = num_tiles(rows, requests, tile_rows) * kv_heads
    wanted = min(MOST_SPLITS, max(blocks, 1), PROGRAMS * multiprocessors // max(tiles, 1))
    # Each number of splits is a kernel to compile: powers of 2 keep them few.
    splits = 1 << (max(wanted, 1).bit_length() - 1)
    warps, stages = (8, 2) if products >= 128 else (4, 3)
    return Plan(tile_rows, products, splits, 32 if wide else 64, warps, stages)


def dense_attention(q: Tensor, batch: Batch, pages: LayerPages) -> Tensor:
    """See `winnow.ops.dense_attention.DenseAttention`; every tensor on one device."""
    kv_heads = pages.key.codes.shape[1]
    plan = plan_for(
        q.shape[0],
        batch.num_requests,
        triton.next_power_of_2(q.shape[1] // kv_heads),
        kv_heads,
        batch.block_tables.shape[1],
        _multiprocessors(q.device),
        wide=compute_dtype(q, pages.key, pages.value) == tl.float32,
    )
    return attend(q, batch, pages, plan)


def attend(q: Tensor, batch: Batch, pages: LayerPages, plan: Plan) -> Tensor:
    """`dense_attention` cut as `plan` says."""
    rows, heads, dim = q.shape
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    if not rows:
        return out
    q = q if q.stride(2) == 1 else q.contiguous()
    key, value = Stored.of(pages.key), Stored.of(pages.value)
    kv_heads = key.codes.shape[1]
    group = heads // kv_heads
    members = triton.next_power_of_2(group)
    splits = plan.splits
    partial, logs = out, out
    if splits > 1:
        partial = torch.empty((rows, heads, splits, dim), dtype=torch.float32, device=q.device)
        logs = torch.empty((rows, heads, splits), dtype=torch.float32, device=q.device)
    _attend[num_tiles(rows, batch.num_requests, plan.tile_rows), kv_heads, splits](
        q, q.stride(0), q.stride(1), partial, logs,
        batch.positions, batch.row_request, batch.row_starts, batch.kv_lens,
        batch.block_tables, batch.block_tables.stride(0), rows, batch.num_requests,
        key.codes, key.scales, key.page_stride, key.head_stride,
        value.codes, value.scales, value.page_stride, value.head_stride,
        math.log2(math.e) * dim**-0.5 * pages.key.global_scale, pages.value.global_scale,
        KV_HEADS=kv_heads, GROUP=group, MEMBERS=members, DIM=dim,
        KEY_FORMAT=key.format, VALUE_FORMAT=value.format,
        DTYPE=compute_dtype(q, pages.key, pages.value),
        TILE_ROWS=plan.tile_rows, TILE_M=plan.products, TILE_T=plan.tokens, SPLITS=splits,
        REQUESTS=request_lanes(batch.num_requests, plan.tile_rows),
        num_warps=plan.warps, num_stages=plan.stages,
    )  # fmt: skip
    if splits > 1:
        _merge[rows, heads](
            partial, logs, out, HEADS=heads, DIM=dim, SPLITS=splits,
            LANES=triton.next_power_of_2(splits), num_warps=4,
        )  # fmt: skip
    return out


@cache
def _multiprocessors(device: torch.device) -> int:
    if device.type != "cuda":
        return _MULTIPROCESSORS
    return int(torch.cuda.get_device_properties(device).multi_processor_count)


@triton.jit(do_not_specialize=["table_stride", "num_rows", "num_requests"])
def _attend(
    q, q_row_stride, q_head_stride, out, logs,
    positions, row_request, row_starts, kv_lens, tables, table_stride, num_rows, num_requests,
    key_codes, key_scales, key_page_stride, key_head_stride,
    value_codes, value_scales, value_page_stride, value_head_stride,
    score_scale, value_scale,
    KV_HEADS: tl.constexpr, GROUP: tl.constexpr, MEMBERS: tl.constexpr, DIM: tl.constexpr,
    KEY_FORMAT: tl.constexpr, VALUE_FORMAT: tl.constexpr, DTYPE: tl.constexpr,
    TILE_ROWS: tl.constexpr, TILE_M: tl.constexpr, TILE_T: tl.constexpr, SPLITS: tl.constexpr,
    REQUESTS: tl.constexpr,
):  # fmt: skip
    """A tile's rows over their share of the blocks. With one split, results to `out` [rows, heads,
    DIM]; with more, normalised ones to fp32 `out` [rows, heads, SPLITS, DIM] and the log2 of their
    sums, -inf where a split saw nothing, to `logs`."""
    # Later rows see more: their tiles begin first, so that the last to end are short.
    request, begin, end = tile_of_rows(
        (tl.num_programs(0) - 1 - tl.program_id(0)).to(tl.int64), row_starts, row_request, 0,
        num_rows, num_requests, TILE_ROWS, REQUESTS,
    )  # fmt: skip
    kv_head = tl.program_id(1).to(tl.int64)
    split = tl.program_id(2).to(tl.int64)
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
    blocks = (most_visible + BLOCK - 1) // BLOCK
    steps = (most_visible + TILE_T - 1) // TILE_T
    from_step = blocks * split // SPLITS * (BLOCK // TILE_T)
    to_step = tl.minimum(blocks * (split + 1) // SPLITS * (BLOCK // TILE_T), steps)
    for step in range(from_step, to_step):
        block = step * TILE_T // BLOCK
        page = tl.load(tables + request * table_stride + block)
        tokens = (step * TILE_T - block * BLOCK).to(tl.int32) + tl.arange(0, TILE_T)
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
    place = rows * (KV_HEADS * GROUP) + kv_head * GROUP + member
    if SPLITS > 1:
        place = place * SPLITS + split
        # A row may see nothing of a split that others of its tile see; NaN is kept.
        nothing = maxima == float("-inf")
        nothing = nothing & (sums == 0.0)
        tl.store(logs + place, tl.where(nothing, float("-inf"), maxima + tl.log2(sums)), mask=real)
        factor = tl.where(nothing, 0.0, value_scale / sums)[:, None]
    else:
        # Padding saw nothing: 0 / 0 there.
        factor = tl.where(visible > 0, value_scale / sums, 0.0)[:, None]
    out += place[:, None] * DIM
    kind = out.dtype.element_ty
    first_channels = channels(0, DIM, VALUE_FORMAT)[None, :]
    second_channels = channels(1, DIM, VALUE_FORMAT)[None, :]
    tl.store(out + first_channels, round_to(first_out * factor, kind), mask=mine)
    tl.store(out + second_channels, round_to(second_out * factor, kind), mask=mine)


@triton.jit
def _merge(
    partial, logs, out, HEADS: tl.constexpr, DIM: tl.constexpr, SPLITS: tl.constexpr,
    LANES: tl.constexpr,
):  # fmt: skip
    """One row and head: the splits' results weighted by their sums; zeros where none saw tokens."""
    place = tl.program_id(0).to(tl.int64) * HEADS + tl.program_id(1)
    lane = tl.arange(0, LANES)
    column = tl.arange(0, DIM)
    log = tl.load(logs + place * SPLITS + lane, mask=lane < SPLITS, other=float("-inf"))
    highest = tl.max(log, 0)
    base = tl.where(highest == float("-inf"), 0.0, highest)
    weights = tl.exp2(log - base)
    at = (place * SPLITS + lane)[:, None] * DIM + column[None, :]
    # What no token was seen for is not read, whatever a weight of zero would make of it.
    values = tl.load(partial + at, mask=(weights != 0.0)[:, None], other=0.0)
    total = tl.sum(weights, 0)
    merged = tl.sum(values * weights[:, None], 0)
    merged = tl.where(total == 0.0, 0.0, merged / total)
    tl.store(out + place * DIM + column, round_to(merged, out.dtype.element_ty))

"""`attention_inputs` in Triton: the projections, then one launch that norms, rotates, quantises and
inserts.

A program takes one head of a few rows: a query head, a K head, a V head, an index query head or
the index key. Slots are found on the device and the grid depends on shapes alone, so a CUDA graph
may hold a call.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from winnow.ops.batch import Batch
from winnow.ops.linear.cuda import linear
from winnow.ops.paged import LayerPages, Paged
from winnow.ops.triton_codec import pack_fp8, pack_nvfp4, round_to
from winnow.ops.triton_pages import BLOCK, Stored
from winnow.ops.weights import AttentionWeights
from winnow.spec.model import ModelSpec

_MANY_ROWS = 128
_TILE_ROWS = 8
"""Rows of a program once there are many; a few rows spread over programs instead."""


def attention_inputs(
    x: Tensor,
    weights: AttentionWeights,
    spec: ModelSpec,
    rope: tuple[Tensor, Tensor],
    batch: Batch,
    pages: LayerPages,
) -> tuple[Tensor, Tensor | None]:
    """See `winnow.ops.attention_inputs.AttentionInputs`; every tensor on one device.

    What is written and clipped is counted on the device: `Clipping.settled` reads it.
    """
    index = None if weights.index is None else linear(x, weights.index)
    return insert(linear(x, weights.qkv), index, weights, spec, rope, batch, pages)


def insert(
    qkv: Tensor,
    index: Tensor | None,
    weights: AttentionWeights,
    spec: ModelSpec,
    rope: tuple[Tensor, Tensor],
    batch: Batch,
    pages: LayerPages,
) -> tuple[Tensor, Tensor | None]:
    """What follows the projections: q and index_q of `AttentionInputs`, the rest into `pages`.

    `qkv` [rows, (heads + 2 kv_heads) * head_dim] and `index` [rows, (index_heads + 1) * index_dim]
    or None, contiguous and of one dtype.
    """
    rows, dtype, device = qkv.shape[0], qkv.dtype, qkv.device
    q = torch.empty(rows, spec.num_heads, spec.head_dim, dtype=dtype, device=device)
    index_q, index_heads = None, 0
    if index is not None:
        assert pages.index is not None, "index weights without index keys in the pages"
        index_heads = spec.num_index_heads
        index_q = torch.empty(rows, index_heads, spec.index_dim, dtype=dtype, device=device)
    if not rows:
        return q, index_q
    key, value = _written(pages.key), _written(pages.value)
    keys = key if index is None or pages.index is None else _written(pages.index)
    cos, sin = (table.contiguous() for table in rope)
    units = spec.num_heads + 2 * spec.num_kv_heads + (index_heads + 1 if index_heads else 0)
    in_tile = _TILE_ROWS if rows >= _MANY_ROWS else 1
    _norm_rotate_insert[triton.cdiv(rows, in_tile), units](
        qkv, index, weights.q_norm, weights.k_norm, weights.index_q_norm, weights.index_k_norm,
        cos, sin, batch.positions, batch.row_request, batch.kv_lens,
        batch.block_tables, batch.block_tables.stride(0), rows, spec.norm_eps, q, index_q,
        *key, *value, *keys,
        HEADS=spec.num_heads, KV_HEADS=spec.num_kv_heads, DIM=spec.head_dim,
        INDEX_HEADS=index_heads, INDEX_DIM=spec.index_dim, HALF=spec.rotary_dim // 2,
        KEY_FORMAT=pages.key.format.name, VALUE_FORMAT=pages.value.format.name,
        INDEX_FORMAT=(pages.index or pages.key).format.name, TILE_ROWS=in_tile,
        num_warps=4 if in_tile > 1 else 1,
    )  # fmt: skip
    return q, index_q


def _written(paged: Paged) -> tuple[Tensor, Tensor | None, int, int, float, Tensor]:
    """Kernel arguments to write tokens into `paged`."""
    stored = Stored.of(paged)
    counter = paged.clipping.counter(paged.codes.device)
    return *stored[:4], paged.global_scale, counter


@triton.jit(do_not_specialize=["table_stride", "num_rows"])
def _norm_rotate_insert(
    qkv, index, q_norm, k_norm, index_q_norm, index_k_norm, cos, sin,
    positions, row_request, kv_lens, tables, table_stride, num_rows, eps, q_out, index_q_out,
    key_codes, key_scales, key_page_stride, key_head_stride, key_global, key_counts,
    value_codes, value_scales, value_page_stride, value_head_stride, value_global, value_counts,
    index_codes, index_scales, index_page_stride, index_head_stride, index_global, index_counts,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, DIM: tl.constexpr,
    INDEX_HEADS: tl.constexpr, INDEX_DIM: tl.constexpr, HALF: tl.constexpr,
    KEY_FORMAT: tl.constexpr, VALUE_FORMAT: tl.constexpr, INDEX_FORMAT: tl.constexpr,
    TILE_ROWS: tl.constexpr,
):  # fmt: skip
    rows = tl.program_id(0).to(tl.int64) * TILE_ROWS + tl.arange(0, TILE_ROWS)
    real = rows < num_rows
    unit = tl.program_id(1)
    dtype: tl.constexpr = q_out.dtype.element_ty
    request = tl.load(row_request + rows, mask=real, other=0)
    position = tl.load(positions + rows, mask=real, other=0)
    page = tl.load(tables + request * table_stride + position // BLOCK, mask=real, other=0)
    page = tl.where(tl.load(kv_lens + request, mask=real, other=0) > 0, page, 0)
    slot = position % BLOCK
    width: tl.constexpr = (HEADS + 2 * KV_HEADS) * DIM
    index_width: tl.constexpr = (INDEX_HEADS + 1) * INDEX_DIM
    if (tl.program_id(0) == 0) & (unit == 0):
        tokens = tl.zeros((), tl.int64) + num_rows
        tl.atomic_add(key_counts + 1, tokens * (KV_HEADS * DIM))
        tl.atomic_add(value_counts + 1, tokens * (KV_HEADS * DIM))
        if INDEX_HEADS > 0:
            tl.atomic_add(index_counts + 1, tokens * INDEX_DIM)
    key_head = unit - HEADS
    value_head = key_head - KV_HEADS
    index_head = value_head - KV_HEADS
    if key_head < 0:
        _store(
            _normed(qkv + unit * DIM, width, q_norm, cos, sin, rows, real, eps, DIM, HALF),
            q_out + unit * DIM, HEADS * DIM, rows, real, DIM,
        )  # fmt: skip
    elif value_head < 0:
        _insert(
            round_to(
                _normed(qkv + unit * DIM, width, k_norm, cos, sin, rows, real, eps, DIM, HALF),
                dtype,
            ),
            key_codes, key_scales, page * key_page_stride + key_head * key_head_stride,
            slot, real, key_global, key_counts, DIM, KEY_FORMAT,
        )  # fmt: skip
    elif index_head < 0:
        _insert(
            _load(qkv + unit * DIM, width, rows, real, tl.arange(0, DIM)),
            value_codes, value_scales, page * value_page_stride + value_head * value_head_stride,
            slot, real, value_global, value_counts, DIM, VALUE_FORMAT,
        )  # fmt: skip
    elif INDEX_HEADS > 0:
        index += index_head * INDEX_DIM
        if index_head < INDEX_HEADS:
            _store(
                _normed(
                    index, index_width, index_q_norm, cos, sin, rows, real, eps, INDEX_DIM, HALF
                ),
                index_q_out + index_head * INDEX_DIM, INDEX_HEADS * INDEX_DIM, rows, real,
                INDEX_DIM,
            )  # fmt: skip
        else:
            _insert(
                round_to(
                    _normed(
                        index, index_width, index_k_norm, cos, sin, rows, real, eps, INDEX_DIM,
                        HALF,
                    ),
                    dtype,
                ),
                index_codes, index_scales, page * index_page_stride,
                slot, real, index_global, index_counts, INDEX_DIM, INDEX_FORMAT,
            )  # fmt: skip


@triton.jit
def _load(x, row_stride: tl.constexpr, rows, real, channel):
    """Some channels of one head of some rows: fp32 [R, channels]."""
    place = x + rows[:, None] * row_stride + channel[None, :]
    return tl.load(place, mask=real[:, None], other=0).to(tl.float32)


@triton.jit
def _store(values, out, row_stride: tl.constexpr, rows, real, DIM: tl.constexpr):
    """Store fp32 `values` [R, DIM], rounded to the output's dtype."""
    place = out + rows[:, None] * row_stride + tl.arange(0, DIM)[None, :]
    tl.store(place, round_to(values, out.dtype.element_ty), mask=real[:, None])


@triton.jit
def _normed(
    x, row_stride: tl.constexpr, norm, cos, sin, rows, real, eps,
    DIM: tl.constexpr, HALF: tl.constexpr,
):  # fmt: skip
    """A head of some rows, normed and rotated, fp32 [R, DIM].

    Channel i is rotated with i + HALF: each is read again at its partner's place, so that both
    are at hand without moving values between threads.
    """
    channel = tl.arange(0, DIM)
    partner = tl.where(channel < HALF, channel + HALF, channel)
    partner = tl.where((channel >= HALF) & (channel < 2 * HALF), channel - HALF, partner)
    own = _load(x, row_stride, rows, real, channel)
    other = _load(x, row_stride, rows, real, partner)
    scale = tl.rsqrt(tl.sum(own * own, 1) / DIM + eps)[:, None]
    own = own * scale * (1.0 + tl.load(norm + channel))[None, :]
    other = other * scale * (1.0 + tl.load(norm + partner))[None, :]
    turned = (channel < 2 * HALF)[None, :] & real[:, None]
    angle = rows[:, None] * HALF + (channel % HALF)[None, :]
    cosine = tl.load(cos + angle, mask=turned, other=1)
    sine = tl.load(sin + angle, mask=turned, other=0)
    rotated = own * cosine + tl.where(channel < HALF, -1.0, 1.0)[None, :] * (other * sine)
    return tl.where((channel < 2 * HALF)[None, :], rotated, own)


@triton.jit
def _insert(
    values, codes, scales, place, slot, real, global_scale, counts,
    DIM: tl.constexpr, FORMAT: tl.constexpr,
):  # fmt: skip
    """Store `values` [R, DIM] at the slots of pages that begin `place` [R] elements in."""
    values = values.to(tl.float32)
    mask = real[:, None]
    place = place[:, None]
    slot = slot[:, None]
    if FORMAT == "nvfp4":
        packed, steps, beyond = pack_nvfp4(values, global_scale)
        half = tl.arange(0, DIM // 2)[None, :]
        group = tl.arange(0, DIM // 16)[None, :]
        tl.store(codes + place + slot * (DIM // 2) + half, packed, mask=mask)
        tl.store(scales + place + slot * (DIM // 16) + group, steps, mask=mask)
    else:
        target = codes + place + slot * DIM + tl.arange(0, DIM)[None, :]
        if FORMAT == "fp8":
            stored, beyond = pack_fp8(values, global_scale)
        else:
            stored = round_to(values, codes.dtype.element_ty)
        tl.store(target, stored, mask=mask)
    if FORMAT == "nvfp4" or FORMAT == "fp8":
        lost = tl.sum(tl.sum(tl.where(mask, beyond, 0), 1), 0)
        if lost > 0:
            tl.atomic_add(counts, lost.to(tl.int64))

"""`dense_attention` on a CPU: online softmax over spans of a fixed size.

The spans are anchored to positions, so a row's sums have one order however its request was
chunked: a span that lies ahead of a row adds exact zeros.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from winnow.ops.batch import Batch
from winnow.ops.codec import cpu as codec
from winnow.ops.linear.cpu import MIN_ROWS
from winnow.ops.paged import LayerPages, Paged, read
from winnow.spec.model import BLOCK_TOKENS

_SPAN_BLOCKS = 4
_ROW_TILE = 256


def dense_attention(q: Tensor, batch: Batch, pages: LayerPages) -> Tensor:
    """See `winnow.ops.dense_attention.DenseAttention`."""
    out = torch.zeros_like(q)
    scaled = q.float() * q.shape[-1] ** -0.5
    kv_heads = pages.key.codes.shape[1]
    starts = batch.row_starts.tolist()
    for request, kv_len in enumerate(batch.kv_lens.tolist()):
        if not kv_len:
            continue
        table = batch.block_tables[request]
        for start in range(starts[request], starts[request + 1], _ROW_TILE):
            tile = slice(start, min(start + _ROW_TILE, starts[request + 1]))
            positions = batch.positions[tile]
            # [rows, heads, dim] -> [kv_heads, rows * group, dim]
            queries = scaled[tile].unflatten(1, (kv_heads, -1)).transpose(0, 1)
            rows, group = queries.shape[1:3]
            merged = _attend(queries.flatten(1, 2), positions, group, table, pages)
            out[tile] = merged.view(kv_heads, rows, group, -1).transpose(0, 1).flatten(1, 2)
    return out


def _attend(q: Tensor, positions: Tensor, group: int, table: Tensor, pages: LayerPages) -> Tensor:
    """q [kv_heads, rows * group, dim] of one request -> the same shape, fp32."""
    num_queries = q.shape[1]
    q = F.pad(q, (0, 0, 0, max(0, MIN_ROWS - num_queries)))
    ends = F.pad(positions.repeat_interleave(group), (0, q.shape[1] - num_queries))
    last = int(positions[-1])
    best = q.new_full((*q.shape[:2], 1), float("-inf"))
    total = torch.zeros_like(best)
    out = torch.zeros_like(q)
    for first_block in range(0, last // BLOCK_TOKENS + 1, _SPAN_BLOCKS):
        span = table[first_block : first_block + _SPAN_BLOCKS]
        start = first_block * BLOCK_TOKENS
        keys, values = _span(pages.key, span), _span(pages.value, span)
        # What lies beyond the last token may hold anything; a weight of 0 would not hide a NaN.
        values[:, last + 1 - start :] = 0.0
        ahead = torch.arange(start, start + keys.shape[1]) > ends.unsqueeze(-1)
        scores = (q @ keys.transpose(1, 2)).masked_fill_(ahead, float("-inf"))
        new_best = torch.maximum(best, scores.amax(-1, keepdim=True))
        weights = scores.sub_(new_best).exp_()
        decay = (best - new_best).exp_()
        total = total * decay + weights.sum(-1, keepdim=True)
        out = out * decay + weights @ values
        best = new_best
    return (out / total)[:, :num_queries]


def _span(paged: Paged, pages: Tensor) -> Tensor:
    """[heads, _SPAN_BLOCKS * 128, dim] fp32, with zeros where the table ends."""
    values = read(codec, paged, pages, torch.float32).transpose(0, 1).flatten(1, 2)
    missing = _SPAN_BLOCKS * BLOCK_TOKENS - values.shape[1]
    return F.pad(values, (0, 0, 0, missing)) if missing else values

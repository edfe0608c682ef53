"""The meaning of `sparse_attention`: one row and one KV head after another."""

from __future__ import annotations

import torch
from torch import Tensor

from winnow.ops.batch import Batch
from winnow.ops.codec import reference as codec
from winnow.ops.paged import LayerPages, read
from winnow.spec.model import BLOCK_TOKENS


def attend(q: Tensor, keys: Tensor, values: Tensor) -> Tensor:
    """q [heads, dim] over keys and values fp32 [tokens, dim] -> [heads, dim] in q's dtype."""
    scores = q.float() @ keys.T * q.shape[-1] ** -0.5
    out: Tensor = scores.softmax(-1) @ values
    return out.to(q.dtype)


def request_tokens(batch: Batch, request: int, pages: LayerPages) -> tuple[Tensor, Tensor]:
    """K and V of one request's tokens, both fp32 [kv_heads, kv_len, head_dim]."""
    kv_len = int(batch.kv_lens[request])
    table = batch.block_tables[request, : -(-kv_len // BLOCK_TOKENS)]
    keys, values = (
        read(codec, paged, table, torch.float32).transpose(0, 1).flatten(1, 2)[:, :kv_len]
        for paged in (pages.key, pages.value)
    )
    return keys, values


def sparse_attention(q: Tensor, ids: Tensor, batch: Batch, pages: LayerPages) -> Tensor:
    """See `winnow.ops.sparse_attention.SparseAttention`."""
    out = torch.zeros_like(q)
    kv_heads = ids.shape[1]
    group = q.shape[1] // kv_heads
    for request, kv_len in enumerate(batch.kv_lens.tolist()):
        keys, values = request_tokens(batch, request, pages)
        for row in batch.rows(request) if kv_len else ():
            visible = int(batch.positions[row]) + 1
            for head in range(kv_heads):
                blocks = ids[row, head][ids[row, head] >= 0].long()
                tokens = (
                    blocks.unsqueeze(-1) * BLOCK_TOKENS + torch.arange(BLOCK_TOKENS)
                ).flatten()
                tokens = tokens[tokens < visible]
                heads = slice(head * group, (head + 1) * group)
                out[row, heads] = attend(q[row, heads], keys[head, tokens], values[head, tokens])
    return out

"""The meaning of `dense_attention`: one row and one KV head after another."""

from __future__ import annotations

import torch
from torch import Tensor

from winnow.ops.batch import Batch
from winnow.ops.paged import LayerPages
from winnow.ops.sparse_attention.reference import attend, request_tokens


def dense_attention(q: Tensor, batch: Batch, pages: LayerPages) -> Tensor:
    """See `winnow.ops.dense_attention.DenseAttention`."""
    out = torch.zeros_like(q)
    kv_heads = pages.key.codes.shape[1]
    group = q.shape[1] // kv_heads
    for request, kv_len in enumerate(batch.kv_lens.tolist()):
        keys, values = request_tokens(batch, request, pages)
        for row in batch.rows(request) if kv_len else ():
            visible = int(batch.positions[row]) + 1
            for head in range(kv_heads):
                heads = slice(head * group, (head + 1) * group)
                own = keys[head, :visible], values[head, :visible]
                out[row, heads] = attend(q[row, heads], *own)
    return out

"""`dense_attention` on a CPU: the sparse kernel over lists that hold every block."""

from __future__ import annotations

import torch
from torch import Tensor

from winnow.ops.batch import Batch
from winnow.ops.block_list import MAX_EXPANDED, block_list
from winnow.ops.paged import LayerPages
from winnow.ops.sparse_attention.cpu import attend
from winnow.spec.model import BLOCK_TOKENS


def dense_attention(q: Tensor, batch: Batch, pages: LayerPages) -> Tensor:
    """See `winnow.ops.dense_attention.DenseAttention`."""
    out = torch.zeros_like(q)
    kv_heads = pages.key.codes.shape[1]
    group = q.shape[1] // kv_heads
    for request, kv_len in enumerate(batch.kv_lens.tolist()):
        own, num_blocks = batch.rows(request), -(-kv_len // BLOCK_TOKENS)
        rows = slice(own.start, own.stop)
        table = batch.block_tables[request, :num_blocks]
        positions = batch.positions[rows]
        # As many heads at a time as may be held expanded.
        step = max(1, MAX_EXPANDED // max(num_blocks, 1))
        for first in range(0, kv_heads if kv_len else 0, step):
            heads = torch.arange(first, min(first + step, kv_heads)).unsqueeze(-1)
            keys, values = (block_list(p, table, heads) for p in (pages.key, pages.value))
            lists = (torch.arange(len(heads)) * num_blocks).repeat(len(own), 1)
            counts = (positions // BLOCK_TOKENS + 1).unsqueeze(-1).repeat(1, len(heads))
            columns = slice(first * group, (first + len(heads)) * group)
            out[rows, columns] = attend(q[rows, columns], positions, lists, counts, keys, values)
    return out

"""`sparse_attention` on a CPU: online softmax over each row's list of blocks, in C++."""

from __future__ import annotations

import torch
from torch import Tensor

from winnow.ops.batch import Batch
from winnow.ops.block_list import MAX_EXPANDED, BlockList, block_list
from winnow.ops.native import library, threads
from winnow.ops.paged import LayerPages

_MAX_PREFILL = 4 * MAX_EXPANDED
"""Many rows share their blocks: expanding more of them at a time saves expanding them again."""


def sparse_attention(q: Tensor, ids: Tensor, batch: Batch, pages: LayerPages) -> Tensor:
    """See `winnow.ops.sparse_attention.SparseAttention`."""
    rows, kv_heads, topk = ids.shape
    chosen, heads = ids.long().clamp(min=0), torch.arange(kv_heads).unsqueeze(-1)
    tables = batch.block_tables[batch.row_request.view(-1, 1, 1), chosen]
    counts = (ids >= 0).sum(-1)
    # Rows of a request share most of its blocks; a tile expands no more than all of them.
    step = rows
    if batch.block_tables.numel() * kv_heads > _MAX_PREFILL:
        step = max(1, _MAX_PREFILL // (kv_heads * topk))
    parts = [q[:0]]
    for start in range(0, rows, max(step, 1)):
        tile = slice(start, start + step)
        keys = block_list(pages.key, tables[tile], heads)
        values = block_list(pages.value, tables[tile], heads)
        lists = torch.arange(0, keys.addresses.numel(), topk)
        parts.append(attend(q[tile], batch.positions[tile], lists, counts[tile], keys, values))
    return torch.cat(parts)


def attend(
    q: Tensor, positions: Tensor, lists: Tensor, counts: Tensor, keys: BlockList, values: BlockList
) -> Tensor:
    """softmax(q k / sqrt(dim)) v over lists of blocks, the last one up to the row's position.

    `q` [rows, heads, dim]; `lists` and `counts` int64, [rows, kv_heads] values each: where a list
    begins in the addresses of `keys` and `values`, and its length. Returns q's shape and dtype.
    """
    rows, num_heads, dim = q.shape
    kv_heads = counts.shape[-1]
    scaled = (q.float() * dim**-0.5).contiguous()
    out = torch.empty(q.shape)
    lists, counts, positions = lists.contiguous(), counts.contiguous(), positions.contiguous()
    library().winnow_attend(
        scaled.data_ptr(), rows, kv_heads, num_heads // kv_heads, dim, positions.data_ptr(),
        lists.data_ptr(), counts.data_ptr(), keys.addresses.data_ptr(),
        values.addresses.data_ptr(), out.data_ptr(), threads(),
    )  # fmt: skip
    return out.to(q.dtype)

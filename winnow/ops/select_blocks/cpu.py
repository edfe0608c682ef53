"""`select_blocks` on a CPU: scores of whole blocks, then a small sorted list a row.

The current block is always selected, so only blocks wholly in a row's past are scored and no
token needs a mask.
"""

from __future__ import annotations

import torch
from torch import Tensor

from winnow.ops.batch import Batch
from winnow.ops.block_list import MAX_EXPANDED, block_list
from winnow.ops.native import library, threads
from winnow.ops.paged import Paged
from winnow.spec.model import BLOCK_TOKENS

_ROW_TILE = 512


def select_blocks(index_q: Tensor, index: Paged, batch: Batch, topk: int) -> Tensor:
    """See `winnow.ops.select_blocks.SelectBlocks`."""
    rows, heads, _ = index_q.shape
    ids = torch.full((rows, heads, topk), -1, dtype=torch.int32)
    queries = index_q.float().contiguous()
    for request, kv_len in enumerate(batch.kv_lens.tolist()):
        own = batch.rows(request)
        for start in range(own.start, own.stop if kv_len else own.start, _ROW_TILE):
            tile = slice(start, min(start + _ROW_TILE, own.stop))
            current = (batch.positions[tile] // BLOCK_TOKENS).repeat_interleave(heads)
            _select(queries[tile], index, batch.block_tables[request], current, ids[tile])
    return ids


def _select(queries: Tensor, index: Paged, table: Tensor, current: Tensor, ids: Tensor) -> None:
    """Fill ids [rows, heads, topk] of one request's rows; `current` int64 [rows * heads]."""
    topk, num_queries, last = ids.shape[-1], current.shape[0], int(current[-1])
    scores = torch.zeros(num_queries, max(last, 1))
    # Where every visible block is selected its score does not matter.
    for first in range(0, last if last >= topk else 0, MAX_EXPANDED):
        blocks = table[first : min(first + MAX_EXPANDED, last)]
        keys = block_list(index, blocks, 0)
        library().winnow_block_scores(
            queries.data_ptr(), num_queries, queries.shape[-1], keys.addresses.data_ptr(), first,
            len(blocks), current.data_ptr(), scores.data_ptr(), scores.shape[1], threads(),
        )  # fmt: skip
    library().winnow_top_blocks(
        scores.data_ptr(), num_queries, scores.shape[1], current.data_ptr(), topk, ids.data_ptr(),
        threads(),
    )  # fmt: skip

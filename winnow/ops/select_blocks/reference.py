"""The meaning of `select_blocks`: one row after another."""

from __future__ import annotations

import torch
from torch import Tensor

from winnow.ops.batch import Batch
from winnow.ops.codec import reference as codec
from winnow.ops.paged import Paged, read
from winnow.spec.model import BLOCK_TOKENS

_LOWEST = float("-inf")
_HIGHEST = float("inf")


def select_blocks(index_q: Tensor, index: Paged, batch: Batch, topk: int) -> Tensor:
    """See `winnow.ops.select_blocks.SelectBlocks`."""
    rows, heads, dim = index_q.shape
    ids = torch.full((rows, heads, topk), -1, dtype=torch.int32)
    for request, kv_len in enumerate(batch.kv_lens.tolist()):
        table = batch.block_tables[request, : -(-kv_len // BLOCK_TOKENS)]
        keys = read(codec, index, table, torch.float32).reshape(-1, dim)
        for row in batch.rows(request) if kv_len else ():
            visible = int(batch.positions[row]) + 1
            products = index_q[row].float() @ keys[:visible].T
            products = products.nan_to_num(_LOWEST, _HIGHEST, _LOWEST)
            current = (visible - 1) // BLOCK_TOKENS
            for head in range(heads):
                blocks = products[head].split(BLOCK_TOKENS)
                scores = [float(block.max()) for block in blocks[:current]]
                ranked = sorted(range(current), key=lambda b: (-scores[b], b))
                chosen = sorted([*ranked[: topk - 1], current])
                ids[row, head, : len(chosen)] = torch.tensor(chosen, dtype=torch.int32)
    return ids

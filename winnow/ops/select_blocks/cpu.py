"""`select_blocks` on a CPU: matrix products over whole blocks, scores of one tile at a time.

The current block is always selected, so only blocks wholly in a row's past are scored and no
token needs a mask.
"""

from __future__ import annotations

import torch
from torch import Tensor

from winnow.ops.batch import Batch
from winnow.ops.codec import cpu as codec
from winnow.ops.linear.cpu import pad_rows
from winnow.ops.paged import Paged, read
from winnow.spec.model import BLOCK_TOKENS

_ROW_TILE = 512
_BLOCK_TILE = 32
_LOWEST = float("-inf")
_HIGHEST = float("inf")
_FINITE = torch.finfo(torch.float32).max


def select_blocks(index_q: Tensor, index: Paged, batch: Batch, topk: int) -> Tensor:
    """See `winnow.ops.select_blocks.SelectBlocks`."""
    rows, heads, _ = index_q.shape
    ids = torch.full((rows, heads, topk), -1, dtype=torch.int32)
    starts = batch.row_starts.tolist()
    for request, kv_len in enumerate(batch.kv_lens.tolist()):
        if not kv_len:
            continue
        for start in range(starts[request], starts[request + 1], _ROW_TILE):
            tile = slice(start, min(start + _ROW_TILE, starts[request + 1]))
            current = batch.positions[tile] // BLOCK_TOKENS
            table = batch.block_tables[request]
            ids[tile] = _select(index_q[tile], index, table, current, topk)
    return ids


def _select(index_q: Tensor, index: Paged, table: Tensor, current: Tensor, topk: int) -> Tensor:
    """ids [rows, heads, topk] of one request's rows, whose blocks are `current` [rows]."""
    rows, heads, _ = index_q.shape
    last = int(current.max())
    if last < topk:
        every = torch.arange(topk).expand(rows, topk)
        return torch.where(every <= current.unsqueeze(-1), every, -1).int().unsqueeze(1)
    scores = torch.empty(rows, heads, last + 1)
    queries = pad_rows(index_q.reshape(rows * heads, -1).float())
    for start in range(0, last, _BLOCK_TILE):
        blocks = slice(start, min(start + _BLOCK_TILE, last))
        keys = read(codec, index, table[blocks], torch.float32).reshape(-1, index_q.shape[-1])
        scores[..., blocks] = _block_scores(queries, keys)[: rows * heads].view(rows, heads, -1)
    blocks_ahead = torch.arange(last + 1) - current.unsqueeze(-1)
    # The current block is worth more than any score, what lies ahead less than any.
    scores.clamp_(-_FINITE, _FINITE)
    scores.masked_fill_((blocks_ahead == 0).unsqueeze(1), _HIGHEST)
    scores.masked_fill_((blocks_ahead > 0).unsqueeze(1), _LOWEST)
    return top_ids(scores, topk)


def _block_scores(queries: Tensor, keys: Tensor) -> Tensor:
    """[queries, blocks]: max over each block's tokens, NaN products counting as the lowest."""
    products: Tensor = (queries @ keys.T).unflatten(-1, (-1, BLOCK_TOKENS))
    scores = products.amax(-1)
    if scores.isnan().any():
        scores = products.nan_to_num(_LOWEST, _HIGHEST, _LOWEST).amax(-1)
    return scores


def top_ids(scores: Tensor, topk: int) -> Tensor:
    """Ids int32 [..., topk] of the largest scores > -inf, ascending, lower id first on ties.

    `scores` [..., blocks] without NaN.
    """
    k = min(topk, scores.shape[-1])
    best = scores.topk(k, dim=-1).values
    cut = best[..., -1:]
    above = scores > cut
    at_cut = scores == cut
    room = k - above.sum(-1, keepdim=True)
    chosen = above | (at_cut & (at_cut.cumsum(-1) <= room))
    chosen &= scores > _LOWEST
    # Ranks of the chosen, ascending, as places in the result; the rest go to a spare last place.
    place = torch.where(chosen, chosen.cumsum(-1) - 1, topk)
    ids = torch.full((*scores.shape[:-1], topk + 1), -1, dtype=torch.int32)
    blocks = torch.arange(scores.shape[-1], dtype=torch.int32).expand(scores.shape)
    ids.scatter_(-1, place, torch.where(chosen, blocks, -1))
    return ids[..., :topk]

"""`sparse_attention` on a CPU: two ways to the same sums, chosen per request.

Few rows (decode, verification): gather each row's own blocks, all requests together. Many rows
(prefill): turn the selection around and give each block to the rows that chose it, in tiles, so
that a block is expanded once and multiplied as a matrix. Both take products block by block and
add them in ascending order of blocks, so a row's result does not depend on which way was taken.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from winnow.ops.batch import Batch
from winnow.ops.codec import cpu as codec
from winnow.ops.linear.cpu import MIN_ROWS
from winnow.ops.paged import LayerPages, read_by_head, read_pairs
from winnow.spec.model import BLOCK_TOKENS

_FEW_ROWS = 16
_GATHERED_VALUES = 1 << 23
_SCORE_VALUES = 1 << 22
_EXPANDED_BLOCKS = 1024
_FEW_PAIRS = 16


def sparse_attention(q: Tensor, ids: Tensor, batch: Batch, pages: LayerPages) -> Tensor:
    """See `winnow.ops.sparse_attention.SparseAttention`."""
    out = torch.zeros_like(q)
    scaled = q.float() * q.shape[-1] ** -0.5
    few: list[Tensor] = []
    starts = batch.row_starts.tolist()
    for request, kv_len in enumerate(batch.kv_lens.tolist()):
        rows = slice(starts[request], starts[request + 1])
        if not kv_len:
            continue
        if rows.stop - rows.start < _FEW_ROWS:
            few.append(torch.arange(rows.start, rows.stop))
        else:
            table = batch.block_tables[request]
            _by_block(
                out[rows], scaled[rows], ids[rows].long(), batch.positions[rows], table, pages
            )
    if few:
        _by_row(out, scaled, ids, torch.cat(few), batch, pages)
    return out


def _by_row(
    out: Tensor, q: Tensor, ids: Tensor, rows: Tensor, batch: Batch, pages: LayerPages
) -> None:
    """Fill out[rows], gathering the selected blocks of each row."""
    kv_heads, topk = ids.shape[1:]
    step = max(1, _GATHERED_VALUES // (kv_heads * topk * BLOCK_TOKENS * q.shape[-1]))
    for some in rows.split(step):
        chosen = ids[some].long()
        table = batch.block_tables[batch.row_request[some].view(-1, 1, 1), chosen.clamp(min=0)]
        tokens = chosen.unsqueeze(-1) * BLOCK_TOKENS + torch.arange(BLOCK_TOKENS)
        hidden = (tokens > batch.positions[some].view(-1, 1, 1, 1)) | (chosen < 0).unsqueeze(-1)
        keys = read_by_head(codec, pages.key, table, torch.float32)
        values = read_by_head(codec, pages.value, table, torch.float32)
        values.masked_fill_(hidden.unsqueeze(-1), 0.0)
        queries = q[some].unflatten(1, (kv_heads, -1))
        out[some] = _attend_gathered(queries, keys, values, hidden).flatten(1, 2).to(out.dtype)


def _attend_gathered(q: Tensor, keys: Tensor, values: Tensor, hidden: Tensor) -> Tensor:
    """q [rows, kv_heads, group, dim] over its own blocks [rows, kv_heads, topk, 128, dim]."""
    rows, kv_heads, group, dim = q.shape
    topk = keys.shape[2]
    padded = F.pad(q, (0, 0, 0, max(0, MIN_ROWS - group))).flatten(0, 1)
    scores = padded @ keys.view(rows * kv_heads, topk * BLOCK_TOKENS, dim).transpose(1, 2)
    scores = scores[:, :group].view(rows, kv_heads, group, topk, BLOCK_TOKENS)
    scores = scores.transpose(2, 3).masked_fill(hidden.unsqueeze(3), float("-inf"))
    weights, total = _softmax(scores)
    padded = F.pad(weights, (0, 0, 0, max(0, MIN_ROWS - group))).flatten(0, 2)
    parts = (padded @ values.flatten(0, 2))[:, :group]
    return _in_order(parts.view(rows, kv_heads, topk, group, dim)) / total.unsqueeze(-1)


def _softmax(scores: Tensor) -> tuple[Tensor, Tensor]:
    """Unnormalised weights of scores [..., topk, group, 128], and their sums [..., group]."""
    weights = (scores - scores.amax((-3, -1), keepdim=True)).exp_()
    return weights, _in_order(weights.sum(-1, keepdim=True)).squeeze(-1)


def _in_order(parts: Tensor) -> Tensor:
    """Sum over the topk axis of [..., topk, group, n], first block first."""
    total = parts.select(-3, 0)
    for slot in range(1, parts.shape[-3]):
        total = total + parts.select(-3, slot)
    return total


def _by_block(
    out: Tensor, q: Tensor, ids: Tensor, positions: Tensor, table: Tensor, pages: LayerPages
) -> None:
    """Fill `out` [rows, heads, dim] for one request's rows, block by block.

    A KV head's rows count as rows of their own, and its blocks as blocks of their own: block b
    of head h is b + h * num_blocks. Heads are taken together as far as memory allows.
    """
    rows, kv_heads, topk = ids.shape
    last = int(positions[-1])
    num_blocks = last // BLOCK_TOKENS + 1
    group = q.shape[1] // kv_heads
    together = max(1, _EXPANDED_BLOCKS // num_blocks)
    step = max(1, _SCORE_VALUES // (min(together, kv_heads) * topk * group * BLOCK_TOKENS))
    for first in range(0, kv_heads, together):
        heads = torch.arange(first, min(first + together, kv_heads))
        own = ids[:, first : first + together]
        own = torch.where(own < 0, -1, own + heads.unsqueeze(-1) * num_blocks)
        blocks, places = own.unique(return_inverse=True)
        if blocks[0] < 0:
            blocks, places = blocks[1:], places - 1
        chosen = table[blocks % num_blocks], blocks // num_blocks
        keys, values = (
            read_pairs(codec, paged, *chosen, torch.float32) for paged in (pages.key, pages.value)
        )
        # What lies beyond the last token may hold anything; a weight of 0 would not hide a NaN.
        values[blocks % num_blocks == num_blocks - 1, last % BLOCK_TOKENS + 1 :] = 0.0
        queries = q.unflatten(1, (kv_heads, group))[:, first : first + together]
        for start in range(0, rows, step):
            tile = slice(start, start + step)
            part = _attend_blocks(
                queries[tile].flatten(0, 1),
                places[tile].flatten(0, 1),
                positions[tile].repeat_interleave(len(heads)),
                keys,
                values,
            )
            part = part.view(-1, len(heads) * group, q.shape[-1])
            columns = slice(first * group, (first + len(heads)) * group)
            out[tile, columns] = part.to(out.dtype)


def _attend_blocks(
    q: Tensor, ids: Tensor, positions: Tensor, keys: Tensor, values: Tensor
) -> Tensor:
    """q [rows, group, dim] over keys, values [blocks, 128, dim]; ids [rows, topk] count those."""
    rows, group, dim = q.shape
    topk = ids.shape[1]
    blocks, pairs = _tiles(ids, keys.shape[0])
    # Padding of a tile points one past the last pair, and so at a spare row of each buffer.
    queries = torch.cat((q, q.new_zeros(1, group, dim)))[pairs // topk]
    products = queries.flatten(1, 2) @ keys[blocks].transpose(1, 2)
    buffer = q.new_full((rows * topk + 1, group, BLOCK_TOKENS), float("-inf"))
    buffer[pairs] = products.view(*pairs.shape, group, BLOCK_TOKENS)
    scores = buffer[:-1].view(rows, topk, group, BLOCK_TOKENS)
    # The current block is the last one selected; only there do a row's own tokens end.
    every, own = torch.arange(rows), (ids >= 0).sum(-1) - 1
    ahead = torch.arange(BLOCK_TOKENS) > (positions % BLOCK_TOKENS).unsqueeze(-1)
    scores[every, own] = scores[every, own].masked_fill(ahead.unsqueeze(1), float("-inf"))
    weights, total = _softmax(scores)
    weights = torch.cat((weights.flatten(0, 1), weights.new_zeros(1, group, BLOCK_TOKENS)))
    products = weights[pairs].flatten(1, 2) @ values[blocks]
    buffer = q.new_zeros(rows * topk + 1, group, dim)
    buffer[pairs] = products.view(*pairs.shape, group, dim)
    return _in_order(buffer[:-1].view(rows, topk, group, dim)) / total.unsqueeze(-1)


def _tiles(ids: Tensor, num_blocks: int) -> tuple[Tensor, Tensor]:
    """The (row, slot) pairs of ids [rows, topk] in tiles of one block each.

    Returns each tile's block [tiles] and its pairs [tiles, width] as row * topk + slot, padded
    with rows * topk.
    """
    flat = ids.reshape(-1)
    width = _FEW_PAIRS if flat.numel() < 4 * _FEW_PAIRS * num_blocks else 4 * _FEW_PAIRS
    order = flat.argsort(stable=True)[(flat < 0).sum() :]
    counts = torch.bincount(flat[order], minlength=num_blocks)
    tiles = (counts + width - 1) // width
    block = torch.repeat_interleave(torch.arange(num_blocks), counts)
    rank = torch.arange(order.shape[0]) - (counts.cumsum(0) - counts)[block]
    first_tile = (tiles.cumsum(0) - tiles)[block]
    pairs = flat.new_full((int(tiles.sum()), width), flat.numel())
    pairs[first_tile + rank // width, rank % width] = order
    return torch.repeat_interleave(torch.arange(num_blocks), tiles), pairs

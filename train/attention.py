"""Selection of blocks and attention over whole sequences, dense or over the selected blocks.

Knows nothing of weights. B sequences, N query heads, G KV heads, T tokens, b blocks of 128.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.flex_attention import BlockMask, flex_attention

from winnow.spec.model import BLOCK_TOKENS

_KERNELS = [SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION, SDPBackend.MATH]
"""Best first: on an H200, forward and back over 8 sequences of 16,384 tokens took cuDNN's 28 ms and
the flash kernel 47; over 128 of 1,024 tokens, 3.0 and 9.5."""

_CHUNK = 4096
"""Rows scored at a time, so that the scores of long sequences fit."""


def dense(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Causal attention, q [B, N, T, D] and k, v [B, G, T, D] -> [B, N, T, D]."""
    with sdpa_kernel(_KERNELS, set_priority=True):
        return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)


def block_scores(index_q: Tensor, index_k: Tensor, first: Tensor) -> Tensor:
    """Largest product within each block, [B, G, rows, b], -inf for blocks ahead.

    `index_q` [B, G, rows, dim] at positions from `first` int64 [] on; `index_k` [B, 1, T, dim], T
    a multiple of 128. Masked inside the current block too.
    """
    products: Tensor = torch.matmul(index_q, index_k.transpose(-1, -2)).float()
    rows, tokens = products.shape[-2:]
    positions = first + torch.arange(rows, device=products.device)
    ahead = torch.arange(tokens, device=products.device) > positions.unsqueeze(-1)
    products = products.masked_fill(ahead, float("-inf"))
    best: Tensor = products.unflatten(-1, (-1, BLOCK_TOKENS)).amax(-1)
    return best


def choose(scores: Tensor, first: int, topk: int) -> Tensor:
    """bool like `scores` [B, G, rows, b]: the current block and the topk - 1 best before it, the
    lower block where scores are equal."""
    rows, blocks = scores.shape[-2:]
    current = torch.arange(first, first + rows, device=scores.device) // BLOCK_TOKENS
    numbers = torch.arange(blocks, device=scores.device)
    before = numbers < current.unsqueeze(-1)
    ranked = scores.masked_fill(~before, float("-inf"))
    # A stable sort leaves equal scores in the order of their blocks.
    order = ranked.sort(dim=-1, descending=True, stable=True).indices[..., : topk - 1]
    chosen = torch.zeros_like(scores, dtype=torch.bool).scatter(-1, order, True)
    return (chosen & before) | (numbers == current.unsqueeze(-1))


class Selector:
    """From index queries and keys to the blocks that each row reads."""

    def __init__(self, topk: int, *, compiled: bool) -> None:
        self.topk = topk
        self.compiled = compiled

    @torch.no_grad()
    def __call__(self, index_q: Tensor, index_k: Tensor, kind: str, *, exact: bool) -> Tensor:
        """bool [B, G, T, b]; of kind "sparse" or, as a control, "random"."""
        if exact:
            index_q, index_k = index_q.float(), index_k.float()
        tokens = index_q.shape[2]
        # In fp32 it is for an evaluation, too short to be worth compiling for.
        score = _compiled(block_scores) if self.compiled and not exact else block_scores
        parts = []
        for first in range(0, tokens, _CHUNK):
            rows = index_q[:, :, first : first + _CHUNK]
            if kind == "random":
                shape = (*rows.shape[:3], tokens // BLOCK_TOKENS)
                scores = torch.rand(shape, device=rows.device)
            else:
                scores = score(rows, index_k, torch.tensor(first, device=rows.device))
            parts.append(choose(scores, first, self.topk))
        return torch.cat(parts, dim=2)


def sparse(q: Tensor, k: Tensor, v: Tensor, selected: Tensor, *, compiled: bool) -> Tensor:
    """Causal attention over the blocks of `selected` bool [B, G, T, b]; each KV head's query heads
    share its selection."""
    if not compiled:
        return _masked(q, k, v, selected)
    out: Any = _compiled(flex_attention)(
        q, k, v, block_mask=_block_mask(selected, q.shape[1]), enable_gqa=True
    )
    return out  # type: ignore[no-any-return]


def _masked(q: Tensor, k: Tensor, v: Tensor, selected: Tensor) -> Tensor:
    """The meaning of `sparse`, with a mask of all pairs."""
    tokens = q.shape[2]
    positions = torch.arange(tokens, device=q.device)
    mask = selected.repeat_interleave(BLOCK_TOKENS, dim=-1)
    mask = mask & (positions <= positions.unsqueeze(-1))
    mask = mask.repeat_interleave(q.shape[1] // k.shape[1], dim=1)
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=True)


def _block_mask(selected: Tensor, num_heads: int) -> BlockMask:
    """Tiles of 128 by 128 that any of their rows selected, with the rows' own choice inside."""
    per_head = num_heads // selected.shape[1]
    tokens = selected.shape[2]

    def visible(b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
        return selected[b, h // per_head, q, kv // BLOCK_TOKENS] & (kv <= q)

    tiles = selected.unflatten(2, (-1, BLOCK_TOKENS)).any(3).repeat_interleave(per_head, dim=1)
    counts = tiles.sum(-1, dtype=torch.int32)
    # Chosen tiles first, in their order.
    order = (~tiles).to(torch.int8).sort(dim=-1, stable=True).indices.to(torch.int32)
    return BlockMask.from_kv_blocks(
        counts, order, BLOCK_SIZE=BLOCK_TOKENS, mask_mod=visible, seq_lengths=(tokens, tokens)
    )


@cache
def _compiled(function: Any) -> Any:
    return torch.compile(function, dynamic=False)

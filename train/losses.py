"""What training minimises: the next token, and the indexer's distance from attention."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from train.model import LayerProbe
from train.sample import ANSWER, WEIGHTS
from winnow.spec.model import BLOCK_TOKENS

_LEAST_WEIGHT = 0.05
"""Of a row of which attention looks back at nothing: it still has an opinion."""
_ANSWER_ROWS = 20.0
"""How much likelier a row that predicts an answer is to teach the indexer than another."""


def token_loss(hidden: Tensor, head: Tensor, targets: Tensor, classes: Tensor) -> Tensor:
    """Sum of weights and weighted sum of cross entropies, then the same of answers alone: fp32 [4].

    `hidden` [M, H], `head` [V, H], `targets` int64 and `classes` uint8 [M].
    """
    logits = F.linear(hidden, head.to(hidden.dtype)).float()
    losses = F.cross_entropy(logits, targets, reduction="none")
    weights = torch.zeros_like(losses)
    for kind, weight in enumerate(WEIGHTS):
        weights = torch.where(classes == kind, weight, weights)
    answers = (classes == ANSWER).float()
    return torch.stack(
        (weights.sum(), (losses * weights).sum(), answers.sum(), (losses * answers).sum())
    )


def teaching_rows(classes: Tensor, count: int) -> Tensor:
    """int64 [B, count]: positions that teach the indexer, those before answers first.

    `classes` [B, T] are of the tokens that each position predicts.
    """
    weights = 1.0 + _ANSWER_ROWS * (classes == ANSWER).float()
    return weights.multinomial(count).sort(dim=-1).values


def block_mass(q: Tensor, k: Tensor, rows: Tensor) -> Tensor:
    """Share of dense causal attention that falls on each block, mean over a group's query heads:
    fp32 [B, G, R, b]. `q` [B, N, T, D], `k` [B, G, T, D], `rows` [B, R]."""
    tokens, groups = k.shape[2], k.shape[1]
    chosen = _rows(q, rows).unflatten(1, (groups, -1))
    scores = torch.einsum("bgnrd,bgtd->bgnrt", chosen, k).float() * q.shape[-1] ** -0.5
    scores = scores.masked_fill(_ahead(rows, tokens)[:, None, None], float("-inf"))
    mass: Tensor = scores.softmax(-1).unflatten(-1, (-1, BLOCK_TOKENS)).sum(-1).mean(2)
    return mass


def indexer_loss(probe: LayerProbe, rows: Tensor) -> Tensor:
    """KL divergence of the indexer's distribution over the blocks behind a row from attention's.

    Both are renormalised without the current block, which is always selected; a row counts by how
    much of its attention looks back. A block's logit is its score over the square root of the
    index dim. After arXiv 2606.13392, but over all blocks in both phases: on a few rows dense
    attention costs little, and it is from blocks not selected that selection must learn.
    """
    tokens = probe.k.shape[2]
    with torch.no_grad():
        mass = block_mass(probe.q, probe.k, rows)
    query = _rows(probe.index_q, rows)
    scores = torch.matmul(query, probe.index_k.transpose(-1, -2)).float()
    scores = scores.masked_fill(_ahead(rows, tokens).unsqueeze(1), float("-inf"))
    logits = scores.unflatten(-1, (-1, BLOCK_TOKENS)).amax(-1) * query.shape[-1] ** -0.5
    blocks = torch.arange(tokens // BLOCK_TOKENS, device=rows.device)
    behind = (blocks < (rows // BLOCK_TOKENS).unsqueeze(-1)).unsqueeze(1)
    target = mass * behind
    back = target.sum(-1, keepdim=True)
    target = target / back.clamp(min=1e-9)
    # A finite stand-in for -inf: rows without blocks behind them have weight 0, not NaN.
    log_chosen = logits.masked_fill(~behind, -1e4).log_softmax(-1)
    log_target = target.clamp(min=1e-9).log()
    divergence = (target * (log_target - log_chosen)).sum(-1)
    weight = back.squeeze(-1).clamp(min=_LEAST_WEIGHT) * behind.any(-1)
    mean: Tensor = (divergence * weight).sum() / weight.sum().clamp(min=1.0)
    return mean


def _rows(x: Tensor, rows: Tensor) -> Tensor:
    """x [B, heads, T, dim] at `rows` [B, R] -> [B, heads, R, dim]."""
    index = rows[:, None, :, None].expand(-1, x.shape[1], -1, x.shape[-1])
    return x.gather(2, index)


def _ahead(rows: Tensor, tokens: int) -> Tensor:
    """bool [B, R, T]: tokens that a row must not see."""
    return torch.arange(tokens, device=rows.device) > rows.unsqueeze(-1)

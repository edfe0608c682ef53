"""Triton kernels that route rows to experts and order the pairs by expert. Multiply no expert.

A pair is a row and one of its chosen experts: pair p is row p // k and choice p % k. Everything is
found on the device with grids that depend on shapes alone, in an order that depends on the pairs
alone: no atomics.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from winnow.ops.triton_codec import dot
from winnow.ops.weights import MoeWeights
from winnow.spec.model import ModelSpec

_ROWS = 16
_DEPTH = 64
_SPLIT = 512
"""Columns of the router's matrix that one program sums: with few rows, splits fill the device."""
_SORT_BLOCK = 1024


@dataclass(frozen=True)
class Routes:
    """`share` fp32 [pairs]: each pair's weight. `order` int32 [pairs]: the pairs by expert, then
    by number; `starts` and `counts` int32 [experts]: where each expert's lie in it."""

    share: Tensor
    order: Tensor
    starts: Tensor
    counts: Tensor


def route(x: Tensor, weights: MoeWeights, spec: ModelSpec) -> Routes:
    """The router of `winnow.ops.moe.Moe` on `x` [rows, hidden], rows > 0."""
    rows, experts, taken = x.shape[0], spec.num_experts, spec.experts_per_token
    width = max(16, triton.next_power_of_2(experts))
    splits = triton.cdiv(spec.hidden_size, _SPLIT)
    logits = torch.empty(splits, rows, width, dtype=torch.float32, device=x.device)
    _scores[(triton.cdiv(rows, _ROWS), splits)](
        x, weights.router, logits, rows, x.stride(0),
        EXPERTS=experts, WIDTH=width, HIDDEN=spec.hidden_size, SPLIT=_SPLIT, BM=_ROWS, BK=_DEPTH,
        num_warps=4, num_stages=2,
    )  # fmt: skip
    chosen = torch.empty(rows * taken, dtype=torch.int32, device=x.device)
    share = torch.empty(rows * taken, dtype=torch.float32, device=x.device)
    _choose[(rows,)](
        logits, weights.router_bias, chosen, share, rows, spec.routed_scale,
        EXPERTS=experts, WIDTH=width, SPLITS=splits, TAKEN=taken,
        CHOICES=triton.next_power_of_2(taken), num_warps=1,
    )  # fmt: skip
    order = torch.empty_like(chosen)
    starts = torch.empty(experts, dtype=torch.int32, device=x.device)
    counts = torch.empty_like(starts)
    _sort[(experts,)](chosen, order, starts, counts, rows * taken, BLOCK=_SORT_BLOCK)
    return Routes(share, order, starts, counts)


@triton.jit(do_not_specialize=["rows"])
def _scores(
    x_ptr, router_ptr, logits_ptr, rows, x_stride,
    EXPERTS: tl.constexpr, WIDTH: tl.constexpr, HIDDEN: tl.constexpr, SPLIT: tl.constexpr,
    BM: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """fp32 parts of x @ router^T, one a split of the hidden axis: [splits, rows, WIDTH]."""
    row = tl.program_id(0).to(tl.int64) * BM + tl.arange(0, BM)
    expert = tl.arange(0, WIDTH)
    total = tl.zeros((BM, WIDTH), tl.float32)
    for k in range(0, SPLIT, BK):
        column = tl.program_id(1) * SPLIT + k + tl.arange(0, BK)
        inside = (column < HIDDEN)[None, :]
        at = row[:, None] * x_stride + column[None, :]
        x = tl.load(x_ptr + at, mask=(row < rows)[:, None] & inside, other=0.0).to(tl.float32)
        at = expert[:, None] * HIDDEN + column[None, :]
        w = tl.load(router_ptr + at, mask=(expert < EXPERTS)[:, None] & inside, other=0.0)
        total = dot(x, tl.trans(w), total)
    at = (tl.program_id(1).to(tl.int64) * rows + row)[:, None] * WIDTH + expert[None, :]
    tl.store(logits_ptr + at, total, mask=(row < rows)[:, None])


@triton.jit(do_not_specialize=["rows"])
def _choose(
    logits_ptr, bias_ptr, chosen_ptr, share_ptr, rows, routed_scale,
    EXPERTS: tl.constexpr, WIDTH: tl.constexpr, SPLITS: tl.constexpr, TAKEN: tl.constexpr,
    CHOICES: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    expert = tl.arange(0, WIDTH)
    logits = tl.zeros((WIDTH,), tl.float32)
    for split in range(SPLITS):
        logits += tl.load(logits_ptr + (split * rows + row) * WIDTH + expert)
    scores = 1.0 / (1.0 + tl.exp(-logits))
    bias = tl.load(bias_ptr + expert, mask=expert < EXPERTS, other=0.0)
    ranked = scores + bias
    ranked = tl.where(ranked == ranked, ranked, float("-inf"))
    # Its own mask: a NaN that may still be chosen has the rank of one that was.
    free = expert < EXPERTS
    choice = tl.arange(0, CHOICES)
    chosen = tl.zeros((CHOICES,), tl.int32)
    share = tl.zeros((CHOICES,), tl.float32)
    for number in tl.static_range(TAKEN):
        best = tl.max(tl.where(free, ranked, float("-inf")), 0)
        index = tl.min(tl.where(free & (ranked == best), expert, WIDTH), 0)
        score = tl.sum(tl.where(expert == index, scores, 0.0), 0)
        chosen = tl.where(choice == number, index, chosen)
        share = tl.where(choice == number, score, share)
        free = free & (expert != index)
    share = share / tl.sum(share, 0) * routed_scale
    tl.store(chosen_ptr + row * TAKEN + choice, chosen, mask=choice < TAKEN)
    tl.store(share_ptr + row * TAKEN + choice, share, mask=choice < TAKEN)


@triton.jit(do_not_specialize=["pairs"])
def _sort(chosen_ptr, order_ptr, starts_ptr, counts_ptr, pairs, BLOCK: tl.constexpr):
    """A counting sort, one program an expert: it counts the pairs before its own, then writes."""
    expert = tl.program_id(0)
    before, own = tl.full((), 0, tl.int32), tl.full((), 0, tl.int32)
    start = tl.full((), 0, tl.int32)
    while start < pairs:
        pair = start + tl.arange(0, BLOCK)
        chosen = tl.load(chosen_ptr + pair, mask=pair < pairs, other=2147483647)
        before += tl.sum((chosen < expert).to(tl.int32), 0)
        own += tl.sum((chosen == expert).to(tl.int32), 0)
        start += BLOCK
    tl.store(starts_ptr + expert, before)
    tl.store(counts_ptr + expert, own)
    place = before
    start = tl.full((), 0, tl.int32)
    while start < pairs:
        pair = start + tl.arange(0, BLOCK)
        chosen = tl.load(chosen_ptr + pair, mask=pair < pairs, other=2147483647)
        mine = (chosen == expert).to(tl.int32)
        tl.store(order_ptr + place + tl.cumsum(mine, 0) - 1, pair, mask=mine > 0)
        place += tl.sum(mine, 0)
        start += BLOCK

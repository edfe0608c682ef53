"""Workloads of `winnow bench kernels`: selection and sparse attention, decode and prefill.

Owns their batches, costs and checks. Knows nothing of clocks, records or peers.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from winnow.bench.kernel_state import (
    BF16_TOLERANCE,
    CALLS,
    NEAR_TIE,
    Checked,
    Ready,
    State,
    sampled,
    selections,
    spread,
)
from winnow.ops.batch import Batch
from winnow.ops.case import error
from winnow.ops.codec import reference as codec
from winnow.ops.paged import read
from winnow.ops.sparse_attention.reference import attend
from winnow.ops.table import Kernels
from winnow.spec.formats import FORMATS
from winnow.spec.model import BLOCK_TOKENS

SPARSE_TOKENS = 16_384


def _decode_batch(pages: Tensor, requests: int, tokens: int, rows: int = 1) -> Batch:
    """`rows` rows a request, the last of `tokens` tokens in the next of `pages`."""
    blocks = -(-tokens // BLOCK_TOKENS)
    device = pages.device
    last = torch.arange(tokens - rows, tokens, device=device)
    return Batch(
        positions=last.repeat(requests),
        row_request=torch.arange(requests, device=device).repeat_interleave(rows),
        row_starts=torch.arange(0, requests * rows + 1, rows, device=device),
        kv_lens=torch.full((requests,), tokens, device=device),
        block_tables=pages[: requests * blocks].view(requests, blocks),
    )


def prefill_batch(pages: Tensor, rows: int, context: int) -> Batch:
    device, blocks = pages.device, -(-(context + rows) // BLOCK_TOKENS)
    return Batch(
        positions=context + torch.arange(rows, device=device),
        row_request=torch.zeros(rows, dtype=torch.int64, device=device),
        row_starts=torch.tensor([0, rows], device=device),
        kv_lens=torch.tensor([context + rows], device=device),
        block_tables=pages[:blocks].view(1, blocks),
    )


def select_decode(requests: int, tokens: int, rows: int = 1) -> Callable[[Kernels, State], Ready]:
    """`rows` of each request, whose keys are read once for all of them."""

    def make(kernels: Kernels, state: State) -> Ready:
        batches = [
            _decode_batch(pages, requests, tokens, rows)
            for pages in state.page_sets(requests * -(-tokens // BLOCK_TOKENS))
        ]
        past = requests * ((tokens - 1) // BLOCK_TOKENS)
        return _select(kernels, state, batches, requests * rows, past)

    return make


def select_prefill(rows: int, context: int) -> Callable[[Kernels, State], Ready]:
    def make(kernels: Kernels, state: State) -> Ready:
        blocks = -(-(context + rows) // BLOCK_TOKENS)
        batches = [prefill_batch(next(state.page_sets(blocks)), rows, context)]
        return _select(kernels, state, batches, rows, blocks - 1, calls=len(state.layers))

    return make


def _select(
    kernels: Kernels, state: State, batches: list[Batch], rows: int, past: int, calls: int = CALLS
) -> Ready:
    spec = state.spec
    queries = torch.randn(rows, spec.num_index_heads, spec.index_dim, device="cuda").bfloat16()
    layers = [layer.index for layer in state.layers]

    def call(batch: Batch, index: Any) -> Callable[[], Tensor]:
        return lambda: kernels.select_blocks(queries, index, batch, spec.topk_blocks)

    def check() -> Checked:
        batch, index = batches[0], layers[0]
        assert index is not None
        ids = call(batch, index)()
        wrong, ties = 0, 0
        for row in sampled(rows):
            request = int(batch.row_request[row])
            current = int(batch.positions[row]) // BLOCK_TOKENS
            pages = batch.block_tables[request, :current]
            keys = read(codec, index, pages, torch.float32).flatten(0, 2).double()
            scores = (queries[row].double() @ keys.T).unflatten(1, (current, -1)).amax(-1)
            ranked = scores.sort(dim=-1, descending=True, stable=True).indices
            for head in range(spec.num_index_heads):
                want = {*ranked[head, : spec.topk_blocks - 1].tolist(), current}
                got = set(ids[row, head].tolist()) - {-1}
                lost, taken = sorted(want - got), sorted(got - want)
                close = len(lost) == len(taken) and all(
                    b < current and _near(float(scores[head, a]), float(scores[head, b]))
                    for a, b in zip(lost, taken, strict=True)
                )
                ties += len(lost) if close else 0
                wrong += 0 if close else 1
        return Checked(float(wrong), 0.0, f"{ties} near ties" if ties else "")

    piece = FORMATS[state.index_format].nbytes(BLOCK_TOKENS * spec.index_dim)
    visible = sum(int(b.positions.double().mean()) + 1 for b in batches) / len(batches)
    flops = 2 * rows * spec.num_index_heads * spec.index_dim * int(visible)
    return Ready(spread(call, batches, layers, calls), check, past * piece, flops)


def _near(one: float, other: float) -> bool:
    return abs(one - other) <= NEAR_TIE * abs(one)


def sparse_decode(requests: int) -> Callable[[Kernels, State], Ready]:
    def make(kernels: Kernels, state: State) -> Ready:
        blocks = SPARSE_TOKENS // BLOCK_TOKENS
        batches = [
            _decode_batch(p, requests, SPARSE_TOKENS) for p in state.page_sets(requests * blocks)
        ]
        return _sparse(kernels, state, batches, requests, False, CALLS)

    return make


def sparse_prefill(rows: int, context: int, clustered: bool) -> Callable[[Kernels, State], Ready]:
    def make(kernels: Kernels, state: State) -> Ready:
        pages = next(state.page_sets(-(-(context + rows) // BLOCK_TOKENS)))
        batches = [prefill_batch(pages, rows, context)]
        return _sparse(kernels, state, batches, rows, clustered, len(state.layers))

    return make


def _sparse(
    kernels: Kernels, state: State, batches: list[Batch], rows: int, clustered: bool, calls: int
) -> Ready:
    spec = state.spec
    queries = torch.randn(rows, spec.num_heads, spec.head_dim, device="cuda").bfloat16()
    chosen = selections(batches[0].positions, spec.num_kv_heads, spec.topk_blocks, clustered)

    def call(batch: Batch, layer: Any) -> Callable[[], Tensor]:
        return lambda: kernels.sparse_attention(queries, chosen, batch, layer)

    def check() -> Checked:
        batch, layer = batches[0], state.layers[0]
        out = call(batch, layer)()
        picked = list(sampled(rows))
        want = torch.empty_like(out[picked])
        group = spec.heads_per_kv_head
        for place, row in enumerate(picked):
            table = batch.block_tables[int(batch.row_request[row])]
            for head in range(spec.num_kv_heads):
                blocks = chosen[row, head][chosen[row, head] >= 0].long()
                tokens = (
                    blocks[:, None] * BLOCK_TOKENS + torch.arange(BLOCK_TOKENS, device="cuda")
                ).flatten()
                seen = tokens <= batch.positions[row]
                k, v = (
                    read(codec, part, table[blocks], torch.float32)[:, head].flatten(0, 1)[seen]
                    for part in (layer.key, layer.value)
                )
                heads = slice(head * group, (head + 1) * group)
                want[place, heads] = attend(queries[row, heads], k, v)
        return Checked(error(out[picked], want), BF16_TOLERANCE)

    counts = (chosen >= 0).sum().item()
    piece = FORMATS[state.kv_format].nbytes(BLOCK_TOKENS * spec.head_dim) * 2
    whole = int(batches[0].kv_lens.sum()) // BLOCK_TOKENS * spec.num_kv_heads
    flops = 4 * int(counts) * BLOCK_TOKENS * spec.heads_per_kv_head * spec.head_dim
    return Ready(
        spread(call, batches, state.layers, calls), check, min(int(counts), whole) * piece, flops
    )

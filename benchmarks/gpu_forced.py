"""Given tokens with given choices of experts and of blocks, computed by an engine on a CPU: the
logits of each answer's rows, and how near each choice was to falling otherwise there.

Knows nothing of where tokens and choices come from. An op's own arithmetic is used throughout: the
router's bias of an expert that was not taken is minus infinity, so the shares of those taken are
what the router gives them, and blocks that were taken are given to attention in place of its own.
What is stored of the tokens may be given too. Then what this engine would store goes elsewhere, and
the two are compared.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate

import torch
from gpu_notes import Noted, block_scores, score_size, spread_columns
from torch import Tensor

from winnow.engine.llm import LLM
from winnow.engine.storage import PageStorage
from winnow.ops.batch import Batch
from winnow.ops.codec import cpu as codec
from winnow.ops.paged import CacheScales, LayerPages, Paged, read
from winnow.ops.table import Kernels
from winnow.ops.weights import AttentionWeights, MoeWeights
from winnow.spec.model import BLOCK_TOKENS, ModelSpec

ROWS = 2048
"""Of a forward pass, unless one request has more."""


@dataclass(frozen=True)
class Asked:
    """A prompt, what was noted of its answer and, if it is to be read in place of this engine's
    own, what was stored: the page of each block, uint8 [blocks, row_bytes]."""

    prompt: list[int]
    noted: Noted
    stored: Tensor | None = None


@dataclass(frozen=True)
class Forced:
    """One request. Of each row of logits the given token's distance behind the largest, `behind`
    [T], and how far the side that noted the tokens' two largest lead one another here, `lead` [T],
    both over the row's root mean square; some `columns` [T, *].

    `gaps` [positions, depths]: how far the last one taken was ahead of the first one left; below 0
    where another choice would have been made here, infinite where none was left, and minus infinity
    where what was taken is no choice at all.

    `stored` [positions, parts]: relative error of the K, V and index key that were given for a
    token to those computed here, layer by layer; no parts where none were given.
    """

    behind: Tensor
    lead: Tensor
    columns: Tensor
    gaps: Tensor
    stored: Tensor


class _Given:
    """The ops of a layer that choose, with every choice given: `choices` int16 [rows, depths, *] in
    the order in which a forward pass comes to them. With `own`, pages of each layer, what the
    layers store goes there, and what they read was given."""

    def __init__(
        self,
        kernels: Kernels,
        choices: Tensor,
        spans: Sequence[tuple[int, int]],
        own: Sequence[LayerPages],
    ) -> None:
        self._kernels, self._choices, self._spans, self._own = kernels, choices, spans, own
        self._layer = 0
        self.gaps: list[Tensor] = []
        self.stored: list[Tensor] = []

    def kernels(self) -> Kernels:
        given = replace(self._kernels, moe=self.moe, select_blocks=self.select_blocks)
        return replace(given, attention_inputs=self.attention_inputs) if self._own else given

    def attention_inputs(
        self,
        x: Tensor,
        weights: AttentionWeights,
        spec: ModelSpec,
        rope: tuple[Tensor, Tensor],
        batch: Batch,
        pages: LayerPages,
    ) -> tuple[Tensor, Tensor | None]:
        own = self._own[self._layer]
        self._layer += 1
        found = self._kernels.attention_inputs(x, weights, spec, rope, batch, own)
        parts = ((own.key, pages.key), (own.value, pages.value), (own.index, pages.index))
        for mine, theirs in parts:
            if mine is not None and theirs is not None:
                want, got = _tokens(mine, batch), _tokens(theirs, batch)
                self.stored.append((got - want).norm(dim=1) / want.norm(dim=1))
        return found

    def moe(self, x: Tensor, weights: MoeWeights, spec: ModelSpec) -> Tensor:
        chosen = self._choices[:, len(self.gaps), : spec.experts_per_token].long()
        taken = torch.zeros(len(x), spec.num_experts, dtype=torch.bool).scatter(1, chosen, True)
        scores = (x.double() @ weights.router.double().T).sigmoid() + weights.router_bias
        gaps = _gap(scores, taken)
        gaps[taken.sum(1) != spec.experts_per_token] = -math.inf
        self.gaps.append(gaps)
        bias = weights.router_bias.masked_fill(~taken, -math.inf)
        return self._kernels.moe(x, replace(weights, router_bias=bias), spec)

    def select_blocks(self, index_q: Tensor, index: Paged, batch: Batch, topk: int) -> Tensor:
        heads = index_q.shape[1]
        given = self._choices[:, len(self.gaps), : heads * topk]
        ids = given.int().unflatten(1, (heads, topk)).contiguous()
        gaps = torch.full((len(ids),), math.inf, dtype=torch.float64)
        current = (batch.positions // BLOCK_TOKENS).view(-1, 1, 1)
        for rows, scores in block_scores(index_q, index, batch, topk, self._spans):
            taken = torch.zeros(*scores.shape[:2], scores.shape[2] + 1, dtype=torch.bool)
            taken.scatter_(2, ids[rows].long().clamp(min=0), True)
            taken.scatter_(2, current[rows].expand(-1, heads, 1), False)
            taken = taken[..., :-1]
            gaps[rows] = (_gap(scores, taken) / score_size(scores)).amin(1)
        gaps[~_is_selection(ids, current)] = -math.inf
        self.gaps.append(gaps)
        return ids


def _tokens(paged: Paged, batch: Batch) -> Tensor:
    """What is stored for each row, fp32 [rows, heads * dim]."""
    pages, offsets = batch.slots
    used, place = pages.unique(return_inverse=True)
    return read(codec, paged, used, torch.float32)[place, :, offsets].flatten(1)


def _gap(scores: Tensor, taken: Tensor) -> Tensor:
    """Of the least score that was taken, over the largest one that was not."""
    last = scores.masked_fill(~taken, math.inf).amin(-1)
    gap: Tensor = last - scores.masked_fill(taken, -math.inf).amax(-1)
    return gap


def _is_selection(ids: Tensor, current: Tensor) -> Tensor:
    """bool [rows]: whether ids [rows, heads, topk] are as many blocks as there are to take, none
    twice, the row's own, `current` [rows, 1, 1], among them and none beyond it."""
    ordered = torch.where(ids < 0, current + 1, ids)
    count = (ids >= 0).sum(2, keepdim=True)
    own = (ids == current).any(2)
    whole = (count == (current + 1).clamp(max=ids.shape[2])).squeeze(2)
    rising = (ordered.diff(dim=2) > 0) | (ids[..., 1:] < 0)
    return (own & whole & rising.all(2) & (ordered <= current + 1).all(2)).all(1)


def forced(llm: LLM, asked: Sequence[Asked], columns: int) -> list[Forced]:
    """The noted tokens and choices, computed by an engine on a CPU that serves nobody else. Of a
    row of logits as many `columns` are kept as were noted at most."""
    found: list[Forced] = []
    for group in _groups([len(one.noted.choices) for one in asked]):
        found += _forced(llm, asked[group], columns)
    return found


def _groups(rows: Sequence[int]) -> Iterator[slice]:
    """Neighbours that are computed together."""
    start, total = 0, 0
    for number, count in enumerate(rows):
        if number > start and total + count > ROWS:
            yield slice(start, number)
            start, total = number, 0
        total += count
    yield slice(start, len(rows))


def _forced(llm: LLM, asked: Sequence[Asked], columns: int) -> list[Forced]:
    model, storage = llm.engine.runner.model, llm.engine.runner.storage
    texts = [[*one.prompt, *one.noted.tokens[:-1].tolist()] for one in asked]
    counts = [len(text) for text in texts]
    blocks = [-(-count // BLOCK_TOKENS) for count in counts]
    assert sum(blocks) < storage.num_pages, "too few pages"
    pages = iter(range(1, storage.num_pages))
    tables = [[next(pages) for _ in range(count)] for count in blocks]
    batch = Batch.of([0] * len(counts), counts, tables)
    rows = [
        torch.arange(end - len(one.noted.tokens), end)
        for one, end in zip(asked, accumulate(counts), strict=True)
    ]
    stored = [one.stored for one in asked if one.stored is not None]
    if stored:
        storage.rows[1 : 1 + sum(blocks)] = torch.cat(stored)
    choices = torch.cat([one.noted.choices for one in asked])
    assert len(choices) == sum(counts), "a choice is noted of every row"
    own = model.kernels
    given = _Given(
        own, choices, [(0, count) for count in counts], _scratch(storage) if stored else ()
    )
    model.kernels = given.kernels()
    try:
        with torch.inference_mode():
            logits = model.forward(
                torch.tensor([token for text in texts for token in text]),
                batch,
                storage.layers,
                torch.cat(rows),
            )
    finally:
        model.kernels = own
    parts = (
        logits.split([len(one) for one in rows]),
        *(_by_request(found, counts) for found in (given.gaps, given.stored)),
    )
    return [_one(one.noted, *own, columns) for one, *own in zip(asked, *parts, strict=True)]


def _scratch(storage: PageStorage) -> tuple[LayerPages, ...]:
    """Other pages of the same formats and scales."""
    scales = tuple(
        CacheScales(
            layer.key.global_scale,
            layer.value.global_scale,
            1.0 if layer.index is None else layer.index.global_scale,
        )
        for layer in storage.layers
    )
    return PageStorage(storage.layout, storage.num_pages, scales).layers


def _by_request(found: Sequence[Tensor], counts: Sequence[int]) -> Sequence[Tensor]:
    """fp32 [rows, *] of each request from what was found of all rows, again and again."""
    whole = torch.stack([one.float() for one in found], 1) if found else torch.zeros(sum(counts), 0)
    return whole.split(list(counts))


def _one(noted: Noted, logits: Tensor, gaps: Tensor, stored: Tensor, columns: int) -> Forced:
    rms = logits.square().mean(1).sqrt()
    token = logits.gather(1, noted.tokens.unsqueeze(1)).squeeze(1)
    pair = logits.gather(1, noted.ids[:, :2])
    return Forced(
        behind=(logits.amax(1) - token) / rms,
        lead=(pair[:, 0] - pair[:, 1]) / rms,
        columns=spread_columns(logits, columns).clone(),
        gaps=gaps,
        stored=stored,
    )

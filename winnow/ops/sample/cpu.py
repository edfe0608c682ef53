"""`sample` for a CPU: greedy rows in one pass together, no sort of the vocabulary where it can.

Bit for bit the ids of the reference. NumPy finds the largest logits, many times faster than torch.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from winnow.ops.sample import Logprobs, SampleColumns, Sampled, SampleRow
from winnow.ops.sample.reference import draw, edited, has_choice, weights, with_uniforms

_NUCLEUS_GUESS = 1024
"""How many of the most likely tokens top_p looks at first; it goes on with eight times as many."""


def sample(logits: Tensor, requests: Sequence[SampleRow] | SampleColumns) -> Sampled:
    """See `winnow.ops.sample.Sample`."""
    asked = list(with_uniforms(requests))
    if logits.shape[0] != len(asked):
        raise ValueError(f"{logits.shape[0]} rows of logits for {len(asked)} requests")
    # argmax stops at the first of equals, and at a NaN before anything else.
    ids = torch.from_numpy(logits.numpy().argmax(axis=1))
    bad = ~logits.gather(1, ids[:, None])[:, 0].isfinite()
    for i, is_bad in enumerate(bad.tolist()):
        if not is_bad and (asked[i][0].temperature != 0 or asked[i][0].edits_logits):
            chosen = _choose(logits[i], *asked[i])
            bad[i] = chosen is None
            ids[i] = -1 if chosen is None else chosen
    ids[bad] = -1
    if isinstance(requests, SampleColumns):
        return Sampled(ids, bad, ())
    logprobs = (
        None if chosen < 0 or request.logprobs is None else _logprobs(row, chosen, request.logprobs)
        for row, chosen, request in zip(logits, ids.tolist(), requests, strict=True)
    )
    return Sampled(ids, bad, tuple(logprobs))


def _choose(logits: Tensor, request: SampleRow, drawn: float) -> int | None:
    row = edited(logits, request) if request.edits_logits else logits
    if not has_choice(row):
        return None
    if request.temperature == 0:
        return int(row.numpy().argmax())
    weight = weights(row, request.temperature)
    kept: Tensor | None = None
    if request.top_k:
        kept = _largest(row, request.top_k)[: request.top_k]
    if request.top_p < 1:
        kept = _nucleus(row, weight, kept, request.top_p)
    if kept is not None:
        kept = kept.sort().values
        weight = weight[kept]
    if request.min_p:
        likely = (weight >= request.min_p).nonzero()[:, 0]
        kept = likely if kept is None else kept[likely]
        weight = weight[likely]
    place = draw(weight, drawn)
    return place if kept is None else int(kept[place])


def _largest(row: Tensor, count: int) -> Tensor:
    """Ids of the `count` largest of fp32 [V] and of all that equal the last of them, int64,
    the largest first and the lower id first among equals."""
    values = row.numpy()
    if count < len(values):
        last = np.partition(values, len(values) - count)[len(values) - count]
        ids = np.flatnonzero(values >= last)
    else:
        ids = np.arange(len(values))
    return torch.from_numpy(ids[np.argsort(-values[ids], kind="stable")])


def _nucleus(row: Tensor, weight: Tensor, kept: Tensor | None, share: float) -> Tensor:
    """Stage 8: the first of `kept`, or of all ids, that reach `share` of their weight."""
    if kept is not None:
        order, total = kept, weight[kept.sort().values].cumsum(0)[-1]
        mass = weight[order].cumsum(0)
    else:
        total = weight.cumsum(0)[-1]
        count = _NUCLEUS_GUESS
        while True:
            order = _largest(row, count)
            mass = weight[order].cumsum(0)
            if len(order) == len(row) or mass[-1] >= share * total:
                break
            count *= 8
    return order[: int((mass < share * total).sum()) + 1]


def _logprobs(logits: Tensor, chosen: int, count: int) -> Logprobs:
    total = logits.double().logsumexp(0)
    top = _largest(logits, count)[:count] if count else logits.new_empty(0, dtype=torch.int64)
    values = (logits[top].double() - total).tolist()
    pairs = zip(top.tolist(), values, strict=True)
    return Logprobs(float(logits[chosen].double() - total), tuple(pairs))

"""The meaning of `sample`: one row at a time, every stage written out, the vocabulary sorted."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from itertools import chain

import torch
from torch import Tensor

from winnow.ops.sample import Logprobs, SampleColumns, Sampled, SampleRow, uniform


def sample(logits: Tensor, requests: Sequence[SampleRow] | SampleColumns) -> Sampled:
    """See `winnow.ops.sample.Sample`."""
    ids: list[int] = []
    logprobs: list[Logprobs | None] = []
    for row, (request, drawn) in zip(logits, with_uniforms(requests), strict=True):
        chosen = _choose(row, request, drawn) if has_choice(row) else None
        ids.append(-1 if chosen is None else chosen)
        logprobs.append(None if chosen is None else _logprobs(row, chosen, request.logprobs))
    chosen_ids = torch.tensor(ids, dtype=torch.int64, device=logits.device)
    by_columns = isinstance(requests, SampleColumns)
    return Sampled(chosen_ids, chosen_ids < 0, () if by_columns else tuple(logprobs))


def with_uniforms(
    requests: Sequence[SampleRow] | SampleColumns,
) -> Iterator[tuple[SampleRow, float]]:
    """Each row's options and the uniform that its draw takes."""
    if isinstance(requests, SampleColumns):
        yield from requests.rows()
    else:
        yield from ((row, uniform(row.seed, row.index)) for row in requests)


def has_choice(logits: Tensor) -> bool:
    """Whether the row holds a finite number and neither NaN nor +inf: all show in the maximum."""
    return math.isfinite(logits.max().item())


def edited(logits: Tensor, request: SampleRow) -> Tensor:
    """Stages 1 to 5 on a copy of one row; `logits` fp32 [V]."""
    row = logits.clone()

    def ids(tokens: Iterable[int]) -> Tensor:
        return torch.tensor(list(tokens), dtype=torch.int64, device=row.device)

    if request.logit_bias:
        row[ids(request.logit_bias)] += row.new_tensor(list(request.logit_bias.values()))
    if len(request.banned):
        row[ids(request.banned)] = -math.inf
    if request.allowed is not None:
        row = torch.where(allowed_ids(request.allowed, len(row)).to(row.device), row, -math.inf)
    if request.repetition_penalty != 1.0:
        # An id that occurs twice is read before any is written, so it is penalised once.
        seen = ids(chain(request.prompt_ids, request.output_ids))
        values, penalty = row[seen], request.repetition_penalty
        row[seen] = torch.where(values > 0, values / penalty, values * penalty)
    if (request.frequency_penalty or request.presence_penalty) and len(request.output_ids):
        counts = Counter(request.output_ids)
        times = row.new_tensor(list(counts.values()))
        row[ids(counts)] -= request.frequency_penalty * times + request.presence_penalty
    return row


def allowed_ids(mask: Tensor, vocab_size: int) -> Tensor:
    """Bits of `SampleRow.allowed` as bool [V]; ValueError for a mask of another length."""
    if mask.shape != (-(-vocab_size // 32),):
        raise ValueError(f"a mask of shape {tuple(mask.shape)} for {vocab_size} ids")
    bits = mask.unsqueeze(1) >> torch.arange(32, dtype=torch.int32, device=mask.device)
    return (bits & 1).bool().flatten()[:vocab_size]


def weights(row: Tensor, temperature: float) -> Tensor:
    """Stage 6, fp64 [V]. The largest is exactly 1, whatever the temperature."""
    wide = row.double()
    return ((wide - wide.max()) / temperature).exp()


def draw(weight: Tensor, drawn: float) -> int:
    """Stage 10: the place in `weight` fp64 [n], which sums in order, that the uniform `drawn` falls
    on."""
    cumulative = weight.cumsum(0)
    target = drawn * cumulative[-1]
    return int(torch.searchsorted(cumulative, target, right=True))


def _choose(logits: Tensor, request: SampleRow, drawn: float) -> int | None:
    row = edited(logits, request)
    if not has_choice(row):
        return None
    if request.temperature == 0:
        return int(row.argmax())
    weight = weights(row, request.temperature)
    order = row.sort(descending=True, stable=True).indices
    if request.top_k:
        order = order[: request.top_k]
    if request.top_p < 1:
        # Summed in order of id, so that a version which does not sort finds the same number.
        total = weight[order.sort().values].cumsum(0)[-1]
        short = weight[order].cumsum(0) < request.top_p * total
        order = order[: int(short.sum()) + 1]
    order = order[weight[order] >= request.min_p]
    kept = order.sort().values
    return int(kept[draw(weight[kept], drawn)])


def _logprobs(logits: Tensor, chosen: int, count: int | None) -> Logprobs | None:
    if count is None:
        return None
    values = logits.double().log_softmax(0)
    # Ranked by logit: rounding can make two logprobs equal whose logits are not.
    top = logits.sort(descending=True, stable=True).indices[:count]
    pairs = zip(top.tolist(), values[top].tolist(), strict=True)
    return Logprobs(float(values[chosen]), tuple(pairs))

"""`sample` on a GPU: all rows together, stage by stage; a sort only where a rank is asked for.

Sums over a row are taken by one kernel in one order of its own, since library scans add in an
order that follows the number of rows: a row's token must not. The reference's sums may differ in
the last bit of fp64, so a token may where a draw falls within that of the edge between two.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from winnow.ops.sample import Logprobs, Sampled, SampleRow, uniform
from winnow.ops.sample.reference import edited

_SCAN_BLOCK = 2048


def sample(logits: Tensor, requests: Sequence[SampleRow]) -> Sampled:
    """See `winnow.ops.sample.Sample`. Waits for the device only where a stage before temperature or
    logprobs are asked for."""
    if logits.shape[0] != len(requests):
        raise ValueError(f"{logits.shape[0]} rows of logits for {len(requests)} requests")
    if not requests:
        empty = torch.zeros(0, dtype=torch.int64, device=logits.device)
        return Sampled(empty, empty.bool(), ())
    rows = _edited(logits, requests)
    largest = rows.amax(1, keepdim=True)
    # A row that was bad before its edits stays so: they may have banned the NaN.
    bad = ~(largest[:, 0].isfinite() & logits.amax(1).isfinite())
    ids = _first(rows == largest)
    drawn = [i for i, request in enumerate(requests) if request.temperature != 0]
    if drawn:
        places = _tensor(drawn, torch.int64, logits.device)
        ids[places] = _draw(rows[places], largest[places], [requests[i] for i in drawn])
    ids = ids.masked_fill(bad, -1)
    return Sampled(ids, bad, _logprobs(logits, ids, requests))


def _edited(logits: Tensor, requests: Sequence[SampleRow]) -> Tensor:
    """Stages 1 to 5, on a copy if there are any."""
    changed = [i for i, request in enumerate(requests) if request.edits_logits]
    if not changed:
        return logits
    rows = logits.clone()
    for i in changed:
        rows[i] = edited(logits[i], requests[i])
    return rows


def _draw(rows: Tensor, largest: Tensor, requests: Sequence[SampleRow]) -> Tensor:
    """Stages 6 to 10: int64 [rows]. Means nothing for a bad row."""

    def column(values: Sequence[float], dtype: torch.dtype = torch.float64) -> Tensor:
        return _tensor(values, dtype, rows.device).unsqueeze(1)

    weight = ((rows.double() - largest) / column([r.temperature for r in requests])).exp()
    kept = weight >= column([r.min_p for r in requests])
    ranked = [i for i, r in enumerate(requests) if r.top_k or r.top_p < 1]
    if ranked:
        places = _tensor(ranked, torch.int64, rows.device)
        asked = [requests[i] for i in ranked]
        count = column([r.top_k or rows.shape[1] for r in asked], torch.int64)
        share = column([r.top_p if r.top_p < 1 else 2.0 for r in asked])
        kept[places] &= _likeliest(rows[places], weight[places], count, share)
    weight = weight.masked_fill(~kept, 0.0)
    running = _running_sum(weight)
    target = column([uniform(r.seed, r.index) for r in requests]) * running[:, -1:]
    # Rounding may lift the running sum at an id that was not kept.
    return _first(kept & (running > target))


def _likeliest(rows: Tensor, weight: Tensor, count: Tensor, share: Tensor) -> Tensor:
    """Stages 7 and 8: which of [rows, V] are among the `count` [rows, 1] largest and, of these,
    the fewest that reach `share` [rows, 1] of their weight; a share above 1 is never reached."""
    # Adding zero makes -0.0 the equal of 0.0 for a sort that looks at bits.
    order = (rows + 0.0).sort(dim=1, descending=True, stable=True).indices
    rank = torch.arange(rows.shape[1], device=rows.device).expand_as(order)
    chosen = rank < count
    among = torch.zeros_like(chosen).scatter_(1, order, chosen)
    total = _running_sum(weight.masked_fill(~among, 0.0))[:, -1:]
    mass = _running_sum(weight.gather(1, order).masked_fill(~chosen, 0.0))
    chosen &= rank <= (mass < share * total).sum(1, keepdim=True)
    return torch.zeros_like(chosen).scatter_(1, order, chosen)


def _first(mask: Tensor) -> Tensor:
    """The first id of each row of bool [rows, V] that is set, int64; V - 1 where none is."""
    ids = torch.arange(mask.shape[1], device=mask.device)
    return torch.where(mask, ids, mask.shape[1] - 1).amin(1)


def _logprobs(
    logits: Tensor, ids: Tensor, requests: Sequence[SampleRow]
) -> tuple[Logprobs | None, ...]:
    asked = [i for i, request in enumerate(requests) if request.logprobs is not None]
    found: list[Logprobs | None] = [None] * len(requests)
    if not asked:
        return tuple(found)
    places = _tensor(asked, torch.int64, logits.device)
    rows, chosen = logits[places], ids[places]
    wide = rows.double() - rows.amax(1, keepdim=True)
    wide -= _running_sum(wide.exp())[:, -1:].log()
    most = min(max(requests[i].logprobs or 0 for i in asked), logits.shape[1])
    top = (rows + 0.0).sort(dim=1, descending=True, stable=True).indices[:, :most]
    values = torch.cat((wide.gather(1, chosen.clamp(min=0)[:, None]), wide.gather(1, top)), 1)
    for i, token, row, best in zip(
        asked, chosen.tolist(), values.tolist(), top.tolist(), strict=True
    ):
        if token >= 0:
            count = requests[i].logprobs or 0
            found[i] = Logprobs(row[0], tuple(zip(best, row[1:], strict=True))[:count])
    return tuple(found)


def _tensor(values: Sequence[float], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Numbers on the device, without waiting for what it is doing."""
    return torch.tensor(values, dtype=dtype).to(device, non_blocking=True)


def _running_sum(x: Tensor) -> Tensor:
    """Sums of fp64 [rows, V] up to each place, contiguous in and out."""
    out = torch.empty_like(x, memory_format=torch.contiguous_format)
    _scan[(x.shape[0],)](x.contiguous(), out, x.shape[1], BLOCK=_SCAN_BLOCK)
    return out


@triton.jit(do_not_specialize=["width"])
def _scan(x_ptr, out_ptr, width, BLOCK: tl.constexpr):
    base = tl.program_id(0).to(tl.int64) * width
    total = tl.full((), 0.0, tl.float64)
    start = tl.full((), 0, tl.int32)
    while start < width:
        place = start + tl.arange(0, BLOCK)
        x = tl.load(x_ptr + base + place, mask=place < width, other=0.0)
        tl.store(out_ptr + base + place, total + tl.cumsum(x, 0), mask=place < width)
        total += tl.sum(x, 0)
        start += BLOCK

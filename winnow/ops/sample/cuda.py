"""`sample` on a GPU: all rows together, stage by stage; a sort only where logprobs are asked for.

The vocabulary is divided into chunks that do not depend on the number of rows, and sums are taken
in one order over them: a row's token must not depend on its batch. The reference's sums may differ
in the last bit of fp64, so a token may where a draw falls within that of the edge between two.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from winnow.ops.sample import Logprobs, SampleColumns, Sampled, SampleRow, uniform
from winnow.ops.sample.ranks import CHUNK, cut, heat_of
from winnow.ops.sample.reference import edited

_SCAN_BLOCK = 2048


def sample(logits: Tensor, requests: Sequence[SampleRow] | SampleColumns) -> Sampled:
    """See `winnow.ops.sample.Sample`. Waits for the device only where a stage before temperature or
    logprobs are asked for."""
    if isinstance(requests, SampleColumns):
        return Sampled(*_choose(logits, requests), ())
    if logits.shape[0] != len(requests):
        raise ValueError(f"{logits.shape[0]} rows of logits for {len(requests)} requests")
    if not requests:
        empty = torch.zeros(0, dtype=torch.int64, device=logits.device)
        return Sampled(empty, empty.bool(), ())
    rows = _edited(logits, requests)
    ids, bad = _choose(rows, _columns(requests, logits))
    if rows is not logits:
        # A row that was bad before its edits stays so: they may have banned the NaN.
        bad |= ~logits.amax(1).isfinite()
        ids.masked_fill_(bad, -1)
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


def _columns(requests: Sequence[SampleRow], logits: Tensor) -> SampleColumns:
    """The options of all rows, brought to the device in one copy."""
    drawn = any(r.temperature for r in requests)
    values = [
        (
            r.temperature,
            r.top_p,
            r.min_p,
            uniform(r.seed, r.index) if r.temperature else 0.0,
            min(r.top_k, logits.shape[1]),
        )
        for r in requests
    ]
    packed = _tensor(values, torch.float64, logits.device)
    temperature, top_p, min_p, draws, top_k = packed.split(1, dim=1)
    return SampleColumns(
        temperature,
        top_k.long(),
        top_p,
        min_p,
        draws,
        drawn=drawn,
        ranked=any(r.temperature and (r.top_k or r.top_p < 1) for r in requests),
    )


def _choose(logits: Tensor, columns: SampleColumns) -> tuple[Tensor, Tensor]:
    """Stages 6 to 10: ids int64 [rows], -1 where bad, and bad bool [rows]."""
    rows, vocab = logits.shape
    if logits.stride(1) != 1:
        logits = logits.contiguous()
    chunks = triton.cdiv(vocab, CHUNK)
    lanes = triton.next_power_of_2(chunks)

    def empty(*shape: int, dtype: torch.dtype) -> Tensor:
        return torch.empty(shape, dtype=dtype, device=logits.device)

    highest = empty(rows, chunks, dtype=torch.float32)
    places = empty(rows, chunks, dtype=torch.int32)
    _highest[rows, chunks](logits, logits.stride(0), highest, places, vocab, CHUNK=CHUNK)
    ids, bad = empty(rows, dtype=torch.int64), empty(rows, dtype=torch.bool)
    largest = empty(rows, 1, dtype=torch.float32)
    _most_likely[(rows,)](highest, places, ids, bad, largest, chunks, LANES=lanes)
    if not columns.drawn:
        return ids, bad
    # One value a row, side by side whichever way the caller holds them.
    temperature, top_k, top_p, min_p, draws = (
        column.contiguous()
        for column in (
            columns.temperature, columns.top_k, columns.top_p, columns.min_p, columns.uniform,
        )
    )  # fmt: skip
    edge, last = None, None
    if columns.ranked:
        edge, last = cut(logits, largest, temperature, top_k, top_p)
    row = (logits, logits.stride(0), largest, temperature, min_p, edge, last)
    sums = empty(rows, chunks, dtype=torch.float64)
    ranked = columns.ranked
    _weigh[rows, chunks](*row, sums, vocab, CHUNK=CHUNK, RANKED=ranked)
    _draw[(rows,)](
        *row, draws, sums, chunks, ids, bad, vocab, CHUNK=CHUNK, LANES=lanes, RANKED=ranked
    )
    return ids, bad


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


def _tensor(values: Sequence[object], dtype: torch.dtype, device: torch.device) -> Tensor:
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


@triton.jit(do_not_specialize=["stride", "vocab"])
def _highest(logits, stride, highest, places, vocab, CHUNK: tl.constexpr):
    """The largest logit of each row's chunk and its first id; +inf where the chunk has a NaN."""
    row = tl.program_id(0).to(tl.int64)
    chunk = tl.program_id(1)
    token = chunk * CHUNK + tl.arange(0, CHUNK)
    x = tl.load(logits + row * stride + token, mask=token < vocab, other=float("-inf"))
    broken = tl.max((x != x).to(tl.int32), 0) > 0
    best = tl.max(tl.where(x != x, float("-inf"), x), 0)
    first = tl.min(tl.where(x == best, token, vocab - 1), 0)
    at = row * tl.num_programs(1) + chunk
    tl.store(highest + at, tl.where(broken, float("inf"), best))
    tl.store(places + at, first)


@triton.jit(do_not_specialize=["chunks"])
def _most_likely(highest, places, ids, bad, largest, chunks, LANES: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    lane = tl.arange(0, LANES)
    mine = lane < chunks
    found = tl.load(highest + row * chunks + lane, mask=mine, other=float("-inf"))
    first = tl.load(places + row * chunks + lane, mask=mine, other=0)
    best = tl.max(found, 0)
    token = tl.min(tl.where(mine & (found == best), first, 2147483647), 0)
    broken = (best == float("inf")) | (best == float("-inf"))
    tl.store(ids + row, tl.where(broken, -1, token).to(tl.int64))
    tl.store(bad + row, broken)
    tl.store(largest + row, best)


@triton.jit
def _weights(
    logits, stride, largest, temperature, min_p, edge, last, row, token, vocab,
    RANKED: tl.constexpr,
):  # fmt: skip
    """Weights of a row's tokens in fp64, 0 where not kept (stages 6 to 9)."""
    inside = token < vocab
    x = tl.load(logits + row * stride + token, mask=inside, other=float("-inf"))
    best = tl.load(largest + row).to(tl.float64)
    weight = tl.exp((x.to(tl.float64) - best) / heat_of(temperature, row))
    stays = inside & (weight >= tl.load(min_p + row))
    if RANKED:
        lowest = tl.load(edge + row)
        stays = stays & ((x > lowest) | ((x == lowest) & (token <= tl.load(last + row))))
    return tl.where(stays, weight, 0.0)


@triton.jit(do_not_specialize=["stride", "vocab"])
def _weigh(
    logits, stride, largest, temperature, min_p, edge, last, sums, vocab,
    CHUNK: tl.constexpr, RANKED: tl.constexpr,
):  # fmt: skip
    """The sum of each chunk's weights."""
    row = tl.program_id(0).to(tl.int64)
    chunk = tl.program_id(1)
    token = chunk * CHUNK + tl.arange(0, CHUNK)
    weight = _weights(
        logits, stride, largest, temperature, min_p, edge, last, row, token, vocab, RANKED
    )
    tl.store(sums + row * tl.num_programs(1) + chunk, tl.sum(weight, 0))


@triton.jit(do_not_specialize=["stride", "chunks", "vocab"])
def _draw(
    logits, stride, largest, temperature, min_p, edge, last, draws, sums, chunks, ids, bad, vocab,
    CHUNK: tl.constexpr, LANES: tl.constexpr, RANKED: tl.constexpr,
):  # fmt: skip
    """Stage 10: the chunk that the draw falls into, then its first id past it. Rows of temperature
    0 keep the id that they have."""
    row = tl.program_id(0).to(tl.int64)
    heat = tl.load(temperature + row)
    lane = tl.arange(0, LANES)
    part = tl.load(sums + row * chunks + lane, mask=lane < chunks, other=0.0)
    running = tl.cumsum(part, 0)
    target = tl.load(draws + row) * tl.sum(tl.where(lane == chunks - 1, running, 0.0), 0)
    past = (lane < chunks) & (running > target)
    # Rounding may leave nothing past the target: then the last that has any weight.
    chunk = tl.where(
        tl.max(past.to(tl.int32), 0) > 0,
        tl.min(tl.where(past, lane, LANES), 0),
        tl.max(tl.where(part > 0, lane, 0), 0),
    )
    before = tl.sum(tl.where(lane == chunk - 1, running, 0.0), 0)
    token = chunk * CHUNK + tl.arange(0, CHUNK)
    weight = _weights(
        logits, stride, largest, temperature, min_p, edge, last, row, token, vocab, RANKED
    )
    hit = (weight > 0) & (before + tl.cumsum(weight, 0) > target)
    drawn = tl.where(
        tl.max(hit.to(tl.int32), 0) > 0,
        tl.min(tl.where(hit, token, 2147483647), 0),
        tl.max(tl.where(weight > 0, token, 0), 0),
    )
    stays = (heat == 0.0) | (tl.load(bad + row) != 0)
    tl.store(ids + row, tl.where(stays, tl.load(ids + row), drawn.to(tl.int64)))

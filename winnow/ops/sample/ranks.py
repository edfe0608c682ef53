"""Triton kernels that find, without sorting a vocabulary, which tokens top_k and top_p leave.

What they leave is always the likeliest tokens, the lower id first among equals: a logit and an id
say where they end, and `_cut` finds both by halving. It looks at candidates only, a few thousand
tokens that a histogram of the distance to the likeliest shows to be enough, or where they are more
at the whole row, which takes long and gives the same. Sums are of fp64, in an order that depends
on the row alone.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

CHUNK = 2048
"""Tokens of a program; sums of a row are taken over chunks in order."""
CANDIDATES = 4096
_BINS = tl.constexpr(256)
_BINS_A_UNIT = tl.constexpr(8.0)
"""Bins of the distance to the likeliest logit over the temperature; the last has all beyond 32."""


def cut(
    logits: Tensor, largest: Tensor, temperature: Tensor, top_k: Tensor, top_p: Tensor
) -> tuple[Tensor, Tensor]:
    """Where stages 7 and 8 end: fp32 [rows] and int32 [rows]; a token stays if its logit is
    larger than the one, or equal to it and its id not above the other.

    `logits` fp32 [rows, V], a row's side by side; `largest` fp32, `temperature` and `top_p`
    float64 and `top_k` int64, contiguous, one a row. Means nothing for a row with NaN or +inf.
    """
    rows, vocab = logits.shape
    device = logits.device
    chunks = triton.cdiv(vocab, CHUNK)
    grid, lanes = (rows, chunks), triton.next_power_of_2(chunks)
    bins = torch.zeros(rows, _BINS.value, dtype=torch.int32, device=device)
    sums = torch.empty(rows, chunks, dtype=torch.float64, device=device)
    row = (logits, logits.stride(0), largest, temperature)
    _bin[grid](*row, bins, sums, vocab, CHUNK=CHUNK)
    counts = torch.empty(rows, chunks, dtype=torch.int32, device=device)
    wanted = (top_k, top_p, bins, sums)
    _count[grid](*row, *wanted, counts, vocab, CHUNK=CHUNK, LANES=lanes)
    values = torch.empty(rows, CANDIDATES, dtype=torch.float32, device=device)
    ids = torch.empty(rows, CANDIDATES, dtype=torch.int32, device=device)
    weights = torch.empty(rows, CANDIDATES, dtype=torch.float64, device=device)
    held = (values, ids, weights)
    _gather[grid](
        *row, *wanted, counts, *held, vocab, CHUNK=CHUNK, LANES=lanes, CANDIDATES=CANDIDATES
    )
    edge = torch.empty(rows, dtype=torch.float32, device=device)
    last = torch.empty(rows, dtype=torch.int32, device=device)
    _cut[(rows,)](
        *row, *wanted, counts, *held, edge, last, vocab, chunks,
        CHUNK=CHUNK, LANES=lanes, CANDIDATES=CANDIDATES, num_warps=8,
    )  # fmt: skip
    return edge, last


@triton.jit
def heat_of(temperature, row):
    """A row's temperature; rows of 0 are not drawn, and any other serves them."""
    heat = tl.load(temperature + row)
    return tl.where(heat == 0.0, 1.0, heat)


@triton.jit
def _distance(logits, stride, largest, temperature, row, token, vocab):
    """How far a row's tokens are below its likeliest, over the temperature: fp64; inf past V."""
    best = tl.load(largest + row).to(tl.float64)
    x = tl.load(logits + row * stride + token, mask=token < vocab, other=float("-inf"))
    return x, (best - x.to(tl.float64)) / heat_of(temperature, row)


@triton.jit
def _bin_of(distance):
    near = distance * _BINS_A_UNIT < _BINS - 1.0
    return tl.where(near, distance * _BINS_A_UNIT, _BINS - 1.0).to(tl.int32)


@triton.jit(do_not_specialize=["stride", "vocab"])
def _bin(
    logits, stride, largest, temperature, bins, sums, vocab, CHUNK: tl.constexpr
):  # fmt: skip
    """Add a chunk's tokens to the row's bins; the sum of their weights."""
    row = tl.program_id(0).to(tl.int64)
    chunk = tl.program_id(1)
    token = chunk * CHUNK + tl.arange(0, CHUNK)
    _, distance = _distance(logits, stride, largest, temperature, row, token, vocab)
    tl.store(sums + row * tl.num_programs(1) + chunk, tl.sum(tl.exp(-distance), 0))
    found = tl.histogram(_bin_of(distance), _BINS)
    lane = tl.arange(0, _BINS)
    # The last bin got what lies past the vocabulary's end.
    past = tl.where((chunk + 1) * CHUNK > vocab, (chunk + 1) * CHUNK - vocab, 0)
    found -= tl.where(lane == _BINS - 1, past, 0)
    tl.atomic_add(bins + row * _BINS + lane, found, mask=found > 0)


@triton.jit
def _total(sums, row, chunks, LANES: tl.constexpr):
    lane = tl.arange(0, LANES)
    return tl.sum(tl.load(sums + row * chunks + lane, mask=lane < chunks, other=0.0), 0)


@triton.jit
def _last_bin(top_k, top_p, bins, sums, row, chunks, vocab, LANES: tl.constexpr):
    """The first bin with which all are at hand that top_k, or without it top_p, can leave."""
    lane = tl.arange(0, _BINS)
    count = tl.load(bins + row * _BINS + lane)
    wanted = tl.load(top_k + row)
    # Each token of a bin weighs at least as much as the bin's far end.
    least = tl.where(lane < _BINS - 1, tl.exp(-(lane + 1).to(tl.float64) / _BINS_A_UNIT), 0.0)
    mass = tl.cumsum(count.to(tl.float64) * least, 0)
    enough = mass >= tl.load(top_p + row) * _total(sums, row, chunks, LANES) * (1.0 + 1e-9)
    enough = tl.where(
        (wanted > 0) & (wanted < vocab), tl.cumsum(count, 0).to(tl.int64) >= wanted, enough
    )
    return tl.min(tl.where(enough, lane, _BINS - 1), 0)


@triton.jit(do_not_specialize=["stride", "vocab"])
def _count(
    logits, stride, largest, temperature, top_k, top_p, bins, sums, counts, vocab,
    CHUNK: tl.constexpr, LANES: tl.constexpr,
):  # fmt: skip
    """Candidates of each chunk."""
    row = tl.program_id(0).to(tl.int64)
    chunk = tl.program_id(1)
    chunks = tl.num_programs(1)
    limit = _last_bin(top_k, top_p, bins, sums, row, chunks, vocab, LANES)
    token = chunk * CHUNK + tl.arange(0, CHUNK)
    _, distance = _distance(logits, stride, largest, temperature, row, token, vocab)
    mine = (token < vocab) & (_bin_of(distance) <= limit)
    tl.store(counts + row * chunks + chunk, tl.sum(mine.to(tl.int32), 0))


@triton.jit(do_not_specialize=["stride", "vocab"])
def _gather(
    logits, stride, largest, temperature, top_k, top_p, bins, sums, counts,
    values, ids, weights, vocab,
    CHUNK: tl.constexpr, LANES: tl.constexpr, CANDIDATES: tl.constexpr,
):  # fmt: skip
    """Put candidates side by side, in order of id; those there is no room for are left out."""
    row = tl.program_id(0).to(tl.int64)
    chunk = tl.program_id(1)
    chunks = tl.num_programs(1)
    lane = tl.arange(0, LANES)
    before = tl.sum(tl.load(counts + row * chunks + lane, mask=lane < chunk, other=0), 0)
    if tl.load(counts + row * chunks + chunk) > 0 and before < CANDIDATES:
        limit = _last_bin(top_k, top_p, bins, sums, row, chunks, vocab, LANES)
        token = chunk * CHUNK + tl.arange(0, CHUNK)
        x, distance = _distance(logits, stride, largest, temperature, row, token, vocab)
        mine = (token < vocab) & (_bin_of(distance) <= limit)
        place = before + tl.cumsum(mine.to(tl.int32), 0) - 1
        kept = mine & (place < CANDIDATES)
        place += row * CANDIDATES
        tl.store(values + place, x, mask=kept)
        tl.store(ids + place, token, mask=kept)
        tl.store(weights + place, tl.exp(-distance), mask=kept)


@triton.jit
def _key(x):
    """Integers in the order of fp32; both zeros are one."""
    bits = tl.where(x == 0.0, 0.0, x).to(tl.int32, bitcast=True)
    return tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)


@triton.jit
def _value(key):
    """The fp32 of a `_key`."""
    return tl.where(key < 0, key ^ 0x7FFFFFFF, key).to(tl.float32, bitcast=True)


@triton.jit
def _tokens(
    logits, stride, largest, temperature, values, ids, weights, row, vocab, whole, start, count,
    CHUNK: tl.constexpr, CANDIDATES: tl.constexpr,
):  # fmt: skip
    """A chunk of what is looked at, candidates or the whole row: keys, ids, weights and which of
    them there are."""
    place = start + tl.arange(0, CHUNK)
    inside = place < count
    if whole:
        token = place
        x, distance = _distance(logits, stride, largest, temperature, row, token, vocab)
        weight = tl.exp(-distance)
    else:
        at = row * CANDIDATES + place
        token = tl.load(ids + at, mask=inside, other=0)
        x = tl.load(values + at, mask=inside, other=float("-inf"))
        weight = tl.load(weights + at, mask=inside, other=0.0)
    return _key(x), token, weight, inside


@triton.jit
def _measure(
    logits, stride, largest, temperature, values, ids, weights, row, vocab, whole, count,
    key, last, CHUNK: tl.constexpr, CANDIDATES: tl.constexpr,
):  # fmt: skip
    """Of the tokens looked at: how many are above `key`, how many equal it, how many of these have
    an id up to `last`, and the weight of those above."""
    above = tl.full((), 0, tl.int32)
    equal = tl.full((), 0, tl.int32)
    listed = tl.full((), 0, tl.int32)
    mass = tl.full((), 0.0, tl.float64)
    start = tl.full((), 0, tl.int32)
    while start < count:
        own, token, weight, inside = _tokens(
            logits, stride, largest, temperature, values, ids, weights, row, vocab, whole, start,
            count, CHUNK, CANDIDATES,
        )  # fmt: skip
        higher = inside & (own > key)
        same = inside & (own == key)
        above += tl.sum(higher.to(tl.int32), 0)
        equal += tl.sum(same.to(tl.int32), 0)
        listed += tl.sum((same & (token <= last)).to(tl.int32), 0)
        mass += tl.sum(tl.where(higher, weight, 0.0), 0)
        start += CHUNK
    return above, equal, listed, mass


@triton.jit(do_not_specialize=["stride", "vocab", "chunks"])
def _cut(
    logits, stride, largest, temperature, top_k, top_p, bins, sums, counts, values, ids, weights,
    edge, last_id, vocab, chunks,
    CHUNK: tl.constexpr, LANES: tl.constexpr, CANDIDATES: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    lane = tl.arange(0, LANES)
    found = tl.sum(tl.load(counts + row * chunks + lane, mask=lane < chunks, other=0), 0)
    whole = found > CANDIDATES
    count = tl.where(whole, vocab, found)
    best = tl.load(largest + row)
    heat = heat_of(temperature, row)
    highest = _key(best).to(tl.int64)
    wanted = tl.load(top_k + row)
    share = tl.load(top_p + row)
    # The key that the last token kept has, and how many that equal it are kept.
    lowest: tl.constexpr = -2147483648
    key = tl.full((), lowest, tl.int64)
    ties = tl.full((), 2147483647, tl.int32)
    total = _total(sums, row, chunks, LANES)
    if (wanted > 0) & (wanted < vocab):
        # The highest key with which `wanted` tokens are at least as high: one less has fewer above.
        low = tl.full((), lowest, tl.int64)
        high = highest
        while low < high:
            # Rounded down: the middle is below the higher end.
            middle = (low + high) >> 1
            above, equal, listed, mass = _measure(
                logits, stride, largest, temperature, values, ids, weights, row, vocab, whole,
                count, middle.to(tl.int32), 0, CHUNK, CANDIDATES,
            )  # fmt: skip
            fewer = above < wanted
            high = tl.where(fewer, middle, high)
            low = tl.where(fewer, low, middle + 1)
        key = low
        above, equal, listed, mass = _measure(
            logits, stride, largest, temperature, values, ids, weights, row, vocab, whole,
            count, key.to(tl.int32), 0, CHUNK, CANDIDATES,
        )  # fmt: skip
        ties = tl.minimum(wanted - above, equal).to(tl.int32)
        step = tl.exp((_value(key.to(tl.int32)).to(tl.float64) - best.to(tl.float64)) / heat)
        total = mass + ties.to(tl.float64) * step
    if share < 1.0:
        target = share * total
        # The lowest key above which there is less weight than wanted; not below top_k's.
        low = key
        high = highest
        while low < high:
            middle = (low + high) >> 1
            above, equal, listed, mass = _measure(
                logits, stride, largest, temperature, values, ids, weights, row, vocab, whole,
                count, middle.to(tl.int32), 0, CHUNK, CANDIDATES,
            )  # fmt: skip
            less = mass < target
            high = tl.where(less, middle, high)
            low = tl.where(less, low, middle + 1)
        above, equal, listed, mass = _measure(
            logits, stride, largest, temperature, values, ids, weights, row, vocab, whole,
            count, low.to(tl.int32), 0, CHUNK, CANDIDATES,
        )  # fmt: skip
        step = tl.exp((_value(low.to(tl.int32)).to(tl.float64) - best.to(tl.float64)) / heat)
        most = tl.where(low == key, tl.minimum(ties, equal), equal)
        # The fewest that reach the target, at least one; bounded before it is made an integer.
        few = tl.minimum((target - mass) / step, most.to(tl.float64))
        needed = tl.maximum(few, 1.0).to(tl.int32)
        needed += (mass + needed.to(tl.float64) * step < target).to(tl.int32)
        needed -= ((needed > 1) & (mass + (needed - 1).to(tl.float64) * step >= target)).to(
            tl.int32
        )
        key = low
        ties = tl.minimum(needed, most)
    last = tl.full((), 2147483647, tl.int32)
    if key > lowest:
        above, equal, listed, mass = _measure(
            logits, stride, largest, temperature, values, ids, weights, row, vocab, whole,
            count, key.to(tl.int32), 0, CHUNK, CANDIDATES,
        )  # fmt: skip
        if equal > ties:
            low_id = tl.full((), 0, tl.int32)
            high_id = tl.full((), 0, tl.int32) + vocab - 1
            while low_id < high_id:
                half = (low_id + high_id) // 2
                above, equal, listed, mass = _measure(
                    logits, stride, largest, temperature, values, ids, weights, row, vocab, whole,
                    count, key.to(tl.int32), half, CHUNK, CANDIDATES,
                )  # fmt: skip
                reached = listed >= ties
                high_id = tl.where(reached, half, high_id)
                low_id = tl.where(reached, low_id, half + 1)
            last = low_id
    # No cut at all is not even the lowest logit's.
    unlimited = key == lowest
    tl.store(edge + row, tl.where(unlimited, float("-inf"), _value(key.to(tl.int32))))
    tl.store(last_id + row, tl.where(unlimited, 2147483647, last))

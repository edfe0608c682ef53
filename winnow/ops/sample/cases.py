"""Inputs of `sample` for tests, conformance and benchmarks."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from winnow.ops.case import Case, Cost, Outputs
from winnow.ops.sample import Sample, Sampled, SampleRow

# M3's vocabulary; the other cases need only be wide enough for what they show.
_M3_VOCABULARY = 200_064
_NAN, _INF = float("nan"), float("inf")


def _rows(count: int, **options: Any) -> list[SampleRow]:
    """Requests that differ in seed and progress, with a prompt and an output of their own."""
    defaults: dict[str, Any] = {"prompt_ids": (1, 2, 2, 3), "output_ids": (3, 5, 5, 8)}
    first = SampleRow(seed=0, index=0, **{**defaults, **options})
    return [replace(first, seed=17 * i - 3, index=i) for i in range(count)]


def _normal(rows: int, vocab: int) -> Tensor:
    """Logits of a model unsure of itself."""
    return torch.randn(rows, vocab, generator=torch.Generator().manual_seed(rows)) * 3


def _coarse(rows: int, vocab: int) -> Tensor:
    """Logits of a few values only, both zeros among them: ties at every cut."""
    values = torch.tensor([-_INF, -1.0, -0.0, 0.0, 1.0])
    generator = torch.Generator().manual_seed(vocab)
    return values[torch.randint(0, len(values), (rows, vocab), generator=generator)]


def _hostile(rows: int, vocab: int) -> Tensor:
    """Every second row is bad, in each of the ways there are."""
    logits = _normal(rows, vocab)
    logits[0::8, vocab // 2] = _NAN
    logits[2::8, -1] = _INF
    logits[4::8] = -_INF
    logits[6::8, 0], logits[6::8, 1] = _NAN, _INF
    return logits


def _mask(vocab: int, ids: Iterable[int]) -> Tensor:
    """`SampleRow.allowed` with the bits of `ids`."""
    words = [0] * -(-vocab // 32)
    for i in ids:
        words[i // 32] |= 1 << i % 32
    return torch.tensor(words, dtype=torch.int64).to(torch.int32)


def _strided(rows: int, vocab: int) -> Tensor:
    """A view of every second column."""
    return _normal(rows, 2 * vocab)[:, ::2]


_MIXED = (
    {"temperature": 0.0},
    {"top_k": 5},
    {"top_p": 0.9, "logprobs": 0},
    {"temperature": 0.0, "repetition_penalty": 1.3, "logprobs": 3},
    {"min_p": 0.05, "frequency_penalty": 0.5, "presence_penalty": -0.5},
)


def _mixed(count: int) -> list[SampleRow]:
    rows = _rows(count)
    return [replace(row, **_MIXED[i % len(_MIXED)]) for i, row in enumerate(rows)]


def _outputs(function: Sample, inputs: dict[str, Any]) -> Outputs:
    sampled: Sampled = function(**inputs)
    reported = [entry for entry in sampled.logprobs if entry is not None]
    top = [pair for entry in reported for pair in entry.top]
    logprobs = [entry.chosen for entry in reported] + [value for _, value in top]
    return {
        "ids": sampled.ids,
        "bad": sampled.bad,
        "logprobs_asked": torch.tensor([entry is not None for entry in sampled.logprobs]),
        "top_ids": torch.tensor([i for i, _ in top], dtype=torch.int64),
        "logprobs": torch.tensor(logprobs, dtype=torch.float64),
    }


def _case(
    name: str,
    logits: Callable[[int, int], Tensor],
    shape: tuple[int, int],
    requests: Callable[[int], Sequence[SampleRow]],
) -> Case:
    exact = dict.fromkeys(("ids", "bad", "logprobs_asked", "top_ids"), 0.0)
    return Case(
        op="sample",
        name=name,
        inputs=lambda: {"logits": logits(*shape), "requests": requests(shape[0])},
        outputs=_outputs,
        tolerances={**exact, "logprobs": 1e-12},
        cost=Cost(num_bytes=4 * shape[0] * shape[1]),
    )


def _all(**options: Any) -> Callable[[int], list[SampleRow]]:
    return lambda count: _rows(count, **options)


CASES = (
    _case("greedy", _normal, (4, _M3_VOCABULARY), _all(temperature=0.0)),
    _case("no filter", _normal, (2, _M3_VOCABULARY), _all()),
    _case("top_k 50", _normal, (2, _M3_VOCABULARY), _all(top_k=50, temperature=0.7)),
    _case("top_p 0.9", _normal, (2, _M3_VOCABULARY), _all(top_p=0.9)),
    _case("nucleus wider than the first guess", _normal, (2, 20_000), _all(top_p=0.999)),
    _case("all filters", _normal, (8, 1000), _all(top_k=40, top_p=0.8, min_p=0.02)),
    _case("min_p alone", _normal, (8, 1000), _all(min_p=0.1)),
    _case("one token possible by min_p", _normal, (4, 100), _all(min_p=1.0)),
    _case("one token possible by top_p", _normal, (4, 100), _all(top_p=0.0)),
    _case("top_k wider than the vocabulary", _normal, (4, 100), _all(top_k=500)),
    _case("vocabulary of one", _normal, (4, 1), _all(top_k=3, top_p=0.5, logprobs=2)),
    _case("no rows", _normal, (0, 100), _all()),
    _case("smallest temperature", _normal, (4, 100), _all(temperature=5e-324)),
    _case("largest temperature", _normal, (4, 100), _all(temperature=1e308)),
    _case("greedy, ties", _coarse, (16, 300), _all(temperature=0.0, logprobs=5)),
    _case("top_k, ties at the cut", _coarse, (16, 300), _all(top_k=20, logprobs=20)),
    _case("top_p, ties at the cut", _coarse, (16, 300), _all(top_p=0.5)),
    _case("top_p after top_k, ties", _coarse, (16, 300), _all(top_k=64, top_p=0.7)),
    _case("equal logits", lambda r, v: torch.zeros(r, v), (8, 256), _all(top_k=7)),
    _case("repetition", _normal, (8, 12), _all(temperature=0.0, repetition_penalty=1.8)),
    _case("presence", _normal, (8, 12), _all(presence_penalty=1.5)),
    _case("frequency", _normal, (8, 12), _all(frequency_penalty=-0.7)),
    _case("bias", _normal, (8, 12), _all(logit_bias={0: 3.5, 11: -100.0}, logprobs=1)),
    _case("banned", _normal, (8, 12), _all(temperature=0.0, banned=(0, 3, 3, 11))),
    _case("all banned", _normal, (3, 4), _all(banned=(0, 1, 2, 3), logprobs=1)),
    _case("allowed", _normal, (8, 300), _all(allowed=_mask(300, range(0, 300, 7)), logprobs=2)),
    _case("allowed, most of M3's vocabulary", _normal, (2, _M3_VOCABULARY),
          _all(allowed=_mask(_M3_VOCABULARY, range(31, _M3_VOCABULARY)), top_p=0.9)),
    _case("one allowed, the last", _normal, (4, 65), _all(allowed=_mask(65, [64]), top_k=5)),
    _case("allowed and banned", _normal, (8, 40),
          _all(temperature=0.0, allowed=_mask(40, range(9)), banned=(0, 3, 39))),
    _case("allowed ids weakened", _normal, (8, 12),
          _all(allowed=_mask(12, (3, 5, 11)), repetition_penalty=1.8, frequency_penalty=0.4)),
    _case("none allowed but past the end", _normal, (3, 40),
          _all(allowed=_mask(64, range(40, 64)), logprobs=1)),
    _case("bias past the largest float", lambda r, v: torch.full((r, v), 3.4e38), (2, 9),
          _all(temperature=0.0, repetition_penalty=0.01)),
    _case("bad rows among good", _hostile, (16, 200), _mixed),
    _case("mixed batch", _normal, (20, 3000), _mixed),
    _case("non-contiguous logits", _strided, (6, 500), _mixed),
)  # fmt: skip

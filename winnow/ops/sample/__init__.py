"""Choosing each row's next token from its logits. Knows nothing of requests, text or stopping."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    # Who passes on what was sampled, and computes nothing, need not load torch.
    from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class SampleRow:
    """How one row is sampled; every default turns its stage off.

    Token ids lie in [0, V). `prompt_ids` and `output_ids` are read only by the penalties that
    need them, so they may stay empty where no penalty is asked for.
    """

    seed: int
    """-2^63 to 2^63 - 1."""
    index: int
    """Tokens that the request has sampled so far."""
    temperature: float = 1.0
    """0 takes the most likely token."""
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    banned: Sequence[int] = ()
    """Ids that may not be chosen now: the ids that would end a request short of `min_tokens`."""
    allowed: Tensor | None = None
    """int32 [ceil(V / 32)] on the CPU: id i may be chosen if bit i % 32 of element i // 32 is set.
    Bits from V on mean nothing. None allows every id."""
    prompt_ids: Sequence[int] = ()
    output_ids: Sequence[int] = ()
    logprobs: int | None = None
    """How many of the most likely tokens to report; 0 reports the chosen one alone, None none."""

    @property
    def edits_logits(self) -> bool:
        """Whether any stage before temperature is on."""
        return bool(
            self.logit_bias
            or len(self.banned)
            or self.allowed is not None
            or self.repetition_penalty != 1.0
            or self.presence_penalty
            or self.frequency_penalty
        )


@dataclass(frozen=True, eq=False)
class SampleColumns:
    """How many rows are sampled, as tensors [rows, 1] on the logits' device, so that a captured
    step can read other numbers at each replay. For rows without edits of logits and logprobs.

    `top_k` is int64, the others float64; `uniform` holds each row's `uniform(seed, index)`. Stages
    7 and 8 are left out unless `ranked`, and all temperatures are taken as 0 unless `drawn`.
    """

    temperature: Tensor
    top_k: Tensor
    top_p: Tensor
    min_p: Tensor
    uniform: Tensor
    drawn: bool = True
    ranked: bool = True

    def rows(self) -> Iterator[tuple[SampleRow, float]]:
        """Each row's options and its uniform, read back from the device."""
        names = ("temperature", "top_k", "top_p", "min_p", "uniform")
        for t, k, p, m, u in zip(*(getattr(self, n)[:, 0].tolist() for n in names), strict=True):
            off: dict[str, Any] = {"top_k": 0, "top_p": 1.0}
            ranked: dict[str, Any] = {"top_k": k, "top_p": p} if self.ranked else off
            temperature = t if self.drawn else 0.0
            yield SampleRow(seed=0, index=0, temperature=temperature, min_p=m, **ranked), u


@dataclass(frozen=True)
class Logprobs:
    """Natural logarithms of the probabilities that the unprocessed logits give."""

    chosen: float
    top: tuple[tuple[int, float], ...]
    """(id, logprob), most likely first, the lower id first among equals."""


@dataclass(frozen=True)
class Sampled:
    """`ids` int64 [rows] and `bad` bool [rows], on the logits' device; one `logprobs` a row, or
    none at all where rows came as `SampleColumns`.

    A bad row has id -1 and no logprobs.
    """

    ids: Tensor
    bad: Tensor
    logprobs: tuple[Logprobs | None, ...]


class Sample(Protocol):
    def __call__(self, logits: Tensor, requests: Sequence[SampleRow] | SampleColumns) -> Sampled:
        """One token a row, in this order of stages.

        1. logit_bias is added. 2. banned ids become -inf. 3. So do ids that are not `allowed`.
        4. repetition_penalty, for each id of prompt or output: positive logits are divided by it,
        others multiplied (arXiv 1909.05858). 5. An id that the output holds c > 0 times loses
        frequency_penalty * c + presence_penalty. Here temperature 0 takes the largest logit, and
        the rest does not apply. 6. In fp64, w = exp((logit - largest logit) / temperature).
        7. top_k keeps the k most likely tokens. 8. top_p keeps the fewest most likely of those
        whose w reach that share of their sum. 9. min_p keeps those with w >= min_p; the largest w
        is 1. 10. The first id, in order of id, at which the running sum of the kept w exceeds
        `uniform(seed, index)` times their sum. Logprobs are of the logits before stage 1.

        Among equals the lower id counts as more likely, everywhere. A row depends on its own
        logits and SampleRow alone: the same alone, in any batch, and after a resumption.

        `logits` fp32 [rows, V], left as they are; -inf marks an impossible token. A row with NaN
        or +inf, or with no possible token left, is bad and leaves the others alone. ValueError
        when `requests` are not as many as the rows, or `allowed` has not one bit for each id.

        `requests` as SampleColumns give the same tokens by the stages from temperature on; on a
        GPU nothing is then read back, so a CUDA graph may hold the call.
        """
        ...


def uniform(seed: int, index: int) -> float:
    """A float in [0, 1) with 53 random bits: BLAKE2b of both numbers, so the same everywhere."""
    numbers = seed.to_bytes(8, "little", signed=True) + index.to_bytes(8, "little")
    digest = blake2b(numbers, digest_size=8).digest()
    return (int.from_bytes(digest, "little") >> 11) * 2.0**-53

"""What the engine says after a step. Plain data, light to import: it travels between processes."""

from __future__ import annotations

from dataclasses import dataclass

from winnow.errors import WinnowError
from winnow.ops.sample import Logprobs


@dataclass(frozen=True)
class Usage:
    """Tokens of one request; `cached_tokens` of the prompt came from the prefix cache."""

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int


@dataclass(frozen=True)
class Output:
    """New tokens and new text of one request.

    `text` is what may be shown now: never half a character, nothing of a stop string; None
    without a tokenizer. `finish_reason` is stop, length or error on the last output, which also
    has `usage`, and `error` when the reason is error.
    """

    request_id: str
    token_ids: tuple[int, ...] = ()
    text: str | None = None
    logprobs: tuple[Logprobs, ...] = ()
    finish_reason: str | None = None
    usage: Usage | None = None
    error: WinnowError | None = None


@dataclass(frozen=True)
class EngineStats:
    """Counts at one moment, then totals since the start, as `winnow.core.scheduler.Stats` has them.

    `pages_total` are those that requests can hold. `values_clipped` of the `values_written` to the
    cache did not fit its formats and were saturated.
    """

    num_running: int
    num_waiting: int
    pages_used: int
    pages_cached: int
    pages_total: int
    preemptions: int
    prefix_query_tokens: int
    prefix_hit_tokens: int
    values_written: int
    values_clipped: int

"""What the engine says of a request after a step. Plain data."""

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

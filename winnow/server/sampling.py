"""What a request asks of sampling: its fields as the engine's options, its own names in errors.

Knows no endpoint, and no prompt but its length.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from winnow.config import Constraint, SamplingParams, check_ids
from winnow.errors import RequestError
from winnow.server.protocol import FieldError, Generation, shown

TOO_LONG = "context_length_exceeded"


def to_sampling(
    request: Generation,
    *,
    prompt_tokens: int,
    max_model_len: int,
    default_max_tokens: int,
    vocab_size: int,
    defaults: Mapping[str, float] | None = None,
    constraint: Constraint | None = None,
    choice: int = 0,
) -> SamplingParams:
    """How the engine is to continue a prompt of `prompt_tokens` tokens.

    Without a limit of its own, a request gets as many tokens as `max_model_len` leaves, and no
    more than `default_max_tokens`. `defaults` are the model's own for options that it does not
    give, by the engine's names. `choice` is the number of the answer among the `n` of a
    prompt: with a seed, each draws from its own. FieldError for values out of range.
    """
    limit_field, limit = request.token_limit()
    room = max_model_len - prompt_tokens
    if room < 1:
        raise FieldError(
            "messages" if hasattr(request, "messages") else "prompt",
            f"the prompt has {prompt_tokens} tokens, this server takes {max_model_len} with its "
            f"answer: shorten the prompt by {1 - room} tokens at least",
            TOO_LONG,
        )
    if limit is not None and limit > room:
        raise FieldError(
            limit_field,
            f"the prompt has {prompt_tokens} tokens and {limit_field} is {limit}, this server "
            f"takes {max_model_len} together: lower {limit_field} to {room}",
            TOO_LONG,
        )
    values: dict[str, tuple[str, Any]] = {
        "max_tokens": (limit_field, min(room, default_max_tokens) if limit is None else limit),
        "temperature": ("temperature", request.temperature),
        "top_p": ("top_p", request.top_p),
        "top_k": ("top_k", 0 if request.top_k == -1 else request.top_k),
        "min_p": ("min_p", request.min_p),
        "repetition_penalty": ("repetition_penalty", request.repetition_penalty),
        "presence_penalty": ("presence_penalty", request.presence_penalty),
        "frequency_penalty": ("frequency_penalty", request.frequency_penalty),
        "min_tokens": ("min_tokens", request.min_tokens),
        "logit_bias": ("logit_bias", _bias(request.logit_bias)),
        "stop": ("stop", request.stop),
        "stop_ids": ("stop_token_ids", request.stop_token_ids),
        "seed": ("seed", _seed(request.seed, choice)),
        "logprobs": (request.NUM_LOGPROBS, request.num_logprobs()),
        "ignore_eos": ("ignore_eos", request.ignore_eos),
        "skip_special_tokens": ("skip_special_tokens", not request.shows_special_tokens()),
    }
    given = {name: pair for name, pair in values.items() if pair[1] is not None}
    for name, (field, value) in given.items():
        try:
            SamplingParams.check_option(name, value, field)
            if name in ("logit_bias", "stop_ids"):
                check_ids(field, value, vocab_size)
        except RequestError as error:
            raise FieldError(field, str(error)) from None
    options = {**(defaults or {}), **{name: value for name, (_, value) in given.items()}}
    try:
        return SamplingParams.from_options({**options, "constraint": constraint})
    except RequestError as error:
        # Each value is right for itself. What may not stand beside others is what forbids an end.
        raise FieldError("min_tokens" if request.min_tokens else "ignore_eos", str(error)) from None


def _seed(seed: int | None, choice: int) -> int | None:
    if seed is None or not -(2**63) <= seed < 2**63:
        return seed
    # Past the last seed comes the first, so that each choice of any seed has one.
    return (seed + choice + 2**63) % 2**64 - 2**63


def _bias(bias: dict[str, Any] | None) -> dict[int, float] | None:
    """JSON's keys are strings; the engine's are ids."""
    if bias is None:
        return None
    for key, value in bias.items():
        if not re.fullmatch(r"[0-9]{1,10}", key):
            raise FieldError(
                "logit_bias", f"logit_bias names token {shown(key)}: its keys are token ids"
            )
        if isinstance(value, bool) or not isinstance(value, int | float) or abs(value) > 100:
            raise FieldError(
                "logit_bias", f"logit_bias of token {key} is {shown(value)}: give -100 to 100"
            )
    return {int(key): value for key, value in bias.items()}

"""From jobs to an answer on the wire, streamed or whole; the same for chat and completions.

What the chunks and bodies say is the business of the choices and chunks that it is given.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from contextlib import aclosing
from typing import Any, Protocol, TypeVar

from winnow.config import Constraint
from winnow.engine.output import Output, Usage
from winnow.errors import CapacityError, RequestError
from winnow.server.constraints import constraining_field
from winnow.server.exchange import Call
from winnow.server.failures import ApiError
from winnow.server.generate import Job, generate
from winnow.server.protocol import FieldError, Generation
from winnow.server.sampling import to_sampling
from winnow.server.stream import DONE, framed

NewsT = TypeVar("NewsT")
_OutT_co = TypeVar("_OutT_co", covariant=True)
_InT_contra = TypeVar("_InT_contra", contravariant=True)


_COMPILER_WORDS = re.compile(r"^the (structural_tag|grammar)\b")
"""How the compiler calls what it was given; a client knows fields."""


class Choice(Protocol[_OutT_co]):
    """One answer while it comes: outputs in, news out."""

    usage: Usage | None

    def push(self, output: Output) -> _OutT_co: ...


class Chunks(Protocol[_InT_contra]):
    """Writes the chunks of a stream."""

    def of(self, choice: Any, news: _InT_contra) -> list[bytes]: ...

    def usage(self, usage: dict[str, Any]) -> bytes: ...


def check_choices(call: Call, request: Generation) -> None:
    """FieldError for more answers to a prompt than the server gives."""
    limit = call.serving.config.max_n
    if request.num_choices > limit:
        raise FieldError("n", f"n is {request.num_choices}, this server takes up to {limit}")


async def jobs_of(
    call: Call,
    request: Generation,
    prompts: Sequence[Sequence[int]],
    constraint: Constraint | None,
) -> list[Job]:
    """A job for each answer: `n` to the first prompt, then `n` to the next.

    Takes their places among the answers under way. RequestError for parameters out of range and
    for a constraint that cannot be compiled, ApiError 429 for a full queue.
    """
    serving = call.serving
    call.held.extend_to(len(prompts) * request.num_choices)
    grammar = None if constraint is None else await _grammar(call, request, constraint)
    return [
        Job(
            prompt,
            to_sampling(
                request,
                prompt_tokens=len(prompt),
                max_model_len=serving.model().max_model_len,
                default_max_tokens=serving.config.default_max_tokens,
                vocab_size=serving.model().vocab_size,
                defaults=serving.model().default_sampling,
                constraint=constraint,
                choice=choice,
            ),
            request.cache_salt or "",
            grammar,
        )
        for prompt in prompts
        for choice in range(request.num_choices)
    ]


async def _grammar(call: Call, request: Generation, constraint: Constraint) -> bytes:
    call.serving.text()  # without a tokenizer there is nothing that a grammar could be about
    field = constraining_field(request)
    for name in ("min_tokens", "ignore_eos"):
        if value := getattr(request, name):
            raise FieldError(
                name,
                f"{name} is {str(value).lower()} beside {field}, whose grammar decides where the "
                "answer ends: give only one",
            )
    try:
        return await call.serving.grammars.compile(constraint)
    except RequestError as error:
        reason = _COMPILER_WORDS.sub(f"the grammar of {field}", str(error), count=1)
        raise FieldError(field, reason) from None
    except CapacityError as error:
        raise ApiError(
            429, str(error), code="grammar_queue_full", headers={"retry-after": "2"}
        ) from None


async def answer_in_stream(
    call: Call,
    jobs: Sequence[Job],
    choices: Sequence[Choice[NewsT]],
    chunks: Chunks[NewsT],
    *,
    opening: Sequence[bytes] = (),
    usage: Callable[[], dict[str, Any]] | None = None,
) -> None:
    """Send each output as it comes. `opening` goes out with the first, `usage` after the last.

    What has piled up while a client read slowly goes out in one piece.
    """
    unsent = list(opening)
    async with aclosing(generate(call.serving, call.record, jobs)) as outputs:
        async for index, output in outputs:
            choice = choices[index]
            unsent += chunks.of(choice, choice.push(output))
            if unsent:
                await call.stream.write(framed(unsent))
                unsent = []
    last = [] if usage is None else [chunks.usage(usage())]
    await call.stream.write(framed(last) + DONE, last=True)


async def answer_whole(
    call: Call,
    jobs: Sequence[Job],
    choices: Sequence[Choice[NewsT]],
    response: Callable[[], dict[str, Any]],
) -> None:
    """Gather all outputs, then send `response`."""
    async with aclosing(generate(call.serving, call.record, jobs)) as outputs:
        async for index, output in outputs:
            choices[index].push(output)
    await call.reply(response())


def usages(choices: Sequence[Choice[Any]]) -> list[Usage]:
    """The counts of answers that have all ended."""
    counted = [choice.usage for choice in choices]
    assert all(usage is not None for usage in counted), "an answer ended without its usage"
    return [usage for usage in counted if usage is not None]

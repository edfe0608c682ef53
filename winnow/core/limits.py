"""What a request must satisfy to be accepted at all. Pure functions with errors that say what to
change."""

from __future__ import annotations

from winnow.core.prefix import MAX_TOKEN_ID
from winnow.core.request import Request, num_blocks
from winnow.errors import CapacityError, RequestError
from winnow.spec.model import BLOCK_TOKENS


def check_well_formed(request: Request) -> None:
    """RequestError for a request that means nothing."""
    if not request.prompt:
        raise RequestError("the prompt is empty: send at least one token")
    if request.max_tokens < 1:
        raise RequestError(f"max_tokens is {request.max_tokens}: ask for at least 1")
    for token in (min(request.prompt), max(request.prompt)):
        if not 0 <= token <= MAX_TOKEN_ID:
            raise RequestError(f"the prompt holds token id {token}: ids are 0 to {MAX_TOKEN_ID}")


def check_fits(request: Request, num_usable: int, max_tokens_per_request: int | None) -> None:
    """CapacityError for a request that could never run, even alone.

    `max_tokens_per_request` bounds prompt and output together; `num_usable` is the number of pages
    that requests can hold.
    """
    prompt, output = len(request.prompt), request.max_tokens
    limit = max_tokens_per_request
    if limit is not None and prompt + output > limit:
        what = f"prompt has {prompt}" if prompt >= limit else f"request asks for {prompt + output}"
        advice = _advice(prompt, output, limit)
        raise CapacityError(f"{what} tokens, prompt and output may have {limit}: {advice}")
    # The last token is sampled and never computed, so it needs no slot.
    need = num_blocks(prompt + output - 1)
    if need > num_usable:
        alone = num_blocks(prompt)
        what = f"prompt needs {alone}" if alone > num_usable else f"request needs {need}"
        advice = _advice(prompt, output, num_usable * BLOCK_TOKENS + 1)
        raise CapacityError(
            f"{what} pages, the cache has {num_usable}: {advice} "
            f"or start with num_pages (--num-pages) {need + 1}"
        )


def _advice(prompt: int, output: int, limit: int) -> str:
    """The smallest change after which prompt and output are `limit` tokens together."""
    excess = prompt + output - limit
    if excess < output:
        return f"shorten max_tokens by {excess}"
    if excess < prompt:
        return f"shorten the prompt by {excess} tokens"
    return f"shorten the prompt by {prompt - limit + 1} tokens and max_tokens by {output - 1}"

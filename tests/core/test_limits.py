"""What is refused when a request arrives, and whether the advice given works."""

from __future__ import annotations

import random
import re

import pytest

from winnow.core.request import Request
from winnow.core.scheduler import Scheduler
from winnow.errors import CapacityError, RequestError


def refusal(scheduler, prompt, max_tokens):
    """The message with which a request is refused; None if it is taken."""
    try:
        scheduler.add(Request(str(random.random()), (1,) * prompt, max_tokens))
    except CapacityError as error:
        return str(error)
    return None


def test_the_message_counts_usable_pages_and_names_the_pages_to_start_with():
    assert refusal(Scheduler(65, 512), 8192, 4097) == (
        "request needs 96 pages, the cache has 64: "
        "shorten max_tokens by 4096 or start with num_pages (--num-pages) 97"
    )


def test_a_prompt_too_long_by_itself_is_what_the_message_names():
    assert refusal(Scheduler(65, 512), 8193, 100) == (
        "prompt needs 65 pages, the cache has 64: "
        "shorten the prompt by 100 tokens or start with num_pages (--num-pages) 66"
    )
    assert refusal(Scheduler(2, 512), 129, 500) == (
        "prompt needs 2 pages, the cache has 1: "
        "shorten the prompt by 1 tokens and max_tokens by 499 or start with "
        "num_pages (--num-pages) 6"
    )


def test_the_limit_of_tokens_a_request_is_told_apart_from_the_pages():
    scheduler = Scheduler(65, 512, max_tokens_per_request=1000)
    assert refusal(scheduler, 900, 100) is None
    assert refusal(scheduler, 900, 101) == (
        "request asks for 1001 tokens, prompt and output may have 1000: shorten max_tokens by 1"
    )
    assert refusal(scheduler, 1000, 10) == (
        "prompt has 1000 tokens, prompt and output may have 1000: shorten the prompt by 10 tokens"
    )


def test_the_last_sampled_token_needs_no_slot():
    assert refusal(Scheduler(2, 512), 1, 128) is None
    assert "request needs 2 pages" in refusal(Scheduler(2, 512), 1, 129)
    assert refusal(Scheduler(2, 512), 128, 1) is None


def test_following_the_advice_makes_the_request_fit_and_less_does_not():
    rng = random.Random(1)
    refused = 0
    for _ in range(500):
        pages, limit = rng.randrange(2, 9), rng.choice((None, rng.randrange(2, 900)))
        prompt, output = rng.randrange(1, 1200), rng.randrange(1, 1200)

        def ask(prompt, output, pages=pages, limit=limit):
            return refusal(Scheduler(pages, 64, max_tokens_per_request=limit), prompt, output)

        message = ask(prompt, output)
        while message is not None:
            refused += 1
            advice = dict(re.findall(r"(max_tokens|the prompt) by (\d+)", message))
            fewer, less = int(advice.get("the prompt", 0)), int(advice.get("max_tokens", 0))
            if "pages" in message:
                assert ask(prompt - fewer, output - less) is None
                need = int(re.search(r"\(--num-pages\) (\d+)", message)[1])
                assert ask(prompt, output, pages=need) is None
                assert ask(prompt, output, pages=need - 1) is not None
            if fewer:
                assert ask(prompt - fewer + 1, output - less) is not None
            if less:
                assert ask(prompt - fewer, output - less + 1) is not None
            prompt, output = prompt - fewer, output - less
            assert prompt >= 1
            assert output >= 1
            message = ask(prompt, output)
            assert message is None or "pages" in message
    assert refused > 100


@pytest.mark.parametrize(
    ("prompt", "max_tokens", "words"),
    [
        ((), 1, "the prompt is empty"),
        ((1,), 0, "max_tokens is 0"),
        ((1, -3), 1, "token id -3"),
        ((2**32, 1), 1, "token id 4294967296"),
    ],
)
def test_a_request_that_means_nothing_is_the_callers_fault(prompt, max_tokens, words):
    scheduler = Scheduler(9, 64)
    with pytest.raises(RequestError, match=words):
        scheduler.add(Request("a", prompt, max_tokens))
    assert scheduler.stats().num_waiting == 0


def test_an_id_in_use_is_refused_and_one_that_has_ended_is_free():
    scheduler = Scheduler(9, 64)
    scheduler.add(Request("a", (1,), 2))
    with pytest.raises(RequestError, match="'a' is in use"):
        scheduler.add(Request("a", (1,), 2))
    plan = scheduler.plan()
    with pytest.raises(RequestError, match="'a' is in use"):
        scheduler.add(Request("a", (1,), 2))
    scheduler.complete(plan, {"a": 0})
    scheduler.abort("a")
    scheduler.add(Request("a", (1,), 2))


@pytest.mark.parametrize("options", [(9, 0), (9, 64, 0), (9, 64, 1, True, 1)])
def test_a_scheduler_that_could_serve_nothing_is_refused(options):
    with pytest.raises(ValueError):
        Scheduler(*options)

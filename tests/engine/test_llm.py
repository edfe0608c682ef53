"""The class to call from Python: what it takes, streams that are left, threads."""

from __future__ import annotations

import gc
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from winnow import LLM, SamplingParams
from winnow.engine.turns import Turns
from winnow.errors import RequestError

PARAMS = SamplingParams(max_tokens=6, temperature=0.0, ignore_eos=True)


@pytest.fixture
def llm(tiny: Path) -> LLM:
    return LLM(str(tiny), num_pages=40, max_step_tokens=64, progress=False)


def test_one_text_is_one_prompt(llm: LLM) -> None:
    (alone,) = llm.generate("Hello", PARAMS)
    assert [alone] == llm.generate(["Hello"], PARAMS)


@pytest.mark.parametrize("given", [None, 5, b"Hello"[0]])
def test_prompts_that_are_none_are_refused_in_words(llm: LLM, given: object) -> None:
    with pytest.raises(RequestError, match=r"give texts or lists of token ids$"):
        llm.generate(given, PARAMS)  # type: ignore[arg-type]


def test_token_ids_without_a_list_around_them_are_told_how_to_write_them(llm: LLM) -> None:
    with pytest.raises(RequestError, match=r"a prompt is 1: .* \[\[1, 2\]\]$"):
        llm.generate([1, 2, 3], PARAMS)  # type: ignore[list-item]
    with pytest.raises(RequestError, match=r"a prompt is 1: "):
        llm.stream(1, PARAMS)  # type: ignore[arg-type]
    with pytest.raises(RequestError, match=r"a prompt is b'Hello': "):
        llm.generate([b"Hello"], PARAMS)


def test_params_of_another_type_are_refused_in_words(llm: LLM) -> None:
    for params in ({"max_tokens": 4}, [{"max_tokens": 4}]):
        with pytest.raises(RequestError, match=r"give SamplingParams\(\.\.\.\)"):
            llm.generate(["x"], params)  # type: ignore[arg-type]
    with pytest.raises(RequestError, match=r"give SamplingParams\(\.\.\.\)"):
        llm.stream("x", 4)  # type: ignore[arg-type]


@pytest.mark.parametrize("taken", [0, 1, 3])
def test_a_stream_that_is_left_holds_nothing(llm: LLM, taken: int) -> None:
    outputs = llm.stream("Hello", PARAMS)
    for _ in range(taken):
        next(outputs)
    del outputs
    gc.collect()
    assert not llm.engine.has_work
    assert not llm._mail
    assert llm.engine.stats().pages_used == 0


def test_a_stream_of_what_cannot_be_served_says_so_and_holds_nothing(llm: LLM) -> None:
    with pytest.raises(RequestError):
        next(llm.stream([], PARAMS))
    assert not llm._mail


def test_threads_get_the_answers_that_each_gets_alone(llm: LLM) -> None:
    prompts = [f"Number {i} of them" for i in range(8)]
    wanted = [llm.generate(prompt, PARAMS)[0].token_ids for prompt in prompts]

    def streamed(prompt: str) -> tuple[int, ...]:
        return tuple(token for output in llm.stream(prompt, PARAMS) for token in output.token_ids)

    def generated(prompt: str) -> tuple[int, ...]:
        return llm.generate(prompt, PARAMS)[0].token_ids

    with ThreadPoolExecutor(8) as pool:
        for answer in (generated, streamed):
            assert list(pool.map(answer, prompts)) == wanted
    assert not llm._mail


def test_a_stream_that_is_collected_within_a_step_is_ended_after_it(
    tiny: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A collector may close it at any moment, of this thread too."""
    llm = LLM(str(tiny), progress=False, num_pages=16)
    params = SamplingParams(max_tokens=6, temperature=0.0, ignore_eos=True)
    whole = llm.generate("Hello", params)
    streams = [llm.stream("Good morning", params)]
    next(streams[0])
    run = llm.engine.runner.run

    def collects(*args: Any) -> Any:
        streams.clear()
        return run(*args)

    monkeypatch.setattr(llm.engine.runner, "run", collects)
    assert [c.token_ids for c in llm.generate("Hello", params)] == [c.token_ids for c in whole]
    assert not llm.engine.has_work
    assert not llm._mail


def test_turns_are_given_in_the_order_in_which_they_were_asked_for() -> None:
    turns, order = Turns(), []

    def take(name: int) -> None:
        with turns:
            order.append(name)

    threads = [threading.Thread(target=take, args=(name,)) for name in range(5)]
    with turns:
        assert not turns.take_at_once()
        for asked, thread in enumerate(threads, start=1):
            thread.start()
            while len(turns._queue) < asked:
                pass
    with turns:
        # Whoever asks again at once comes after those that wait.
        order.append(5)
    for thread in threads:
        thread.join()
    assert order == [0, 1, 2, 3, 4, 5]
    assert turns.take_at_once()

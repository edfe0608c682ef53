"""Constraints compiled aside: what is wrong, too big or too slow costs its own request alone."""

from __future__ import annotations

import asyncio
import json
import os
import signal
from collections.abc import Coroutine, Iterator
from pathlib import Path
from typing import Any

import pytest
from support.command import without_tokenizer

from winnow.config import Constraint
from winnow.engine.grammar import GrammarCompiler, dump
from winnow.engine.text import load_tokenizer
from winnow.errors import CapacityError, PeerError, RequestError
from winnow.server import grammars
from winnow.server.grammars import MAX_DEPTH, MAX_TEXT_BYTES, GrammarService

VOCAB, STOPS = 272, (257,)
SLOW = Constraint("regex", "a" * 250_000)
LIVENESS_SECONDS = 60.0


@pytest.fixture(scope="module", autouse=True)
def _one_thread() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OMP_NUM_THREADS", "1")
        yield


class Running:
    """A started service, and the loop that it lives on."""

    def __init__(self, runner: asyncio.Runner, directory: Path) -> None:
        self.runner = runner
        self.service = GrammarService()
        self.run(self.service.start(directory, VOCAB, STOPS))

    def run(self, work: Coroutine[Any, Any, Any]) -> Any:
        return self.runner.run(asyncio.wait_for(work, LIVENESS_SECONDS))

    def compile(self, kind: str, text: str = "") -> bytes:
        compiled = self.run(self.service.compile(Constraint(kind, text)))
        assert isinstance(compiled, bytes)
        return compiled

    @property
    def pid(self) -> int:
        assert self.service._child is not None
        return self.service._child.pid


@pytest.fixture(scope="module")
def running(tiny: Path) -> Iterator[Running]:
    with asyncio.Runner() as runner:
        started = Running(runner, tiny)
        yield started
        started.run(started.service.stop())


def test_every_kind_of_constraint_compiles_to_what_the_engine_loads(
    running: Running, tiny: Path
) -> None:
    tokenizer = load_tokenizer(tiny)
    assert tokenizer is not None
    compiler = GrammarCompiler(tokenizer, VOCAB, STOPS)
    tag = {"format": {"type": "const_string", "value": "<mm:think>"}}
    for kind, text in (
        ("json_object", ""),
        ("json_schema", '{"type": "integer"}'),
        ("regex", "[a-z]+"),
        ("structural_tag", json.dumps(tag)),
    ):
        dumped = running.compile(kind, text)
        assert compiler.matcher(Constraint(kind, text), dumped).allowed.any()


def test_a_constraint_seen_before_is_not_compiled_again(running: Running) -> None:
    first = running.compile("regex", "seen before")
    os.kill(running.pid, signal.SIGSTOP)
    try:
        assert running.compile("regex", "seen before") == first
    finally:
        os.kill(running.pid, signal.SIGCONT)


def test_the_same_constraint_asked_for_at_once_is_compiled_once(
    running: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[object] = []
    ask = running.service._ask
    monkeypatch.setattr(running.service, "_ask", lambda c: (asked.append(c), ask(c))[1])

    async def work() -> list[bytes]:
        same = Constraint("regex", "at once")
        return await asyncio.gather(*(running.service.compile(same) for _ in range(5)))

    assert len(set(running.run(work()))) == 1
    assert len(asked) == 1


@pytest.mark.parametrize(
    ("kind", "text", "says"),
    [
        ("regex", "(a", "parenthesis is not closed"),
        ("json_schema", '{"type": "strin"}', 'Unsupported type "strin"'),
        ("json_schema", "[" * 65 + "]" * 65, f"nested 65 deep, it may be {MAX_DEPTH}"),
        ("regex", "a" * (MAX_TEXT_BYTES + 1), f"it may have {MAX_TEXT_BYTES}"),
        ("regex", "é" * (MAX_TEXT_BYTES // 2 + 1), f"it may have {MAX_TEXT_BYTES}"),
        ("regex", "a\ud800", "half a character"),
        ("regex", "(([a-z]{0,300}){0,300}){0,300}", "ms a token"),
        ("regex", "(" * 30_000 + "a" + ")" * 30_000, "cannot be used"),
    ],
)
def test_a_constraint_that_cannot_be_served_is_refused_with_its_reason(
    running: Running, kind: str, text: str, says: str
) -> None:
    with pytest.raises(RequestError, match=says):
        running.compile(kind, text)


def test_brackets_inside_strings_are_no_nesting(running: Running) -> None:
    running.compile("json_schema", json.dumps({"enum": ["[{" * 100 + '"\\']}))


def test_a_grammar_that_takes_too_long_is_refused_and_the_next_one_is_served(
    running: Running,
) -> None:
    pid = running.pid
    running.service._limit_s = 0.3
    try:
        with pytest.raises(RequestError, match=r"takes over 0\.3 s to compile: make it smaller"):
            running.run(running.service.compile(SLOW))
    finally:
        running.service._limit_s = grammars.LIMIT_SECONDS
    assert running.compile("regex", "next")
    assert running.pid != pid
    # It is known by now.
    with pytest.raises(RequestError, match="takes over"):
        running.run(running.service.compile(SLOW))


def test_a_process_that_dies_over_a_constraint_is_replaced(running: Running) -> None:
    async def work() -> None:
        os.kill(running.pid, signal.SIGSTOP)
        asked = asyncio.create_task(running.service.compile(Constraint("regex", "last words")))
        await asyncio.sleep(0.05)
        os.kill(running.pid, signal.SIGKILL)
        with pytest.raises(RequestError, match="broke the compiler"):
            await asked

    running.run(work())
    assert running.compile("regex", "after that")


def test_whoever_leaves_does_not_leave_his_answer_to_the_next(running: Running, tiny: Path) -> None:
    async def work() -> bytes:
        os.kill(running.pid, signal.SIGSTOP)
        left = asyncio.create_task(running.service.compile(Constraint("regex", "x{3}")))
        stayed = asyncio.create_task(running.service.compile(Constraint("regex", "y{3}")))
        await asyncio.sleep(0.05)
        left.cancel()
        os.kill(running.pid, signal.SIGCONT)
        return await stayed

    tokenizer = load_tokenizer(tiny)
    assert tokenizer is not None
    right = GrammarCompiler(tokenizer, VOCAB, STOPS).compile(Constraint("regex", "y{3}"))
    assert running.run(work()) == dump(right)


def test_more_grammars_than_may_wait_are_refused_for_now(
    running: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(grammars, "MAX_WAITING", 3)

    async def work() -> list[object]:
        many = [running.service.compile(Constraint("regex", f"many{i}")) for i in range(3)]
        tasks = [asyncio.create_task(one) for one in many]
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        with pytest.raises(CapacityError, match="3 grammars wait"):
            await running.service.compile(Constraint("regex", "one more"))
        return list(await asyncio.gather(*tasks))

    assert all(isinstance(result, bytes) for result in running.run(work()))


def test_results_are_kept_up_to_so_many_bytes() -> None:
    results = grammars._Results(1000)
    for i in range(100):
        results.put(Constraint("regex", f"{i:03}"), bytes(97))
    assert [i for i in range(100) if results.get(Constraint("regex", f"{i:03}"))] == [
        *range(90, 100)
    ]
    assert results._bytes == 1000


def test_a_checkpoint_without_a_tokenizer_compiles_no_grammars(tiny: Path, tmp_path: Path) -> None:
    bare = without_tokenizer(tiny, tmp_path / "bare")

    async def work() -> None:
        service = GrammarService()
        with pytest.raises(PeerError, match="no tokenizer"):
            await service.start(bare, VOCAB, STOPS)
        await service.stop()

    asyncio.run(asyncio.wait_for(work(), LIVENESS_SECONDS))

"""The engine in its own process: outputs arrive, ends are seen, nothing blocks, nothing leaks."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import Coroutine, Iterator
from pathlib import Path
from threading import Timer
from time import monotonic
from typing import Any

import pytest

from winnow.config import Constraint, EngineConfig, SamplingParams
from winnow.engine.messages import Loading, ModelInfo, Stepped
from winnow.engine.output import Output
from winnow.errors import PeerError, RequestError
from winnow.model.checkpoint import make_tiny
from winnow.server.client import EngineClient
from winnow.server.grammars import GrammarService

OPTIONS = EngineConfig(num_pages=65, max_step_tokens=256, max_model_len=2048)
LIVENESS_SECONDS = 60.0
"""Far beyond what anything here takes: a test that waits longer has found a hang."""


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("client") / "model"
    geometry = {"hidden_size": 64, "num_layers": 2, "num_heads": 2, "num_kv_heads": 2}
    make_tiny(directory, seed=2, num_experts=4, expert_width=32, dense_width=64, **geometry)
    return directory


@pytest.fixture(scope="module", autouse=True)
def _one_thread() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OMP_NUM_THREADS", "1")
        yield


@pytest.fixture(scope="module")
def runner() -> Iterator[asyncio.Runner]:
    with asyncio.Runner() as own:
        yield own


class Served:
    """A client with its engine running, on a loop that lasts as long as the module's tests."""

    def __init__(self, runner: asyncio.Runner, directory: Path) -> None:
        self.runner = runner
        self.client = EngineClient()
        self.progress: list[Loading] = []
        start = self.client.start(str(directory), OPTIONS, progress=self.progress.append)
        self.info: ModelInfo = self.run(start)

    def run(self, work: Coroutine[Any, Any, Any]) -> Any:
        return self.runner.run(asyncio.wait_for(work, LIVENESS_SECONDS))


@pytest.fixture(scope="module")
def served(runner: asyncio.Runner, small: Path) -> Iterator[Served]:
    running = Served(runner, small)
    yield running
    running.run(running.client.stop())


def tokens(count: int, **options: Any) -> SamplingParams:
    return SamplingParams(max_tokens=count, seed=1, ignore_eos=True, **options)


async def outputs(stream: Any) -> list[Output]:
    return [output async for output in stream]


async def idle(client: EngineClient) -> None:
    """Wait until the engine says that it holds nothing for anybody."""
    while client.stats is None or client.stats.pages_used or client.stats.num_running:
        await asyncio.sleep(0.01)


def test_a_started_engine_says_what_it_serves_and_how_far_it_had_loaded(
    served: Served, small: Path
) -> None:
    info = served.info
    assert info.name == str(small)
    assert (info.num_pages, info.page_tokens, info.max_model_len) == (64, 128, 2048)
    assert (info.backend, info.kv_format, info.dtype) == ("cpu", "fp32", "float32")
    assert info.eos_ids
    assert served.progress[-1].done == served.progress[-1].total > 0


def test_a_stream_gives_all_tokens_and_ends_with_its_usage(served: Served) -> None:
    async def work() -> list[Output]:
        return await outputs(served.client.submit("r", [1, 2, 3], tokens(9)))

    got = served.run(work())
    assert sum(len(output.token_ids) for output in got) == 9
    assert [output.finish_reason for output in got][-1] == "length"
    assert got[-1].usage is not None
    assert got[-1].usage.prompt_tokens == 3
    assert served.client.in_flight == 0


def test_many_streams_each_get_their_own_tokens(served: Served) -> None:
    async def work() -> list[list[Output]]:
        streams = [served.client.submit(f"m{i}", [i, 7], tokens(5 + i)) for i in range(24)]
        assert served.client.in_flight == 24
        return await asyncio.gather(*map(outputs, streams))

    for i, got in enumerate(served.run(work())):
        assert {output.request_id for output in got} == {f"m{i}"}
        assert sum(len(output.token_ids) for output in got) == 5 + i


def test_a_refused_request_is_one_output_with_its_error(served: Served) -> None:
    async def work() -> list[list[Output]]:
        wrong = [
            served.client.submit("empty", [], tokens(1)),
            served.client.submit("long", [1] * 2100, tokens(1)),
            served.client.submit("large", [1] * 2000, tokens(48)),
        ]
        return await asyncio.gather(*map(outputs, wrong))

    (empty,), (long,), large = served.run(work())
    assert empty.finish_reason == long.finish_reason == "error"
    assert isinstance(empty.error, RequestError)
    assert "the engine takes 2048" in str(long.error)
    assert large[-1].finish_reason == "length"


def test_an_id_in_use_is_refused_and_leaves_its_owner_alone(served: Served) -> None:
    async def work() -> list[Output]:
        stream = served.client.submit("same", [1], tokens(20))
        with pytest.raises(RequestError, match="'same' is in use"):
            served.client.submit("same", [1], tokens(1))
        return await outputs(stream)

    assert sum(len(output.token_ids) for output in served.run(work())) == 20


def test_an_abort_ends_the_stream_and_frees_every_page(served: Served) -> None:
    async def work() -> list[list[Output]]:
        names = [f"a{i}" for i in range(6)]
        streams = [served.client.submit(n, [3] * 300, tokens(1700)) for n in names[:3]]
        streams += [served.client.submit(n, [3] * 300, tokens(1700)) for n in names[3:]]
        await anext(streams[0])
        steps: list[Stepped] = []
        served.client.on_step = steps.append
        served.client.abort(*names)
        served.client.abort(*names)
        assert served.client.in_flight == 0
        got = await asyncio.gather(*map(outputs, streams))
        await idle(served.client)
        served.client.on_step = None
        # What was under way, not the 1700 tokens that were asked for.
        assert len(steps) < 100
        return got

    for got in served.run(work()):
        assert got[-1].finish_reason == "abort"
    stats = served.client.stats
    assert stats is not None
    assert (stats.num_running, stats.num_waiting, stats.pages_used) == (0, 0, 0)


def test_an_id_may_be_used_again_at_once_after_an_abort(served: Served) -> None:
    async def work() -> list[Output]:
        served.client.submit("twice", [9] * 200, tokens(1700))
        await asyncio.sleep(0.05)
        served.client.abort("twice")
        return await outputs(served.client.submit("twice", [1, 2, 3], tokens(4)))

    got = served.run(work())
    assert sum(len(output.token_ids) for output in got) == 4
    assert got[-1].usage is not None
    assert got[-1].usage.prompt_tokens == 3


def test_a_reader_that_never_reads_costs_no_more_than_its_answer(served: Served) -> None:
    async def work() -> tuple[list[Output], int]:
        slow = served.client.submit("slow", [1, 2], tokens(400))
        steps = 0

        def count(_: Stepped) -> None:
            nonlocal steps
            steps += 1

        served.client.on_step = count
        while served.client.in_flight:
            await asyncio.sleep(0.01)
        served.client.on_step = None
        return await outputs(slow), steps

    got, steps = served.run(work())
    assert steps >= 400
    assert len(got) == 1
    assert len(got[0].token_ids) == 400
    assert got[0].finish_reason == "length"


def test_sending_never_waits_for_an_engine_that_does_not_read(served: Served) -> None:
    async def work() -> Output:
        os.kill(served.client.pid, signal.SIGSTOP)
        # Were the send to wait, this would let it go on, too late.
        rescue = Timer(10.0, os.kill, (served.client.pid, signal.SIGCONT))
        rescue.start()
        stream = served.client.submit("long", [5] * 1_000_000, tokens(1))
        await asyncio.sleep(0)
        assert rescue.is_alive()
        rescue.cancel()
        os.kill(served.client.pid, signal.SIGCONT)
        (output,) = await outputs(stream)
        return output

    assert "the engine takes 2048" in str(served.run(work()).error)


def test_a_grammar_compiled_aside_is_followed_in_the_engine(served: Served, small: Path) -> None:
    async def work() -> str:
        service = GrammarService()
        await service.start(small, served.info.vocab_size, served.info.eos_ids)
        try:
            constraint = Constraint("regex", "(yes|no), [0-9]{3}")
            grammar = await service.compile(constraint)
        finally:
            await service.stop()
        params = SamplingParams(constraint=constraint, seed=4, max_tokens=30)
        got = await outputs(served.client.submit("g", [1], params, grammar=grammar))
        assert got[-1].finish_reason == "stop"
        return "".join(output.text or "" for output in got)

    answer, number = served.run(work()).split(", ")
    assert answer in ("yes", "no")
    assert number.isdigit()


def test_neither_an_interrupt_nor_a_term_ends_the_engine(served: Served) -> None:
    async def work() -> list[Output]:
        stream = served.client.submit("signalled", [1], tokens(30))
        for number in (signal.SIGINT, signal.SIGTERM):
            os.kill(served.client.pid, number)
        return await outputs(stream)

    assert served.run(work())[-1].finish_reason == "length"


def test_a_killed_engine_is_seen_by_every_stream_and_by_whoever_watches(
    runner: asyncio.Runner, small: Path
) -> None:
    running = Served(runner, small)

    async def work() -> tuple[list[Any], str, float]:
        streams = [running.client.submit(f"k{i}", [1], tokens(1700)) for i in range(3)]
        await anext(streams[0])
        os.kill(running.client.pid, signal.SIGKILL)
        begin = monotonic()
        ends = await asyncio.gather(*map(outputs, streams), return_exceptions=True)
        message = await running.client.died
        with pytest.raises(PeerError, match="not running"):
            running.client.submit("late", [1], tokens(1))
        running.client.abort("k0")
        return ends, message, monotonic() - begin

    ends, message, seconds = running.run(work())
    assert all(isinstance(end, PeerError) for end in ends)
    assert message == "the engine's process was ended by SIGKILL"
    assert seconds < LIVENESS_SECONDS / 2
    running.run(running.client.stop())


def test_a_stopped_client_ends_the_process_and_its_streams(
    runner: asyncio.Runner, small: Path
) -> None:
    running = Served(runner, small)

    async def work() -> list[Any]:
        stream = running.client.submit("open", [1], tokens(1700))
        await anext(stream)
        await running.client.stop()
        return list(await asyncio.gather(outputs(stream), return_exceptions=True))

    (end,) = running.run(work())
    assert isinstance(end, PeerError)
    assert running.client.died.cancelled()
    with pytest.raises(ProcessLookupError):
        os.kill(running.client.pid, 0)


def test_an_engine_whose_front_has_gone_ends_by_itself(
    runner: asyncio.Runner, small: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The client would end it itself half a second later.
    monkeypatch.setattr("winnow.server.child._LAST_WORD_SECONDS", LIVENESS_SECONDS)
    running = Served(runner, small)

    async def work() -> str:
        await anext(running.client.submit("orphan", [1], tokens(1700)))
        child = running.client._child
        assert child is not None
        # What the end of this process would do to the socket.
        child._transport.abort()
        return await running.client.died

    assert running.run(work()) == "the engine's process ended with status 0"
    running.run(running.client.stop())


def test_an_engine_that_cannot_be_built_says_why(runner: asyncio.Runner, tmp_path: Path) -> None:
    async def work() -> None:
        client = EngineClient()
        try:
            with pytest.raises(PeerError, match="is no directory: give a checkpoint's directory"):
                await client.start(str(tmp_path / "nothing"), OPTIONS)
            assert "is no directory" in await client.died
        finally:
            await client.stop()

    runner.run(work())


def test_the_front_loads_no_torch() -> None:
    script = (
        "import sys, winnow.server.client, winnow.server.grammars\n"
        "assert not {'torch', 'numpy', 'xgrammar'} & set(sys.modules)"
    )
    assert os.spawnv(os.P_WAIT, sys.executable, [sys.executable, "-c", script]) == 0

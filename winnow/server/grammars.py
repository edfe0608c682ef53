"""Constraints compiled aside: in a process of their own, for a bounded time, once each.

A schema or pattern is a small program from a stranger. Compiled beside the loop it would stop the
server, compiled in the engine every answer; here it costs its own request at worst.
"""

from __future__ import annotations

import asyncio
import logging
import re
from collections import OrderedDict
from collections.abc import Coroutine, Sequence
from pathlib import Path
from typing import Any, TypeVar

from winnow.config import Constraint
from winnow.errors import CapacityError, PeerError, RequestError, WinnowError
from winnow.server.child import Child
from winnow.server.grammar_worker import Vocabulary

LIMIT_SECONDS = 2.0
MAX_TEXT_BYTES = 256 << 10
MAX_DEPTH = 64
MAX_WAITING = 64
"""Requests with grammars that are not known yet; each may have to wait for all before it."""
_CACHE_BYTES = 64 << 20
_START_SECONDS = 60.0
_WORKER = "winnow.server.grammar_worker"
_JSON_STRING = re.compile(r'"(?:[^"\\]|\\.)*"', re.DOTALL)

Result = bytes | WinnowError
T = TypeVar("T")
log = logging.getLogger(__name__)


class GrammarService:
    """Compiles constraints for `EngineClient.submit`. Used from one event loop."""

    def __init__(self, *, limit_s: float = LIMIT_SECONDS, cache_bytes: int = _CACHE_BYTES) -> None:
        self._limit_s = limit_s
        self._results = _Results(cache_bytes)
        self._turn = asyncio.Lock()
        self._waiting = 0
        self._tasks: set[asyncio.Task[Any]] = set()
        self._vocabulary: Vocabulary | None = None
        self._refusal: RequestError | None = None
        self._child: Child | None = None
        self._reply: asyncio.Future[object] | None = None

    async def start(self, directory: Path, vocab_size: int, stop_ids: Sequence[int]) -> None:
        """Start the process for the tokenizer in `directory`; ready when this returns.

        PeerError if it cannot be started. Where its library is not installed, all is refused later.
        """
        self._vocabulary = Vocabulary(str(directory), vocab_size, tuple(stop_ids))
        async with self._turn:
            try:
                await self._ready_child()
            except RequestError as error:
                self._refusal = error

    async def compile(self, constraint: Constraint) -> bytes:
        """The grammar of a constraint, dumped.

        RequestError for one that is wrong, too long, too deep or too slow, PeerError if the process
        cannot be started, CapacityError if too many are waiting.
        """
        if self._refusal is not None:
            raise RequestError(str(self._refusal))
        _check_size(constraint)
        result = self._results.get(constraint)
        if result is None:
            if self._waiting >= MAX_WAITING:
                raise CapacityError(
                    f"{self._waiting} grammars wait to be compiled, as many as may: try again"
                )
            # Whoever asked may leave; the answer to a question that was sent is still awaited.
            result = await asyncio.shield(self._spawn(self._compile(constraint)))
        if isinstance(result, WinnowError):
            raise type(result)(str(result))
        return result

    async def stop(self) -> None:
        """End the process; whatever is being compiled is refused."""
        for task in tuple(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        async with self._turn:
            await self._drop_child()

    async def _compile(self, constraint: Constraint) -> Result:
        self._waiting += 1
        try:
            async with self._turn:
                # Somebody with the same constraint may have been before us.
                result = self._results.get(constraint)
                if result is None:
                    result = await self._ask(constraint)
                return result
        finally:
            self._waiting -= 1

    async def _ask(self, constraint: Constraint) -> Result:
        try:
            child = await self._ready_child()
        except PeerError as error:
            return error
        answer = await self._exchange(child, constraint, self._limit_s)
        result: Result
        if isinstance(answer, bytes | RequestError):
            result = answer
        else:
            await self._drop_child()
            took = "took more memory than there is for it, or broke the compiler"
            if answer is None:
                took = f"takes over {self._limit_s:g} s to compile"
            result = RequestError(f"the {constraint.kind} {took}: make it smaller")
            self._spawn(self._restart())
        self._results.put(constraint, result)
        return result

    async def _restart(self) -> None:
        """Have a process ready for the next request, whose time does not begin before it is."""
        async with self._turn:
            try:
                await self._ready_child()
            except PeerError as error:
                log.error("%s", error)

    def _spawn(self, work: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        """A task that is kept until it is done."""
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def _ready_child(self) -> Child:
        """The process, started if there is none that lives."""
        if self._child is not None and self._child.is_connected:
            return self._child
        await self._drop_child()
        assert self._vocabulary is not None, "the service has not been started"
        self._child = await Child.start(_WORKER, self._receive)
        answer = await self._exchange(self._child, self._vocabulary, _START_SECONDS)
        if answer is True:
            return self._child
        how = await self._drop_child()
        if isinstance(answer, RequestError):
            raise answer
        reason = str(answer) if isinstance(answer, WinnowError) else f"its process {how}"
        raise PeerError(f"grammars cannot be compiled: {reason}")

    async def _exchange(self, child: Child, message: object, limit_s: float) -> object:
        """What the child answers: None after `limit_s` seconds, False if it ends first."""
        self._reply = asyncio.get_running_loop().create_future()
        child.send(message)
        ended = asyncio.create_task(child.disconnected())
        either: list[asyncio.Future[Any]] = [self._reply, ended]
        await asyncio.wait(either, timeout=limit_s, return_when=asyncio.FIRST_COMPLETED)
        if self._reply.done():
            answer = self._reply.result()
        else:
            answer = False if ended.done() else None
        ended.cancel()
        self._reply = None
        return answer

    def _receive(self, message: object) -> None:
        if self._reply is not None and not self._reply.done():
            self._reply.set_result(message)

    async def _drop_child(self) -> str:
        """End the process, if there is one; says how it ended."""
        if self._child is None:
            return "was not there"
        child, self._child = self._child, None
        child.kill()
        return await child.ended()


class _Results:
    """The newest results by constraint, up to so many bytes of both."""

    def __init__(self, limit_bytes: int) -> None:
        self._limit = limit_bytes
        self._bytes = 0
        self._results: OrderedDict[Constraint, Result] = OrderedDict()

    def get(self, constraint: Constraint) -> Result | None:
        if constraint in self._results:
            self._results.move_to_end(constraint)
        return self._results.get(constraint)

    def put(self, constraint: Constraint, result: Result) -> None:
        self._results[constraint] = result
        self._bytes += _size(constraint, result)
        while self._bytes > self._limit:
            self._bytes -= _size(*self._results.popitem(last=False))


def _size(constraint: Constraint, result: Result) -> int:
    return len(constraint.text) + len(result if isinstance(result, bytes) else str(result))


def _check_size(constraint: Constraint) -> None:
    """RequestError for a text that is not worth a try."""
    kind, text = constraint.kind, constraint.text
    try:
        num_bytes = len(text.encode())
    except UnicodeEncodeError:
        raise RequestError(f"the {kind} holds half a character: send whole ones") from None
    if num_bytes > MAX_TEXT_BYTES:
        raise RequestError(
            f"the {kind} has {num_bytes} bytes, it may have {MAX_TEXT_BYTES}: make it smaller"
        )
    if kind == "regex":
        return
    depth = deepest = 0
    for bracket in re.findall(r"[\[\]{}]", _JSON_STRING.sub("", text)):
        depth += 1 if bracket in "[{" else -1
        deepest = max(deepest, depth)
    if deepest > MAX_DEPTH:
        raise RequestError(
            f"the {kind} is nested {deepest} deep, it may be {MAX_DEPTH}: make it flatter"
        )

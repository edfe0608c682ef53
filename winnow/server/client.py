"""The front's side of the engine's process: starts it, talks to it, sees it die. Asyncio only.

Nothing here blocks the loop or waits for a reader: what the socket does not take yet is kept by
the transport, what a consumer has not taken yet is kept as one merged output. The engine's failure
reaches every open stream as PeerError, and `died` as a sentence.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from itertools import count
from time import monotonic
from typing import Any

from winnow.config import EngineConfig, SamplingParams
from winnow.engine.messages import (
    Abort,
    Add,
    Build,
    Failed,
    Loading,
    ModelInfo,
    Ready,
    Stepped,
    Stop,
)
from winnow.engine.output import EngineStats, Output
from winnow.errors import PeerError, RequestError
from winnow.server.child import Child
from winnow.server.outbox import Outbox

log = logging.getLogger(__name__)

_WORKER = "winnow.engine.worker"
"""Run by name in a process of its own: torch stays out of this one."""


class Stream:
    """The outputs of one request, to be iterated over once; the last one has a `finish_reason`.

    PeerError is raised where the engine has died, RequestError nowhere: a refused request is an
    output with its error. Outputs that come faster than they are taken are merged, so that what is
    kept is never more than the answer itself.
    """

    def __init__(self, request_id: str) -> None:
        self.request_id = request_id
        self.submitted_s = monotonic()
        self.queue_s: float | None = None
        """Seconds from submission to the beginning of the first step; None until that step ends."""
        self._outbox = Outbox(request_id)
        self._failure: str | None = None
        self._news = asyncio.Event()

    def __aiter__(self) -> Stream:
        return self

    async def __anext__(self) -> Output:
        while not self._outbox.has_output:
            if self._outbox.is_closed:
                raise StopAsyncIteration
            if self._failure is not None:
                raise PeerError(self._failure)
            self._news.clear()
            await self._news.wait()
        return self._outbox.take()

    def push(self, output: Output) -> None:
        """For the client: one more output."""
        self._outbox.put(output)
        self._news.set()

    def fail(self, message: str) -> None:
        """For the client: nothing more will come."""
        self._failure = message
        self._news.set()


class EngineClient:
    """One engine process. Used from one event loop."""

    def __init__(self) -> None:
        self.stats: EngineStats | None = None
        """The newest; None before the first step."""
        self.on_step: Callable[[Stepped], None] | None = None
        """Called with every step, after its outputs have been handed out."""
        self._streams: dict[str, Stream] = {}
        self._wire_ids: dict[str, str] = {}
        """The engine's name for each open request: no name comes twice, so that what a step in
        flight says of an aborted request is never taken for its successor's."""
        self._serials = count()
        self._child: Child | None = None
        self._watcher: asyncio.Task[None] | None = None
        self._died: asyncio.Future[str] | None = None
        self._ready: asyncio.Future[ModelInfo] | None = None
        self._progress: Callable[[Loading], None] | None = None
        self._last_word: str | None = None

    @property
    def in_flight(self) -> int:
        """Requests that were submitted and have neither ended nor been aborted."""
        return len(self._streams)

    @property
    def died(self) -> asyncio.Future[str]:
        """Resolves with a sentence when the process has ended unasked; cancelled by `stop()`."""
        assert self._died is not None, "the client has not been started"
        return self._died

    @property
    def pid(self) -> int:
        """Of the engine's process."""
        assert self._child is not None, "the client has not been started"
        return self._child.pid

    async def start(
        self,
        model: str,
        config: EngineConfig | None = None,
        *,
        progress: Callable[[Loading], None] | None = None,
        **options: Any,
    ) -> ModelInfo:
        """Start the process and wait until its model is loaded.

        `options` are further ones of `winnow.engine.build.build_engine`. PeerError with the
        engine's own sentence if it cannot be built, or dies before it is ready.
        """
        assert self._child is None, "a client starts once"
        loop = asyncio.get_running_loop()
        self._died, self._ready = loop.create_future(), loop.create_future()
        self._progress = progress
        self._child = await Child.start(_WORKER, self._receive)
        self._watcher = asyncio.create_task(self._watch(self._child))
        level = log.getEffectiveLevel()
        self._child.send(Build(model, config or EngineConfig(), options, level))
        return await self._ready

    def submit(
        self,
        request_id: str,
        prompt_ids: Sequence[int],
        params: SamplingParams,
        cache_salt: str = "",
        grammar: bytes | None = None,
    ) -> Stream:
        """Begin a request. `grammar` is `params.constraint` compiled by `GrammarService`.

        RequestError for an id that is in use, PeerError if there is no engine any more.
        """
        if request_id in self._wire_ids:
            raise RequestError(f"request id {request_id!r} is in use: choose another")
        if self._child is None or not self._child.is_connected:
            raise PeerError("the engine is not running: start the server again")
        wire_id = f"{request_id}~{next(self._serials)}"
        self._child.send(Add(wire_id, tuple(prompt_ids), params, cache_salt, grammar))
        self._wire_ids[request_id] = wire_id
        stream = self._streams[wire_id] = Stream(request_id)
        return stream

    def abort(self, *request_ids: str) -> None:
        """End requests before the engine's next step; their streams end with reason abort.

        Requests that have ended already are let be.
        """
        wire_ids = []
        for request_id in request_ids:
            if request_id in self._wire_ids:
                wire_ids.append(self._wire_ids[request_id])
                self._close(wire_ids[-1]).push(Output(request_id, finish_reason="abort"))
        if wire_ids and self._child is not None and self._child.is_connected:
            self._child.send(Abort(tuple(wire_ids)))

    async def stop(self, timeout: float = 5.0) -> None:
        """End the process, by force if it has not ended after `timeout` seconds.

        Streams that are still open raise PeerError.
        """
        if self._child is None or self._watcher is None:
            return
        self.died.cancel()
        self._last_word = "the engine was stopped"
        if self._child.is_connected:
            self._child.send(Stop())
        await asyncio.wait([self._watcher], timeout=timeout)
        self._child.kill()
        await self._watcher

    def _receive(self, event: object) -> None:
        assert self._ready is not None
        match event:
            case Stepped():
                self._step(event)
            case Loading():
                if self._progress is not None:
                    self._progress(event)
            case Ready():
                if not self._ready.done():
                    self._ready.set_result(event.model)
            case Failed():
                self._last_word = event.message
                # It has nothing to add, and its end would take the library a second.
                if self._child is not None:
                    self._child.kill()

    def _step(self, event: Stepped) -> None:
        self.stats = event.stats
        for wire_id in event.started:
            stream = self._streams.get(wire_id)
            if stream is not None:
                stream.queue_s = max(0.0, monotonic() - stream.submitted_s - event.step_s)
        for output in event.outputs:
            # One that was aborted while this step was under way is no longer there.
            stream = self._streams.get(output.request_id)
            if stream is None:
                continue
            stream.push(output)
            if output.finish_reason is not None:
                self._close(output.request_id)
        if self.on_step is not None:
            self.on_step(event)

    def _close(self, wire_id: str) -> Stream:
        stream = self._streams.pop(wire_id)
        del self._wire_ids[stream.request_id]
        return stream

    async def _watch(self, child: Child) -> None:
        """When the process has ended, end everything that waits for it."""
        how = await child.ended()
        message = self._last_word or f"the engine's process {how}"
        assert self._died is not None
        assert self._ready is not None
        if not self._ready.done():
            self._ready.set_exception(PeerError(message))
        for wire_id in tuple(self._streams):
            self._close(wire_id).fail(message)
        if not self._died.done():
            self._died.set_result(message)

"""A server from start to exit status: HTTP, engine, signals, drain. Decides no request.

HTTP answers from the first moment, so that probes see the model load; requests are let in when it
has loaded. The status is 0 after a drain, `ENGINE_DIED` after the engine's death, and
`CUT_SHORT` where a second signal did not wait for the drain.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import logging
import resource
import signal
import socket
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import uvicorn
import uvloop
from tqdm import tqdm

from winnow.config import EngineConfig
from winnow.engine.messages import Loading, ModelInfo
from winnow.engine.text import load_tokenizer
from winnow.errors import UnsupportedError
from winnow.server.admission import Admission
from winnow.server.app import build_app
from winnow.server.client import EngineClient
from winnow.server.connection import http_config
from winnow.server.failures import ApiError
from winnow.server.grammars import GrammarService
from winnow.server.metrics import Metrics
from winnow.server.serving import Serving
from winnow.server.settings import ServerConfig
from winnow.server.template import load_template
from winnow.spec.embedded import checkpoint_path

log = logging.getLogger(__name__)

ENGINE_DIED = 3
CUT_SHORT = 130
_LAST_WORDS_S = 0.5
"""After the engine's death, for the errors that open requests get."""


def serve(model: str, engine: EngineConfig, config: ServerConfig, **build: Any) -> int:
    """Serve until a signal or the engine's death; the exit status.

    `model` is a checkpoint's directory, or with `random=True` among the options of
    `winnow.engine.build.build_engine` a preset. PeerError with the engine's sentence where it
    cannot be built, UnsupportedError for an address that cannot be had.
    """

    async def run() -> int:
        _allow_many_connections()
        server = Server(model, engine, config, build)
        with _listen(config) as listener:
            return await server.run(listener)

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(run())


class Server:
    """One run of `serve`; made where its event loop runs."""

    def __init__(
        self, model: str, engine: EngineConfig, config: ServerConfig, build: dict[str, Any]
    ) -> None:
        directory = None if build.get("random") else checkpoint_path(model)
        self._model = model
        self._engine_config = engine
        self._config = config
        self._build = build
        self._client = EngineClient()
        tokenizer = None if directory is None else load_tokenizer(directory)
        self._directory = directory
        self._grammars = GrammarService()
        self._serving = Serving(
            config=config,
            engine=self._client,
            grammars=self._grammars,
            tokenizer=tokenizer,
            template=None if directory is None else load_template(directory),
            admission=Admission(config.max_queue),
            metrics=Metrics(config.model_name or Path(model).resolve().name),
            model_name=config.model_name or Path(model).resolve().name,
            created=int(time.time()),
            cut=asyncio.get_running_loop().create_future(),
        )
        self._client.on_step = self._serving.on_step
        self._stopping = asyncio.Event()
        self._hurried = asyncio.Event()
        self._bar = tqdm(unit="B", unit_scale=True, disable=None, leave=False)

    async def run(self, listener: socket.socket) -> int:
        """Listen, load, serve, drain."""
        loop = asyncio.get_running_loop()
        http = _Uvicorn(
            http_config(build_app(self._serving), send_timeout_s=self._config.send_timeout_s)
        )
        listening = asyncio.create_task(http.serve([listener]))
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._signalled)
        log.info("listening on %s, loading %s", _url(listener), self._model)
        try:
            return await self._live(listener)
        finally:
            http.force_exit = self._hurried.is_set()
            http.should_exit = True
            await listening
            await self._client.stop(0.0 if self._hurried.is_set() else 5.0)
            await self._grammars.stop()

    async def _live(self, listener: socket.socket) -> int:
        starting = asyncio.create_task(self._start())
        if not await self._before_stop(starting):
            starting.cancel()
            await asyncio.wait([starting])
            return 0
        info = starting.result()
        self._serving.ready(info)
        log.info(
            "ready: %s with %d pages of %d tokens, KV %s, index %s, backend %s, %d requests at "
            "once and %d waiting; open %s",
            self._serving.model_name, info.num_pages, info.page_tokens, info.kv_format,
            info.index_format, info.backend, info.max_running, self._config.max_queue,
            _url(listener),
        )  # fmt: skip
        if await self._before_stop(self._client.died):
            return await self._mourn(self._client.died.result())
        return await self._drain()

    async def _start(self) -> ModelInfo:
        info = await self._client.start(
            self._model, self._engine_config, progress=self._loaded, **self._build
        )
        self._bar.close()
        if self._directory is not None and self._serving.tokenizer is not None:
            await self._grammars.start(self._directory, info.vocab_size, info.eos_ids)
        return info

    def _loaded(self, loading: Loading) -> None:
        self._serving.loading = loading.done, loading.total
        self._bar.total = loading.total
        self._bar.update(loading.done - self._bar.n)

    async def _before_stop(self, future: asyncio.Future[Any]) -> bool:
        """Whether `future` is done before a signal comes."""
        stopping = asyncio.create_task(self._stopping.wait())
        await asyncio.wait((future, stopping), return_when=asyncio.FIRST_COMPLETED)
        stopping.cancel()
        return future.done()

    async def _mourn(self, message: str) -> int:
        print(f"winnow: {message}", file=sys.stderr)
        self._serving.admission.closed = ApiError(503, message, code="engine_unavailable")
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._serving.admission.idle(), _LAST_WORDS_S)
        return ENGINE_DIED

    async def _drain(self) -> int:
        """Refuse what is new, let the rest finish, cut what takes too long."""
        serving, limit_s = self._serving, self._config.drain_timeout_s
        serving.admission.closed = ApiError(
            503, "the server is shutting down: send the request to another", code="draining"
        )
        log.info("draining: %d answers are under way", serving.admission.in_flight)
        idle = asyncio.create_task(serving.admission.idle())
        hurried = asyncio.create_task(self._hurried.wait())
        ends: list[asyncio.Future[Any]] = [idle, hurried, self._client.died]
        await asyncio.wait(ends, timeout=limit_s, return_when=asyncio.FIRST_COMPLETED)
        if self._client.died.done():
            return await self._mourn(self._client.died.result())
        if not idle.done():
            log.warning("cutting %d answers", serving.admission.in_flight)
            serving.cut.set_result(
                ApiError(503, "the server was shut down before the answer's end", code="draining")
            )
            await asyncio.wait([idle], timeout=_LAST_WORDS_S)
        return CUT_SHORT if self._hurried.is_set() else 0

    def _signalled(self) -> None:
        if self._stopping.is_set():
            self._hurried.set()
        self._stopping.set()


class _Uvicorn(uvicorn.Server):
    """uvicorn without signal handlers of its own, which would end it before the drain."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


def _allow_many_connections() -> None:
    """Take as many open files as the machine allows; a shell's usual 1,024 are soon used up."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))


def _listen(config: ServerConfig) -> socket.socket:
    family = socket.AF_INET6 if ":" in config.host else socket.AF_INET
    try:
        return socket.create_server((config.host, config.port), family=family, backlog=1024)
    except OSError as error:
        where = f"cannot listen on {config.host} port {config.port}"
        if error.errno == errno.EADDRINUSE:
            why = "it is in use: end what listens there, or give another --port; 0 takes a free one"
        elif error.errno == errno.EACCES:
            why = "this user may not: give a --port from 1024, or 0 for a free one"
        else:
            reason = (error.strerror or str(error)).partition(" (")[0]
            why = f"{reason}: give --host an address of this machine, or 0.0.0.0 for every one"
        raise UnsupportedError(f"{where}, {why}") from None


def _url(listener: socket.socket) -> str:
    host, port = listener.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"

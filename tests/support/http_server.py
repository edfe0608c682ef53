"""The application over a fake engine, on a real socket, in a thread of this process."""

from __future__ import annotations

import asyncio
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import httpx
import uvicorn
import uvloop
from support.fake_engine import INFO, FakeEngine, FakeGrammars

from winnow.engine.text import Tokenizer
from winnow.model.checkpoint import load as checkpoint_load
from winnow.model.checkpoint.tiny_config import byte_tokenizer
from winnow.server.admission import Admission
from winnow.server.app import build_app
from winnow.server.connection import http_config
from winnow.server.metrics import Metrics
from winnow.server.serving import Serving
from winnow.server.settings import ServerConfig
from winnow.server.template import ChatTemplate

T = TypeVar("T")
TEMPLATE = Path(checkpoint_load.__file__).parent / "chat_template.jinja"


class Running:
    """A server that answers on `url`; `serving` and `engine` may be looked at and changed."""

    def __init__(self, url: str, port: int, serving: Serving, engine: FakeEngine) -> None:
        self.url = url
        self.port = port
        self.serving = serving
        self.engine = engine
        self.client = httpx.Client(base_url=url, timeout=30)

    def post(self, path: str, body: Any, **headers: str) -> httpx.Response:
        return self.client.post(path, json=body, headers=headers)

    def metric(self, name: str) -> float:
        """A metric's sum over its labels."""
        lines = self.client.get("/metrics").text.splitlines()
        return sum(float(line.rpartition(" ")[2]) for line in lines if line.startswith(name + "{"))

    def connect(self, receive_buffer: int | None = None) -> socket.socket:
        """A bare connection, for clients that misbehave."""
        bare = socket.socket()
        if receive_buffer is not None:
            bare.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer)
        bare.settimeout(20)
        bare.connect(("127.0.0.1", self.port))
        return bare


@contextmanager
def running(config: ServerConfig | None = None, *, loaded: bool = True) -> Iterator[Running]:
    """Serve until the block ends."""
    config = config or ServerConfig()
    engine = FakeEngine()
    listener = socket.create_server(("127.0.0.1", 0))
    port = listener.getsockname()[1]
    started: list[tuple[Serving, uvicorn.Server]] = []

    async def serve() -> None:
        serving = Serving(
            config=config,
            engine=engine,
            grammars=FakeGrammars(),
            tokenizer=Tokenizer(byte_tokenizer()),
            template=ChatTemplate(TEMPLATE.read_text("utf-8"), "template"),
            admission=Admission(config.max_queue),
            metrics=Metrics("fake"),
            model_name="fake",
            created=1,
            cut=asyncio.get_running_loop().create_future(),
        )
        engine.on_step = serving.on_step
        if loaded:
            serving.ready(INFO)
        server = uvicorn.Server(http_config(build_app(serving), config.send_timeout_s))
        started.append((serving, server))
        await server.serve([listener])

    def run() -> None:
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            runner.run(serve())

    thread = threading.Thread(target=run)
    thread.start()
    try:
        eventually(lambda: started and started[0][1].started)
        running = Running(f"http://127.0.0.1:{port}", port, started[0][0], engine)
        with running.client:
            yield running
    finally:
        started[0][1].should_exit = True
        thread.join()


def eventually(check: Callable[[], T], within_s: float = 20.0) -> T:
    """The first true value of `check`; fails if none comes."""
    end = time.monotonic() + within_s
    while time.monotonic() < end:
        value = check()
        if value:
            return value
        time.sleep(0.01)
    raise AssertionError(f"not within {within_s} s")


def chat_body(text: str = "hello", **fields: Any) -> dict[str, Any]:
    """A chat request."""
    return {"messages": [{"role": "user", "content": text}], **fields}

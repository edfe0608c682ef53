"""One client's connection: what uvicorn does not bound. Knows bytes and time, no endpoint.

A connection that leaves its answer unread, never finishes a request's head, or sends a request
before the last one is answered, is cut. The request behind it then sees its client gone.
"""

from __future__ import annotations

import asyncio
from typing import Any

from uvicorn.config import Config
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

HEAD_TIMEOUT_S = 20.0
MAX_HEAD_BYTES = 64 * 1024


class Connection(HttpToolsProtocol):
    """uvicorn's protocol with a limit on each side; `send_timeout_s` is set by a subclass."""

    send_timeout_s = 30.0

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._unread: asyncio.TimerHandle | None = None
        self._head: asyncio.TimerHandle | None = None
        self._head_bytes = 0

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._expect_head()

    def connection_lost(self, exc: Exception | None) -> None:
        _cancel(self._unread)
        _cancel(self._head)
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        if self._head is not None:
            self._head_bytes += len(data)
            if self._head_bytes > MAX_HEAD_BYTES:
                self.transport.abort()

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._expect_head()

    def on_headers_complete(self) -> None:
        _cancel(self._head)
        self._head = None
        if self.cycle is not None and not self.cycle.response_complete:
            # Reading would stop while this request waits, and with it the sight of a client that
            # leaves: one request at a time, as clients do.
            self.transport.abort()
            return
        super().on_headers_complete()

    def pause_writing(self) -> None:
        """The client reads slower than it is written to: from here on its time counts."""
        super().pause_writing()
        self._unread = self.loop.call_later(self.send_timeout_s, self.transport.abort)

    def resume_writing(self) -> None:
        _cancel(self._unread)
        super().resume_writing()

    def _expect_head(self) -> None:
        if self._head is None:
            self._head_bytes = 0
            self._head = self.loop.call_later(HEAD_TIMEOUT_S, self.transport.abort)


def _cancel(timer: asyncio.TimerHandle | None) -> None:
    if timer is not None:
        timer.cancel()


def connection_class(send_timeout_s: float) -> type[Connection]:
    """The protocol of a server whose clients may leave an answer unread for that long."""
    return type("Connection", (Connection,), {"send_timeout_s": send_timeout_s})


def http_config(app: Any, send_timeout_s: float) -> Config:
    """uvicorn's settings: its own log lines and server header off, no websockets, no reload."""
    return Config(
        app,
        http=connection_class(send_timeout_s),
        ws="none",
        lifespan="off",
        loop="uvloop",
        log_config=None,
        access_log=False,
        server_header=False,
        proxy_headers=False,
        # Longer than clients keep their end: who closes first must not be who is written to next.
        timeout_keep_alive=75,
        timeout_graceful_shutdown=2,
    )

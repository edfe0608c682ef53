"""Server-sent events, written straight to ASGI. Knows no protocol's chunks, only bytes.

How long a client may leave them unread is the connection's business (`winnow.server.connection`):
`send` waits while the client's buffer is full, and so does whoever makes the events.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from starlette.types import Send

_HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    # Proxies that gather an answer before they pass it on would undo the streaming.
    (b"x-accel-buffering", b"no"),
]
DONE = b"data: [DONE]\n\n"


def event(data: Any) -> bytes:
    """One event whose data is JSON."""
    return framed([json.dumps(data, ensure_ascii=False).encode()])


def framed(chunks: Sequence[bytes]) -> bytes:
    """Events whose data are these, each without a line break."""
    return b"".join(b"data: " + chunk + b"\n\n" for chunk in chunks)


class EventStream:
    """An answer in pieces. Nothing is sent before the first event, so that until then a request
    can still be refused with a status."""

    def __init__(self, send: Send) -> None:
        self._send = send
        self.started = False

    async def write(self, events: bytes, *, last: bool = False) -> None:
        """Send whole events in one piece; `last` ends the answer with them."""
        if not self.started:
            self.started = True
            await self._send({"type": "http.response.start", "status": 200, "headers": _HEADERS})
        await self._send({"type": "http.response.body", "body": events, "more_body": not last})

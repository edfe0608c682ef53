"""One POST from its body to its answer, for a client that may leave or wait too long.

Knows no endpoint: what is answered is the endpoint's work, what bounds it is here.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable, Coroutine
from dataclasses import dataclass
from typing import Any, TypeVar

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from winnow.errors import WinnowError
from winnow.server.admission import Held
from winnow.server.failures import ApiError, failure_of
from winnow.server.limits import ClientGoneError, read_body
from winnow.server.record import RequestRecord
from winnow.server.serving import Serving
from winnow.server.stream import EventStream, event

T = TypeVar("T")
_SHORT_BYTES = 8 * 1024
"""A body that takes less time than a thread's start costs."""


@dataclass(frozen=True)
class Call:
    """One request whose body has been read."""

    serving: Serving
    record: RequestRecord
    held: Held
    """One place among the answers under way; a request for more takes the others."""
    body: bytes
    send: Send
    stream: EventStream

    async def prepared(self, prepare: Callable[[bytes], T]) -> T:
        """What `prepare` makes of the body; of a long one in a thread, so that nobody waits."""
        if len(self.body) <= _SHORT_BYTES:
            return prepare(self.body)
        return await asyncio.to_thread(prepare, self.body)

    async def reply(self, value: Any) -> None:
        """Answer with JSON, in one piece."""
        body = json.dumps(value, ensure_ascii=False, separators=(",", ":")).encode()
        headers = [
            (b"content-type", b"application/json"),
            (b"content-length", str(len(body)).encode()),
        ]
        await self.send({"type": "http.response.start", "status": 200, "headers": headers})
        await self.send({"type": "http.response.body", "body": body})


class Exchange(Response):
    """A response that takes over the request: reads its body, then runs `work`.

    It has the client's `receive` to itself, so from the body on it sees the client leave; `work` is
    then cancelled at once, as it is after the request's timeout. Its errors become answers, or the
    last event of a stream that has begun.
    """

    def __init__(self, serving: Serving, work: Callable[[Call], Coroutine[Any, Any, None]]) -> None:
        super().__init__()
        self._serving = serving
        self._work = work

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        serving = self._serving
        record: RequestRecord = scope["winnow.record"]
        with serving.admission.hold() as held:
            body = await read_body(scope, receive, serving.config.max_body_bytes)
            call = Call(serving, record, held, body, send, EventStream(send))
            try:
                await unless_gone(
                    receive, self._work(call), serving.cut, serving.config.request_timeout_s
                )
            except WinnowError as error:
                if not call.stream.started:
                    raise
                failure = failure_of(error)
                record.error = failure.code
                await call.stream.write(event(failure.body()), last=True)


async def unless_gone(
    receive: Receive, work: Awaitable[None], cut: asyncio.Future[ApiError], timeout_s: float
) -> None:
    """Run `work` to its end. The body must have been read.

    ClientGoneError once the client has left, what is in `cut` once it is set, ApiError 504 after
    `timeout_s`; `work` is then cancelled, and has ended when this raises.
    """
    working = asyncio.ensure_future(work)
    leaving = asyncio.ensure_future(_left(receive))
    try:
        done, _ = await asyncio.wait(
            (working, leaving, cut), timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED
        )
        if working in done:
            working.result()
        elif leaving in done:
            raise ClientGoneError
        elif cut in done:
            raise cut.result().again()
        else:
            raise ApiError(
                504,
                f"the answer took longer than {timeout_s:g} s and was ended: lower max_tokens, or "
                "start the server with a longer --request-timeout",
                code="request_timeout",
            )
    finally:
        leaving.cancel()
        working.cancel()
        await asyncio.gather(working, leaving, return_exceptions=True)


async def _left(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass

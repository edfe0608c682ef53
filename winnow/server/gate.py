"""Around every endpoint: ids, keys, the last word on errors, one line a request. Plain ASGI.

It reads no body, and knows no endpoint.
"""

from __future__ import annotations

import asyncio
import logging
import re

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from winnow.errors import WinnowError
from winnow.server.auth import ApiKeys
from winnow.server.failures import failure_of, internal_failure
from winnow.server.limits import ClientGoneError
from winnow.server.metrics import Metrics
from winnow.server.record import RequestRecord, request_id_of

log = logging.getLogger(__name__)

_UNPRINTABLE = re.compile(r"[^\x21-\x7e]")


class Gate:
    """Every request goes in and comes out here."""

    def __init__(self, app: ASGIApp, keys: ApiKeys, metrics: Metrics) -> None:
        self._app = app
        self._keys = keys
        self._metrics = metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """An error becomes an answer; where one has begun, it is raised and cuts the connection."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        clock = asyncio.get_running_loop().time
        headers = dict(scope["headers"])
        path = _UNPRINTABLE.sub("?", scope["path"])[:200]
        record = RequestRecord(
            request_id_of(headers.get(b"x-request-id")), scope["method"], path, clock()
        )
        scope["winnow.record"] = record

        async def answer(message: Message) -> None:
            if message["type"] == "http.response.start":
                record.status = message["status"]
                message["headers"] = [
                    *message.get("headers", ()),
                    (b"x-request-id", record.request_id.encode()),
                ]
            await send(message)

        try:
            await self._guarded(scope, receive, answer, headers, record)
        finally:
            if record.status >= 400 and not record.is_routine:
                self._metrics.refused(record.error or str(record.status))
            record.write(clock())

    async def _guarded(
        self,
        scope: Scope,
        receive: Receive,
        send: Send,
        headers: dict[bytes, bytes],
        record: RequestRecord,
    ) -> None:
        try:
            self._keys.check(scope["path"], headers.get(b"authorization"))
            # Of an answer to HEAD, uvicorn sends the headers alone.
            asked = {**scope, "method": "GET"} if scope["method"] == "HEAD" else scope
            await self._app(asked, receive, send)
        except ClientGoneError:
            record.error = "client_gone"
        except Exception as error:
            if isinstance(error, WinnowError):
                failure = failure_of(error)
            else:
                log.exception("request %s failed", record.request_id)
                failure = internal_failure(record.request_id)
            record.error = failure.code
            if record.status:
                # Too late for a status; an answer that is cut short is an error that clients see.
                raise
            await failure.response()(scope, receive, send)

"""What is checked of a body before it is parsed: its type, size and depth, and how long it takes.

Knows no field of any request.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Mapping

from starlette.types import Receive, Scope

from winnow.server.failures import ApiError

MAX_JSON_DEPTH = 64
"""Schemas of tools nest deepest in what clients send, and stay below 30 in practice."""
MAX_JSON_PARTS = 200_000
"""Objects, arrays and strings: millions of them in a few MB would take seconds to build."""
BODY_TIMEOUT_S = 30.0
_BIG_BYTES = 64 * 1024
_STRING_OR_BRACKET = re.compile(rb'"[^"\\]*(?:\\.[^"\\]*)*(?:"|$)|[\[{]|[\]}]', re.DOTALL)


class ClientGoneError(Exception):
    """The client left before its answer: there is nobody to answer."""


async def read_body(scope: Scope, receive: Receive, max_bytes: int) -> bytes:
    """The whole JSON body, not parsed yet.

    ApiError 415 for another content type, 413 past `max_bytes`, 408 for a body that does not come
    within `BODY_TIMEOUT_S`, 400 where `check_shape` raises it.
    """
    headers = dict(scope["headers"])
    _check_content_type(headers)
    length = headers.get(b"content-length", b"")
    if length.isdigit() and int(length) > max_bytes:
        raise _too_large(max_bytes)
    try:
        async with asyncio.timeout(BODY_TIMEOUT_S):
            body = await _collect(receive, max_bytes)
    except TimeoutError:
        raise ApiError(
            408, f"the body did not arrive within {BODY_TIMEOUT_S:g} s: send it at once"
        ) from None
    if len(body) > _BIG_BYTES:
        await asyncio.to_thread(check_shape, body)
    else:
        check_shape(body)
    return body


def check_shape(body: bytes) -> None:
    """ApiError 400 past `MAX_JSON_DEPTH` or `MAX_JSON_PARTS`; brackets inside strings are text."""
    if body.count(b"[") + body.count(b"{") <= MAX_JSON_DEPTH and body.count(b'"') < MAX_JSON_PARTS:
        return
    depth = parts = 0
    for token in _STRING_OR_BRACKET.finditer(body):
        first = body[token.start()]
        parts += first not in b"]}"
        if parts > MAX_JSON_PARTS:
            raise ApiError(
                400,
                f"the JSON body has more than {MAX_JSON_PARTS} objects, arrays and strings: send "
                "fewer, longer ones",
                code="json_too_many_parts",
            )
        if first in b"[{":
            depth += 1
            if depth > MAX_JSON_DEPTH:
                raise ApiError(
                    400,
                    f"the JSON body nests deeper than {MAX_JSON_DEPTH} levels: flatten it",
                    code="json_too_deep",
                )
        elif first in b"]}":
            depth -= 1


async def _collect(receive: Receive, max_bytes: int) -> bytes:
    body = bytearray()
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise ClientGoneError
        body += message.get("body", b"")
        if len(body) > max_bytes:
            raise _too_large(max_bytes)
        if not message.get("more_body", False):
            return bytes(body)


def _check_content_type(headers: Mapping[bytes, bytes]) -> None:
    sent = headers.get(b"content-type", b"").decode("latin-1")
    if sent.partition(";")[0].strip().lower() != "application/json":
        # Also what keeps a form on a foreign page from posting: it cannot send this type.
        raise ApiError(
            415, f"content-type is {sent[:100]!r}: send JSON with content-type application/json"
        )


def _too_large(max_bytes: int) -> ApiError:
    return ApiError(
        413,
        f"the body is larger than {max_bytes} bytes: shorten it, or start the server with a larger "
        "--max-body-bytes",
        code="body_too_large",
    )

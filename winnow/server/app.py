"""The application: which path is answered by what, behind which layers."""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from typing import Any

from fastapi import FastAPI, Request
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.responses import Response

from winnow import __version__
from winnow.server.auth import ApiKeys
from winnow.server.chat_request import ChatRequest
from winnow.server.chat_route import chat
from winnow.server.completion_request import CompletionRequest
from winnow.server.completion_route import complete
from winnow.server.exchange import Call, Exchange
from winnow.server.failures import http_failure
from winnow.server.gate import Gate
from winnow.server.openapi import Body, describe
from winnow.server.page_route import page_router
from winnow.server.serving import Serving
from winnow.server.status_route import status_router
from winnow.server.tokenize_route import (
    DetokenizeRequest,
    TokenizeRequest,
    detokenize,
    tokenize,
)

Work = Callable[[Call], Coroutine[Any, Any, None]]


def build_app(serving: Serving) -> FastAPI:
    """The ASGI application of one server."""
    # Its documentation pages load scripts from elsewhere; the document itself stays.
    app = FastAPI(
        title="Winnow", version=__version__, docs_url=None, redoc_url=None, redirect_slashes=False
    )
    app.include_router(status_router(serving))
    app.include_router(page_router())
    bodies: dict[str, Body] = {}
    posts: tuple[tuple[str, str, Body, Work], ...] = (
        ("/v1/chat/completions", "Continue a conversation", Body(ChatRequest, True), chat),
        ("/v1/completions", "Continue a prompt", Body(CompletionRequest, True), complete),
        ("/tokenize", "Token ids of a prompt", Body(TokenizeRequest), tokenize),
        ("/detokenize", "Text of token ids", Body(DetokenizeRequest), detokenize),
    )
    for path, summary, body, work in posts:
        bodies[path] = body
        app.post(path, summary=summary, response_class=Response)(_endpoint(serving, work))
    describe(app, bodies, closed=bool(serving.config.api_keys))
    app.add_exception_handler(HTTPException, _routing_error)
    app.add_middleware(Gate, keys=ApiKeys(serving.config.api_keys), metrics=serving.metrics)
    if serving.config.allow_origins:
        app.add_middleware(
            CORSMiddleware,
            allow_origins=serving.config.allow_origins,
            allow_methods=["GET", "POST"],
            allow_headers=["*"],
            expose_headers=["x-request-id", "retry-after"],
        )
    return app


def _endpoint(serving: Serving, work: Work) -> Callable[[], Coroutine[Any, Any, Response]]:
    async def endpoint() -> Response:
        return Exchange(serving, work)

    endpoint.__name__ = work.__name__
    return endpoint


async def _routing_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    failure = http_failure(error.status_code, request.method, request.url.path[:200])
    failure.headers |= error.headers or {}
    return failure.response()

"""The OpenAPI document. Bodies are read by hand: what they are is told here, from their models."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi
from pydantic import BaseModel
from pydantic.json_schema import models_json_schema

from winnow.server.auth import OPEN_PATHS
from winnow.server.failures import ERROR_SCHEMA

_REF = "#/components/schemas/{model}"
_ERROR = {"application/json": {"schema": {"$ref": "#/components/schemas/Error"}}}
_POST_ERRORS = {
    "400": "The request is wrong, or can never fit.",
    "408": "The body did not arrive in time.",
    "413": "The body is too large.",
    "415": "The body is not application/json.",
    "404": "There is no such model.",
    "429": "The queue is full; Retry-After says when to come back.",
    "500": "The server's fault; its log has the cause.",
    "503": "Loading, draining, or the engine has died.",
    "504": "The answer took too long.",
}


@dataclass(frozen=True)
class Body:
    """What a POST takes, and whether it may answer with a stream of events."""

    model: type[BaseModel]
    streams: bool = False


def describe(app: FastAPI, bodies: Mapping[str, Body], *, closed: bool) -> None:
    """Make `app` give out a document that says what `bodies` the POSTs take.

    `closed` servers want a key everywhere but on the open paths.
    """

    def openapi() -> dict[str, Any]:
        if app.openapi_schema is None:
            app.openapi_schema = _document(app, bodies, closed)
        return app.openapi_schema

    app.openapi = openapi  # type: ignore[method-assign]


def _document(app: FastAPI, bodies: Mapping[str, Body], closed: bool) -> dict[str, Any]:
    document = get_openapi(title=app.title, version=app.version, routes=app.routes)
    schemas = document.setdefault("components", {}).setdefault("schemas", {})
    for unused in ("HTTPValidationError", "ValidationError"):
        schemas.pop(unused, None)
    schemas["Error"] = dict(ERROR_SCHEMA)
    models = [(body.model, "validation") for body in bodies.values()]
    refs, definitions = models_json_schema(models, ref_template=_REF)  # type: ignore[arg-type]
    schemas.update(definitions.get("$defs", {}))
    for path, operations in document["paths"].items():
        for operation in operations.values():
            responses = operation["responses"]
            responses.pop("422", None)
            if path in bodies:
                body = bodies[path]
                schema = refs[(body.model, "validation")]
                operation["requestBody"] = {
                    "required": True,
                    "content": {"application/json": {"schema": schema}},
                }
                responses["200"]["content"] = _answers(body.streams)
                responses |= {
                    status: {"description": text} for status, text in _POST_ERRORS.items()
                }
            if closed and path not in OPEN_PATHS:
                operation["security"] = [{"key": []}]
                responses["401"] = {"description": "A key is wanted."}
            for status, response in responses.items():
                if int(status) >= 400:
                    response["content"] = _ERROR
    if closed:
        document["components"]["securitySchemes"] = {"key": {"type": "http", "scheme": "bearer"}}
    return document


def _answers(streams: bool) -> dict[str, Any]:
    kinds: dict[str, Any] = {"application/json": {"schema": {"type": "object"}}}
    if streams:
        kinds["text/event-stream"] = {"schema": {"type": "string"}}
    return kinds

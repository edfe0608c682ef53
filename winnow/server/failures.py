"""Errors as clients see them: a status and OpenAI's error object. Knows no endpoint.

A body never holds a traceback; what went wrong inside is in the log, under the request's id.
"""

from __future__ import annotations

import http
from collections.abc import Mapping
from typing import Any

from starlette.responses import JSONResponse

from winnow.errors import CapacityError, PeerError, RequestError, UnsupportedError, WinnowError

ERROR_SCHEMA: Mapping[str, Any] = {
    "type": "object",
    "required": ["error"],
    "properties": {
        "error": {
            "type": "object",
            "required": ["message", "type", "param", "code"],
            "properties": {
                "message": {"type": "string"},
                "type": {"type": "string"},
                "param": {"type": ["string", "null"]},
                "code": {"type": ["string", "null"]},
            },
        }
    },
}
"""JSON schema of every body whose status is 400 or above."""

_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    429: "rate_limit_error",
    503: "service_unavailable_error",
    504: "timeout_error",
}


_MAX_CHARACTERS = 2000


class ApiError(WinnowError):
    """An error with the HTTP status that it is answered with."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        code: str | None = None,
        param: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(_short(message))
        self.status = status
        self.code = code
        self.param = param
        self.headers = dict(headers or {})

    def again(self) -> ApiError:
        """The same error to be raised anew: one that is raised twice keeps both its histories."""
        return ApiError(
            self.status, str(self), code=self.code, param=self.param, headers=self.headers
        )

    def body(self) -> dict[str, Any]:
        """OpenAI's error object."""
        kind = "server_error" if self.status == 500 else "invalid_request_error"
        return {
            "error": {
                "message": str(self),
                "type": _TYPES.get(self.status, kind),
                "param": self.param,
                "code": self.code,
            }
        }

    def response(self) -> JSONResponse:
        """The whole answer, where none has begun."""
        return JSONResponse(self.body(), self.status, self.headers)


def _short(message: str) -> str:
    """A message may quote what the client sent, and so be as long as that."""
    if len(message) <= _MAX_CHARACTERS:
        return message
    return f"{message[:_MAX_CHARACTERS]}..."


def failure_of(error: WinnowError) -> ApiError:
    """The answer to an error of the tree in `winnow.errors`.

    What can never fit is the request's fault (400); a dead engine is not (503).
    """
    if isinstance(error, ApiError):
        return error
    param = getattr(error, "param", None)
    if isinstance(error, CapacityError):
        return ApiError(400, str(error), code="context_length_exceeded", param=param)
    if isinstance(error, RequestError | UnsupportedError):
        return ApiError(400, str(error), code=getattr(error, "code", None), param=param)
    if isinstance(error, PeerError):
        return ApiError(503, str(error), code="engine_unavailable")
    return ApiError(500, str(error))


def internal_failure(request_id: str) -> ApiError:
    """What a client learns of a mistake of ours: where to look, not what it was."""
    return ApiError(
        500, f"the server failed on request {request_id}: its log has the cause", code="internal"
    )


def http_failure(status: int, method: str, path: str) -> ApiError:
    """The answer of the router: no such path, or not this method."""
    if status == 404:
        return ApiError(
            404, f"there is no endpoint {path}: see docs/serving.md or GET /openapi.json"
        )
    if status == 405:
        return ApiError(405, f"{path} does not take {method}: see GET /openapi.json")
    return ApiError(status, http.HTTPStatus(status).phrase)

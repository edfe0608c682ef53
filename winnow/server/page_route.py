"""The page at /: three files of the package, and headers that keep it to itself."""

from __future__ import annotations

from importlib.resources import files

from fastapi import APIRouter
from starlette.responses import Response

_HEADERS = {
    "content-security-policy": "default-src 'none'; script-src 'self'; style-src 'self'; "
    "connect-src 'self'; img-src 'self' data:; base-uri 'none'; form-action 'none'; "
    "frame-ancestors 'none'",
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cache-control": "no-cache",
}
_FILES = {
    "/": ("index.html", "text/html"),
    "/page/style.css": ("style.css", "text/css"),
    "/page/app.js": ("app.js", "text/javascript"),
}


def page_router() -> APIRouter:
    """GET / and what it loads."""
    router = APIRouter(include_in_schema=False)
    for path, (name, media_type) in _FILES.items():
        content = (files("winnow.server") / "page" / name).read_bytes()
        router.add_api_route(path, _serve(content, media_type), response_class=Response)
    return router


def _serve(content: bytes, media_type: str):  # type: ignore[no-untyped-def]
    async def file() -> Response:
        return Response(content, media_type=media_type, headers=_HEADERS)

    return file

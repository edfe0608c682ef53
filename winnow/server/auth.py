"""Who may call what. Knows no request but its path and its headers."""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Sequence

from winnow.server.failures import ApiError

OPEN_PATHS = frozenset({"/", "/health", "/ready", "/metrics", "/page/style.css", "/page/app.js"})
"""What needs no key: probes and scrapers have none, and the page must load to ask for one."""


class ApiKeys:
    """The keys of one server; with none, everything is open."""

    def __init__(self, keys: Sequence[str]) -> None:
        # Digests have one length, so that a comparison takes as long for any key that is offered.
        self._digests = [_digest(key.encode()) for key in keys]

    def check(self, path: str, authorization: bytes | None) -> None:
        """ApiError 401 where a key is needed and the header does not carry one of ours."""
        if not self._digests or path in OPEN_PATHS:
            return
        scheme, _, offered = (authorization or b"").partition(b" ")
        given = _digest(offered.strip())
        # Every key is compared, so that the time does not tell which one came close.
        matches = [hmac.compare_digest(given, known) for known in self._digests]
        if scheme.lower() != b"bearer" or not any(matches):
            raise ApiError(
                401,
                "this server wants a key: send the header Authorization: Bearer KEY with one that "
                "its operator gave out",
                code="invalid_api_key",
                headers={"www-authenticate": "Bearer"},
            )


def _digest(key: bytes) -> bytes:
    return hashlib.sha256(key).digest()

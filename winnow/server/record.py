"""One HTTP request as the log tells it: who, what, how long. Knows no prompt and no answer."""

from __future__ import annotations

import logging
import re
import secrets
from dataclasses import dataclass, field

log = logging.getLogger("winnow.server.requests")

_EVERY_SECOND = frozenset({"/health", "/ready", "/metrics", "/stats"})
_SANE_ID = re.compile(rb"[A-Za-z0-9._:-]{1,128}")


def request_id_of(header: bytes | None) -> str:
    """The client's own id where it is short and plain, else a new one."""
    if header is not None and _SANE_ID.fullmatch(header):
        return header.decode()
    return secrets.token_hex(12)


@dataclass
class RequestRecord:
    """What is known of a request so far; times are seconds of the event loop's clock."""

    request_id: str
    method: str
    path: str
    began_s: float
    status: int = 0
    """0 where nothing was answered: the client had gone."""
    prompt_tokens: int = 0
    cached_tokens: int = 0
    completion_tokens: int = 0
    queued_s: float | None = None
    first_token_s: float | None = None
    """Both since `began_s`, of the first answer to get there."""
    finish_reasons: list[str] = field(default_factory=list)
    error: str | None = None

    @property
    def is_routine(self) -> bool:
        """A probe or a scrape: it comes every second, and its answer says nothing new."""
        return self.path in _EVERY_SECOND and self.status in (200, 503)

    def write(self, now: float) -> None:
        """The request's one line, unless it is routine."""
        if not self.is_routine:
            log.info("%s", self.line(now))

    def line(self, now: float) -> str:
        """`id method path status` and what else there is, as name=value."""
        parts = [self.request_id, self.method, self.path, str(self.status or "gone")]
        if self.prompt_tokens:
            parts += [
                f"prompt={self.prompt_tokens}",
                f"cached={self.cached_tokens}",
                f"completion={self.completion_tokens}",
            ]
        for name, seconds in (("queue", self.queued_s), ("ttft", self.first_token_s)):
            if seconds is not None:
                parts.append(f"{name}={seconds * 1000:.0f}ms")
        parts.append(f"total={(now - self.began_s) * 1000:.0f}ms")
        if self.finish_reasons:
            parts.append(f"finish={','.join(self.finish_reasons)}")
        if self.error:
            parts.append(f"error={self.error}")
        return " ".join(parts)

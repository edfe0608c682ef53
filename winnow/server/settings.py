"""What an operator may ask of the server, checked. Knows no request, engine or socket."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass

from winnow.errors import UnsupportedError

MAX_BODY_BYTES = 16 * 2**20
"""A prompt of a million tokens is about 5 MB as text and 7 MB as ids."""

_ORIGIN = re.compile(r"[a-z][a-z0-9+.-]*://[^\s/?#@A-Z]+")


@dataclass(frozen=True)
class ServerConfig:
    """How the server behaves towards its clients. UnsupportedError names a wrong value."""

    host: str = "127.0.0.1"
    """Only this machine, until an operator says otherwise."""
    port: int = 8000
    """0 takes a free one."""
    model_name: str = ""
    """What clients call the model; empty is the name of the checkpoint's directory."""
    api_keys: tuple[str, ...] = ()
    """Any one of them opens the closed endpoints; none leaves everything open."""
    allow_origins: tuple[str, ...] = ()
    """Origins whose pages may call the server; `*` is any."""
    max_queue: int = 256
    """Requests that may wait beside those that the engine runs at once."""
    max_n: int = 16
    """Answers to one request."""
    default_max_tokens: int = 4096
    """Where a request gives no limit: no more than this, nor than the model's length leaves."""
    max_body_bytes: int = MAX_BODY_BYTES
    request_timeout_s: float = 600.0
    drain_timeout_s: float = 30.0
    """How long running requests may go on after the first SIGTERM."""
    send_timeout_s: float = 30.0
    """How long a client may leave its answer unread."""
    log_prompts: bool = False

    def __post_init__(self) -> None:
        if not 0 <= self.port <= 65535:
            raise UnsupportedError(f"--port is {self.port}: give 0 to 65535; 0 takes a free one")
        for name, low in (("max_queue", 0), ("max_n", 1), ("default_max_tokens", 1)):
            if getattr(self, name) < low:
                raise UnsupportedError(
                    f"{_option(name)} is {getattr(self, name)}: give a whole number of at least "
                    f"{low}"
                )
        for name in ("request_timeout_s", "drain_timeout_s", "send_timeout_s"):
            seconds = getattr(self, name)
            if not (0 < seconds < math.inf):
                raise UnsupportedError(f"{_option(name)} is {seconds}: give seconds above 0")
        for key in self.api_keys:
            # Header values are Latin-1 without spaces at their ends; another key could never match.
            if not key or not key.isascii() or not key.isprintable() or key != key.strip():
                raise UnsupportedError(
                    "an API key is empty or holds characters that no header carries: use letters, "
                    "digits and punctuation"
                )
        for origin in self.allow_origins:
            if origin != "*" and not _ORIGIN.fullmatch(origin):
                raise UnsupportedError(
                    f"--allow-origin is {origin!r}, which no browser sends: give scheme, host and "
                    "port alone in small letters, as https://app.example or http://localhost:3000, "
                    "or * for any"
                )


def _option(name: str) -> str:
    return "--" + name.removesuffix("_s").replace("_", "-")

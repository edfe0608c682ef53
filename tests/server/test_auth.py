"""Who is let in."""

from __future__ import annotations

import pytest

from winnow.errors import UnsupportedError
from winnow.server.auth import OPEN_PATHS, ApiKeys
from winnow.server.failures import ApiError
from winnow.server.settings import ServerConfig

KEYS = ApiKeys(["first-key", "second key:with=signs"])


@pytest.mark.parametrize("header", [b"Bearer first-key", b"bearer second key:with=signs"])
def test_every_key_opens_and_the_scheme_is_spelt_anyhow(header: bytes) -> None:
    KEYS.check("/v1/models", header)


@pytest.mark.parametrize(
    "header",
    [
        None,
        b"",
        b"Bearer",
        b"Bearer ",
        b"first-key",
        b"Basic first-key",
        b"Bearer first-ke",
        b"Bearer first-key2",
        b"Bearer FIRST-KEY",
        b"Bearer \xff\x00",
    ],
)
def test_anything_else_is_401_and_says_how_to_ask(header: bytes | None) -> None:
    with pytest.raises(ApiError) as refused:
        KEYS.check("/v1/models", header)
    assert refused.value.status == 401
    assert refused.value.headers == {"www-authenticate": "Bearer"}
    assert "first-key" not in str(refused.value)


@pytest.mark.parametrize("path", sorted(OPEN_PATHS))
def test_probes_and_the_page_need_no_key(path: str) -> None:
    KEYS.check(path, None)


@pytest.mark.parametrize(
    "path", ["/v1/models", "/stats", "/tokenize", "/openapi.json", "//health", "/health/", "/nope"]
)
def test_every_other_path_needs_one(path: str) -> None:
    with pytest.raises(ApiError):
        KEYS.check(path, None)


def test_a_server_without_keys_is_open() -> None:
    ApiKeys([]).check("/v1/models", None)


@pytest.mark.parametrize(
    "origin",
    ["foo", "", "https://", "https://a.example/", "https://A.example", "a.example:80", "**",
     "https://a.example https://b.example", "null"],
)  # fmt: skip
def test_an_origin_that_no_browser_sends_is_refused_at_the_start(origin: str) -> None:
    with pytest.raises(UnsupportedError, match=r"--allow-origin is '.*as https://app\.example"):
        ServerConfig(allow_origins=(origin,))


def test_origins_and_a_star_are_taken() -> None:
    ServerConfig(allow_origins=("*", "http://localhost:3000", "http://[::1]:8", "https://a.b"))


@pytest.mark.parametrize("key", ["", " ", "a ", "schlüssel", "a\nb"])
def test_a_key_that_no_header_can_carry_is_refused_at_the_start(key: str) -> None:
    with pytest.raises(UnsupportedError, match="API key"):
        ServerConfig(api_keys=(key,))

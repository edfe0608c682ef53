"""What is refused before a body is parsed."""

from __future__ import annotations

import asyncio
import json
from contextlib import suppress
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from winnow.server import limits
from winnow.server.failures import ApiError
from winnow.server.limits import MAX_JSON_DEPTH, ClientGoneError, check_shape, read_body

JSON = [(b"content-type", b"application/json")]


def read(
    *messages: dict[str, Any], headers: list[tuple[bytes, bytes]] = JSON, most: int = 100
) -> bytes:
    """`read_body` of a client that sends these messages, and then nothing."""
    queue = list(messages)

    async def receive() -> dict[str, Any]:
        if not queue:
            await asyncio.sleep(60)
        return queue.pop(0)

    return asyncio.run(read_body({"headers": headers}, receive, most))


def piece(body: bytes, more: bool = False) -> dict[str, Any]:
    return {"type": "http.request", "body": body, "more_body": more}


def test_a_body_may_come_in_pieces_and_with_a_charset() -> None:
    headers = [(b"content-type", b"Application/JSON; charset=utf-8")]
    assert read(piece(b'{"a":', more=True), piece(b"1}"), headers=headers) == b'{"a":1}'


@pytest.mark.parametrize(
    "content_type", [b"", b"text/plain", b"application/x-www-form-urlencoded", b"application/jsonx"]
)
def test_another_content_type_is_refused_so_that_no_foreign_form_can_post(
    content_type: bytes,
) -> None:
    with pytest.raises(ApiError) as refused:
        read(piece(b"{}"), headers=[(b"content-type", content_type)])
    assert refused.value.status == 415


def test_a_body_that_says_it_is_too_large_is_refused_unread() -> None:
    with pytest.raises(ApiError, match="100 bytes") as refused:
        read(headers=[*JSON, (b"content-length", b"101")])
    assert refused.value.status == 413


def test_a_body_that_lies_about_its_size_is_refused_where_it_grows_too_large() -> None:
    with pytest.raises(ApiError) as refused:
        read(piece(b"x" * 60, more=True), piece(b"x" * 41, more=True))
    assert refused.value.status == 413


def test_a_body_that_never_ends_is_refused_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "BODY_TIMEOUT_S", 0.05)
    with pytest.raises(ApiError) as refused:
        read(piece(b"{", more=True))
    assert refused.value.status == 408


def test_a_client_that_leaves_within_its_body_is_nobody_to_answer() -> None:
    with pytest.raises(ClientGoneError):
        read(piece(b"{", more=True), {"type": "http.disconnect"})


def nested(depth: int, inner: str = "1") -> bytes:
    return ('{"a":[' * (depth // 2) + inner + "]}" * (depth // 2)).encode()


@pytest.mark.parametrize("size", [0, 200_000], ids=["short", "in a thread"])
def test_depth_is_counted_over_objects_and_arrays_and_not_in_strings(size: int) -> None:
    padding = json.dumps("]]}}" * (size // 4) + '[{"\\' * 50)
    assert read(piece(nested(MAX_JSON_DEPTH, padding)), most=10**6)
    with pytest.raises(ApiError, match=f"{MAX_JSON_DEPTH} levels") as refused:
        read(piece(nested(MAX_JSON_DEPTH + 2, padding)), most=10**6)
    assert refused.value.status == 400


@given(st.binary(max_size=200) | st.text('[]{}"\\a', max_size=200).map(str.encode))
def test_no_bytes_at_all_break_the_depth_check(body: bytes) -> None:
    with suppress(ApiError):
        check_shape(body)


def test_a_million_brackets_are_judged_at_the_first_that_is_too_deep() -> None:
    with pytest.raises(ApiError):
        check_shape(b"[" * 1_000_000)


@pytest.mark.parametrize("part", [b"[],", b'"",', b'{"":""},'])
def test_millions_of_small_parts_are_refused_before_they_are_built(part: bytes) -> None:
    with pytest.raises(ApiError, match="fewer"):
        check_shape(b"[" + part * 1_000_000 + b"1]")


def test_a_long_text_or_list_of_ids_is_one_part() -> None:
    check_shape(json.dumps({"prompt": '[{"' * 1_000_000}).encode())
    check_shape(json.dumps({"prompt": list(range(1_000_000))}).encode())

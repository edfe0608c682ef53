"""The request's id and its line in the log."""

from __future__ import annotations

import logging

import pytest

from winnow.server.record import RequestRecord, request_id_of


@pytest.mark.parametrize("header", [b"abc-123", b"a" * 128, b"trace:1.2_3"])
def test_a_plain_id_of_the_client_is_kept(header: bytes) -> None:
    assert request_id_of(header) == header.decode()


@pytest.mark.parametrize(
    "header", [None, b"", b"a" * 129, b"a b", b"a\nb", b"\xff", "é".encode(), b"a;b", b"%0a"]
)
def test_any_other_is_replaced_so_that_no_log_line_can_be_forged(header: bytes | None) -> None:
    made = request_id_of(header)
    assert made.isalnum()
    assert made != request_id_of(header)


def test_the_line_says_what_is_known_and_nothing_else() -> None:
    record = RequestRecord("id1", "POST", "/v1/completions", 10.0, status=200)
    record.prompt_tokens, record.cached_tokens, record.completion_tokens = 300, 256, 7
    record.queued_s, record.first_token_s, record.finish_reasons = 0.002, 0.0456, ["stop"]
    assert record.line(10.5) == (
        "id1 POST /v1/completions 200 prompt=300 cached=256 completion=7 queue=2ms ttft=46ms "
        "total=500ms finish=stop"
    )
    gone = RequestRecord("id2", "POST", "/tokenize", 10.0, error="client_gone")
    assert gone.line(10.1) == "id2 POST /tokenize gone total=100ms error=client_gone"


def test_probes_are_not_logged_unless_they_go_wrong(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        RequestRecord("a", "GET", "/health", 0.0, status=200).write(1.0)
        RequestRecord("x", "GET", "/ready", 0.0, status=503).write(1.0)
        RequestRecord("b", "GET", "/metrics", 0.0, status=500).write(1.0)
        RequestRecord("c", "GET", "/v1/models", 0.0, status=200).write(1.0)
    assert [line.split()[0] for line in caplog.messages] == ["b", "c"]

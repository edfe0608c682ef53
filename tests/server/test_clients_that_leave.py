"""Clients that leave, do not read, or do not finish: nobody else pays for them."""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import Iterator

import pytest
from support.http_server import Running, chat_body, eventually, running

from winnow.server import connection
from winnow.server.settings import ServerConfig

SEND_TIMEOUT_S = 0.5


@pytest.fixture(scope="module")
def shared() -> Iterator[Running]:
    with running(ServerConfig(send_timeout_s=SEND_TIMEOUT_S, max_queue=4)) as server:
        yield server


@pytest.fixture
def server(shared: Running) -> Iterator[Running]:
    engine = shared.engine
    engine.aborted.clear()
    yield shared
    engine.held, engine.gap_s, engine.copies = False, 0.0, 1
    eventually(lambda: shared.serving.admission.in_flight == 0)
    assert not engine.live


def post(path: str, body: object, *, close: bool = False) -> bytes:
    data = json.dumps(body).encode()
    head = f"POST {path} HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
    head += f"content-length: {len(data)}\r\n"
    return f"{head}{'connection: close' if close else 'x-a: b'}\r\n\r\n".encode() + data


@pytest.mark.parametrize("stream", [True, False], ids=["streamed", "whole"])
@pytest.mark.parametrize("n", [1, 3])
def test_who_leaves_ends_every_answer_that_was_for_them(
    server: Running, stream: bool, n: int
) -> None:
    aborted = server.metric("winnow_request_success_total")
    server.engine.held = not stream
    server.engine.gap_s = 0.01
    with server.connect() as client:
        client.sendall(post("/v1/chat/completions", chat_body(stream=stream, n=n)))
        if stream:
            assert b"200 OK" in client.recv(4096)
        eventually(lambda: len(server.engine.live) == n)
    eventually(lambda: len(server.engine.aborted) == n)
    eventually(lambda: server.serving.admission.in_flight == 0)
    assert server.metric("winnow_request_success_total") - aborted == n


def test_who_leaves_within_a_body_holds_no_place(server: Running) -> None:
    with server.connect() as client:
        client.sendall(post("/v1/completions", {"prompt": "hello"})[:-5])
        eventually(lambda: server.serving.admission.in_flight == 1)
    eventually(lambda: server.serving.admission.in_flight == 0)


@pytest.mark.parametrize("stream", [True, False], ids=["streamed", "whole"])
def test_a_request_before_the_last_is_answered_ends_both(server: Running, stream: bool) -> None:
    server.engine.gap_s = 0.01
    request = post("/v1/completions", {"prompt": "hello", "stream": stream})
    with server.connect() as client:
        client.sendall(request)
        eventually(lambda: server.engine.live)
        client.sendall(request)
        eventually(lambda: server.engine.aborted)
        assert b"[DONE]" not in what_is_left(client)


def test_a_connection_is_kept_for_the_next_request(server: Running) -> None:
    stream = post("/v1/completions", {"prompt": "a", "stream": True, "max_tokens": 2})
    with server.connect() as client:
        for _ in range(3):
            client.sendall(stream)
            text = b""
            while not text.endswith(b"0\r\n\r\n"):
                text += client.recv(4096)
            assert b"[DONE]" in text
        client.sendall(post("/tokenize", {"prompt": "bc"}, close=True))
        assert b'"count":2' in read_all(client)


def test_who_never_reads_is_cut_and_what_waits_for_them_stays_small(server: Running) -> None:
    server.engine.copies = 4000
    with server.connect(receive_buffer=4096) as client:
        body = {"prompt": "hello", "stream": True, "max_tokens": 4000}
        client.sendall(post("/v1/completions", body))
        eventually(lambda: server.engine.aborted)
        # 20,000 bytes a token: had the server taken them all, it would hold 80 MB.
        tokens = server.metric("winnow_generation_tokens_total")
        assert tokens < 2000
        assert b"[DONE]" not in what_is_left(client)


def test_who_reads_slowly_but_reads_gets_everything(server: Running) -> None:
    server.engine.copies = 4000
    with server.connect(receive_buffer=16384) as client:
        body = {"prompt": "hello", "stream": True, "max_tokens": 200}
        client.sendall(post("/v1/completions", body, close=True))
        text = read_all(client, pause_s=0.0005)
    assert text.count(b"word ") == 4000 * 200
    assert b"data: [DONE]" in text
    assert not server.engine.aborted


def test_a_head_that_does_not_end_is_cut_by_time_and_by_size(
    server: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connection, "HEAD_TIMEOUT_S", 0.2)
    for begun in (b"", b"POST /v1/comp", b"GET / HTTP/1.1\r\nx: y\r\n"):
        with server.connect() as client:
            client.sendall(begun)
            assert ended(client)
    monkeypatch.setattr(connection, "HEAD_TIMEOUT_S", 60.0)
    with server.connect() as client:
        client.sendall(b"GET / HTTP/1.1\r\nx: " + b"y" * (connection.MAX_HEAD_BYTES + 1))
        assert ended(client)


def test_what_is_no_http_gets_400(server: Running) -> None:
    with server.connect() as client:
        client.sendall(b"\x16\x03\x01\x02\x00 not http\r\n\r\n")
        assert b"400" in read_all(client)


def test_an_answer_that_takes_too_long_is_ended_with_an_error_that_says_so() -> None:
    with running(ServerConfig(request_timeout_s=0.3)) as server:
        server.engine.held = True
        response = server.post("/v1/completions", {"prompt": "a"})
        assert response.status_code == 504
        assert "0.3 s" in response.json()["error"]["message"]
        server.engine.held, server.engine.gap_s = False, 0.05
        response = server.post("/v1/completions", {"prompt": "a", "stream": True})
        assert response.status_code == 200
        *_, last, end = response.text.split("\n\n")
        assert end == ""
        assert json.loads(last.removeprefix("data: "))["error"]["code"] == "request_timeout"
        assert len(server.engine.aborted) == 2


def test_the_death_of_the_engine_ends_a_stream_with_an_error(server: Running) -> None:
    with running() as mortal:
        mortal.engine.gap_s = 0.01
        threading.Timer(0.2, lambda: setattr(mortal.engine, "is_dead", True)).start()
        response = mortal.post("/v1/completions", {"prompt": "a", "stream": True})
        last = json.loads(response.text.split("\n\n")[-2].removeprefix("data: "))
        assert last["error"]["code"] == "engine_unavailable"
        assert "[DONE]" not in response.text


def test_a_full_queue_answers_429_and_takes_the_next_when_there_is_room(server: Running) -> None:
    with running(ServerConfig(max_queue=1)) as full:
        full.engine.held = True
        threads = [
            threading.Thread(target=full.post, args=("/v1/completions", {"prompt": "a", "n": n}))
            for n in (2, 2, 1)
        ]
        for thread in threads:
            thread.start()
        eventually(lambda: full.serving.admission.in_flight == 5)
        refused = full.post("/v1/chat/completions", chat_body())
        assert refused.status_code == 429
        assert 1 <= int(refused.headers["retry-after"]) <= 60
        assert refused.json()["error"]["code"] == "queue_full"
        assert full.client.get("/health").status_code == 200
        full.engine.held = False
        for thread in threads:
            thread.join()
        assert full.post("/v1/chat/completions", chat_body(max_tokens=1)).is_success


def read_all(client: socket.socket, pause_s: float = 0.0) -> bytes:
    """Everything until the server closes."""
    text = bytearray()
    while piece := client.recv(65536):
        text += piece
        if pause_s:
            threading.Event().wait(pause_s)
    return bytes(text)


def what_is_left(client: socket.socket) -> bytes:
    """What was under way when the server closed or reset the connection."""
    text = b""
    try:
        while piece := client.recv(65536):
            text += piece
    except ConnectionResetError:
        pass
    return text


def ended(client: socket.socket) -> bool:
    """Whether the server closes or resets the connection, having said nothing."""
    try:
        return client.recv(1) == b""
    except ConnectionResetError:
        return True

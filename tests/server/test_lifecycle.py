"""A server's life from start to exit status: signals, drain, the engine's death."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest
from support.command import winnow
from support.http_server import eventually

from winnow.server.run import CUT_SHORT, ENGINE_DIED

TESTS = Path(__file__).parents[1]


class FakeServed:
    """`winnow serve` over a fake engine, in a process."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self.process = process
        self.lines: list[str] = []
        self._reader = threading.Thread(target=self._read)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stderr is not None
        self.lines.extend(iter(self.process.stderr.readline, ""))

    def url(self) -> str:
        """Where it listens."""
        return eventually(
            lambda: next(
                (m[0] for m in map(re.compile(r"http://[\d.:]+").search, self.lines) if m), ""
            )
        )

    def ready(self) -> str:
        """Where it listens, once it answers."""
        url = self.url()
        eventually(lambda: httpx.get(f"{url}/ready").status_code == 200)
        return url

    def exit_status(self, within_s: float = 20.0) -> int:
        status = self.process.wait(within_s)
        self._reader.join()
        return status


@contextmanager
def served(
    model: Path, *options: str, load_s: float = 0.0, gap_s: float = 0.02, closed: str = ""
) -> Iterator[FakeServed]:
    """Start a server on a free port; it is killed at the end if it has not ended.

    `closed` are redirections of a shell that close some of its descriptors.
    """
    words = [str(model), str(load_s), str(gap_s), "--port", "0", *options]
    shell = ["sh", "-c", f'exec "$0" "$@" {closed}']
    process = subprocess.Popen(
        [*shell, sys.executable, "-m", "support.fake_serve", *words],
        stderr=subprocess.PIPE,
        text=True,
        cwd=TESTS,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    server = FakeServed(process)
    try:
        yield server
    finally:
        process.kill()
        server.exit_status()
        assert process.stderr is not None
        process.stderr.close()


@contextmanager
def streaming(url: str, tokens: int) -> Iterator[Iterator[str]]:
    """The lines of a stream that has begun."""
    body = {"prompt": "a", "stream": True, "max_tokens": tokens}
    with httpx.stream("POST", f"{url}/v1/completions", json=body, timeout=30) as response:
        lines = response.iter_lines()
        assert next(lines).startswith("data: ")
        yield lines


def last_event(lines: Iterator[str]) -> str:
    return [line for line in lines if line][-1].removeprefix("data: ")


def test_a_term_lets_running_answers_finish_refuses_new_ones_and_ends_with_0(tiny: Path) -> None:
    with served(tiny) as server:
        url = server.ready()
        with httpx.Client(base_url=url) as old, streaming(url, 60) as lines:
            assert old.get("/health").status_code == 200
            server.process.send_signal(signal.SIGTERM)
            eventually(lambda: old.get("/ready").status_code == 503)
            for refused in (
                old.post("/v1/completions", json={"prompt": "a"}),
                httpx.post(f"{url}/v1/completions", json={"prompt": "a"}),
            ):
                assert refused.status_code == 503
                assert refused.json()["error"]["code"] == "draining"
            assert last_event(lines) == "[DONE]"
        assert server.exit_status() == 0


@pytest.mark.parametrize("closed", [">&-", "<&- >&-"])
def test_a_server_whose_output_is_closed_starts_since_it_prints_nothing(
    tiny: Path, closed: str
) -> None:
    with served(tiny, closed=closed) as server:
        assert httpx.get(f"{server.ready()}/health").status_code == 200
        output = os.stat(f"/proc/{server.process.pid}/fd/1")
        assert output.st_rdev == os.stat(os.devnull).st_rdev
        server.process.send_signal(signal.SIGTERM)
        assert server.exit_status() == 0


def test_an_answer_that_outlives_the_drain_is_cut_with_an_error(tiny: Path) -> None:
    with served(tiny, "--drain-timeout", "0.3") as server, streaming(server.ready(), 4000) as lines:
        server.process.send_signal(signal.SIGTERM)
        assert json.loads(last_event(lines))["error"]["code"] == "draining"
        assert server.exit_status() == 0


def test_a_second_signal_does_not_wait_for_the_drain(tiny: Path) -> None:
    with served(tiny) as server, streaming(server.ready(), 4000) as lines:
        server.process.send_signal(signal.SIGINT)
        eventually(lambda: any("draining" in line for line in server.lines))
        server.process.send_signal(signal.SIGINT)
        assert json.loads(last_event(lines))["error"]["code"] == "draining"
        assert server.exit_status(5) == CUT_SHORT


def test_the_engines_death_is_told_to_clients_and_operator_and_ends_the_server(tiny: Path) -> None:
    with served(tiny) as server, streaming(server.ready(), 4000) as lines:
        server.process.send_signal(signal.SIGUSR1)
        assert json.loads(last_event(lines))["error"]["code"] == "engine_unavailable"
        assert server.exit_status(5) == ENGINE_DIED
        assert "winnow: the engine's process was ended by SIGKILL\n" in server.lines


def test_a_term_while_the_model_loads_ends_with_0(tiny: Path) -> None:
    with served(tiny, load_s=60.0) as server:
        url = server.url()
        eventually(lambda: "50%" in httpx.get(f"{url}/ready").text)
        assert httpx.post(f"{url}/v1/completions", json={"prompt": "a"}).status_code == 503
        server.process.send_signal(signal.SIGTERM)
        assert server.exit_status(10) == 0


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["--port", "70000"], "70000"),
        (["--max-queue", "-1"], "-1"),
        (["--request-timeout", "nan"], "nan"),
        (["--api-key", ""], "API key"),
        (["--api-key-file", "/nowhere/keys"], "/nowhere/keys"),
        (["--kv-format", "fp5"], "fp5"),
        (["--max-running", "0"], "max_running"),
    ],
)
def test_a_wrong_option_is_a_sentence_before_anything_starts(
    tiny: Path, words: list[str], sentence: str
) -> None:
    result = winnow("serve", tiny, *words)
    assert result.status in (1, 2)
    assert sentence in result.err
    assert "listening" not in result.err


def test_a_file_without_keys_does_not_open_the_server(tiny: Path, tmp_path: Path) -> None:
    (tmp_path / "keys").write_text("\n  \n")
    result = winnow("serve", tiny, "--api-key-file", tmp_path / "keys")
    assert result.status == 1
    assert "no API key" in result.err


def test_an_address_that_is_taken_is_a_sentence(tiny: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        result = winnow("serve", tiny, "--port", str(port))
    says = f"winnow: cannot listen on 127.0.0.1 port {port}, it is in use: end .* --port; 0 takes"
    assert result.status == 1
    assert re.match(says, result.err), result.err


def test_an_address_that_is_not_this_machines_is_a_sentence(tiny: Path) -> None:
    result = winnow("serve", tiny, "--host", "203.0.113.9", "--port", "0")
    assert result.status == 1
    assert re.fullmatch(r"winnow: .*203.0.113.9 port 0, [^(]*: give --host an .*\n", result.err)


def test_a_variable_for_a_key_that_is_empty_is_named_and_does_not_open_the_server(
    tiny: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WINNOW_API_KEY", "")
    result = winnow("serve", tiny, "--port", "0")
    assert result.status == 1
    assert result.err == (
        "winnow: WINNOW_API_KEY is set and empty: put a key in it, or unset it to do without\n"
    )


def test_a_model_that_is_not_there_is_a_sentence(tmp_path: Path) -> None:
    result = winnow("serve", tmp_path / "none", "--port", "0")
    assert result.status == 1
    assert "none" in result.err.splitlines()[-1]

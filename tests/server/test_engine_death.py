"""kill -9 of the engine's process while it answers."""

from __future__ import annotations

import json
import os
import signal
import threading
import time
from pathlib import Path

import httpx
from support.served import Served

from winnow.server.run import ENGINE_DIED


def test_the_death_of_the_process_reaches_every_client_and_ends_the_server(tiny: Path) -> None:
    body = {"prompt": "a", "max_tokens": 3000, "ignore_eos": True}
    whole: list[httpx.Response] = []
    with Served(str(tiny), "--num-pages", "64", threads=1) as server:
        url = f"{server.url}/v1/completions"
        waiting = threading.Thread(
            target=lambda: whole.append(httpx.post(url, json=body, timeout=60))
        )
        waiting.start()
        with httpx.stream("POST", url, json={**body, "stream": True}, timeout=60) as stream:
            lines = stream.iter_lines()
            assert next(lines).startswith("data: ")
            while server.metrics()["winnow_num_requests_running"] < 2:
                time.sleep(0.05)
            os.kill(engine_of(server), signal.SIGKILL)
            killed = time.monotonic()
            last = [line for line in lines if line][-1]
        waiting.join()
        assert server.process.wait(20) == ENGINE_DIED
        # A second is promised; a machine with two busy cores may take a few.
        assert time.monotonic() - killed < 10
        assert "SIGKILL" in json.loads(last.removeprefix("data: "))["error"]["message"]
        assert whole[0].status_code == 503
        assert whole[0].json()["error"]["code"] == "engine_unavailable"
        assert "SIGKILL" in server.log()


def engine_of(server: Served) -> int:
    """The process that runs the engine's worker."""
    for pid in server.pids():
        if b"winnow.engine.worker" in Path(f"/proc/{pid}/cmdline").read_bytes():
            return pid
    raise AssertionError("no engine process")

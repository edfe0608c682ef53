"""A server in a process of its own, for tests and benchmarks that talk to it over HTTP."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from pathlib import Path
from types import TracebackType
from typing import Self

READY_S = 120.0


class Served:
    """`winnow serve MODEL OPTIONS` on a free port, ready to answer when the context is entered."""

    def __init__(self, model: str, *options: str, threads: int | None = None) -> None:
        self._command = [sys.executable, "-m", "winnow", "serve", model, *options]
        self._environment = dict(os.environ)
        if threads is not None:
            self._environment["OMP_NUM_THREADS"] = str(threads)
        self.port = _free_port()
        self.url = f"http://127.0.0.1:{self.port}"

    def __enter__(self) -> Self:
        self._log = tempfile.TemporaryFile("w+")
        self.process = subprocess.Popen(
            [*self._command, "--port", str(self.port)],
            stdout=self._log,
            stderr=subprocess.STDOUT,
            env=self._environment,
        )
        try:
            self._wait_until_ready()
        except BaseException:
            self.__exit__(None, None, None)
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
            try:
                self.process.wait(30)
            except subprocess.TimeoutExpired:
                for pid in self.pids():
                    os.kill(pid, signal.SIGKILL)
                self.process.wait()
        self._log.close()

    def log(self) -> str:
        """What the server has written so far."""
        self._log.flush()
        self._log.seek(0)
        return self._log.read()

    def pids(self) -> list[int]:
        """The server's process and all that it started."""
        parents: dict[int, int] = {}
        for entry in Path("/proc").iterdir():
            if entry.name.isdigit():
                try:
                    stat = (entry / "stat").read_text()
                except OSError:
                    continue  # ended meanwhile
                parents[int(entry.name)] = int(stat.rpartition(")")[2].split()[1])
        family = [self.process.pid]
        for pid in family:
            family += [child for child, parent in parents.items() if parent == pid]
        return family

    def resident_bytes(self) -> int:
        """Memory of all its processes."""
        total = 0
        for pid in self.pids():
            try:
                pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
            except OSError:
                continue
            total += pages * os.sysconf("SC_PAGE_SIZE")
        return total

    def metrics(self) -> dict[str, float]:
        """Each metric's sum over its labels."""
        with urllib.request.urlopen(f"{self.url}/metrics", timeout=30) as reply:
            lines = reply.read().decode().splitlines()
        values: dict[str, float] = {}
        for line in lines:
            if line and not line.startswith("#"):
                name, _, value = line.rpartition(" ")
                name = name.partition("{")[0]
                values[name] = values.get(name, 0.0) + float(value)
        return values

    def idle_metrics(self, within_s: float = 20.0) -> dict[str, float]:
        """Metrics once nothing runs or waits; the last ones seen if that never comes."""
        end = time.monotonic() + within_s
        while True:
            values = self.metrics()
            busy = values["winnow_num_requests_running"] + values["winnow_num_requests_waiting"]
            if (not busy and not values["winnow_pages_used"]) or time.monotonic() > end:
                return values
            time.sleep(0.1)

    def _wait_until_ready(self) -> None:
        end = time.monotonic() + READY_S
        while time.monotonic() < end:
            if self.process.poll() is not None:
                break
            try:
                with urllib.request.urlopen(f"{self.url}/ready", timeout=5):
                    return
            except OSError:
                time.sleep(0.1)
        raise AssertionError(f"the server did not become ready:\n{self.log()}")


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])

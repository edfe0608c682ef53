"""Running AIPerf, the load generator: finding it, its command line, its failure in one sentence.

Decides nothing about workloads and reads no export.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from winnow.errors import PeerError, RequestError, UnsupportedError

_POLL_S = "0.1"
"""How often AIPerf reads /metrics. Its counters of a window are those between two readings, so
this is how far the window of the prefix-hit rate may be off."""
_TURNS_PER_S = 500
"""In a closed loop without a rate AIPerf 0.13 looks for a free user again and again, which takes a
whole core, and from a server on the same machine. Looking this often costs a user 2 ms at most."""
_TELLING = 3
"""Lines of AIPerf's log that are worth showing."""


@dataclass(frozen=True)
class Load:
    """How hard to push: a closed loop of `concurrency` users, or Poisson arrivals at `rate` a
    second with at most `concurrency` in flight, if that is given."""

    concurrency: int | None = None
    rate: float | None = None

    def conditions(self) -> dict[str, Any]:
        """What a record says of it."""
        if self.rate is None:
            return {"concurrency": self.concurrency}
        return {"concurrency": self.concurrency, "request_rate": self.rate}


def find() -> str:
    """The path of the aiperf command; UnsupportedError says how to install it."""
    beside = Path(sys.executable).with_name("aiperf")
    found = str(beside) if beside.is_file() else shutil.which("aiperf")
    if found is None:
        raise UnsupportedError(
            "winnow bench serving drives AIPerf, which is not installed: run "
            "pip install 'winnow-llm[bench]', or put another installation's aiperf on PATH"
        )
    return found


def arguments(
    url: str,
    model: str,
    tokenizer: str,
    load: Load,
    options: Mapping[str, Any],
    counts: Mapping[str, int],
    extra: Sequence[str],
    seed: int,
    artifacts: Path,
) -> list[str]:
    """Everything behind `aiperf`.

    `options` and `counts` are names and values of AIPerf's options, True for one without a value;
    `extra` are fields of the request body, as key:value.
    """
    words = ["profile", "--url", url, "--model", model, "--tokenizer", tokenizer]
    words += ["--endpoint-type", "chat", "--streaming", "--use-server-token-count"]
    for name, value in {**options, **counts}.items():
        words += [f"--{name}"] if value is True else [f"--{name}", str(value)]
    if load.concurrency is not None:
        words += ["--concurrency", str(load.concurrency)]
    if load.rate is not None:
        words += ["--request-rate", str(load.rate), "--arrival-pattern", "poisson"]
    else:
        words += ["--request-rate", str(_TURNS_PER_S), "--arrival-pattern", "constant"]
    if extra:
        words += ["--extra-inputs", *extra]
    words += ["--random-seed", str(seed), "--output-artifact-dir", str(artifacts)]
    return [*words, "--export-level", "records", "--ui", "none", "--no-gpu-telemetry"]


def profile(words: Sequence[str], artifacts: Path, timeout_s: float) -> None:
    """Run AIPerf to its end. PeerError with what it said last if it fails or takes too long."""
    artifacts.mkdir(parents=True, exist_ok=True)
    log = artifacts / "aiperf.log"
    environment = {**os.environ, "AIPERF_SERVER_METRICS_COLLECTION_INTERVAL": _POLL_S}
    with log.open("w", encoding="utf-8") as lines:
        try:
            done = subprocess.run(
                [find(), *words],
                stdout=lines,
                stderr=subprocess.STDOUT,
                env=environment,
                timeout=timeout_s,
            )
        except subprocess.TimeoutExpired as error:
            raise PeerError(
                f"AIPerf was not done after {timeout_s:g} s and was stopped: lower --requests or "
                f"raise --timeout; its log is {log}"
            ) from error
        except OSError as error:
            raise RequestError(f"aiperf cannot be started: {error}") from error
    if done.returncode != 0:
        raise PeerError(f"AIPerf ended with status {done.returncode}: {_last_words(log)} ({log})")


def _last_words(log: Path) -> str:
    """The last lines that name an error, or the last lines."""
    lines = [line.strip(" │╭╰─╮╯") for line in log.read_text("utf-8", "replace").splitlines()]
    told = [line for line in lines if line]
    errors = [line for line in told if "error" in line.lower()]
    return " / ".join((errors or told)[-_TELLING:])[:600] or "it said nothing"

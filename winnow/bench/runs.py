"""One run of a load generator: every request's timing, and the records that follow from them.

Owns the definitions of the serving metrics. Knows no tool and no server.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from winnow.bench.record import Record
from winnow.errors import RequestError

TTFT = "time to first token"
ITL = "inter-token latency"
E2E = "request latency"
SPEED = "tokens per second per user"
TOTAL = "total tokens per second"
PER_DEVICE = "total tokens per second per device"
OUTPUT_PER_DEVICE = "output tokens per second per device"
GOODPUT = "goodput"
HIT_RATE = "prefix-hit rate"
FAILED = "failed requests"


@dataclass(frozen=True)
class Timing:
    """One request that was answered. `start_s` counts from the start of its run's window.

    `itl_ms` is the mean interval between its tokens, (latency - time to first token) / (output
    tokens - 1); None with fewer than two tokens.
    """

    start_s: float
    ttft_ms: float
    e2e_ms: float
    input_tokens: int
    output_tokens: int

    @property
    def itl_ms(self) -> float | None:
        if self.output_tokens < 2:
            return None
        return (self.e2e_ms - self.ttft_ms) / (self.output_tokens - 1)

    def meets(self, objective: Mapping[str, float]) -> bool:
        """Whether it is within every bound; an interval that does not exist is."""
        own = {"ttft_ms": self.ttft_ms, "itl_ms": self.itl_ms or 0.0, "e2e_ms": self.e2e_ms}
        return all(own[name] <= bound for name, bound in objective.items())


@dataclass(frozen=True)
class Run:
    """What a load generator measured at one load.

    `duration_s` is its window, to which `requests` belong; `warmup` were sent before. `load` is
    {"concurrency": n} or, in an open loop, {"concurrency": None, "request_rate": r}. `prefix` is
    (hit tokens, query tokens) that the server's counters rose by in the window, if known.
    """

    tool: str
    run: str
    duration_s: float
    requests: tuple[Timing, ...]
    warmup: tuple[Timing, ...]
    failed: int
    load: Mapping[str, Any]
    prefix: tuple[float, float] | None = None


def serving_records(
    run: Run,
    workload: Mapping[str, Any],
    conditions: Mapping[str, Any],
    machine: Mapping[str, Any],
    software: Mapping[str, Any],
    commit: str,
) -> list[Record]:
    """The records of one run, those of its warm-up apart under the workload's phase.

    `conditions` are all but the load, which the run knows. RequestError if nothing was answered,
    or the conditions are incomplete.
    """
    if not run.requests:
        raise RequestError(
            f"{run.tool} measured no answered request ({run.failed} failed): look at its log"
        )
    whole = {**conditions, **run.load}
    shared: dict[str, Any] = {
        "level": "serving",
        "machine": machine,
        "software": {**software, "client": run.tool},
        "commit": commit,
        "conditions": whole,
        "run": run.run,
    }

    def record(phase: str, what: str, unit: str, samples: Sequence[float]) -> Record:
        return Record(
            what=what,
            unit=unit,
            samples=tuple(samples),
            workload={**workload, "phase": phase},
            **shared,
        )

    rows = [("measured", *row) for row in _each(run.requests)]
    rows += [("measured", *row) for row in _whole(run, whole)]
    rows += [("warm-up", *row) for row in _each(run.warmup)]
    return [record(*row) for row in rows if row[3]]


_Row = tuple[str, str, Sequence[float]]


def _each(timings: Sequence[Timing]) -> list[_Row]:
    """Metrics with one sample a request, in order of their starts; the last two only of those with
    two tokens or more."""
    timings = sorted(timings, key=lambda t: t.start_s)
    intervals = [t.itl_ms for t in timings if t.itl_ms is not None]
    return [
        ("request start", "s", [t.start_s for t in timings]),
        ("input tokens", "tokens", [t.input_tokens for t in timings]),
        ("output tokens", "tokens", [t.output_tokens for t in timings]),
        (TTFT, "ms", [t.ttft_ms for t in timings]),
        (E2E, "ms", [t.e2e_ms for t in timings]),
        (ITL, "ms", intervals),
        (SPEED, "tokens/s", [1e3 / interval for interval in intervals if interval > 0]),
    ]


def _whole(run: Run, conditions: Mapping[str, Any]) -> list[_Row]:
    """Metrics of the window as a whole."""
    devices = conditions["parallel"]["devices"]
    output = sum(t.output_tokens for t in run.requests)
    total = output + sum(t.input_tokens for t in run.requests)
    rows: list[_Row] = [
        (TOTAL, "tokens/s", [total / run.duration_s]),
        (PER_DEVICE, "tokens/s", [total / run.duration_s / devices]),
        (OUTPUT_PER_DEVICE, "tokens/s", [output / run.duration_s / devices]),
        (FAILED, "requests", [run.failed]),
    ]
    objective = conditions["latency_objective"]
    if objective:
        good = sum(t.meets(objective) for t in run.requests)
        rows.append((GOODPUT, "requests/s", [good / run.duration_s]))
    if run.prefix is not None and run.prefix[1]:
        rows.append((HIT_RATE, "share of prompt tokens", [run.prefix[0] / run.prefix[1]]))
    return rows

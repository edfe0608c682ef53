"""Speed for each user against throughput of the whole: points of a sweep and their frontier.

A point is one run at one load. Knows nothing of drawing or of files.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from winnow.bench.combine import check_same
from winnow.bench.conditions import SWEPT
from winnow.bench.record import Record
from winnow.bench.runs import PER_DEVICE, SPEED, TTFT
from winnow.errors import RequestError


@dataclass(frozen=True)
class Point:
    """`speed` is the median over requests of 1 / inter-token latency, in tokens/s for a user;
    `throughput` all tokens, in and out, a second and device; `load` what was swept, in words."""

    run: str
    speed: float
    throughput: float
    load: str
    ttft_p90_ms: float | None


def sweep(records: Sequence[Record]) -> list[Point]:
    """The points in records of one condition set, slowest users first.

    RequestError if the records differ in anything but what a sweep varies (`SWEPT`), with what
    differs and where. Runs that lack one of the two axes, warm-ups among them, give no point.
    """
    measured = [r for r in records if r.workload.get("phase") != "warm-up" and r.run]
    if not measured:
        return []
    if measured[0].level != "serving":
        raise RequestError(f"a frontier is made of serving records, not of {measured[0].level}")
    check_same(measured, "one frontier", SWEPT)
    runs: dict[str, dict[str, Record]] = {}
    for record in measured:
        runs.setdefault(record.run, {})[record.what] = record
    points = [_point(run, own) for run, own in runs.items() if SPEED in own and PER_DEVICE in own]
    return sorted(points, key=lambda point: point.speed)


def pareto(points: Sequence[Point]) -> list[Point]:
    """Those that no other point beats on one axis without losing on the other, slowest first."""
    best: list[Point] = []
    for point in sorted(points, key=lambda p: (-p.speed, -p.throughput)):
        if not best or point.throughput > best[-1].throughput:
            best.append(point)
    return best[::-1]


def _point(run: str, own: dict[str, Record]) -> Point:
    return Point(
        run=run,
        speed=own[SPEED].median,
        throughput=own[PER_DEVICE].median,
        load=load_words(own[SPEED].conditions),
        ttft_p90_ms=own[TTFT].percentile(90) if TTFT in own else None,
    )


def load_words(conditions: Mapping[str, Any]) -> str:
    """What a sweep varies, in words."""
    words = []
    if conditions["concurrency"] is not None:
        words.append(f"{conditions['concurrency']} at once")
    if conditions.get("request_rate") is not None:
        words.append(f"{conditions['request_rate']:g} requests/s")
    words += [f"{name} {value}" for name, value in conditions.get("settings", {}).items()]
    return ", ".join([*words, conditions["parallel"]["plan"]])

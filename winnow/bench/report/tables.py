"""From records to tables of text: what every row shares, and what tells rows apart.

Owns the choice of columns. Knows nothing of HTML.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from winnow.bench.combine import circumstances, key
from winnow.bench.conditions import SWEPT, is_synthetic
from winnow.bench.frontier import Point, pareto
from winnow.bench.prices import Price
from winnow.bench.record import Record
from winnow.bench.runs import E2E, FAILED, GOODPUT, HIT_RATE, ITL, TTFT

_METRICS = (
    (f"{TTFT}, ms", TTFT, True),
    (f"{ITL}, ms", ITL, True),
    (f"{E2E}, ms", E2E, True),
    ("goodput, requests/s", GOODPUT, False),
    (HIT_RATE, HIT_RATE, False),
    (FAILED, FAILED, False),
)
"""Columns of serving beside the two axes: title, metric, and whether its p90 is shown."""

_ABSENT = "does not apply"

_HEADLINE = {
    "parallel.plan": "",
    "parallel.devices": "devices: ",
    "acceptance": "acceptance ",
    "acceptance.kind": "acceptance ",
    "acceptance.mean_length": "mean acceptance length ",
    "acceptance.rates": "acceptance rates ",
    "cache_state": "caches: ",
    "latency_objective": "latency objective ",
    "latency_objective.ttft_ms": "first token within ms: ",
    "latency_objective.itl_ms": "interval within ms: ",
    "latency_objective.e2e_ms": "request within ms: ",
    "concurrency": "concurrency ",
    "machine.name": "on ",
    "machine.gpus": "on ",
    "machine.gpu": "on ",
    "machine.processor": "with ",
    "software.server": "server ",
    "commit": "commit ",
}
"""Conditions that stand beside every figure, and the words before them."""


@dataclass(frozen=True)
class Table:
    """`shared` holds for every row. A row is one text a column; `marked` rows hang on synthetic
    acceptance."""

    title: str
    shared: Mapping[str, str]
    columns: Sequence[str]
    rows: Sequence[Sequence[str]]
    marked: Sequence[bool]


def generic(records: Iterable[Record]) -> list[Table]:
    """Tables of records with the same names of conditions, machine, software and commit."""
    groups: dict[Hashable, list[Record]] = {}
    for record in records:
        names = sorted(circumstances(record))
        same = {
            "names": names,
            "machine": record.machine,
            "software": record.software,
            "commit": record.commit,
        }
        groups.setdefault(key(same), []).append(record)
    return [_generic(group) for group in groups.values()]


def _generic(records: Sequence[Record]) -> Table:
    shared, varying = split([circumstances(record) for record in records])
    columns = _merged(records, varying)
    whats = list(dict.fromkeys(record.what for record in records))
    several = len(whats) > 1
    rows = []
    for record in records:
        own = circumstances(record)
        median, *rest = _figures(record)
        named = [record.what] if several else []
        rows.append([*named, median, *(text(own[names[0]]) for names in columns), *rest])
    titles = [", ".join(map(short, names)) for names in columns]
    return Table(
        title="" if several else whats[0],
        shared=shared,
        columns=[*(["what"] if several else []), "median", *titles, "p10 to p90", "samples"],
        rows=rows,
        marked=[is_synthetic(record.conditions) for record in records],
    )


def _merged(records: Sequence[Record], varying: Sequence[str]) -> list[list[str]]:
    """Names of columns; those whose values are the same in every row share one."""
    columns: dict[Hashable, list[str]] = {}
    for name in varying:
        values = [circumstances(record)[name] for record in records]
        columns.setdefault(key({"": values}), []).append(name)
    return list(columns.values())


def serving(records: Sequence[Record], curve: Sequence[Point], price: Price | None) -> Table:
    """One condition set: a row for each load, as `curve` has them; warm-ups stay in the records.

    With a price, what one unit of its currency buys at each load.
    """
    runs: dict[str, dict[str, Record]] = {}
    for record in records:
        runs.setdefault(record.run, {})[record.what] = record
    shared, _ = split([circumstances(record, SWEPT) for record in records])
    columns = [c for c in _METRICS if any(c[1] in own for own in runs.values())]
    best = {point.run for point in pareto(curve)}
    rows = []
    for point in curve:
        own = runs[point.run]
        cells = [point.load, figure(point.speed), figure(point.throughput)]
        if price is not None:
            cells.append(figure(price.tokens_per_unit(point.throughput)))
        cells.append("yes" if point.run in best else "no")
        rows.append([*cells, *(_cell(own.get(what), spread) for _, what, spread in columns)])
    money = [] if price is None else [f"tokens per {price.currency}"]
    heads = ["load", "tokens/s/user", "tokens/s/device", *money, "on the frontier"]
    return Table(
        title=str(records[0].workload.get("name", "")),
        shared=shared,
        columns=[*heads, *(title for title, _, _ in columns)],
        rows=rows,
        marked=[is_synthetic(records[0].conditions)] * len(rows),
    )


def headline(shared: Mapping[str, str]) -> str:
    """The conditions that a figure must never be without, in one line."""
    words = [f"{short(n)} {v}" for n, v in shared.items() if n.startswith("formats.")]
    for name, before in _HEADLINE.items():
        if shared.get(name, _ABSENT) != _ABSENT:
            words.append(f"{before}{shared[name]}")
    return " · ".join(words)


def split(sets: Sequence[Mapping[str, Any]]) -> tuple[dict[str, str], list[str]]:
    """What is the same in all of several circumstances, and the names of what is not."""
    names = list(dict.fromkeys(name for own in sets for name in own))
    shared, varying = {}, []
    for name in names:
        values = [own.get(name) for own in sets]
        if all(value == values[0] for value in values):
            shared[name] = text(values[0])
        else:
            varying.append(name)
    return shared, varying


def figure(value: float) -> str:
    """A number with at least three significant digits and no more than it needs."""
    if value == 0:
        return "0"
    if abs(value) >= 1000:
        return f"{value:,.0f}"
    return f"{value:#.4g}".rstrip("0").rstrip(".") if abs(value) >= 0.001 else f"{value:.2e}"


def text(value: Any) -> str:
    """A condition's value as people write it."""
    match value:
        case None:
            return _ABSENT
        case bool():
            return "yes" if value else "no"
        case float():
            return figure(value)
        case int():
            return f"{value:,}" if abs(value) >= 10_000 else str(value)
        case list() | tuple():
            return ", ".join(map(text, value))
        case {}:
            return "none"
    return str(value)


def short(name: str) -> str:
    """A dotted name without what everybody knows."""
    for known in ("workload.", "formats."):
        name = name.removeprefix(known)
    return name.replace("_", " ").replace(".", " ")


def _figures(record: Record) -> list[str]:
    low, high = record.percentile(10), record.percentile(90)
    several = len(record.samples) > 1
    spread = f"{figure(low)} to {figure(high)}" if several else ""
    return [f"{figure(record.median)} {record.unit}", spread, str(len(record.samples))]


def _cell(record: Record | None, spread: bool) -> str:
    if record is None:
        return ""
    if not spread:
        return figure(record.median)
    return f"{figure(record.median)} (p90 {figure(record.percentile(90))})"

"""The figures of each level: its pictures, its tables, and the conditions beside them.

Knows no other level's figures while it writes one.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from winnow.bench.combine import circumstances, condition_sets
from winnow.bench.conditions import is_synthetic
from winnow.bench.frontier import sweep
from winnow.bench.parts import breakdown, broken_down
from winnow.bench.prices import Price, price_of
from winnow.bench.record import Record
from winnow.bench.report import html, plots, tables

_OF_A_STEP = ("workload.part", "workload.rows", "workload.context", "concurrency")
"""What differs between the bars of one picture of steps."""


def section(
    level: str, records: Sequence[Record], prices: Sequence[Price], one_frontier: bool
) -> Iterator[str]:
    """The HTML of one level's records, piece by piece."""
    match level:
        case "serving":
            yield from _serving(records, prices, one_frontier)
        case "capacity":
            yield from _capacity(records)
        case "step":
            drawn = [record for run in broken_down(records) for record in run]
            yield from _stacks(drawn)
            yield from _generic([record for record in records if record not in drawn])
        case _:
            yield from _generic(records)


def _generic(records: Sequence[Record], titled: bool = False) -> Iterator[str]:
    for found in tables.generic(records):
        if found.title and not titled:
            yield html.heading(3, found.title)
        yield html.conditions(found.shared, "All that every row shares")
        yield html.table(found)


def _capacity(records: Sequence[Record]) -> Iterator[str]:
    for kind in dict.fromkeys((record.what, record.unit) for record in records):
        own = [record for record in records if (record.what, record.unit) == kind]
        _, varying = tables.split([circumstances(record) for record in own])
        values = [(_label(record, varying), record.median) for record in own]
        yield html.heading(3, kind[0])
        caption = "Each bar is one row of the table below, under the conditions beside it."
        yield html.figure(plots.bars(values, kind[1]), kind[0], caption)
        yield from _generic(own, titled=True)


def _label(record: Record, varying: Sequence[str]) -> str:
    own = circumstances(record)
    words = [f"{tables.short(n)} {tables.text(own[n])}" for n in varying if n in own]
    return ", ".join(words) or record.what


def _stacks(records: Sequence[Record]) -> Iterator[str]:
    for group in condition_sets(records, _OF_A_STEP):
        found = {_step(own[0]): breakdown(own) for own in broken_down(group)}
        wholes = {step: whole for step, (whole, _) in found.items()}
        steps = {step: parts for step, (_, parts) in found.items()}
        marked = any(is_synthetic(record.conditions) for record in group)
        shared, _ = tables.split([circumstances(record, _OF_A_STEP) for record in group])
        yield html.heading(3, "Where the time of a step goes", marked=marked)
        caption = (
            "Shares of each step by part, means over the middle half of its repeats. “All others” "
            "holds parts below 2.5% and the rest that no timer saw."
        )
        picture = plots.stacks(steps, wholes, group[0].unit)
        yield html.figure(picture, "time of a step by part", caption)
        yield html.conditions(shared, "All that these steps share")
        yield html.table(_parts(steps, wholes, group[0].unit, marked))


def _parts(
    steps: Mapping[str, Mapping[str, float]], wholes: Mapping[str, float], unit: str, marked: bool
) -> tables.Table:
    """A row for each part: there are more parts than steps, and phones are narrow."""
    names = list(dict.fromkeys(part for parts in steps.values() for part in parts))
    rows = [["whole step", *(tables.figure(wholes[step]) for step in steps)]]
    rows += [
        [name, *(tables.figure(parts.get(name, 0.0)) for parts in steps.values())] for name in names
    ]
    return tables.Table("", {}, [f"mean, {unit}", *steps], rows, [marked] * len(rows))


def _step(record: Record) -> str:
    workload = record.workload
    rows = f"{workload['rows']} row{'s' if workload['rows'] != 1 else ''}"
    requests = record.conditions["concurrency"]
    return f"{record.what}, {rows}, {requests} x {workload['context']} tokens"


def _serving(
    records: Sequence[Record], prices: Sequence[Price], one_frontier: bool
) -> Iterator[str]:
    measured = [r for r in records if r.workload.get("phase") != "warm-up"]
    for group in [measured] if one_frontier else condition_sets(measured):
        curve = sweep(group)
        runs = {point.run for point in curve}
        yield from _generic([record for record in group if record.run not in runs])
        if not curve:
            continue
        synthetic = is_synthetic(group[0].conditions)
        found = tables.serving(group, curve, price_of(prices, group[0].machine))
        yield html.heading(3, found.title, marked=synthetic)
        caption = (
            "Filled points are on the frontier: no other point of these conditions is better "
            "on one axis without being worse on the other."
        )
        picture = plots.frontier(curve, "synthetic acceptance" if synthetic else "")
        yield html.figure(picture, f"frontier of {found.title}", caption)
        yield html.conditions(found.shared, "All that these points share")
        yield html.table(found)

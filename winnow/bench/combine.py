"""When several records may become one number or one curve, and what differs when they may not.

Owns that judgement. Levels are never combined: capacity, kernel, layer, step and serving figures
are not factors of one another.
"""

from __future__ import annotations

import json
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

from winnow.bench.conditions import SWEPT, flat
from winnow.bench.record import Record
from winnow.errors import RequestError


@dataclass(frozen=True)
class Difference:
    """A condition, and its value on each side; None where a side does not have it."""

    name: str
    left: Any
    right: Any


def circumstances(record: Record, without: Iterable[str] = ()) -> dict[str, Any]:
    """Everything a figure depends on, by dotted name: conditions by their own, all else under
    workload, machine, software and commit. `without` leaves out names, with all that is below."""
    whole = {
        "workload": record.workload,
        **record.conditions,
        "machine": record.machine,
        "software": record.software,
        "commit": record.commit,
    }
    excluded = tuple(without)
    return {
        name: value
        for name, value in flat(whole)
        if not any(name == out or name.startswith(f"{out}.") for out in excluded)
    }


def key(values: Mapping[str, Any]) -> Hashable:
    """Equal for equal circumstances."""
    return json.dumps(values, sort_keys=True)


def differences(left: Mapping[str, Any], right: Mapping[str, Any]) -> list[Difference]:
    """What differs between two circumstances, in order of name."""
    names = sorted({*left, *right})
    pairs = [Difference(name, left.get(name), right.get(name)) for name in names]
    return [pair for pair in pairs if pair.left != pair.right]


def check_same(records: Sequence[Record], purpose: str, without: Iterable[str] = ()) -> None:
    """RequestError, with what differs and where, unless all records have one level and one set of
    circumstances."""
    first = records[0]
    excluded = tuple(without)
    for record in records[1:]:
        if record.level != first.level:
            raise RequestError(
                f"{purpose} cannot hold a {first.level} and a {record.level} record "
                f"({_places(first, record)}): levels are not factors of one another"
            )
        found = differences(circumstances(first, excluded), circumstances(record, excluded))
        if found:
            listed = "; ".join(f"{d.name} is {d.left!r} and {d.right!r}" for d in found[:4])
            more = f"; and {len(found) - 4} more" if len(found) > 4 else ""
            raise RequestError(
                f"{purpose} cannot hold records of different conditions "
                f"({_places(first, record)}): {listed}{more}"
            )


def pooled_median(records: Sequence[Record], what: str) -> tuple[float, str]:
    """The median over the samples of all records of `what`, and its unit.

    RequestError if there is none, or if they differ in level, unit or any condition.
    """
    chosen = [record for record in records if record.what == what]
    if not chosen:
        known = sorted({record.what for record in records})
        raise RequestError(f"no record of {what!r}; there are: {', '.join(known)}")
    check_same(chosen, "one number")
    units = sorted({record.unit for record in chosen})
    if len(units) > 1:
        raise RequestError(f"records of {what!r} have units {', '.join(units)}: choose one")
    return median(sample for record in chosen for sample in record.samples), units[0]


def condition_sets(records: Iterable[Record], without: Iterable[str] = SWEPT) -> list[list[Record]]:
    """Records that may share a picture, together, in the order of their first appearance.

    They agree in level and in every circumstance but those named in `without`.
    """
    excluded = tuple(without)
    groups: dict[Hashable, list[Record]] = {}
    for record in records:
        group = (record.level, key(circumstances(record, excluded)))
        groups.setdefault(group, []).append(record)
    return list(groups.values())


def _places(left: Record, right: Record) -> str:
    return f"{left.where or left.what} and {right.where or right.what}"

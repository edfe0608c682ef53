"""Two sets of records side by side: what differs in their conditions first, then the figures.

A ratio is given only where exactly one condition differs: with more, nobody could say what the
ratio is of.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass

from winnow.bench.combine import circumstances, key
from winnow.bench.conditions import is_synthetic
from winnow.bench.record import Record
from winnow.bench.report.tables import figure, short, split, text
from winnow.errors import RequestError


@dataclass(frozen=True)
class Pair:
    """The same measurement on both sides; `ratio` is right over left, where it means anything."""

    what: str
    level: str
    detail: str
    left: str
    right: str
    ratio: str
    synthetic: bool


@dataclass(frozen=True)
class Comparison:
    """`differences` are (condition, left, right) in words, of `changed` things: acceptance and its
    rate are one. `unmatched` counts records that only one side has."""

    differences: Sequence[tuple[str, str, str]]
    changed: Sequence[str]
    pairs: Sequence[Pair]
    unmatched: int


def compare(left: Sequence[Record], right: Sequence[Record]) -> Comparison:
    """Match records by all that does not differ between the two sets; warm-ups are left out.

    RequestError if no record of one side has a partner on the other.
    """
    ours, theirs = _measured(left), _measured(right)
    differing = _differing(ours, theirs)
    partners: dict[Hashable, Record] = {}
    for record in theirs:
        partners.setdefault(_identity(record, differing), record)
    matched = [
        (record, partner)
        for record in ours
        if (partner := partners.pop(_identity(record, differing), None)) is not None
    ]
    if not matched:
        raise RequestError(
            f"no record of one side has a partner on the other: they differ in "
            f"{', '.join(differing) or 'what they measured'}"
        )
    changed = list(dict.fromkeys(_thing(name) for name in differing))
    _, varying = split([circumstances(record, differing) for record, _ in matched])
    pairs = [_pair(record, partner, varying, len(changed) <= 1) for record, partner in matched]
    words = [(short(name), _values(ours, name), _values(theirs, name)) for name in differing]
    return Comparison(words, changed, pairs, len(ours) - len(pairs) + len(partners))


def _measured(records: Sequence[Record]) -> list[Record]:
    return [record for record in records if record.workload.get("phase") != "warm-up"]


def _thing(name: str) -> str:
    """What a reader would say was changed: one thing, though it may have several fields."""
    top = name.partition(".")[0]
    return top if top in ("acceptance", "machine", "software") else name


def _differing(left: Sequence[Record], right: Sequence[Record]) -> list[str]:
    """Names of circumstances whose values on the two sides are not the same set."""
    sides = [[circumstances(record) for record in side] for side in (left, right)]
    names = sorted({name for side in sides for own in side for name in own})
    found = []
    for name in names:
        ours, theirs = ({key({"": own.get(name)}) for own in side} for side in sides)
        if ours != theirs:
            found.append(name)
    return found


def _identity(record: Record, without: Sequence[str]) -> Hashable:
    own = {k: v for k, v in circumstances(record).items() if k not in without}
    return key({"level": record.level, "what": record.what, "unit": record.unit, **own})


def _pair(left: Record, right: Record, varying: Sequence[str], alone: bool) -> Pair:
    own = circumstances(left)
    return Pair(
        what=left.what,
        level=left.level,
        detail=", ".join(f"{short(name)} {text(own.get(name))}" for name in varying),
        left=f"{figure(left.median)} {left.unit}",
        right=f"{figure(right.median)} {right.unit}",
        ratio=f"{right.median / left.median:.3f}" if alone and left.median else "",
        synthetic=is_synthetic(left.conditions) or is_synthetic(right.conditions),
    )


def _values(side: Sequence[Record], name: str) -> str:
    values = [circumstances(record) for record in side]
    seen = dict.fromkeys(text(own[name]) if name in own else "not there" for own in values)
    listed = list(seen)
    return "; ".join(listed[:4]) + (f"; and {len(listed) - 4} more" if len(listed) > 4 else "")

"""What a record must say of the conditions it was measured under, and when two records agree.

Owns the rules of each level. Knows nothing of files, of pages or of how anything is measured.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from winnow.errors import RequestError

LEVELS = ("capacity", "kernel", "layer", "step", "serving")
"""Kinds of result that must never be multiplied into one another."""

ACCEPTANCE_KINDS = ("none", "natural", "synthetic")

_INAPPLICABLE: dict[str, tuple[str, ...]] = {
    "capacity": ("acceptance", "cache_state", "concurrency", "latency_objective"),
    "kernel": ("acceptance", "concurrency", "latency_objective"),
    "layer": ("acceptance", "concurrency", "latency_objective"),
    "step": ("latency_objective",),
    "serving": (),
}
"""Conditions that a level may leave null: it has no such thing. They are written all the same."""

SWEPT = ("concurrency", "request_rate", "parallel", "settings")
"""Conditions that differ between the points of one sweep; all others must not."""


def check_conditions(level: str, conditions: Mapping[str, Any]) -> None:
    """RequestError that names the first condition which is missing or is not what it must be."""
    if level not in LEVELS:
        raise RequestError(f"level is {level!r}: use one of {', '.join(LEVELS)}")
    missing = [name for name in _RULES if name not in conditions]
    if missing:
        raise RequestError(
            f"a {level} record without its {', '.join(missing)} says nothing: conditions need "
            f"{', '.join(_RULES)}"
        )
    for name, (holds, meaning) in _RULES.items():
        value = conditions[name]
        absent = value is None and _may_be_absent(level, name, conditions)
        if not absent and not holds(value):
            raise RequestError(f"condition {name} of a {level} record is {value!r}: {meaning}")


def is_synthetic(conditions: Mapping[str, Any]) -> bool:
    """Whether drafts were accepted by a set rate instead of by what the models said."""
    acceptance = conditions["acceptance"]
    return acceptance is not None and acceptance["kind"] == "synthetic"


def flat(conditions: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """(dotted name, value) of every condition, in order; an empty mapping is {}."""
    for name, value in conditions.items():
        if isinstance(value, Mapping) and value:
            yield from flat(value, f"{prefix}{name}.")
        else:
            yield prefix + name, value


def _may_be_absent(level: str, name: str, conditions: Mapping[str, Any]) -> bool:
    # Open-loop traffic has a rate instead of a concurrency.
    open_loop = name == "concurrency" and level == "serving" and "request_rate" in conditions
    return open_loop or name in _INAPPLICABLE[level]


def _is_formats(value: Any) -> bool:
    return _is_mapping(value) and bool(value) and all(isinstance(v, str) for v in value.values())


def _is_parallel(value: Any) -> bool:
    return _is_mapping(value) and bool(value.get("plan")) and _is_count(value.get("devices"))


def _is_acceptance(value: Any) -> bool:
    if not _is_mapping(value) or value.get("kind") not in ACCEPTANCE_KINDS:
        return False
    if value["kind"] != "synthetic":
        return True
    rates, length = value.get("rates"), value.get("mean_length")
    if rates is None:
        return _is_number(length) and length >= 1
    return (
        isinstance(rates, list | tuple)
        and bool(rates)
        and all(_is_number(r) and 0 <= r <= 1 for r in rates)
    )


def _is_objective(value: Any) -> bool:
    return _is_mapping(value) and all(_is_number(v) and v > 0 for v in value.values())


def _is_text(value: Any) -> bool:
    return isinstance(value, str) and bool(value)


def _is_mapping(value: Any) -> bool:
    return isinstance(value, Mapping)


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 1


_RULES: dict[str, tuple[Callable[[Any], bool], str]] = {
    "formats": (_is_formats, 'name each format, as in {"kv": "nvfp4", "index": "nvfp4"}'),
    "parallel": (
        _is_parallel,
        'give the plan and its devices, as in {"plan": "tp4", "devices": 4}',
    ),
    "acceptance": (
        _is_acceptance,
        'give {"kind": "none"}, {"kind": "natural"}, or {"kind": "synthetic"} with its rates (a '
        "list from 0 to 1) or its mean_length (at least 1)",
    ),
    "cache_state": (_is_text, "say in words what the caches held"),
    "concurrency": (_is_count, "give a whole number of at least 1"),
    "latency_objective": (_is_objective, "map metrics to milliseconds; {} is no objective"),
}

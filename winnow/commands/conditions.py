"""Options that say what a figure was measured under, for commands that cannot see it themselves."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any

from winnow.commands.parsing import at_least

_OBJECTIVES = {"ttft": "ttft_ms", "itl": "itl_ms", "e2e": "e2e_ms"}


def add_condition_options(group: argparse._ArgumentGroup) -> None:
    """Options that `conditions` reads; those without a safe default must be given."""
    add = group.add_argument
    add(
        "--formats",
        required=True,
        type=_pairs(str, "a format"),
        metavar="PART=FMT,...",
        help="of the server, as kv=nvfp4,index=nvfp4,experts=nvfp4,linear=mxfp8",
    )
    add(
        "--acceptance",
        required=True,
        type=_acceptance,
        metavar="none|natural|synthetic:...",
        help="of drafts; synthetic:3.16 is a mean length, synthetic:0.9,0.8 rates by position",
    )
    add(
        "--cache-state",
        required=True,
        metavar="TEXT",
        help="what the server's caches held before, as 'empty, prefix caching on'",
    )
    add("--parallel", default="tp1", metavar="PLAN", help="the server's, as tp4 or dep4")
    add("--devices", type=at_least(1), default=1, metavar="N", help="that the server runs on")
    add(
        "--objective",
        type=_objective,
        default={},
        metavar="NAME=MS,...",
        help="bounds for goodput: ttft, itl and e2e, in milliseconds; default: none",
    )


def conditions(args: argparse.Namespace) -> dict[str, Any]:
    """All conditions of a serving record but the load."""
    return {
        "formats": args.formats,
        "parallel": {"plan": args.parallel, "devices": args.devices},
        "acceptance": args.acceptance,
        "cache_state": args.cache_state,
        "latency_objective": args.objective,
    }


def _pairs(kind: Callable[[str], Any], what: str) -> Callable[[str], dict[str, Any]]:
    def read(words: str) -> dict[str, Any]:
        found: dict[str, Any] = {}
        for word in words.split(","):
            name, equals, value = word.partition("=")
            try:
                found[name] = kind(value)
            except ValueError:
                equals = ""
            if not (name and equals and value):
                raise argparse.ArgumentTypeError(f"{word!r} is not NAME={what}")
        return found

    return read


def _objective(words: str) -> dict[str, float]:
    named = _pairs(float, "MS")(words)
    for name, bound in named.items():
        if name not in _OBJECTIVES or not 0 < bound < float("inf"):
            raise argparse.ArgumentTypeError(
                f"{name}={bound:g} is no objective: use {', '.join(_OBJECTIVES)} and a number "
                "of milliseconds above 0"
            )
    return {_OBJECTIVES[name]: bound for name, bound in named.items()}


def _acceptance(words: str) -> dict[str, Any]:
    kind, _, numbers = words.partition(":")
    if words in ("none", "natural"):
        return {"kind": kind}
    try:
        values = [float(number) for number in numbers.split(",")]
    except ValueError:
        values = []
    if kind != "synthetic" or not values:
        raise argparse.ArgumentTypeError(
            f"{words!r} is not none, natural, synthetic:LENGTH or synthetic:RATE,RATE,..."
        )
    if len(values) == 1 and values[0] >= 1:
        return {"kind": kind, "mean_length": values[0]}
    if not all(0 <= value <= 1 for value in values):
        raise argparse.ArgumentTypeError(f"rates of {words!r} are not from 0 to 1")
    return {"kind": kind, "rates": values}

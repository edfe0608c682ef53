"""What the parsers of several commands share. Knows no command."""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable
from typing import Any

JSON_HELP = "print JSON"


def command(
    commands: Any, name: str, run: Callable[[argparse.Namespace], int], text: str
) -> argparse.ArgumentParser:
    """Add a command that `run` carries out; `commands` is what `add_subparsers` returned."""
    parser: argparse.ArgumentParser = commands.add_parser(name, help=text, description=text)
    parser.set_defaults(run=run)
    return parser


def number(
    kind: type[int] | type[float], holds: Callable[[Any], bool], what: str
) -> Callable[[str], Any]:
    """An argparse type: a `kind` of number for which `holds`; `what` says which those are."""

    def read(word: str) -> Any:
        try:
            value = kind(word)
        except ValueError:
            value = math.nan
        if not holds(value):
            raise argparse.ArgumentTypeError(f"{word!r} is not {what}")
        return value

    return read


def at_least(least: int) -> Callable[[str], Any]:
    """An argparse type: a whole number of at least `least`."""
    return number(int, lambda n: n >= least, f"a whole number of at least {least}")

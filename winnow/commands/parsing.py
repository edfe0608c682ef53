"""What the parsers of several commands share. Knows no command."""

from __future__ import annotations

import argparse
import math
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

JSON_HELP = "print JSON"


def command(
    commands: Any,
    name: str,
    run: Callable[[argparse.Namespace], int],
    text: str,
    *,
    prints: bool = True,
) -> argparse.ArgumentParser:
    """Add a command that `run` carries out; `commands` is what `add_subparsers` returned.

    One that `prints` its answer is refused where standard output is closed.
    """
    parser: argparse.ArgumentParser = commands.add_parser(
        name, help=text, description=text, formatter_class=_WithDefaults
    )
    parser.set_defaults(run=run, prints=prints)
    return parser


def default_words(action: argparse.Action) -> str:
    """The default of an argument as a user would write it; empty where there is none to write."""
    default = action.default
    if action.nargs == 0 or default in (None, argparse.SUPPRESS) or default == {}:
        return ""
    if isinstance(default, list):
        return ",".join(map(str, default))
    return f"{default:g}" if isinstance(default, float) else str(default)


class _WithDefaults(argparse.HelpFormatter):
    """Help that ends with the default, unless its text tells of one."""

    def _get_help_string(self, action: argparse.Action) -> str | None:
        words, text = default_words(action), action.help or ""
        if not words or "default" in text:
            return text
        return f"{text} (default: {words})".replace("%", "%%")


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


def output_file(word: str) -> Path:
    """An argparse type: a file that can be written, so that nothing is computed for one that
    cannot; it is not made."""
    path = Path(word)
    if path.is_dir():
        raise argparse.ArgumentTypeError(f"{word} is a directory: name a file in it")
    if not path.parent.is_dir():
        raise argparse.ArgumentTypeError(f"there is no directory {path.parent}: make it first")
    if not os.access(path if path.exists() else path.parent, os.W_OK):
        raise argparse.ArgumentTypeError(f"{word} may not be written: name another file")
    return path


def at_least(least: int) -> Callable[[str], Any]:
    """An argparse type: a whole number of at least `least`."""
    return number(int, lambda n: n >= least, f"a whole number of at least {least}")

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

"""The command line: words in, one call, words out. Every command imports only what it needs."""

from __future__ import annotations

import argparse
import io
import logging
import os
import sys
from collections.abc import Sequence

from winnow import __version__
from winnow.commands.backends import add_backends
from winnow.commands.bench import add_bench
from winnow.commands.checkpoints import add_convert, add_make_tiny
from winnow.commands.generate import add_generate
from winnow.commands.plan import add_plan
from winnow.commands.report import add_report
from winnow.commands.serve import add_serve
from winnow.errors import WinnowError


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; 0 if it did what was asked, 1 with one sentence on stderr if not."""
    args = _parser().parse_args(arguments)
    if sys.stdout is None:
        if args.prints:
            print(
                "winnow: standard output is closed: send it to a file or to /dev/null",
                file=sys.stderr,
            )
            return 1
        _open_output()
    logging.basicConfig(
        level=logging.INFO if args.verbose else logging.WARNING,
        format="winnow: %(message)s",
        stream=sys.stderr,
    )
    if isinstance(sys.stdout, io.TextIOWrapper):
        # A terminal whose encoding lacks a character shows its number instead.
        sys.stdout.reconfigure(errors="backslashreplace")
    try:
        status: int = args.run(args)
        sys.stdout.flush()
    except WinnowError as error:
        print(f"winnow: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:
        # Whoever read our output has left; there is nobody to tell.
        _drop_output()
        return 1
    except OSError as error:
        # The machine's fault, not the program's: a full disk, a path that cannot be written.
        print(f"winnow: {error}", file=sys.stderr)
        _drop_output()
        return 1
    return status


def _open_output() -> None:
    """Put the null device where output would go: otherwise the next file or socket that is opened
    is standard output, of child processes too."""
    descriptor = os.open(os.devnull, os.O_RDWR)
    if descriptor == 0:
        # Input is closed as well, and gets the null device for the same reason.
        descriptor = os.open(os.devnull, os.O_RDWR)
    os.set_inheritable(descriptor, True)
    sys.stdout = os.fdopen(descriptor, "w", encoding="utf-8")


def _drop_output() -> None:
    """Let go of output that cannot be written: Python would complain of it again at exit."""
    try:
        sys.stdout.flush()
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="winnow",
        description="Serve block-sparse-attention mixture-of-experts models with 4-bit state.",
    )
    parser.add_argument(
        "--version", action="version", version=f"winnow {__version__}", help="print the version"
    )
    parser.add_argument("-v", "--verbose", action="store_true", help="say what was chosen")
    commands = parser.add_subparsers(title="commands", required=True, metavar="COMMAND")
    for add in (
        add_serve,
        add_generate,
        add_plan,
        add_bench,
        add_report,
        add_backends,
        add_convert,
        add_make_tiny,
    ):
        add(commands)
    return parser

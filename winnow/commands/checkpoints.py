"""`winnow convert` and `winnow make-tiny`: commands that write checkpoints."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from winnow.commands.parsing import command, number


def add_convert(commands: Any) -> None:
    """Register `convert`."""
    parser = command(commands, "convert", _convert, "write a checkpoint in 4-bit and 8-bit formats")
    parser.add_argument("source", metavar="SRC", help="checkpoint directory, not quantised")
    parser.add_argument("destination", metavar="DST", help="directory that is empty or not there")
    parser.add_argument(
        "--experts", choices=("nvfp4", "keep"), default="nvfp4", help="format of routed experts"
    )
    parser.add_argument(
        "--linear", choices=("mxfp8", "keep"), default="mxfp8", help="format of other matrices"
    )


def _convert(args: argparse.Namespace) -> int:
    from winnow.model.checkpoint import convert

    destination = Path(args.destination)
    done = convert(Path(args.source), destination, experts=args.experts, linear=args.linear)
    print(destination)
    share = done.written_bytes / done.source_bytes
    print(f"{done.source_bytes:,} bytes of tensors became {done.written_bytes:,} ({share:.1%})")
    return 0


def add_make_tiny(commands: Any) -> None:
    """Register `make-tiny`."""
    parser = command(commands, "make-tiny", _make_tiny, "write a small random checkpoint")
    parser.add_argument("directory", metavar="DIR", help="directory without a checkpoint")
    seeds = number(int, lambda n: 0 <= n < 2**63, f"a whole number from 0 to {2**63 - 1}")
    parser.add_argument("--seed", type=seeds, default=0, metavar="N", help="of the weights")


def _make_tiny(args: argparse.Namespace) -> int:
    from winnow.model.checkpoint import make_tiny

    make_tiny(Path(args.directory), seed=args.seed)
    print(args.directory)
    return 0

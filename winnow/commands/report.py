"""`winnow report`: its options, and the one page or number that they make."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from winnow.commands.parsing import command, output_file
from winnow.errors import RequestError, UnsupportedError


def add_report(commands: Any) -> None:
    """Register the command."""
    parser = command(commands, "report", _run, "show records as one page, each with its conditions")
    add = parser.add_argument
    add("records", nargs="+", type=Path, metavar="RECORDS", help="files of JSON lines")
    add("-o", "--out", type=output_file, metavar="FILE", help="page to write; default: report.html")
    add("--prices", type=Path, metavar="FILE", help="TOML of what machines cost, for tokens per it")
    only = parser.add_mutually_exclusive_group()
    only.add_argument(
        "--compare", action="store_true", help="put two files side by side, differences first"
    )
    only.add_argument(
        "--one-frontier",
        action="store_true",
        help="put all serving records into one frontier; an error if their conditions differ",
    )
    only.add_argument(
        "--pool",
        metavar="WHAT",
        help="print one median over all records of WHAT instead of a page; an error across "
        "levels or conditions",
    )


def _run(args: argparse.Namespace) -> int:
    from winnow.bench.combine import pooled_median
    from winnow.bench.prices import load_prices
    from winnow.bench.record import load

    sets = [load(path) for path in args.records]
    records = [record for own in sets for record in own]
    if args.pool is not None:
        value, unit = pooled_median(records, args.pool)
        print(f"{value:.6g} {unit}")
        return 0
    prices = load_prices(args.prices) if args.prices is not None else []
    try:
        from winnow.bench.report import page
    except ModuleNotFoundError as error:
        raise UnsupportedError(
            f"winnow report draws with matplotlib, of which {error.name} is missing: run "
            "pip install 'winnow-llm[report]'"
        ) from error
    comparison = None
    if args.compare:
        from winnow.bench.report.compare import compare

        if len(sets) != 2:
            raise RequestError(f"--compare takes two files of records, {len(sets)} were given")
        comparison = compare(*sets)
    target = args.out or Path("report.html")
    text = page(
        records,
        prices,
        comparison,
        sides=tuple(path.name for path in args.records[:2]) if args.compare else ("", ""),
        one_frontier=args.one_frontier,
    )
    target.write_text(text, encoding="utf-8")
    print(target)
    return 0

"""`winnow backends`: which backend serves each op on this machine, and why another does not."""

from __future__ import annotations

import argparse
import json
from typing import Any

from winnow.commands.parsing import JSON_HELP, command


def add_backends(commands: Any) -> None:
    """Register the command."""
    parser = command(commands, "backends", _run, "which backend serves each op here")
    parser.add_argument("--json", action="store_true", help=JSON_HELP)


def _run(args: argparse.Namespace) -> int:
    from winnow.ops.table import BACKENDS, kernels, why_not

    answer: dict[str, Any] = {}
    for backend in BACKENDS:
        reason = why_not(backend)
        answer[backend] = {
            "serves": reason is None,
            "reason": reason,
            "ops": {} if reason else kernels(backend).served_by(),
        }
    if args.json:
        print(json.dumps(answer, indent=1))
        return 0
    for backend, what in answer.items():
        print(f"{backend}: {what['reason'] or 'serves every op'}")
        for op, module in what["ops"].items():
            print(f"  {op:18} {module}")
    return 0

"""`winnow bench kernels`: its options, and what it prints."""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

from winnow.commands.parsing import JSON_HELP, command, output_file
from winnow.errors import RequestError, UnsupportedError

_KV_FORMATS = ("bf16", "fp8", "nvfp4")


def add_kernels(suites: Any) -> None:
    """Register the suite."""
    parser = command(
        suites, "kernels", _kernels, "check each op, then time it beside the machine's peaks"
    )
    add = parser.add_argument
    add("--backend", metavar="NAME", help="one that `winnow backends` lists; default: the GPU's")
    add("--op", action="append", metavar="NAME", help="an op; may be repeated; default: all")
    add("--only", default="", metavar="TEXT", help="workloads with this in their name")
    add("--kv-format", choices=_KV_FORMATS, default="nvfp4", help="of K and V (GPU workloads)")
    add("--index-format", choices=_KV_FORMATS, default="nvfp4", help="of index keys")
    add(
        "--peers",
        type=Path,
        metavar="DIR",
        help="folder of benchmarks/peers/fetch.py: times other engines' kernels too",
    )
    add("--commit", metavar="ID", help="of this code, where it does not lie in a git tree")
    add("--json", action="store_true", help=JSON_HELP)
    add(
        "-o", "--out", type=output_file, metavar="FILE", help="file of JSON lines to add records to"
    )


def _kernels(args: argparse.Namespace) -> int:
    from winnow.bench.kernel_peers import Peers
    from winnow.bench.kernel_work import model
    from winnow.bench.kernels import HEADER, measure, render
    from winnow.bench.record import append
    from winnow.ops.table import DEVICES

    backend = args.backend or _of_the_gpu()
    on_a_gpu = DEVICES.get(backend) == "cuda"
    peers = Peers(model(), args.peers) if on_a_gpu else None
    formats = (args.kv_format, args.index_format)
    peak, lines = measure(backend, args.op, args.only, formats, peers)
    head = [HEADER]
    if peak is not None:
        head.insert(
            0, f"read {peak.read_tb_s:.2f} TB/s, bf16 matmul {peak.bf16_tflop_s:.0f} TFLOP/s"
        )
    failed, measured = False, 0
    for line in lines:
        if not measured and not args.json:
            print("\n".join(head))
        measured += 1
        failed |= line.us is None
        if args.json:
            shown = {k: v for k, v in vars(line).items() if k != "record"} | {"us": line.us}
            print(json.dumps(shown), flush=True)
        else:
            print(render(line, peak), flush=True)
        if args.out is not None and line.record is not None:
            commit = args.commit or line.record.commit
            append(args.out, [replace(line.record, commit=commit)])
    if not measured:
        raise RequestError(f"no workload has {args.only!r} in its name: without --only all are run")
    for sentence in peers.refused if peers is not None else ():
        print(f"not timed: {sentence}", file=sys.stderr)
    return 1 if failed else 0


def _of_the_gpu() -> str:
    """The fastest backend that serves on this machine's GPU."""
    from winnow.ops.table import why_not

    reasons = {}
    for backend in ("hopper", "cuda"):
        reason = why_not(backend)
        if reason is None:
            return backend
        reasons[backend] = reason
    raise UnsupportedError(
        f"the workloads need a GPU: {reasons['cuda']}; --backend cpu times small cases instead"
    )

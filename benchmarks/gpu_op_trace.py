"""Where the time of an op goes: workloads of `winnow bench kernels`, replayed under the profiler.

For each kernel: how often a call launches it, how long it lasts, and what it adds after all
launches before it have ended, us a call. Kernels overlap, so durations do not add up to the call;
what each adds does. Tracing makes calls longer: the time without it stands beside.

    python benchmarks/gpu_op_trace.py [--kv-format F] [--index-format F] [WORKLOAD ...]

A WORKLOAD is an op with a workload's name, as `winnow bench kernels` prints them.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from statistics import fmean, median
from typing import Any

import torch
from gpu_step_trace import NAME_LENGTH, Launch, traced

from winnow.bench.kernel_state import State
from winnow.bench.kernel_work import Work, model, works
from winnow.bench.kernels import timed
from winnow.ops.table import kernels

DEFAULT = ("moe 1 tokens", "moe 256 tokens", "select_blocks decode 1 x 524288")


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("workloads", nargs="*", metavar="WORKLOAD", default=DEFAULT)
    parser.add_argument("--backend", default="hopper")
    parser.add_argument("--kv-format", default="nvfp4", choices=("bf16", "fp8", "nvfp4"))
    parser.add_argument("--index-format", default="nvfp4", choices=("bf16", "fp8", "nvfp4"))
    args = parser.parse_args()
    wanted = named(args.workloads, parser)
    table, state = kernels(args.backend), State(model(), args.kv_format, args.index_format)
    for name, work in wanted.items():
        torch.manual_seed(0)
        ready = work.make(table, state)
        us = median(timed(ready.calls))
        launches = traced(captured(ready.calls))
        print(f"{name}, KV {args.kv_format}, index {args.index_format}: {us:.1f} us a call")
        print(call_table(launches, len(ready.calls)), flush=True)
        del ready
        torch.cuda.empty_cache()
    return 0


def named(names: Sequence[str], parser: argparse.ArgumentParser) -> dict[str, Work]:
    """The workloads of these names, which end the parser's program where there are none."""
    known = {f"{work.op} {work.name}": work for work in works()}
    unknown = [name for name in names if name not in known]
    if unknown:
        parser.error(f"no workload {', '.join(unknown)}: use some of {'; '.join(known)}")
    return {name: known[name] for name in names}


def captured(calls: Sequence[Callable[[], Any]]) -> Callable[[], None]:
    """A replay of all calls; they have run before."""
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    graph.replay()
    return graph.replay


def call_table(launches: Sequence[Launch], calls: int) -> str:
    """A line for each kernel and grid, in the order of their first begin."""
    alike: dict[tuple[str, tuple[int, ...]], list[Launch]] = {}
    for launch in launches:
        alike.setdefault((launch.name, tuple(launch.grid)), []).append(launch)
    lines = [f"  {'launches':>9} {'lasts':>9} {'adds':>9}"]
    for (name, grid), own in alike.items():
        lasts, adds = fmean(one.duration for one in own), sum(one.adds for one in own) / calls
        shown = name.replace("(anonymous namespace)::", "").removeprefix("void ")[:NAME_LENGTH]
        lines.append(f"  {len(own) / calls:9.2f} {lasts:9.2f} {adds:9.2f}  {shown} {list(grid)}")
    total = sum(launch.adds for launch in launches) / calls
    return "\n".join([*lines, f"  a call {total:.1f} us under the profiler"])


if __name__ == "__main__":
    sys.exit(main())

"""What a replayed decode step launches, kernel by kernel: when each begins, how long it lasts, and
what it adds to the step after all launches before it have ended.

The last layers of M3.1-Flash at their widths, random weights and cache. Kernels overlap, so
durations do not add up to the step; what each adds does. Tracing makes a step 1 % longer.

    python benchmarks/gpu_step_trace.py [--backend NAME] [REQUESTSxTOKENS ...]
"""

from __future__ import annotations

import argparse
import json
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
from gpu_engine import CHUNK, LAYERS, flash
from torch.profiler import ProfilerActivity, profile

from winnow.bench.device_step import DeviceSteps
from winnow.engine.engine import Engine
from winnow.ops.sample import SampleRow

FIRST_OF_A_LAYER = "insert_rows"
"""A kernel that every layer launches once: a layer is shown from one to the next."""
REPLAYS = 3
NAME_LENGTH = 60


@dataclass(frozen=True)
class Launch:
    """Times in us: `gap` from the end of all launches before it, negative where it began earlier;
    `adds` how much later all have ended with it."""

    name: str
    grid: Sequence[int]
    start: float
    duration: float
    gap: float
    adds: float


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("steps", nargs="*", metavar="REQUESTSxTOKENS", default=["1x8192"])
    parser.add_argument("--backend", help="default: the GPU's own")
    args = parser.parse_args()
    shapes = [(int(n), int(c)) for n, c in (step.split("x") for step in args.steps)]
    engine = flash(CHUNK, max(n * c for n, c in shapes), args.backend)
    device = DeviceSteps(engine)
    for requests, context in shapes:
        replay = replayed(engine, device, requests, context)
        launches = traced(replay)
        print(f"{requests} x {context} tokens, {LAYERS} layers: {len(launches)} launches")
        print(layer_table(launches), flush=True)


def replayed(
    engine: Engine, device: DeviceSteps, requests: int, context: int
) -> Callable[[], None]:
    """Something that replays one captured step, greedy sampling included."""
    plan, live = device.plan(requests, context, 1)
    graphs = engine.runner.graphs
    shape = None if graphs is None else graphs.shape(plan)
    assert graphs is not None and shape is not None, "the step is not captured"  # noqa: PT018
    asked = [SampleRow(seed=0, index=0, temperature=0.0)] * requests

    def replay() -> None:
        with torch.inference_mode():
            graphs.fill(shape, plan, live, asked)
            graphs.replay(shape, "greedy")

    replay()
    return replay


def traced(replay: Callable[[], None]) -> list[Launch]:
    """The launches of the last of some replays, in the order of their begin."""
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as profiled:
        for _ in range(REPLAYS):
            replay()
        torch.cuda.synchronize()
    with tempfile.TemporaryDirectory() as home:
        path = Path(home) / "trace.json"
        profiled.export_chrome_trace(str(path))
        events = json.loads(path.read_text())["traceEvents"]
    kernels = [e for e in events if e.get("cat") == "kernel"]
    kernels.sort(key=lambda e: e["ts"])
    return launches_of(kernels[-(len(kernels) // REPLAYS) :])


def launches_of(events: Sequence[dict[str, Any]]) -> list[Launch]:
    """From a profiler's events, by their begin."""
    found, ended = [], float(events[0]["ts"])
    for event in events:
        start, duration = float(event["ts"]), float(event["dur"])
        adds = max(0.0, start + duration - ended)
        grid = event["args"].get("grid", ())
        found.append(Launch(event["name"], grid, start, duration, start - ended, adds))
        ended += adds
    return found


def layer_table(launches: Sequence[Launch]) -> str:
    """A layer, on average over all but the first and the last; then what the step has besides."""
    firsts = [i for i, launch in enumerate(launches) if FIRST_OF_A_LAYER in launch.name]
    each = firsts[1] - firsts[0]
    inner = firsts[1:-1]
    lines = [f"  {'start':>9} {'lasts':>9} {'gap':>9} {'adds':>9}"]
    total = 0.0
    for place in range(each):
        own = [launches[first + place] for first in inner]
        start = fmean(launches[first + place].start - launches[first].start for first in inner)
        adds = fmean(launch.adds for launch in own)
        total += adds
        times = (start, fmean(x.duration for x in own), fmean(x.gap for x in own), adds)
        name = own[0].name.replace("(anonymous namespace)::", "").removeprefix("void ")
        lines.append(
            " ".join(["", *(f"{us:9.2f}" for us in times), f" {name[:NAME_LENGTH]} {own[0].grid}"])
        )
    ends = launches[: firsts[0]], launches[firsts[-1] + each :]
    before, after = (sum(launch.adds for launch in part) for part in ends)
    lines.append(
        f"  a layer {total:.1f} us; {len(ends[0])} launches before the first layer's insertion add "
        f"{before:.1f} us, {len(ends[1])} after the last layer {after:.1f} us"
    )
    return "\n".join(lines)


if __name__ == "__main__":
    main()

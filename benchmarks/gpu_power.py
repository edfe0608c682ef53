"""How an op's time moves with the chip's clock and power: workloads of `winnow bench kernels`,
replayed without a break after an idle while.

A GPU at its power limit lowers its clock, so the first replays of a heavy op are the fastest. For
each stretch of time: the median us a call, and what nvidia-smi said meanwhile (multiprocessors'
and memory's MHz, watts, whether the limit of power or of heat held the clock down).

    python benchmarks/gpu_power.py [--seconds S] [WORKLOAD ...]

A WORKLOAD is an op with a workload's name, as `winnow bench kernels` prints them.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from statistics import median

import torch
from gpu_op_trace import captured, named

from winnow.bench.kernel_state import State
from winnow.bench.kernel_work import model
from winnow.ops.table import kernels

DEFAULT = (
    *("moe 1 tokens", "moe 64 tokens", "moe 256 tokens", "moe 1024 tokens", "moe 8192 tokens"),
    "select_blocks prefill 8192 @ 122880",
)
FIELDS = "clocks.sm,clocks.mem,power.draw.instant,power.limit,clocks_event_reasons.active"
EVERY_MS = 20
IDLE_S = 3.0
STRETCHES = (0.02, 0.05, 0.1, 0.2, 0.4, 0.8, 1.6)
"""Seconds after the first replay has ended at which a line ends; more as needed, each twice the
last."""
POWER, HEAT = 0x4 | 0x80, 0x20 | 0x40
"""Bits of the reasons for a lower clock (NVML's software power cap and hardware power brake;
software and hardware thermal slowdown)."""


@dataclass(frozen=True)
class Seen:
    """What nvidia-smi said at `time`, seconds of time.monotonic()."""

    time: float
    sm_mhz: int
    memory_mhz: int
    watts: float
    limit_watts: float
    reasons: int


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("workloads", nargs="*", metavar="WORKLOAD", default=DEFAULT)
    parser.add_argument("--backend", default="hopper")
    parser.add_argument("--seconds", type=float, default=0.8)
    args = parser.parse_args()
    wanted = named(args.workloads, parser)
    table, state = kernels(args.backend), State(model(), "nvfp4", "nvfp4")
    for name, work in wanted.items():
        torch.manual_seed(0)
        ready = work.make(table, state)
        for call in ready.calls:
            call()
        replay = captured(ready.calls)
        torch.cuda.synchronize()
        with watched() as seen:
            time.sleep(IDLE_S)
            timings = replayed(replay, len(ready.calls), args.seconds)
        print(f"{name}, {len(ready.calls)} calls a replay, after {IDLE_S:.0f} s without work")
        print("\n".join(lines(timings, seen)), flush=True)
        del ready, replay
        torch.cuda.empty_cache()
    return 0


def replayed(replay: Callable[[], None], calls: int, seconds: float) -> list[tuple[float, float]]:
    """When each replay had ended, and its us a call."""
    timings = []
    begun = time.monotonic()
    while time.monotonic() - begun < seconds:
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        replay()
        end.record()
        end.synchronize()
        timings.append((time.monotonic(), start.elapsed_time(end) * 1e3 / calls))
    return timings


@contextmanager
def watched() -> Iterator[list[Seen]]:
    """What nvidia-smi says until the end; of the GPU that this process sees first."""
    uuid = f"GPU-{torch.cuda.get_device_properties(0).uuid}"
    command = ["nvidia-smi", f"--id={uuid}", f"--query-gpu={FIELDS}"]
    command += ["--format=csv,noheader,nounits", f"--loop-ms={EVERY_MS}"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, bufsize=1)
    seen: list[Seen] = []

    def read() -> None:
        assert process.stdout is not None
        for line in process.stdout:
            seen.append(parsed(line, time.monotonic()))

    reader = threading.Thread(target=read)
    reader.start()
    try:
        yield seen
    finally:
        process.kill()
        process.wait()
        reader.join()


def parsed(line: str, now: float) -> Seen:
    sm, memory, watts, limit, reasons = (word.strip() for word in line.split(","))
    return Seen(now, int(sm), int(memory), float(watts), float(limit), int(reasons, 16))


def lines(timings: Sequence[tuple[float, float]], seen: Sequence[Seen]) -> Iterator[str]:
    """A line for each stretch of time."""
    if not timings:
        return
    first = timings[0][0]
    ends = list(STRETCHES)
    while ends[-1] < timings[-1][0] - first:
        ends.append(2 * ends[-1])
    yield f"  {'seconds':>11} {'replays':>8} {'us a call':>10}  {'SM MHz':>7} {'memory':>7}  watts"
    begin = 0.0
    for end in ends:
        own = [us for at, us in timings if begin <= at - first < end]
        told = [one for one in seen if begin <= one.time - first < end]
        if own:
            line = f"  {begin:5.2f}-{end:5.2f} {len(own):8} {median(own):10.1f}"
            yield line + (f"  {said(told)}" if told else "")
        begin = end


def said(told: Sequence[Seen]) -> str:
    held = [
        f"{word} in {sum(bool(one.reasons & bits) for one in told)} of {len(told)}"
        for word, bits in (("power", POWER), ("heat", HEAT))
        if any(one.reasons & bits for one in told)
    ]
    line = f"{median(one.sm_mhz for one in told):7.0f} "
    line += f"{median(one.memory_mhz for one in told):7.0f} "
    line += f"{median(one.watts for one in told):6.0f} of {told[0].limit_watts:.0f}"
    return line + (f"  held by {', '.join(held)}" if held else "")


if __name__ == "__main__":
    sys.exit(main())

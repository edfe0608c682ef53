"""`winnow bench kernels`: each op checked, then timed, with its bytes and its share of the machine.

On a GPU: the workloads of `winnow.bench.kernel_work` as CUDA-graph replays whose inputs rotate, so
that nothing large sits in the L2 cache; the read bandwidth and the matmul peak that a time is set
against are measured in the same run. On a CPU: the small cases of each op's `cases.py` on the
host's clock. What fails its check gets no time.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from statistics import median
from typing import Any

import torch

from winnow.bench.conformance import KERNEL_OPS, cases
from winnow.bench.kernel_peers import Peers
from winnow.bench.kernel_state import State
from winnow.bench.kernel_work import Work, model, works
from winnow.bench.machine import commit, machine, software
from winnow.bench.record import Record
from winnow.errors import RequestError
from winnow.ops.case import Case, judge
from winnow.ops.table import DEVICES, Kernels, kernels, server

_REPLAYS = 15
_CPU_SAMPLES = 5
_PEAK_SIZE = 8192


@dataclass(frozen=True)
class Peak:
    """What this device does at best, measured: TB/s of a sum's reads, TFLOP/s of a bf16 product."""

    read_tb_s: float
    bf16_tflop_s: float


@dataclass(frozen=True)
class Line:
    """One workload: `samples` in us, empty where the check failed; `peers` us by name."""

    op: str
    name: str
    served_by: str
    check: str
    samples: tuple[float, ...]
    num_bytes: int
    num_flops: int
    goal_us: float | None
    peers: dict[str, float]
    record: Record | None

    @property
    def us(self) -> float | None:
        return median(self.samples) if self.samples else None


def measure(
    backend: str,
    ops: Sequence[str] | None = None,
    only: str = "",
    formats: tuple[str, str] = ("nvfp4", "nvfp4"),
    peers: Peers | None = None,
) -> tuple[Peak | None, Iterator[Line]]:
    """The peaks of the device, and a line for each workload of `ops` (default: all) whose name
    has `only` in it, as it is measured. `formats`: of K and V, of index keys."""
    unknown = set(ops or ()) - set(KERNEL_OPS)
    if unknown:
        raise RequestError(f"no op {sorted(unknown)}: use some of {', '.join(KERNEL_OPS)}")
    table = kernels(backend)
    wanted = tuple(ops or KERNEL_OPS)
    if DEVICES[backend] == "cpu":
        return None, _small_cases(table, wanted, only)
    peak = peaks()
    return peak, _workloads(table, wanted, only, State(model(), *formats), peak, peers)


def peaks() -> Peak:
    """Measured on the current GPU."""
    data = torch.empty(1 << 29, device="cuda").normal_()
    read = data.nbytes / median(timed([partial(torch.sum, data)] * 2)) / 1e6
    a, b = (torch.randn(_PEAK_SIZE, _PEAK_SIZE, device="cuda").bfloat16() for _ in range(2))
    return Peak(read, 2 * _PEAK_SIZE**3 / median(timed([partial(torch.mm, a, b)] * 2)) / 1e6)


def timed(calls: Sequence[Callable[[], Any]], replays: int = _REPLAYS) -> tuple[float, ...]:
    """Microseconds of one call: replays of a CUDA graph of all calls, over their number."""
    for call in calls[:2]:
        call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    graph.replay()
    samples = []
    for _ in range(replays):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        samples.append(round(start.elapsed_time(end) * 1e3 / len(calls), 3))
    return tuple(samples)


def _workloads(
    table: Kernels, ops: Sequence[str], only: str, state: State, peak: Peak, peers: Peers | None
) -> Iterator[Line]:
    for work in works():
        if work.op not in ops or only not in f"{work.op} {work.name}":
            continue
        torch.manual_seed(0)
        ready = work.make(table, state)
        checked = ready.check()
        said = f"error {checked.error:.1e}" if checked.tolerance else "identical"
        said += f", {checked.note}" if checked.note else ""
        line = Line(
            op=work.op,
            name=work.name,
            served_by=server(getattr(table, work.op)),
            check=said if checked.passed else f"FAILED: error {checked.error:.1e}",
            samples=timed(ready.calls) if checked.passed else (),
            num_bytes=ready.num_bytes,
            num_flops=ready.num_flops,
            goal_us=work.goal(ready.num_bytes, peak.read_tb_s),
            peers={},
            record=None,
        )
        del ready
        torch.cuda.empty_cache()
        if line.samples and peers is not None and work.peer:
            line = replace(line, peers=peers.times(work.peer, timed))
        yield replace(line, record=_record(work, line, state, table, peak)) if line.us else line


def _record(work: Work, line: Line, state: State, table: Kernels, peak: Peak) -> Record:
    held = {
        "kv": state.kv_format,
        "index": state.index_format,
        "weight": "mxfp8",
        "experts": "nvfp4",
    }
    return Record(
        level="kernel",
        what=f"{work.op} {work.name}",
        unit="us",
        samples=line.samples,
        workload={
            **work.shape,
            "op": work.op,
            "num_bytes": line.num_bytes,
            "num_flops": line.num_flops,
        },
        conditions={
            "formats": {"compute": "bf16", **{name: held[name] for name in work.formats}},
            "backend": table.backend,
            "served_by": line.served_by,
            "parallel": {"plan": "tp1", "devices": 1},
            "acceptance": {"kind": "none"},
            "cache_state": "inputs rotate through more than the L2 cache",
            "concurrency": None,
            "latency_objective": None,
            "timing": "CUDA graph replay over its calls",
            "read_tb_s": round(peak.read_tb_s, 3),
            "bf16_tflop_s": round(peak.bf16_tflop_s, 1),
            "check": line.check,
            "peers_us": line.peers,
        },
        machine=machine(1),
        software=software() | {"cuda": str(torch.version.cuda)},
        commit=commit(),
    )


def _small_cases(table: Kernels, ops: Sequence[str], only: str) -> Iterator[Line]:
    """Cases with a cost; the others test behaviour, not speed."""
    for op in ops:
        reference = getattr(kernels("reference"), op)
        function = getattr(table, op)
        for case in cases(op):
            if case.op == op and case.cost.num_bytes and only in f"{op} {case.name}":
                yield _small_case(case, function, reference, table)


def _small_case(
    case: Case, function: Callable[..., Any], reference: Callable[..., Any], table: Kernels
) -> Line:
    verdicts = judge(case, function, reference)
    failed = [v for v in verdicts if not v.passed]
    worst = max((v.error for v in verdicts), default=0.0)
    samples: tuple[float, ...] = ()
    if not failed:
        inputs = case.inputs()
        samples = tuple(_on_the_clock(case, function, inputs) for _ in range(_CPU_SAMPLES))
    line = Line(
        op=case.op,
        name=case.name,
        served_by=server(function),
        check=f"FAILED: error {worst:.1e}" if failed else f"error {worst:.1e}",
        samples=samples,
        num_bytes=case.cost.num_bytes,
        num_flops=case.cost.num_flops,
        goal_us=None,
        peers={},
        record=None,
    )
    return replace(line, record=_cpu_record(line, table)) if samples else line


def _on_the_clock(case: Case, function: Callable[..., Any], inputs: dict[str, Any]) -> float:
    start = time.perf_counter()
    case.outputs(function, inputs)
    return round((time.perf_counter() - start) * 1e6, 2)


def _cpu_record(line: Line, table: Kernels) -> Record:
    return Record(
        level="kernel",
        what=f"{line.op} {line.name}",
        unit="us",
        samples=line.samples,
        workload={
            "op": line.op,
            "case": line.name,
            "num_bytes": line.num_bytes,
            "num_flops": line.num_flops,
        },
        conditions={
            "formats": {"case": line.name},
            "backend": table.backend,
            "served_by": line.served_by,
            "parallel": {"plan": "tp1", "devices": 1},
            "acceptance": {"kind": "none"},
            "cache_state": "inputs as the run before left them",
            "concurrency": None,
            "latency_objective": None,
            "check": line.check,
        },
        machine=machine(torch.get_num_threads()),
        software=software(),
        commit=commit(),
    )


HEADER = (
    f"{'op':16} {'workload':34} {'us':>9} {'goal':>6} {'MB':>8} {'TB/s':>5} {'read':>5} "
    f"{'TF/s':>6} {'peak':>5}  peers (us); check"
)


def render(line: Line, peak: Peak | None) -> str:
    """A line of the table under `HEADER`; shares are of the peaks measured in the same run."""
    us = line.us
    goal = f"{line.goal_us:.0f}" if line.goal_us else ""
    start = f"{line.op:16} {line.name[:34]:34} "
    peers = ", ".join(f"{name} {time:.1f}" for name, time in line.peers.items())
    said = "; ".join(part for part in (peers, line.check) if part)
    if us is None:
        return f"{start}{'-':>9} {goal:>6} {line.num_bytes / 1e6:8.1f} {'':24}  {said}"
    rate, flops = line.num_bytes / us / 1e6, line.num_flops / us / 1e6
    shares = (
        ("", "")
        if peak is None
        else (f"{rate / peak.read_tb_s:.0%}", f"{flops / peak.bf16_tflop_s:.0%}")
    )
    return (
        f"{start}{us:9.1f} {goal:>6} {line.num_bytes / 1e6:8.1f} {rate:5.2f} {shares[0]:>5} "
        f"{flops:6.1f} {shares[1]:>5}  {said}"
    )

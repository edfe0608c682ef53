"""The conformance suite: every case of every op, a backend against the reference.

Owns the list of ops and the table that is printed. Knows nothing of timing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from importlib import import_module
from typing import Any

from winnow.ops.case import Case, Verdict, judge
from winnow.ops.table import Kernels, kernels

KERNEL_OPS = (
    "norm",
    "linear",
    "attention_inputs",
    "select_blocks",
    "sparse_attention",
    "dense_attention",
    "mlp",
    "moe",
    "sample",
)


@dataclass(frozen=True)
class Report:
    """What one op showed. `identical`: outputs that must be equal bit for bit; None if it has
    none. `worst` is the largest error over its tolerance among the others (at most 1.0 passes)."""

    op: str
    served_by: str
    cases: int
    failed: tuple[str, ...]
    identical: bool | None
    worst: float | None


def cases(op: str) -> tuple[Case, ...]:
    """The cases of an op; of the formats for `codec`."""
    found: tuple[Case, ...] = import_module(f"winnow.ops.{op}.cases").CASES
    return found


def verdicts(op: str, served: Callable[[str], Callable[..., Any]]) -> Iterator[Verdict]:
    """Judge every case of `op`; `served` gives the function under test by the case's op."""
    for case in cases(op):
        yield from judge(case, served(case.op), _reference(op, case.op))


def conformance(backend: str) -> list[Report]:
    """Run every case of every op on `backend`; UnsupportedError if it cannot serve here."""
    table = kernels(backend)
    reports = [_report("codec", table, lambda name: _codec(backend, name))]
    for op in KERNEL_OPS:
        reports.append(_report(op, table, lambda name: _kernel(table, name)))
    return reports


def _report(op: str, table: Kernels, served: Callable[[str], Callable[..., Any]]) -> Report:
    found = list(verdicts(op, served))
    exact = [v.passed for v in found if v.tolerance == 0.0]
    shares = [v.error / v.tolerance for v in found if v.tolerance > 0.0]
    module = served(cases(op)[0].op).__module__
    return Report(
        op=op,
        served_by=module,
        cases=len(cases(op)),
        failed=tuple(f"{v.case}: {v.output} error {v.error:.2e}" for v in found if not v.passed),
        identical=all(exact) if exact else None,
        worst=max(shares) if shares else None,
    )


def _kernel(table: Kernels, name: str) -> Callable[..., Any]:
    function: Callable[..., Any] = getattr(table, name)
    return function


def _codec(backend: str, name: str) -> Callable[..., Any]:
    module = import_module(f"winnow.ops.codec.{'reference' if backend == 'reference' else 'cpu'}")
    function: Callable[..., Any] = getattr(module, name)
    return function


def _reference(op: str, name: str) -> Callable[..., Any]:
    function: Callable[..., Any] = getattr(import_module(f"winnow.ops.{op}.reference"), name)
    return function


def render(reports: list[Report]) -> str:
    """A table for people, failures below it."""
    lines = [f"{'op':18} {'cases':>5}  {'exact':8} {'error/tolerance':>15}  served by"]
    for r in reports:
        exact = {None: "-", True: "yes", False: "NO"}[r.identical]
        worst = "-" if r.worst is None else f"{r.worst:.3f}"
        lines.append(f"{r.op:18} {r.cases:5}  {exact:8} {worst:>15}  {r.served_by}")
    lines += [f"FAILED {r.op}: {what}" for r in reports for what in r.failed]
    return "\n".join(lines)


def as_json(reports: list[Report]) -> list[dict[str, Any]]:
    """The same for programs."""
    return [asdict(r) for r in reports]

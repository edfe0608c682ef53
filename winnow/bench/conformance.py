"""The conformance suite: every case of every op, a backend against the reference.

A backend of another device gets its inputs there; the reference always runs on the CPU. Owns the
list of ops and the table that is printed. Knows nothing of timing.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from importlib import import_module
from typing import Any

from winnow.ops.case import Case, Verdict, judge
from winnow.ops.table import DEVICES, Kernels, chosen, kernels

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
    """What one op showed. `served`: how many calls each module served, of the cases. `identical`:
    outputs that must be equal bit for bit; None if it has none. `worst` is the largest error over
    its tolerance among the others (at most 1.0 passes)."""

    op: str
    served: dict[str, int]
    cases: int
    failed: tuple[str, ...]
    identical: bool | None
    worst: float | None


def cases(op: str) -> tuple[Case, ...]:
    """The cases of an op; of the formats for `codec`."""
    found: tuple[Case, ...] = import_module(f"winnow.ops.{op}.cases").CASES
    return found


Served = Callable[[str], Callable[..., Any] | None]
"""The function under test by a case's op; None where the backend has no use for it."""


def verdicts(op: str, served: Served, device: str = "cpu") -> Iterator[Verdict]:
    """Judge every case of `op` whose function is served."""
    for case in cases(op):
        function = served(case.op)
        if function is not None:
            yield from judge(case, function, _reference(op, case.op), device)


def conformance(backend: str, ops: Sequence[str] | None = None) -> list[Report]:
    """Run every case of `ops`, of all by default, on `backend`; UnsupportedError if it cannot
    serve here."""
    table = kernels(backend)
    return [_report(op, table, _served(op, table)) for op in ops or ("codec", *KERNEL_OPS)]


def _served(op: str, table: Kernels) -> Served:
    """The function under test of each name that the cases of `op` use."""
    return lambda name: _codec(table.backend, name) if op == "codec" else _kernel(table, name)


def _report(op: str, table: Kernels, served: Served) -> Report:
    served_by: Counter[str] = Counter()
    found = list(verdicts(op, _counting(served, served_by), DEVICES[table.backend]))
    exact = [v.passed for v in found if v.tolerance == 0.0]
    shares = [v.error / v.tolerance for v in found if v.tolerance > 0.0]
    return Report(
        op=op,
        served=dict(served_by.most_common()),
        cases=len({(v.op, v.case) for v in found}),
        failed=tuple(f"{v.case}: {v.output} error {v.error:.2e}" for v in found if not v.passed),
        identical=all(exact) if exact else None,
        worst=max(shares) if shares else None,
    )


def _counting(served: Served, by_module: Counter[str]) -> Served:
    """`served`, its functions counting in `by_module` which module serves each call."""

    def counted(name: str) -> Callable[..., Any] | None:
        function = served(name)
        if function is None:
            return None

        def call(*args: Any, **kwargs: Any) -> Any:
            by_module[chosen(function, *args, **kwargs).__module__] += 1
            return function(*args, **kwargs)

        return call

    return counted


def _kernel(table: Kernels, name: str) -> Callable[..., Any]:
    function: Callable[..., Any] = getattr(table, name)
    return function


def _codec(backend: str, name: str) -> Callable[..., Any] | None:
    """Kernels on a GPU write no MXFP8, so it is None there."""
    own = {"cpu": "cpu", "reference": "reference", "cuda": "cuda", "hopper": "cuda"}[backend]
    return getattr(import_module(f"winnow.ops.codec.{own}"), name, None)


def _reference(op: str, name: str) -> Callable[..., Any]:
    function: Callable[..., Any] = getattr(import_module(f"winnow.ops.{op}.reference"), name)
    return function


def render(reports: list[Report]) -> str:
    """A table for people, failures below it."""
    lines = [f"{'op':18} {'cases':>5}  {'exact':8} {'error/tolerance':>15}  calls served by"]
    for r in reports:
        exact = {None: "-", True: "yes", False: "NO"}[r.identical]
        worst = "-" if r.worst is None else f"{r.worst:.3f}"
        served = ", ".join(f"{module} ({count})" for module, count in r.served.items())
        lines.append(f"{r.op:18} {r.cases:5}  {exact:8} {worst:>15}  {served}")
    lines += [f"FAILED {r.op}: {what}" for r in reports for what in r.failed]
    return "\n".join(lines)


def as_json(reports: list[Report]) -> list[dict[str, Any]]:
    """The same for programs."""
    return [asdict(r) for r in reports]

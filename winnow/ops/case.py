"""Shared inputs of tests, conformance and benchmarks: what an op is given and how it is judged.

An op's `cases.py` defines `CASES`. A case makes fresh inputs at every call, so that a kernel which
writes into page rows never sees another run's writes. Knows nothing of backends.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

Outputs = dict[str, Tensor]


@dataclass(frozen=True)
class Cost:
    """The fewest bytes that must move and the operations that must be done."""

    num_bytes: int = 0
    num_flops: int = 0


@dataclass(frozen=True)
class Case:
    """One set of inputs of an op.

    `inputs()` builds keyword arguments; `outputs(function, inputs)` calls the function and names
    what it returned or wrote. `tolerances` gives, per output, the relative L2 error allowed
    against the reference; 0.0 means equal bit for bit (NaN equal to NaN).
    """

    op: str
    name: str
    inputs: Callable[[], dict[str, Any]]
    outputs: Callable[[Callable[..., Any], dict[str, Any]], Outputs]
    tolerances: Mapping[str, float]
    cost: Cost = field(default_factory=Cost)


@dataclass(frozen=True)
class Verdict:
    """How one output compared: `error` is relative L2, infinite where shapes or NaNs differ."""

    op: str
    case: str
    output: str
    tolerance: float
    error: float

    @property
    def passed(self) -> bool:
        return self.error <= self.tolerance


def judge(case: Case, function: Callable[..., Any], reference: Callable[..., Any]) -> list[Verdict]:
    """Run `function` before the reference, each on fresh inputs, and compare every output."""
    got = case.outputs(function, case.inputs())
    want = case.outputs(reference, case.inputs())
    if got.keys() != want.keys() or want.keys() != set(case.tolerances):
        raise AssertionError(f"{case.op}/{case.name}: outputs {sorted(got)} against {sorted(want)}")
    return [
        Verdict(case.op, case.name, name, case.tolerances[name], error(got[name], want[name]))
        for name in want
    ]


def error(got: Tensor, want: Tensor) -> float:
    """Relative L2 error; 0.0 for equal tensors, inf for other shapes, dtypes, NaN or inf places."""
    if got.shape != want.shape or got.dtype != want.dtype:
        return float("inf")
    if not want.numel():
        return 0.0
    if not want.dtype.is_floating_point:
        return 0.0 if torch.equal(got, want) else float("inf")
    a, b = got.double(), want.double()
    finite = b.isfinite()
    if not torch.equal(a.isfinite(), finite) or not torch.equal(
        a[~finite].nan_to_num(), b[~finite].nan_to_num()
    ):
        return float("inf")
    difference = torch.linalg.vector_norm(a[finite] - b[finite])
    if difference == 0:
        return 0.0
    return float(difference / torch.linalg.vector_norm(b[finite]).clamp_min(1e-30))

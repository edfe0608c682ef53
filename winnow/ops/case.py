"""Shared inputs of tests, conformance and benchmarks: what an op is given and how it is judged.

An op's `cases.py` defines `CASES`. A case makes fresh inputs at every call, so that a kernel which
writes into page rows never sees another run's writes. Cases are made on the CPU and moved to the
device of the function under test. Knows nothing of backends.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields, is_dataclass, replace
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


def judge(
    case: Case,
    function: Callable[..., Any],
    reference: Callable[..., Any],
    device: torch.device | str = "cpu",
) -> list[Verdict]:
    """Run `function` on `device` before the reference on the CPU, each on fresh inputs, and
    compare every output."""
    moved = case.outputs(function, to_device(case.inputs(), device))
    got = {name: output.cpu() for name, output in moved.items()}
    want = case.outputs(reference, case.inputs())
    if got.keys() != want.keys() or want.keys() != set(case.tolerances):
        raise AssertionError(f"{case.op}/{case.name}: outputs {sorted(got)} against {sorted(want)}")
    return [
        Verdict(case.op, case.name, name, case.tolerances[name], error(got[name], want[name]))
        for name in want
    ]


def to_device(value: Any, device: torch.device | str) -> Any:
    """`value` with every tensor in it on `device`: in dataclasses, tuples, lists and dicts.

    Strides stay, gaps included, and views of one memory stay views of one: pages whose codes and
    scales are parts of the same rows are so afterwards. `value` itself where nothing moves.
    """
    return _move(value, torch.device(device), {})


def _move(value: Any, device: torch.device, memories: dict[int, Tensor]) -> Any:
    if isinstance(value, Tensor):
        return value if value.device.type == device.type else _move_view(value, device, memories)
    if is_dataclass(value) and not isinstance(value, type):
        held = {f.name: getattr(value, f.name) for f in fields(value) if f.init}
        moved = {name: _move(part, device, memories) for name, part in held.items()}
        changed = any(moved[name] is not part for name, part in held.items())
        return replace(value, **moved) if changed else value
    if isinstance(value, dict):
        return {key: _move(part, device, memories) for key, part in value.items()}
    if type(value) in (tuple, list):
        moved_parts = [_move(part, device, memories) for part in value]
        unchanged = all(a is b for a, b in zip(moved_parts, value, strict=True))
        return value if unchanged else type(value)(moved_parts)
    return value


def _move_view(view: Tensor, device: torch.device, memories: dict[int, Tensor]) -> Tensor:
    """`view` as a view of a copy of its whole memory, of which `memories` keeps one each."""
    storage = view.untyped_storage()
    if storage.data_ptr() not in memories:
        whole = torch.empty(0, dtype=torch.uint8, device=view.device).set_(storage)
        memories[storage.data_ptr()] = whole.to(device)
    typed = torch.empty(0, dtype=view.dtype, device=device)
    copy = memories[storage.data_ptr()].untyped_storage()
    return typed.set_(copy, view.storage_offset(), view.shape, view.stride())


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

"""Inputs of `norm`."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor

from winnow.ops.case import Case, Cost
from winnow.ops.case_data import DTYPES, TOLERANCE


def _inputs(x: Tensor, zero_weight: bool = False) -> dict[str, Any]:
    weight = torch.zeros(x.shape[-1]) if zero_weight else torch.linspace(-0.5, 0.5, x.shape[-1])
    return {"x": x.clone(memory_format=torch.preserve_format), "weight": weight, "eps": 1e-6}


def _random(rows: int, width: int, dtype: torch.dtype) -> Tensor:
    generator = torch.Generator().manual_seed(rows)
    return (torch.randn(rows, width, generator=generator) * 3).to(dtype)


def _hostile() -> Tensor:
    x = _random(6, 96, torch.float32)
    x[0] = 0.0
    x[1] = 1e-30
    x[2, 5] = float("inf")
    x[3, 7] = float("nan")
    x[4] *= 1e18
    return x


def _case(name: str, x: Tensor, *, zero_weight: bool = False) -> Case:
    return Case(
        op="norm",
        name=name,
        inputs=partial(_inputs, x, zero_weight),
        outputs=lambda f, kw: {"out": f(**kw)},
        tolerances={"out": TOLERANCE[x.dtype]},
        cost=Cost(2 * x.numel() * x.element_size(), 4 * x.numel()),
    )


def _sum_case(name: str, x: Tensor, delta: Tensor) -> Case:
    return Case(
        op="add_norm",
        name=f"sum, {name}",
        inputs=lambda: {"delta": delta.clone(), **_inputs(x)},
        outputs=lambda f, kw: dict(zip(("sum", "out"), f(**kw), strict=True)),
        tolerances={"sum": 0.0, "out": TOLERANCE[x.dtype]},
        cost=Cost(4 * x.numel() * x.element_size(), 5 * x.numel()),
    )


CASES = (
    *(
        _case(f"{rows}x96 {name}", _random(rows, 96, dtype))
        for rows in (0, 1, 127, 128, 129)
        for name, dtype in DTYPES.items()
    ),
    _case("weight of zeros", _random(4, 96, torch.float32), zero_weight=True),
    _case("non-contiguous", _random(12, 192, torch.float32)[::3, :96]),
    _case("zeros, tiny, inf, NaN, huge", _hostile()),
    *(
        _sum_case(
            f"{rows}x{width} {name}", _random(rows, width, dtype), _random(rows, width, dtype)
        )
        for rows, width in ((0, 96), (1, 96), (129, 96), (3, 6144))
        for name, dtype in DTYPES.items()
    ),
    _sum_case("zeros, tiny, inf, NaN, huge", _hostile(), _hostile().flip(0)),
    _sum_case(
        "non-contiguous", _random(12, 192, torch.float32)[::3, :96], _random(4, 96, torch.float32)
    ),
)

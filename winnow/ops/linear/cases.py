"""Inputs of `linear`."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch

from winnow.ops.case import Case, Cost
from winnow.ops.case_data import DTYPES, TOLERANCE, weight
from winnow.ops.weights import Mxfp8Weight, tensors


def _inputs(kind: str, dtype: torch.dtype, rows: int, n: int, k: int, fault: str) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(rows + k)
    x = torch.randn(rows, k, generator=generator)
    if fault == "nan and inf":
        x[1, 3], x[2, 5] = float("nan"), float("inf")
    if fault == "non-contiguous":
        x = torch.randn(k, 2 * rows, generator=generator).T[::2]
    if fault == "rows of all sizes":
        x *= 2.0 ** torch.linspace(-60, 60, rows)[:, None].round()
    plain = {torch.float32: "fp32", torch.bfloat16: "bf16"}[dtype]
    made = weight(plain if kind == "plain" else kind, generator, n, k)
    if fault == "nan and zero weights":
        assert isinstance(made, Mxfp8Weight)
        made.codes[: n // 2, :32].zero_()
        made.scales[: n // 2, 0], made.scales[n - 1, -1] = 0, 255
    return {"x": x.to(dtype), "weight": made}


def _case(kind: str, name: str, rows: int, n: int = 80, k: int = 96, fault: str = "") -> Case:
    inputs = partial(_inputs, kind, DTYPES[name], rows, n, k, fault)
    moved = sum(t.nbytes for t in tensors(inputs()["weight"]))
    return Case(
        op="linear",
        name=f"{kind} {rows}x{k} to {n} {name} {fault}".rstrip(),
        inputs=inputs,
        outputs=lambda f, kw: {"out": f(**kw)},
        tolerances={"out": TOLERANCE[DTYPES[name]]},
        cost=Cost(moved, 2 * rows * n * k),
    )


def _head_inputs(name: str, rows: int, n: int, given: bool, fault: str) -> dict[str, Any]:
    made = _inputs("plain", DTYPES[name], rows, n, 96, fault)
    return made | {"out": torch.full((rows, n), float("nan")) if given else None}


def _head_case(name: str, rows: int, n: int = 80, given: bool = False, fault: str = "") -> Case:
    into = " into memory given" if given else ""
    return Case(
        op="head",
        name=f"{rows}x96 to {n} {name}{into} {fault}".rstrip(),
        inputs=partial(_head_inputs, name, rows, n, given, fault),
        outputs=lambda f, kw: {"out": f(**kw)},
        # Whatever the inputs' dtype: what is rounded to it fails.
        tolerances={"out": TOLERANCE[torch.float32]},
        cost=Cost(n * 96 * DTYPES[name].itemsize, 2 * rows * n * 96),
    )


CASES = (
    *(
        _case(kind, name, rows)
        for kind in ("plain", "mxfp8", "nvfp4")
        for name in DTYPES
        for rows in (0, 1, 15, 16, 17, 129)
    ),
    *(_case(kind, "fp32", 3, n=33, k=1120) for kind in ("plain", "mxfp8", "nvfp4")),
    _case("mxfp8", "fp32", 2, n=3000, k=512),
    # Widths of whole strips and pieces: a packed form exists (winnow.ops.fragments_mxfp8).
    *(
        _case("mxfp8", "bf16", rows, n, k)
        for n, k in ((80, 384), (144, 1152))
        for rows in (1, 7, 8, 9, 16, 17, 33, 64, 65, 129)
    ),
    *(
        _case("mxfp8", "bf16", 5, n=80, k=384, fault=fault)
        for fault in (
            "nan and inf",
            "non-contiguous",
            "rows of all sizes",
            "nan and zero weights",
        )
    ),
    _case("mxfp8", "bf16", 9, n=16, k=128),
    _case("plain", "fp32", 4, fault="nan and inf"),
    _case("nvfp4", "fp32", 5, fault="non-contiguous"),
    *(
        _head_case(name, rows, given=given)
        for name in DTYPES
        for rows in (0, 1, 17)
        for given in (False, True)
    ),
    # More values than a CPU widens at a time.
    _head_case("bf16", 3, n=11_000),
    _head_case("bf16", 4, fault="nan and inf"),
    _head_case("bf16", 5, given=True, fault="non-contiguous"),
)

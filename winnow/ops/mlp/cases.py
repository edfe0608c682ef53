"""Inputs of `mlp`."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import torch

from winnow.ops.case import Case, Cost
from winnow.ops.case_data import DTYPES, TOLERANCE, mlp_weights, small_spec
from winnow.spec.model import ModelSpec


def _spec(kind: str) -> ModelSpec:
    """`wide`: widths that fill the tiles of every kernel."""
    spec = small_spec()
    return replace(spec, hidden_size=384, dense_width=256) if kind.startswith("wide") else spec


def _inputs(kind: str, dtype: torch.dtype, rows: int, size: float) -> dict[str, Any]:
    spec = _spec(kind)
    generator = torch.Generator().manual_seed(rows)
    x = torch.randn(rows, spec.hidden_size, generator=generator) * size
    weights = mlp_weights(kind.removeprefix("wide "), generator, spec.dense_width, spec.hidden_size)
    return {"x": x.to(dtype), "weights": weights, "spec": spec}


def _case(kind: str, name: str, rows: int, size: float = 1.0, note: str = "") -> Case:
    spec = _spec(kind)
    values = 3 * spec.dense_width * spec.hidden_size
    return Case(
        op="mlp",
        name=f"{kind} {rows} rows {name} {note}".rstrip(),
        inputs=partial(_inputs, kind, DTYPES[name], rows, size),
        outputs=lambda f, kw: {"out": f(**kw)},
        tolerances={"out": 2 * TOLERANCE[DTYPES[name]]},
        cost=Cost(4 * values, 2 * rows * values),
    )


CASES = (
    *(
        _case(kind, name, rows)
        for kind, name in (("fp32", "fp32"), ("bf16", "bf16"), ("mxfp8", "fp32"), ("nvfp4", "bf16"))
        for rows in (0, 1, 17)
    ),
    # Gate and up beyond the limit of 7 on every weight format: the clamps are lost one at a time.
    *(_case(kind, "fp32", 9, 40.0, "beyond the limit") for kind in ("fp32", "mxfp8", "nvfp4")),
    *(_case("wide mxfp8", "bf16", rows, 40.0, "beyond the limit") for rows in (3, 140)),
)

"""Inputs of `moe`."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import torch

from winnow.ops.case import Case, Cost
from winnow.ops.case_data import DTYPES, TOLERANCE, mlp_weights, moe_weights, small_spec
from winnow.ops.weights import MoeWeights
from winnow.spec.model import ModelSpec


def _spec(kind: str) -> ModelSpec:
    """Of `mixed` and `packed` the widths are whole tiles of packed weights."""
    spec = small_spec()
    if kind not in ("mixed", "packed"):
        return spec
    return replace(spec, hidden_size=384, expert_width=256, shared_width=128)


def _weights(kind: str, generator: torch.Generator, spec: ModelSpec) -> MoeWeights:
    """`mixed`: as in a mixed checkpoint, NVFP4 experts and a shared one in MXFP8; `packed`: all in
    NVFP4."""
    if kind != "mixed":
        return moe_weights("nvfp4" if kind == "packed" else kind, generator, spec)
    weights = moe_weights("nvfp4", generator, spec)
    shared = mlp_weights("mxfp8", generator, spec.shared_width, spec.hidden_size)
    return replace(weights, shared=shared)


def _inputs(kind: str, dtype: torch.dtype, rows: int, fault: str) -> dict[str, Any]:
    spec = _spec(kind)
    generator = torch.Generator().manual_seed(rows)
    x = torch.randn(rows, spec.hidden_size, generator=generator)
    weights = _weights(kind, generator, spec)
    if fault == "beyond the limit":
        x *= 40.0
    if fault == "one row of NaN":
        x[1] = float("nan")
    if fault == "ties":
        weights = replace(weights, router=torch.zeros_like(weights.router))
        weights = replace(weights, router_bias=torch.zeros_like(weights.router_bias))
    if fault == "all to the same experts":
        bias = torch.tensor([0.0, 9.0, 0.0, 9.0, 9.0, 0.0, 0.0, 9.0])
        weights = replace(weights, router_bias=bias)
    return {"x": x.to(dtype), "weights": weights, "spec": spec}


def _case(kind: str, name: str, rows: int, fault: str = "") -> Case:
    spec = _spec(kind)
    values = 3 * spec.expert_width * spec.hidden_size
    return Case(
        op="moe",
        name=f"{kind} {rows} rows {name} {fault}".rstrip(),
        inputs=partial(_inputs, kind, DTYPES[name], rows, fault),
        outputs=lambda f, kw: {"out": f(**kw)},
        tolerances={"out": 4 * TOLERANCE[DTYPES[name]]},
        cost=Cost(
            min(rows * spec.experts_per_token, spec.num_experts) * values * 4,
            2 * rows * spec.experts_per_token * values,
        ),
    )


CASES = (
    *(
        _case(kind, name, rows)
        for kind, name in (("fp32", "fp32"), ("bf16", "bf16"), ("nvfp4", "fp32"), ("nvfp4", "bf16"))
        for rows in (0, 1, 17, 129)
    ),
    _case("fp32", "fp32", 5, "ties"),
    _case("fp32", "fp32", 33, "all to the same experts"),
    _case("fp32", "fp32", 4, "one row of NaN"),
    *(_case("mixed", "bf16", rows) for rows in (0, 1, 9, 65)),
    *(
        _case("mixed", "bf16", rows, fault)
        for rows, fault in (
            (5, "ties"),
            (33, "all to the same experts"),
            (4, "one row of NaN"),
            # As many rows as each of hopper's ways to compute experts is for.
            (6, "beyond the limit"),
            (40, "beyond the limit"),
            (260, "beyond the limit"),
        )
    ),
    *(_case("packed", "bf16", rows) for rows in (5, 9, 64, 140, 260)),
    *(
        _case("packed", "bf16", rows, fault)
        for rows, fault in (
            (33, "all to the same experts"),
            (12, "one row of NaN"),
            (40, "beyond the limit"),
            (260, "beyond the limit"),
        )
    ),
    *(_case(kind, "fp32", 6, "beyond the limit") for kind in ("fp32", "mxfp8", "nvfp4")),
)

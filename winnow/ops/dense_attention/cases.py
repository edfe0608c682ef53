"""Inputs of `dense_attention`."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch

from winnow.ops.case import Case, Cost
from winnow.ops.case_data import DTYPES, TOLERANCE, Tokens, filled, small_spec, wide_spec
from winnow.spec.model import ModelSpec

_EDGES = tuple(Tokens(n, 1) for n in (1, 127, 128, 129, 511, 512, 513, 3000))
_VERIFY = (Tokens(700, 4), Tokens(129, 8), Tokens(0, 2), Tokens(1026, 5))
_PREFILL = (Tokens(260, 260), Tokens(1300, 130), Tokens(0, 3), Tokens(1000, 1))


def _inputs(
    tokens: tuple[Tokens, ...], kv: str, dtype: torch.dtype, fault: str, spec: ModelSpec
) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(17)
    state = filled(tokens, kv, "fp32", spec=spec)
    q = torch.randn(state.batch.num_rows, spec.num_heads, spec.head_dim, generator=generator)
    if fault == "sharp":
        q *= 50.0
    if fault == "non-contiguous":
        q = q.repeat(1, 2, 1)[:, ::2]
    return {"q": q.to(dtype), "batch": state.batch, "pages": state.pages}


def _case(
    name: str,
    tokens: tuple[Tokens, ...],
    kv: str = "fp32",
    compute: str = "fp32",
    fault: str = "",
    wide: bool = False,
) -> Case:
    spec = wide_spec() if wide else small_spec()
    visible = sum(t.kv_len for t in tokens)
    return Case(
        op="dense_attention",
        name=f"{name}{' wide' if wide else ''} kv {kv} {compute} {fault}".rstrip(),
        inputs=partial(_inputs, tokens, kv, DTYPES[compute], fault, spec),
        outputs=lambda f, kw: {"out": f(**kw)},
        tolerances={"out": TOLERANCE[DTYPES[compute]]},
        cost=Cost(
            8 * visible * spec.num_kv_heads * spec.head_dim,
            sum(4 * t.num_rows * t.kv_len for t in tokens) * spec.num_heads * spec.head_dim,
        ),
    )


CASES = (
    *(
        _case(name, tokens, kv, compute)
        for name, tokens in (("edges", _EDGES), ("verify", _VERIFY), ("prefill", _PREFILL))
        for kv, compute in (("fp32", "fp32"), ("bf16", "bf16"), ("fp8", "bf16"), ("nvfp4", "fp32"))
    ),
    _case("no rows", ()),
    _case("decode", _EDGES, fault="sharp"),
    _case("verify", _VERIFY, fault="non-contiguous"),
    *(
        _case(name, tokens, kv, "bf16", wide=True)
        for name, tokens in (("edges", _EDGES), ("prefill", _PREFILL))
        for kv in ("bf16", "fp8", "nvfp4")
    ),
    _case("prefill", _PREFILL, "nvfp4", "bf16", fault="sharp", wide=True),
    _case("prefill", _PREFILL, "fp8", "bf16", fault="non-contiguous", wide=True),
)

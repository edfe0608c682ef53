"""Inputs of `attention_inputs`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from winnow.ops.attention_inputs.reference import rope_tables
from winnow.ops.case import Case, Cost, Outputs
from winnow.ops.case_data import DTYPES, TOLERANCE, Tokens, filled, small_spec, weight
from winnow.ops.codec import reference as codec
from winnow.ops.paged import Paged, read
from winnow.ops.weights import AttentionWeights

_RAGGED = (Tokens(1, 1), Tokens(0, 2), Tokens(129, 3), Tokens(300, 130), Tokens(128, 128))


def _inputs(
    kind: str, dtype: torch.dtype, kv: str, index: str, tokens: tuple[Tokens, ...], fault: str
) -> dict[str, Any]:
    spec = small_spec()
    generator = torch.Generator().manual_seed(7)
    state = filled(tokens, kv, index)
    state.rows.fill_(0xFF)
    x = torch.randn(state.batch.num_rows, spec.hidden_size, generator=generator)
    hidden, dim = spec.hidden_size, spec.head_dim
    norms = (torch.randn(n, generator=generator) * 0.2 for n in (dim, dim, 128, 128))
    weights = AttentionWeights(
        qkv=weight(kind, generator, (spec.num_heads + 2 * spec.num_kv_heads) * dim, hidden),
        q_norm=next(norms),
        k_norm=next(norms),
        index=weight(kind, generator, (spec.num_index_heads + 1) * spec.index_dim, hidden),
        index_q_norm=next(norms),
        index_k_norm=next(norms),
        out=weight(kind, generator, hidden, spec.num_heads * dim),
    )
    pages = state.pages
    match fault:
        case "full attention":
            weights = replace(weights, index=None, index_q_norm=None, index_k_norm=None)
            pages = replace(pages, index=None)
        case "NaN and huge values":
            x[0] = float("nan")
            x[1] *= 1e30
    return {
        "x": x.to(dtype),
        "weights": weights,
        "spec": spec,
        "rope": rope_tables(state.batch.positions, spec),
        "batch": state.batch,
        "pages": pages,
    }


def _outputs(function: Callable[..., Any], kwargs: dict[str, Any]) -> Outputs:
    q, index_q = function(**kwargs)
    pages, batch = kwargs["pages"], kwargs["batch"]
    outputs = {"q": q, "k": _stored(pages.key, batch), "v": _stored(pages.value, batch)}
    if index_q is not None:
        outputs |= {"index_q": index_q, "index_k": _stored(pages.index, batch)}
    return outputs


def _stored(paged: Paged, batch: Any) -> Tensor:
    """What lies in the rows' slots and in the whole pages around them, padding's page apart."""
    return read(codec, paged, batch.block_tables.unique()[1:], torch.float32)


def _case(
    kind: str,
    name: str,
    kv: str,
    index: str,
    tokens: tuple[Tokens, ...] = _RAGGED,
    fault: str = "",
) -> Case:
    dtype = DTYPES[name]
    # One rounding step of the stored format where the two projections straddle a boundary.
    step = {"fp32": TOLERANCE[dtype], "bf16": 2.0**-7, "fp8": 2.0**-4, "nvfp4": 2.0**-4}
    bounds = {"q": TOLERANCE[dtype], "k": step[kv], "v": step[kv]}
    if fault != "full attention":
        bounds |= {"index_q": TOLERANCE[dtype], "index_k": step[index]}
    return Case(
        op="attention_inputs",
        name=f"{kind} {name} kv {kv} index {index} {fault}".rstrip(),
        inputs=partial(_inputs, kind, dtype, kv, index, tokens, fault),
        outputs=_outputs,
        tolerances=bounds,
        cost=Cost(),
    )


CASES = (
    _case("fp32", "fp32", "fp32", "fp32"),
    _case("bf16", "bf16", "bf16", "bf16"),
    _case("fp32", "fp32", "fp8", "fp8"),
    _case("fp32", "fp32", "nvfp4", "nvfp4"),
    _case("fp32", "fp32", "fp8", "nvfp4"),
    _case("mxfp8", "bf16", "nvfp4", "fp8"),
    _case("fp32", "fp32", "fp32", "fp32", fault="full attention"),
    _case("fp32", "fp32", "fp32", "fp32", fault="NaN and huge values"),
    _case("fp32", "fp32", "nvfp4", "nvfp4", fault="NaN and huge values"),
    _case(
        "fp32",
        "fp32",
        "nvfp4",
        "nvfp4",
        tokens=(Tokens(0, 1), Tokens(5, 5)),
        fault="padding first",
    ),
)

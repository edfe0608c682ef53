"""Inputs of `select_blocks`. Products are exact, so selections must be identical."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor

from winnow.ops.case import Case, Cost
from winnow.ops.case_data import DTYPES, Filled, Tokens, eighths, filled, small_spec
from winnow.ops.codec import reference as codec
from winnow.ops.paged import write

_EDGES = tuple(Tokens(n, 1) for n in (1, 127, 128, 129, 511, 512, 513, 640, 641, 3000))
_VERIFY = (Tokens(700, 4), Tokens(129, 8), Tokens(2000, 2), Tokens(1026, 5))
_PREFILL = (Tokens(640, 300), Tokens(1300, 130), Tokens(0, 3), Tokens(1000, 1))
_LONG = Tokens(2000, 3)


def _inputs(
    tokens: tuple[Tokens, ...], kv: str, index: str, dtype: torch.dtype, topk: int, fault: str
) -> dict[str, Any]:
    spec = small_spec()
    generator = torch.Generator().manual_seed(11)
    keys = _hostile_keys(fault, spec.index_dim, generator)
    first_page = _first_page_beyond_2_gib(kv, index) if fault == "huge page ids" else 1
    state = filled(tokens, kv, index, index_keys=keys, first_page=first_page)
    index_q = eighths(generator, state.batch.num_rows, spec.num_index_heads, spec.index_dim)
    if fault == "zero queries":
        index_q.zero_()
    if fault == "+0 and -0":
        index_q = index_q.abs()
    if fault == "NaN query":
        index_q[0, 1, 3] = float("nan")
    if fault == "non-contiguous":
        index_q = index_q.repeat(1, 2, 1)[:, ::2]
    if fault in ("NaN keys", "infinite keys"):
        _spoil(state, float("nan") if fault == "NaN keys" else float("inf"))
    return {
        "index_q": index_q.to(dtype),
        "index": state.pages.index,
        "batch": state.batch,
        "topk": topk,
    }


def _hostile_keys(fault: str, dim: int, generator: torch.Generator) -> Tensor | None:
    """Index keys that every request of a case shares, where the fault lies in them."""
    if fault == "all keys equal":
        return eighths(generator, 1, dim).expand(3000, dim)
    if fault == "few distinct scores":
        return eighths(generator, 3, dim)[torch.randint(3, (3000,), generator=generator)]
    if fault == "+0 and -0":
        zeros = torch.zeros(3000, dim)
        zeros[torch.rand(3000, generator=generator) < 0.5] = -0.0
        return zeros
    return None


def _spoil(state: Filled, value: float) -> None:
    """Put `value` into the second block of every request, and NaN among it for infinities."""
    assert state.pages.index is not None
    pages = state.batch.block_tables[:, 1]
    bad = torch.full((len(pages), 1, small_spec().index_dim), value)
    write(codec, state.pages.index, bad, pages, torch.full_like(pages, 17))


def _first_page_beyond_2_gib(kv: str, index: str) -> int:
    row_bytes = filled((Tokens(1, 1),), kv, index).rows.shape[1]
    return (1 << 31) // row_bytes + 3


def _case(
    name: str,
    tokens: tuple[Tokens, ...],
    index: str = "fp32",
    compute: str = "fp32",
    topk: int = 4,
    fault: str = "",
    kv: str = "fp32",
) -> Case:
    dim = small_spec().index_dim
    read_tokens = sum(t.kv_len for t in tokens)
    return Case(
        op="select_blocks",
        name=f"{name} index {index} {compute} top-{topk} {fault}".rstrip(),
        inputs=partial(_inputs, tokens, kv, index, DTYPES[compute], topk, fault),
        outputs=lambda f, kw: {"ids": f(**kw)},
        tolerances={"ids": 0.0},
        cost=Cost(read_tokens * dim * 4, sum(2 * t.num_rows * t.kv_len * dim * 4 for t in tokens)),
    )


CASES = (
    *(
        _case(name, tokens, index, compute)
        for name, tokens in (("edges", _EDGES), ("verify", _VERIFY), ("prefill", _PREFILL))
        for index, compute in (
            ("fp32", "fp32"),
            ("bf16", "bf16"),
            ("fp8", "bf16"),
            ("nvfp4", "fp32"),
        )
    ),
    _case("decode", _EDGES, "nvfp4", "bf16", topk=16),
    _case("decode", _EDGES, topk=1),
    _case("no rows", ()),
    *(
        _case("long", (_LONG, Tokens(1500, 60)), index, fault=fault)
        for index in ("fp32", "nvfp4")
        for fault in (
            "all keys equal",
            "few distinct scores",
            "+0 and -0",
            "zero queries",
            "NaN query",
            "NaN keys",
            "infinite keys",
            "non-contiguous",
        )
    ),
    _case("long", (_LONG, Tokens(1, 1)), "nvfp4", fault="huge page ids", kv="nvfp4"),
)

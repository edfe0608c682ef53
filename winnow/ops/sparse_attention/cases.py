"""Inputs of `sparse_attention`, with selections at random and of the current block alone."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor

from winnow.ops.batch import Batch
from winnow.ops.case import Case, Cost
from winnow.ops.case_data import DTYPES, TOLERANCE, Tokens, filled, small_spec, wide_spec
from winnow.ops.codec import reference as codec
from winnow.ops.paged import write
from winnow.spec.model import BLOCK_TOKENS, ModelSpec

_EDGES = tuple(Tokens(n, 1) for n in (1, 127, 128, 129, 511, 512, 513, 3000))
_VERIFY = (Tokens(700, 4), Tokens(129, 8), Tokens(0, 2), Tokens(1026, 5))
_PREFILL = (Tokens(260, 260), Tokens(1300, 130), Tokens(0, 3), Tokens(1000, 1), Tokens(257, 17))
_MANY_ROWS = (Tokens(390, 390), Tokens(2700, 130), Tokens(0, 3), Tokens(1000, 1))


def random_ids(batch: Batch, heads: int, topk: int, generator: torch.Generator) -> Tensor:
    """A selection of each row and head of its own, the current block always among it."""
    ids = torch.full((batch.num_rows, heads, topk), -1, dtype=torch.int32)
    seen = batch.kv_lens[batch.row_request] > 0
    for row in seen.nonzero().flatten().tolist():
        current = int(batch.positions[row]) // BLOCK_TOKENS
        for head in range(heads):
            past = torch.randperm(current, generator=generator)[: topk - 1]
            chosen = torch.cat([past, torch.tensor([current])]).sort().values
            ids[row, head, : len(chosen)] = chosen.int()
    return ids


def _inputs(
    tokens: tuple[Tokens, ...], kv: str, dtype: torch.dtype, topk: int, fault: str, spec: ModelSpec
) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(13)
    first_page = 1
    if fault == "huge page ids":
        one = filled((Tokens(1, 1),), kv, "fp32", spec=spec).rows
        first_page = (1 << 31) // one.shape[1] + 3
    state = filled(tokens, kv, "fp32", spec=spec, first_page=first_page)
    rows, heads = state.batch.num_rows, spec.num_kv_heads
    q = torch.randn(rows, spec.num_heads, spec.head_dim, generator=generator)
    ids = random_ids(state.batch, heads, topk, generator)
    if fault == "sharp":
        q *= 50.0
    if fault == "non-contiguous":
        q = q.repeat(1, 2, 1)[:, ::2]
    if fault == "NaN in one request":
        pages = state.batch.block_tables[:1, 0]
        bad = torch.full((1, heads, spec.head_dim), float("nan"))
        write(codec, state.pages.key, bad, pages, torch.zeros_like(pages))
    return {"q": q.to(dtype), "ids": ids, "batch": state.batch, "pages": state.pages}


def _case(
    name: str,
    tokens: tuple[Tokens, ...],
    kv: str = "fp32",
    compute: str = "fp32",
    topk: int = 4,
    fault: str = "",
    wide: bool = False,
) -> Case:
    spec = wide_spec() if wide else small_spec()
    rows = sum(t.num_rows for t in tokens)
    values = rows * spec.num_kv_heads * topk * BLOCK_TOKENS * spec.head_dim
    return Case(
        op="sparse_attention",
        name=f"{name}{' wide' if wide else ''} kv {kv} {compute} top-{topk} {fault}".rstrip(),
        inputs=partial(_inputs, tokens, kv, DTYPES[compute], topk, fault, spec),
        outputs=lambda f, kw: {"out": f(**kw)},
        tolerances={"out": TOLERANCE[DTYPES[compute]]},
        cost=Cost(8 * values, 4 * values * spec.heads_per_kv_head),
    )


CASES = (
    *(
        _case(name, tokens, kv, compute)
        for name, tokens in (("edges", _EDGES), ("verify", _VERIFY), ("prefill", _PREFILL))
        for kv, compute in (("fp32", "fp32"), ("bf16", "bf16"), ("fp8", "bf16"), ("nvfp4", "fp32"))
    ),
    _case("decode", _EDGES, "nvfp4", "bf16", topk=16),
    _case("decode", _EDGES, topk=1),
    _case("no rows", ()),
    _case("decode", _EDGES, fault="sharp"),
    _case("verify", _VERIFY, fault="non-contiguous"),
    _case("decode", (Tokens(129, 1), Tokens(700, 1)), fault="NaN in one request"),
    _case("decode", (Tokens(2000, 3), Tokens(1, 1)), "nvfp4", fault="huge page ids"),
    *(
        _case(name, tokens, kv, "bf16", topk=16, wide=True)
        for name, tokens in (("edges", _EDGES), ("verify", _VERIFY), ("many rows", _MANY_ROWS))
        for kv in ("bf16", "fp8", "nvfp4")
    ),
    *(
        _case(name, tokens, "nvfp4", "bf16", fault=fault, wide=True)
        for name, tokens, fault in (
            ("decode", _EDGES, "sharp"),
            ("verify", _VERIFY, "non-contiguous"),
            ("decode", (Tokens(129, 1), Tokens(700, 1)), "NaN in one request"),
            ("decode", (Tokens(2000, 3), Tokens(1, 1)), "huge page ids"),
            ("many rows", _MANY_ROWS, "sharp"),
            ("many rows", _MANY_ROWS, "non-contiguous"),
            ("many rows", (Tokens(700, 690),), "huge page ids"),
        )
    ),
)

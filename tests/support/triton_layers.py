"""What tests/ops/test_triton_layers.py runs in Triton's interpreter: norm, products, experts and
sampling on CPU tensors, against their definitions. Knows nothing of processes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from importlib import import_module

import torch

from winnow.ops.case import Case, judge
from winnow.ops.case_data import moe_weights, small_spec
from winnow.ops.moe import reference
from winnow.ops.moe.cuda import moe
from winnow.ops.moe.routing import route
from winnow.ops.sample import SampleRow, ranks
from winnow.ops.sample.cuda import sample

NORM = (
    "0x96 fp32",
    "1x96 bf16",
    "weight of zeros",
    "non-contiguous",
    "zeros, tiny, inf, NaN, huge",
    "sum, 0x96 bf16",
    "sum, 1x96 bf16",
    "sum, 3x6144 bf16",
    "sum, zeros, tiny, inf, NaN, huge",
    "sum, non-contiguous",
)
LINEAR = (
    *(f"{kind} {rows}x96 to 80 {dtype}" for kind in ("plain", "mxfp8", "nvfp4")
      for rows in (0, 1, 17) for dtype in ("fp32", "bf16")),
    *(f"{kind} 129x96 to 80 bf16" for kind in ("mxfp8", "nvfp4")),
    *(f"{kind} 3x1120 to 33 fp32" for kind in ("mxfp8", "nvfp4")),
    "plain 4x96 to 80 fp32 nan and inf",
    "nvfp4 5x96 to 80 fp32 non-contiguous",
)  # fmt: skip
MLP = (
    *(f"{kind} 1 rows {dtype}" for kind, dtype in (("bf16", "bf16"), ("nvfp4", "bf16"))),
    "fp32 0 rows fp32",
    "mxfp8 17 rows fp32",
    *(f"{kind} 9 rows fp32 beyond the limit" for kind in ("fp32", "mxfp8", "nvfp4")),
)
MOE = (
    "fp32 0 rows fp32",
    *(f"{kind} 1 rows bf16" for kind in ("bf16", "nvfp4")),
    "nvfp4 17 rows bf16",
    "fp32 5 rows fp32 ties",
    "fp32 33 rows fp32 all to the same experts",
    "fp32 4 rows fp32 one row of NaN",
    *(f"{kind} 6 rows fp32 beyond the limit" for kind in ("fp32", "mxfp8", "nvfp4")),
)
MOST_IDS = 20_000
"""Sums over a vocabulary take the interpreter long; every stage is in a smaller one too."""
RANKED = (
    *("all filters", "top_k, ties at the cut", "top_p, ties at the cut"),
    *("top_p after top_k, ties", "equal logits"),
)
FEW = 3
"""Rows kept of `RANKED`: all ask for the same, and each takes the interpreter half a second."""


def products() -> None:
    for op, names in (("norm", NORM), ("linear", LINEAR), ("mlp", MLP)):
        _judge(op, names)


def experts() -> None:
    _judge("moe", MOE)


def sampling() -> None:
    cases: tuple[Case, ...] = import_module("winnow.ops.sample.cases").CASES
    small = [case.name for case in cases if case.cost.num_bytes <= 4 * 8 * MOST_IDS]
    _judge("sample", [name for name in small if name not in RANKED])
    _judge("sample", RANKED, rows=FEW)


def whole_rows() -> None:
    """What is done for a row whose candidates are more than there is room for."""
    ranks.CANDIDATES = 8
    _judge("sample", ["all filters", "top_p after top_k, ties", "equal logits"], rows=FEW)


def routing() -> None:
    """More experts than a power of two, a hidden axis of several splits, pairs of several blocks
    of the sort, and experts with no pair."""
    spec = replace(small_spec(), hidden_size=600, num_experts=37, experts_per_token=5)
    generator = torch.Generator().manual_seed(5)
    weights = moe_weights("fp32", generator, spec)
    bias = weights.router_bias.clone()
    bias[3], bias[36] = -9.0, -9.0
    weights = replace(weights, router_bias=bias)
    x = torch.randn(206, spec.hidden_size, generator=generator)
    routes = route(x, weights, spec)
    chosen, share = reference.route(x, weights, spec)
    torch.testing.assert_close(routes.share.view(share.shape), share, rtol=1e-5, atol=0)
    flat = chosen.reshape(-1)
    assert torch.equal(routes.order.long(), flat.argsort(stable=True)), "pairs out of order"
    assert torch.equal(routes.counts.long(), flat.bincount(minlength=37)), "wrong counts"
    assert torch.equal(routes.starts.long(), routes.counts.long().cumsum(0) - routes.counts)
    assert int(routes.counts[3]) == int(routes.counts[36]) == 0


def replay() -> None:
    """What a captured graph relies on: the same launches serve any routing of as many rows."""
    spec = small_spec()
    generator = torch.Generator().manual_seed(6)
    weights = moe_weights("nvfp4", generator, spec)
    x = torch.randn(9, spec.hidden_size, generator=generator)
    for favoured in (0, 5, 7):
        bias = torch.full((spec.num_experts,), -1.0)
        bias[favoured] = 9.0
        uneven = replace(weights, router_bias=bias)
        error = moe(x, uneven, spec) - reference.moe(x, uneven, spec)
        assert float(error.norm()) < 1e-4, favoured


def alone() -> None:
    """A row's token and logprobs are the same to the bit alone and in a batch."""
    logits = torch.randn(6, 5000, generator=torch.Generator().manual_seed(7)) * 2
    asked = (
        {}, {"top_k": 40}, {"top_p": 0.8}, {"min_p": 0.02}, {"temperature": 0.0},
        {"presence_penalty": 0.5, "output_ids": (1, 2)},
    )  # fmt: skip
    rows = [SampleRow(seed=i, index=i, logprobs=3, **own) for i, own in enumerate(asked)]
    together = sample(logits, rows)
    for i, row in enumerate(rows):
        single = sample(logits[i : i + 1], [row])
        assert single.ids[0] == together.ids[i], row
        assert single.logprobs[0] == together.logprobs[i], row


def _first(case: Case, rows: int) -> Case:
    return replace(
        case, inputs=lambda: {name: given[:rows] for name, given in case.inputs().items()}
    )


def _judge(op: str, names: Sequence[str], rows: int | None = None) -> None:
    """`rows`: of `sample`'s cases, only the first so many."""
    cases = {case.name: case for case in import_module(f"winnow.ops.{op}.cases").CASES}
    own, definition = (import_module(f"winnow.ops.{op}.{kind}") for kind in ("cuda", "reference"))
    failed = [
        verdict
        for case in (_first(cases[name], rows) if rows else cases[name] for name in names)
        for verdict in judge(case, getattr(own, case.op), getattr(definition, case.op))
        if not verdict.passed
    ]
    assert not failed, "\n".join(map(str, failed))

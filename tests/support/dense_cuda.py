"""What tests/ops/test_dense_cuda.py runs in Triton's interpreter: the cases of dense attention,
whole and split. Knows nothing of processes."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

from winnow.ops.case import judge
from winnow.ops.case_data import Tokens
from winnow.ops.dense_attention import cases, cuda
from winnow.ops.dense_attention.reference import dense_attention

RAGGED = (Tokens(1, 1), Tokens(0, 2), Tokens(300, 2), Tokens(129, 0), Tokens(130, 5))
DECODE = (Tokens(1, 1), Tokens(128, 1), Tokens(0, 1), Tokens(641, 1))


def attended() -> None:
    for tokens, stored, splits in (
        (RAGGED, "nvfp4", 1),
        (RAGGED, "fp8", 3),
        (DECODE, "bf16", 8),
        (DECODE, "nvfp4", 5),
    ):
        case = cases._case(f"{splits} splits", tokens, stored, "bf16")
        inputs = case.inputs()
        rows, group = inputs["q"].shape[0], 2
        own = cuda.plan_for(rows, len(tokens), group, 4, 6, 132)
        plan = replace(own, splits=splits)
        for verdict in judge(case, partial(cuda.attend, plan=plan), dense_attention):
            print(verdict, plan)
            assert verdict.passed, verdict

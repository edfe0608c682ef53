"""Dense attention in Triton, split and whole: on a GPU against the reference, else in Triton's
interpreter, and accepted by the compiler."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

pytest.importorskip("triton")

from support.compiled import compiling
from support.interpreted import interpreted

from winnow.ops.case import error, judge, to_device
from winnow.ops.case_data import Tokens, filled, small_spec
from winnow.ops.dense_attention import cuda
from winnow.ops.dense_attention.cases import CASES
from winnow.ops.dense_attention.reference import dense_attention

gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")

SPEC = replace(small_spec(), num_heads=64, head_dim=128)
SHARED_MEMORY = 99 * 1024
"""Bytes that a program may have on the smallest of the GPUs that `cuda` serves."""
TOKENS = {
    "decode": (Tokens(1, 1), Tokens(0, 1), Tokens(128, 1), Tokens(129, 1), Tokens(3000, 1)),
    "verify": (Tokens(700, 4), Tokens(129, 8), Tokens(0, 2), Tokens(1026, 5)),
    "prefill": (Tokens(260, 130), Tokens(700, 70), Tokens(0, 3), Tokens(1000, 1)),
}


@gpu
@pytest.mark.parametrize("splits", [None, 1, 2, 7])
@pytest.mark.parametrize("stored", ["bf16", "fp8", "nvfp4"])
@pytest.mark.parametrize("name", TOKENS)
def test_output_is_the_references_however_it_is_split(
    name: str, stored: str, splits: int | None
) -> None:
    state = filled(TOKENS[name], stored, "fp32", spec=SPEC)
    rows = state.batch.num_rows
    generator = torch.Generator().manual_seed(1)
    q = torch.randn(rows, SPEC.num_heads, SPEC.head_dim, generator=generator).bfloat16()
    blocks = state.batch.block_tables.shape[1]
    plan = cuda.plan_for(rows, state.batch.num_requests, 16, 4, blocks, 132)
    plan = plan if splits is None else replace(plan, splits=splits)
    moved = to_device({"q": q, "batch": state.batch, "pages": state.pages}, "cuda")
    got = cuda.attend(**moved, plan=plan).cpu()
    want = dense_attention(q.float(), state.batch, state.pages)
    wrong = error(got.float(), want)
    print(f"relative error {wrong:.2e}")
    assert wrong <= 2.0**-8
    assert not got[(want == 0).flatten(1).all(-1)].any(), "padding is not zero"


@gpu
def test_every_case_of_the_op() -> None:
    for case in CASES:
        for verdict in judge(case, cuda.dense_attention, dense_attention, "cuda"):
            assert verdict.passed, verdict


def test_the_cases_agree_with_the_definition_whole_and_split() -> None:
    interpreted("support.dense_cuda:attended")


@pytest.mark.parametrize("capability", [80, 90])
@pytest.mark.parametrize("name", TOKENS)
def test_the_kernels_compile_for_the_models_widths(name: str, capability: int) -> None:
    built: dict[tuple[Any, ...], Any] = {}
    with compiling(capability, built):
        for stored in ("bf16", "fp8", "nvfp4"):
            state = filled(TOKENS[name], stored, "fp32", spec=SPEC)
            q = torch.zeros(state.batch.num_rows, SPEC.num_heads, SPEC.head_dim).bfloat16()
            cuda.dense_attention(q, state.batch, state.pages)
    assert {key[0] for key in built} <= {"_attend", "_merge"}
    for key, kernel in built.items():
        assert kernel.metadata.shared <= SHARED_MEMORY, key[0]


def test_few_tiles_are_split_until_the_gpu_is_full_and_many_are_not() -> None:
    def plan(rows: int, requests: int, blocks: int = 1024) -> cuda.Plan:
        return cuda.plan_for(rows, requests, 16, 4, blocks, 132)

    assert (plan(1, 1).splits, plan(1, 1).tile_rows) == (128, 1)
    assert plan(1, 1, blocks=3).splits == 2
    assert plan(32, 32).splits == 4
    assert plan(256, 256).splits == 1
    assert (plan(8, 1).tile_rows, plan(8, 1).products) == (8, 128)
    assert (plan(4, 1).tile_rows, plan(4, 1).products) == (4, 64)
    assert (plan(8192, 1).tile_rows, plan(8192, 1).splits) == (8, 1)
    assert cuda.plan_for(4, 1, 2, 4, 9, 132).products == 16


def test_tiles_of_products_in_fp32_stay_small() -> None:
    plan = cuda.plan_for(8192, 1, 2, 4, 9, 132, wide=True)
    assert (plan.tile_rows, plan.products, plan.tokens) == (8, 16, 32)
    assert cuda.plan_for(8192, 1, 64, 4, 9, 132, wide=True).products == 64

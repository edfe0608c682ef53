"""Hopper's dense prefill: against the reference on a GPU; what it builds, takes and refuses."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from winnow.errors import UnsupportedError
from winnow.ops import cuda_build
from winnow.ops.case import error, to_device
from winnow.ops.case_data import Tokens, filled, small_spec
from winnow.ops.dense_attention import hopper_prefill
from winnow.ops.dense_attention.reference import dense_attention

gpu = pytest.mark.skipif(
    not torch.cuda.is_available() or torch.cuda.get_device_capability()[0] != 9,
    reason="needs an H100 or H200",
)

SPEC = replace(small_spec(), num_heads=64, head_dim=128)
TOKENS = {
    "decode": (Tokens(1, 1), Tokens(0, 1), Tokens(128, 1), Tokens(129, 1), Tokens(3000, 1)),
    "verify": (Tokens(700, 4), Tokens(129, 8), Tokens(0, 2), Tokens(1026, 5)),
    "prefill": (Tokens(260, 130), Tokens(700, 70), Tokens(0, 3), Tokens(1000, 1)),
}


@gpu
@pytest.mark.parametrize("stored", ["bf16", "fp8", "nvfp4"])
@pytest.mark.parametrize("name", TOKENS)
def test_the_prefill_kernels_output_is_the_references(name: str, stored: str) -> None:
    state = filled(TOKENS[name], stored, "fp32", spec=SPEC)
    generator = torch.Generator().manual_seed(2)
    q = torch.randn(state.batch.num_rows, SPEC.num_heads, SPEC.head_dim, generator=generator)
    for factor in (1.0, 50.0):
        x = (q * factor).bfloat16()
        moved = to_device({"q": x, "batch": state.batch, "pages": state.pages}, "cuda")
        got = hopper_prefill.dense_attention(**moved).cpu()
        want = dense_attention(x.float(), state.batch, state.pages)
        wrong = error(got.float(), want)
        print(f"relative error {wrong:.2e}")
        assert wrong <= 2.0**-8
        assert not got[(want == 0).flatten(1).all(-1)].any(), "padding is not zero"


@pytest.mark.skipif(cuda_build.compiler() is None, reason="needs nvcc")
def test_the_prefill_kernel_builds() -> None:
    assert cuda_build.build(hopper_prefill.SOURCE).is_file()


def test_the_prefill_kernel_takes_many_rows_and_refuses_other_heads() -> None:
    state = filled((Tokens(300, 300),), "nvfp4", "fp32", spec=SPEC)
    q = torch.zeros(300, SPEC.num_heads, SPEC.head_dim, dtype=torch.bfloat16)
    assert hopper_prefill.takes(q, state.batch, state.pages)
    wide = filled((Tokens(300, 300),), "bf16", "fp32", spec=SPEC)
    assert not hopper_prefill.takes(q, wide.batch, wide.pages)
    few = filled(tuple(Tokens(20, 16) for _ in range(16)), "nvfp4", "fp32", spec=SPEC)
    assert not hopper_prefill.takes(q[:256], few.batch, few.pages)
    with pytest.raises(UnsupportedError, match=r"not 128 and 8"):
        hopper_prefill.dense_attention(q[:, :32], state.batch, state.pages)

"""Which backend serves where, and how a backend of two kinds of kernels chooses between them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from winnow.errors import UnsupportedError
from winnow.ops import table
from winnow.ops.case_data import Tokens, filled, small_spec
from winnow.ops.select_blocks import hopper as select
from winnow.ops.sparse_attention import hopper as sparse
from winnow.ops.sparse_attention import hopper_prefill as sparse_prefill
from winnow.ops.table import ByCase, Kernels, insertion, kernels, server, why_not


def on_a_gpu(
    monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int], *, nvcc: str | None = "nvcc"
) -> None:
    """As if this machine had a GPU of that compute capability."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: capability)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "NVIDIA X")
    monkeypatch.setattr(table, "cuda_compiler", lambda: nvcc)
    monkeypatch.setattr(table, "find_spec", lambda name: name)


def test_without_a_gpu_both_gpu_backends_say_what_they_need(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert why_not("cuda") == "cuda needs an NVIDIA GPU and a CUDA build of torch; none was found"
    assert str(why_not("hopper")).startswith("hopper needs an NVIDIA H100 or H200")


@pytest.mark.parametrize(
    ("capability", "served"),
    [((7, 5), ()), ((8, 0), ("cuda",)), ((9, 0), ("cuda", "hopper")), ((10, 0), ("cuda",))],
)
def test_each_gpu_is_served_by_the_backends_that_know_it(
    monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int], served: tuple[str, ...]
) -> None:
    on_a_gpu(monkeypatch, capability)
    assert tuple(b for b in ("cuda", "hopper") if why_not(b) is None) == served


def test_without_triton_a_gpu_is_not_served_and_triton_is_named(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    on_a_gpu(monkeypatch, (9, 0))
    monkeypatch.setattr(table, "find_spec", lambda name: None)
    assert why_not("cuda") == "cuda needs triton: pip install 'triton>=3.6'"


def test_without_nvcc_hopper_points_to_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    on_a_gpu(monkeypatch, (9, 0), nvcc=None)
    assert why_not("cuda") is None
    assert "use backend (--backend) cuda" in str(why_not("hopper"))


def test_an_op_of_two_kinds_of_kernels_says_which_serves_what_and_chooses_by_arguments() -> None:
    calls: list[str] = []

    def small(x: int) -> int:
        calls.append("small")
        return x

    def large(x: int) -> int:
        calls.append("large")
        return -x

    op = ByCase("numbers below 3", lambda x: x < 3, small, large)
    assert (op(2), op(x=3)) == (2, -3)
    assert calls == ["small", "large"]
    assert server(op) == f"{__name__} for numbers below 3, else {__name__}"


def test_hopper_has_kernels_of_its_own_before_those_of_cuda(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pytest.importorskip("triton")
    on_a_gpu(monkeypatch, (9, 0))
    hopper, cuda = kernels("hopper"), kernels("cuda")
    differing = {op for op, module in hopper.served_by().items() if module != cuda.served_by()[op]}
    attention = {"attention_inputs", "select_blocks", "sparse_attention", "dense_attention"}
    assert differing == {"norm", "add_norm", "linear", "mlp", "moe", *attention}
    assert hopper.served_by()["attention_inputs"] == (
        "winnow.ops.attention_inputs.hopper for heads of 64 or 128 dims, "
        "else winnow.ops.attention_inputs.cuda"
    )
    assert all(hopper.served_by()[op].endswith(cuda.served_by()[op]) for op in differing)
    assert isinstance(hopper, Kernels)


@pytest.mark.parametrize(
    ("stored", "dtype", "rows", "taken"),
    [
        ("nvfp4", torch.bfloat16, 1, True),
        ("nvfp4", torch.bfloat16, 8, True),
        ("nvfp4", torch.bfloat16, 9, False),
        ("fp8", torch.bfloat16, 1, True),
        ("bf16", torch.bfloat16, 8, True),
        ("fp32", torch.bfloat16, 1, False),
        ("nvfp4", torch.float16, 1, False),
    ],
)
def test_the_decode_kernels_take_cache_formats_and_a_few_rows_a_request(
    stored: str, dtype: torch.dtype, rows: int, taken: bool
) -> None:
    spec = replace(small_spec(16), head_dim=128, num_heads=64, rotary_dim=64)
    state = filled((Tokens(300, rows),), stored, stored, spec=spec)
    q = torch.zeros(rows, 64, 128, dtype=dtype)
    ids = torch.zeros(rows, 4, 16, dtype=torch.int32)
    index: Any = state.pages.index
    assert select.takes(q[:, :4], index, state.batch, 16) == taken
    assert sparse.takes(q, ids, state.batch, state.pages) == (taken or rows > 8)


@pytest.mark.parametrize(("rows", "tokens", "taken"), [(187, 300, True), (188, 300, False)])
def test_a_few_rows_of_prefill_go_to_the_decode_kernel_of_sparse_attention(
    rows: int, tokens: int, taken: bool
) -> None:
    spec = replace(small_spec(16), head_dim=128, num_heads=64, rotary_dim=64)
    state = filled((Tokens(tokens, rows),), "nvfp4", "nvfp4", spec=spec)
    q = torch.zeros(rows, 64, 128, dtype=torch.bfloat16)
    ids = torch.zeros(rows, 4, 16, dtype=torch.int32)
    assert sparse.takes(q, ids, state.batch, state.pages) == taken
    assert sparse_prefill.takes(q, ids, state.batch, state.pages)


def test_what_has_no_kernel_for_the_insertion_alone_says_so() -> None:
    with pytest.raises(UnsupportedError, match="use cuda or hopper"):
        insertion("cpu")

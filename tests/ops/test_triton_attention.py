"""The Triton kernels of the formats, insertion, selection and attention: right by Triton's
interpreter, and accepted by the compiler for the GPUs they are meant for. What only a GPU shows is
not shown here.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

pytest.importorskip("triton")

from support.compiled import compiling
from support.interpreted import interpreted

from winnow.ops.attention_inputs.cuda import attention_inputs
from winnow.ops.attention_inputs.reference import rope_tables
from winnow.ops.case_data import Tokens, filled, small_spec, weight
from winnow.ops.dense_attention.cuda import dense_attention
from winnow.ops.select_blocks.cuda import select_blocks
from winnow.ops.sparse_attention.cuda import sparse_attention
from winnow.ops.weights import AttentionWeights

SMALLEST_SHARED_MEMORY = 99 * 1024
"""Bytes that a program may have on the smallest of the GPUs that `cuda` serves."""


def test_the_formats_are_the_definitions_bit_for_bit() -> None:
    interpreted("support.triton_attention:codec")


def test_what_is_inserted_and_counted_as_clipped_is_the_definitions() -> None:
    interpreted("support.triton_attention:inserted")


def test_selections_are_the_definitions_ties_and_nan_included() -> None:
    interpreted("support.triton_attention:selected")


def test_attention_is_within_tolerance_of_the_definition_and_padding_gives_zeros() -> None:
    interpreted("support.triton_attention:attended")


# (compute capability, format, dtype, requests): the sizes of tiles follow the rows.
DECODE, PREFILL = (Tokens(300, 1),), (Tokens(300, 40),)
BUILT = [
    (90, "nvfp4", torch.bfloat16, DECODE),
    (90, "nvfp4", torch.bfloat16, PREFILL),
    (90, "bf16", torch.bfloat16, PREFILL),
    (90, "fp32", torch.float32, DECODE),
    (80, "fp8", torch.bfloat16, DECODE),
]


@pytest.mark.parametrize(
    ("capability", "stored", "dtype", "tokens"),
    BUILT,
    ids=[f"sm_{c} {f} {t[0].num_rows} rows" for c, f, _, t in BUILT],
)
def test_every_kernel_compiles_without_a_gpu_at_the_models_widths(
    capability: int, stored: str, dtype: torch.dtype, tokens: tuple[Tokens, ...]
) -> None:
    spec = replace(small_spec(16), num_heads=64, head_dim=128, rotary_dim=64)
    state = filled(tokens, stored, stored, spec=spec)
    rows, index = state.batch.num_rows, state.pages.index
    assert index is not None
    built: dict[tuple[Any, ...], Any] = {}
    with compiling(capability, built):
        q, index_q = attention_inputs(
            torch.zeros(rows, spec.hidden_size, dtype=dtype),
            _weights(spec, dtype),
            spec,
            rope_tables(state.batch.positions, spec),
            state.batch,
            state.pages,
        )
        assert index_q is not None
        ids = select_blocks(index_q, index, state.batch, spec.topk_blocks)
        sparse_attention(q, ids, state.batch, state.pages)
        dense_attention(q, state.batch, state.pages)
    names = sorted(key[0] for key in built)
    assert names == ["_attend", "_attend", "_merge", "_norm_rotate_insert", "_score", "_select"]
    for name, kernel in built.items():
        assert kernel.metadata.shared <= SMALLEST_SHARED_MEMORY, name[0]


def _weights(spec: Any, dtype: torch.dtype) -> AttentionWeights:
    kind, generator = {torch.float32: "fp32", torch.bfloat16: "bf16"}[dtype], torch.Generator()
    hidden, dim = spec.hidden_size, spec.head_dim
    return AttentionWeights(
        qkv=weight(kind, generator, (spec.num_heads + 2 * spec.num_kv_heads) * dim, hidden),
        q_norm=torch.zeros(dim),
        k_norm=torch.zeros(dim),
        index=weight(kind, generator, (spec.num_index_heads + 1) * spec.index_dim, hidden),
        index_q_norm=torch.zeros(spec.index_dim),
        index_k_norm=torch.zeros(spec.index_dim),
        out=weight(kind, generator, hidden, spec.num_heads * dim),
    )

"""Inputs that the cases of several ops share: a small model, filled pages, ragged batches.

Values are multiples of 1/8 within a few units, so that dot products of index keys are exact in
fp32 in any order of summation: a selection may then be asked to be identical everywhere.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from winnow.ops.batch import Batch
from winnow.ops.codec import reference as codec
from winnow.ops.paged import LayerPages, layer_pages, write
from winnow.ops.weights import (
    MlpWeights,
    MoeWeights,
    Mxfp8Weight,
    Nvfp4Weight,
    PlainWeight,
    Weight,
)
from winnow.spec.formats import FORMATS
from winnow.spec.model import BLOCK_TOKENS, ModelSpec
from winnow.spec.page import RowLayout

LAYER = 1
"""The layer that cases use: not the first, so that a view that ignores its layer is caught."""

TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2.0**-8}
"""Relative L2 error allowed between two orders of summation, by compute dtype."""


def small_spec(topk_blocks: int = 4) -> ModelSpec:
    """Three layers of an M3-shaped model; every width distinct, so that no two are mixed up."""
    return ModelSpec(
        vocab_size=320,
        hidden_size=96,
        num_heads=8,
        num_kv_heads=4,
        head_dim=64,
        rotary_dim=32,
        rope_theta=5e6,
        norm_eps=1e-6,
        max_positions=1 << 20,
        layer_is_sparse=(False, True, True),
        layer_is_moe=(False, True, True),
        index_dim=128,
        topk_blocks=topk_blocks,
        dense_width=160,
        expert_width=64,
        shared_width=32,
        num_experts=8,
        experts_per_token=4,
        routed_scale=2.0,
        swiglu_alpha=1.702,
        swiglu_limit=7.0,
        swiglu_beta=1.0,
        tied_embeddings=False,
        dtype="float32",
        quantization="none",
        bos_id=None,
        eos_ids=(),
    )


def wide_spec(topk_blocks: int = 4) -> ModelSpec:
    """`small_spec` with attention heads as MiniMax-M3 has them, 16 of 128 dims for a KV head."""
    return replace(
        small_spec(topk_blocks), num_heads=32, num_kv_heads=2, head_dim=128, rotary_dim=64
    )


def eighths(generator: torch.Generator, *shape: int) -> Tensor:
    """Bell-shaped multiples of 1/8 in [-4, 4], fp32."""
    return (torch.randn(*shape, generator=generator) * 8).round().clamp(-32, 32) / 8


@dataclass(frozen=True)
class Tokens:
    """One request of a case: `num_rows` query rows that end at token `kv_len` - 1."""

    kv_len: int
    num_rows: int


@dataclass(frozen=True)
class Filled:
    """Pages of one layer holding `keys`, `values`, `index_keys` of every request, and a batch
    over them. Free slots hold 0xFF bytes: NaN in every format."""

    rows: Tensor
    pages: LayerPages
    batch: Batch


def filled(
    sequences: Sequence[Tokens],
    kv_format: str = "fp32",
    index_format: str = "fp32",
    seed: int = 0,
    *,
    spec: ModelSpec | None = None,
    first_page: int = 1,
    index_keys: Tensor | None = None,
) -> Filled:
    """Pages in shuffled order with random contents; the rows' own slots are filled too.

    `first_page` > 1 leaves that many pages untouched, unpoisoned (for huge page ids).
    `index_keys` [tokens, index_dim] replaces the random index keys of every request.
    """
    spec = spec or small_spec()
    generator = torch.Generator().manual_seed(seed)
    layout = RowLayout.of(spec, FORMATS[kv_format], FORMATS[index_format])
    needed = [-(-s.kv_len // BLOCK_TOKENS) for s in sequences]
    total = sum(needed)
    rows = torch.empty(first_page + total, layout.row_bytes, dtype=torch.uint8)
    rows[first_page:].fill_(0xFF)
    shuffled = (torch.randperm(total, generator=generator) + first_page).tolist()
    pages = layer_pages(rows, layout, LAYER)
    tables, taken = [], 0
    for sequence, count in zip(sequences, needed, strict=True):
        table = shuffled[taken : taken + count]
        tables.append(table)
        taken += count
        tokens = torch.arange(sequence.kv_len)
        slots = (
            torch.tensor(table, dtype=torch.int64)[tokens // BLOCK_TOKENS],
            tokens % BLOCK_TOKENS,
        )
        heads = (sequence.kv_len, spec.num_kv_heads, spec.head_dim)
        write(codec, pages.key, eighths(generator, *heads), *slots)
        write(codec, pages.value, eighths(generator, *heads), *slots)
        if pages.index is not None:
            own = eighths(generator, sequence.kv_len, spec.index_dim)
            own = own if index_keys is None else index_keys[: sequence.kv_len]
            write(codec, pages.index, own.unsqueeze(1), *slots)
    batch = Batch.of(
        starts=[s.kv_len - s.num_rows if s.kv_len else 0 for s in sequences],
        counts=[s.num_rows for s in sequences],
        block_tables=tables,
    )
    padding = torch.tensor([not s.kv_len for s in sequences], dtype=torch.bool)
    batch = Batch(
        positions=batch.positions,
        row_request=batch.row_request,
        row_starts=batch.row_starts,
        kv_lens=torch.where(padding, 0, batch.kv_lens),
        block_tables=batch.block_tables,
    )
    return Filled(rows, pages, batch)


def weight(kind: str, generator: torch.Generator, *shape: int) -> Weight:
    """A random weight [..., N, K] scaled by 1/sqrt(K), as fp32, bf16, mxfp8 or nvfp4."""
    data = torch.randn(*shape, generator=generator) * shape[-1] ** -0.5
    match kind:
        case "fp32":
            return PlainWeight(data)
        case "bf16":
            return PlainWeight(data.bfloat16())
        case "mxfp8":
            return Mxfp8Weight(*codec.quantise_mxfp8(data))
        case "nvfp4":
            scale = torch.full(shape[:-1], 0.75)
            return Nvfp4Weight(*codec.quantise_nvfp4(data, scale.unsqueeze(-1)), scale)
    raise ValueError(f"no weight kind {kind!r}")


def mlp_weights(kind: str, generator: torch.Generator, width: int, hidden: int) -> MlpWeights:
    """Random weights of one MLP."""
    return MlpWeights(
        gate_up=weight(kind, generator, 2 * width, hidden),
        down=weight(kind, generator, hidden, width),
    )


def moe_weights(kind: str, generator: torch.Generator, spec: ModelSpec) -> MoeWeights:
    """Random weights of one layer's experts."""
    experts, width, hidden = spec.num_experts, spec.expert_width, spec.hidden_size
    return MoeWeights(
        router=torch.randn(experts, hidden, generator=generator) * hidden**-0.5,
        router_bias=torch.randn(experts, generator=generator) * 0.1,
        gate_up=weight(kind, generator, experts, 2 * width, hidden),
        down=weight(kind, generator, experts, hidden, width),
        shared=mlp_weights(kind, generator, spec.shared_width, hidden),
    )


DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}

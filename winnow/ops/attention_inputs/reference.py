"""The meaning of `attention_inputs`."""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor

from winnow.ops.batch import Batch
from winnow.ops.codec import reference as codec
from winnow.ops.linear.reference import linear
from winnow.ops.norm.reference import norm
from winnow.ops.paged import LayerPages, write
from winnow.ops.weights import AttentionWeights
from winnow.spec.model import ModelSpec


def rope_tables(positions: Tensor, spec: ModelSpec) -> tuple[Tensor, Tensor]:
    """cos and sin of position * theta^(-2i / rotary_dim), fp32 [rows, rotary_dim / 2]."""
    frequencies = _frequencies(spec.rope_theta, spec.rotary_dim, positions.device)
    angles = positions.float().unsqueeze(-1) * frequencies
    return angles.cos(), angles.sin()


@cache
def _frequencies(theta: float, rotary_dim: int, device: torch.device) -> Tensor:
    # Made on the CPU: another device's powers may end in another bit, which far positions multiply.
    exponents = torch.arange(0, rotary_dim, 2, dtype=torch.float32) / rotary_dim
    return (1.0 / theta**exponents).to(device)


def rotate(x: Tensor, rope: tuple[Tensor, Tensor]) -> Tensor:
    """Rotate the leading channels of x fp32 [rows, heads, dim]; the rest pass through."""
    cos, sin = (t.unsqueeze(1) for t in rope)
    half = cos.shape[-1]
    first, second, rest = x.split((half, half, x.shape[-1] - 2 * half), dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin, rest), dim=-1)


def attention_inputs(
    x: Tensor,
    weights: AttentionWeights,
    spec: ModelSpec,
    rope: tuple[Tensor, Tensor],
    batch: Batch,
    pages: LayerPages,
) -> tuple[Tensor, Tensor | None]:
    """See `winnow.ops.attention_inputs.AttentionInputs`."""

    def heads(values: Tensor, weight: Tensor | None) -> Tensor:
        assert weight is not None
        return rotate(norm(values.float(), weight, spec.norm_eps), rope).to(x.dtype)

    qkv = linear(x, weights.qkv).unflatten(-1, (-1, spec.head_dim))
    q, k, v = qkv.split((spec.num_heads, spec.num_kv_heads, spec.num_kv_heads), dim=1)
    write(codec, pages.key, heads(k, weights.k_norm), *batch.slots)
    write(codec, pages.value, v, *batch.slots)
    query = heads(q, weights.q_norm)
    if weights.index is None:
        return query, None
    assert pages.index is not None
    index = linear(x, weights.index).unflatten(-1, (-1, spec.index_dim))
    index_q, index_k = index.split((spec.num_index_heads, 1), dim=1)
    write(codec, pages.index, heads(index_k, weights.index_k_norm), *batch.slots)
    return query, heads(index_q, weights.index_q_norm)

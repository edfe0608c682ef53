"""How a weight matrix is held in memory, in the format of its checkpoint. Does no arithmetic.

Leading axes (`...`) stack experts. N is the output width, K the input width (contracted).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import final

from torch import Tensor

from winnow.ops.fragments_mxfp8 import PackedMxfp8Weight


@dataclass(frozen=True)
class PlainWeight:
    """`data` [..., N, K] in the compute dtype."""

    data: Tensor


@dataclass(frozen=True)
class Mxfp8Weight:
    """`codes` float8_e4m3fn [..., N, K]; `scales` uint8 [..., N, K/32], E8M0 (2^(s - 127))."""

    codes: Tensor
    scales: Tensor


@dataclass(frozen=True)
class Nvfp4Weight:
    """`codes` uint8 [..., N, K/2], low nibble first; `scales` float8_e4m3fn [..., N, K/16];
    `global_scales` fp32 [..., N]: the tensor's dequantisation scale, once per output row, since
    gate and up are two tensors of a checkpoint stacked into one here."""

    codes: Tensor
    scales: Tensor
    global_scales: Tensor


@dataclass(frozen=True)
class PackedNvfp4Weight:
    """An `Nvfp4Weight` whose bytes are in the order of `winnow.ops.fragments`: the same three
    tensors, of the same shapes, read by hopper's kernels only."""

    codes: Tensor
    scales: Tensor
    global_scales: Tensor


Weight = PlainWeight | Mxfp8Weight | Nvfp4Weight | PackedNvfp4Weight | PackedMxfp8Weight


def tensors(weight: Weight) -> tuple[Tensor, ...]:
    """The tensors that hold a weight, codes first."""
    match weight:
        case PlainWeight(data):
            return (data,)
        case Mxfp8Weight(codes, scales) | PackedMxfp8Weight(codes, scales):
            return (codes, scales)
        case Nvfp4Weight(codes, scales, global_scales) | PackedNvfp4Weight(
            codes, scales, global_scales
        ):
            return (codes, scales, global_scales)


def expert(weight: Weight, index: int) -> Weight:
    """One matrix of a stack: views, no copies."""
    return type(weight)(*(t[index] for t in tensors(weight)))


def shape(weight: Weight) -> tuple[int, ...]:
    """Logical shape [..., N, K]."""
    match weight:
        case PlainWeight(data):
            return tuple(data.shape)
        case Mxfp8Weight(codes, _):
            return tuple(codes.shape)
        case PackedMxfp8Weight():
            return weight.shape
        case Nvfp4Weight(codes, _, _) | PackedNvfp4Weight(codes, _, _):
            return (*codes.shape[:-1], codes.shape[-1] * 2)


@final
@dataclass(frozen=True)
class AttentionWeights:
    """`qkv` [(heads + 2 kv_heads) * head_dim, hidden], rows q, k, v; `index` [(index_heads + 1) *
    index_dim, hidden], rows index_q, index_k, None on full-attention layers; `out` [hidden,
    heads * head_dim]. Norm weights are fp32 [head_dim] or [index_dim], without the added 1."""

    qkv: Weight
    q_norm: Tensor
    k_norm: Tensor
    index: Weight | None
    index_q_norm: Tensor | None
    index_k_norm: Tensor | None
    out: Weight


@final
@dataclass(frozen=True)
class MlpWeights:
    """`gate_up` [2 * width, hidden], gate rows first; `down` [hidden, width]."""

    gate_up: Weight
    down: Weight


@final
@dataclass(frozen=True)
class MoeWeights:
    """`router` fp32 [experts, hidden]; `router_bias` fp32 [experts]; `gate_up` [experts, 2 *
    width, hidden]; `down` [experts, hidden, width]; `shared`: the expert that every token sees."""

    router: Tensor
    router_bias: Tensor
    gate_up: Weight
    down: Weight
    shared: MlpWeights

"""The weights of one model as they lie in memory. Knows nothing of files or of arithmetic on them.

V is the vocabulary, H the hidden size. Norm weights are as the checkpoint stores them: the scale
is 1 + weight, which the op applies.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Protocol, TypeVar

from torch import Tensor

from winnow.ops.paged import CacheScales
from winnow.ops.weights import AttentionWeights, MlpWeights, MoeWeights, PlainWeight, tensors
from winnow.spec.memory import PARTS

Part = TypeVar("Part", bound=AttentionWeights | MlpWeights | MoeWeights)


@dataclass(frozen=True)
class LayerWeights:
    """One decoder layer; the two norms are [H] fp32."""

    input_norm: Tensor
    attention: AttentionWeights
    post_norm: Tensor
    mlp: MlpWeights | MoeWeights


@dataclass(frozen=True)
class ModelWeights:
    """A whole model. `embedding` [V, H] is in the compute dtype, `final_norm` [H] in fp32; `head`
    [V, H] holds the embedding's own tensor when the two are tied. `cache_scales`, one a layer, are
    those of an FP8 cache; None where the checkpoint has none."""

    embedding: Tensor
    layers: tuple[LayerWeights, ...]
    final_norm: Tensor
    head: PlainWeight
    cache_scales: tuple[CacheScales, ...] | None = None


class Prepare(Protocol):
    """Puts a part of a layer into the form that a backend's ops read, in its own memory."""

    def __call__(self, part: Part) -> Part: ...


def as_stored(part: Part) -> Part:
    """The part as a checkpoint stores it."""
    return part


def prepared(layer: LayerWeights, prepare: Prepare) -> LayerWeights:
    """A layer in a backend's form; what was given is used up."""
    return replace(layer, attention=prepare(layer.attention), mlp=prepare(layer.mlp))


def nbytes(model: ModelWeights) -> dict[str, int]:
    """Bytes held by each of `winnow.spec.memory.PARTS`; a tied head counts as 0."""
    tied = model.head.data.data_ptr() == model.embedding.data_ptr()
    total = dict.fromkeys(PARTS, 0)
    total["embedding"] = model.embedding.nbytes
    total["head"] = 0 if tied else model.head.data.nbytes
    total["norms"] = model.final_norm.nbytes
    for layer in model.layers:
        attention, mlp = layer.attention, layer.mlp
        total["attention"] += _sum(tensors(attention.qkv)) + _sum(tensors(attention.out))
        total["norms"] += _sum((layer.input_norm, layer.post_norm))
        total["norms"] += _sum((attention.q_norm, attention.k_norm))
        if attention.index is not None:
            total["index"] += _sum(tensors(attention.index))
        total["norms"] += _sum(
            norm for norm in (attention.index_q_norm, attention.index_k_norm) if norm is not None
        )
        if isinstance(mlp, MoeWeights):
            total["router"] += _sum((mlp.router, mlp.router_bias))
            total["experts"] += _sum(tensors(mlp.gate_up)) + _sum(tensors(mlp.down))
            total["shared_experts"] += _mlp(mlp.shared)
        else:
            total["dense_mlp"] += _mlp(mlp)
    return total


def _mlp(mlp: MlpWeights) -> int:
    return _sum(tensors(mlp.gate_up)) + _sum(tensors(mlp.down))


def _sum(held: Iterable[Tensor]) -> int:
    return sum(tensor.nbytes for tensor in held)

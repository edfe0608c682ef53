"""`attention_inputs` on a CPU: norm and rotation in one pass over the projection's rows."""

from __future__ import annotations

from torch import Tensor

from winnow.ops.batch import Batch
from winnow.ops.block_list import insert
from winnow.ops.linear.cpu import linear
from winnow.ops.norm.cpu import norm_rotate
from winnow.ops.paged import LayerPages
from winnow.ops.weights import AttentionWeights
from winnow.spec.model import ModelSpec


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
        return norm_rotate(values, weight, spec.norm_eps, rope).to(x.dtype)

    qkv = linear(x, weights.qkv).unflatten(-1, (-1, spec.head_dim))
    q, k, v = qkv.split((spec.num_heads, spec.num_kv_heads, spec.num_kv_heads), dim=1)
    insert(pages.key, heads(k, weights.k_norm), *batch.slots)
    insert(pages.value, v, *batch.slots)
    query = heads(q, weights.q_norm)
    if weights.index is None:
        return query, None
    assert pages.index is not None
    index = linear(x, weights.index).unflatten(-1, (-1, spec.index_dim))
    index_q, index_k = index.split((spec.num_index_heads, 1), dim=1)
    insert(pages.index, heads(index_k, weights.index_k_norm), *batch.slots)
    return query, heads(index_q, weights.index_q_norm)

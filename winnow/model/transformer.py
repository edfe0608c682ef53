"""The forward pass: layers over ops. Knows nothing of formats, requests or backends."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor
from torch.nn import functional as F

from winnow.model.weights import LayerWeights, ModelWeights
from winnow.ops.attention_inputs.reference import rope_tables
from winnow.ops.batch import Batch
from winnow.ops.paged import LayerPages
from winnow.ops.table import Kernels
from winnow.ops.weights import MoeWeights
from winnow.spec.model import ModelSpec


class Transformer:
    """One model on one device: spec, weights and the ops that run it."""

    def __init__(self, spec: ModelSpec, weights: ModelWeights, kernels: Kernels) -> None:
        self.spec = spec
        self.weights = weights
        self.kernels = kernels

    def forward(
        self,
        token_ids: Tensor,
        batch: Batch,
        pages: Sequence[LayerPages],
        logit_rows: Tensor,
    ) -> Tensor:
        """Insert the rows' K, V and index keys into `pages` and return logits.

        `token_ids` int64 [rows]; `pages` one entry a layer; `logit_rows` int64 [n]: the rows
        whose logits are wanted. Returns fp32 [n, vocab_size].
        """
        ops, weights = self.kernels, self.weights
        rope = rope_tables(batch.positions, self.spec)
        x = F.embedding(token_ids, weights.embedding)
        for layer, layer_pages in zip(weights.layers, pages, strict=True):
            x = x + self._attention(x, layer, rope, batch, layer_pages)
            x = x + self._mlp(x, layer)
        x = ops.norm(x[logit_rows], weights.final_norm, self.spec.norm_eps)
        return ops.linear(x, weights.head).float()

    def _attention(
        self,
        x: Tensor,
        layer: LayerWeights,
        rope: tuple[Tensor, Tensor],
        batch: Batch,
        pages: LayerPages,
    ) -> Tensor:
        ops, spec = self.kernels, self.spec
        x = ops.norm(x, layer.input_norm, spec.norm_eps)
        q, index_q = ops.attention_inputs(x, layer.attention, spec, rope, batch, pages)
        if index_q is None or pages.index is None:
            out = ops.dense_attention(q, batch, pages)
        else:
            ids = ops.select_blocks(index_q, pages.index, batch, spec.topk_blocks)
            out = ops.sparse_attention(q, ids, batch, pages)
        return ops.linear(out.flatten(1), layer.attention.out)

    def _mlp(self, x: Tensor, layer: LayerWeights) -> Tensor:
        x = self.kernels.norm(x, layer.post_norm, self.spec.norm_eps)
        if isinstance(layer.mlp, MoeWeights):
            return self.kernels.moe(x, layer.mlp, self.spec)
        return self.kernels.mlp(x, layer.mlp, self.spec)

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
        logit_rows: Tensor | None,
        logits: Tensor | None = None,
    ) -> Tensor:
        """Insert the rows' K, V and index keys into `pages` and return logits.

        `token_ids` int64 [rows]; `pages` one entry a layer; `logit_rows` int64 [n]: the rows
        whose logits are wanted, None for all. Returns fp32 [n, vocab_size]: `logits`, if given.
        """
        ops, weights, eps = self.kernels, self.weights, self.spec.norm_eps
        rope = rope_tables(batch.positions, self.spec)
        x = F.embedding(token_ids, weights.embedding)
        normed = ops.norm(x, weights.layers[0].input_norm, eps)
        # What follows each layer: the next one's first norm, or the last of all.
        norms = [*(layer.input_norm for layer in weights.layers[1:]), weights.final_norm]
        for layer, layer_pages, norm in zip(weights.layers, pages, norms, strict=True):
            out = self._attention(normed, layer, rope, batch, layer_pages)
            x, normed = ops.add_norm(x, out, layer.post_norm, eps)
            out = self._mlp(normed, layer)
            if norm is weights.final_norm and logit_rows is not None:
                x, out = x[logit_rows], out[logit_rows]
            x, normed = ops.add_norm(x, out, norm, eps)
        return ops.head(normed, weights.head, logits)

    def _attention(
        self,
        x: Tensor,
        layer: LayerWeights,
        rope: tuple[Tensor, Tensor],
        batch: Batch,
        pages: LayerPages,
    ) -> Tensor:
        ops, spec = self.kernels, self.spec
        q, index_q = ops.attention_inputs(x, layer.attention, spec, rope, batch, pages)
        if index_q is None or pages.index is None:
            out = ops.dense_attention(q, batch, pages)
        else:
            ids = ops.select_blocks(index_q, pages.index, batch, spec.topk_blocks)
            out = ops.sparse_attention(q, ids, batch, pages)
        return ops.linear(out.flatten(1), layer.attention.out)

    def _mlp(self, x: Tensor, layer: LayerWeights) -> Tensor:
        if isinstance(layer.mlp, MoeWeights):
            return self.kernels.moe(x, layer.mlp, self.spec)
        return self.kernels.mlp(x, layer.mlp, self.spec)

"""From hidden states to queries, with K, V and index keys put into their page rows."""

from typing import Protocol

from torch import Tensor

from winnow.ops.batch import Batch
from winnow.ops.paged import LayerPages
from winnow.ops.weights import AttentionWeights
from winnow.spec.model import ModelSpec


class AttentionInputs(Protocol):
    def __call__(
        self,
        x: Tensor,
        weights: AttentionWeights,
        spec: ModelSpec,
        rope: tuple[Tensor, Tensor],
        batch: Batch,
        pages: LayerPages,
    ) -> tuple[Tensor, Tensor | None]:
        """Project, norm each head of q and k, rotate, and insert K, V and index keys.

        `x` [rows, hidden]. `rope` is (cos, sin), fp32 [rows, rotary_dim / 2]. Returns q [rows,
        heads, head_dim] and, on sparse layers, index_q [rows, index_heads, index_dim], in x's
        dtype; writes K, V and the index key of each row to `batch.slots` in the format of
        `pages`, saturating (see `winnow.ops.paged.write`). Norms are per head, Gemma's, in fp32;
        the first rotary_dim channels are rotated in fp32, channel i with i + rotary_dim / 2
        (NeoX pairing), by the same convention for q, k, index_q and index_k. V is neither normed
        nor rotated. Rows of padding requests write to the null page.
        """
        ...

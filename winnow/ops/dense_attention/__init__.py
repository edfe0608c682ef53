"""Attention over all visible tokens: the full-attention layers."""

from typing import Protocol

from torch import Tensor

from winnow.ops.batch import Batch
from winnow.ops.paged import LayerPages


class DenseAttention(Protocol):
    def __call__(self, q: Tensor, batch: Batch, pages: LayerPages) -> Tensor:
        """softmax(q k / sqrt(head_dim)) v over tokens 0 .. p for a row at position p.

        `q` [rows, heads, head_dim] -> the same shape and dtype; scores, softmax and sums in
        fp32. Slots beyond kv_len are never read, whatever they hold. Rows of padding requests
        give zeros. A NaN or inf key or value reaches the rows that see it and may reach other
        rows of the same request, never another request.
        """
        ...

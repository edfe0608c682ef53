"""Attention over the selected blocks."""

from typing import Protocol

from torch import Tensor

from winnow.ops.batch import Batch
from winnow.ops.paged import LayerPages


class SparseAttention(Protocol):
    def __call__(self, q: Tensor, ids: Tensor, batch: Batch, pages: LayerPages) -> Tensor:
        """softmax(q k / sqrt(head_dim)) v over the visible tokens of the selected blocks.

        `q` [rows, heads, head_dim]; `ids` int32 [rows, kv_heads, topk], ascending with a tail of
        -1, from `select_blocks`: the heads of a KV group share their group's blocks. Returns
        [rows, heads, head_dim] in q's dtype; scores, softmax and sums in fp32. A row at position
        p sees tokens 0 .. p only; slots beyond kv_len are never read, whatever they hold. Rows
        of padding requests give zeros. A NaN or inf key or value reaches the rows that see it
        and may reach other rows of the same request in the same block, never another request.
        """
        ...

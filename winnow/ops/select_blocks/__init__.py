"""The indexer: which blocks of its past each row attends to."""

from typing import Protocol

from torch import Tensor

from winnow.ops.batch import Batch
from winnow.ops.paged import Paged


class SelectBlocks(Protocol):
    def __call__(self, index_q: Tensor, index: Paged, batch: Batch, topk: int) -> Tensor:
        """Top blocks by the largest dot product of an index query with a block's index keys.

        `index_q` [rows, heads, dim]; `index` holds one key a token, shared by the heads. Returns
        int32 [rows, heads, topk], ascending, with a tail of -1. For a row at position p: blocks
        0 .. p // 128 are visible; the block of p is always selected and counts among the topk;
        the others are ranked by their score, max over the block's tokens of the fp32 dot
        product. The lower block wins ties; +0.0 ties with -0.0; a NaN product counts as the
        lowest. With topk or fewer visible blocks all are selected. Rows of padding requests
        select nothing. Only pages of visible blocks are read. Source: the MSA paper, arXiv
        2606.13392; the tie rule is ours.
        """
        ...

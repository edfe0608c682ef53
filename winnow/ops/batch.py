"""The query rows of one step and where each request's tokens lie. Knows nothing of layers."""

from __future__ import annotations

from dataclasses import dataclass, fields
from functools import cached_property

import torch
from torch import Tensor

from winnow.spec.model import BLOCK_TOKENS


@dataclass(frozen=True)
class Batch:
    """Rows grouped by request, in the order of the requests. All tensors are int64.

    `positions` [rows]: each row's place in its sequence. `row_request` [rows]: index of its
    request. `row_starts` [requests + 1]: rows of request r are row_starts[r] to
    row_starts[r + 1]. `kv_lens` [requests]: tokens whose K, V and index keys are in pages once
    this step's rows are inserted; 0 marks a padding request, whose rows write to the null page,
    select nothing and give zeros. `block_tables` [requests, blocks]: page of each block, padded
    with the null page 0.
    """

    positions: Tensor
    row_request: Tensor
    row_starts: Tensor
    kv_lens: Tensor
    block_tables: Tensor

    @property
    def num_rows(self) -> int:
        return self.positions.shape[0]

    @property
    def num_requests(self) -> int:
        return self.kv_lens.shape[0]

    def rows(self, request: int) -> range:
        """The rows of one request."""
        return range(int(self.row_starts[request]), int(self.row_starts[request + 1]))

    @cached_property
    def slots(self) -> tuple[Tensor, Tensor]:
        """Page and offset in the page where each row's K, V and index key go, both [rows]."""
        pages = self.block_tables[self.row_request, self.positions // BLOCK_TOKENS]
        pages = torch.where(self.kv_lens[self.row_request] > 0, pages, 0)
        return pages, self.positions % BLOCK_TOKENS

    def to(self, device: torch.device) -> Batch:
        """The same rows on another device."""
        if device == self.positions.device:
            return self
        moved = (getattr(self, f.name).to(device, non_blocking=True) for f in fields(self))
        return Batch(*moved)

    @classmethod
    def of(cls, starts: list[int], counts: list[int], block_tables: list[list[int]]) -> Batch:
        """A batch whose request r adds rows starts[r] .. starts[r] + counts[r] - 1."""
        rows = [torch.arange(s, s + n) for s, n in zip(starts, counts, strict=True)]
        num = torch.tensor(counts, dtype=torch.int64)
        width = max((len(t) for t in block_tables), default=0)
        table = torch.zeros(len(block_tables), max(width, 1), dtype=torch.int64)
        for r, pages in enumerate(block_tables):
            table[r, : len(pages)] = torch.tensor(pages, dtype=torch.int64)
        return cls(
            positions=torch.cat(rows) if rows else torch.zeros(0, dtype=torch.int64),
            row_request=torch.repeat_interleave(torch.arange(len(counts)), num),
            row_starts=torch.cat([num.new_zeros(1), num.cumsum(0)]),
            kv_lens=torch.tensor(starts, dtype=torch.int64) + num,
            block_tables=table,
        )

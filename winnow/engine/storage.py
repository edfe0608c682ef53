"""The pages: one tensor of rows, and typed views of each layer in it. Decides nothing."""

from __future__ import annotations

import torch

from winnow.ops.paged import CacheScales, Clipping, layer_pages
from winnow.spec.page import RowLayout


class PageStorage:
    """`rows` uint8 [num_pages, row_bytes]: row p is page p whole, K, V and index keys of every
    layer. Row 0 is the null page, where padding writes. Memory is not touched until written."""

    def __init__(
        self,
        layout: RowLayout,
        num_pages: int,
        scales: tuple[CacheScales, ...] | None = None,
        device: torch.device | str = "cpu",
    ) -> None:
        self.layout = layout
        self.rows = torch.empty(num_pages, layout.row_bytes, dtype=torch.uint8, device=device)
        self.layers = tuple(
            layer_pages(self.rows, layout, layer, scales[layer] if scales else None)
            for layer in range(layout.num_layers)
        )

    @property
    def num_pages(self) -> int:
        return self.rows.shape[0]

    def clipping(self) -> Clipping:
        """What was counted at every write, over all layers; on a GPU this waits for it."""
        kinds = [p for layer in self.layers for p in (layer.key, layer.value, layer.index) if p]
        counts = [kind.clipping.settled() for kind in kinds]
        return Clipping(
            written=sum(count.written for count in counts),
            clipped=sum(count.clipped for count in counts),
        )

"""Where each layer's and head's bytes lie in a page row. Arithmetic only.

A page holds BLOCK_TOKENS tokens of every layer in one contiguous row of bytes. Segments, in
order: index keys layer by layer; for each KV head, layer by layer, K codes, K scales, V codes,
V scales; draft K/V layer by layer. Every piece starts on a multiple of ALIGNMENT bytes.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from winnow.errors import UnsupportedError
from winnow.spec.formats import FP8, Format
from winnow.spec.model import BLOCK_TOKENS, ModelSpec

ALIGNMENT = 128


def _align(num_bytes: int) -> int:
    return -(-num_bytes // ALIGNMENT) * ALIGNMENT


@dataclass(frozen=True)
class Part:
    """Codes and scales of one [BLOCK_TOKENS, dim] matrix inside a row, as byte offsets."""

    codes: int
    scales: int
    dim: int
    format: Format

    @property
    def nbytes(self) -> int:
        return self.format.nbytes(BLOCK_TOKENS * self.dim)


@dataclass(frozen=True)
class RowLayout:
    """Byte layout of one page row on one rank.

    `num_kv_heads` is what this rank holds; index keys are whole on every rank. `sparse_layers`
    have index keys. Draft layers hold K and V of one dense layer each, for `num_kv_heads` heads.
    """

    num_layers: int
    sparse_layers: tuple[int, ...]
    num_kv_heads: int
    head_dim: int
    index_dim: int
    kv_format: Format
    index_format: Format
    draft_layers: int = 0
    draft_format: Format = FP8

    @classmethod
    def of(
        cls,
        spec: ModelSpec,
        kv_format: Format,
        index_format: Format,
        *,
        tp_size: int = 1,
        draft_layers: int = 0,
        draft_format: Format = FP8,
    ) -> RowLayout:
        """The layout of one of `tp_size` tensor-parallel ranks; KV heads must divide evenly.

        More ranks than KV heads hold one each, every head as often as the others.
        """
        if spec.num_kv_heads % tp_size and tp_size % spec.num_kv_heads:
            raise UnsupportedError(
                f"{spec.num_kv_heads} KV heads do not divide among {tp_size} tensor-parallel ranks"
            )
        return cls(
            num_layers=spec.num_layers,
            sparse_layers=spec.sparse_layers,
            num_kv_heads=max(1, spec.num_kv_heads // tp_size),
            head_dim=spec.head_dim,
            index_dim=spec.index_dim,
            kv_format=kv_format,
            index_format=index_format,
            draft_layers=draft_layers,
            draft_format=draft_format,
        )

    @property
    def index_piece_bytes(self) -> int:
        """One layer's index keys."""
        return _align(self.index_format.nbytes(BLOCK_TOKENS * self.index_dim))

    @property
    def kv_piece_bytes(self) -> int:
        """K and V of one layer and head."""
        return _align(2 * self.kv_format.nbytes(BLOCK_TOKENS * self.head_dim))

    @property
    def draft_piece_bytes(self) -> int:
        """K and V of one draft layer, all heads."""
        values = 2 * BLOCK_TOKENS * self.head_dim * self.num_kv_heads
        return _align(self.draft_format.nbytes(values))

    @property
    def index_bytes(self) -> int:
        return len(self.sparse_layers) * self.index_piece_bytes

    @property
    def head_bytes(self) -> int:
        """One KV head's segment: what a tensor-parallel rank owns, and the stride of heads."""
        return self.num_layers * self.kv_piece_bytes

    @property
    def kv_bytes(self) -> int:
        return self.num_kv_heads * self.head_bytes

    @property
    def draft_bytes(self) -> int:
        return self.draft_layers * self.draft_piece_bytes

    @property
    def row_bytes(self) -> int:
        return self.index_bytes + self.kv_bytes + self.draft_bytes

    def index(self, layer: int) -> Part:
        """Index keys of a sparse layer; ValueError for a layer without them."""
        start = self.sparse_layers.index(layer) * self.index_piece_bytes
        codes = self.index_format.code_bytes(BLOCK_TOKENS * self.index_dim)
        return Part(start, start + codes, self.index_dim, self.index_format)

    def key(self, layer: int, head: int) -> Part:
        """K of one layer and head."""
        return self._kv(layer, head, 0)

    def value(self, layer: int, head: int) -> Part:
        """V of one layer and head."""
        return self._kv(layer, head, self.kv_format.nbytes(BLOCK_TOKENS * self.head_dim))

    def _kv(self, layer: int, head: int, offset: int) -> Part:
        if not (0 <= layer < self.num_layers and 0 <= head < self.num_kv_heads):
            raise ValueError(f"no layer {layer}, head {head} in this row")
        start = self.index_bytes + head * self.head_bytes + layer * self.kv_piece_bytes + offset
        codes = self.kv_format.code_bytes(BLOCK_TOKENS * self.head_dim)
        return Part(start, start + codes, self.head_dim, self.kv_format)

    def pieces(self) -> Iterator[tuple[str, int, int]]:
        """Every piece as (name, start, bytes), in the order of the row."""
        start = 0
        for layer in self.sparse_layers:
            yield f"index.{layer}", start, self.index_piece_bytes
            start += self.index_piece_bytes
        for head in range(self.num_kv_heads):
            for layer in range(self.num_layers):
                yield f"kv.{head}.{layer}", start, self.kv_piece_bytes
                start += self.kv_piece_bytes
        for layer in range(self.draft_layers):
            yield f"draft.{layer}", start, self.draft_piece_bytes
            start += self.draft_piece_bytes

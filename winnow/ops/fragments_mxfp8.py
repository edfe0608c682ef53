"""MXFP8 matrices in the order in which a warp's tensor core takes them: packing and its inverse.

Owns the layout. Knows nothing of kernels, nor of who multiplies what.

A matrix [N, K] is cut in strips of 16 rows (the M of mma.m16n8k16 and of a warp's share of
wgmma m64) by pieces of 128 columns. A piece is

    codes   2,048 bytes: four tiles of 32 columns, one after another; a tile is 32 lanes x 16 bytes
    scales     64 bytes: [g = 0..7][row g, row g + 8][tile 0..3], E8M0

and lane 4 g + t of a tile holds 16 codes: for each half of the tile's columns (the K of a product)
the fragment's registers A0 to A3, two codes each, which are columns 2 t, 2 t + 1 of row g, the same
of row g + 8, columns 2 t + 8, 2 t + 9 of row g, and of row g + 8.

Bytes are those of the standard form: packing permutes them inside a strip.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

STRIP = 16
"""Rows that are packed together."""
PIECE = 128
"""Columns that are packed together."""
TILE = 32
"""Columns of a tile, those of one scale."""
PIECE_CODES = STRIP * PIECE
PIECE_SCALES = STRIP * PIECE // TILE

_STEP_BYTES = 64 << 20
"""About what is copied at a time."""


@dataclass(frozen=True)
class PackedMxfp8Weight:
    """An MXFP8 weight [..., N, K] in the layout above: `codes` uint8 [..., N/16, K/128, 2048],
    `scales` uint8 [..., N/16, K/128, 64]."""

    codes: Tensor
    scales: Tensor

    @property
    def shape(self) -> tuple[int, ...]:
        """Logical shape [..., N, K]."""
        *stack, strips, pieces, _ = self.codes.shape
        return (*stack, strips * STRIP, pieces * PIECE)


def packable(rows: int, columns: int) -> bool:
    """Whether a matrix [rows, columns] can be packed: whole strips of whole pieces."""
    return rows % STRIP == 0 and columns % PIECE == 0


def pack(codes: Tensor, scales: Tensor) -> PackedMxfp8Weight:
    """`codes` float8_e4m3fn or uint8 [..., N, K] and `scales` uint8 [..., N, K/32] packed IN PLACE:
    the result holds the same memory, and what was given may not be used any more.

    Both contiguous, N a multiple of 16 and K of 128 (ValueError otherwise). Copies of some strips
    at a time are all that is allocated.
    """
    rows, columns = codes.shape[-2:]
    if not packable(rows, columns):
        raise ValueError(
            f"a matrix of {rows} x {columns} has no whole strips of {STRIP} rows and pieces of "
            f"{PIECE} columns"
        )
    if not (codes.is_contiguous() and scales.is_contiguous()):
        raise ValueError("packing in place needs contiguous codes and scales")
    stack, pieces = codes.shape[:-2], columns // PIECE
    _permute(codes.view(torch.uint8), (2, 8, pieces, 4, 2, 2, 4, 2), (0, 3, 4, 2, 7, 5, 6, 1, 8))
    _permute(scales, (2, 8, pieces, 4), (0, 3, 2, 1, 4))
    shape = (*stack, rows // STRIP, pieces)
    return PackedMxfp8Weight(
        codes.view(torch.uint8).view(*shape, PIECE_CODES), scales.view(*shape, PIECE_SCALES)
    )


def unpack(packed: PackedMxfp8Weight) -> tuple[Tensor, Tensor]:
    """The standard form, `codes` float8_e4m3fn [..., N, K] and `scales` uint8 [..., N, K/32], as
    copies."""
    shape = packed.shape
    pieces = shape[-1] // PIECE
    codes = packed.codes.reshape(-1, pieces, 4, 8, 4, 2, 2, 2, 2).permute(0, 7, 3, 1, 2, 5, 6, 4, 8)
    scales = packed.scales.reshape(-1, pieces, 8, 2, 4).permute(0, 3, 2, 1, 4)
    return (
        codes.reshape(shape).contiguous().view(torch.float8_e4m3fn),
        scales.reshape(*shape[:-1], shape[-1] // TILE).contiguous(),
    )


def _permute(part: Tensor, view: tuple[int, ...], order: tuple[int, ...]) -> None:
    """Reorder every strip of `part`, which has the axes `view`, in place."""
    strips = part.view(-1, math.prod(view))
    step = max(1, _STEP_BYTES // strips.shape[1])
    for start in range(0, strips.shape[0], step):
        some = strips[start : start + step]
        some.copy_(some.reshape(-1, *view).permute(order).reshape(some.shape))

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

A matrix can be woven besides (`weave`), so that bf16 takes fewer instructions. With M = 0x87F087F0,
where two bf16 numbers have what two E4M3 codes have, a word of four codes becomes a word w with

    w & M                     its first two codes, as bf16 numbers times 2^-120
    (w << 4 ^ w >> 4) & M     the other two

and a scale byte s becomes s + 88, the exponent of bf16's 2^(s - 39); 255 (NaN) stays and means
infinity there, so that the codes of its group have to be 0.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

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

MAX_WOVEN_SCALE = 166
"""Largest scale byte, but for NaN, of a woven matrix."""

_STEP_BYTES = 64 << 20
"""About what is copied at a time."""
_PAIR = 0x87F087F0
_WOVEN_BIAS = 88
_NAN_SCALE = 255


@dataclass(frozen=True)
class PackedMxfp8Weight:
    """An MXFP8 weight [..., N, K] in the layout above: `codes` uint8 [..., N/16, K/128, 2048],
    `scales` uint8 [..., N/16, K/128, 64]."""

    codes: Tensor
    scales: Tensor
    woven: bool = field(default=False, kw_only=True)

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


def weave(packed: PackedMxfp8Weight) -> PackedMxfp8Weight:
    """`packed` woven IN PLACE: the result holds the same memory, and what was given may not be used
    any more. Its scale bytes are at most `MAX_WOVEN_SCALE`, or 255 where all codes of the group
    are 0."""
    words = packed.codes.view(-1).view(torch.int32)
    for some in words.split(_STEP_BYTES // 16):
        some.copy_(_signed(_woven(some.long() & 0xFFFFFFFF)))
    scales = packed.scales.view(-1)
    scales.add_(((scales != _NAN_SCALE) * _WOVEN_BIAS).to(torch.uint8))
    return PackedMxfp8Weight(packed.codes, packed.scales, woven=True)


def unpack(packed: PackedMxfp8Weight) -> tuple[Tensor, Tensor]:
    """The standard form, `codes` float8_e4m3fn [..., N, K] and `scales` uint8 [..., N, K/32], as
    copies."""
    if packed.woven:
        packed = _unweave(packed)
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


def _woven(words: Tensor) -> Tensor:
    """Woven words; both int64 that hold 32 bits without a sign."""
    first, second = _spread(words), _spread(words >> 16)
    # What the bits that the first pair leaves free have to give, one by one: those of 4 to 6 and
    # of 8 to 10 of each half come from one free bit each.
    wanted = second ^ _folded(first)
    woven = first | (wanted & 0x07000700) << 4 | wanted >> 4 & 0x00070007
    # Bits 31, 23, 15 and 7 come from the free bit 4 below and the one 4 above.
    bit = torch.zeros_like(words)
    for place in (31, 23, 15, 7):
        bit = bit ^ (wanted >> place & 1)
        woven |= bit << place - 4
    return woven


def _unweave(packed: PackedMxfp8Weight) -> PackedMxfp8Weight:
    """A copy that is not woven."""
    woven = packed.codes.contiguous().view(torch.int32).long() & 0xFFFFFFFF
    words = _gathered(woven & _PAIR) | _gathered(_folded(woven)) << 16
    bias = ((packed.scales != _NAN_SCALE) * _WOVEN_BIAS).to(torch.uint8)
    return PackedMxfp8Weight(_signed(words).view(torch.uint8), packed.scales - bias)


def _folded(words: Tensor) -> Tensor:
    return (words << 4 ^ words >> 4) & _PAIR


def _spread(two: Tensor) -> Tensor:
    """The codes of bytes 0 and 1 where a pair of bf16 has its bits."""
    low = (two & 0x80) << 8 | (two & 0x7F) << 4
    return low | (two & 0x8000) << 16 | (two & 0x7F00) << 12


def _gathered(pair: Tensor) -> Tensor:
    """The inverse of `_spread`."""
    low = pair >> 8 & 0x80 | pair >> 4 & 0x7F
    return low | pair >> 16 & 0x8000 | pair >> 12 & 0x7F00


def _signed(words: Tensor) -> Tensor:
    """32 bits as int32."""
    return torch.where(words >= 1 << 31, words - (1 << 32), words).int()

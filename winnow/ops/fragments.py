"""NVFP4 weights in the order in which Hopper's tensor cores take them: packing and its inverse.

Owns the byte order of `PackedNvfp4Weight`. Knows nothing of the kernels that read it, nor of
devices: both directions are plain torch.

A matrix [N, K] is cut into tiles of 16 rows and 64 columns, [N/16][K/64] in that order. Output rows
are the M of the instruction, so a tile is four fragments A of 16 x 16 (`mma.m16n8k16`, or a warp's
share of `wgmma.m64nNk16` with A from registers), which hold, in lane 4 g + t,

    register  0: row g,     columns 2 t, 2 t + 1        register  2: row g,     columns + 8
    register  1: row g + 8, columns 2 t, 2 t + 1        register  3: row g + 8, columns + 8

    codes   512 bytes a tile, 16 a lane: word j (little endian) is the lane's part of fragment j
    scales   64 bytes a tile, [g][row g, row g + 8][fragment j]: 8 of a lane's, 4 a row

Both parts have as many bytes as the format of the checkpoint, so packing is done in place.

A word has two halves of 16 bits, for the even and the odd column of each register. The fp16 with
the bits of a code s|ee|m at 15 | 11 10 | 9 is the code's value times 2^-14, subnormals included.
In a half lie, so that few operations bring each pair of codes to those places,

    register 0   15, 11 10 9      w & M                               M = 0x8E008E00
    register 1   12,  8  7 6      (w << 3) & M
    register 2   14,  5  4 3      ((w & 0x40384038) * 66) & M         << 6, and the sign << 1
    register 3   13,  2  1 0      ((w & 0x20072007) * 516) & M        << 9, and the sign << 2

A product with the group's scale is a multiple of 2^-24 of at most six significant bits: exact in
fp16.
"""

from __future__ import annotations

import torch
from torch import Tensor

from winnow.ops.weights import Nvfp4Weight, PackedNvfp4Weight

TILE_ROWS = 16
TILE_COLUMNS = 64
CODE_SCALE = 2.0**-14
"""What an unpacked code stands for is multiplied by this."""
MASK = 0x8E008E00
"""Bits of a register that holds two unpacked codes."""
_SIGNS = (15, 12, 14, 13)
_MAGNITUDES = (9, 6, 3, 0)
"""Per register: where a code's sign and its lowest bit lie in a half of a word."""


def packable(rows: int, columns: int) -> bool:
    """Whether a matrix [rows, columns] is a whole number of tiles."""
    return rows % TILE_ROWS == 0 and columns % TILE_COLUMNS == 0


def pack(weight: Nvfp4Weight) -> PackedNvfp4Weight:
    """`weight` [..., N, K] in the order above, IN PLACE: its codes and scales are overwritten,
    matrix by matrix, and belong to the result from then on.

    Both must be contiguous and N, K multiples of 16 and 64. Needs about ten times the bytes of one
    matrix beside it.
    """
    rows, columns = weight.codes.shape[-2], weight.codes.shape[-1] * 2
    _check(weight.codes, weight.scales, rows, columns)
    tables = _tables(weight.codes.device)
    codes, scales = weight.codes.view(-1, rows, columns // 2), _bytes(weight.scales)
    for matrix, groups in zip(codes, scales.view(-1, rows, columns // 16), strict=True):
        matrix.view(-1).copy_(pack_codes(matrix, tables).view(-1))
        groups.view(-1).copy_(pack_scales(groups).reshape(-1))
    return PackedNvfp4Weight(weight.codes, weight.scales, weight.global_scales)


def unpack(weight: PackedNvfp4Weight) -> Nvfp4Weight:
    """The weight that was packed, in memory of its own."""
    rows, columns = weight.codes.shape[-2], weight.codes.shape[-1] * 2
    _check(weight.codes, weight.scales, rows, columns)
    codes, scales = weight.codes.clone(), weight.scales.clone()
    held = _bytes(scales).view(-1, rows, columns // 16)
    for matrix, groups in zip(codes.view(-1, rows, columns // 2), held, strict=True):
        matrix.copy_(unpack_codes(matrix))
        groups.copy_(unpack_scales(groups))
    return Nvfp4Weight(codes, scales, weight.global_scales)


def pack_codes(codes: Tensor, tables: Tensor | None = None) -> Tensor:
    """One matrix of codes uint8 [N, K/2], low nibble first, as uint8 bytes in tile order."""
    rows, width = codes.shape
    tables = _tables(codes.device) if tables is None else tables
    # Axes: strip, row half, g | tile, fragment, column half, t. A byte is one register's pair.
    split = codes.view(rows // 16, 2, 8, width // 32, 4, 2, 4)
    pairs = split.permute(0, 3, 2, 6, 4, 5, 1).reshape(-1, 4).int()
    words = tables[0].index_select(0, pairs[:, 0])
    for register in range(1, 4):
        words |= tables[register].index_select(0, pairs[:, register])
    return words.view(torch.uint8)


def unpack_codes(packed: Tensor) -> Tensor:
    """The inverse of `pack_codes`, for bytes of the shape [N, K/2]."""
    rows, width = packed.shape
    words = packed.reshape(-1).view(torch.int32)
    pairs = []
    for sign, magnitude in zip(_SIGNS, _MAGNITUDES, strict=True):
        both = [
            ((words >> (magnitude + half)) & 7) | (((words >> (sign + half)) & 1) << 3)
            for half in (0, 16)
        ]
        pairs.append(both[0] | (both[1] << 4))
    lanes = torch.stack(pairs, -1).to(torch.uint8)
    split = lanes.view(rows // 16, width // 32, 8, 4, 4, 2, 2)
    return split.permute(0, 6, 2, 1, 4, 5, 3).reshape(rows, width)


def pack_scales(scales: Tensor) -> Tensor:
    """One matrix of E4M3 bytes uint8 [N, K/16] in tile order."""
    rows, groups = scales.shape
    split = scales.view(rows // 16, 2, 8, groups // 4, 4)
    return split.permute(0, 3, 2, 1, 4).reshape(rows, groups)


def unpack_scales(packed: Tensor) -> Tensor:
    """The inverse of `pack_scales`."""
    rows, groups = packed.shape
    split = packed.view(rows // 16, groups // 4, 8, 2, 4)
    return split.permute(0, 3, 2, 1, 4).reshape(rows, groups)


def _tables(device: torch.device) -> Tensor:
    """int32 [4, 256]: the bits of a word that a register's pair of codes, one byte, sets."""
    byte = torch.arange(256, dtype=torch.int64)
    tables = []
    for sign, magnitude in zip(_SIGNS, _MAGNITUDES, strict=True):
        word = torch.zeros_like(byte)
        for half, code in ((0, byte & 15), (16, byte >> 4)):
            word |= (code >> 3) << (sign + half)
            word |= (code & 7) << (magnitude + half)
        tables.append(word)
    stacked = torch.stack(tables)
    return torch.where(stacked >= 1 << 31, stacked - (1 << 32), stacked).int().to(device)


def _bytes(scales: Tensor) -> Tensor:
    return scales.view(torch.uint8)


def _check(codes: Tensor, scales: Tensor, rows: int, columns: int) -> None:
    if not packable(rows, columns):
        raise ValueError(f"[{rows}, {columns}] is not made of tiles of 16 x 64")
    if not codes.is_contiguous() or not scales.is_contiguous():
        raise ValueError("packing is done in place: codes and scales must be contiguous")

"""One tile of a matrix product with a weight in any format, for Triton kernels.

Owns how weights are read, expanded and multiplied, and the sizes of tiles. Knows nothing of ops:
which rows of x a tile has, and where its result goes, are its callers'.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from winnow.ops.triton_codec import decode_e4m3, decode_e8m0, dot, unpack_nvfp4
from winnow.ops.weights import Mxfp8Weight, Nvfp4Weight, PlainWeight, Weight

PLAIN = tl.constexpr(0)
MXFP8 = tl.constexpr(1)
NVFP4 = tl.constexpr(2)


@dataclass(frozen=True)
class Held:
    """A weight's tensors as kernels take them: `kind` as above; unused pointers repeat `codes`."""

    kind: int
    codes: Tensor
    scales: Tensor
    global_scales: Tensor


def held(weight: Weight) -> Held:
    """Views of a weight, 8-bit floats as bytes."""
    match weight:
        case PlainWeight(data):
            found = Held(0, data, data, data)
        case Mxfp8Weight(codes, scales):
            found = Held(1, codes.view(torch.uint8), scales, scales)
        case Nvfp4Weight(codes, scales, global_scales):
            found = Held(2, codes, scales.view(torch.uint8), global_scales)
    # Kernels see addresses and widths only.
    assert all(t.is_contiguous() for t in (found.codes, found.scales, found.global_scales))
    return found


def tile_sizes(rows: int, dtype: torch.dtype) -> dict[str, Any]:
    """Tiles for about `rows` rows a matrix: few rows take narrow tiles, so that reading the weight
    is spread over the whole device."""
    if dtype is torch.float32:
        return {"BM": 16 if rows <= 16 else 64, "BN": 64, "BK": 64, "num_warps": 4, "num_stages": 2}
    if rows <= 64:
        rows_tile = 16 if rows <= 16 else 32 if rows <= 32 else 64
        return {"BM": rows_tile, "BN": 32, "BK": 128, "num_warps": 4, "num_stages": 3}
    return {"BM": 128, "BN": 128, "BK": 64, "num_warps": 8, "num_stages": 3}


@triton.jit
def weight_tile(
    codes_ptr, scales_ptr, rows, inside, k,
    KIND: tl.constexpr, K: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, DTYPE: tl.constexpr,
):  # fmt: skip
    """Values [BN, BK] in DTYPE of matrix rows `rows` (int64 [BN]) from column `k` on, zeros where
    not `inside` ([BN, 1]) or past K; NVFP4 without its global scale, so exact in bf16 too."""
    if KIND == PLAIN:
        column = k + tl.arange(0, BK)
        mask = inside & (column < K)[None, :]
        tile = tl.load(codes_ptr + rows[:, None] * K + column[None, :], mask=mask, other=0.0)
    elif KIND == MXFP8:
        column = k + tl.arange(0, BK)
        mask = inside & (column < K)[None, :]
        codes = tl.load(codes_ptr + rows[:, None] * K + column[None, :], mask=mask, other=0)
        group = k // 32 + tl.arange(0, BK // 32)
        mask = inside & (group < K // 32)[None, :]
        at = rows[:, None] * (K // 32) + group[None, :]
        scales = decode_e8m0(tl.load(scales_ptr + at, mask=mask, other=0))
        wide = tl.broadcast_to(scales[:, :, None], (BN, BK // 32, 32)).reshape(BN, BK)
        tile = decode_e4m3(codes) * wide
    else:
        column = k // 2 + tl.arange(0, BK // 2)
        mask = inside & (column < K // 2)[None, :]
        at = rows[:, None] * (K // 2) + column[None, :]
        codes = tl.load(codes_ptr + at, mask=mask, other=0)
        group = k // 16 + tl.arange(0, BK // 16)
        mask = inside & (group < K // 16)[None, :]
        at = rows[:, None] * (K // 16) + group[None, :]
        scales = tl.load(scales_ptr + at, mask=mask, other=0)
        even, odd = unpack_nvfp4(codes, scales)
        # Rounded before they are joined: half as much to move.
        tile = tl.interleave(even.to(DTYPE), odd.to(DTYPE))
    return tile.to(DTYPE)


@triton.jit
def tile_product(
    x_ptr, x_rows, x_inside, x_stride, codes_ptr, scales_ptr, global_ptr, matrix, columns,
    KIND: tl.constexpr, N: tl.constexpr, K: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """fp32 [BM, BN]: rows `x_rows` (int64 [BM], read where `x_inside`) of x [*, K] times output
    columns `columns` ([BN], below N where they count) of matrix number `matrix` in a stack
    [*, N, K]."""
    rows = matrix.to(tl.int64) * N + columns
    inside = (columns < N)[:, None]
    total = tl.zeros((BM, BN), tl.float32)
    for k in range(0, K, BK):
        column = k + tl.arange(0, BK)
        mask = x_inside[:, None] & (column < K)[None, :]
        at = x_rows[:, None] * x_stride + column[None, :]
        x = tl.load(x_ptr + at, mask=mask, other=0.0)
        w = weight_tile(codes_ptr, scales_ptr, rows, inside, k, KIND, K, BN, BK, x.dtype)
        total = dot(x, tl.trans(w), total)
    if KIND == NVFP4:
        total *= tl.load(global_ptr + rows, mask=columns < N, other=0.0)[None, :]
    return total

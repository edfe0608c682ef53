"""`linear` on a CPU: quantised weights are expanded a tile at a time, and in fp32 a row's result
does not depend on how many other rows there are.

The second property is what makes a request give the same tokens alone, in a batch and chunked
anyhow. BLAS libraries choose another order of summation for few rows and for long K, so rows are
padded to MIN_ROWS and K is cut into pieces that are added in order (docs/log.md has what was
measured).
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from winnow.ops.codec import cpu as codec
from winnow.ops.weights import Mxfp8Weight, Nvfp4Weight, PlainWeight, Weight, shape

MIN_ROWS = 16
_MAX_K = 512
_TILE_VALUES = 1 << 20


def linear(x: Tensor, weight: Weight) -> Tensor:
    """See `winnow.ops.linear.Linear`."""
    rows = x.shape[0]
    if isinstance(weight, PlainWeight):
        return matmul(pad_rows(x), weight.data)[:rows]
    width, depth = shape(weight)
    padded = pad_rows(x)
    out = padded.new_empty(padded.shape[0], width)
    step = max(1, _TILE_VALUES // depth)
    for start in range(0, width, step):
        tile = slice(start, start + step)
        out[:, tile] = matmul(padded, _dequantise(weight, tile, x.dtype))
    return out[:rows]


def pad_rows(x: Tensor) -> Tensor:
    """`x` [rows, K] with rows of zeros added up to MIN_ROWS."""
    missing = MIN_ROWS - x.shape[0]
    return F.pad(x, (0, 0, 0, missing)) if missing > 0 else x


def matmul(x: Tensor, w: Tensor) -> Tensor:
    """x [rows >= MIN_ROWS, K] @ w [N, K]^T, in fp32 with the order of sums fixed."""
    depth = x.shape[1]
    if x.dtype is not torch.float32 or depth <= _MAX_K:
        return F.linear(x, w)
    out = F.linear(x[:, :_MAX_K], w[:, :_MAX_K])
    for start in range(_MAX_K, depth, _MAX_K):
        piece = slice(start, start + _MAX_K)
        out.addmm_(x[:, piece], w[:, piece].T)
    return out


def _dequantise(weight: Mxfp8Weight | Nvfp4Weight, rows: slice, dtype: torch.dtype) -> Tensor:
    if isinstance(weight, Mxfp8Weight):
        return codec.dequantise_mxfp8(weight.codes[rows], weight.scales[rows], dtype)
    return codec.dequantise_nvfp4(
        weight.codes[rows], weight.scales[rows], weight.global_scales[rows].unsqueeze(-1), dtype
    )

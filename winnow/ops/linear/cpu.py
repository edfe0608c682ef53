"""`linear` on a CPU: quantised weights are expanded a few rows at a time, in fp32 where they are
multiplied, and there a row's result does not depend on how many other rows there are.

The second property is what makes a request give the same tokens alone, in a batch and chunked
anyhow. BLAS libraries sum in another order for few rows than for many (docs/log.md has what was
measured), so fp32 products are our own; bfloat16 ones, which promise no such thing, are torch's.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional as F

from winnow.ops.codec import cpu as codec
from winnow.ops.native import integers, library, threads
from winnow.ops.weights import (
    Mxfp8Weight,
    Nvfp4Weight,
    PlainWeight,
    Weight,
    expert,
    shape,
    tensors,
)
from winnow.spec.formats import MXFP8, NVFP4

_TILE_VALUES = 1 << 20
_NUMBERS = {MXFP8: 0, NVFP4: 1}
"""`WeightFormat` of csrc/cpu_weights.h."""


def linear(x: Tensor, weight: Weight) -> Tensor:
    """See `winnow.ops.linear.Linear`."""
    if isinstance(weight, PlainWeight):
        return _product(x, weight.data)
    assert isinstance(weight, Mxfp8Weight | Nvfp4Weight), "weights are packed for a GPU"
    if x.dtype is torch.float32:
        return _quantised(x, weight, [0], [x.shape[0]])
    width, depth = shape(weight)
    out = x.new_empty(x.shape[0], width)
    step = max(1, _TILE_VALUES // depth)
    for start in range(0, width, step):
        tile = slice(start, start + step)
        out[:, tile] = _product(x, _dequantise(weight, tile, x.dtype))
    return out


def head(x: Tensor, weight: PlainWeight, out: Tensor | None) -> Tensor:
    """See `winnow.ops.linear.Head`."""
    width, depth = weight.data.shape
    found = torch.empty(x.shape[0], width) if out is None else out
    # A weight in fp32 is not copied; the others are widened a few rows at a time.
    step = width if weight.data.dtype is torch.float32 else max(1, _TILE_VALUES // depth)
    for start in range(0, width, step):
        tile = slice(start, start + step)
        found[:, tile] = _product(x.float(), weight.data[tile].float())
    return found


def grouped_linear(
    x: Tensor, weight: Weight, experts: Sequence[int], counts: Sequence[int]
) -> Tensor:
    """Rows of `x` [rows, K] in consecutive groups, group g times its own matrix of the stack
    `weight` [experts, N, K]: counts[g] rows with matrix experts[g]. Returns [rows, N]."""
    if x.dtype is torch.float32:
        if isinstance(weight, PlainWeight):
            return _products(x, [weight.data[e] for e in experts], counts, shape(weight)[-2])
        assert isinstance(weight, Mxfp8Weight | Nvfp4Weight), "weights are packed for a GPU"
        return _quantised(x, weight, experts, counts)
    parts = x.split(list(counts))
    return torch.cat([linear(p, expert(weight, e)) for e, p in zip(experts, parts, strict=True)])


def _product(x: Tensor, w: Tensor) -> Tensor:
    if x.dtype is not torch.float32:
        return F.linear(x, w)
    return _products(x, [w], [x.shape[0]], w.shape[0])


def _products(x: Tensor, weights: Sequence[Tensor], counts: Sequence[int], width: int) -> Tensor:
    x = x.contiguous()
    # The kernel sees addresses only: another dtype would be read as fp32, past its end.
    assert all(w.is_contiguous() and w.dtype is torch.float32 for w in weights)
    starts, sizes = integers([w.data_ptr() for w in weights]), integers(counts)
    out = torch.empty(x.shape[0], width)
    library().winnow_linear(
        x.data_ptr(), x.shape[1], starts, sizes, len(weights), width,
        out.data_ptr(), threads(),
    )  # fmt: skip
    return out


def _quantised(
    x: Tensor, weight: Mxfp8Weight | Nvfp4Weight, experts: Sequence[int], counts: Sequence[int]
) -> Tensor:
    """`grouped_linear` in fp32; of a single matrix [N, K], expert 0 is the matrix."""
    held = MXFP8 if isinstance(weight, Mxfp8Weight) else NVFP4
    # The kernel sees addresses only.
    parts = [t.contiguous().view(-1, *t.shape[-1:]) for t in tensors(weight)[:2]]
    width, depth = shape(weight)[-2:]
    assert parts[1].shape[-1] * held.group == depth, "a row is whole groups"
    globals_ = None if isinstance(weight, Mxfp8Weight) else weight.global_scales.contiguous()
    x, e4m3, e8m0 = x.contiguous(), *codec.value_tables()
    codes, scales = (
        integers([t.data_ptr() + e * width * t.stride(0) * t.element_size() for e in experts])
        for t in parts
    )
    factors = integers(
        [] if globals_ is None else [globals_.data_ptr() + 4 * e * width for e in experts]
    )
    out = torch.empty(x.shape[0], width)
    library().winnow_linear_quantised(
        x.data_ptr(), depth, _NUMBERS[held], codes, scales, factors, e4m3.data_ptr(),
        e8m0.data_ptr(), integers(counts), len(counts), width, out.data_ptr(), threads(),
    )  # fmt: skip
    return out


def _dequantise(weight: Mxfp8Weight | Nvfp4Weight, rows: slice, dtype: torch.dtype) -> Tensor:
    if isinstance(weight, Mxfp8Weight):
        return codec.dequantise_mxfp8(weight.codes[rows], weight.scales[rows], dtype)
    return codec.dequantise_nvfp4(
        weight.codes[rows], weight.scales[rows], weight.global_scales[rows].unsqueeze(-1), dtype
    )

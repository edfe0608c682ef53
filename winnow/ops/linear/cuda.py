"""`linear` on a GPU: plain weights by torch's library, quantised ones expanded tile by tile.

fp32 rows are multiplied in full fp32, for comparisons; bf16 is what is meant to be fast.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.nn import functional as F

from winnow.ops.triton_codec import round_to
from winnow.ops.triton_product import held, tile_product, tile_sizes
from winnow.ops.weights import PlainWeight, Weight, shape


def linear(x: Tensor, weight: Weight) -> Tensor:
    """See `winnow.ops.linear.Linear`."""
    if isinstance(weight, PlainWeight):
        return F.linear(x, weight.data)
    (rows, depth), width = x.shape, shape(weight)[0]
    out = torch.empty(rows, width, dtype=x.dtype, device=x.device)
    if not rows:
        return out
    if x.stride(1) != 1:
        x = x.contiguous()
    w, sizes = held(weight), tile_sizes(rows, x.dtype)
    grid = (triton.cdiv(rows, sizes["BM"]), triton.cdiv(width, sizes["BN"]))
    _linear[grid](
        x, w.codes, w.scales, w.global_scales, out, rows, x.stride(0),
        KIND=w.kind, N=width, K=depth, **sizes,
    )  # fmt: skip
    return out


def head(x: Tensor, weight: PlainWeight, out: Tensor | None) -> Tensor:
    """See `winnow.ops.linear.Head`."""
    if out is None:
        out = torch.empty(x.shape[0], weight.data.shape[0], dtype=torch.float32, device=x.device)
    if x.is_cuda and x.dtype is not torch.float32:
        return torch.mm(x, weight.data.T, out_dtype=torch.float32, out=out)
    return torch.mm(x.float(), weight.data.float().T, out=out)


@triton.jit(do_not_specialize=["rows"])
def _linear(
    x_ptr, codes_ptr, scales_ptr, global_ptr, out_ptr, rows, x_stride,
    KIND: tl.constexpr, N: tl.constexpr, K: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64) * BM + tl.arange(0, BM)
    column = tl.program_id(1) * BN + tl.arange(0, BN)
    total = tile_product(
        x_ptr, row, row < rows, x_stride, codes_ptr, scales_ptr, global_ptr,
        tl.full((), 0, tl.int32), column, KIND, N, K, BM, BN, BK,
    )  # fmt: skip
    out = round_to(total, out_ptr.dtype.element_ty)
    mask = (row < rows)[:, None] & (column < N)[None, :]
    tl.store(out_ptr + row[:, None] * N + column[None, :], out, mask=mask)

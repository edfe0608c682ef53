"""`norm` and `add_norm` in Triton: one program a row."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from winnow.ops.triton_codec import round_to


def norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """See `winnow.ops.norm.Norm`."""
    width = x.shape[-1]
    rows = _lines(x.reshape(-1, width))
    out = torch.empty(rows.shape, dtype=x.dtype, device=x.device)
    if rows.shape[0]:
        _norm[(rows.shape[0],)](
            rows, weight, out, rows.stride(0), eps, WIDTH=width, **_sizes(width)
        )
    return out.view(x.shape)


def add_norm(x: Tensor, delta: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """See `winnow.ops.norm.AddNorm`."""
    rows, width = x.shape
    x, delta = _lines(x), _lines(delta)
    total, out = (torch.empty(x.shape, dtype=x.dtype, device=x.device) for _ in range(2))
    if rows:
        _add_norm[(rows,)](
            x, delta, weight, total, out, x.stride(0), delta.stride(0), eps,
            WIDTH=width, **_sizes(width),
        )  # fmt: skip
    return total, out


def _lines(rows: Tensor) -> Tensor:
    """Rows whose values lie side by side."""
    return rows if rows.stride(1) == 1 else rows.contiguous()


def _sizes(width: int) -> dict[str, int]:
    """Of the width alone, so that a row's sum is taken in the same order in any batch."""
    block = triton.next_power_of_2(width)
    return {"BLOCK": block, "num_warps": max(1, min(8, block // 512))}


@triton.jit
def _normed(x, weight_ptr, lane, inside, eps, WIDTH: tl.constexpr):
    """A row in fp32, normed; 0 past its end."""
    weight = tl.load(weight_ptr + lane, mask=inside, other=0.0)
    # Exact operations, so that a row of zeros or of huge values ends as it does in the reference.
    scale = tl.div_rn(1.0, tl.sqrt_rn(tl.div_rn(tl.sum(x * x, 0), WIDTH * 1.0) + eps))
    return x * scale * (1.0 + weight)


@triton.jit
def _norm(x_ptr, weight_ptr, out_ptr, stride, eps, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    lane = tl.arange(0, BLOCK)
    inside = lane < WIDTH
    x = tl.load(x_ptr + row * stride + lane, mask=inside, other=0.0).to(tl.float32)
    out = round_to(_normed(x, weight_ptr, lane, inside, eps, WIDTH), out_ptr.dtype.element_ty)
    tl.store(out_ptr + row * WIDTH + lane, out, mask=inside)


@triton.jit
def _add_norm(
    x_ptr, delta_ptr, weight_ptr, total_ptr, out_ptr, x_stride, delta_stride, eps,
    WIDTH: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    lane = tl.arange(0, BLOCK)
    inside = lane < WIDTH
    x = tl.load(x_ptr + row * x_stride + lane, mask=inside, other=0.0).to(tl.float32)
    delta = tl.load(delta_ptr + row * delta_stride + lane, mask=inside, other=0.0).to(tl.float32)
    total = round_to(x + delta, total_ptr.dtype.element_ty)
    tl.store(total_ptr + row * WIDTH + lane, total, mask=inside)
    out = _normed(total.to(tl.float32), weight_ptr, lane, inside, eps, WIDTH)
    tl.store(out_ptr + row * WIDTH + lane, round_to(out, out_ptr.dtype.element_ty), mask=inside)

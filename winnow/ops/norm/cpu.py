"""`norm` on a CPU: one pass over each row in C++."""

from __future__ import annotations

import torch
from torch import Tensor

from winnow.ops.native import library, threads


def norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """See `winnow.ops.norm.Norm`."""
    return norm_rotate(x.reshape(-1, 1, x.shape[-1]), weight, eps, None).view(x.shape).to(x.dtype)


def add_norm(x: Tensor, delta: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """See `winnow.ops.norm.AddNorm`."""
    total = x + delta
    return total, norm(total, weight, eps)


def norm_rotate(
    x: Tensor, weight: Tensor, eps: float, rope: tuple[Tensor, Tensor] | None
) -> Tensor:
    """Norm each head of `x` [rows, heads, dim] and rotate by `rope` (cos, sin) [rows, half], if
    given: fp32 [rows, heads, dim]."""
    rows, heads, dim = x.shape
    wide = x.float()
    # A slice of a wider projection is read in place: only its heads must lie side by side.
    if wide.stride(2) != 1 or wide.stride(1) != dim:
        wide = wide.contiguous()
    cos, sin = (t.contiguous() for t in rope) if rope is not None else (weight, weight)
    half = cos.shape[-1] if rope is not None else 0
    out = torch.empty(rows, heads, dim)
    library().winnow_norm_rotate(
        wide.data_ptr(), rows, heads, dim, wide.stride(0), weight.data_ptr(), eps,
        cos.data_ptr(), sin.data_ptr(), half, out.data_ptr(), heads * dim, threads(),
    )  # fmt: skip
    return out

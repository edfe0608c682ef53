"""The meaning of `norm`; also fast enough to serve on a CPU."""

import torch
from torch import Tensor


def norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """See `winnow.ops.norm.Norm`."""
    wide = x.float()
    scale = torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    return (wide * scale * (1.0 + weight)).to(x.dtype)


def add_norm(x: Tensor, delta: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """See `winnow.ops.norm.AddNorm`."""
    total = x + delta
    return total, norm(total, weight, eps)

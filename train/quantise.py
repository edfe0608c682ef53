"""Values as a quantised format would hold them, fast enough to train with.

Bit for bit what `winnow.ops.codec` gives after a round trip (tests/train/test_quantise.py), in
operations that a compiler can fuse. Gradients pass straight through.
"""

from __future__ import annotations

import torch
from torch import Tensor

FORMATS = ("model", "fp8", "nvfp4")
"""Of K and V and of the index keys; `model` leaves values as they are."""


def straight_through(x: Tensor, rounded: Tensor) -> Tensor:
    """`rounded`, to the bit, with the gradient of `x`."""
    return rounded.detach().to(x.dtype) + (x - x.detach())


def cached(x: Tensor, name: str) -> Tensor:
    """`x` as a cache of a format of FORMATS gives it back, with tensor scales of 1."""
    if name == "model":
        return x
    return straight_through(x, nvfp4(x.float()) if name == "nvfp4" else fp8(x.float()))


def nvfp4(x: Tensor, global_scale: Tensor | None = None) -> Tensor:
    """fp32 [..., K], K a multiple of 16, in groups of 16; `global_scale` broadcasts against x
    with a last axis of 1, and is 1 if left out."""
    groups = x.unflatten(-1, (-1, 16))
    amax = groups.abs().amax(-1, keepdim=True)
    ratio = amax / torch.full_like(amax, 6.0)
    if global_scale is not None:
        ratio = ratio / global_scale.unsqueeze(-1)
    scale = ratio.clamp(max=448.0).to(torch.float8_e4m3fn).float()
    step = scale if global_scale is None else scale * global_scale.unsqueeze(-1)
    value = e2m1(groups / torch.where(step > 0, step, 1.0)) * scale
    value = torch.where(step > 0, value, 0.0)
    if global_scale is not None:
        value = value * global_scale.unsqueeze(-1)
    return value.flatten(-2)


def e2m1(x: Tensor) -> Tensor:
    """The nearest of 0, 0.5, 1, 1.5, 2, 3, 4 and 6 and their negatives, ties to the even code."""
    size = x.abs()
    # Steps of 0.5 below 2, of 1 below 4, of 2 above; torch.round goes to even.
    fine, middle, coarse = (size * 2).round() / 2, size.round(), (size / 2).round() * 2
    rounded = torch.where(size < 2, fine, torch.where(size < 4, middle, coarse)).clamp(max=6.0)
    return torch.where(x < 0, -rounded, rounded)


def fp8(x: Tensor) -> Tensor:
    """fp32 through E4M3, saturating."""
    return x.clamp(-448.0, 448.0).to(torch.float8_e4m3fn).float()


def mxfp8(x: Tensor) -> Tensor:
    """fp32 [..., K], K a multiple of 32, in groups of 32 with power-of-two scales."""
    groups = x.unflatten(-1, (-1, 32))
    bits = groups.abs().amax(-1, keepdim=True).view(torch.int32)
    # The smallest power of two at or above amax / 448 = amax / (1.75 * 2^8), from amax's bits.
    exponent = ((bits >> 23) - 8 + ((bits & 0x7FFFFF) > 0x600000).int()).clamp(min=0)
    scale = torch.where(exponent > 0, exponent << 23, 0x400000).view(torch.float32)
    return (fp8(groups / scale) * scale).flatten(-2)


def expert_scale(*pieces: Tensor) -> Tensor:
    """The global scale [..., 1, 1] that pieces [..., N, K] share on disk, through the reciprocal
    that the packed form stores."""
    amax = torch.stack([piece.abs().amax((-2, -1), keepdim=True) for piece in pieces]).amax(0)
    scale = (amax / torch.full_like(amax, 6.0 * 448.0)).clamp(min=2.0**-117)
    scale = torch.where(amax == 0, 1.0, scale)
    return scale.reciprocal().reciprocal()

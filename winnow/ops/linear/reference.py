"""The meaning of `linear`: dequantise, then multiply in fp32."""

import torch
from torch import Tensor

from winnow.ops import fragments, fragments_mxfp8
from winnow.ops.codec import reference as codec
from winnow.ops.fragments_mxfp8 import PackedMxfp8Weight
from winnow.ops.weights import Mxfp8Weight, Nvfp4Weight, PackedNvfp4Weight, PlainWeight, Weight


def dequantise(weight: Weight, dtype: torch.dtype) -> Tensor:
    """The values [..., N, K] that a weight stands for, in `dtype`."""
    match weight:
        case PlainWeight(data):
            return data.to(dtype)
        case Mxfp8Weight(codes, scales):
            return codec.dequantise_mxfp8(codes, scales, dtype)
        case Nvfp4Weight(codes, scales, global_scales):
            return codec.dequantise_nvfp4(codes, scales, global_scales.unsqueeze(-1), dtype)
        case PackedMxfp8Weight():
            return dequantise(Mxfp8Weight(*fragments_mxfp8.unpack(weight)), dtype)
        case PackedNvfp4Weight():
            return dequantise(fragments.unpack(weight), dtype)


def linear(x: Tensor, weight: Weight) -> Tensor:
    """See `winnow.ops.linear.Linear`."""
    return (x.float() @ dequantise(weight, x.dtype).float().T).to(x.dtype)


def head(x: Tensor, weight: PlainWeight, out: Tensor | None) -> Tensor:
    """See `winnow.ops.linear.Head`."""
    return torch.mm(x.float(), weight.data.float().T, out=out)

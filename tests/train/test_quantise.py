"""What training rounds to is what the server's formats hold, bit for bit."""

from __future__ import annotations

import torch
from torch import Tensor

from train import quantise
from winnow.model.checkpoint.rewrite import _encode_scale
from winnow.ops.codec import reference as codec


def hostile() -> Tensor:
    """Random values of many sizes, ties, zeros, groups of zeros, and values beyond the range."""
    generator = torch.Generator().manual_seed(0)
    random = torch.randn(512, 64, generator=generator)
    sizes = torch.logspace(-9, 5, 512).unsqueeze(-1)
    ties = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, 6.0]).repeat(8).repeat(16, 1)
    zeros = torch.zeros(4, 64)
    mixed = torch.cat((torch.zeros(16), torch.full((16,), 1e-4), torch.ones(32))).unsqueeze(0)
    powers = 2.0 ** torch.arange(-64, 64).view(2, 64).float()
    return torch.cat((random, random * sizes, ties, -ties, zeros, mixed, powers))


def test_nvfp4_is_the_round_trip_of_the_codec() -> None:
    x = hostile()
    assert torch.equal(quantise.nvfp4(x), codec.dequantise_nvfp4(*codec.quantise_nvfp4(x)))


def test_nvfp4_with_a_global_scale_is_the_round_trip_of_the_codec() -> None:
    x = hostile()[:512]
    scale = torch.tensor(3.7e-4)
    ours = quantise.nvfp4(x, scale.view(1, 1))
    theirs = codec.dequantise_nvfp4(*codec.quantise_nvfp4(x, scale), scale)
    assert torch.equal(ours, theirs)


def test_mxfp8_is_the_round_trip_of_the_codec() -> None:
    x = hostile()
    assert torch.equal(quantise.mxfp8(x), codec.dequantise_mxfp8(*codec.quantise_mxfp8(x)))


def test_fp8_is_the_round_trip_of_the_codec() -> None:
    x = hostile()
    assert torch.equal(quantise.fp8(x), codec.dequantise_fp8(codec.quantise_fp8(x)))


def test_experts_share_the_scale_that_the_checkpoint_stores() -> None:
    generator = torch.Generator().manual_seed(1)
    w1, w3 = (
        torch.randn(3, 32, 64, generator=generator),
        torch.randn(3, 32, 64, generator=generator),
    )
    ours = quantise.expert_scale(w1, w3)
    assert ours.shape == (3, 1, 1)
    for number in range(3):
        stored = _encode_scale([w1[number], w3[number]])
        assert torch.equal(ours[number].squeeze(), stored.reciprocal())


def test_gradients_pass_straight_through_and_values_do_not() -> None:
    x = torch.randn(4, 32, dtype=torch.bfloat16).requires_grad_()
    out = quantise.cached(x, "nvfp4")
    assert torch.equal(out.float(), quantise.nvfp4(x.detach().float()))
    out.sum().backward()
    assert x.grad is not None
    assert torch.equal(x.grad, torch.ones_like(x))

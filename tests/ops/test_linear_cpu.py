"""Quantised weights on a CPU in fp32: expanded where they are multiplied, to the same bits."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from winnow.ops.linear import cpu
from winnow.ops.linear.reference import dequantise
from winnow.ops.weights import Mxfp8Weight, Nvfp4Weight, PlainWeight, expert

SHAPES = [(1, 32, 5), (7, 96, 80), (200, 544, 33)]
"""Rows, K and N; more rows than a task has, and fewer columns than a tile, among them."""


def bytes_(*shape: int, seed: int, most: int = 256) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, most, shape, dtype=torch.uint8, generator=generator)


def weight(kind: str, *shape: int) -> Mxfp8Weight | Nvfp4Weight:
    """Every code and scale there is, NaN and subnormals included."""
    *stack, n, k = shape
    if kind == "mxfp8":
        codes = bytes_(*stack, n, k, seed=1).view(torch.float8_e4m3fn)
        return Mxfp8Weight(codes, bytes_(*stack, n, k // 32, seed=2))
    scales = bytes_(*stack, n, k // 16, seed=3).view(torch.float8_e4m3fn)
    factors = torch.rand(*stack, n, generator=torch.Generator().manual_seed(4)) * 0.03
    return Nvfp4Weight(bytes_(*stack, n, k // 2, seed=5), scales, factors)


def finite(held: Mxfp8Weight | Nvfp4Weight) -> Mxfp8Weight | Nvfp4Weight:
    if isinstance(held, Mxfp8Weight):
        codes = held.codes.view(torch.uint8) & 0xF7
        return Mxfp8Weight(codes.view(torch.float8_e4m3fn), held.scales % 128 + 60)
    scales = held.scales.view(torch.uint8) & 0xF7
    return Nvfp4Weight(held.codes, scales.view(torch.float8_e4m3fn), held.global_scales)


@pytest.mark.parametrize("kind", ["mxfp8", "nvfp4"])
@pytest.mark.parametrize(("rows", "depth", "width"), SHAPES)
@pytest.mark.parametrize("hostile", [False, True])
def test_expanding_where_it_is_multiplied_changes_no_bit(
    kind: str, rows: int, depth: int, width: int, hostile: bool
) -> None:
    held = weight(kind, width, depth)
    held = held if hostile else finite(held)
    x = torch.randn(rows, depth, generator=torch.Generator().manual_seed(6))
    got = cpu.linear(x, held)
    want = cpu.linear(x, PlainWeight(dequantise(held, torch.float32)))
    assert torch.equal(got.isnan(), want.isnan())
    assert torch.equal(got.nan_to_num(), want.nan_to_num())
    assert hostile or bool(got.isfinite().all())


@pytest.mark.parametrize("kind", ["mxfp8", "nvfp4"])
def test_groups_of_rows_have_their_experts_matrices(kind: str) -> None:
    stack = finite(weight(kind, 5, 48, 64))
    x = torch.randn(9, 64, generator=torch.Generator().manual_seed(7))
    got = cpu.grouped_linear(x, stack, [0, 3, 4], [2, 1, 6])
    parts = zip([0, 3, 4], x.split([2, 1, 6]), strict=True)
    assert torch.equal(got, torch.cat([cpu.linear(part, expert(stack, e)) for e, part in parts]))
    assert torch.equal(got[2], cpu.linear(x[2:3], expert(stack, 3))[0])

"""Hopper's norms: what they take anywhere, their outputs and neighbours on a GPU."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from winnow.errors import UnsupportedError
from winnow.ops import cuda_build
from winnow.ops.norm import hopper, reference

gpu = pytest.mark.skipif(
    not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0),
    reason="needs an H100 or H200",
)
nvcc = pytest.mark.skipif(cuda_build.compiler() is None, reason="needs nvcc")

EPS = 1e-6
WIDTHS = (8, 96, 256, 3072, 6144, 8192)


def rows_of(count: int, width: int) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(count)
    x, delta = (3 * torch.randn(count, width, generator=generator).bfloat16() for _ in range(2))
    if count > 4:
        x[0], delta[0] = 0.0, 0.0
        x[1], delta[1] = 1e-30, 0.0
        x[2, 5], x[3, 7] = float("inf"), float("nan")
        x[4] *= 1e17
    weight = torch.linspace(-0.5, 0.5, width)
    return x.cuda(), delta.cuda(), weight.cuda()


def alike(got: Tensor, want: Tensor) -> None:
    torch.testing.assert_close(got, want, rtol=2.0**-7, atol=0.0, equal_nan=True)


@nvcc
def test_the_kernel_builds() -> None:
    assert cuda_build.build(hopper.SOURCE).is_file()


@pytest.mark.parametrize(
    ("width", "dtype"), [(96, torch.float32), (100, torch.bfloat16), (8200, torch.bfloat16)]
)
def test_what_the_kernel_cannot_take_is_refused_with_numbers(
    width: int, dtype: torch.dtype
) -> None:
    x, weight = torch.zeros(2, width, dtype=dtype), torch.zeros(width)
    assert not hopper.takes(x, weight, EPS)
    with pytest.raises(UnsupportedError, match=f"not {width} in {dtype}"):
        hopper.norm(x, weight, EPS)


@gpu
@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("count", [0, 1, 7, 130])
def test_norms_are_the_references(count: int, width: int) -> None:
    x, delta, weight = rows_of(count, width)
    total, normed = hopper.add_norm(x, delta, weight, EPS)
    alone = hopper.norm(x, weight, EPS)
    want_total, want = reference.add_norm(x, delta, weight, EPS)
    torch.testing.assert_close(total, want_total, rtol=0.0, atol=0.0, equal_nan=True)
    alike(normed, want)
    alike(alone, reference.norm(x, weight, EPS))


@gpu
def test_rows_that_lie_apart_are_read_where_they_are() -> None:
    x, _, weight = rows_of(21, 1024)
    apart = torch.zeros(21, 2048, dtype=x.dtype, device="cuda")[:, :1024].copy_(x)[::3]
    shifted = torch.zeros(7, 1025, dtype=x.dtype, device="cuda")[:, 1:].copy_(x[::3])
    want = hopper.norm(x[::3].contiguous(), weight, EPS)
    for rows in (apart, shifted, apart.unsqueeze(1)):
        got = hopper.norm(rows, weight, EPS).view(want.shape)
        torch.testing.assert_close(got, want, rtol=0.0, atol=0.0, equal_nan=True)


@gpu
def test_a_rows_norm_is_the_same_in_any_batch() -> None:
    x, delta, weight = rows_of(64, 6144)
    _, together = hopper.add_norm(x, delta, weight, EPS)
    for row in range(5, 64, 7):
        _, alone = hopper.add_norm(x[row : row + 1], delta[row : row + 1], weight, EPS)
        assert torch.equal(alone[0], together[row])

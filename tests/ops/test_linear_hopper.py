"""Hopper's MXFP8 products: what they promise on any machine, and against the reference on a GPU."""

from __future__ import annotations

import pytest
import torch

from winnow.errors import UnsupportedError
from winnow.ops.case import Case, error, judge
from winnow.ops.codec import reference as codec
from winnow.ops.cuda_build import build, compiler
from winnow.ops.fragments_mxfp8 import PackedMxfp8Weight
from winnow.ops.linear import hopper
from winnow.ops.linear.cases import CASES
from winnow.ops.linear.reference import dequantise
from winnow.ops.linear.reference import linear as reference
from winnow.ops.weights import Mxfp8Weight, PlainWeight

needs_nvcc = pytest.mark.skipif(compiler() is None, reason="nvcc is not installed")
needs_hopper = pytest.mark.skipif(
    not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0),
    reason="there is no Hopper GPU",
)
WIDTHS = ((6144, 6144), (6144, 8192), (9216, 6144), (6144, 3072), (384, 384), (640, 6144))


def weight(n: int, k: int) -> Mxfp8Weight:
    generator = torch.Generator().manual_seed(n + k)
    return Mxfp8Weight(*codec.quantise_mxfp8(torch.randn(n, k, generator=generator) * k**-0.5))


@needs_nvcc
@pytest.mark.parametrize("source", [hopper.DECODE, hopper.WIDE, hopper.EXPAND])
def test_the_kernels_compile(source: object) -> None:
    assert build(source).stat().st_size > 0  # type: ignore[arg-type]


def test_a_packed_weight_means_what_it_meant() -> None:
    standard = weight(48, 256)
    want = dequantise(standard, torch.bfloat16)
    packed = hopper.prepare(standard)
    assert isinstance(packed, PackedMxfp8Weight)
    assert torch.equal(dequantise(packed, torch.bfloat16), want)


def test_a_scale_of_nan_is_put_into_the_codes() -> None:
    standard = weight(16, 128)
    standard.scales[3, 1] = 255
    packed = hopper.prepare(standard)
    values = dequantise(packed, torch.float32)
    assert values[3, 32:64].isnan().all()
    assert int(values.isnan().sum()) == 32
    assert isinstance(packed, PackedMxfp8Weight)
    assert int(packed.codes.view(torch.float8_e4m3fn).float().isnan().sum()) == 32


def test_what_cannot_be_packed_stays_as_it_is() -> None:
    for other in (weight(24, 128), weight(16, 96), PlainWeight(torch.zeros(16, 128))):
        assert hopper.prepare(other) is other


@pytest.mark.parametrize(("n", "k"), WIDTHS)
@pytest.mark.parametrize("rows", [1, 7, 8, 9, 16, 17, 32, 33, 64])
def test_every_split_fits_the_chip_and_leaves_no_warp_without_work(
    rows: int, n: int, k: int
) -> None:
    chosen = hopper.split(rows, k // 128)
    assert chosen is not None
    assert hopper.fits(rows, k // 128, chosen)


def test_a_split_that_leaves_a_warp_without_work_does_not_fit() -> None:
    assert not hopper.fits(1, 6, hopper.Split(columns=8, slices=1, parts=8))
    assert not hopper.fits(1, 6, hopper.Split(columns=8, slices=8, parts=1))
    assert not hopper.fits(9, 48, hopper.Split(columns=8, slices=8, parts=1))
    assert not hopper.fits(64, 96, hopper.Split(columns=64, slices=4, parts=0))
    assert hopper.fits(64, 96, hopper.Split(columns=64, slices=8, parts=0))


def test_only_bf16_rows_and_mxfp8_in_whole_strips_are_taken() -> None:
    x = torch.zeros(3, 128, dtype=torch.bfloat16)
    assert hopper.takes(x, weight(16, 128))
    assert hopper.takes(x, hopper.prepare(weight(16, 128)))
    assert not hopper.takes(x.float(), weight(16, 128))
    assert not hopper.takes(x, weight(24, 128))
    assert not hopper.takes(x, PlainWeight(torch.zeros(16, 128)))
    with pytest.raises(UnsupportedError, match="float32 by Mxfp8Weight"):
        hopper.linear(x.float(), weight(16, 128))


SERVED = [c for c in CASES if "mxfp8" in c.name and "bf16" in c.name and "x96" not in c.name]


@needs_hopper
@pytest.mark.parametrize("case", SERVED, ids=lambda case: case.name)
def test_every_case_that_is_taken_agrees_with_the_reference(case: Case) -> None:
    assert all(v.passed for v in judge(case, hopper.linear, reference, "cuda"))


@needs_hopper
@pytest.mark.parametrize(("n", "k"), WIDTHS)
@pytest.mark.parametrize("rows", [1, 8, 13, 31, 64, 100, 300])
def test_real_widths_agree_and_repeat_to_the_bit(rows: int, n: int, k: int) -> None:
    codes = torch.randint(0x28, 0x48, (n, k), dtype=torch.uint8, device="cuda")
    scales = torch.randint(112, 122, (n, k // 32), dtype=torch.uint8, device="cuda")
    packed = hopper.prepare(Mxfp8Weight(codes.view(torch.float8_e4m3fn), scales))
    x = torch.randn(rows, k, device="cuda").bfloat16()
    x[0] *= 2.0**-30
    got = hopper.linear(x, packed)
    want = (x.float() @ dequantise(packed, torch.bfloat16).float().T).bfloat16()
    assert max(error(got[:1], want[:1]), error(got[1:], want[1:])) < 2.0**-8
    assert torch.equal(got, hopper.linear(x, packed))


@needs_hopper
def test_two_weights_in_one_launch_give_what_each_gives_alone() -> None:
    first, second = (hopper.prepare(_on_gpu(weight(n, 640))) for n in (96, 48))
    for rows in (1, 9, 64, 200):
        x = torch.randn(rows, 640, device="cuda").bfloat16()
        a, b = hopper.pair(hopper.linear)(x, first, second)
        assert torch.equal(a, hopper.linear(x, first))
        assert torch.equal(b, hopper.linear(x, second))


def _on_gpu(standard: Mxfp8Weight) -> Mxfp8Weight:
    return Mxfp8Weight(standard.codes.cuda(), standard.scales.cuda())

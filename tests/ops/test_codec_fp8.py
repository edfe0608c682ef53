"""MXFP8 and per-tensor FP8 against their definitions, and their contracts for what does not fit."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from winnow.ops.codec import (
    count_saturated_fp8,
    decode_e8m0,
    dequantise_fp8,
    dequantise_mxfp8,
    encode_e4m3,
    quantise_fp8,
    quantise_mxfp8,
)
from winnow.spec.formats import FP8, MXFP8

BYTES = torch.arange(256, dtype=torch.int32).to(torch.uint8)
FINITE = BYTES[(BYTES & 0x7F) != 0x7F]
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def randn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def relative_error(got: Tensor, want: Tensor) -> float:
    return float(torch.linalg.vector_norm(got - want) / torch.linalg.vector_norm(want))


def test_mxfp8_shapes_and_dtypes_follow_the_contract() -> None:
    codes, scales = quantise_mxfp8(randn(3, 5, 64).bfloat16())
    assert (codes.dtype, codes.shape) == (torch.float8_e4m3fn, (3, 5, 64))
    assert (scales.dtype, scales.shape) == (torch.uint8, (3, 5, 2))
    for dtype in DTYPES:
        values = dequantise_mxfp8(codes, scales, dtype)
        assert (values.dtype, values.shape) == (dtype, (3, 5, 64))


@pytest.mark.parametrize("shape", [(0, 128), (4, 0), (2, 0, 32)])
def test_no_values_in_give_no_values_out(shape: tuple[int, ...]) -> None:
    codes, scales = quantise_mxfp8(torch.empty(shape), strict=True)
    assert (codes.shape, scales.shape) == (shape, (*shape[:-1], shape[-1] // 32))
    assert dequantise_mxfp8(codes, scales).shape == shape
    assert dequantise_fp8(quantise_fp8(torch.empty(shape))).shape == shape
    assert count_saturated_fp8(torch.empty(shape)) == 0


@pytest.mark.parametrize("exponent", [-110, -30, -1, 0, 1, 30, 118])
def test_mxfp8_is_fp8_scaled_by_the_least_power_of_two_that_fits(exponent: int) -> None:
    x = randn(64, 64) * 2.0**exponent
    codes, scales = quantise_mxfp8(x)
    groups = x.double().view(64, 2, 32)
    steps = torch.exp2(scales.double() - 127)
    amax = groups.abs().amax(-1)
    assert bool((amax <= 448 * steps).all())
    assert bool((amax > 448 * steps / 2).all())
    want = encode_e4m3((groups / steps.unsqueeze(-1)).float()).view(64, 64)
    assert torch.equal(codes.view(torch.uint8), want.view(torch.uint8))


def test_mxfp8_clips_no_finite_value() -> None:
    # A significand just above 1.75 is where rounding the scale down would clip.
    x = torch.full((32, 32), 1.0)
    x[:, 0] = torch.linspace(1.5, 2.0, 32)
    values = dequantise_mxfp8(*quantise_mxfp8(x))
    # Half the distance of neighbours in E4M3.
    assert float(((values - x).abs() / x).max()) <= 2.0**-4


def test_an_mxfp8_group_of_zeros_has_the_least_scale_and_keeps_signs() -> None:
    x = torch.zeros(1, 32)
    x[0, 1::2] = -0.0
    codes, scales = quantise_mxfp8(x)
    assert scales.tolist() == [[0]]
    assert codes.view(torch.uint8).tolist() == [[0x00, 0x80] * 16]
    assert torch.equal(dequantise_mxfp8(codes, scales).view(torch.int32), x.view(torch.int32))


def test_mxfp8_holds_fp32_subnormals() -> None:
    x = torch.tensor([2.0**-127, -(2.0**-130), 2.0**-136, 2.0**-149] * 8)
    codes, scales = quantise_mxfp8(x)
    assert scales.tolist() == [0]
    assert dequantise_mxfp8(codes, scales)[:4].tolist() == [2.0**-127, -(2.0**-130), 2.0**-136, 0.0]


def test_mxfp8_inf_saturates_and_its_group_has_the_scale_of_the_largest_fp32() -> None:
    x = torch.full((32,), 2.0**119)
    x[3], x[4] = math.inf, -math.inf
    codes, scales = quantise_mxfp8(x)
    assert scales.tolist() == [247]
    assert codes.float()[:5].tolist() == [0.5, 0.5, 0.5, 448.0, -448.0]


def test_mxfp8_nan_makes_its_own_group_nan_in_both_parts_and_no_other() -> None:
    x = randn(2, 96)
    x[1, 40] = -torch.tensor(math.nan)
    codes, scales = quantise_mxfp8(x)
    hit = torch.zeros(2, 96, dtype=torch.bool)
    hit[1, 32:64] = True
    assert torch.equal(dequantise_mxfp8(codes, scales).isnan(), hit)
    assert torch.equal(codes.view(torch.uint8) == 0x7F, hit)
    assert scales[1, 1] == 255
    assert int((scales == 255).sum()) == 1


def test_mxfp8_strict_refuses_inf_and_nan_and_counts_them() -> None:
    x = randn(2, 32)
    x[0, 0], x[1, 1] = math.inf, math.nan
    with pytest.raises(ValueError, match=r"2 of 64 values are not finite \(1 inf, 1 NaN\)"):
        quantise_mxfp8(x, strict=True)


def test_mxfp8_refuses_what_does_not_fill_groups_or_fit_together() -> None:
    with pytest.raises(
        ValueError, match=r"shape \[2, 48\]: the last axis must be a multiple of 32"
    ):
        quantise_mxfp8(randn(2, 48))
    codes, scales = quantise_mxfp8(randn(2, 64))
    with pytest.raises(ValueError, match="disagree: one scale per 32 codes"):
        dequantise_mxfp8(codes, scales[:, :1])
    with pytest.raises(TypeError, match="expected"):
        dequantise_mxfp8(codes.view(torch.uint8), scales)


def test_dequantising_mxfp8_is_exact_for_every_code_and_scale_that_fp32_can_hold() -> None:
    scales = BYTES[:255].view(-1, 1).repeat(1, 8)
    codes = BYTES.repeat(255, 1).view(torch.float8_e4m3fn)
    exact = codes.double() * torch.exp2(scales[:, :1].double() - 127)
    values = dequantise_mxfp8(codes, scales)
    too_large = exact.abs() > torch.finfo(torch.float32).max
    assert bool(values[too_large].isinf().all())
    kept = ~too_large
    assert torch.equal(values.double()[kept].nan_to_num(-1.0), exact[kept].nan_to_num(-1.0))
    bf16 = dequantise_mxfp8(codes, scales, torch.bfloat16)
    normal = kept & (exact.abs() >= 2.0**-126)
    assert torch.equal(bf16.double()[normal], exact[normal])


def test_an_e8m0_scale_of_255_makes_every_code_nan() -> None:
    codes = BYTES.view(8, 32).view(torch.float8_e4m3fn)
    assert dequantise_mxfp8(codes, torch.full((8, 1), 255, dtype=torch.uint8)).isnan().all()


@pytest.mark.parametrize("scale", [0, 7, 8, 100, 127, 200, 247])
def test_mxfp8_codes_of_a_group_above_224_are_a_fixed_point(scale: int) -> None:
    generator = torch.Generator().manual_seed(scale)
    codes = FINITE[torch.randint(0, len(FINITE), (64, 32), generator=generator)]
    # The largest magnitude must need this scale and stay below the largest fp32.
    codes[:, 4] = 0x77
    codes = torch.where((codes & 0x7F) > 0x77, codes & 0x87, codes)
    scales = torch.full((64, 1), scale, dtype=torch.uint8)
    again_codes, again_scales = quantise_mxfp8(
        dequantise_mxfp8(codes.view(torch.float8_e4m3fn), scales)
    )
    assert float(BYTES[0x77].view(torch.float8_e4m3fn).float()) == 240.0
    assert torch.equal(again_scales, scales)
    assert torch.equal(again_codes.view(torch.uint8), codes)


@pytest.mark.parametrize("magnitude", [1e-30, 1.0, 1e30])
def test_the_error_of_mxfp8_on_normal_values_is_within_the_formats_tolerance(
    magnitude: float,
) -> None:
    x = randn(1024, 128) * magnitude
    got = dequantise_mxfp8(*quantise_mxfp8(x))
    assert relative_error(got.double(), x.double()) <= MXFP8.tolerance


def test_the_error_of_fp8_on_normal_values_is_within_the_formats_tolerance() -> None:
    x = randn(1024, 128)
    assert relative_error(dequantise_fp8(quantise_fp8(x)), x) <= FP8.tolerance


def test_every_fp8_code_is_a_fixed_point() -> None:
    finite = FINITE.view(torch.float8_e4m3fn)
    for dtype in DTYPES:
        values = dequantise_fp8(finite, 1.0, dtype)
        assert torch.equal(quantise_fp8(values).view(torch.uint8), FINITE)
    for scale in (0.37, 1e-5, 1000.0):
        assert torch.equal(
            quantise_fp8(dequantise_fp8(finite, scale), scale).view(torch.uint8), FINITE
        )


def test_fp8_divides_by_its_scale_and_multiplies_back() -> None:
    x = torch.tensor([1.0, -3.0, 0.0, -0.0, 448.0 * 0.25, 1e9, -math.inf])
    codes = quantise_fp8(x, 0.25)
    assert codes.float().tolist() == [4.0, -12.0, 0.0, 0.0, 448.0, 448.0, -448.0]
    assert dequantise_fp8(codes, 0.25).tolist() == [1.0, -3.0, 0.0, 0.0, 112.0, 112.0, -112.0]
    assert dequantise_fp8(codes, 0.25)[3].signbit()
    assert dequantise_fp8(codes, 0.25, torch.bfloat16).dtype == torch.bfloat16


def test_fp8_keeps_nan() -> None:
    codes = quantise_fp8(torch.tensor([math.nan, -math.nan, 1.0]))
    assert codes.view(torch.uint8).tolist() == [0x7F, 0x7F, 0x38]
    assert dequantise_fp8(codes).isnan().tolist() == [True, True, False]


def test_fp8_values_that_clip_are_counted() -> None:
    x = torch.tensor([448.0, 464.0, 464.001, -500.0, math.inf, math.nan, 0.0])
    assert count_saturated_fp8(x) == 3
    assert count_saturated_fp8(x, 2.0) == 1
    assert count_saturated_fp8(x.abs(), 0.5) == 5


@pytest.mark.parametrize("scale", [0.0, -1.0, math.inf, math.nan])
def test_an_fp8_scale_that_is_not_positive_and_finite_is_refused(scale: float) -> None:
    with pytest.raises(ValueError, match="must be positive and finite"):
        quantise_fp8(torch.ones(4), scale)
    with pytest.raises(ValueError, match="must be positive and finite"):
        dequantise_fp8(quantise_fp8(torch.ones(4)), scale)
    with pytest.raises(ValueError, match="must be positive and finite"):
        count_saturated_fp8(torch.ones(4), scale)


def test_bytes_are_not_taken_for_fp8() -> None:
    with pytest.raises(TypeError, match="expected"):
        dequantise_fp8(BYTES)


def test_e8m0_decoding_agrees_with_the_scales_that_quantising_writes() -> None:
    x = torch.full((1, 32), 448.0)
    codes, scales = quantise_mxfp8(x * 8)
    assert decode_e8m0(scales).item() == 8.0
    assert codes.float().eq(448.0).all()

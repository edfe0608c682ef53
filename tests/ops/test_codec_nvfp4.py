"""NVFP4 against its definition worked out by hand, and its contract for what does not fit."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from torch import Tensor

from winnow.ops.codec import (
    MAX_GLOBAL_SCALE,
    MIN_GLOBAL_SCALE,
    count_saturated_nvfp4,
    decode_e2m1,
    dequantise_nvfp4,
    encode_e2m1,
    nvfp4_global_scale,
    pack_e2m1,
    quantise_nvfp4,
    unpack_e2m1,
)
from winnow.spec.formats import NVFP4

E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
E4M3 = [
    float(v)
    for v in torch.arange(127, dtype=torch.int32).to(torch.uint8).view(torch.float8_e4m3fn).float()
]


def randn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def nearest(x: float, magnitudes: tuple[float, ...] | list[float]) -> int:
    return min(range(len(magnitudes)), key=lambda c: (abs(magnitudes[c] - abs(x)), c % 2))


def by_hand(group: list[float], global_scale: float) -> tuple[list[int], int]:
    """Codes and scale byte of one finite group, one value at a time, in NumPy's fp32."""
    fp32 = np.float32
    amax = max(abs(fp32(x)) for x in group)
    scale = nearest(float(amax / fp32(6) / fp32(global_scale)), E4M3)
    step = fp32(E4M3[scale]) * fp32(global_scale)
    if step == 0:
        return [0] * 16, scale
    codes = [
        nearest(float(fp32(x) / step), E2M1) | (8 if math.copysign(1, x) < 0 else 0) for x in group
    ]
    return codes, scale


@pytest.mark.parametrize("global_scale", [1.0, 0.37, 1e-4, 300.0])
@pytest.mark.parametrize("magnitude", [1e-3, 0.05, 1.0, 40.0, 2000.0])
def test_codes_and_scales_are_those_of_the_definition(
    magnitude: float, global_scale: float
) -> None:
    x = randn(12, 32) * magnitude
    x[0, 3], x[1, 4] = 0.0, -0.0
    codes, scales = quantise_nvfp4(x, global_scale)
    groups = x.view(-1, 16).tolist()
    want = [by_hand(group, global_scale) for group in groups]
    assert unpack_e2m1(codes).view(-1, 16).tolist() == [w[0] for w in want]
    assert scales.view(torch.uint8).flatten().tolist() == [w[1] for w in want]


def test_shapes_and_dtypes_follow_the_contract() -> None:
    codes, scales = quantise_nvfp4(randn(3, 5, 64).bfloat16())
    assert (codes.dtype, codes.shape) == (torch.uint8, (3, 5, 32))
    assert (scales.dtype, scales.shape) == (torch.float8_e4m3fn, (3, 5, 4))
    values = dequantise_nvfp4(codes, scales, dtype=torch.float16)
    assert (values.dtype, values.shape) == (torch.float16, (3, 5, 64))


@pytest.mark.parametrize("shape", [(0, 128), (4, 0), (2, 0, 16)])
def test_no_values_in_give_no_values_out(shape: tuple[int, ...]) -> None:
    codes, scales = quantise_nvfp4(torch.empty(shape), strict=True)
    assert codes.shape == (*shape[:-1], shape[-1] // 2)
    assert scales.shape == (*shape[:-1], shape[-1] // 16)
    assert dequantise_nvfp4(codes, scales).shape == shape
    assert count_saturated_nvfp4(torch.empty(shape)) == 0


def test_bf16_and_fp16_mean_their_fp32_values() -> None:
    for dtype in (torch.bfloat16, torch.float16):
        x = randn(8, 64).to(dtype)
        codes, scales = quantise_nvfp4(x)
        want_codes, want_scales = quantise_nvfp4(x.float())
        assert torch.equal(codes, want_codes)
        assert torch.equal(scales.view(torch.uint8), want_scales.view(torch.uint8))


def test_strides_change_nothing() -> None:
    x = randn(64, 48)
    for strided in (x.T, x[:, ::3], x[1::2, 16:]):
        codes, scales = quantise_nvfp4(strided)
        want_codes, want_scales = quantise_nvfp4(strided.contiguous())
        assert torch.equal(codes, want_codes)
        assert torch.equal(scales.view(torch.uint8), want_scales.view(torch.uint8))


def test_a_group_of_zeros_of_either_sign_has_scale_0_and_codes_0() -> None:
    codes, scales = quantise_nvfp4(torch.stack((torch.zeros(16), -torch.zeros(16))))
    assert not codes.any()
    assert not scales.view(torch.uint8).any()


def test_a_negative_zero_beside_other_values_keeps_its_sign() -> None:
    x = torch.ones(16)
    x[5] = -0.0
    values = dequantise_nvfp4(*quantise_nvfp4(x))
    assert values[5] == 0
    assert values[5].signbit()


def test_a_scale_that_rounds_to_zero_means_a_group_of_zeros() -> None:
    # The least E4M3 is 2^-9, so 2^-10 ties to 0; one ulp more is the least scale.
    tie = torch.full((1, 16), 6 * 2.0**-10)
    above = tie.nextafter(torch.tensor(math.inf))
    codes, scales = quantise_nvfp4(torch.cat((tie, above, torch.full((1, 16), 1e-45))))
    assert scales.view(torch.uint8).flatten().tolist() == [0, 1, 0]
    assert not codes[0].any()
    assert not codes[2].any()
    assert unpack_e2m1(codes[1]).tolist() == [5] * 16  # 3 * 2^-9, nearly 6 * 2^-10


@pytest.mark.parametrize("code", range(1, 8))
def test_subnormal_scales_are_used(code: int) -> None:
    step = code * 2.0**-9
    x = torch.tensor(E2M1).repeat(2) * step
    codes, scales = quantise_nvfp4(x)
    assert scales.view(torch.uint8).tolist() == [code]
    assert torch.equal(dequantise_nvfp4(codes, scales), x)


def test_inf_saturates_and_its_group_keeps_a_finite_scale() -> None:
    x = torch.full((2, 16), 448.0)
    x[0, 2], x[0, 3] = math.inf, -math.inf
    codes, scales = quantise_nvfp4(x)
    assert scales.float().tolist() == [[448.0], [72.0]]
    assert unpack_e2m1(codes)[0].tolist() == [2, 2, 7, 15] + [2] * 12
    assert dequantise_nvfp4(codes, scales).isfinite().all()


def test_nan_makes_its_own_group_nan_and_no_other() -> None:
    x = randn(3, 48)
    x[1, 20] = math.nan
    codes, scales = quantise_nvfp4(x)
    values = dequantise_nvfp4(codes, scales)
    hit = torch.zeros(3, 48, dtype=torch.bool)
    hit[1, 16:32] = True
    assert torch.equal(values.isnan(), hit)
    assert scales.view(torch.uint8)[1, 1] == 0x7F
    assert not codes[1, 8:16].any()
    x[1, 20] = 0.0
    clean_codes, clean_scales = quantise_nvfp4(x)
    others = torch.tensor([True, False, True])
    assert torch.equal(codes[1].view(3, 8)[others], clean_codes[1].view(3, 8)[others])
    assert torch.equal(
        scales.view(torch.uint8)[1, others], clean_scales.view(torch.uint8)[1, others]
    )


def test_a_nan_beside_inf_or_of_negative_sign_is_not_hidden() -> None:
    x = torch.ones(2, 16)
    x[0, 1], x[0, 2] = math.inf, math.nan
    x[1, 0] = torch.tensor(-1, dtype=torch.int32).view(torch.float32)
    codes, scales = quantise_nvfp4(x)
    assert scales.view(torch.uint8).tolist() == [[0x7F], [0x7F]]
    assert dequantise_nvfp4(codes, scales, 0.5, torch.bfloat16).isnan().all()


def test_strict_refuses_inf_and_nan_and_counts_them() -> None:
    x = randn(4, 16)
    x[0, 0], x[1, 1], x[2, 2] = math.inf, -math.inf, math.nan
    with pytest.raises(ValueError, match=r"3 of 64 values are not finite \(2 inf, 1 NaN\)"):
        quantise_nvfp4(x, strict=True)
    finite = x.nan_to_num(0.0, 1.0, -1.0)
    codes, _ = quantise_nvfp4(finite, strict=True)
    assert torch.equal(codes, quantise_nvfp4(finite)[0])


def test_a_global_scale_per_row_is_each_row_quantised_alone() -> None:
    x = randn(2, 3, 32)
    rows = torch.tensor([[0.1, 1.0, 7.0], [0.02, 3.0, 0.5]])
    codes, scales = quantise_nvfp4(x, rows.unsqueeze(-1), strict=True)
    values = dequantise_nvfp4(codes, scales, rows.unsqueeze(-1))
    for i in range(2):
        for j in range(3):
            alone = quantise_nvfp4(x[i, j], float(rows[i, j]))
            assert torch.equal(codes[i, j], alone[0])
            assert torch.equal(scales[i, j].view(torch.uint8), alone[1].view(torch.uint8))
            assert torch.equal(values[i, j], dequantise_nvfp4(*alone, float(rows[i, j])))


def test_a_global_scale_without_axes_equals_the_number() -> None:
    x = randn(4, 32)
    for tensor in (torch.tensor(0.3), torch.tensor([0.3]), torch.tensor(0.3).double()):
        codes, scales = quantise_nvfp4(x, tensor)
        assert torch.equal(codes, quantise_nvfp4(x, 0.3)[0])
        assert torch.equal(
            dequantise_nvfp4(codes, scales, tensor), dequantise_nvfp4(codes, scales, 0.3)
        )


def test_a_global_scale_along_the_quantised_axis_is_refused() -> None:
    with pytest.raises(ValueError, match=r"shape \[4\]: its last axis must be 1"):
        quantise_nvfp4(randn(4, 64), torch.ones(4))


@pytest.mark.parametrize("scale", [0.0, -1.0, 2.0**-118, 2.0**120, math.inf, math.nan])
def test_a_global_scale_out_of_range_is_refused(scale: float) -> None:
    with pytest.raises(ValueError, match=r"out of range .* must be in \[2\^-117, 2\^119\]"):
        quantise_nvfp4(randn(4, 64), scale)
    with pytest.raises(ValueError, match="out of range"):
        quantise_nvfp4(randn(1, 64), torch.tensor([[scale]]), strict=True)


@pytest.mark.parametrize("scale", [MIN_GLOBAL_SCALE, MAX_GLOBAL_SCALE])
def test_at_the_ends_of_the_global_scale_values_still_come_back(scale: float) -> None:
    x = torch.tensor(E2M1).repeat(2) * 4.0
    codes, scales = quantise_nvfp4(x * scale, scale)
    assert torch.equal(dequantise_nvfp4(codes, scales, scale), x * scale)


@pytest.mark.parametrize("width", [1, 15, 17, 24])
def test_a_width_that_does_not_fill_groups_is_refused(width: int) -> None:
    with pytest.raises(ValueError, match="last axis must be a multiple of 16"):
        quantise_nvfp4(randn(2, width))


def test_a_scalar_and_fp64_are_refused() -> None:
    with pytest.raises(ValueError, match="multiple of 16"):
        quantise_nvfp4(torch.tensor(1.0))
    with pytest.raises(TypeError, match="float64"):
        quantise_nvfp4(randn(2, 16).double())


def test_parts_that_do_not_belong_together_are_refused() -> None:
    codes, scales = quantise_nvfp4(randn(4, 64))
    with pytest.raises(
        ValueError, match=r"codes \[4, 32\] and scales \[4, 3\] disagree: one scale per 8"
    ):
        dequantise_nvfp4(codes, scales[:, :3])
    with pytest.raises(ValueError, match="disagree"):
        dequantise_nvfp4(codes[:3], scales)
    with pytest.raises(TypeError, match="expected"):
        dequantise_nvfp4(codes, scales.view(torch.uint8))


def test_dequantising_is_exact_in_every_dtype_for_every_code_and_scale() -> None:
    every = torch.arange(256, dtype=torch.int32).to(torch.uint8)
    scales = every.view(-1, 1)
    codes = torch.arange(16, dtype=torch.uint8)
    exact = decode_e2m1(codes).double() * scales.view(torch.float8_e4m3fn).double()
    packed = pack_e2m1(codes).repeat(256, 1)
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        values = dequantise_nvfp4(packed, scales.view(torch.float8_e4m3fn), dtype=dtype)
        assert torch.equal(values.double().nan_to_num(-1.0), exact.nan_to_num(-1.0))
        assert torch.equal(values.isnan(), (scales & 0x7F == 0x7F).expand(256, 16))
        zeros = values == 0
        assert torch.equal(values.signbit()[zeros], exact.signbit()[zeros])


def test_the_global_scale_multiplies_the_exact_product_in_fp32_before_the_one_rounding() -> None:
    codes = pack_e2m1(torch.full((16,), 5, dtype=torch.uint8))  # 3.0
    scales = torch.tensor([15.0]).to(torch.float8_e4m3fn)
    orders_differ = 0
    for number in randn(50).abs().tolist():
        global_scale = np.float32(number)
        want = np.float32(45) * global_scale
        orders_differ += want != np.float32(3) * (np.float32(15) * global_scale)
        assert dequantise_nvfp4(codes, scales, number)[0] == float(want)
        rounded = torch.tensor(float(want)).bfloat16()
        assert dequantise_nvfp4(codes, scales, number, torch.bfloat16)[0] == rounded
    assert orders_differ


@pytest.mark.parametrize("global_scale", [1.0, 0.37, 3e-5, 900.0])
def test_codes_of_a_group_that_reaches_six_are_a_fixed_point(global_scale: float) -> None:
    generator = torch.Generator().manual_seed(1)
    scales = torch.arange(1, 127, dtype=torch.int32).to(torch.uint8).repeat(20).view(-1, 1)
    codes = torch.randint(0, 16, (len(scales), 16), generator=generator).to(torch.uint8)
    codes[:, 9] = 7
    packed = pack_e2m1(codes)
    values = dequantise_nvfp4(packed, scales.view(torch.float8_e4m3fn), global_scale)
    exact = (
        [torch.float32, torch.bfloat16, torch.float16] if global_scale == 1.0 else [torch.float32]
    )
    for dtype in exact:
        again_codes, again_scales = quantise_nvfp4(values.to(dtype), global_scale)
        assert torch.equal(again_scales.view(torch.uint8), scales)
        assert torch.equal(again_codes, packed)


@pytest.mark.parametrize("magnitude", [1e-30, 1e-4, 1.0, 1e30])
def test_the_global_scale_of_a_tensor_puts_its_largest_group_scale_at_448(magnitude: float) -> None:
    x = randn(32, 64) * magnitude
    global_scale = nvfp4_global_scale(x)
    assert (global_scale.dtype, global_scale.shape) == (torch.float32, ())
    _, scales = quantise_nvfp4(x, global_scale, strict=True)
    assert float(scales.float().max()) == 448.0
    assert count_saturated_nvfp4(x, global_scale) == 0


def test_the_global_scale_of_zeros_or_nothing_is_one() -> None:
    assert nvfp4_global_scale(torch.zeros(2, 16)) == 1.0
    assert nvfp4_global_scale(torch.empty(0, 16)) == 1.0
    assert nvfp4_global_scale(torch.full((1, 16), 1e-40)) == MIN_GLOBAL_SCALE
    assert nvfp4_global_scale(torch.full((1, 16), 3.4e38)) <= MAX_GLOBAL_SCALE


def test_the_global_scale_of_what_is_not_finite_is_refused() -> None:
    with pytest.raises(ValueError, match=r"1 of 16 values are not finite \(1 inf, 0 NaN\)"):
        nvfp4_global_scale(torch.tensor([math.inf] + [0.0] * 15))


def test_clipped_values_are_counted() -> None:
    x = torch.ones(4, 16)
    x[0, :2] = 2784.0  # 6 * 464: the scale still rounds to 448
    x[1, :2] = 2784.001
    x[1, 2] = -2689.0
    x[1, 3] = 2688.0
    x[2, 0] = math.inf
    x[3, 0] = math.nan
    assert count_saturated_nvfp4(x) == 4
    assert count_saturated_nvfp4(x / 8, 0.125) == 4
    assert count_saturated_nvfp4(x, torch.full((4, 1), 4.0)) == 1
    values = dequantise_nvfp4(*quantise_nvfp4(x))
    assert float(values[1].abs().max()) == 2688.0


@pytest.mark.parametrize("magnitude", [0.1, 1.0, 100.0])
def test_the_error_on_normal_values_is_within_the_formats_tolerance(magnitude: float) -> None:
    x = randn(1024, 128) * magnitude
    values = dequantise_nvfp4(*quantise_nvfp4(x))
    assert torch.linalg.vector_norm(values - x) / torch.linalg.vector_norm(x) <= NVFP4.tolerance


def test_a_global_scale_rescues_values_too_small_for_the_group_scales() -> None:
    x = randn(256, 128) * 1e-4
    norm = torch.linalg.vector_norm(x)
    global_scale = nvfp4_global_scale(x)
    values = dequantise_nvfp4(*quantise_nvfp4(x, global_scale), global_scale)
    assert torch.linalg.vector_norm(values - x) / norm <= NVFP4.tolerance
    assert torch.linalg.vector_norm(dequantise_nvfp4(*quantise_nvfp4(x)) - x) / norm > 0.9


def test_the_codes_are_the_nearest_for_their_scale() -> None:
    x = randn(64, 16)
    codes, scales = quantise_nvfp4(x)
    assert torch.equal(unpack_e2m1(codes), encode_e2m1(x / scales.float()))


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_the_reference_gives_the_same_bits_on_a_gpu() -> None:
    bits = torch.randint(
        -(2**31), 2**31, (4096, 128), generator=torch.Generator().manual_seed(3)
    ).to(torch.int32)
    x = torch.cat((bits.view(torch.float32), randn(4096, 128)))
    for global_scale in (1.0, 0.37):
        codes, scales = quantise_nvfp4(x, global_scale)
        gpu_codes, gpu_scales = quantise_nvfp4(x.cuda(), global_scale)
        assert torch.equal(gpu_codes.cpu(), codes)
        assert torch.equal(gpu_scales.view(torch.uint8).cpu(), scales.view(torch.uint8))
        values = dequantise_nvfp4(codes, scales, global_scale)
        gpu_values = dequantise_nvfp4(gpu_codes, gpu_scales, global_scale).cpu()
        assert torch.equal(gpu_values.nan_to_num(1.0), values.nan_to_num(1.0))
        assert torch.equal(gpu_values.isnan(), values.isnan())

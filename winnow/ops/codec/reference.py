"""Group-scaled formats in plain PyTorch: what the other versions must equal bit for bit.

Arithmetic is fp32, each operation rounded once to nearest even; a kernel needs correctly rounded
divisions to agree. Knows nothing of pages or of models.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from winnow.ops.codec.elements import (
    E2M1_MAX,
    E4M3_CLIPS_ABOVE,
    E4M3_MAX,
    decode_e2m1,
    decode_e8m0,
    encode_e2m1,
    encode_e4m3,
    encode_e8m0,
    pack_e2m1,
    to_fp32,
    unpack_e2m1,
)
from winnow.spec.formats import MXFP8, NVFP4

MIN_GLOBAL_SCALE = 2.0**-117
"""With the smallest E4M3 scale, 2^-9, the product is still a normal fp32."""

MAX_GLOBAL_SCALE = 2.0**119
"""With the largest E4M3 scale, 448, the product is still finite."""


def quantise_nvfp4(
    x: Tensor, global_scale: float | Tensor = 1.0, *, strict: bool = False
) -> tuple[Tensor, Tensor]:
    """Quantise the last axis of `x` in groups of 16.

    x             fp32, bf16 or fp16 [..., K], any strides; K a multiple of 16
    global_scale  fp32, MIN_GLOBAL_SCALE to MAX_GLOBAL_SCALE; a tensor has no axes, or broadcasts
                  against x with a last axis of 1. A tensor's range is checked only when `strict`
                  (on a GPU the check would wait for it); out of range is otherwise undefined.
    strict        for weights: inf or NaN in x is an error. Without it, for caches, they are kept
                  visible or saturate, as below.

    Returns codes uint8 [..., K/2] (low nibble first) and scales float8_e4m3fn [..., K/16], with

        scale = E4M3(amax / 6 / global_scale)       amax: the group's largest magnitude
        code  = E2M1(x / (scale * global_scale))

    where E4M3 and E2M1 round to nearest even and saturate. A group whose rounded scale is 0
    (amax / 6 / global_scale at most 2^-10, so also an all-zero group) has codes 0. A group with
    inf has scale 448, inf as code +-6, and its finite values relative to that scale. A group with
    NaN has scale NaN (byte 0x7F) and codes 0: it dequantises to 16 NaN. No rows in, no rows out.

    Source: NVIDIA, "Pretraining Large Language Models with NVFP4" (arXiv 2509.25149), appendix.
    Raises ValueError for K, global_scale or (strict) values out of range, TypeError for dtypes.
    """
    groups = grouped(x, NVFP4.group)
    divisor = as_global_scale(global_scale, x, strict=strict)
    if strict:
        refuse_non_finite(x)
    scales = encode_e4m3(_ratio(groups, divisor)).squeeze(-1)
    step = scales.float().unsqueeze(-1) * divisor
    # False also for a step of NaN.
    codes = encode_e2m1(groups / step) * (step > 0)
    return pack_e2m1(codes.flatten(-2)), scales


def dequantise_nvfp4(
    codes: Tensor,
    scales: Tensor,
    global_scale: float | Tensor = 1.0,
    dtype: torch.dtype = torch.float32,
) -> Tensor:
    """The values of an NVFP4 tensor, [..., K] in `dtype` (fp32, bf16 or fp16).

    codes         uint8 [..., K/2], low nibble first
    scales        float8_e4m3fn [..., K/16], same leading axes
    global_scale  as for `quantise_nvfp4`; not checked

    value = dtype(fp32(code * scale) * global_scale): the first product has at most six significant
    bits and is exact, in bf16 and fp16 too; the second is rounded to fp32, then once to `dtype`.
    So with global_scale 1 the result is exact in every dtype. A NaN scale gives NaN.

    Raises ValueError where the shapes disagree, TypeError for dtypes.
    """
    check_parts(codes, torch.uint8, 2, scales, torch.float8_e4m3fn, NVFP4.group)
    groups = decode_e2m1(unpack_e2m1(codes)).reshape(*scales.shape, NVFP4.group)
    products = (groups * scales.float().unsqueeze(-1)).flatten(-2)
    return (products * fp32_like(global_scale, products)).to(dtype)


def nvfp4_global_scale(x: Tensor) -> Tensor:
    """The global scale that puts the largest group scale of `x` at 448: amax / (6 * 448), fp32 [].

    1.0 for a tensor of zeros or of no values, and never below MIN_GLOBAL_SCALE. ValueError for
    inf or NaN in x. `1 / result` is what some checkpoints store (docs/formats.md).
    """
    refuse_non_finite(x)
    if not x.numel():
        return torch.ones((), dtype=torch.float32, device=x.device)
    amax = to_fp32(x).abs().amax()
    scale = (amax / fp32_like(E2M1_MAX * E4M3_MAX, amax)).clamp(min=MIN_GLOBAL_SCALE)
    return scale.masked_fill(amax == 0, 1.0)


def count_saturated_nvfp4(x: Tensor, global_scale: float | Tensor = 1.0) -> int:
    """How many values of `x` are clipped because their group's scale would have to pass 448.

    They are the values beyond +-6 * 448 * global_scale in groups whose amax / 6 / global_scale
    rounds above 448; inf counts, a group with NaN does not. Arguments as for `quantise_nvfp4`.
    """
    groups = grouped(x, NVFP4.group)
    divisor = as_global_scale(global_scale, x)
    saturated = _ratio(groups, divisor) > E4M3_CLIPS_ABOVE
    beyond = groups.abs() / (E4M3_MAX * divisor) > E2M1_MAX
    return int((saturated & beyond).sum())


def quantise_mxfp8(x: Tensor, *, strict: bool = False) -> tuple[Tensor, Tensor]:
    """Quantise the last axis of `x` in groups of 32 with power-of-two scales.

    x       fp32, bf16 or fp16 [..., K], any strides; K a multiple of 32
    strict  inf or NaN in x is an error

    Returns codes float8_e4m3fn [..., K] and scales uint8 [..., K/32] (E8M0), with

        scale = the smallest power of two at or above amax / 448 (see `encode_e8m0`)
        code  = E4M3(x / scale)

    so no finite value saturates. An all-zero group has scale 2^-127 (byte 0) and keeps the signs
    of its zeros. A group with inf has scale 2^120 and inf as code +-448. A group with NaN has
    scale NaN (byte 255) and codes NaN (byte 0x7F). No rows in, no rows out.

    Source: OCP Microscaling Formats v1.0, section 6.3, but for the rounding of the scale.
    Raises ValueError for K or (strict) values out of range, TypeError for dtypes.
    """
    groups = grouped(x, MXFP8.group)
    if strict:
        refuse_non_finite(x)
    scales = encode_e8m0(groups.abs().amax(-1))
    codes = encode_e4m3(groups / decode_e8m0(scales).unsqueeze(-1))
    return codes.flatten(-2), scales


def dequantise_mxfp8(codes: Tensor, scales: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """The values of an MXFP8 tensor, [..., K] in `dtype` (fp32, bf16 or fp16).

    codes   float8_e4m3fn [..., K]
    scales  uint8 [..., K/32] (E8M0), same leading axes

    value = dtype(code * scale): the product is exact in fp32 unless it passes the largest fp32
    (then inf), and exact in bf16 too unless it is below 2^-126. NaN in either part gives NaN.

    Raises ValueError where the shapes disagree, TypeError for dtypes.
    """
    check_parts(codes, torch.float8_e4m3fn, 1, scales, torch.uint8, MXFP8.group)
    groups = codes.float().reshape(*scales.shape, MXFP8.group)
    return (groups * decode_e8m0(scales).unsqueeze(-1)).flatten(-2).to(dtype)


def quantise_fp8(x: Tensor, scale: float = 1.0) -> Tensor:
    """E4M3(x / scale) for the whole tensor: float8_e4m3fn of x's shape.

    x is fp32, bf16 or fp16; scale, rounded to fp32, is positive and finite (else ValueError).
    Saturates at +-448, inf included; NaN stays NaN (byte 0x7F).
    """
    return encode_e4m3(to_fp32(x) / fp32_like(positive(scale), x))


def dequantise_fp8(codes: Tensor, scale: float = 1.0, dtype: torch.dtype = torch.float32) -> Tensor:
    """dtype(code * scale) of float8_e4m3fn `codes`, any shape: one fp32 product, then one rounding.

    With scale 1 it is exact in every dtype. TypeError for codes of another dtype.
    """
    check_fp8(codes)
    values = codes.float()
    return (values * fp32_like(positive(scale), values)).to(dtype)


def count_saturated_fp8(x: Tensor, scale: float = 1.0) -> int:
    """How many values of `x` round beyond +-448 when divided by `scale`; inf does, NaN does not.

    Arguments as for `quantise_fp8`.
    """
    quotients = to_fp32(x) / fp32_like(positive(scale), x)
    return int((quotients.abs() > E4M3_CLIPS_ABOVE).sum())


def grouped(x: Tensor, group: int) -> Tensor:
    """`x` [..., K] as fp32 [..., K/group, group]; ValueError if K is not a multiple of `group`."""
    if not x.ndim or x.shape[-1] % group:
        raise ValueError(f"shape {list(x.shape)}: the last axis must be a multiple of {group}")
    return to_fp32(x).reshape(*x.shape[:-1], x.shape[-1] // group, group)


def as_global_scale(global_scale: float | Tensor, x: Tensor, *, strict: bool = False) -> Tensor:
    """`global_scale` as fp32 on x's device, shaped to broadcast against x's groups."""
    if isinstance(global_scale, Tensor):
        if global_scale.ndim and global_scale.shape[-1] != 1:
            raise ValueError(
                f"global_scale has shape {list(global_scale.shape)}: its last axis must be 1, "
                f"to broadcast against x {list(x.shape)}"
            )
        values = global_scale.to(device=x.device, dtype=torch.float32)
        if strict and not bool(((values >= MIN_GLOBAL_SCALE) & (values <= MAX_GLOBAL_SCALE)).all()):
            raise ValueError(_out_of_range(f"min {values.min()}, max {values.max()}"))
        return values.unsqueeze(-1) if values.ndim else values
    return fp32_like(check_global_scale(global_scale), x)


def check_global_scale(global_scale: float) -> float:
    """`global_scale`, or ValueError if it is out of range."""
    if not MIN_GLOBAL_SCALE <= global_scale <= MAX_GLOBAL_SCALE:
        raise ValueError(_out_of_range(str(global_scale)))
    return global_scale


def refuse_non_finite(x: Tensor) -> None:
    """ValueError that counts the inf and NaN of `x`, if it has any."""
    finite = x.isfinite()
    if not bool(finite.all()):
        bad, nan = x.numel() - int(finite.sum()), int(x.isnan().sum())
        raise ValueError(
            f"{bad} of {x.numel()} values are not finite ({bad - nan} inf, {nan} NaN): "
            "weights must be finite; check where the tensor comes from"
        )


def check_parts(
    codes: Tensor,
    code_dtype: torch.dtype,
    values_per_code: int,
    scales: Tensor,
    scale_dtype: torch.dtype,
    group: int,
) -> None:
    """Refuse codes and scales that are not the two parts of one tensor."""
    if codes.dtype != code_dtype or scales.dtype != scale_dtype:
        raise TypeError(
            f"codes are {codes.dtype} and scales {scales.dtype}: "
            f"expected {code_dtype} and {scale_dtype}"
        )
    if codes.shape[:-1] != scales.shape[:-1] or (
        codes.shape[-1] * values_per_code != scales.shape[-1] * group
    ):
        raise ValueError(
            f"codes {list(codes.shape)} and scales {list(scales.shape)} disagree: "
            f"one scale per {group // values_per_code} codes of the last axis"
        )


def check_fp8(codes: Tensor) -> None:
    """Refuse codes of another dtype, bytes included: what they mean is then unknown."""
    if codes.dtype != torch.float8_e4m3fn:
        raise TypeError(f"codes are {codes.dtype}: expected {torch.float8_e4m3fn}")


def positive(scale: float) -> float:
    """`scale`, or ValueError if it is not a positive finite number."""
    if not 0 < scale < math.inf:
        raise ValueError(f"scale is {scale}: it must be positive and finite")
    return scale


def fp32_like(number: float | Tensor, x: Tensor) -> Tensor:
    """`number` as an fp32 tensor on x's device.

    torch on CUDA divides by a Python number through its reciprocal, which rounds twice.
    """
    if isinstance(number, Tensor):
        return number.to(device=x.device, dtype=torch.float32)
    return torch.full((), number, dtype=torch.float32, device=x.device)


def _ratio(groups: Tensor, global_scale: Tensor) -> Tensor:
    """amax / 6 / global_scale, [..., K/16, 1]."""
    amax = groups.abs().amax(-1, keepdim=True)
    return amax / fp32_like(E2M1_MAX, amax) / global_scale


def _out_of_range(what: str) -> str:
    return f"global_scale is out of range ({what}): it must be in [2^-117, 2^119]"

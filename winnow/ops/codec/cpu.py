"""The same functions faster on a CPU, with the reference's bits. Defines nothing of its own.

Two things cost time here: a Python number among a torch call's arguments (about a microsecond, so
small tensors use numbers kept as tensors), and element-wise casts from float8 (several nanoseconds
a value, so values come from tables, two at a time).
"""

from __future__ import annotations

from functools import cache
from typing import NamedTuple

import torch
from torch import Tensor

from winnow.ops.codec import reference
from winnow.ops.codec.elements import (
    E2M1_MAX,
    E4M3_MAX,
    E8M0_NAN,
    decode_e2m1,
    decode_e8m0,
    encode_e2m1,
    to_fp32,
    unpack_e2m1,
)
from winnow.spec.formats import MXFP8, NVFP4


def quantise_nvfp4(
    x: Tensor, global_scale: float | Tensor = 1.0, *, strict: bool = False
) -> tuple[Tensor, Tensor]:
    """See the reference."""
    groups = reference.grouped(x, NVFP4.group)
    divisor = None
    if not _is_one(global_scale):
        divisor = reference.as_global_scale(global_scale, x, strict=strict)
    if strict:
        reference.refuse_non_finite(x)
    numbers = _numbers()
    ratio = groups.abs().amax(-1, keepdim=True).div_(numbers.e2m1_max)
    if divisor is not None:
        ratio = ratio / divisor
    scales = ratio.clamp_(max=numbers.e4m3_max).to(torch.float8_e4m3fn)
    # A NaN passes through the clamp; its sign, which differs between processors, must not.
    scales.view(torch.uint8).bitwise_and_(numbers.magnitude_bits)
    step = scales.float()
    if divisor is not None:
        step = step * divisor
    # Codes are 0 where the step is 0 or NaN.
    packed = _encode_packed(groups / step).mul_(step > numbers.zero)
    return packed.flatten(-2), scales.squeeze(-1)


def dequantise_nvfp4(
    codes: Tensor,
    scales: Tensor,
    global_scale: float | Tensor = 1.0,
    dtype: torch.dtype = torch.float32,
) -> Tensor:
    """See the reference."""
    reference.check_parts(codes, torch.uint8, 2, scales, torch.float8_e4m3fn, NVFP4.group)
    tables = _tables()
    values = _pairs(tables.e2m1_pairs, codes).view(*scales.shape, NVFP4.group)
    steps = tables.e4m3.index_select(0, _flat_indices(scales.view(torch.uint8)))
    values = values.mul_(steps.view(*scales.shape, 1)).flatten(-2)
    if not _is_one(global_scale):
        values = values * reference.fp32_like(global_scale, values)
    return values.to(dtype)


def count_saturated_nvfp4(x: Tensor, global_scale: float | Tensor = 1.0) -> int:
    """See the reference."""
    groups = reference.grouped(x, NVFP4.group)
    if not isinstance(global_scale, Tensor):
        largest = E2M1_MAX * E4M3_MAX * reference.check_global_scale(global_scale)
        if _all_below(groups, largest):
            return 0
    return reference.count_saturated_nvfp4(x, global_scale)


def quantise_mxfp8(x: Tensor, *, strict: bool = False) -> tuple[Tensor, Tensor]:
    """See the reference."""
    groups = reference.grouped(x, MXFP8.group)
    if strict:
        reference.refuse_non_finite(x)
    amax = groups.abs().amax(-1, keepdim=True)
    # The sum carries into the exponent exactly when the significand is above 1.75.
    exponents = (amax.view(torch.int32) + 0x1FFFFF) >> 23
    scales = (exponents - 8).clamp_(min=0).masked_fill_(amax.isnan(), E8M0_NAN).to(torch.uint8)
    return _encode_e4m3(groups / decode_e8m0(scales)).flatten(-2), scales.squeeze(-1)


def dequantise_mxfp8(codes: Tensor, scales: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """See the reference."""
    reference.check_parts(codes, torch.float8_e4m3fn, 1, scales, torch.uint8, MXFP8.group)
    values = _decode_e4m3(codes).view(*scales.shape, MXFP8.group)
    return values.mul_(decode_e8m0(scales).unsqueeze(-1)).flatten(-2).to(dtype)


def quantise_fp8(x: Tensor, scale: float = 1.0) -> Tensor:
    """See the reference."""
    return _encode_e4m3(to_fp32(x) / reference.fp32_like(reference.positive(scale), x))


def dequantise_fp8(codes: Tensor, scale: float = 1.0, dtype: torch.dtype = torch.float32) -> Tensor:
    """See the reference."""
    reference.check_fp8(codes)
    values = _decode_e4m3(codes)
    if not _is_one(scale):
        values.mul_(reference.fp32_like(reference.positive(scale), values))
    return values.to(dtype)


def count_saturated_fp8(x: Tensor, scale: float = 1.0) -> int:
    """See the reference."""
    if _all_below(to_fp32(x), E4M3_MAX * reference.positive(scale)):
        return 0
    return reference.count_saturated_fp8(x, scale)


class _Numbers(NamedTuple):
    e2m1_max: Tensor
    e4m3_max: Tensor
    zero: Tensor
    magnitude_bits: Tensor
    one: Tensor
    nibble: Tensor
    e2m1_bit: Tensor
    below_midpoint: Tensor
    e2m1_key_bit: Tensor
    e2m1_key_mask: Tensor


@cache
def _numbers() -> _Numbers:
    def integer(value: int, dtype: torch.dtype = torch.int32) -> Tensor:
        return torch.tensor(value, dtype=dtype)

    def real(value: float) -> Tensor:
        return torch.tensor(value, dtype=torch.float32)

    return _Numbers(
        e2m1_max=real(E2M1_MAX),
        e4m3_max=real(E4M3_MAX),
        zero=real(0.0),
        magnitude_bits=integer(0x7F, torch.uint8),
        one=integer(1),
        nibble=integer(4, torch.int16),
        e2m1_bit=integer(22),
        below_midpoint=integer(0x1FFFFF),
        e2m1_key_bit=integer(21),
        e2m1_key_mask=integer(0x7FF),
    )


@cache
def _e2m1_by_key() -> Tensor:
    """The E2M1 code of each key of `_encode_packed`, from one fp32 that has the key."""
    magnitudes = ((torch.arange(1024, dtype=torch.int32) << 21) - 0x100000).clamp(min=0)
    x = magnitudes.view(torch.float32)
    return encode_e2m1(torch.cat((x, -x)))


def _encode_packed(x: Tensor) -> Tensor:
    """pack_e2m1(encode_e2m1(x)) of fp32 [..., K] without NaN.

    A midpoint of two E2M1 values has at most two bits after the leading one. It rounds down where
    the first of them is 0 (0.25, 1.25, 2.5, 5) and up where it is 1 (0.75, 1.75, 3.5). So after
    adding to the bits of x that bit and one less than a unit of the second, the sign, the exponent
    and two bits decide the code: a key of 11 bits.
    """
    numbers = _numbers()
    bits = x.view(torch.int32)
    keys = bits.bitwise_right_shift(numbers.e2m1_bit).bitwise_and_(numbers.one)
    keys.add_(bits).add_(numbers.below_midpoint).bitwise_right_shift_(numbers.e2m1_key_bit)
    keys.bitwise_and_(numbers.e2m1_key_mask)
    # Two codes of a byte each are one little-endian number: even + 256 * odd.
    codes = _e2m1_by_key().index_select(0, keys.reshape(-1)).view(torch.int16)
    packed = codes.bitwise_right_shift(numbers.nibble).bitwise_or_(codes).to(torch.uint8)
    return packed.view(*x.shape[:-1], x.shape[-1] // 2)


class _Tables(NamedTuple):
    e4m3: Tensor
    """fp32 [256]: the value of each byte."""
    e2m1_pairs: Tensor
    """int64 [256]: the bits of the two fp32 values of each byte."""
    e4m3_pairs: Tensor
    """int64 [65536]: the bits of the two fp32 values of each two bytes."""
    e8m0: Tensor
    """fp32 [256]: the value of each byte."""


@cache
def _tables() -> _Tables:
    bytes_ = torch.arange(1 << 8, dtype=torch.int32).to(torch.uint8)
    two_bytes = torch.arange(1 << 16, dtype=torch.int32).to(torch.uint16)
    return _Tables(
        e4m3=bytes_.view(torch.float8_e4m3fn).float(),
        e2m1_pairs=decode_e2m1(unpack_e2m1(bytes_.unsqueeze(-1))).view(torch.int64).view(-1),
        e4m3_pairs=two_bytes.view(torch.float8_e4m3fn).float().view(torch.int64),
        e8m0=decode_e8m0(bytes_),
    )


def value_tables() -> tuple[Tensor, Tensor]:
    """What each byte stands for in E4M3 and in E8M0, for kernels: fp32 [256] each."""
    tables = _tables()
    return tables.e4m3, tables.e8m0


def _pairs(table: Tensor, codes: Tensor) -> Tensor:
    """The fp32 values of `codes`, two each, in one flat tensor."""
    return table.index_select(0, _flat_indices(codes)).view(torch.float32)


def _flat_indices(codes: Tensor) -> Tensor:
    return codes.to(torch.int32).reshape(-1)


def _decode_e4m3(codes: Tensor) -> Tensor:
    """A new tensor equal to `codes.float()`."""
    if codes.numel() % 2:
        return codes.float()
    two_bytes = codes.contiguous().view(-1).view(torch.uint16)
    return _pairs(_tables().e4m3_pairs, two_bytes).view(codes.shape)


def _encode_e4m3(x: Tensor) -> Tensor:
    """encode_e4m3 of a temporary fp32 tensor, which is overwritten."""
    # Replacing NaN by NaN removes its sign; inf becomes the largest fp32, then the clamp's limit.
    return x.nan_to_num_(nan=torch.nan).clamp_(-E4M3_MAX, E4M3_MAX).to(torch.float8_e4m3fn)


def _is_one(scale: float | Tensor) -> bool:
    return not isinstance(scale, Tensor) and scale == 1.0


def _all_below(x: Tensor, limit: float) -> bool:
    """Whether |x| is below `limit` throughout; False if there is a NaN."""
    return not x.numel() or float(x.abs().amax()) < limit

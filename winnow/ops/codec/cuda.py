"""The formats by the device functions that kernels on a GPU use, with the reference's bits.

Kernels convert tiles where they use them; these whole tensors exist to hold them to the definition,
bit for bit. Defines nothing of its own, and has no MXFP8 encoder: no kernel writes that format.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from winnow.ops.codec import reference
from winnow.ops.codec.elements import to_fp32
from winnow.ops.triton_codec import (
    decode_e4m3,
    decode_e8m0,
    pack_fp8,
    pack_nvfp4,
    round_to,
    unpack_nvfp4,
)
from winnow.spec.formats import FP8, MXFP8, NVFP4

_TILE = 64
"""Groups of a program."""


def quantise_nvfp4(
    x: Tensor, global_scale: float | Tensor = 1.0, *, strict: bool = False
) -> tuple[Tensor, Tensor]:
    """See the reference."""
    groups = reference.grouped(x, NVFP4.group)
    divisor = reference.as_global_scale(global_scale, x, strict=strict)
    if strict:
        reference.refuse_non_finite(x)
    codes = torch.empty(*groups.shape[:-1], NVFP4.group // 2, dtype=torch.uint8, device=x.device)
    scales = torch.empty(groups.shape[:-1], dtype=torch.uint8, device=x.device)
    _run(_quantise, groups, codes, scales, divisor, NVFP4.name, NVFP4.group)
    return codes.flatten(-2), scales.view(torch.float8_e4m3fn)


def dequantise_nvfp4(
    codes: Tensor,
    scales: Tensor,
    global_scale: float | Tensor = 1.0,
    dtype: torch.dtype = torch.float32,
) -> Tensor:
    """See the reference."""
    reference.check_parts(codes, torch.uint8, 2, scales, torch.float8_e4m3fn, NVFP4.group)
    factor = reference.fp32_like(global_scale, codes)
    values = torch.empty(*scales.shape, NVFP4.group, dtype=dtype, device=codes.device)
    factor = factor.unsqueeze(-1) if factor.ndim else factor
    _run(_dequantise, values, codes, scales.view(torch.uint8), factor, NVFP4.name, NVFP4.group)
    return values.flatten(-2)


def dequantise_mxfp8(codes: Tensor, scales: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """See the reference."""
    reference.check_parts(codes, torch.float8_e4m3fn, 1, scales, torch.uint8, MXFP8.group)
    values = torch.empty(*scales.shape, MXFP8.group, dtype=dtype, device=codes.device)
    one = reference.fp32_like(1.0, codes)
    _run(_dequantise, values, codes.view(torch.uint8), scales, one, MXFP8.name, MXFP8.group)
    return values.flatten(-2)


def quantise_fp8(x: Tensor, scale: float = 1.0) -> Tensor:
    """See the reference."""
    wide = to_fp32(x).unsqueeze(-1)
    codes = torch.empty(wide.shape, dtype=torch.uint8, device=x.device)
    divisor = reference.fp32_like(reference.positive(scale), x)
    _run(_quantise, wide, codes, None, divisor, FP8.name, 1)
    return codes.squeeze(-1).view(torch.float8_e4m3fn)


def dequantise_fp8(codes: Tensor, scale: float = 1.0, dtype: torch.dtype = torch.float32) -> Tensor:
    """See the reference."""
    reference.check_fp8(codes)
    values = torch.empty(*codes.shape, 1, dtype=dtype, device=codes.device)
    factor = reference.fp32_like(reference.positive(scale), codes)
    _run(_dequantise, values, codes.view(torch.uint8), None, factor, FP8.name, 1)
    return values.squeeze(-1)


def _run(
    kernel: triton.JITFunction[..., None],
    values: Tensor,
    codes: Tensor,
    scales: Tensor | None,
    factor: Tensor,
    format_name: str,
    group: int,
) -> None:
    """Launch over groups: `values` [..., group], and a factor a group."""
    count = values.numel() // group
    if not count:
        return
    factors = factor.expand(*values.shape[:-1], 1).contiguous()
    kernel[(triton.cdiv(count, _TILE),)](
        values.contiguous(), codes.contiguous(), None if scales is None else scales.contiguous(),
        factors, count, FORMAT=format_name, GROUP=group, TILE=_TILE,
    )  # fmt: skip


@triton.jit(do_not_specialize=["count"])
def _quantise(
    values, codes, scales, factors, count,
    FORMAT: tl.constexpr, GROUP: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0) * TILE + tl.arange(0, TILE)[:, None]
    real = row < count
    x = tl.load(values + row * GROUP + tl.arange(0, GROUP)[None, :], mask=real, other=0)
    factor = tl.load(factors + row, mask=real, other=1)
    if FORMAT == "nvfp4":
        packed, steps, _ = pack_nvfp4(x, factor)
        tl.store(codes + row * (GROUP // 2) + tl.arange(0, GROUP // 2)[None, :], packed, mask=real)
        tl.store(scales + row, steps, mask=real)
    else:
        stored, _ = pack_fp8(x, factor)
        tl.store(codes + row, stored, mask=real)


@triton.jit(do_not_specialize=["count"])
def _dequantise(
    values, codes, scales, factors, count,
    FORMAT: tl.constexpr, GROUP: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0) * TILE + tl.arange(0, TILE)[:, None]
    real = row < count
    factor = tl.load(factors + row, mask=real, other=1)
    dtype: tl.constexpr = values.dtype.element_ty
    if FORMAT == "nvfp4":
        pair = row * (GROUP // 2) + tl.arange(0, GROUP // 2)[None, :]
        packed = tl.load(codes + pair, mask=real, other=0)
        even, odd = unpack_nvfp4(packed, tl.load(scales + row, mask=real, other=0))
        tl.store(values + 2 * pair, round_to(even * factor, dtype), mask=real)
        tl.store(values + 2 * pair + 1, round_to(odd * factor, dtype), mask=real)
    else:
        place = row * GROUP + tl.arange(0, GROUP)[None, :]
        x = decode_e4m3(tl.load(codes + place, mask=real, other=0))
        if FORMAT == "mxfp8":
            factor = decode_e8m0(tl.load(scales + row, mask=real, other=0))
        tl.store(values + place, round_to(x * factor, dtype), mask=real)

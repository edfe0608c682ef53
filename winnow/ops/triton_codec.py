"""Number formats inside Triton kernels: device functions that give the bits of winnow.ops.codec.

Owns the arithmetic of single tiles: unpacking, packing, rounding, and the matrix product that goes
with them. Knows nothing of memory: callers load and store. Everything is bit moves, exact products
and correctly rounded divisions, since neither sm_80 nor Triton's interpreter has casts to or from
the 8-bit formats that can be relied upon, and the interpreter's cast to bf16 truncates.
"""

from __future__ import annotations

import triton
import triton.language as tl

INTERPRETED = tl.constexpr(triton.knobs.runtime.interpret)
"""Whether kernels run in Triton's interpreter, on CPU tensors (TRITON_INTERPRET=1)."""

GROUP = tl.constexpr(16)
"""Values under one scale in NVFP4; winnow.spec.formats has it for the host."""


@triton.jit
def round_to(x, dtype: tl.constexpr):
    """fp32 `x` rounded once, to nearest even, to `dtype` (fp32, bf16 or fp16); NaN stays NaN."""
    if INTERPRETED and dtype == tl.bfloat16:
        bits = x.to(tl.uint32, bitcast=True)
        rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
        narrow = tl.where(x == x, rounded, 0x7FC0).to(tl.uint16).to(tl.bfloat16, bitcast=True)
    else:
        narrow = x.to(dtype)
    return narrow


@triton.jit
def dot(a, b, accumulator):
    """accumulator + a @ b in fp32; fp32 operands keep their 24 bits (no TF32).

    `a` [M, K] and `b` [K, N] of one dtype, M, N, K >= 16. The interpreter multiplies the bits of
    bf16 numbers as if they were integers, so there they are widened first, which is exact.
    """
    if INTERPRETED:
        a = a.to(tl.float32)
        b = b.to(tl.float32)
    return tl.dot(a, b, accumulator, input_precision="ieee", out_dtype=tl.float32)


@triton.jit
def decode_e2m1(codes):
    """The fp32 values of codes 0..15 (any integer dtype, any shape).

    s ee m at bits 15 | 11 10 | 9 of an fp16 is value * 2^-14, subnormals included.
    """
    codes = codes.to(tl.int32)
    bits = ((codes & 7) << 9) | ((codes & 8) << 12)
    return bits.to(tl.uint16).to(tl.float16, bitcast=True).to(tl.float32) * 16384.0


@triton.jit
def decode_e4m3(codes):
    """The fp32 values of E4M3 bytes (uint8, any shape); NaN for 0x7F and 0xFF.

    s eeee mmm at bits 15 | 13..10 | 9..7 of an fp16 is value * 2^-8, subnormals included.
    """
    codes = codes.to(tl.int32)
    bits = ((codes & 0x7F) << 7) | ((codes & 0x80) << 8)
    values = bits.to(tl.uint16).to(tl.float16, bitcast=True).to(tl.float32) * 256.0
    return tl.where((codes & 0x7F) == 0x7F, float("nan"), values)


@triton.jit
def decode_e8m0(scales):
    """2^(s - 127) in fp32 of uint8 `scales`, any shape; NaN for 255."""
    scales = scales.to(tl.int32)
    bits = tl.where(scales == 0, 0x00400000, scales << 23)
    bits = tl.where(scales == 255, 0x7FC00000, bits)
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def encode_e2m1(x):
    """Codes 0..15 (int32) nearest to fp32 `x`, ties to even, saturating; the sign of 0 survives.

    A NaN gives some code: callers look for NaN first.
    """
    a = tl.abs(x)
    # One comparison per midpoint of neighbours; `>=` where the upper neighbour's code is even.
    code = (a > 0.25).to(tl.int32) + (a >= 0.75).to(tl.int32) + (a > 1.25).to(tl.int32)
    code += (a >= 1.75).to(tl.int32) + (a > 2.5).to(tl.int32)
    code += (a >= 3.5).to(tl.int32) + (a > 5.0).to(tl.int32)
    return code | ((x.to(tl.int32, bitcast=True) >> 28) & 8)


@triton.jit
def encode_e4m3(x):
    """E4M3 bytes (uint8) nearest to fp32 `x`, ties to even, saturating at 448; 0x7F for NaN."""
    a = tl.minimum(tl.abs(x), 448.0)
    bits = a.to(tl.int32, bitcast=True)
    normal = ((bits + 0x7FFFF + ((bits >> 20) & 1)) >> 20) - (120 << 3)
    # 2^14 has a step of 2^-9, the step of subnormals: the addition rounds to it.
    subnormal = (a + 16384.0).to(tl.int32, bitcast=True) - 0x46800000
    code = tl.where(a < 0.015625, subnormal, normal) | ((x.to(tl.int32, bitcast=True) >> 24) & 0x80)
    return tl.where(x == x, code, 0x7F).to(tl.uint8)


@triton.jit
def unpack_nvfp4(packed, scales):
    """Even and odd channels of NVFP4 values, without the tensor's own scale.

    `packed` uint8 [R, C], two codes a byte; `scales` uint8 [R, C / 8], E4M3. Returns two fp32
    [R, C]: channel 2c, from the low nibbles, and channel 2c + 1. The product of a code and a scale
    has at most six significant bits: exact here, and still exact when rounded to bf16 or fp16.
    """
    R: tl.constexpr = packed.shape[0]
    C: tl.constexpr = packed.shape[1]
    wide = tl.broadcast_to(decode_e4m3(scales)[:, :, None], (R, C // 8, 8)).reshape(R, C)
    return decode_e2m1(packed & 15) * wide, decode_e2m1(packed >> 4) * wide


@triton.jit
def pack_nvfp4(x, global_scale):
    """Quantise fp32 `x` [R, C] in groups of 16 as `winnow.ops.codec.quantise_nvfp4` does.

    `global_scale` is a number, or fp32 [R, 1]. Returns codes uint8 [R, C / 2], scales uint8
    [R, C / 16] (E4M3) and int32 [R, C]: 1 where a value was clipped, as `count_saturated_nvfp4`
    counts them.
    """
    R: tl.constexpr = x.shape[0]
    C: tl.constexpr = x.shape[1]
    groups = x.reshape(R, C // GROUP, GROUP)
    divisor = tl.zeros((R, C // GROUP), tl.float32) + global_scale
    # Maxima may ignore NaN, so NaN is looked for apart.
    has_nan = tl.max((groups != groups).to(tl.int32), 2)
    amax = tl.max(tl.where(groups == groups, tl.abs(groups), 0.0), 2)
    ratio = tl.div_rn(tl.div_rn(amax, 6.0), divisor)
    ratio = tl.where(has_nan > 0, float("nan"), ratio)
    scales = encode_e4m3(ratio)
    step = tl.broadcast_to((decode_e4m3(scales) * divisor)[:, :, None], groups.shape)
    codes = tl.where(step > 0, encode_e2m1(tl.div_rn(groups, step)), 0)
    low, high = tl.split(codes.reshape(R, C // 2, 2))
    most = tl.broadcast_to((448.0 * divisor)[:, :, None], groups.shape)
    beyond = tl.div_rn(tl.abs(groups), most) > 6.0
    clipped = ((ratio > 464.0)[:, :, None] & beyond).to(tl.int32)
    return (low | (high << 4)).to(tl.uint8), scales, clipped.reshape(R, C)


@triton.jit
def pack_fp8(x, scale):
    """E4M3(x / scale) of fp32 `x`: bytes uint8 and int32 1 where a value was clipped, x's shape.

    `scale` is a number, or broadcasts against x.
    """
    quotient = tl.div_rn(x, tl.zeros(x.shape, tl.float32) + scale)
    return encode_e4m3(quotient), (tl.abs(quotient) > 464.0).to(tl.int32)

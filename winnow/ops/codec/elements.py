"""Single elements: E2M1, E4M3 and E8M0 to and from fp32. Knows nothing of groups.

Sources: OCP Microscaling Formats v1.0 (E2M1, E8M0), OCP 8-bit Floating Point v1.0 (E4M3).
Every encoder rounds to nearest, ties to even, and saturates; it gives the same bits everywhere.
"""

from __future__ import annotations

import torch
from torch import Tensor

E2M1_VALUES = (
    0.0,
    0.5,
    1.0,
    1.5,
    2.0,
    3.0,
    4.0,
    6.0,
    -0.0,
    -0.5,
    -1.0,
    -1.5,
    -2.0,
    -3.0,
    -4.0,
    -6.0,
)
"""The value of each code; bit 3 is the sign, so code 8 is -0."""

E2M1_MAX = 6.0
E4M3_MAX = 448.0
E4M3_CLIPS_ABOVE = 464.0
"""Halfway to the 480 that E4M3 lacks: up to here, ties included, rounding alone gives 448."""

E4M3_NAN = 0x7F
E8M0_NAN = 0xFF
E8M0_BIAS = 127

SOURCE_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def to_fp32(x: Tensor) -> Tensor:
    """`x` in fp32, exactly; TypeError for a dtype that fp32 cannot hold exactly."""
    if x.dtype not in SOURCE_DTYPES:
        names = ", ".join(str(d).removeprefix("torch.") for d in SOURCE_DTYPES)
        raise TypeError(f"cannot encode {x.dtype}: convert it to one of {names} first")
    return x.float()


def decode_e2m1(codes: Tensor) -> Tensor:
    """The fp32 value of each code, any shape; IndexError for a code above 15."""
    return torch.tensor(E2M1_VALUES, dtype=torch.float32, device=codes.device)[codes.long()]


def encode_e2m1(x: Tensor) -> Tensor:
    """The uint8 code 0..15 nearest to each value of `x` (fp32, bf16 or fp16; any shape).

    Ties go to the even code; magnitudes above 6, inf included, become 6. The sign survives a
    result of 0 (code 8). E2M1 has no NaN: NaN of either sign becomes +6 (code 7), as in NVIDIA's
    cvt.rn.satfinite.e2m1x2.f32; callers that must not hide a NaN look for it first.
    """
    x = to_fp32(x)
    magnitude = x.abs()
    # One comparison per midpoint of neighbours; `>=` where the upper neighbour's code is even.
    code = (magnitude > 0.25).to(torch.uint8)
    code += magnitude >= 0.75
    code += magnitude > 1.25
    code += magnitude >= 1.75
    code += magnitude > 2.5
    code += magnitude >= 3.5
    code += magnitude > 5.0
    code += 8 * x.signbit().to(torch.uint8)
    return code.masked_fill(x.isnan(), 7)


def pack_e2m1(codes: Tensor) -> Tensor:
    """Codes 0..15, uint8 [..., K], two to a byte: uint8 [..., K/2].

    The even element is the low nibble. ValueError for an odd K.
    """
    if codes.shape[-1] % 2:
        raise ValueError(f"{codes.shape[-1]} codes do not fill whole bytes: pad the axis to even")
    return codes[..., 0::2] | (codes[..., 1::2] << 4)


def unpack_e2m1(packed: Tensor) -> Tensor:
    """The inverse of `pack_e2m1`: uint8 [..., K/2] to uint8 [..., K]."""
    return torch.stack((packed & 15, packed >> 4), dim=-1).flatten(-2)


def encode_e4m3(x: Tensor) -> Tensor:
    """The float8_e4m3fn nearest to each value of `x` (fp32, bf16 or fp16; any shape).

    Magnitudes above 448, inf included, become 448 of their sign; NaN of either sign becomes the
    byte 0x7F. Decode with `.float()`, which is exact.
    """
    x = to_fp32(x)
    # Clamped first: whether torch's own cast saturates depends on its version.
    return torch.where(x.isnan(), torch.nan, x.clamp(-E4M3_MAX, E4M3_MAX)).to(torch.float8_e4m3fn)


def decode_e8m0(scales: Tensor) -> Tensor:
    """2^(s - 127) in fp32 for each uint8 s, any shape; NaN for 255. 0 gives 2^-127, a subnormal."""
    return scales.view(torch.float8_e8m0fnu).float()


def encode_e8m0(amax: Tensor) -> Tensor:
    """The uint8 scale of an MXFP8 group whose largest magnitude is `amax` (fp32, >= 0; any shape).

    It is the smallest power of two at or above amax / 448, so nothing in the group saturates:
    the round-up rule of "Recipes for Pre-training LLMs with MXFP8" (arXiv 2506.08027). The OCP
    specification suggests 2^(floor(log2(amax)) - 8) instead, one step smaller when amax's
    significand lies above 1.75, where it clips the largest values by up to an eighth. Readers of
    the format need not know which rule wrote it.

    amax 0 and anything too small for the range give 0 (2^-127); inf counts as the largest fp32;
    NaN gives 255.
    """
    finite = amax.nan_to_num(nan=0.0)
    fraction, exponent = torch.frexp(finite)  # amax = fraction * 2^exponent, 1/2 <= fraction < 1
    # 448 = 7/8 * 2^9
    code = exponent - 9 + (fraction > 7 / 8).int() + E8M0_BIAS
    code = code.masked_fill(finite == 0, 0).clamp(min=0)
    return code.masked_fill(amax.isnan(), E8M0_NAN).to(torch.uint8)

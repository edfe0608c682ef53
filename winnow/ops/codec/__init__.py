"""Number formats: values to codes and scales, and back, bit for bit the same on every backend.

The contract is the reference's own docstrings, for the group-scaled formats and for single
elements; docs/formats.md has the byte layouts. A faster version returns the same bits, NaN and
signs of zero included: there is no tolerance.

Groups lie along the last axis. Inputs may have any strides.
"""

from winnow.ops.codec.elements import (
    decode_e2m1,
    decode_e8m0,
    encode_e2m1,
    encode_e4m3,
    encode_e8m0,
    pack_e2m1,
    unpack_e2m1,
)
from winnow.ops.codec.reference import (
    MAX_GLOBAL_SCALE,
    MIN_GLOBAL_SCALE,
    count_saturated_fp8,
    count_saturated_nvfp4,
    dequantise_fp8,
    dequantise_mxfp8,
    dequantise_nvfp4,
    nvfp4_global_scale,
    quantise_fp8,
    quantise_mxfp8,
    quantise_nvfp4,
)

__all__ = [
    "MAX_GLOBAL_SCALE",
    "MIN_GLOBAL_SCALE",
    "count_saturated_fp8",
    "count_saturated_nvfp4",
    "decode_e2m1",
    "decode_e8m0",
    "dequantise_fp8",
    "dequantise_mxfp8",
    "dequantise_nvfp4",
    "encode_e2m1",
    "encode_e4m3",
    "encode_e8m0",
    "nvfp4_global_scale",
    "pack_e2m1",
    "quantise_fp8",
    "quantise_mxfp8",
    "quantise_nvfp4",
    "unpack_e2m1",
]

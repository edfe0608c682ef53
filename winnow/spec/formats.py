"""Number formats: bytes for n values, group size, tolerance. Knows nothing of tensors.

Sources: OCP Microscaling Formats v1.0 (E2M1, E4M3, E8M0, MXFP8); NVFP4 is groups of 16 E2M1
values under one E4M3 scale and one fp32 scale per tensor.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Format:
    """How values are stored.

    `code_bits` per value; with `group` > 0, every `group` consecutive values along the last axis
    share one scale of one byte. `tolerance` is the relative L2 error that one quantisation of
    unit-normal values may show (0.0: exact for values of the format's own dtype).
    """

    name: str
    code_bits: int
    group: int
    tolerance: float

    def code_bytes(self, num_values: int) -> int:
        """Bytes of codes for `num_values` values; they must fill whole bytes."""
        bits = num_values * self.code_bits
        if bits % 8:
            raise ValueError(f"{num_values} values of {self.name} do not fill whole bytes")
        return bits // 8

    def scale_bytes(self, num_values: int) -> int:
        """Bytes of group scales for `num_values` values; they must fill whole groups."""
        if not self.group:
            return 0
        if num_values % self.group:
            raise ValueError(f"{num_values} values do not fill {self.name} groups of {self.group}")
        return num_values // self.group

    def nbytes(self, num_values: int) -> int:
        """Bytes of codes and scales together."""
        return self.code_bytes(num_values) + self.scale_bytes(num_values)


# Measured on 4096 x 128 unit-normal values: BF16 0.0017, FP8 and MXFP8 0.0265, NVFP4 0.0950; on any
# 16 x 128 of them at most 0.0284 and 0.1001. A single NVFP4 row of 128 may show 0.12.
FP32 = Format("fp32", 32, 0, 0.0)
BF16 = Format("bf16", 16, 0, 2.0**-9)
FP8 = Format("fp8", 8, 0, 2.0**-5)
MXFP8 = Format("mxfp8", 8, 32, 2.0**-5)
NVFP4 = Format("nvfp4", 4, 16, 0.105)

FORMATS = {f.name: f for f in (FP32, BF16, FP8, MXFP8, NVFP4)}

CACHE_FORMATS = ("model", "fp8", "nvfp4")
"""What a user may ask of the KV cache and of the index cache; `model` is the compute dtype."""


def cache_format(name: str, model_format: Format) -> Format:
    """The format behind a user's word; ValueError for a word that is not in CACHE_FORMATS."""
    if name not in CACHE_FORMATS:
        raise ValueError(f"unknown cache format {name!r}: use one of {', '.join(CACHE_FORMATS)}")
    return model_format if name == "model" else FORMATS[name]

"""Peaks of GPUs by name: what their makers and drivers state. Measures nothing, knows no model.

Memory is what the driver reports for one GPU (nvidia-smi, rocm-smi). Bandwidth and FLOP/s are the
datasheets', the latter dense, that is half of a figure given "with sparsity"; link bandwidth is
what one GPU can send to its neighbours, half of a figure that counts both directions.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from decimal import Decimal, InvalidOperation

from winnow.errors import UnsupportedError
from winnow.spec.formats import FP8, MXFP8, NVFP4, Format

_MIB = 1 << 20


@dataclass(frozen=True)
class Peaks:
    """Bytes per second of memory and link; FLOP per second of dense products by operand width.

    `native` are the formats that the tensor cores multiply as stored, group scales included;
    operands in any other format are widened to bf16 first, and fp32 counts as bf16.
    """

    bandwidth: float
    link_bandwidth: float
    bf16: float
    fp8: float
    fp4: float
    native: tuple[Format, ...]

    def weight_operand(self, weight_format: Format) -> str:
        """Width in which a product with such weights runs: fp4, fp8 or bf16."""
        if weight_format not in self.native:
            return "bf16"
        return "fp4" if weight_format.code_bits == 4 else "fp8"

    def cache_operand(self, cache_format: Format) -> str:
        """Width in which attention over such a cache runs: queries have at least 8 bits."""
        return "fp8" if cache_format in self.native else "bf16"

    def flops(self, operand: str) -> float:
        """FLOP per second of products in that width."""
        return {"bf16": self.bf16, "fp8": self.fp8, "fp4": self.fp4}[operand]


@dataclass(frozen=True)
class Gpu:
    """One GPU. `peaks` is None for one that the user named: nothing is known but its memory."""

    name: str
    memory_bytes: int
    peaks: Peaks | None


_HOPPER, _BLACKWELL = (FP8,), (FP8, MXFP8, NVFP4)
# CDNA4 multiplies OCP's MXFP4, whose scales are powers of two; those of NVFP4 are not.
_CDNA4 = (FP8, MXFP8)

_GPUS = (
    # H100 and H200 SXM datasheets; NVLink 900 GB/s in both directions.
    Gpu("h100", 81_559 * _MIB, Peaks(3.35e12, 450e9, 989e12, 1979e12, 0.0, _HOPPER)),
    Gpu("h200", 143_771 * _MIB, Peaks(4.8e12, 450e9, 989e12, 1979e12, 0.0, _HOPPER)),
    # HGX B200 and B300, an eighth of the board; NVLink 1.8 TB/s in both directions.
    Gpu("b200", 183_359 * _MIB, Peaks(8e12, 900e9, 2.25e15, 4.5e15, 9e15, _BLACKWELL)),
    Gpu("b300", 275_040 * _MIB, Peaks(8e12, 900e9, 2.25e15, 4.5e15, 13.5e15, _BLACKWELL)),
    # GB300 NVL72, a seventy-second of the rack.
    Gpu("gb300", 284_208 * _MIB, Peaks(8e12, 900e9, 2.5e15, 5e15, 15e15, _BLACKWELL)),
    # Instinct MI355X datasheet; seven links of 153.6 GB/s in both directions.
    Gpu("mi355x", 309_220_868_096, Peaks(8e12, 537.6e9, 2.5166e15, 5.0332e15, 10.0663e15, _CDNA4)),
)

GPUS = tuple(gpu.name for gpu in _GPUS)


def find_gpu(word: str) -> Gpu:
    """A known GPU by name, or `NAME=GB` for one with that many GB (1e9 bytes) of memory.

    A known name keeps its peaks, another has none. UnsupportedError for a name alone that is not
    known, and for a memory that is no positive number.
    """
    name, given, size = word.partition("=")
    known = {gpu.name: gpu for gpu in _GPUS}.get(name.lower())
    if not given:
        if known is not None:
            return known
        raise UnsupportedError(
            f"no GPU {word!r}: use one of {', '.join(GPUS)}, or NAME=GB for one with GB of memory"
        )
    try:
        gigabytes = Decimal(size)
        holds = bool(name) and 0 < gigabytes <= 10**9
    except InvalidOperation:
        # Not a number, or NaN, which has no order.
        holds = False
    if not holds:
        raise UnsupportedError(
            f"GPU {word!r} is not NAME=GB with GB above 0 and up to 1e9: write for example own=96"
        )
    memory_bytes = int(gigabytes * 10**9)
    if known is not None:
        return replace(known, memory_bytes=memory_bytes)
    return Gpu(name, memory_bytes, None)

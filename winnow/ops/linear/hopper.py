"""`linear` on Hopper over MXFP8 weights and bf16 rows: which kernel serves how many rows.

Owns the choice, the split of the work and the scratch memory. csrc/decode.cu and, from some rows
on, csrc/wide.cu multiply a few rows near the speed of memory; csrc/expand.cu writes a weight as
bf16 for torch's product of many.
`prepare` packs a weight once; a weight in the standard form is packed anew at every call, which is
meant for comparisons. Nothing is read back from the device and grids depend on shapes alone.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import torch
from torch import Tensor

from winnow.errors import UnsupportedError
from winnow.ops.cuda_build import library
from winnow.ops.fragments_mxfp8 import (
    PIECE,
    STRIP,
    TILE,
    PackedMxfp8Weight,
    pack,
    packable,
)
from winnow.ops.linear import Linear
from winnow.ops.weights import Mxfp8Weight, Weight

DECODE = Path(__file__).parent / "csrc" / "decode.cu"
WIDE = Path(__file__).parent / "csrc" / "wide.cu"
EXPAND = Path(__file__).parent / "csrc" / "expand.cu"

MAX_DECODE_ROWS = 64
"""Of one launch."""
FEW_ROWS = 128
"""Up to which launches of `MAX_DECODE_ROWS` are faster than expanding the weight."""

NARROW_ROWS = 8
"""Up to which csrc/decode.cu serves, and csrc/wide.cu beyond."""

_SHARED_BYTES = 227 << 10
_MAX_SLICES = 8
_NAN_SCALE, _NAN_CODE = 255, 0x7F

_P, _N, _I = ctypes.c_void_p, ctypes.c_int64, ctypes.c_int
_DECODE_SIGNATURES = {
    "winnow_linear_clusters": (_I, _I, _I, _I, _I),
    "winnow_linear_decode": (
        *(_P, _N, _I, _I),
        *(_P, _P, _P, _I),
        *(_P, _P, _P, _I),
        *(_P, _I, _I, _I, _I, _I, _P),
    ),
}
_WIDE_SIGNATURES = {
    "winnow_linear_wide_clusters": (_I, _I, _I),
    "winnow_linear_wide": (
        *(_P, _N, _I, _I),
        *(_P, _P, _P, _I),
        *(_P, _P, _P, _I),
        *(_P, _I, _I, _I, _I, _P),
    ),
}
_EXPAND_SIGNATURES = {"winnow_linear_expand": (_P, _P, _P, _N, _I, _P)}


@dataclass(frozen=True)
class Split:
    """How a launch divides its work: K in `slices` (CTAs of a cluster) and, in csrc/decode.cu,
    each slice in `parts` (warps). `columns` of activations are multiplied; `parts` of 0 means
    csrc/wide.cu."""

    columns: int
    slices: int
    parts: int

    @property
    def wide(self) -> bool:
        return self.parts == 0


@dataclass(frozen=True)
class _Variant:
    """A kernel: strips that are multiplied together, groups of strips that a CTA has under way
    at once (for decode.cu: its warps), pieces of K that a CTA (decode.cu: a warp) may have."""

    strips: int
    workers: int
    max_pieces: int


_NARROW = {
    8: _Variant(strips=1, workers=16, max_pieces=16),
    16: _Variant(strips=1, workers=16, max_pieces=16),
}
"""csrc/decode.cu, by columns."""
_WIDE = _Variant(strips=4, workers=2, max_pieces=24)
_WIDE_COLUMNS = (16, 32, 64)
_PART_PIECES = 6
"""Of a warp, about, where one row is multiplied; of a CTA, at least, where many are."""


def prepare(weight: Weight) -> Weight:
    """`weight` as the kernels read it: an MXFP8 matrix of whole strips is packed in place, so what
    was given may not be used any more; any other weight is returned as it is."""
    if not isinstance(weight, Mxfp8Weight) or not packable(*weight.codes.shape[-2:]):
        return weight
    codes, scales = weight.codes.view(torch.uint8), weight.scales
    # The decode kernel multiplies sums by 2^(s - 127), for which 255 would be infinity.
    groups = codes.view(*codes.shape[:-1], -1, TILE)
    groups.masked_fill_((scales == _NAN_SCALE).unsqueeze(-1), _NAN_CODE)
    return pack(codes, scales)


def takes(x: Tensor, weight: Weight) -> bool:
    """Whether these arguments are served here: bf16 rows, MXFP8 in whole strips."""
    shape = _packed_shape(weight)
    return x.dtype is torch.bfloat16 and shape is not None and len(shape) == 2


def linear(x: Tensor, weight: Weight) -> Tensor:
    """See `winnow.ops.linear.Linear`; every tensor on one CUDA device.

    Weights below 2^-118 may count as zero. UnsupportedError for what `takes` refuses.
    """
    if not takes(x, weight):
        raise UnsupportedError(
            f"these kernels multiply bf16 rows by MXFP8 weights of whole strips, not {x.dtype} by "
            f"{type(weight).__name__}: serve the model in bfloat16, or use --backend cuda"
        )
    packed, early = _packed(weight)
    return _product(x, (packed,), early)[0]


def pair(general: Linear) -> Callable[[Tensor, Weight, Weight], tuple[Tensor, Tensor]]:
    """A function of x and two weights that gives both products: in one launch where few rows meet
    two MXFP8 weights, by `general` one after another elsewhere."""

    def both(x: Tensor, first: Weight, second: Weight) -> tuple[Tensor, Tensor]:
        if not (takes(x, first) and takes(x, second)) or x.shape[0] > FEW_ROWS:
            return general(x, first), general(x, second)
        one, early = _packed(first)
        two, also_early = _packed(second)
        a, b = _product(x, (one, two), early and also_early)
        return a, b

    return both


def expand(weight: PackedMxfp8Weight) -> Tensor:
    """The values of a packed weight [N, K] in bf16."""
    rows, columns = weight.shape
    out = torch.empty(rows, columns, dtype=torch.bfloat16, device=weight.codes.device)
    error = _expander().winnow_linear_expand(
        weight.codes.data_ptr(), weight.scales.data_ptr(), out.data_ptr(), rows // STRIP,
        columns // PIECE, torch.cuda.current_stream(out.device).cuda_stream,
    )  # fmt: skip
    torch.cuda.check_error(error)
    return out


def split(rows: int, pieces: int) -> Split | None:
    """How few rows of `pieces` * 128 columns are divided; None where that does not fit."""
    if rows == 1:
        parts = 1 << max(0, (pieces // _PART_PIECES).bit_length() - 1)
        tried = [Split(8, slices, min(16, parts)) for slices in (1, 2, 4, 8)]
    elif rows <= NARROW_ROWS:
        tried = [Split(8, slices, parts) for parts in (1, 2) for slices in (8, 4, 2, 1)]
    else:
        columns = next(n for n in _WIDE_COLUMNS if n >= rows)
        # Slices of some pieces for each warpgroup; fewer only where no others fit.
        order = sorted((8, 4, 2, 1), key=lambda slices: pieces < _PART_PIECES * slices)
        tried = [Split(columns, slices, 0) for slices in order]
    return next((s for s in tried if fits(rows, pieces, s)), None)


def fits(rows: int, pieces: int, chosen: Split) -> bool:
    """Whether a launch can be divided so: every CTA and warp has work, and room for it."""
    if rows > chosen.columns or not 1 <= chosen.slices <= min(_MAX_SLICES, pieces):
        return False
    most = -(-pieces // chosen.slices)
    if chosen.wide:
        shared = chosen.columns * (2 * most * 128 + 4)
        return most <= _WIDE.max_pieces and shared <= _SHARED_BYTES
    variant, parts = _NARROW[chosen.columns], chosen.parts
    if parts > variant.workers or chosen.slices * parts > pieces:
        return False
    sums = 2 * variant.workers * variant.strips * chosen.columns * 64 if parts > 1 else 0
    shared = rows * (most * PIECE * 2 + 64) + parts * 4 * chosen.columns + sums
    return -(-most // parts) <= variant.max_pieces and shared <= _SHARED_BYTES


def _product(x: Tensor, weights: tuple[PackedMxfp8Weight, ...], early: bool) -> list[Tensor]:
    rows = x.shape[0]
    outs = [torch.empty(rows, w.shape[0], dtype=torch.bfloat16, device=x.device) for w in weights]
    pieces = x.shape[1] // PIECE
    x = _aligned(x)
    if rows > FEW_ROWS or split(min(rows, MAX_DECODE_ROWS), pieces) is None:
        for weight, out in zip(weights, outs, strict=True):
            torch.mm(x, expand(weight).T, out=out)
        return outs
    for start in range(0, rows, MAX_DECODE_ROWS):
        some = slice(start, start + MAX_DECODE_ROWS)
        _decode(x[some], weights, [out[some] for out in outs], early)
    return outs


def _decode(
    x: Tensor,
    weights: tuple[PackedMxfp8Weight, ...],
    outs: list[Tensor],
    early: bool,
    chosen: Split | None = None,
) -> None:
    rows, pieces = x.shape[0], x.shape[1] // PIECE
    chosen = chosen or split(rows, pieces)
    assert chosen is not None, f"{rows} rows of {pieces} pieces do not fit"
    variant = _WIDE if chosen.wide else _NARROW[chosen.columns]
    strips = [w.shape[0] // STRIP for w in weights]
    groups = sum(-(-n // variant.strips) for n in strips)
    at_once = variant.workers // max(1, chosen.parts)
    clusters = min(_clusters(x.device.index, rows, pieces, chosen), -(-groups // at_once))
    scratch = None
    if chosen.slices > 1:
        values = chosen.slices * groups * variant.strips * STRIP * chosen.columns
        scratch = torch.empty(values, dtype=torch.float32, device=x.device)
    matrices = [
        (w.codes.data_ptr(), w.scales.data_ptr(), out.data_ptr(), n)
        for w, out, n in zip(weights, outs, strips, strict=True)
    ]
    matrices += [(0, 0, 0, 0)] * (2 - len(matrices))
    shared = (
        *(x.data_ptr(), x.stride(0), rows, pieces, *matrices[0], *matrices[1]),
        None if scratch is None else scratch.data_ptr(),
    )
    stream = torch.cuda.current_stream(x.device).cuda_stream
    if chosen.wide:
        error = _wide().winnow_linear_wide(
            *shared, chosen.columns, chosen.slices, clusters, early, stream
        )
    else:
        error = _narrow().winnow_linear_decode(
            *shared, chosen.columns // 8, chosen.slices, chosen.parts, clusters, early, stream
        )
    torch.cuda.check_error(error)


@cache
def _narrow() -> ctypes.CDLL:
    return library(DECODE, _DECODE_SIGNATURES)


@cache
def _wide() -> ctypes.CDLL:
    return library(WIDE, _WIDE_SIGNATURES)


@cache
def _expander() -> ctypes.CDLL:
    return library(EXPAND, _EXPAND_SIGNATURES)


@cache
def _clusters(device: int, rows: int, pieces: int, chosen: Split) -> int:
    """Clusters that the device holds at once."""
    with torch.cuda.device(device):
        if chosen.wide:
            count: int = _wide().winnow_linear_wide_clusters(chosen.columns, pieces, chosen.slices)
        else:
            count = _narrow().winnow_linear_clusters(
                chosen.columns // 8, rows, pieces, chosen.slices, chosen.parts
            )
    torch.cuda.check_error(max(0, -count))
    assert count > 0, f"no cluster of {chosen} fits the device"
    return count


def _packed_shape(weight: Weight) -> tuple[int, ...] | None:
    """Logical shape of an MXFP8 weight that is packed or can be."""
    if isinstance(weight, PackedMxfp8Weight):
        return weight.shape
    if isinstance(weight, Mxfp8Weight) and packable(*weight.codes.shape[-2:]):
        return tuple(weight.codes.shape)
    return None


def _packed(weight: Weight) -> tuple[PackedMxfp8Weight, bool]:
    """The packed weight, and whether it was there before this call: a launch may then read it
    while the launch before it still runs."""
    if isinstance(weight, PackedMxfp8Weight):
        return weight, True
    assert isinstance(weight, Mxfp8Weight)
    packed = prepare(Mxfp8Weight(weight.codes.clone(), weight.scales.clone()))
    assert isinstance(packed, PackedMxfp8Weight)
    return packed, False


def _aligned(x: Tensor) -> Tensor:
    """`x`, or a copy of it, whose rows can be read 16 bytes at a time."""
    if x.stride(1) != 1 or x.stride(0) * x.element_size() % 16:
        x = x.contiguous()
    return x.clone() if x.data_ptr() % 16 else x

"""`linear` on Hopper over MXFP8 weights and bf16 rows: which kernel serves how many rows.

Owns the choice and the scratch memory; `division` divides the work. csrc/slices.cu multiplies a few
rows near the speed of memory, csrc/ranges.cu many; csrc/expand.cu writes a weight as bf16 for
torch's product of very many.
`prepare` packs a weight once; a weight in the standard form is packed anew at every call, which is
meant for comparisons. Nothing is read back from the device and grids depend on shapes alone.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from functools import cache
from pathlib import Path

import torch
from torch import Tensor

from winnow.errors import UnsupportedError
from winnow.ops.cuda_build import library
from winnow.ops.fragments_mxfp8 import (
    MAX_WOVEN_SCALE,
    PIECE,
    STRIP,
    TILE,
    PackedMxfp8Weight,
    pack,
    packable,
    weave,
)
from winnow.ops.linear import Linear
from winnow.ops.linear.division import ranged_columns, ranging, slicing
from winnow.ops.weights import Mxfp8Weight, Weight

SLICES = Path(__file__).parent / "csrc" / "slices.cu"
RANGES = Path(__file__).parent / "csrc" / "ranges.cu"
EXPAND = Path(__file__).parent / "csrc" / "expand.cu"

SLICED_ROWS = 64
"""Up to which csrc/slices.cu serves."""
MANY_ROWS = 1024
"""Up to which csrc/ranges.cu does. Beyond, expanding the weight costs little of the product."""
MAX_SCALE = MAX_WOVEN_SCALE
"""Largest scale byte that the kernels multiply by: weights below 2^48."""

_SLICED_COLUMNS = (8, 16, 32, 48, 64)
_MAX_SLICES = 4
_RANGED_STRIPS = 8
_NAN_SCALE, _NAN_CODE = 255, 0x7F
_STEP_ROWS = 1 << 10

_P, _N, _I = ctypes.c_void_p, ctypes.c_int64, ctypes.c_int


class _Matrix(ctypes.Structure):
    """`Matrix` of csrc/product.cuh."""

    _fields_ = [("codes", _P), ("scales", _P), ("out", _P), ("strips", _I), ("width", _I)]


class _Product(ctypes.Structure):
    """`Product` of csrc/calls.cuh."""

    _fields_ = [
        ("matrices", _Matrix * 2), ("x", _P), ("x_stride", _N), ("rows", _I), ("pieces", _I),
        ("woven", _I), ("early", _I), ("stream", _P),
    ]  # fmt: skip


_PRODUCT = ctypes.POINTER(_Product)
_SLICES_SIGNATURES = {
    "winnow_linear_slices_clusters": (_I, _I),
    "winnow_linear_slices": (_PRODUCT, _I, _I, _I, _I),
}
_RANGES_SIGNATURES = {
    "winnow_linear_ranges_pairs": (_I,),
    "winnow_linear_ranges": (_PRODUCT, _P, _I, _I, _I, _I, _I),
}
_EXPAND_SIGNATURES = {"winnow_linear_expand": (_P, _P, _I, _P, _N, _I, _P)}


def prepare(weight: Weight, *, woven: bool = False) -> Weight:
    """`weight` as the kernels read it: an MXFP8 matrix of whole strips is packed in place, so what
    was given may not be used any more; any other weight is returned as it is. A matrix, but no
    stack, may be woven besides: its products are faster, and only `linear` reads it.

    UnsupportedError for scales of 2^40 and more (bytes above `MAX_SCALE`, but for NaN).
    """
    if not isinstance(weight, Mxfp8Weight) or not packable(*weight.codes.shape[-2:]):
        return weight
    codes, scales = weight.codes.view(torch.uint8), weight.scales
    woven = woven and codes.dim() == 2
    if bool(((scales > MAX_SCALE) & (scales != _NAN_SCALE)).any()):
        raise UnsupportedError(
            f"these kernels multiply by scales up to 2^{MAX_SCALE - 127}, and a weight has larger "
            "ones: use backend (--backend) cuda"
        )
    # Kernels see NaN in a scale or in a code. Where one is, an output is NaN whatever the rest of
    # its group of columns is, so each is put into the other; woven codes beside it are 0.
    for some, their in zip(
        codes.view(-1, scales.shape[-1], TILE).split(_STEP_ROWS),
        scales.view(-1, scales.shape[-1]).split(_STEP_ROWS),
        strict=True,
    ):
        their.masked_fill_(((some & _NAN_CODE) == _NAN_CODE).any(-1), _NAN_SCALE)
        some.masked_fill_((their == _NAN_SCALE).unsqueeze(-1), 0 if woven else _NAN_CODE)
    packed = pack(codes, scales)
    packed = weave(packed) if woven else packed
    if codes.is_cuda:
        # A product reads packed weights before it is sure that the launch ahead of it has ended.
        torch.cuda.current_stream(codes.device).synchronize()
    return packed


def takes(x: Tensor, weight: Weight) -> bool:
    """Whether these arguments are served here: bf16 rows, MXFP8 in whole strips."""
    shape = _packed_shape(weight)
    return x.dtype is torch.bfloat16 and shape is not None and len(shape) == 2


def linear(x: Tensor, weight: Weight) -> Tensor:
    """See `winnow.ops.linear.Linear`; every tensor on one CUDA device.

    Weights below 2^-94 may lose bits, and count as zero below 2^-101. UnsupportedError for what
    `takes` refuses.
    """
    if not takes(x, weight):
        raise UnsupportedError(
            f"these kernels multiply bf16 rows by MXFP8 weights of whole strips, not {x.dtype} by "
            f"{type(weight).__name__}: serve the model in bfloat16, or use backend (--backend) cuda"
        )
    packed, early = _packed(weight)
    return _product(x, (packed,), early)[0]


def pair(general: Linear) -> Callable[[Tensor, Weight, Weight], tuple[Tensor, Tensor]]:
    """A function of x and two weights that gives both products: in one launch where no weight is
    expanded for them, by `general` one after another elsewhere."""

    def both(x: Tensor, first: Weight, second: Weight) -> tuple[Tensor, Tensor]:
        if not (takes(x, first) and takes(x, second)) or x.shape[0] > MANY_ROWS:
            return general(x, first), general(x, second)
        one, early = _packed(first)
        two, also_early = _packed(second)
        early = early and also_early
        if one.woven != two.woven:
            return _product(x, (one,), early)[0], _product(x, (two,), early)[0]
        a, b = _product(x, (one, two), early)
        return a, b

    return both


def expand(weight: PackedMxfp8Weight) -> Tensor:
    """The values of a packed weight [N, K] in bf16."""
    rows, columns = weight.shape
    out = torch.empty(rows, columns, dtype=torch.bfloat16, device=weight.codes.device)
    error = _expander().winnow_linear_expand(
        weight.codes.data_ptr(), weight.scales.data_ptr(), weight.woven, out.data_ptr(),
        rows // STRIP, columns // PIECE, torch.cuda.current_stream(out.device).cuda_stream,
    )  # fmt: skip
    torch.cuda.check_error(error)
    return out


def _product(x: Tensor, weights: tuple[PackedMxfp8Weight, ...], early: bool) -> list[Tensor]:
    rows = x.shape[0]
    outs = [torch.empty(rows, w.shape[0], dtype=torch.bfloat16, device=x.device) for w in weights]
    if not rows:
        return outs
    # The kernels see addresses alone.
    assert all(w.shape[1] == x.shape[1] for w in weights), "rows and weights differ in K"
    x = _aligned(x)
    if rows <= SLICED_ROWS:
        _sliced(x, weights, outs, early)
    elif rows <= MANY_ROWS:
        _ranged(x, weights, outs, early)
    else:
        for weight, out in zip(weights, outs, strict=True):
            torch.mm(x, expand(weight).T, out=out)
    return outs


def _sliced(
    x: Tensor, weights: tuple[PackedMxfp8Weight, ...], outs: list[Tensor], early: bool
) -> None:
    columns = next(n for n in _SLICED_COLUMNS if n >= x.shape[0])
    pieces = x.shape[1] // PIECE
    chosen = slicing(_strips(weights), pieces, _clusters(x.device.index, columns))
    error = _slicer().winnow_linear_slices(
        _described(x, weights, outs, early), columns, chosen.slices, chosen.tiles, chosen.clusters
    )
    torch.cuda.check_error(error)


def _ranged(
    x: Tensor, weights: tuple[PackedMxfp8Weight, ...], outs: list[Tensor], early: bool
) -> None:
    rows, pieces = x.shape[0], x.shape[1] // PIECE
    columns = ranged_columns(rows)
    strip_tiles = -(-_strips(weights) // _RANGED_STRIPS)
    division = ranging(
        strip_tiles * -(-rows // columns), pieces, _multiprocessors(x.device.index),
        _pairs(x.device.index, columns),
    )  # fmt: skip
    scratch = None
    if division.splits_tiles():
        values = division.shares * _RANGED_STRIPS * STRIP * columns + 2
        scratch = torch.empty(values, dtype=torch.float32, device=x.device)
    error = _ranger().winnow_linear_ranges(
        _described(x, weights, outs, early), None if scratch is None else scratch.data_ptr(),
        columns, strip_tiles, division.ctas, division.cut, division.held,
    )  # fmt: skip
    torch.cuda.check_error(error)


def _strips(weights: tuple[PackedMxfp8Weight, ...]) -> int:
    return sum(w.shape[0] // STRIP for w in weights)


def _described(
    x: Tensor, weights: tuple[PackedMxfp8Weight, ...], outs: list[Tensor], early: bool
) -> _Product:
    """What both kernels are given: rows, and up to two matrices with their results."""
    (woven,) = {w.woven for w in weights}
    matrices = (_Matrix * 2)(
        *(
            _Matrix(w.codes.data_ptr(), w.scales.data_ptr(), out.data_ptr(),
                    w.shape[0] // STRIP, w.shape[0])
            for w, out in zip(weights, outs, strict=True)
        )
    )  # fmt: skip
    return _Product(
        matrices, x.data_ptr(), x.stride(0), x.shape[0], x.shape[1] // PIECE, woven, early,
        torch.cuda.current_stream(x.device).cuda_stream,
    )  # fmt: skip


@cache
def _slicer() -> ctypes.CDLL:
    return library(SLICES, _SLICES_SIGNATURES)


@cache
def _ranger() -> ctypes.CDLL:
    return library(RANGES, _RANGES_SIGNATURES)


@cache
def _expander() -> ctypes.CDLL:
    return library(EXPAND, _EXPAND_SIGNATURES)


@cache
def _multiprocessors(device: int) -> int:
    count: int = torch.cuda.get_device_properties(device).multi_processor_count
    return count


@cache
def _clusters(device: int, columns: int) -> tuple[int, ...]:
    """Clusters of 1, 2, ... CTAs that the device holds at once."""
    with torch.cuda.device(device):
        counts = [
            _slicer().winnow_linear_slices_clusters(columns, slices)
            for slices in range(1, _MAX_SLICES + 1)
        ]
    for count in counts:
        torch.cuda.check_error(max(0, -count))
    return tuple(counts)


@cache
def _pairs(device: int, columns: int) -> int:
    """Clusters of two CTAs of csrc/ranges.cu that the device holds at once."""
    with torch.cuda.device(device):
        count: int = _ranger().winnow_linear_ranges_pairs(columns)
    torch.cuda.check_error(max(0, -count))
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
    packed = prepare(Mxfp8Weight(weight.codes.clone(), weight.scales.clone()), woven=True)
    assert isinstance(packed, PackedMxfp8Weight)
    return packed, False


def _aligned(x: Tensor) -> Tensor:
    """`x`, or a copy of it, whose rows can be read 16 bytes at a time."""
    if x.stride(1) != 1 or x.stride(0) < x.shape[1] or x.stride(0) * x.element_size() % 16:
        x = x.contiguous()
    return x.clone() if x.data_ptr() % 16 else x

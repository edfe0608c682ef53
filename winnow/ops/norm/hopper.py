"""`norm` and `add_norm` on Hopper for bf16 rows: one launch in CUDA C++ that overlaps others.

Owns what csrc/norm.cu takes. The weights are read before the launch ahead has ended, and the launch
that follows may begin, with what it reads of weights, while this one runs.
"""

from __future__ import annotations

import ctypes
from functools import cache
from pathlib import Path

import torch
from torch import Tensor

from winnow.errors import UnsupportedError
from winnow.ops.cuda_build import library

SOURCE = Path(__file__).parent / "csrc" / "norm.cu"
MAX_WIDTH = 8192
_VALUES = 8
"""Of a thread; widths are multiples of it."""

_P, _N, _I, _F = ctypes.c_void_p, ctypes.c_int64, ctypes.c_int, ctypes.c_float
_SIGNATURES = {"winnow_norm": (_P, _N, _P, _N, _P, _P, _P, _I, _I, _F, _P)}


@cache
def _library() -> ctypes.CDLL:
    return library(SOURCE, _SIGNATURES)


def takes(x: Tensor, weight: Tensor, eps: float) -> bool:
    """Whether `norm` serves these: bf16 rows of a multiple of 8 values, up to 8192."""
    width = x.shape[-1]
    return x.dtype is torch.bfloat16 and width % _VALUES == 0 and 0 < width <= MAX_WIDTH


def takes_sum(x: Tensor, delta: Tensor, weight: Tensor, eps: float) -> bool:
    """Whether `add_norm` serves these: what `takes` asks of x."""
    return takes(x, weight, eps)


def norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """See `winnow.ops.norm.Norm`. UnsupportedError for what `takes` refuses."""
    rows = _rows(x.reshape(-1, x.shape[-1]), weight, eps)
    out = torch.empty(rows.shape, dtype=x.dtype, device=x.device)
    _launch(rows, None, weight, None, out, eps)
    return out.view(x.shape)


def add_norm(x: Tensor, delta: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """See `winnow.ops.norm.AddNorm`. UnsupportedError for what `takes_sum` refuses."""
    x, delta = _rows(x, weight, eps), _rows(delta, weight, eps)
    total, out = (torch.empty(x.shape, dtype=x.dtype, device=x.device) for _ in range(2))
    _launch(x, delta, weight, total, out, eps)
    return total, out


def _launch(
    x: Tensor, delta: Tensor | None, weight: Tensor, total: Tensor | None, out: Tensor, eps: float
) -> None:
    rows, width = x.shape
    if not rows:
        return
    assert weight.dtype is torch.float32
    assert weight.is_contiguous()
    assert weight.data_ptr() % 16 == 0
    error = _library().winnow_norm(
        x.data_ptr(), x.stride(0),
        None if delta is None else delta.data_ptr(), 0 if delta is None else delta.stride(0),
        weight.data_ptr(), None if total is None else total.data_ptr(), out.data_ptr(),
        rows, width, eps, torch.cuda.current_stream(x.device).cuda_stream,
    )  # fmt: skip
    torch.cuda.check_error(error)


def _rows(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """`x` [rows, width], or a copy of it, whose rows can be read 16 bytes at a time."""
    if not takes(x, weight, eps):
        raise UnsupportedError(
            f"hopper's norm takes bf16 rows of a multiple of {_VALUES} values up to {MAX_WIDTH}, "
            f"not {x.shape[-1]} in {x.dtype}: use backend (--backend) cuda"
        )
    if x.stride(1) != 1 or x.stride(0) % _VALUES or x.data_ptr() % 16:
        return x.clone(memory_format=torch.contiguous_format)
    return x

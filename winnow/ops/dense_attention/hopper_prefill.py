"""`dense_attention` of prefill chunks on Hopper: twelve rows of a request walk its blocks.

In CUDA C++; serves bf16 queries of 128 dims, 16 query heads a KV head, over bf16, fp8 and NVFP4
caches. Lengths and tables are read on the device and the grid depends on shapes alone, so a CUDA
graph may hold a call.
"""

from __future__ import annotations

import ctypes
import math
from functools import cache
from pathlib import Path

import torch
from torch import Tensor

from winnow.errors import UnsupportedError
from winnow.ops.batch import Batch
from winnow.ops.cuda_build import library
from winnow.ops.paged import LayerPages
from winnow.spec.formats import BF16, FP8, NVFP4

SOURCE = Path(__file__).parents[1] / "sparse_attention" / "csrc" / "dense_prefill.cu"
"""Beside sparse prefill's, with which it shares how blocks are expanded and multiplied."""
HEAD_DIM = 128
GROUP = 16
"""Query heads of one KV head."""
TILE_ROWS = 12
MIN_ROWS_EACH = 16
"""Rows a request, on average, above which tiles are full enough; fewer leave splitting to gain."""
MIN_ROWS = 256
"""Below, there are fewer tiles than multiprocessors."""
FORMATS = {BF16: 0, FP8: 1, NVFP4: 2}
FAST = (NVFP4, FP8)
"""Formats in which it was measured to be faster than Triton's; in bf16 it was not."""

_P, _N, _I, _F = ctypes.c_void_p, ctypes.c_int64, ctypes.c_int, ctypes.c_float
_SIGNATURES: dict[str, tuple[type, ...]] = {
    "winnow_dense_prefill": (
        *(_P, _N, _N, _P, _P, _P, _P, _N, _I, _I, _I, _I),
        *(_P, _P, _P, _P, _N, _N, _F, _F, _P, _I, _P),
    )
}


def dense_attention(q: Tensor, batch: Batch, pages: LayerPages) -> Tensor:
    """See `winnow.ops.dense_attention.DenseAttention`; UnsupportedError for other than bf16
    queries of 128 dims and 16 heads a KV head over bf16, fp8 or NVFP4 pages."""
    refusal = _refusal(q, pages)
    if refusal is not None:
        raise UnsupportedError(refusal)
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    rows, requests = q.shape[0], batch.num_requests
    if not rows:
        return out
    if q.stride(2) != 1 or q.stride(1) % 8 or q.stride(0) % 8 or q.data_ptr() % 16:
        q = q.contiguous()
    key, value, tables = pages.key, pages.value, batch.block_tables.contiguous()
    key_scales = key.codes if key.scales is None else key.scales
    value_scales = value.codes if value.scales is None else value.scales
    size = key.codes.element_size()
    parts = (key.codes, key_scales, value.codes, value_scales)
    tiles = -(-rows // TILE_ROWS) + min(requests, rows)
    strides = [n * size for n in key.codes.stride()[:2]]
    assert all([n * t.element_size() for n in t.stride()[:2]] == strides for t in parts)
    assert all(t.data_ptr() % 16 == 0 for t in parts), "a part of a row is not aligned"
    error = _library().winnow_dense_prefill(
        q.data_ptr(), q.stride(0), q.stride(1), batch.positions.data_ptr(),
        batch.row_starts.data_ptr(), batch.kv_lens.data_ptr(), tables.data_ptr(), tables.shape[1],
        rows, requests, key.codes.shape[1], FORMATS[key.format],
        *(part.data_ptr() for part in parts), *strides,
        math.log2(math.e) * HEAD_DIM**-0.5 * key.global_scale, value.global_scale, out.data_ptr(),
        tiles, torch.cuda.current_stream(q.device).cuda_stream,
    )  # fmt: skip
    if error:
        raise RuntimeError(f"dense prefill did not launch: CUDA error {error}")
    return out


def takes(q: Tensor, batch: Batch, pages: LayerPages) -> bool:
    """Whether the kernel serves these arguments, and fast: many rows of few requests."""
    rows, requests = q.shape[0], batch.num_requests
    many = rows >= MIN_ROWS and rows > MIN_ROWS_EACH * requests
    return many and pages.key.format in FAST and _refusal(q, pages) is None


@cache
def _library() -> ctypes.CDLL:
    return library(SOURCE, _SIGNATURES)


def _refusal(q: Tensor, pages: LayerPages) -> str | None:
    """What the kernel does not take of these, in one sentence."""
    key, value = pages.key, pages.value
    if q.dtype is not torch.bfloat16 or key.format not in FORMATS or value.format != key.format:
        return (
            "hopper's dense prefill takes bf16 queries and a bf16, fp8 or nvfp4 cache, not "
            f"{q.dtype} and {key.format.name}: use backend (--backend) cuda"
        )
    group = q.shape[1] / key.codes.shape[1]
    if q.shape[2] != HEAD_DIM or group != GROUP:
        return (
            f"hopper's dense prefill takes {HEAD_DIM} dims a head and {GROUP} query heads a KV "
            f"head, not {q.shape[2]} and {group:g}: use backend (--backend) cuda"
        )
    return None

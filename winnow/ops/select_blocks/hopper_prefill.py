"""`select_blocks` on Hopper for many rows a request: checks what kernels take, and launches them.

Owns the limits, the scratch memory and how rows and blocks are divided; csrc/prefill.cu says how
scores and selections are found. Nothing is read back from the device and grids depend on shapes
alone. A few rows a request are better served by the decode kernels.
"""

from __future__ import annotations

import ctypes
from dataclasses import fields
from functools import cache
from pathlib import Path

import torch
from torch import Tensor

from winnow.errors import UnsupportedError
from winnow.ops.batch import Batch
from winnow.ops.cuda_build import library
from winnow.ops.paged import Paged
from winnow.spec.formats import BF16, FP8, NVFP4
from winnow.spec.model import BLOCK_TOKENS

SOURCE = Path(__file__).parent / "csrc" / "prefill.cu"

INDEX_DIM = 128
HEADS = (1, 2, 4, 8)
MAX_TOPK = 16
MIN_ROWS = 8
"""A request, on average, beyond which expanding all keys pays."""
MAX_IMAGES = 8192
"""Blocks of all requests that are expanded at once: 256 MiB."""
MAX_SCORES = 64 << 20
"""fp32 numbers of scratch: rows are scored so many at a time, if that is more."""

_FORMATS = {NVFP4: 0, FP8: 1, BF16: 2}
_TILE_COLUMNS = 256
_IMAGE_BYTES = BLOCK_TOKENS * INDEX_DIM * 2
_SCORE_ALIGNMENT = 128

_P, _N, _I = ctypes.c_void_p, ctypes.c_int64, ctypes.c_int
_SIGNATURES = {
    "winnow_select_prefill": (
        *(_P, _P, _N, _I),
        *(_P, _N, _N, _I),
        *(_P, _P, _P, _P, _P, _N, _I, _I, _I),
        *(_I, _I, _P, _P, _N, _P, _I, _I, _I, _P, _P),
    ),
}


@cache
def _library() -> ctypes.CDLL:
    return library(SOURCE, _SIGNATURES)


def select_blocks(index_q: Tensor, index: Paged, batch: Batch, topk: int) -> Tensor:
    """See `winnow.ops.select_blocks.SelectBlocks`; every tensor on one CUDA device.

    Index queries are bf16. The keys' global scale is left out: it is positive, so it changes no
    order. Scores are fp32 sums in another order than the reference's: where two blocks' scores
    differ by rounding alone, either may be selected. UnsupportedError for what the kernels do not
    take.
    """
    refusal = _refusal(index_q, index, batch, topk)
    if refusal is not None:
        raise UnsupportedError(refusal)
    _check(index, batch)
    rows, heads, _ = index_q.shape
    device, max_blocks = index_q.device, batch.block_tables.shape[1]
    ids = torch.empty(rows, heads, topk, dtype=torch.int32, device=device)
    if not rows:
        return ids
    index_q = _aligned(index_q)
    stride = -(-max_blocks // _SCORE_ALIGNMENT) * _SCORE_ALIGNMENT
    at_once = min(rows, max(_TILE_COLUMNS // heads, MAX_SCORES // (stride * heads)))
    images = torch.empty(
        batch.num_requests * max_blocks, _IMAGE_BYTES, dtype=torch.uint8, device=device
    )
    scores = torch.empty(at_once * heads, stride, dtype=torch.float32, device=device)
    processors = torch.cuda.get_device_properties(device).multi_processor_count
    scales = index.codes if index.scales is None else index.scales
    tiles = -(-at_once * heads // _TILE_COLUMNS) + batch.num_requests - 1
    plan = torch.empty(5 * tiles + 2 * (processors + 1), dtype=torch.int32, device=device)
    for first in range(0, rows, at_once):
        end = min(first + at_once, rows)
        error = _library().winnow_select_prefill(
            index.codes.data_ptr(), scales.data_ptr(), _page_bytes(index), _FORMATS[index.format],
            index_q.data_ptr(), index_q.stride(0), index_q.stride(1), heads,
            batch.positions.data_ptr(), batch.row_request.data_ptr(),
            batch.row_starts.data_ptr(), batch.kv_lens.data_ptr(),
            batch.block_tables.data_ptr(), batch.block_tables.stride(0),
            batch.num_requests, max_blocks, topk, first, end,
            images.data_ptr(), scores.data_ptr(), stride, plan.data_ptr(), tiles, processors,
            first > 0, ids.data_ptr(), torch.cuda.current_stream(device).cuda_stream,
        )  # fmt: skip
        torch.cuda.check_error(error)
    return ids


def takes(index_q: Tensor, index: Paged, batch: Batch, topk: int) -> bool:
    """Whether the kernels serve these arguments, and fast: many rows a request."""
    many = index_q.shape[0] > MIN_ROWS * batch.num_requests
    return many and _refusal(index_q, index, batch, topk) is None


def _refusal(index_q: Tensor, index: Paged, batch: Batch, topk: int) -> str | None:
    """What the kernels do not take of these, in one sentence."""
    heads, dim = index_q.shape[1:]
    if index_q.dtype is not torch.bfloat16:
        return f"the prefill indexer takes bf16 index queries, not {index_q.dtype}"
    if index.format not in _FORMATS:
        return f"the prefill indexer reads nvfp4, fp8 or bf16 index keys, not {index.format.name}"
    blocks = batch.num_requests * batch.block_tables.shape[1]
    for what, given, allowed in (
        ("an index dimension", dim, (INDEX_DIM,)),
        ("a number of index heads", heads, HEADS),
        ("a number of selected blocks", topk, range(1, MAX_TOPK + 1)),
        ("a number of blocks in all", blocks, range(MAX_IMAGES + 1)),
    ):
        if given not in allowed:
            limit = f"at most {allowed[-1]}" if isinstance(allowed, range) else f"one of {allowed}"
            return f"the prefill indexer takes {what} of {limit}, not {given}"
    return None


def _page_bytes(index: Paged) -> int:
    return index.codes.stride(0) * index.codes.element_size()


def _check(index: Paged, batch: Batch) -> None:
    """The kernels see addresses only: tokens one after another, 16-byte aligned, packed int64."""
    for part in (index.codes, index.scales):
        if part is None:
            continue
        size = part.element_size()
        if part.stride(2) != part.shape[3] or (part.data_ptr() | part.stride(0) * size) % 16:
            raise ValueError(f"index keys of strides {part.stride()} are not a page row's")
        if part.stride(0) * size != _page_bytes(index):
            raise ValueError("codes and scales of the index keys are not of one page row")
    for field in fields(batch):
        tensor = getattr(batch, field.name)
        packed = tensor.shape[-1] < 2 or tensor.stride(-1) == 1
        if tensor.dtype is not torch.int64 or not tensor.is_cuda or not packed:
            raise ValueError(
                f"batch.{field.name} is {tensor.dtype} on {tensor.device}, strides "
                f"{tensor.stride()}: the kernels read packed int64 on the GPU"
            )


def _aligned(index_q: Tensor) -> Tensor:
    """`index_q`, or a copy of it, whose pairs of numbers can be read as one."""
    row, head, one = index_q.stride()
    if one != 1 or (row | head) % 2:
        index_q = index_q.contiguous()
    return index_q.clone() if index_q.data_ptr() % 4 else index_q

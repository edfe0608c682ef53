"""`select_blocks` on Hopper: checks what the kernels take, and launches them.

Owns the limits and the scratch memory; csrc/decode.cu says how scores and selections are found.
Nothing is read back from the device, so a call can be captured in a CUDA graph: its grid depends
on shapes alone, lengths are read on the device. Built for a few rows a request; many are right
but slow.
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
from winnow.spec.formats import BF16

SOURCE = Path(__file__).parent / "csrc" / "decode.cu"

FORMATS = {"bf16": 1, "fp8": 2, "nvfp4": 3}
INDEX_DIM = 128
MAX_TOPK = 16
MAX_REQUESTS = 2048
MAX_ROWS = 8
"""A request, on average, for which the kernels are made."""
MAX_BLOCKS = 16384
"""Columns of the block table: sequences of up to 2,097,152 tokens."""

_P, _N, _I = ctypes.c_void_p, ctypes.c_int64, ctypes.c_int
_SIGNATURES = {
    "winnow_select_decode_stride": (_I, _I),
    "winnow_select_decode": (
        *(_P, _P, _N, _I),
        *(_P, _N, _N, _I, _I, _I, _I),
        *(_P, _P, _P, _P, _P, _N, _I),
        *(_I, _I, _P, _I, _P, _I, _P),
    ),
}


@cache
def _library() -> ctypes.CDLL:
    return library(SOURCE, _SIGNATURES)


def select_blocks(index_q: Tensor, index: Paged, batch: Batch, topk: int) -> Tensor:
    """See `winnow.ops.select_blocks.SelectBlocks`; every tensor on one CUDA device.

    Index keys are NVFP4, fp8 or bf16, index queries bf16 or, but for bf16 keys, fp32. The keys'
    global scale is left out: it is positive, so it changes no order. Scores are fp32 sums in
    another order than the reference's, the same however many rows a request has: where two
    blocks' scores differ by rounding alone, either may be selected. UnsupportedError for what the
    kernels do not take.
    """
    rows, heads = index_q.shape[:2]
    max_blocks = batch.block_tables.shape[1]
    refusal = _refusal(index_q, index, topk, batch.num_requests, max_blocks)
    if refusal is not None:
        raise UnsupportedError(refusal)
    _check_keys(index)
    _check_batch(batch)
    ids = torch.empty(rows, heads, topk, dtype=torch.int32, device=index_q.device)
    if not rows:
        return ids
    index_q = _aligned(index_q)
    processors = torch.cuda.get_device_properties(index_q.device).multi_processor_count
    stride = _library().winnow_select_decode_stride(max_blocks, processors)
    scores = torch.empty(rows * heads, stride, dtype=torch.float32, device=index_q.device)
    wide = index_q.dtype is torch.float32
    error = _library().winnow_select_decode(
        index.codes.data_ptr(), None if index.scales is None else index.scales.data_ptr(),
        index.codes.stride(0) * index.codes.itemsize, FORMATS[index.format.name],
        index_q.data_ptr(), index_q.stride(0), index_q.stride(1), rows, heads, wide,
        _tiles(rows / batch.num_requests * heads, wide),
        batch.positions.data_ptr(), batch.row_request.data_ptr(), batch.row_starts.data_ptr(),
        batch.kv_lens.data_ptr(), batch.block_tables.data_ptr(), batch.block_tables.stride(0),
        batch.num_requests, max_blocks, topk, scores.data_ptr(), stride, ids.data_ptr(), processors,
        torch.cuda.current_stream(index_q.device).cuda_stream,
    )  # fmt: skip
    torch.cuda.check_error(error)
    return ids


def takes(index_q: Tensor, index: Paged, batch: Batch, topk: int) -> bool:
    """Whether the kernels serve these arguments, and fast: decode."""
    limits = (index_q, index, topk, batch.num_requests, batch.block_tables.shape[1])
    return index_q.shape[0] <= MAX_ROWS * batch.num_requests and _refusal(*limits) is None


def _check_keys(index: Paged) -> None:
    """The kernel's copies take tokens one after another, 16-byte aligned."""
    parts = [index.codes] if index.scales is None else [index.codes, index.scales]
    for part in parts:
        row_bytes = part.stride(0) * part.itemsize
        if part.stride(2) != part.shape[3] or (part.data_ptr() | row_bytes) % 16:
            raise ValueError(f"index keys of strides {part.stride()} are not a page row's")
    if len({part.stride(0) for part in parts}) > 1:
        raise ValueError("codes and scales of the index keys are not of one page row")


def _aligned(index_q: Tensor) -> Tensor:
    """`index_q`, or a copy of it, whose heads can be read 16 bytes at a time."""
    row, head, one = index_q.stride()
    if one != 1 or (row * index_q.element_size() | head * index_q.element_size()) % 16:
        index_q = index_q.contiguous()
    return index_q.clone() if index_q.data_ptr() % 16 else index_q


def _check_batch(batch: Batch) -> None:
    for field in fields(batch):
        tensor = getattr(batch, field.name)
        packed = tensor.shape[-1] < 2 or tensor.stride(-1) == 1
        if tensor.dtype is not torch.int64 or not tensor.is_cuda or not packed:
            raise ValueError(
                f"batch.{field.name} is {tensor.dtype} on {tensor.device}, strides "
                f"{tensor.stride()}: the kernels read packed int64 on the GPU"
            )


def _refusal(
    index_q: Tensor, index: Paged, topk: int, num_requests: int, max_blocks: int
) -> str | None:
    """What the kernels do not take of these, in one sentence."""
    _, heads, dim = index_q.shape
    if index.format.name not in FORMATS:
        return (
            f"the hopper backend reads index keys in {', '.join(FORMATS)}, this cache holds "
            f"{index.format.name}: start with index_format (--index-format) nvfp4"
        )
    narrow = index.format is BF16
    if index_q.dtype not in ((torch.bfloat16,) if narrow else (torch.bfloat16, torch.float32)):
        return (
            f"the hopper backend takes bf16 or fp32 index queries, and bf16 over bf16 keys, not "
            f"{index_q.dtype} over {index.format.name}: serve the model in bfloat16"
        )
    for what, given, allowed in (
        ("an index dimension", dim, (INDEX_DIM,)),
        ("a number of index heads", heads, (1, 2, 4, 8)),
        ("a number of selected blocks", topk, range(1, MAX_TOPK + 1)),
        ("a number of requests in a step", num_requests, range(MAX_REQUESTS + 1)),
        ("a number of blocks a sequence", max_blocks, range(MAX_BLOCKS + 1)),
    ):
        if given not in allowed:
            limit = f"at most {allowed[-1]}" if isinstance(allowed, range) else f"one of {allowed}"
            return (
                f"the hopper backend's indexer takes {what} of {limit}, not {given}: "
                "use backend (--backend) cuda, or change it"
            )
    return None


def _tiles(columns: float, wide: bool) -> int:
    """Groups of 8 query columns that one pass over the keys serves: most in use, none for rows
    that a usual request has not. Registers allow four, or two where a query takes two numbers."""
    tiles = 1 if columns <= 8 else 2 if columns <= 16 else 4
    return min(tiles, 2) if wide else tiles

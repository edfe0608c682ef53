"""`sparse_attention` of prefill chunks on Hopper: blocks outside, the rows that chose them inside.

Serves bf16 queries of 128 dims, 16 query heads a KV head, over bf16, fp8 and NVFP4 caches. Owns how
a call is cut into groups of KV heads and chunks of rows so that scratch stays bounded. Lengths,
tables and selections are read on the device and grids depend on shapes alone, so a CUDA graph may
hold a call.
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from itertools import pairwise
from pathlib import Path

import torch
from torch import Tensor

from winnow.errors import UnsupportedError
from winnow.ops.batch import Batch
from winnow.ops.cuda_build import library
from winnow.ops.paged import LayerPages
from winnow.spec.formats import BF16, FP8, NVFP4

ATTEND = Path(__file__).parent / "csrc" / "prefill.cu"
LISTS = Path(__file__).parent / "csrc" / "prefill_lists.cu"
HEAD_DIM = 128
GROUP = 16
"""Query heads of one KV head: four rows of them are the 64 of the tensor cores' instruction."""
MAX_TOPK = 32
TILE = 4
"""Pairs of a tile."""
MIN_ROWS_EACH = 8
"""Rows a request, on average, above which rows share blocks often enough."""
MIN_ROWS = 64
"""Below, lists and the merge cost more than shared blocks bring."""
SCRATCH_BYTES = 1 << 30
"""Most that partial results may take at a time; 8,192 rows of two KV heads at 16 blocks."""
MAX_BINS = 1 << 24
"""(KV head, request, block)s of a call: three int32 each."""
FORMATS = {BF16: 0, FP8: 1, NVFP4: 2}

_P, _N, _I, _F = ctypes.c_void_p, ctypes.c_int64, ctypes.c_int, ctypes.c_float


class _Lists(ctypes.Structure):
    """Mirrors `Lists` of prefill_lists.cu."""

    _fields_ = (
        *((name, _P) for name in ("ids", "positions", "row_request", "kv_lens")),
        ("table_width", _N),
        *(
            (name, ctypes.c_int32)
            for name in (
                *("rows", "requests", "kv_heads", "topk", "group_heads", "max_tiles", "ctas"),
            )
        ),
        *(
            (name, _P)
            for name in ("counts", "first_tile", "ranks", "entries", "tile_bins", "shares")
        ),
    )


_LISTS: dict[str, tuple[type, ...]] = {
    "winnow_prefill_lists": (_P, _P),
    "winnow_prefill_combine": (_P, _I, _P, _P, _I, _F, _P, _P),
}
_ATTEND: dict[str, tuple[type, ...]] = {
    "winnow_prefill_attend": (
        *(_P, _P, _P, _P, _P, _N, _I, _I, _I, _I),
        *(_P, _N, _N, _N, _I, _I, _I, _P, _P, _P, _P, _N, _N, _F, _P, _P, _I, _P),
    )
}


def sparse_attention(q: Tensor, ids: Tensor, batch: Batch, pages: LayerPages) -> Tensor:
    """See `winnow.ops.sparse_attention.SparseAttention`; UnsupportedError for other than bf16
    queries of 128 dims and 16 heads a KV head over bf16, fp8 or NVFP4 pages."""
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    for chunk in chunks(q, ids, batch, pages, out):
        chunk.list_rows()
        for group in range(chunk.groups):
            chunk.attend(group)
            chunk.combine(group)
    return out


def takes(q: Tensor, ids: Tensor, batch: Batch, pages: LayerPages) -> bool:
    """Whether the kernels serve these arguments, and faster than one program a row."""
    rows, requests = q.shape[0], batch.num_requests
    many = rows >= MIN_ROWS and rows > MIN_ROWS_EACH * requests
    return many and _refusal(q, ids, batch, pages) is None


def group_heads_for(rows: int, kv_heads: int, topk: int) -> int:
    """KV heads whose partial results fit the scratch together; 1 even if one does not."""
    one = rows * topk * GROUP * HEAD_DIM * 2
    fitting = (n for n in range(kv_heads, 1, -1) if kv_heads % n == 0 and n * one <= SCRATCH_BYTES)
    return next(fitting, 1)


def row_chunks(rows: int, topk: int) -> list[tuple[int, int]]:
    """First row and number of rows of chunks as equal as may be, so that one KV head's partial
    results fit the scratch."""
    most = max(TILE, SCRATCH_BYTES // (topk * GROUP * HEAD_DIM * 2))
    count = -(-rows // most)
    edges = [rows * i // count for i in range(count + 1)] if rows else [0]
    return [(a, b - a) for a, b in pairwise(edges)]


@dataclass(frozen=True)
class Chunk:
    """Some rows of a call and their scratch; its launches are asked for in order.

    `first_tile`, `counts` int32 [kv_heads, requests, spans]; `ranks` int32 like ids; `entries`
    int32 [groups, max tiles, 4]; `tile_bins` int32 [groups, max tiles]; `shares` int32 [groups,
    multiprocessors + 1]; `partial` 16-bit [group heads, rows, topk, 16, 128]; `logs` fp32 without
    the dims.
    """

    q: Tensor
    ids: Tensor
    batch: Batch
    pages: LayerPages
    out: Tensor
    first_row: int
    group_heads: int
    counts: Tensor
    first_tile: Tensor
    ranks: Tensor
    entries: Tensor
    tile_bins: Tensor
    shares: Tensor
    partial: Tensor
    logs: Tensor

    @property
    def groups(self) -> int:
        return int(self.ids.shape[1]) // self.group_heads

    @property
    def rows(self) -> int:
        return int(self.ids.shape[0])

    def list_rows(self) -> None:
        """Which rows selected each block, in tiles."""
        lists = self._lists()
        error = _list_library().winnow_prefill_lists(ctypes.byref(lists), self._stream())
        _raise(error)

    def attend(self, group: int) -> None:
        """The group's rows against each of their blocks, to `partial` and `logs`."""
        key, value, tables = self.pages.key, self.pages.value, self.batch.block_tables
        key_scales = key.codes if key.scales is None else key.scales
        value_scales = value.codes if value.scales is None else value.scales
        size = key.codes.element_size()
        error = _attend_library().winnow_prefill_attend(
            self.entries[group].data_ptr(), self.tile_bins[group].data_ptr(),
            self.shares[group].data_ptr(), self.batch.kv_lens.data_ptr(), tables.data_ptr(),
            tables.shape[1], self.batch.num_requests, self.rows, self.ids.shape[2],
            group * self.group_heads, self.q.data_ptr(), self.q.stride(0), self.q.stride(1),
            self.q.shape[0], self.q.shape[1], self.first_row, FORMATS[key.format],
            key.codes.data_ptr(), key_scales.data_ptr(), value.codes.data_ptr(),
            value_scales.data_ptr(), key.codes.stride(0) * size, key.codes.stride(1) * size,
            math.log2(math.e) * HEAD_DIM**-0.5 * key.global_scale, self.partial.data_ptr(),
            self.logs.data_ptr(), self.shares.shape[1] - 1, self._stream(),
        )  # fmt: skip
        _raise(error)

    def combine(self, group: int) -> None:
        """`partial` and `logs` to the group's heads of `out`."""
        lists, value = self._lists(), self.pages.value
        error = _list_library().winnow_prefill_combine(
            ctypes.byref(lists), group, self.partial.data_ptr(), self.logs.data_ptr(),
            value.format is not BF16, value.global_scale, self.out[self.first_row :].data_ptr(),
            self._stream(),
        )  # fmt: skip
        _raise(error)

    def _stream(self) -> int:
        return int(torch.cuda.current_stream(self.q.device).cuda_stream)

    def _lists(self) -> _Lists:
        rows, kv_heads, topk = self.ids.shape
        first, batch = self.first_row, self.batch
        return _Lists(
            self.ids.data_ptr(), batch.positions[first:].data_ptr(),
            batch.row_request[first:].data_ptr(), batch.kv_lens.data_ptr(),
            batch.block_tables.shape[1], rows, batch.num_requests, kv_heads, topk,
            self.group_heads, self.tile_bins.shape[1], self.shares.shape[1] - 1,
            self.counts.data_ptr(), self.first_tile.data_ptr(), self.ranks.data_ptr(),
            self.entries.data_ptr(), self.tile_bins.data_ptr(), self.shares.data_ptr(),
        )  # fmt: skip


def chunks(q: Tensor, ids: Tensor, batch: Batch, pages: LayerPages, out: Tensor) -> Iterator[Chunk]:
    """The parts of a call in order; `out` [rows, heads, 128], contiguous, bf16. They share their
    scratch, so each must be done with on its stream before the next begins."""
    _check(q, ids, batch, pages)
    rows, kv_heads, topk = ids.shape
    if q.stride(2) != 1 or q.stride(1) % 8 or q.stride(0) % 8 or q.data_ptr() % 16:
        q = q.contiguous()
    ids, device = ids.contiguous(), q.device
    batch = Batch(
        batch.positions, batch.row_request, batch.row_starts, batch.kv_lens,
        batch.block_tables.contiguous(),
    )  # fmt: skip
    parts = row_chunks(rows, topk)
    most = max((count for _, count in parts), default=0)
    group_heads = group_heads_for(most, kv_heads, topk)
    requests, blocks = batch.block_tables.shape
    spans = (blocks + 1) // 2 * 3  # of two neighbours: each alone, and both
    group_bins = group_heads * requests * spans
    group_pairs = group_heads * most * topk
    # Every bin may end in a tile that is not full.
    max_tiles = group_pairs // TILE + min(group_bins, group_pairs)

    def ints(*shape: int) -> Tensor:
        return torch.empty(shape, dtype=torch.int32, device=device)

    groups = kv_heads // group_heads
    bins = (kv_heads, requests, spans)
    shape = (group_heads, most, topk, GROUP)
    dtype = torch.bfloat16 if pages.value.format is BF16 else torch.float16
    scratch = (
        *(ints(*bins), ints(*bins), ints(most, kv_heads, topk), ints(groups, max_tiles, TILE)),
        *(ints(groups, max_tiles), ints(groups, _multiprocessors(device) + 1)),
        torch.empty((*shape, HEAD_DIM), dtype=dtype, device=device),
        torch.empty(shape, dtype=torch.float32, device=device),
    )
    for first, count in parts:
        own = ids[first : first + count]
        yield Chunk(q, own, batch, pages, out, first, group_heads, *scratch)


def _raise(error: int) -> None:
    if error:
        raise RuntimeError(f"sparse prefill did not launch: CUDA error {error}")


@cache
def _multiprocessors(device: torch.device) -> int:
    return int(torch.cuda.get_device_properties(device).multi_processor_count)


@cache
def _list_library() -> ctypes.CDLL:
    return library(LISTS, _LISTS)


@cache
def _attend_library() -> ctypes.CDLL:
    return library(ATTEND, _ATTEND)


def _refusal(q: Tensor, ids: Tensor, batch: Batch, pages: LayerPages) -> str | None:
    """What the kernels do not take of these, in one sentence."""
    key, value = pages.key, pages.value
    if q.dtype is not torch.bfloat16 or key.format not in FORMATS or value.format != key.format:
        return (
            "hopper's sparse prefill takes bf16 queries and a bf16, fp8 or nvfp4 cache, not "
            f"{q.dtype} and {key.format.name}: use backend (--backend) cuda"
        )
    group, topk = q.shape[1] / ids.shape[1], ids.shape[2]
    if q.shape[2] != HEAD_DIM or group != GROUP or topk > MAX_TOPK:
        return (
            f"hopper's sparse prefill takes {HEAD_DIM} dims a head, {GROUP} query heads a KV head "
            f"and up to {MAX_TOPK} blocks, not {q.shape[2]}, {group:g} and {topk}: use "
            "backend (--backend) cuda"
        )
    if ids.shape[1] * batch.block_tables.numel() > MAX_BINS:
        return (
            f"hopper's sparse prefill lists up to {MAX_BINS} blocks of requests and KV heads, not "
            f"{ids.shape[1] * batch.block_tables.numel()}: use backend (--backend) cuda"
        )
    return None


def _check(q: Tensor, ids: Tensor, batch: Batch, pages: LayerPages) -> None:
    refusal = _refusal(q, ids, batch, pages)
    if refusal is not None:
        raise UnsupportedError(refusal)
    parts = [t for p in (pages.key, pages.value) for t in (p.codes, p.scales) if t is not None]
    strides = {tuple(n * t.element_size() for n in t.stride()[:2]) for t in parts}
    assert len(strides) == 1, "K, V and their scales are not of the same rows"
    assert all(t.data_ptr() % 16 == 0 for t in parts), "a part of a row is not aligned"
    assert all(n % 16 == 0 for n in strides.pop()), "rows are not aligned"

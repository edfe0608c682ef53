"""`sparse_attention` on Hopper: one launch in CUDA C++, clusters of CTAs for rows and KV heads.

Serves bf16 queries over a cache in NVFP4, fp8 or bf16. Made for decode and for few rows: rows of
one request that select the same block read it twice, from L2. Reads lengths and tables on the
device, so a CUDA graph may hold it.
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
from winnow.spec.model import BLOCK_TOKENS

SOURCE = Path(__file__).parent / "csrc" / "decode.cu"
HEAD_DIM = 128
MAX_GROUP = 16
"""Query heads of one KV head: the rows of the tensor cores' instruction."""
MAX_TOPK = 32
"""A warp finds its blocks with one lane each."""
MAX_ROWS = 8
"""A request, on average, for which the kernel is made."""
FEW_ROWS = 184
"""In all, for which it is faster than listing rows under blocks, however few blocks there are; each
block that may be listed allows one row more, as measured, up to `MOST_FEW_ROWS`."""
MOST_FEW_ROWS = 512
SPLITS = (1, 2, 4, 8, 16)
GROUPS = (1, 2)
"""Of four warps in a CTA; each group has blocks of its own."""
_ROOM = {"nvfp4": 2, "fp8": 1, "bf16": 1}
"""CTAs of two groups on a multiprocessor: what registers or shared memory allow."""
_FORMATS = {"bf16": 1, "fp8": 2, "nvfp4": 3}

_P, _N, _I, _F = ctypes.c_void_p, ctypes.c_int64, ctypes.c_int, ctypes.c_float
_SIGNATURES: dict[str, tuple[type, ...]] = {
    "winnow_sparse_decode": (
        *(_P, _N, _N, _P, _P, _P, _P, _P, _N, _P, _N, _N, _I, _P, _I),
        *(_N, _I, _I, _I, _F, _F, _I, _I, _P),
    )
}


def sparse_attention(q: Tensor, ids: Tensor, batch: Batch, pages: LayerPages) -> Tensor:
    """See `winnow.ops.sparse_attention.SparseAttention`; UnsupportedError for other than bf16
    queries of 128 dims over NVFP4, fp8 or bf16 pages, 16 query heads a KV head and 32 blocks at
    most."""
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    rows, kv_heads, topk = ids.shape
    stored, processors = pages.key.format.name, _multiprocessors(q.device)
    attend(q, ids, batch, pages, out, *shares_for(rows * kv_heads, topk, stored, processors))
    return out


def takes(q: Tensor, ids: Tensor, batch: Batch, pages: LayerPages) -> bool:
    """Whether the kernel serves these arguments, and fast: decode, and a few rows of prefill."""
    group, topk = q.shape[1] // ids.shape[1], ids.shape[2]
    few = min(FEW_ROWS + batch.block_tables.numel(), MOST_FEW_ROWS)
    most = max(MAX_ROWS * batch.num_requests, few)
    return q.shape[0] <= most and _refusal(q, pages, group, topk) is None


def shares_for(pairs: int, topk: int, stored: str, multiprocessors: int) -> tuple[int, int]:
    """CTAs that share the blocks of one of `pairs` (row, KV head), and groups of warps in each.

    The fastest, as measured. Two groups where all CTAs have room at once and the pairs are not so
    few that clusters of more than two serve them better. Else one group, and more CTAs while pairs
    are few: one on every multiprocessor, two where that leaves a pair undivided.
    """
    splits = 1 if 2 * pairs > multiprocessors else 2
    room = _ROOM.get(stored, 0) * multiprocessors
    if multiprocessors < 5 * pairs and splits * pairs <= room and 2 * splits <= topk:
        return splits, 2
    wanted = max(multiprocessors // max(pairs, 1), 2 if pairs <= multiprocessors else 1)
    return max((s for s in SPLITS if s <= min(wanted, topk)), default=1), 1


def attend(
    q: Tensor, ids: Tensor, batch: Batch, pages: LayerPages, out: Tensor, splits: int, groups: int
) -> None:
    """`sparse_attention` into `out` [rows, heads, 128], contiguous, bf16 or fp32 (the sums before
    they are rounded), with `splits` CTAs of `groups` groups for a row and KV head."""
    rows, kv_heads, topk = ids.shape
    heads, dim = q.shape[1:]
    _check(q, pages, heads // kv_heads, topk)
    if not rows:
        return
    if q.stride(2) != 1 or q.stride(1) % 8 or q.stride(0) % 8 or q.data_ptr() % 16:
        q = q.contiguous()
    ids, tables = ids.contiguous(), batch.block_tables.contiguous()
    codes = pages.key.codes
    error = _library().winnow_sparse_decode(
        q.data_ptr(), q.stride(0), q.stride(1), ids.data_ptr(), batch.positions.data_ptr(),
        batch.row_request.data_ptr(), batch.kv_lens.data_ptr(), tables.data_ptr(), tables.shape[1],
        codes.data_ptr(), codes.stride(0) * codes.itemsize, codes.stride(1) * codes.itemsize,
        _FORMATS[pages.key.format.name], out.data_ptr(), out.dtype is torch.float32,
        rows, kv_heads, heads // kv_heads, topk,
        math.log2(math.e) * dim**-0.5 * pages.key.global_scale, pages.value.global_scale,
        splits, groups, torch.cuda.current_stream(q.device).cuda_stream,
    )  # fmt: skip
    if error:
        raise RuntimeError(f"sparse decode did not launch: CUDA error {error}")


@cache
def _multiprocessors(device: torch.device) -> int:
    return int(torch.cuda.get_device_properties(device).multi_processor_count)


@cache
def _library() -> ctypes.CDLL:
    return library(SOURCE, _SIGNATURES)


def _refusal(q: Tensor, pages: LayerPages, group: int, topk: int) -> str | None:
    """What the kernel does not take of these, in one sentence."""
    key, value = pages.key, pages.value
    stored = key.format.name
    if q.dtype is not torch.bfloat16 or value.format is not key.format or stored not in _FORMATS:
        return (
            f"hopper's sparse attention takes bf16 queries and a cache in {', '.join(_FORMATS)}, "
            f"not {q.dtype} and {stored}: serve the model in bfloat16, or use backend (--backend) "
            "cuda"
        )
    if q.shape[-1] != HEAD_DIM or group > MAX_GROUP or topk > MAX_TOPK:
        return (
            f"hopper's sparse attention takes {HEAD_DIM} dims a head, up to {MAX_GROUP} query "
            f"heads a KV head and up to {MAX_TOPK} blocks, not {q.shape[-1]}, {group} and {topk}: "
            "use backend (--backend) cuda"
        )
    return None


def _check(q: Tensor, pages: LayerPages, group: int, topk: int) -> None:
    refusal = _refusal(q, pages, group, topk)
    if refusal is not None:
        raise UnsupportedError(refusal)
    key, value = pages.key, pages.value
    parts = (key.codes, key.scales, value.codes, value.scales)
    starts = [part.data_ptr() - key.codes.data_ptr() for part in parts if part is not None]
    codes, scales = key.format.code_bytes(HEAD_DIM), key.format.scale_bytes(HEAD_DIM)
    piece = [0, codes + scales]
    if scales:
        piece = [0, codes, codes + scales, 2 * codes + scales]
    assert starts == [BLOCK_TOKENS * n for n in piece], "K and V are not one piece of a row"

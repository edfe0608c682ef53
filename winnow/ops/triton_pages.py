"""Page rows inside Triton kernels: tiles of K, V or index keys, and the query rows over them.

Owns how a kernel finds a request's rows and reads stored tokens. Knows nothing of softmax or of
selections. Offsets into pages are int64: a pool may be larger than 2^31 bytes.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from winnow.ops.batch import Batch
from winnow.ops.paged import Paged
from winnow.ops.triton_codec import decode_e4m3, round_to, unpack_nvfp4
from winnow.spec.formats import FP32
from winnow.spec.model import BLOCK_TOKENS

BLOCK = tl.constexpr(BLOCK_TOKENS)
_TILE_ROWS = (1, 4, 16)
_REQUESTS = (64, 1024)
"""Numbers of requests that programs look through at once: few, as each is a kernel of its own."""


class Stored(NamedTuple):
    """A `Paged` as kernels take it: 8-bit codes and scales as bytes, strides in elements.

    `codes` [pages, heads, tokens, width], `scales` of the same page and head strides or None,
    and the name of the format.
    """

    codes: Tensor
    scales: Tensor | None
    page_stride: int
    head_stride: int
    format: str

    @classmethod
    def of(cls, paged: Paged) -> Stored:
        codes, scales = paged.codes, paged.scales
        if codes.dtype.itemsize == 1:
            codes = codes.view(torch.uint8)
        assert codes.stride()[2:] == (codes.shape[3], 1), "tokens do not lie one after another"
        if scales is not None:
            scales = scales.view(torch.uint8)
            assert scales.stride() == (*codes.stride()[:2], scales.shape[3], 1)
        return cls(codes, scales, codes.stride(0), codes.stride(1), paged.format.name)


def compute_dtype(queries: Tensor, *stored: Paged) -> tl.dtype:
    """bf16, which holds every stored value but fp32's exactly; fp32 where something is fp32."""
    wide = queries.dtype is torch.float32 or any(paged.format is FP32 for paged in stored)
    return tl.float32 if wide else tl.bfloat16


def tile_rows(batch: Batch, most: int) -> int:
    """Rows of one request that a program takes: 1 in plain decode, more where there are more.

    From the shapes alone, which a captured graph fixes; never from what the device holds.
    """
    average = batch.num_rows / max(batch.num_requests, 1)
    wanted = next((n for n in _TILE_ROWS if n >= average), _TILE_ROWS[-1])
    return max(n for n in _TILE_ROWS if n <= min(wanted, max(most, 1)))


def request_lanes(num_requests: int, rows_a_tile: int) -> int:
    """The REQUESTS of `tile_of_rows`, which needs none where a tile is a row."""
    if rows_a_tile == 1:
        return 1
    enough = (n for n in _REQUESTS if n >= num_requests)
    return next(enough, triton.next_power_of_2(num_requests))


def num_tiles(num_rows: int, num_requests: int, rows_a_tile: int) -> int:
    """Programs that surely cover the rows, however these are spread over the requests."""
    if rows_a_tile == 1:
        return num_rows
    return -(-num_rows // rows_a_tile) + min(num_requests, num_rows)


@triton.jit
def tile_of_rows(
    tile, row_starts, row_request, first_row, end_row, num_requests,
    TILE_ROWS: tl.constexpr, REQUESTS: tl.constexpr,
):  # fmt: skip
    """The request, first row and end row of a tile of rows first_row .. end_row - 1.

    No tile holds rows of two requests. A tile beyond the last has no rows. REQUESTS is a power
    of 2, at least num_requests.
    """
    if TILE_ROWS == 1:
        row = first_row + tile
        request = tl.load(row_request + row)
        begin = row
        end = row + 1
    else:
        index = tl.arange(0, REQUESTS)
        real = index < num_requests
        starts = tl.load(row_starts + index, mask=real, other=0)
        ends = tl.load(row_starts + index + 1, mask=real, other=0)
        starts = tl.minimum(tl.maximum(starts, first_row), end_row)
        ends = tl.minimum(tl.maximum(ends, first_row), end_row)
        tiles = (ends - starts + TILE_ROWS - 1) // TILE_ROWS
        before = tl.cumsum(tiles, 0) - tiles
        mine = (before <= tile) & (tile < before + tiles)
        request = tl.sum(tl.where(mine, index, 0), 0).to(tl.int64)
        begin = tl.sum(tl.where(mine, starts + (tile - before) * TILE_ROWS, 0), 0)
        end = tl.minimum(begin + TILE_ROWS, tl.sum(tl.where(mine, ends, 0), 0))
    return request, begin, end


@triton.jit
def channels(HALF: tl.constexpr, DIM: tl.constexpr, FORMAT: tl.constexpr):
    """Which channels a half of a stored vector holds, int32 [DIM / 2].

    Two codes share a byte in NVFP4, so its halves are the even and the odd channels: they leave
    the bytes without changing places. Sums over channels may take them in any order.
    """
    index = tl.arange(0, DIM // 2)
    if FORMAT == "nvfp4":
        index = 2 * index + HALF
    else:
        index = index + HALF * (DIM // 2)
    return index


@triton.jit
def load_halves(
    codes, scales, tokens, real, DIM: tl.constexpr, FORMAT: tl.constexpr, DTYPE: tl.constexpr
):  # fmt: skip
    """Both halves of stored vectors, `DTYPE` [T, DIM / 2] each, without the tensor's own scale.

    `codes` and `scales` point at one page and head, `tokens` [T] are places in the page. Where
    `real` [T] is false nothing is read and the values are 0.
    """
    half = tl.arange(0, DIM // 2)[None, :]
    real = real[:, None]
    tokens = tokens[:, None]
    if FORMAT == "nvfp4":
        packed = tl.load(codes + tokens * (DIM // 2) + half, mask=real, other=0)
        group = tl.arange(0, DIM // 16)[None, :]
        steps = tl.load(scales + tokens * (DIM // 16) + group, mask=real, other=0)
        first, second = unpack_nvfp4(packed, steps)
    else:
        first = tl.load(codes + tokens * DIM + half, mask=real, other=0)
        second = tl.load(codes + tokens * DIM + DIM // 2 + half, mask=real, other=0)
        if FORMAT == "fp8":
            first = decode_e4m3(first)
            second = decode_e4m3(second)
    if FORMAT != "bf16" or tl.bfloat16 != DTYPE:
        first = round_to(first.to(tl.float32), DTYPE)
        second = round_to(second.to(tl.float32), DTYPE)
    return first, second

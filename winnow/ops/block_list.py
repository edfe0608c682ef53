"""Blocks for the CPU's C++ kernels, which see every block as fp32 [128, dim] at an address, and the
writing of new tokens into them.

A block stored in fp32 is read where it lies, in its page row; others are expanded once each.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from winnow.ops.codec import cpu as codec
from winnow.ops.native import library, threads
from winnow.ops.paged import Paged, encode
from winnow.spec.formats import BF16, FP8, FP32
from winnow.spec.model import BLOCK_TOKENS

MAX_EXPANDED = 512
"""Blocks to expand at a time: 32 MiB of 128 x 128 values. More come from fresh memory at every
call, whose first touch costs as much as the expansion."""


@dataclass(frozen=True)
class BlockList:
    """`addresses` int64 [...], valid while `owner` lives."""

    addresses: Tensor
    owner: Tensor


def block_list(paged: Paged, pages: Tensor, heads: Tensor | int) -> BlockList:
    """The blocks of `heads` in `pages` (int64, broadcast together)."""
    if paged.format is FP32:
        return BlockList(_addresses(paged.codes, pages, heads), paged.codes)
    num_heads = paged.codes.shape[1]
    pairs, places = (pages * num_heads + heads).unique(return_inverse=True)
    blocks = expand(paged, pairs // num_heads, pairs % num_heads)
    return BlockList(blocks.data_ptr() + places * (4 * blocks[0].numel()), blocks)


def expand(paged: Paged, pages: Tensor, heads: Tensor) -> Tensor:
    """Values of one head of each page: `pages` and `heads` [n] -> fp32 [n, 128, dim]."""
    if paged.format is BF16:
        return paged.codes[pages, heads].float()
    count, width = pages.shape[0], paged.codes.shape[-1]
    codes, e4m3 = _addresses(paged.codes, pages, heads), codec.value_tables()[0]
    if paged.format is FP8:
        out = torch.empty(count, BLOCK_TOKENS, width)
        library().winnow_expand_fp8(
            codes.data_ptr(), count, width, e4m3.data_ptr(), paged.global_scale,
            out.data_ptr(), threads(),
        )  # fmt: skip
        return out
    assert paged.scales is not None
    scales = _addresses(paged.scales, pages, heads)
    out = torch.empty(count, BLOCK_TOKENS, 2 * width)
    library().winnow_expand_nvfp4(
        codes.data_ptr(), scales.data_ptr(), count, 2 * width, e4m3.data_ptr(),
        paged.global_scale, out.data_ptr(), threads(),
    )  # fmt: skip
    return out


def insert(paged: Paged, values: Tensor, pages: Tensor, offsets: Tensor) -> None:
    """`winnow.ops.paged.write` with the fast codec, and a copy a token instead of an index."""
    codes, scales = encode(codec, paged, values)
    _scatter(paged.codes, codes, pages, offsets)
    if scales is not None and paged.scales is not None:
        _scatter(paged.scales, scales, pages, offsets)


def _scatter(into: Tensor, values: Tensor, pages: Tensor, offsets: Tensor) -> None:
    values, size = values.contiguous(), into.element_size()
    library().winnow_scatter(
        values.data_ptr(), values.shape[0], values.shape[1], values.shape[2] * size,
        pages.data_ptr(), offsets.data_ptr(), into.data_ptr(), into.stride(0) * size,
        into.stride(1) * size,
    )  # fmt: skip


def _addresses(held: Tensor, pages: Tensor, heads: Tensor | int) -> Tensor:
    size = held.element_size()
    return pages * (held.stride(0) * size) + (heads * (held.stride(1) * size) + held.data_ptr())

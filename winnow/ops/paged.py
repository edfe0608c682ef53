"""Typed views of page rows, and reading and writing values through them.

Owns how a row's bytes become K, V and index keys. Knows nothing of requests.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor

from winnow.spec.formats import FP8, NVFP4, Format
from winnow.spec.model import BLOCK_TOKENS
from winnow.spec.page import Part, RowLayout

_CODE_DTYPES = {
    "fp32": torch.float32,
    "bf16": torch.bfloat16,
    "fp8": torch.float8_e4m3fn,
    "nvfp4": torch.uint8,
}


class Codec(Protocol):
    """What reading and writing need of `winnow.ops.codec`'s reference or of a faster version."""

    def quantise_nvfp4(
        self, x: Tensor, global_scale: float = ..., *, strict: bool = ...
    ) -> tuple[Tensor, Tensor]: ...

    def dequantise_nvfp4(
        self, codes: Tensor, scales: Tensor, global_scale: float = ..., dtype: torch.dtype = ...
    ) -> Tensor: ...

    def count_saturated_nvfp4(self, x: Tensor, global_scale: float = ...) -> int: ...

    def count_saturated_fp8(self, x: Tensor, scale: float = ...) -> int: ...

    def quantise_fp8(self, x: Tensor, scale: float = ...) -> Tensor: ...

    def dequantise_fp8(
        self, codes: Tensor, scale: float = ..., dtype: torch.dtype = ...
    ) -> Tensor: ...


@dataclass
class Clipping:
    """Values written to a cache tensor, and how many were saturated to fit its format.

    What kernels on a GPU clipped and wrote is in `on_device`, int64 [2], until someone asks:
    `settled` waits for the GPU, counting does not. A replayed graph counts as the calls in it did.
    """

    written: int = 0
    clipped: int = 0
    on_device: Tensor | None = field(default=None, compare=False)

    def settled(self) -> Clipping:
        """The counts so far, those on the device included."""
        clipped, written = (0, 0) if self.on_device is None else self.on_device.tolist()
        return Clipping(self.written + written, self.clipped + clipped)

    def counter(self, device: torch.device) -> Tensor:
        """The counts on the device, clipped and written, for a kernel to add to; made when first
        asked for, which must be before a graph is captured."""
        if self.on_device is None:
            self.on_device = torch.zeros(2, dtype=torch.int64, device=device)
        return self.on_device


@dataclass(frozen=True)
class Paged:
    """K, V or index keys of one layer in every page: views, no copies.

    `codes` [pages, heads, BLOCK_TOKENS, dim] in the format's dtype (NVFP4: uint8, dim / 2);
    `scales` [pages, heads, BLOCK_TOKENS, dim / 16] float8_e4m3fn, or None; `global_scale` is the
    dequantisation scale of the whole tensor (1.0 unless a checkpoint gives one). `clipping`
    counts values written and, of those, values that did not fit a quantised format.
    """

    format: Format
    codes: Tensor
    scales: Tensor | None
    global_scale: float = 1.0
    clipping: Clipping = field(default_factory=Clipping)

    @property
    def dim(self) -> int:
        """Values of one token and head."""
        return self.codes.shape[3] * self.codes.itemsize * 8 // self.format.code_bits


@dataclass(frozen=True)
class LayerPages:
    """One layer's K, V and, on sparse layers, index keys (heads axis of 1)."""

    key: Paged
    value: Paged
    index: Paged | None


@dataclass(frozen=True)
class CacheScales:
    """Dequantisation scales of one layer's cache tensors, from the checkpoint or 1.0."""

    key: float = 1.0
    value: float = 1.0
    index: float = 1.0


def layer_pages(
    rows: Tensor, layout: RowLayout, layer: int, scales: CacheScales | None = None
) -> LayerPages:
    """Views of one layer in `rows` uint8 [pages, row_bytes]."""
    scales = scales or CacheScales()
    heads, stride = layout.num_kv_heads, layout.head_bytes
    index = None
    if layer in layout.sparse_layers:
        index = _view(rows, layout.index(layer), 1, 0, scales.index)
    return LayerPages(
        key=_view(rows, layout.key(layer, 0), heads, stride, scales.key),
        value=_view(rows, layout.value(layer, 0), heads, stride, scales.value),
        index=index,
    )


def _view(rows: Tensor, part: Part, heads: int, head_stride: int, scale: float) -> Paged:
    """Heads of one part lie `head_stride` bytes apart, tokens one after another."""
    fmt = part.format

    def typed(start: int, token_bytes: int, dtype: torch.dtype) -> Tensor:
        shape = (rows.shape[0], heads, BLOCK_TOKENS, token_bytes)
        strides = (rows.stride(0), head_stride, token_bytes, 1)
        return rows.as_strided(shape, strides, rows.storage_offset() + start).view(dtype)

    codes = typed(part.codes, fmt.code_bytes(part.dim), _CODE_DTYPES[fmt.name])
    group_scales = None
    if fmt.group:
        group_scales = typed(part.scales, fmt.scale_bytes(part.dim), torch.float8_e4m3fn)
    return Paged(fmt, codes, group_scales, scale)


def write(codec: Codec, paged: Paged, values: Tensor, pages: Tensor, offsets: Tensor) -> None:
    """Store `values` [rows, heads, dim] at (pages [rows], offsets [rows]), one token a row.

    Infinities and values beyond the format's range saturate; NaN stays NaN (in NVFP4 it makes
    its group of 16 NaN), so that it is seen and not served. What saturates is counted.
    """
    codes, scales = encode(codec, paged, values)
    _bytes(paged.codes)[pages, :, offsets] = _bytes(codes)
    if scales is not None and paged.scales is not None:
        _bytes(paged.scales)[pages, :, offsets] = _bytes(scales)


def encode(codec: Codec, paged: Paged, values: Tensor) -> tuple[Tensor, Tensor | None]:
    """Codes and scales of `values` [rows, heads, dim] in the format of `paged`, as it stores
    them. Counts what is written and what saturates."""
    paged.clipping.written += values.numel()
    if paged.format is NVFP4:
        paged.clipping.clipped += codec.count_saturated_nvfp4(values, paged.global_scale)
        return codec.quantise_nvfp4(values, paged.global_scale)
    if paged.format is FP8:
        paged.clipping.clipped += codec.count_saturated_fp8(values, paged.global_scale)
        return codec.quantise_fp8(values, paged.global_scale), None
    return values.to(paged.codes.dtype), None


def read(codec: Codec, paged: Paged, pages: Tensor, dtype: torch.dtype) -> Tensor:
    """Values of whole pages: `pages` [...] -> [..., heads, BLOCK_TOKENS, dim] in `dtype`."""
    scales = None if paged.scales is None else _bytes(paged.scales)[pages]
    return _decode(codec, paged, _bytes(paged.codes)[pages], scales, dtype)


def _decode(
    codec: Codec, paged: Paged, codes: Tensor, scales: Tensor | None, dtype: torch.dtype
) -> Tensor:
    codes = codes.view(paged.codes.dtype)
    if scales is not None:
        scales = scales.view(torch.float8_e4m3fn)
        return codec.dequantise_nvfp4(codes, scales, paged.global_scale, dtype)
    if paged.format is FP8:
        return codec.dequantise_fp8(codes, paged.global_scale, dtype)
    return codes.to(dtype)


def _bytes(tensor: Tensor) -> Tensor:
    """float8 tensors cannot be indexed everywhere; their bytes can."""
    return tensor.view(torch.uint8) if tensor.dtype is torch.float8_e4m3fn else tensor

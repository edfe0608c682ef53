"""`attention_inputs` on Hopper: the projections, then one launch in CUDA C++ that does the rest.

csrc/insert.cu norms, rotates, quantises and inserts. Owns what that kernel takes and how its
arguments are laid out; the products are whatever `Linear` it is given. Slots are found on the
device and the grid depends on shapes alone, so a CUDA graph may hold a call.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from functools import cache
from pathlib import Path

import torch
from torch import Tensor

from winnow.errors import UnsupportedError
from winnow.ops.attention_inputs import AttentionInputs
from winnow.ops.batch import Batch
from winnow.ops.cuda_build import library
from winnow.ops.linear import Linear
from winnow.ops.paged import LayerPages, Paged
from winnow.ops.weights import AttentionWeights, Weight
from winnow.spec.model import ModelSpec

SOURCE = Path(__file__).parent / "csrc" / "insert.cu"
DIMS = (64, 128)
ROTARY_DIMS = (16, 32, 64)
GLOBAL_SCALES = (2.0**-40, 2.0**40)
"""Where the kernel's quotients are correctly rounded; a checkpoint's scales lie near 1."""
FEW_ROWS = 64
"""Up to so many, the heads of a row are spread over CTAs; more rows fill the GPU by themselves."""
Pair = Callable[[Tensor, Weight, Weight], tuple[Tensor, Tensor]]
"""The products of the same rows with two weights."""
_HEADS_A_TASK = 4
_TASKS_A_CTA = 4
_FORMATS = {"fp32": 0, "bf16": 1, "fp8": 2, "nvfp4": 3}

_P, _N, _I, _F = ctypes.c_void_p, ctypes.c_int64, ctypes.c_int, ctypes.c_float


class _Pages(ctypes.Structure):
    _fields_ = (
        *(("codes", _P), ("scales", _P), ("page_stride", _N), ("head_stride", _N)),
        *(("counts", _P), ("global_scale", _F), ("format", _I)),
    )


class _Insert(ctypes.Structure):
    _fields_ = (
        *(("qkv", _P), ("index", _P), ("qkv_stride", _N), ("index_stride", _N)),
        *((name, _P) for name in ("q_norm", "k_norm", "index_q_norm", "index_k_norm")),
        *((name, _P) for name in ("q_out", "index_q_out", "cos", "sin")),
        *((name, _P) for name in ("positions", "row_request", "kv_lens", "tables")),
        *(("table_stride", _N), ("key", _Pages), ("value", _Pages), ("index_pages", _Pages)),
        *(("eps", _F), ("fp32", _I), ("rows", _I), ("heads", _I), ("kv_heads", _I), ("dim", _I)),
        *(("index_heads", _I), ("index_dim", _I), ("half", _I), ("parts", _I), ("early", _I)),
    )


_SIGNATURES: dict[str, tuple[type, ...]] = {"winnow_insert": (ctypes.POINTER(_Insert), _P)}


@cache
def _library() -> ctypes.CDLL:
    return library(SOURCE, _SIGNATURES)


def attention_inputs(linear: Linear, pair: Pair) -> AttentionInputs:
    """`winnow.ops.attention_inputs.AttentionInputs` whose projections are `linear`'s, or `pair`'s
    where there are two.

    UnsupportedError for what the kernel does not take. What is written and clipped is counted on
    the device: `Clipping.settled` reads it.
    """

    def projected_and_inserted(
        x: Tensor,
        weights: AttentionWeights,
        spec: ModelSpec,
        rope: tuple[Tensor, Tensor],
        batch: Batch,
        pages: LayerPages,
    ) -> tuple[Tensor, Tensor | None]:
        refusal = _refusal(x, spec, pages)
        if refusal is not None:
            raise UnsupportedError(refusal)
        if weights.index is None:
            return insert(linear(x, weights.qkv), None, weights, spec, rope, batch, pages)
        qkv, index = pair(x, weights.qkv, weights.index)
        return insert(qkv, index, weights, spec, rope, batch, pages)

    return projected_and_inserted


def takes(
    x: Tensor,
    weights: AttentionWeights,
    spec: ModelSpec,
    rope: tuple[Tensor, Tensor],
    batch: Batch,
    pages: LayerPages,
) -> bool:
    """Whether the kernel serves these arguments."""
    return _refusal(x, spec, pages) is None


def insert(
    qkv: Tensor,
    index: Tensor | None,
    weights: AttentionWeights,
    spec: ModelSpec,
    rope: tuple[Tensor, Tensor],
    batch: Batch,
    pages: LayerPages,
    parts: int | None = None,
) -> tuple[Tensor, Tensor | None]:
    """What follows the projections: q and index_q of `AttentionInputs`, the rest into `pages`.

    `qkv` [rows, (heads + 2 kv_heads) * head_dim] and `index` [rows, (index_heads + 1) * index_dim]
    or None, of one dtype, rows any number of elements apart that keeps them 16-byte aligned.
    `parts`: CTAs that share a row; chosen by the number of rows if None.
    """
    rows, device = qkv.shape[0], qkv.device
    q = torch.empty(rows, spec.num_heads, spec.head_dim, dtype=qkv.dtype, device=device)
    index_q = None
    if index is not None:
        shape = (rows, spec.num_index_heads, spec.index_dim)
        index_q = torch.empty(shape, dtype=qkv.dtype, device=device)
    if not rows:
        return q, index_q
    cos, sin = (table.contiguous() for table in rope)
    qkv = _aligned(qkv)
    index = None if index is None else _aligned(index)
    tables = batch.block_tables
    none = _Pages()
    arguments = _Insert(
        qkv.data_ptr(), None if index is None else index.data_ptr(),
        qkv.stride(0), 0 if index is None else index.stride(0),
        *(_norm(weight) for weight in (weights.q_norm, weights.k_norm)),
        *(_norm(weight) for weight in (weights.index_q_norm, weights.index_k_norm)),
        q.data_ptr(), None if index_q is None else index_q.data_ptr(),
        cos.data_ptr(), sin.data_ptr(),
        batch.positions.data_ptr(), batch.row_request.data_ptr(), batch.kv_lens.data_ptr(),
        tables.data_ptr(), tables.stride(0),
        _pages(pages.key), _pages(pages.value),
        none if index is None or pages.index is None else _pages(pages.index),
        spec.norm_eps, qkv.dtype is torch.float32, rows, spec.num_heads, spec.num_kv_heads,
        spec.head_dim, 0 if index is None else spec.num_index_heads, spec.index_dim,
        spec.rotary_dim // 2, parts or _parts(rows, spec, index is not None),
        # A copy made here would be read before it is sure to have been written.
        all(copy is table for copy, table in zip((cos, sin), rope, strict=True)),
    )  # fmt: skip
    stream = torch.cuda.current_stream(device).cuda_stream
    error = _library().winnow_insert(ctypes.byref(arguments), stream)
    if error:
        raise RuntimeError(f"inserting K and V did not launch: CUDA error {error}")
    return q, index_q


def _parts(rows: int, spec: ModelSpec, has_index: bool) -> int:
    """CTAs that share a row: one for each few heads while rows are few."""
    if rows > FEW_ROWS:
        return 1
    kinds = [spec.num_heads, spec.num_kv_heads, spec.num_kv_heads]
    kinds += [spec.num_index_heads, 1] if has_index else []
    tasks = sum(-(-heads // _HEADS_A_TASK) for heads in kinds)
    return -(-tasks // _TASKS_A_CTA)


def _norm(weight: Tensor | None) -> int | None:
    assert weight is None or (weight.dtype is torch.float32 and weight.is_contiguous())
    return None if weight is None else weight.data_ptr()


def _aligned(projected: Tensor) -> Tensor:
    """`projected`, or a copy of it, whose heads can be read 16 bytes at a time."""
    row_bytes = projected.stride(0) * projected.element_size()
    if projected.stride(1) != 1 or (row_bytes | projected.data_ptr()) % 16:
        return projected.clone(memory_format=torch.contiguous_format)
    return projected


def _pages(paged: Paged) -> _Pages:
    codes, scales = paged.codes, paged.scales
    assert codes.stride()[2:] == (codes.shape[3], 1), "tokens do not lie one after another"
    size = codes.element_size()
    if scales is not None:
        assert scales.stride() == (*codes.stride()[:2], scales.shape[3], 1)
    return _Pages(
        codes.data_ptr(),
        None if scales is None else scales.data_ptr(),
        codes.stride(0) * size,
        codes.stride(1) * size,
        paged.clipping.counter(codes.device).data_ptr(),
        paged.global_scale,
        _FORMATS[paged.format.name],
    )


def _refusal(x: Tensor, spec: ModelSpec, pages: LayerPages) -> str | None:
    """What the kernel does not take of these, in one sentence."""
    if x.dtype not in (torch.bfloat16, torch.float32):
        return f"hopper's insertion takes bf16 or fp32, not {x.dtype}: serve the model in bfloat16"
    dims = (spec.head_dim,) if pages.index is None else (spec.head_dim, spec.index_dim)
    if not set(dims) <= set(DIMS) or spec.rotary_dim not in ROTARY_DIMS:
        return (
            f"hopper's insertion takes heads of {DIMS} dims of which {ROTARY_DIMS} are rotated, "
            f"not {dims} and {spec.rotary_dim}: use backend (--backend) cuda"
        )
    low, high = GLOBAL_SCALES
    for paged in (pages.key, pages.value, pages.index):
        if paged is not None and not low <= paged.global_scale <= high:
            return (
                f"hopper's insertion takes cache scales from {low} to {high}, not "
                f"{paged.global_scale}: use backend (--backend) cuda"
            )
    return None

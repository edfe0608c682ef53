"""Other engines' kernels, timed in the same process on the same shapes as ours.

Owns how they are found and called. Their files lie in a folder that `benchmarks/peers/fetch.py`
filled; what is not there is not timed. Their results are not checked: only their times are used.
cuBLAS (torch) in bf16 is always there.
"""

from __future__ import annotations

import ctypes
import glob
import importlib
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import Tensor

from winnow.bench.kernel_peer_experts import FOLDER, Marlin
from winnow.errors import UnsupportedError
from winnow.spec.model import BLOCK_TOKENS, ModelSpec

Timed = Callable[[Sequence[Callable[[], Any]]], tuple[float, ...]]

FLASHINFER = "FlashInfer fp8"
VLLM = "vLLM"
MARLIN = "Marlin GEMMs alone"
_SETS = 4
_MAX_BYTES = 12 << 30
"""Of the copies of a cache that calls go through in turn."""
_FP8 = torch.float8_e4m3fn


@dataclass(frozen=True)
class Shapes:
    """What the peers' calls need of the model."""

    heads: int
    kv_heads: int
    dim: int
    topk: int

    @classmethod
    def of(cls, spec: ModelSpec) -> Shapes:
        return cls(spec.num_heads, spec.num_kv_heads, spec.head_dim, spec.topk_blocks)


class Peers:
    """The peers found in `folder`, or cuBLAS alone without one."""

    def __init__(self, spec: ModelSpec, folder: Path | None = None) -> None:
        self.spec, self.shapes = spec, Shapes.of(spec)
        self.found: dict[str, Any] = {}
        self.refused: list[str] = []
        """What a peer said to a shape that it did not take; a sentence each."""
        if folder is None:
            return
        sys.path.insert(0, str(folder.resolve()))
        try:
            self._find(folder)
        except ImportError as error:
            raise UnsupportedError(
                f"the peers in {folder} do not load here ({error}): fetch them for this Python "
                "with benchmarks/peers/fetch.py, or leave out --peers"
            ) from error

    def _find(self, folder: Path) -> None:
        if (folder / "flashinfer" / "programs").is_dir():
            self.found[FLASHINFER] = _flashinfer(folder / "flashinfer" / "programs")
        ops = "vllm.models.minimax_m3.common.ops"
        if (folder / "vllm" / "models").is_dir():
            names = ("index_topk", "sparse_attn")
            self.found[VLLM] = tuple(importlib.import_module(f"{ops}.{name}") for name in names)
        if (folder / FOLDER).is_dir():
            self.found[MARLIN] = Marlin(folder / FOLDER)
        if not self.found:
            raise ImportError("there are none")

    def times(self, shape: tuple[Any, ...], timed: Timed) -> dict[str, float]:
        """Median us of each peer on a `Work.peer`, as far as it serves that shape."""
        kind, *sizes = shape
        found: dict[str, float] = {}
        for peer, made in self._made(kind, sizes):
            try:
                for name, calls in made:
                    found[f"{peer}{name}"] = median(timed(calls))
            # Whatever theirs raises on a shape must not end the run of ours.
            except Exception as error:
                self.refused.append(f"{peer} on {kind} {sizes}: {type(error).__name__}: {error}")
            torch.cuda.empty_cache()
        return found

    def _made(self, kind: str, sizes: list[int]) -> Iterator[tuple[str, Made]]:
        if kind == "matmul":
            yield "cuBLAS bf16", iter([("", _matmul(*sizes))])
            return
        if kind == "experts":
            if MARLIN in self.found:
                yield MARLIN, _marlin(self.found[MARLIN], self.spec, *sizes)
            return
        theirs, vllms = _CALLS[kind]
        if FLASHINFER in self.found:
            yield FLASHINFER, theirs(self.found[FLASHINFER], self.shapes, *sizes)
        if VLLM in self.found:
            for dtype in (torch.bfloat16, _FP8):
                label = f"{VLLM} {'fp8' if dtype is _FP8 else 'bf16'}"
                yield label, vllms(self.found[VLLM], self.shapes, dtype, *sizes)


Calls = Sequence[Callable[[], Any]]
Made = Iterator[tuple[str, Calls]]


def _flashinfer(programs: Path) -> Any:
    # The programs are linked without the runtime, which is to be in the process already.
    torch.cuda.init()
    for name in (*glob.glob("/usr/local/cuda*/lib64/libcudart.so*"), "libcudart.so.13"):
        if _loads(name):
            break
    _loads("libcuda.so.1")
    os.environ.setdefault("FLASHINFER_CUDA_ARCH_LIST", "9.0a")
    os.environ.setdefault("FLASHINFER_WORKSPACE_BASE", str(programs.parent / "work"))
    tvm_ffi = importlib.import_module("tvm_ffi")
    module = importlib.import_module("flashinfer.msa_ops.cake_hopper_sm90")
    vars(module)["load_hopper_msa_module"] = lambda name: tvm_ffi.load_module(
        str(programs / f"{name}.so")
    )
    return module


def _loads(name: str) -> bool:
    try:
        ctypes.CDLL(name, mode=ctypes.RTLD_GLOBAL)
    except OSError:
        return False
    return True


def _marlin(marlin: Marlin, spec: ModelSpec, rows: int) -> Made:
    yield "", marlin.calls(spec, rows)


def _matmul(rows: int, n: int, k: int) -> Calls:
    x = torch.randn(rows, k, device="cuda").bfloat16()
    held = [torch.randn(n, k, device="cuda").bfloat16() for _ in range(3)]
    return [partial(torch.mm, x, w.T) for w in held] * (7 if rows <= 256 else 1)


def _caches(pages: int, dtype: torch.dtype, *shape: int) -> list[Tensor]:
    one = pages * torch.Size(shape).numel() * dtype.itemsize
    return [
        torch.randn(pages, *shape, device="cuda", dtype=torch.bfloat16).to(dtype)
        for _ in range(max(1, min(_SETS, _MAX_BYTES // one)))
    ]


def _table(requests: int, blocks: int) -> Tensor:
    pages = torch.randperm(requests * blocks, device="cuda", dtype=torch.int32)
    return pages.view(requests, blocks)


def _lengths(requests: int, tokens: int) -> Tensor:
    return torch.full((requests,), tokens, device="cuda", dtype=torch.int32)


def _random_ids(shapes: Shapes, rows: int, blocks: int) -> Tensor:
    rank = torch.rand(shapes.kv_heads, rows, blocks, device="cuda")
    return rank.topk(min(shapes.topk, blocks), -1).indices.sort(-1).values.int().contiguous()


def _flashinfer_index_decode(fi: Any, shapes: Shapes, requests: int, tokens: int) -> Made:
    blocks = tokens // BLOCK_TOKENS
    caches = _caches(requests * blocks, _FP8, 1, BLOCK_TOKENS, shapes.dim)
    table, lengths = _table(requests, blocks), _lengths(requests, tokens)
    q = torch.randn(requests, shapes.kv_heads, shapes.dim, device="cuda").to(_FP8)
    scores = torch.empty(shapes.kv_heads, blocks, requests, device="cuda")
    ids = torch.empty(requests, shapes.kv_heads, shapes.topk, device="cuda", dtype=torch.int32)
    visible = _lengths(requests, blocks)

    def score(cache: Tensor) -> None:
        fi.hopper_msa_proxy_score_decode(
            q, cache, page_table=table, seqused_k=lengths, per_head=scores, max_seqlen_q=1,
            batch_size=requests,
        )  # fmt: skip

    def both(cache: Tensor) -> None:
        score(cache)
        fi.hopper_msa_topk_select(
            scores, shapes.topk, ids, num_valid_pages=visible, force_end_blocks=1
        )

    try:
        both(caches[0])
    except NotImplementedError:
        yield " (score alone)", [partial(score, c) for c in caches] * 5
    else:
        yield "", [partial(both, c) for c in caches] * 5


def _vllm_index_decode(
    modules: Any, shapes: Shapes, dtype: torch.dtype, requests: int, tokens: int
) -> Made:
    blocks = tokens // BLOCK_TOKENS
    caches = _caches(requests * blocks, dtype, BLOCK_TOKENS, shapes.dim)
    table, lengths = _table(requests, blocks), _lengths(requests, tokens)
    q = torch.randn(requests, shapes.kv_heads, shapes.dim, device="cuda").to(dtype)
    ids = torch.empty(shapes.kv_heads, requests, shapes.topk, device="cuda", dtype=torch.int32)
    call = modules[0].minimax_m3_index_decode
    rest = (tokens, shapes.topk, 0, 1, shapes.kv_heads, 1, 1)
    yield "", [partial(call, q, c, table, lengths, *rest, out=ids) for c in caches] * 5


_SPARSE_BLOCKS = 128


def _flashinfer_sparse_decode(fi: Any, shapes: Shapes, requests: int) -> Made:
    caches = _caches(requests * _SPARSE_BLOCKS, _FP8, shapes.kv_heads, BLOCK_TOKENS, 2 * shapes.dim)
    table = _table(requests, _SPARSE_BLOCKS)
    lengths = _lengths(requests, _SPARSE_BLOCKS * BLOCK_TOKENS)
    q = torch.randn(requests, shapes.heads, shapes.dim, device="cuda").bfloat16()
    out, ids = torch.empty_like(q), _random_ids(shapes, requests, _SPARSE_BLOCKS)

    def call(cache: Tensor, chosen: Tensor) -> None:
        fi.hopper_msa_sparse_decode_attention(
            q, cache[..., : shapes.dim], cache[..., shapes.dim :], chosen, page_table=table,
            seqused_k=lengths, seqlen_q=1, softmax_scale=shapes.dim**-0.5, out=out,
        )  # fmt: skip

    by_row = ids.transpose(0, 1).contiguous()
    chosen = _accepted(lambda given: call(caches[0], given), by_row, ids)
    yield "", [partial(call, c, chosen) for c in caches] * 5


def _accepted(call: Callable[[Tensor], None], first: Tensor, second: Tensor) -> Tensor:
    """The order of ids' axes that a call takes."""
    try:
        call(first)
    except (ValueError, RuntimeError, NotImplementedError):
        call(second)
        return second
    return first


def _vllm_sparse_decode(modules: Any, shapes: Shapes, dtype: torch.dtype, requests: int) -> Made:
    caches = _caches(
        requests * _SPARSE_BLOCKS, dtype, shapes.kv_heads, BLOCK_TOKENS, 2 * shapes.dim
    )
    table = _table(requests, _SPARSE_BLOCKS)
    lengths = _lengths(requests, _SPARSE_BLOCKS * BLOCK_TOKENS)
    q = torch.randn(requests, shapes.heads, shapes.dim, device="cuda").bfloat16()
    out, ids = torch.empty_like(q), _random_ids(shapes, requests, _SPARSE_BLOCKS)
    call, scale = modules[1].minimax_m3_sparse_attn_decode, shapes.dim**-0.5
    yield (
        "",
        [partial(call, q, c, ids, table, lengths, shapes.kv_heads, scale, out, 1) for c in caches]
        * 5,
    )


def _flashinfer_select(fi: Any, shapes: Shapes, rows: int, context: int) -> Made:
    tokens = rows + context
    blocks = tokens // BLOCK_TOKENS
    cache = _caches(blocks, _FP8, 1, BLOCK_TOKENS, shapes.dim)[0]
    table, lengths = _table(1, blocks), _lengths(1, tokens)
    starts = torch.tensor([0, rows], device="cuda", dtype=torch.int32)
    q = torch.randn(rows, shapes.kv_heads, shapes.dim, device="cuda").to(_FP8)
    scores = torch.empty(shapes.kv_heads, blocks, rows, device="cuda")

    def score() -> None:
        fi.hopper_msa_proxy_score_prefill(
            q, cache, starts, page_table=table, seqused_k=lengths, per_head=scores,
            max_seqlen_q=rows, batch_size=1,
        )  # fmt: skip

    yield " (score alone)", [score]


def _flashinfer_prefill(fi: Any, shapes: Shapes, rows: int, context: int) -> Made:
    tokens = rows + context
    blocks = tokens // BLOCK_TOKENS
    cache = _caches(blocks, _FP8, shapes.kv_heads, BLOCK_TOKENS, 2 * shapes.dim)[0]
    table, lengths = _table(1, blocks), _lengths(1, tokens)
    starts = torch.tensor([0, rows], device="cuda", dtype=torch.int32)
    q = torch.randn(rows, shapes.heads, shapes.dim, device="cuda").bfloat16()
    out, ids = torch.empty_like(q), _past_ids(shapes, rows, context)

    def call(chosen: Tensor) -> None:
        fi.hopper_msa_sparse_attention(
            q, cache[..., : shapes.dim], cache[..., shapes.dim :], chosen, starts,
            page_table=table, seqused_k=lengths, out=out, softmax_scale=shapes.dim**-0.5,
        )  # fmt: skip

    chosen = _accepted(call, ids.transpose(0, 1).contiguous(), ids)
    yield "", [lambda: call(chosen)]


def _past_ids(shapes: Shapes, rows: int, context: int) -> Tensor:
    """Random blocks of each row's past and its own, ascending, -1 tail: [kv_heads, rows, topk]."""
    current = (context + torch.arange(rows, device="cuda")) // BLOCK_TOKENS
    blocks = (context + rows) // BLOCK_TOKENS
    rank = torch.rand(shapes.kv_heads, rows, blocks, device="cuda")
    ids = torch.arange(blocks, device="cuda")
    rank.masked_fill_(ids >= current[:, None], -1.0)
    rank.scatter_(-1, current.view(1, -1, 1).expand(shapes.kv_heads, -1, 1), 9.0)
    best = rank.topk(shapes.topk, -1)
    found = best.indices.masked_fill(best.values < 0, blocks).sort(-1).values
    return found.masked_fill(found == blocks, -1).int().contiguous()


def _vllm_select(modules: Any, shapes: Shapes, dtype: torch.dtype, rows: int, context: int) -> Made:
    tokens = rows + context
    cache = _caches(tokens // BLOCK_TOKENS, dtype, BLOCK_TOKENS, shapes.dim)[0]
    table, lengths = _table(1, tokens // BLOCK_TOKENS), _lengths(1, tokens)
    starts = torch.tensor([0, rows], device="cuda", dtype=torch.int32)
    before = _lengths(1, context)
    q = torch.randn(rows, shapes.kv_heads, shapes.dim, device="cuda").to(dtype)

    def both() -> None:
        scores = modules[0].minimax_m3_index_score(
            q, cache, table, starts, lengths, before, rows, tokens, shapes.kv_heads
        )
        modules[0].minimax_m3_index_topk(scores, starts, before, rows, shapes.topk, 0, 1)

    yield "", [both]


def _vllm_prefill(
    modules: Any, shapes: Shapes, dtype: torch.dtype, rows: int, context: int
) -> Made:
    tokens = rows + context
    cache = _caches(tokens // BLOCK_TOKENS, dtype, shapes.kv_heads, BLOCK_TOKENS, 2 * shapes.dim)[0]
    table, lengths = _table(1, tokens // BLOCK_TOKENS), _lengths(1, tokens)
    starts = torch.tensor([0, rows], device="cuda", dtype=torch.int32)
    before, ids = _lengths(1, context), _past_ids(shapes, rows, context)
    q = torch.randn(rows, shapes.heads, shapes.dim, device="cuda").bfloat16()
    out = torch.empty_like(q)
    call, scale = modules[1].minimax_m3_sparse_attn, shapes.dim**-0.5
    yield (
        "",
        [
            lambda: call(
                q, cache, ids, table, starts, lengths, before, rows, shapes.kv_heads, scale, out
            )
        ],
    )


_CALLS: dict[str, tuple[Callable[..., Made], Callable[..., Made]]] = {
    "index decode": (_flashinfer_index_decode, _vllm_index_decode),
    "sparse decode": (_flashinfer_sparse_decode, _vllm_sparse_decode),
    "prefill select": (_flashinfer_select, _vllm_select),
    "prefill attention": (_flashinfer_prefill, _vllm_prefill),
}

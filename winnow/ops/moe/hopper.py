"""`moe` on Hopper: NVFP4 experts and an MXFP8 or NVFP4 shared expert, packed for tensor cores.

Owns the four launches for few rows and the choice between them and `hopper_prefill`. Grids depend
on shapes alone, so a CUDA graph may hold a call and be replayed with any routing.
"""

from __future__ import annotations

import ctypes
import math
from dataclasses import replace
from functools import cache
from pathlib import Path

import torch
from torch import Tensor

from winnow.errors import UnsupportedError
from winnow.ops import fragments
from winnow.ops.cuda_build import library
from winnow.ops.fragments_mxfp8 import PackedMxfp8Weight
from winnow.ops.linear import hopper as products
from winnow.ops.mlp import Mlp
from winnow.ops.moe import Moe, hopper_prefill
from winnow.ops.weights import (
    MlpWeights,
    MoeWeights,
    Mxfp8Weight,
    Nvfp4Weight,
    PackedNvfp4Weight,
    Weight,
    shape,
)
from winnow.spec.model import ModelSpec

SOURCES = Path(__file__).parent / "csrc"
MAX_ROWS = 256
"""Of one call of the kernels for few rows."""
PREFILL_ROWS = 8
"""Above so many rows `hopper_prefill` serves what it takes."""
MAX_EXPERTS = 256
MAX_TAKEN = 8
BLOCK = 128
"""Widths are multiples of it."""

_P, _N, _I, _F = ctypes.c_void_p, ctypes.c_int64, ctypes.c_int, ctypes.c_float


class _Stack(ctypes.Structure):
    _fields_ = (("codes", _P), ("scales", _P), ("globals", _P))


class _Shape(ctypes.Structure):
    _fields_ = (
        *(("rows", _I), ("taken", _I), ("experts", _I), ("hidden", _I), ("width", _I)),
        ("shared_width", _I),
    )


class _Numbers(ctypes.Structure):
    _fields_ = (
        *(("routed_scale", _F), ("alpha", _F), ("limit", _F), ("beta", _F)),
        ("hidden_scale", _F),
    )


class _Scratch(ctypes.Structure):
    _fields_ = (
        *(("logits", _P), ("x", _P), ("unscale", _P), ("chunks", _P), ("order", _P)),
        *(("share", _P), ("hidden", _P), ("shared_hidden", _P), ("parts", _P)),
    )


def takes(x: Tensor, weights: MoeWeights, spec: ModelSpec) -> bool:
    """Whether `moe` serves these arguments: bf16 rows, NVFP4 experts, a shared expert in MXFP8 or
    NVFP4, widths that are multiples of 128, a bounded activation."""
    return x.dtype is torch.bfloat16 and servable(weights, spec)


def servable(weights: MoeWeights, spec: ModelSpec) -> bool:
    """`takes` for rows in bf16."""
    experts, width, hidden = spec.num_experts, spec.expert_width, spec.hidden_size
    routed, shared = (weights.gate_up, weights.down), (weights.shared.gate_up, weights.shared.down)
    return (
        all(isinstance(w, Nvfp4Weight | PackedNvfp4Weight) for w in routed)
        and any(
            all(isinstance(w, kinds) for w in shared)
            for kinds in (
                (Nvfp4Weight, PackedNvfp4Weight),
                (Mxfp8Weight, PackedMxfp8Weight),
            )
        )
        and not any(n % BLOCK for n in (hidden, width, shape(weights.shared.down)[-1]))
        and experts <= MAX_EXPERTS
        and spec.experts_per_token <= min(MAX_TAKEN, experts)
        and math.isfinite(spec.swiglu_limit)
    )


def prepare(weights: MoeWeights, spec: ModelSpec) -> MoeWeights:
    """`weights` with their matrices packed IN PLACE, if `moe` serves them with bf16 rows; else
    `weights`. The matrices that were given may not be used afterwards."""
    if not servable(weights, spec):
        return weights
    shared = MlpWeights(_pack(weights.shared.gate_up), _pack(weights.shared.down))
    return replace(weights, gate_up=_pack(weights.gate_up), down=_pack(weights.down), shared=shared)


def moe(mlp: Mlp) -> Moe:
    """The op; `mlp` gives a shared expert's rows in MXFP8 where `hopper_prefill` takes over."""

    def op(x: Tensor, weights: MoeWeights, spec: ModelSpec) -> Tensor:
        """See `winnow.ops.moe.Moe`. Weights that `prepare` has not packed are copied and packed
        at each call, which only tests want. UnsupportedError for what `takes` refuses."""
        if not takes(x, weights, spec):
            raise UnsupportedError(
                "hopper's experts take bf16 rows, NVFP4 experts, a shared expert in MXFP8 or "
                f"NVFP4, widths that are multiples of {BLOCK} and a finite swiglu_limit: use "
                "backend (--backend) cuda"
            )
        stored, weights = weights, prepare(_own(weights), spec)
        if x.shape[0] > PREFILL_ROWS and hopper_prefill.takes(x, weights, spec):
            if hopper_prefill.joins(weights):
                return hopper_prefill.experts(x, weights, None, spec)
            return hopper_prefill.experts(x, weights, lambda: mlp(x, weights.shared, spec), spec)
        early = _matrices(stored) == _matrices(weights)
        parts = [few_rows(part, weights, spec, early) for part in x.split(MAX_ROWS)]
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    op.__module__ = __name__
    return op


def few_rows(x: Tensor, weights: MoeWeights, spec: ModelSpec, early: bool = True) -> Tensor:
    """`moe` for up to MAX_ROWS rows and packed weights; `early` if these were not written by the
    launch ahead of this call, so that they may be read before it has ended."""
    rows, hidden = x.shape
    out = torch.empty(rows, hidden, dtype=x.dtype, device=x.device)
    if not rows:
        return out
    if x.stride(1) != 1 or x.stride(0) % 8 or x.data_ptr() % 16:
        x = x.contiguous()
    taken, experts = spec.experts_per_token, spec.num_experts
    width, shared_width = shape(weights.down)[-1], shape(weights.shared.down)[-1]
    pairs = rows * taken

    def room(dtype: torch.dtype, *size: int) -> Tensor:
        return torch.empty(size, dtype=dtype, device=x.device)

    logits = room(torch.float32, rows, experts)
    converted = room(torch.float16, rows, hidden)
    unscale = room(torch.float32, rows)
    chunks = room(torch.int32, 4 + 4 * (min(experts, pairs) + pairs // 8))
    order, share = room(torch.int32, pairs), room(torch.float32, pairs)
    activated = room(torch.float16, pairs * width)
    shared_activated = room(torch.float16, rows * shared_width)
    parts = room(torch.float32, pairs + rows, hidden)
    multiprocessors = _multiprocessors(x.device)
    stream = torch.cuda.current_stream(x.device).cuda_stream
    error = _score_library().winnow_moe_score(
        x.data_ptr(), x.stride(0), weights.router.data_ptr(), rows, hidden, experts,
        logits.data_ptr(), converted.data_ptr(), unscale.data_ptr(),
        chunks.data_ptr() + chunks.element_size(), early, stream,
    )  # fmt: skip
    if error:
        raise RuntimeError(f"the router did not launch: CUDA error {error}")
    limit, beta = spec.swiglu_limit, spec.swiglu_beta
    error = _decode_library().winnow_moe_decode(
        _stack(weights.gate_up), _stack(weights.down),
        _stack(weights.shared.gate_up), _stack(weights.shared.down),
        weights.router_bias.data_ptr(),
        _Shape(rows, taken, experts, hidden, width, shared_width),
        _Numbers(spec.routed_scale, spec.swiglu_alpha, limit, beta, hidden_scale(limit, beta)),
        _Scratch(
            logits.data_ptr(), converted.data_ptr(), unscale.data_ptr(), chunks.data_ptr(),
            order.data_ptr(), share.data_ptr(), activated.data_ptr(), shared_activated.data_ptr(),
            parts.data_ptr(),
        ),
        out.data_ptr(), multiprocessors, stream,
    )  # fmt: skip
    if error:
        raise RuntimeError(f"the experts did not launch: CUDA error {error}")
    return out


def hidden_scale(limit: float, beta: float) -> float:
    """The power of two that keeps activations, at most limit * (limit + |beta|), below 2^15."""
    return 2.0 ** math.floor(15 - math.log2(max(limit * (limit + abs(beta)), 2.0**-100)))


def _own(weights: MoeWeights) -> MoeWeights:
    """`weights` with copies of the matrices that are not packed yet."""
    shared = weights.shared
    return replace(
        weights,
        gate_up=_copy(weights.gate_up),
        down=_copy(weights.down),
        shared=MlpWeights(_copy(shared.gate_up), _copy(shared.down)),
    )


def _matrices(weights: MoeWeights) -> list[int]:
    """Which objects they are."""
    shared = weights.shared
    held = (weights.gate_up, weights.down, shared.gate_up, shared.down)
    return [id(weight) for weight in held]


def _copy(weight: Weight) -> Weight:
    match weight:
        case Nvfp4Weight(codes, scales, global_scales):
            return Nvfp4Weight(codes.clone(), scales.clone(), global_scales)
        case Mxfp8Weight(codes, scales):
            return Mxfp8Weight(codes.clone(), scales.clone())
    return weight


def _pack(weight: Weight) -> Weight:
    match weight:
        case Nvfp4Weight():
            return fragments.pack(weight)
    return products.prepare(weight)


def _stack(weight: Weight) -> _Stack:
    match weight:
        case PackedNvfp4Weight(codes, scales, global_scales):
            # Read as fp32 [..., N] without strides.
            assert global_scales.is_contiguous()
            return _Stack(codes.data_ptr(), scales.data_ptr(), global_scales.data_ptr())
        case PackedMxfp8Weight(codes, scales):
            return _Stack(codes.data_ptr(), scales.data_ptr(), None)
    raise AssertionError(f"{type(weight).__name__} is not packed")


@cache
def _multiprocessors(device: torch.device) -> int:
    return int(torch.cuda.get_device_properties(device).multi_processor_count)


@cache
def _score_library() -> ctypes.CDLL:
    types = (_P, _N, _P, _I, _I, _I, _P, _P, _P, _P, _I, _P)
    return library(SOURCES / "score.cu", {"winnow_moe_score": types})


@cache
def _decode_library() -> ctypes.CDLL:
    stack, shaped = ctypes.POINTER(_Stack), ctypes.POINTER(_Shape)
    numbers, scratch = ctypes.POINTER(_Numbers), ctypes.POINTER(_Scratch)
    types = (stack, stack, stack, stack, _P, shaped, numbers, scratch, _P, _I, _P)
    return library(SOURCES / "decode.cu", {"winnow_moe_decode": types})

"""The experts of `moe` for many rows on Hopper: checks what the kernels take, and launches them.

Owns the limits, the scratch memory and the order of launches; csrc/prefill.cu multiplies,
csrc/prefill_rows.cu routes, orders, copies and adds. Nothing is read back from the device: grids
depend on shapes alone, so a call can be captured in a CUDA graph and replayed with any routing. The
same rows give the same bits in every call.
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import torch
from torch import Tensor

from winnow.errors import UnsupportedError
from winnow.ops.cuda_build import library
from winnow.ops.weights import MoeWeights, PackedNvfp4Weight, Weight
from winnow.spec.model import ModelSpec

_CSRC = Path(__file__).parent / "csrc"
PRODUCTS, ROWS = _CSRC / "prefill.cu", _CSRC / "prefill_rows.cu"

MAX_EXPERTS = 256
MAX_TAKEN = 8
MAX_COLUMNS = 32768
_COLUMNS = 128
"""Widths are multiples of it."""
_MAX_ROWS = 128
"""Rows of an item."""
_SHAPE_ROWS = (20.0, 50.0, 68.0)
"""Up to so many rows an expert, on average, each but the last of the kernel's shapes serves. Even
routing would want the first up to 26, uneven routing less."""
_LARGEST = 2.0**15
"""Hidden values are brought below this, within fp16."""
_CODE_SCALE = 2.0**14
"""What a product with an unpacked code is multiplied by."""

_P, _N, _I, _F = ctypes.c_void_p, ctypes.c_int64, ctypes.c_int, ctypes.c_float
_PRODUCTS = {
    "winnow_moe_prefill": (
        *(_P, _P, _P, _P, _P, _P),
        *(_P, _P, _P, _P, _P, _P, _P),
        *(_I, _I, _I, _I, _I, _F, _F, _F, _F, _F, _I, _P),
    ),
}
_ROWS = {
    "winnow_moe_split": (_P, _P, _I, _P),
    "winnow_moe_choose": (_P, _P, _I, _I, _I, _F, _P, _P, _P),
    "winnow_moe_order": (_P, _I, _I, _P, _P, _P, _P, _P),
    "winnow_moe_gather": (_P, _N, _I, _I, _P, _I, _I, _P, _P, _P),
    "winnow_moe_combine": (_P, _I, _P, _P, _I, _P, _I, _I, _P, _P),
}


@cache
def _products() -> ctypes.CDLL:
    return library(PRODUCTS, _PRODUCTS)


@cache
def _rows() -> ctypes.CDLL:
    return library(ROWS, _ROWS)


@dataclass(frozen=True)
class Order:
    """The pairs of rows and chosen experts, by expert. `shares` fp32 and `places` int32 [rows,
    taken]: a pair's weight, and where its row lies; `starts` and `counts` int32 [experts]: each
    expert's first place, a multiple of 8, and how many it has; `next` int32 [1 + experts], zeros:
    counters of work; `capacity`: places that there are, gaps included."""

    shares: Tensor
    places: Tensor
    starts: Tensor
    counts: Tensor
    next: Tensor
    capacity: int


def experts(
    x: Tensor, weights: MoeWeights, shared: Callable[[], Tensor], spec: ModelSpec
) -> Tensor:
    """See `winnow.ops.moe.Moe`; `shared` gives the shared expert's output for x, [rows, hidden]
    bf16 contiguous, which is added. Gate, up and down are `PackedNvfp4Weight`. UnsupportedError
    for what the kernels do not take.

    Rows are routed, copied and multiplied on a stream that goes before the caller's, on which the
    shared expert runs: beside routing, and on what multiprocessors the products leave. Scratch: 16
    bits for every pair's row and hidden values, 604 MB for 8,192 rows of MiniMax-M3.
    """
    refusal = _refusal(x, weights, spec)
    if refusal is not None:
        raise UnsupportedError(refusal)
    if not x.shape[0]:
        return torch.empty_like(x)
    if x.stride(1) != 1 or x.stride(0) % 8 or x.data_ptr() % 16:
        x = x.contiguous()
    capacity = _capacity(x.shape[0] * spec.experts_per_token, spec)
    # Large scratch belongs to the caller's stream, whose allocations can take its place later.
    slabs, hidden = (_slabs(n, capacity, x.device) for n in (spec.hidden_size, spec.expert_width))
    main, side = torch.cuda.current_stream(x.device), _side_stream(x.device)
    # Also keeps what an earlier call left on `side` until the caller's stream has used it.
    side.wait_stream(main)
    with torch.cuda.stream(side):
        found = order(*route(x, weights, spec), spec)
        factors = gather(x, found, spec, slabs)
    added = shared()
    parts = slabs  # an expert's rows have been read when its parts are written
    with torch.cuda.stream(side):
        multiply(slabs, factors, weights, hidden, parts, found, spec)
    main.wait_stream(side)
    return combine(parts, found, added, spec)


def takes(x: Tensor, weights: MoeWeights, spec: ModelSpec) -> bool:
    """Whether the kernels serve these arguments."""
    return _refusal(x, weights, spec) is None


def route(x: Tensor, weights: MoeWeights, spec: ModelSpec) -> tuple[Tensor, Tensor]:
    """Chosen experts int32 and their shares fp32 [rows, taken], in the order of choice.

    The router's fp32 numbers are three bf16 numbers each, so that products with bf16 rows are
    exact on tensor cores; their sums are fp32.
    """
    rows, count, taken = x.shape[0], spec.num_experts, spec.experts_per_token
    stream = torch.cuda.current_stream(x.device).cuda_stream
    router, bias = weights.router.contiguous(), weights.router_bias.contiguous()
    split = torch.empty(3 * count, spec.hidden_size, dtype=torch.bfloat16, device=x.device)
    error = _rows().winnow_moe_split(router.data_ptr(), split.data_ptr(), router.numel(), stream)
    torch.cuda.check_error(error)
    logits = torch.mm(x, split.T, out_dtype=torch.float32)
    chosen = torch.empty(rows, taken, dtype=torch.int32, device=x.device)
    shares = torch.empty(rows, taken, dtype=torch.float32, device=x.device)
    error = _rows().winnow_moe_choose(
        logits.data_ptr(), bias.data_ptr(), rows, count, taken, spec.routed_scale,
        chosen.data_ptr(), shares.data_ptr(), stream,
    )  # fmt: skip
    torch.cuda.check_error(error)
    return chosen, shares


def order(chosen: Tensor, shares: Tensor, spec: ModelSpec) -> Order:
    """Places of the pairs of `chosen` [rows, taken]."""
    pairs, count = chosen.numel(), spec.num_experts
    places = torch.empty_like(chosen)
    numbers = torch.empty(2, count, dtype=torch.int32, device=chosen.device)
    next_ = numbers.new_empty(1 + count)
    found = Order(shares, places, numbers[0], numbers[1], next_, _capacity(pairs, spec))
    error = _rows().winnow_moe_order(
        chosen.data_ptr(), pairs, count, found.starts.data_ptr(), found.counts.data_ptr(),
        places.data_ptr(), found.next.data_ptr(),
        torch.cuda.current_stream(chosen.device).cuda_stream,
    )  # fmt: skip
    torch.cuda.check_error(error)
    return found


def gather(x: Tensor, found: Order, spec: ModelSpec, slabs: Tensor) -> Tensor:
    """Writes the rows of x as fp16 at their places into `slabs`; gives the factors fp32 [capacity]
    that undo their powers of two."""
    factors = torch.empty(found.capacity, dtype=torch.float32, device=x.device)
    error = _rows().winnow_moe_gather(
        x.data_ptr(), x.stride(0), x.shape[0], spec.hidden_size, found.places.data_ptr(),
        spec.experts_per_token, found.capacity, slabs.data_ptr(), factors.data_ptr(),
        torch.cuda.current_stream(x.device).cuda_stream,
    )  # fmt: skip
    torch.cuda.check_error(error)
    return factors


def multiply(
    rows: Tensor,
    factors: Tensor,
    weights: MoeWeights,
    hidden: Tensor,
    parts: Tensor,
    found: Order,
    spec: ModelSpec,
    shape: int | None = None,
) -> None:
    """Every place's row through its expert: into `hidden` the activated values of gate and up,
    fp16, and into `parts`, which may be `rows`, what down gives of them, bf16. `shape`: which of
    the kernel's, 0 to 3, by default what suits the number of rows; it changes no result."""
    gate_up, down = weights.gate_up, weights.down
    assert isinstance(gate_up, PackedNvfp4Weight)
    assert isinstance(down, PackedNvfp4Weight)
    held = [t for w in (gate_up, down) for t in (w.codes, w.scales, w.global_scales)]
    # Kernels see addresses and widths only.
    assert all(t.is_contiguous() for t in held)
    shape = _shape(found.places.numel() / spec.num_experts) if shape is None else shape
    factor = _hidden_factor(spec)
    error = _products().winnow_moe_prefill(
        *(t.data_ptr() for t in held),
        rows.data_ptr(), hidden.data_ptr(), parts.data_ptr(), found.starts.data_ptr(),
        found.counts.data_ptr(), factors.data_ptr(), found.next.data_ptr(), shape,
        spec.num_experts, spec.hidden_size, spec.expert_width, found.capacity,
        spec.swiglu_alpha, spec.swiglu_limit, spec.swiglu_beta, factor, _CODE_SCALE / factor,
        torch.cuda.get_device_properties(rows.device).multi_processor_count,
        torch.cuda.current_stream(rows.device).cuda_stream,
    )  # fmt: skip
    torch.cuda.check_error(error)


def combine(parts: Tensor, found: Order, shared: Tensor, spec: ModelSpec) -> Tensor:
    """Each row's parts by their shares, plus `shared`."""
    out = torch.empty_like(shared)
    error = _rows().winnow_moe_combine(
        parts.data_ptr(), found.capacity, found.places.data_ptr(), found.shares.data_ptr(),
        spec.experts_per_token, shared.data_ptr(), shared.shape[0], spec.hidden_size,
        out.data_ptr(), torch.cuda.current_stream(shared.device).cuda_stream,
    )  # fmt: skip
    torch.cuda.check_error(error)
    return out


def _capacity(pairs: int, spec: ModelSpec) -> int:
    """Places for so many pairs: with gaps, and what a tile may read past an expert's last one."""
    return -(-(pairs + 8 * spec.num_experts + _MAX_ROWS) // 8) * 8


def _slabs(columns: int, capacity: int, device: torch.device) -> Tensor:
    """Room for a 16-bit number a column and place, in slabs of 64 columns."""
    return torch.empty(columns // 64, capacity, 128, dtype=torch.uint8, device=device)


@cache
def _side_stream(device: torch.device) -> torch.cuda.Stream:
    """Goes before the caller's."""
    return torch.cuda.Stream(device, priority=-1)


def _shape(rows: float) -> int:
    """Of the kernel for so many rows an expert, on average: see csrc/prefill.cu."""
    return sum(rows > most for most in _SHAPE_ROWS)


def _hidden_factor(spec: ModelSpec) -> float:
    """The power of two that brings the largest possible hidden value just below `_LARGEST`."""
    # g * sigmoid(alpha * g) is at most g, and at least -0.2785 / alpha.
    gate = max(spec.swiglu_limit, 0.28 / spec.swiglu_alpha)
    bound = gate * (spec.swiglu_limit + abs(spec.swiglu_beta))
    return 2.0 ** math.floor(math.log2(_LARGEST / bound))


def _refusal(x: Tensor, weights: MoeWeights, spec: ModelSpec) -> str | None:
    """What the kernels do not take of these, in one sentence."""
    if x.dtype is not torch.bfloat16:
        return f"the hopper backend's experts take bf16 rows, not {x.dtype}"
    packed: tuple[Weight, ...] = (weights.gate_up, weights.down)
    if not all(isinstance(w, PackedNvfp4Weight) for w in packed):
        return "the hopper backend's experts take packed NVFP4 weights"
    for what, given, step, most in (
        ("a hidden size", spec.hidden_size, _COLUMNS, MAX_COLUMNS),
        ("an expert width", spec.expert_width, _COLUMNS, MAX_COLUMNS),
        ("a number of experts", spec.num_experts, 1, MAX_EXPERTS),
        ("experts a token", spec.experts_per_token, 1, MAX_TAKEN),
    ):
        if given % step or given > most:
            return (
                f"the hopper backend's experts take {what} of a multiple of {step} up to {most}, "
                f"not {given}"
            )
    if not (0 < spec.swiglu_limit <= 128 and spec.swiglu_alpha > 0 and abs(spec.swiglu_beta) <= 64):
        return (
            "the hopper backend's experts need a limit of the activation of at most 128, not "
            f"{spec.swiglu_limit}: hidden values must fit fp16"
        )
    return None

"""The experts of `moe` for many rows on Hopper: checks what the kernels take, and launches them.

Owns the limits, the scratch memory and the order of launches; csrc/prefill.cu multiplies,
csrc/route.cu chooses, csrc/prefill_rows.cu orders, copies and adds. Nothing is read back from the
device: grids depend on shapes alone, so a call can be captured in a CUDA graph and replayed with
any routing. What the routed experts give a row depends on that row alone, to the bit; where the
shared expert is one of them, so does all of it.
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
from winnow.ops.weights import MoeWeights, PackedNvfp4Weight, Weight, shape
from winnow.spec.model import ModelSpec

_CSRC = Path(__file__).parent / "csrc"
PRODUCTS, ROUTE, ROWS = _CSRC / "prefill.cu", _CSRC / "route.cu", _CSRC / "prefill_rows.cu"

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
_ROUTE_ROWS = (64, 512)
"""Up to so many rows a cluster of 16 CTAs that the device holds at a time, each but the last of the
router's forms serves: these clusters, for 64 rows; of 8 for 128; of 2 for 128."""
_PLACED_ROWS = 256
"""Up to so many rows are ordered and copied in one launch."""
_LARGEST = 2.0**15
"""Hidden values are brought below this, within fp16."""
_CODE_SCALE = 2.0**14
"""What a product with an unpacked code is multiplied by."""

_P, _N, _I, _F = ctypes.c_void_p, ctypes.c_int64, ctypes.c_int, ctypes.c_float
_PRODUCTS = {
    "winnow_moe_prefill": (
        *(_P, _P, _P, _P, _P, _P, _P, _P),
        *(_I, _I, _I, _I, _I, _I, _F, _F, _F, _F, _F, _I, _P),
    ),
}
_ROUTE = {
    "winnow_moe_route": (
        *(_P, _N, _P, _P),
        *(_I, _I, _I, _I, _I, _F, _I, _P, _P, _P),
    ),
    "winnow_moe_route_clusters": (_I, ctypes.POINTER(_I)),
}
_ROWS = {
    "winnow_moe_order": (_P, _I, _I, _P, _P, _P, _P, _P),
    "winnow_moe_gather": (_P, _N, _I, _I, _P, _I, _I, _P, _P, _P),
    "winnow_moe_place": (_P, _N, _I, _I, _P, _I, _I, _I, _P, _P, _P, _P, _P, _P, _P),
    "winnow_moe_combine": (_P, _I, _P, _P, _I, _P, _I, _I, _P, _P),
}


class _Stack(ctypes.Structure):
    _fields_ = (("codes", _P), ("scales", _P), ("globals", _P))


@cache
def _products() -> ctypes.CDLL:
    return library(PRODUCTS, _PRODUCTS)


@cache
def _route() -> ctypes.CDLL:
    return library(ROUTE, _ROUTE)


@cache
def _rows() -> ctypes.CDLL:
    return library(ROWS, _ROWS)


@dataclass(frozen=True)
class Order:
    """The pairs of rows and the experts they visit, by expert; a shared expert may be one more,
    the last of every row and of all experts. `shares` fp32 and `places` int32 [rows, slots]: a
    pair's weight, and where its row lies; `starts` and `counts` int32 [experts]: each expert's
    first place, a multiple of 8, and how many it has; `next` int32 [1 + experts], zeros: counters
    of work; `capacity`: places that there are, gaps included."""

    shares: Tensor
    places: Tensor
    starts: Tensor
    counts: Tensor
    next: Tensor
    capacity: int


def experts(
    x: Tensor, weights: MoeWeights, shared: Callable[[], Tensor] | None, spec: ModelSpec
) -> Tensor:
    """See `winnow.ops.moe.Moe`. Gate, up and down are `PackedNvfp4Weight`; so are the shared
    expert's, which is then one more expert that all rows visit, or `shared` gives its output for x,
    [rows, hidden] bf16 contiguous. UnsupportedError for what the kernels do not take.

    Rows are routed, copied and multiplied on a stream that goes before the caller's, on which
    `shared` runs: beside routing, and on what multiprocessors the products leave. Scratch: 16 bits
    for every pair's row and hidden values, 604 MB for 8,192 rows of MiniMax-M3, 755 MB with the
    shared expert among the others.
    """
    refusal = _refusal(x, weights, spec, joined=shared is None)
    if refusal is not None:
        raise UnsupportedError(refusal)
    if not x.shape[0]:
        return torch.empty_like(x)
    if x.stride(1) != 1 or x.stride(0) % 8 or x.data_ptr() % 16:
        x = x.contiguous()
    slots = spec.experts_per_token + (shared is None)
    capacity = _capacity(x.shape[0], slots, spec)
    width = max(spec.expert_width, 0 if shared else shape(weights.shared.down)[-1])
    # Large scratch belongs to the caller's stream, whose allocations can take its place later.
    slabs, hidden = (_slabs(n, capacity, x.device) for n in (spec.hidden_size, width))
    main, side = torch.cuda.current_stream(x.device), _side_stream(x.device)
    side.wait_stream(main)
    try:
        with torch.cuda.stream(side):
            chosen, shares = route(x, weights, spec, slots)
            if x.shape[0] <= _PLACED_ROWS:
                found, factors = place(x, chosen, shares, spec, slabs)
            else:
                found = order(chosen, shares, spec)
                factors = gather(x, found, spec, slabs)
        added = None if shared is None else shared()
        parts = slabs  # an expert's rows have been read when its parts are written
        with torch.cuda.stream(side):
            multiply(slabs, factors, weights, hidden, parts, found, spec)
    finally:
        # Where one of these failed, too: `side` may still write what belongs to the caller's.
        main.wait_stream(side)
    # These belong to `side`, and the next call's stream, which it waits for, may be another one.
    # Calls of one graph are captured on one stream.
    if not torch.cuda.is_current_stream_capturing():
        for used in (found.places, found.shares):
            used.record_stream(main)
    return combine(parts, found, added, spec)


def takes(x: Tensor, weights: MoeWeights, spec: ModelSpec) -> bool:
    """Whether the kernels serve these arguments."""
    return _refusal(x, weights, spec, joined=joins(weights)) is None


def joins(weights: MoeWeights) -> bool:
    """Whether the shared expert can be one more of the experts."""
    return isinstance(weights.shared.gate_up, PackedNvfp4Weight)


def route(
    x: Tensor,
    weights: MoeWeights,
    spec: ModelSpec,
    slots: int | None = None,
    form: int | None = None,
) -> tuple[Tensor, Tensor]:
    """Chosen experts int32 and their shares fp32 [rows, slots], in the order of choice; with one
    slot more than experts are taken, the last is the number of experts, with a share of 1.
    `form`: which of the kernel's, 0 to 2, by default what suits the number of rows; it changes no
    result.

    The router's fp32 numbers are three bf16 numbers each, so that products with bf16 rows are
    exact on tensor cores; their sums are fp32.
    """
    rows, count, taken = x.shape[0], spec.num_experts, spec.experts_per_token
    slots = taken if slots is None else slots
    if form is None:
        clusters = _clusters(x.device, count)
        form = sum(rows > most * clusters for most in _ROUTE_ROWS)
    router, bias = weights.router.contiguous(), weights.router_bias.contiguous()
    chosen = torch.empty(rows, slots, dtype=torch.int32, device=x.device)
    shares = torch.empty(rows, slots, dtype=torch.float32, device=x.device)
    error = _route().winnow_moe_route(
        x.data_ptr(), x.stride(0), router.data_ptr(), bias.data_ptr(), rows, spec.hidden_size,
        count, taken, slots, spec.routed_scale, form, chosen.data_ptr(), shares.data_ptr(),
        torch.cuda.current_stream(x.device).cuda_stream,
    )  # fmt: skip
    torch.cuda.check_error(error)
    return chosen, shares


def order(chosen: Tensor, shares: Tensor, spec: ModelSpec) -> Order:
    """Places of the pairs of `chosen` [rows, slots]."""
    found = _unordered(chosen, shares, spec)
    error = _rows().winnow_moe_order(
        chosen.data_ptr(), chosen.numel(), found.counts.numel(), found.starts.data_ptr(),
        found.counts.data_ptr(), found.places.data_ptr(), found.next.data_ptr(),
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
        found.places.shape[1], found.capacity, slabs.data_ptr(), factors.data_ptr(),
        torch.cuda.current_stream(x.device).cuda_stream,
    )  # fmt: skip
    torch.cuda.check_error(error)
    return factors


def place(
    x: Tensor, chosen: Tensor, shares: Tensor, spec: ModelSpec, slabs: Tensor
) -> tuple[Order, Tensor]:
    """`order` and `gather` of few rows in one launch, to the same bits."""
    found = _unordered(chosen, shares, spec)
    factors = torch.empty(found.capacity, dtype=torch.float32, device=x.device)
    error = _rows().winnow_moe_place(
        x.data_ptr(), x.stride(0), x.shape[0], spec.hidden_size, chosen.data_ptr(),
        chosen.shape[1], found.counts.numel(), found.capacity, found.starts.data_ptr(),
        found.counts.data_ptr(), found.places.data_ptr(), found.next.data_ptr(),
        slabs.data_ptr(), factors.data_ptr(), torch.cuda.current_stream(x.device).cuda_stream,
    )  # fmt: skip
    torch.cuda.check_error(error)
    return found, factors


def multiply(
    rows: Tensor,
    factors: Tensor,
    weights: MoeWeights,
    hidden: Tensor,
    parts: Tensor,
    found: Order,
    spec: ModelSpec,
    form: int | None = None,
) -> None:
    """Every place's row through its expert: into `hidden` the activated values of gate and up,
    fp16, and into `parts`, which may be `rows`, what down gives of them, bf16. `form`: which of
    the kernel's shapes, 0 to 3, by default what suits the number of rows; it changes no result."""
    count, slots = found.places.shape
    joined = slots > spec.experts_per_token
    stacks = [weights.gate_up, weights.down]
    if joined:
        stacks += [weights.shared.gate_up, weights.shared.down]
    if form is None:
        form = _form(count * spec.experts_per_token / spec.num_experts)
    factor = _hidden_factor(spec)
    error = _products().winnow_moe_prefill(
        (_Stack * len(stacks))(*map(_stack, stacks)),
        rows.data_ptr(), hidden.data_ptr(), parts.data_ptr(), found.starts.data_ptr(),
        found.counts.data_ptr(), factors.data_ptr(), found.next.data_ptr(), form,
        spec.num_experts, spec.hidden_size, spec.expert_width,
        shape(weights.shared.down)[-1] if joined else 0, found.capacity,
        spec.swiglu_alpha, spec.swiglu_limit, spec.swiglu_beta, factor, _CODE_SCALE / factor,
        torch.cuda.get_device_properties(rows.device).multi_processor_count,
        torch.cuda.current_stream(rows.device).cuda_stream,
    )  # fmt: skip
    torch.cuda.check_error(error)


def combine(parts: Tensor, found: Order, added: Tensor | None, spec: ModelSpec) -> Tensor:
    """Each row's parts by their shares, plus `added`, bf16 [rows, hidden]."""
    rows, slots = found.places.shape
    out = torch.empty(rows, spec.hidden_size, dtype=torch.bfloat16, device=parts.device)
    error = _rows().winnow_moe_combine(
        parts.data_ptr(), found.capacity, found.places.data_ptr(), found.shares.data_ptr(), slots,
        None if added is None else added.data_ptr(), rows, spec.hidden_size, out.data_ptr(),
        torch.cuda.current_stream(parts.device).cuda_stream,
    )  # fmt: skip
    torch.cuda.check_error(error)
    return out


def _unordered(chosen: Tensor, shares: Tensor, spec: ModelSpec) -> Order:
    """Memory for the order of `chosen`."""
    rows, slots = chosen.shape
    numbers = torch.empty(3, _count(slots, spec) + 1, dtype=torch.int32, device=chosen.device)
    starts, counts, next_ = numbers[0, :-1], numbers[1, :-1], numbers[2]
    capacity = _capacity(rows, slots, spec)
    return Order(shares, torch.empty_like(chosen), starts, counts, next_, capacity)


def _count(slots: int, spec: ModelSpec) -> int:
    """Experts that there are where a row visits so many."""
    return spec.num_experts + slots - spec.experts_per_token


def _capacity(rows: int, slots: int, spec: ModelSpec) -> int:
    """Places for so many pairs: with gaps, and what a tile may read past an expert's last one."""
    return -(-(rows * slots + 8 * _count(slots, spec) + _MAX_ROWS) // 8) * 8


def _stack(weight: Weight) -> _Stack:
    assert isinstance(weight, PackedNvfp4Weight)
    held = (weight.codes, weight.scales, weight.global_scales)
    # Kernels see addresses and widths only.
    assert all(t.is_contiguous() for t in held)
    return _Stack(*(t.data_ptr() for t in held))


@cache
def _clusters(device: torch.device, experts: int) -> int:
    """How many of the router's clusters of 16 CTAs the device holds at a time: none where its parts
    have fewer multiprocessors than that."""
    found = ctypes.c_int()
    with torch.cuda.device(device):
        error = _route().winnow_moe_route_clusters(experts, ctypes.byref(found))
    torch.cuda.check_error(error)
    return found.value


def _slabs(columns: int, capacity: int, device: torch.device) -> Tensor:
    """Room for a 16-bit number a column and place, in slabs of 64 columns."""
    return torch.empty(columns // 64, capacity, 128, dtype=torch.uint8, device=device)


@cache
def _side_stream(device: torch.device) -> torch.cuda.Stream:
    """Goes before the caller's."""
    return torch.cuda.Stream(device, priority=-1)


def _form(rows: float) -> int:
    """Shape of the kernel for so many rows an expert, on average: see csrc/prefill.cu."""
    return sum(rows > most for most in _SHAPE_ROWS)


def _hidden_factor(spec: ModelSpec) -> float:
    """The power of two that brings the largest possible hidden value just below `_LARGEST`."""
    # g * sigmoid(alpha * g) is at most g, and at least -0.2785 / alpha.
    gate = max(spec.swiglu_limit, 0.28 / spec.swiglu_alpha)
    bound = gate * (spec.swiglu_limit + abs(spec.swiglu_beta))
    return 2.0 ** math.floor(math.log2(_LARGEST / bound))


def _refusal(x: Tensor, weights: MoeWeights, spec: ModelSpec, *, joined: bool) -> str | None:
    """What the kernels do not take of these, in one sentence. `joined`: the shared expert is one
    of theirs."""
    if x.dtype is not torch.bfloat16:
        return f"the hopper backend's experts take bf16 rows, not {x.dtype}"
    packed: tuple[Weight, ...] = (weights.gate_up, weights.down)
    if joined:
        packed += (weights.shared.gate_up, weights.shared.down)
    if not all(isinstance(w, PackedNvfp4Weight) for w in packed):
        return "the hopper backend's experts take packed NVFP4 weights"
    shared_width = shape(weights.shared.down)[-1] if joined else _COLUMNS
    for what, given, step, most in (
        ("a hidden size", spec.hidden_size, _COLUMNS, MAX_COLUMNS),
        ("an expert width", spec.expert_width, _COLUMNS, MAX_COLUMNS),
        ("a shared width", shared_width, _COLUMNS, MAX_COLUMNS),
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

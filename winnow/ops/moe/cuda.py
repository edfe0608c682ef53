"""`moe` on a GPU: route, order the pairs by expert, two grouped products, one weighted sum.

Grids depend on shapes alone, so a call can be captured in a CUDA graph and replayed with any
routing. A row's sum is taken in the order of its choices, whatever the other rows chose.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from winnow.ops.mlp.cuda import activated, mlp
from winnow.ops.moe.routing import Routes, route
from winnow.ops.triton_codec import round_to
from winnow.ops.triton_product import Held, held, tile_product, tile_sizes
from winnow.ops.weights import MoeWeights
from winnow.spec.model import ModelSpec

_BLOCK = 1024


def moe(x: Tensor, weights: MoeWeights, spec: ModelSpec) -> Tensor:
    """See `winnow.ops.moe.Moe`."""
    shared = mlp(x, weights.shared, spec)
    rows, taken = x.shape[0], spec.experts_per_token
    if not rows:
        return shared
    if x.stride(1) != 1:
        x = x.contiguous()
    routes = route(x, weights, spec)
    pairs = rows * taken
    hidden = torch.empty(pairs, spec.expert_width, dtype=x.dtype, device=x.device)
    parts = torch.empty(pairs, spec.hidden_size, dtype=x.dtype, device=x.device)
    limits = (spec.swiglu_alpha, spec.swiglu_limit, spec.swiglu_beta)
    _grouped(_gate_up, x, held(weights.gate_up), hidden, routes, limits, spec)
    _grouped(_down, hidden, held(weights.down), parts, routes, (), spec)
    out = torch.empty_like(shared)
    _combine[(rows, triton.cdiv(spec.hidden_size, _BLOCK))](
        parts, routes.share, shared, out, WIDTH=spec.hidden_size, TAKEN=taken, BLOCK=_BLOCK
    )
    return out


def _grouped(
    kernel: triton.JITFunction,
    x: Tensor,
    w: Held,
    out: Tensor,
    routes: Routes,
    numbers: tuple[float, ...],
    spec: ModelSpec,
) -> None:
    """Launch a grouped product over as many tiles as the least even routing needs."""
    pairs, width = out.shape
    sizes = tile_sizes(pairs // spec.num_experts, x.dtype)
    tiles = pairs // sizes["BM"] + min(pairs, spec.num_experts)
    kernel[(tiles, triton.cdiv(width, sizes["BN"]))](
        x, w.codes, w.scales, w.global_scales, out, routes.order, routes.starts, routes.counts,
        x.stride(0), *numbers, KIND=w.kind, N=width, K=x.shape[1], TAKEN=spec.experts_per_token,
        EXPERTS=spec.num_experts, LANES=triton.next_power_of_2(spec.num_experts), **sizes,
    )  # fmt: skip


@triton.jit
def _tile(starts_ptr, counts_ptr, BM: tl.constexpr, EXPERTS: tl.constexpr, LANES: tl.constexpr):
    """The expert of this program's tile, EXPERTS if there is no such tile; the places [BM] of its
    pairs in `order`, and which of them the tile has."""
    lane = tl.arange(0, LANES)
    counts = tl.load(counts_ptr + lane, mask=lane < EXPERTS, other=0)
    tiles = (counts + BM - 1) // BM
    ends = tl.cumsum(tiles, 0)
    tile = tl.program_id(0)
    expert = tl.sum((ends <= tile).to(tl.int32), 0)
    expert = tl.minimum(expert, EXPERTS)
    here = lane == expert
    first = tl.sum(tl.where(here, ends - tiles, 0), 0)
    count = tl.sum(tl.where(here, counts, 0), 0)
    start = tl.load(starts_ptr + expert, mask=expert < EXPERTS, other=0)
    within = (tile - first) * BM + tl.arange(0, BM)
    return expert, start + within, within < count


@triton.jit
def _gate_up(
    x_ptr, codes_ptr, scales_ptr, global_ptr, out_ptr, order_ptr, starts_ptr, counts_ptr,
    x_stride, alpha, limit, beta,
    KIND: tl.constexpr, N: tl.constexpr, K: tl.constexpr, TAKEN: tl.constexpr,
    EXPERTS: tl.constexpr, LANES: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """The activated rows of every pair, [pairs, N] in the order of the experts."""
    expert, place, inside = _tile(starts_ptr, counts_ptr, BM, EXPERTS, LANES)
    if expert >= EXPERTS:
        return
    x_row = (tl.load(order_ptr + place, mask=inside, other=0) // TAKEN).to(tl.int64)
    column = tl.program_id(1) * BN + tl.arange(0, BN)
    gate = tile_product(
        x_ptr, x_row, inside, x_stride, codes_ptr, scales_ptr, global_ptr,
        2 * expert, column, KIND, N, K, BM, BN, BK,
    )  # fmt: skip
    up = tile_product(
        x_ptr, x_row, inside, x_stride, codes_ptr, scales_ptr, global_ptr,
        2 * expert + 1, column, KIND, N, K, BM, BN, BK,
    )  # fmt: skip
    out = round_to(activated(gate, up, alpha, limit, beta), out_ptr.dtype.element_ty)
    at = place.to(tl.int64)[:, None] * N + column[None, :]
    tl.store(out_ptr + at, out, mask=inside[:, None] & (column < N)[None, :])


@triton.jit
def _down(
    x_ptr, codes_ptr, scales_ptr, global_ptr, out_ptr, order_ptr, starts_ptr, counts_ptr,
    x_stride,
    KIND: tl.constexpr, N: tl.constexpr, K: tl.constexpr, TAKEN: tl.constexpr,
    EXPERTS: tl.constexpr, LANES: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """What each pair's expert gives, [pairs, N] in the order of the pairs."""
    expert, place, inside = _tile(starts_ptr, counts_ptr, BM, EXPERTS, LANES)
    if expert >= EXPERTS:
        return
    pair = tl.load(order_ptr + place, mask=inside, other=0).to(tl.int64)
    column = tl.program_id(1) * BN + tl.arange(0, BN)
    total = tile_product(
        x_ptr, place.to(tl.int64), inside, x_stride, codes_ptr, scales_ptr, global_ptr,
        expert, column, KIND, N, K, BM, BN, BK,
    )  # fmt: skip
    out = round_to(total, out_ptr.dtype.element_ty)
    mask = inside[:, None] & (column < N)[None, :]
    tl.store(out_ptr + pair[:, None] * N + column[None, :], out, mask=mask)


@triton.jit
def _combine(
    parts_ptr, share_ptr, shared_ptr, out_ptr,
    WIDTH: tl.constexpr, TAKEN: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < WIDTH
    total = tl.zeros((BLOCK,), tl.float32)
    for choice in tl.static_range(TAKEN):
        pair = row * TAKEN + choice
        part = tl.load(parts_ptr + pair * WIDTH + column, mask=inside, other=0.0)
        total += tl.load(share_ptr + pair) * part.to(tl.float32)
    total += tl.load(shared_ptr + row * WIDTH + column, mask=inside, other=0.0).to(tl.float32)
    out = round_to(total, out_ptr.dtype.element_ty)
    tl.store(out_ptr + row * WIDTH + column, out, mask=inside)

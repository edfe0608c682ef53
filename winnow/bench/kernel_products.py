"""Workloads of `winnow bench kernels`: projections, what follows them, and experts.

Owns their costs and checks. Knows nothing of clocks, records or peers.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch

from winnow.bench.kernel_attention import prefill_batch
from winnow.bench.kernel_state import (
    BF16_TOLERANCE,
    CALLS,
    FEW_ROWS,
    L2_BYTES,
    Checked,
    Ready,
    State,
    mxfp8,
    sampled,
)
from winnow.ops.attention_inputs.reference import rope_tables, rotate
from winnow.ops.case import error
from winnow.ops.linear.reference import dequantise
from winnow.ops.mlp.reference import mlp
from winnow.ops.moe.reference import route
from winnow.ops.norm.reference import norm
from winnow.ops.table import Kernels
from winnow.ops.weights import AttentionWeights, MlpWeights, Weight, expert, tensors
from winnow.spec.model import BLOCK_TOKENS


def _nbytes(weight: Weight) -> int:
    return sum(t.nbytes for t in tensors(weight))


def linear(rows: int, n: int, k: int) -> Callable[[Kernels, State], Ready]:
    def make(kernels: Kernels, state: State) -> Ready:
        copies = 2 + L2_BYTES // (n * k)
        held = [state.prepare_matrix(kernels, mxfp8(n, k)) for _ in range(copies)]
        x = torch.randn(rows, k, device="cuda").bfloat16()
        calls = [partial(kernels.linear, x, weight) for weight in held]

        def check() -> Checked:
            picked = list(sampled(rows))
            want = x[picked].float() @ dequantise(held[0], torch.bfloat16).float().T
            return Checked(error(calls[0]()[picked], want.bfloat16()), BF16_TOLERANCE)

        times = CALLS if rows <= FEW_ROWS else copies
        moved = _nbytes(held[0]) + 2 * rows * (n + k)
        return Ready(calls * -(-times // copies), check, moved, 2 * rows * n * k)

    return make


def inputs(rows: int) -> Callable[[Kernels, State], Ready]:
    def make(kernels: Kernels, state: State) -> Ready:
        spec = state.spec
        qkv = mxfp8((spec.num_heads + 2 * spec.num_kv_heads) * spec.head_dim, spec.hidden_size)
        index = mxfp8((spec.num_index_heads + 1) * spec.index_dim, spec.hidden_size)
        norms = [torch.randn(spec.head_dim, device="cuda") * 0.1 for _ in range(4)]
        weights = kernels.prepare(
            AttentionWeights(
                qkv=qkv,
                q_norm=norms[0],
                k_norm=norms[1],
                index=index,
                index_q_norm=norms[2],
                index_k_norm=norms[3],
                out=mxfp8(16, 128),
            ),
            spec,
            torch.bfloat16,
        )
        x = torch.randn(rows, spec.hidden_size, device="cuda").bfloat16()
        batch = prefill_batch(next(state.page_sets(-(-rows // BLOCK_TOKENS))), rows, 0)
        rope = rope_tables(batch.positions, spec)
        calls = [
            partial(kernels.attention_inputs, x, weights, spec, rope, batch, layer)
            for layer in state.layers
        ]

        def check() -> Checked:
            # Of the queries, as pages are for `winnow bench conformance`.
            picked = list(sampled(rows))
            plain = x[picked].float() @ dequantise(weights.qkv, torch.bfloat16).float().T
            heads = plain.bfloat16().unflatten(1, (-1, spec.head_dim))[:, : spec.num_heads]
            cos, sin = (table[picked] for table in rope)
            want = rotate(norm(heads.float(), norms[0], spec.norm_eps), (cos, sin))
            return Checked(error(calls[0]()[0][picked], want.bfloat16()), 2 * BF16_TOLERANCE)

        width = qkv.codes.shape[0] + index.codes.shape[0]
        moved = rows * (spec.num_heads + spec.num_index_heads) * spec.head_dim * 2
        moved += rows * state.token_bytes + x.nbytes + width * spec.hidden_size * 33 // 32
        times = CALLS if rows <= FEW_ROWS else len(calls)
        flops = 2 * rows * spec.hidden_size * width
        return Ready(calls * -(-times // len(calls)), check, moved, flops)

    return make


def moe(rows: int) -> Callable[[Kernels, State], Ready]:
    def make(kernels: Kernels, state: State) -> Ready:
        spec, weights = state.spec, state.experts(kernels)
        times = CALLS if rows <= FEW_ROWS else 3
        xs = [torch.randn(rows, spec.hidden_size, device="cuda").bfloat16() for _ in range(times)]
        calls = [partial(kernels.moe, x, weights, spec) for x in xs]
        routes = [route(x, weights, spec) for x in xs]

        def check() -> Checked:
            picked = list(sampled(rows))[-2:]
            x, (chosen, share) = xs[0][picked], (part[picked] for part in routes[0])
            want = mlp(x, weights.shared, spec).float()
            for place, experts in enumerate(chosen.tolist()):
                for slot, number in enumerate(experts):
                    one = MlpWeights(expert(weights.gate_up, number), expert(weights.down, number))
                    own = mlp(x[place : place + 1], one, spec)[0].float()
                    want[place] += share[place, slot] * own
            return Checked(error(calls[0]()[picked], want.bfloat16()), 4 * BF16_TOLERANCE)

        touched = sum(len(chosen.unique()) for chosen, _ in routes) / len(routes)
        each = (_nbytes(weights.gate_up) + _nbytes(weights.down)) / spec.num_experts
        moved = int(touched * each) + weights.router.nbytes
        moved += _nbytes(weights.shared.gate_up) + _nbytes(weights.shared.down)
        width = spec.experts_per_token * spec.expert_width + spec.shared_width
        return Ready(calls, check, moved, 6 * rows * spec.hidden_size * width)

    return make

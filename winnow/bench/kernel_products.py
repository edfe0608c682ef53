"""Workloads of `winnow bench kernels`: projections, what follows them, and experts.

Owns their costs and checks. Knows nothing of clocks, records or peers.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

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
from winnow.ops import table
from winnow.ops.attention_inputs.reference import rope_tables, rotate
from winnow.ops.case import error
from winnow.ops.codec import reference as codec
from winnow.ops.linear.reference import dequantise
from winnow.ops.mlp.reference import mlp
from winnow.ops.moe.reference import route
from winnow.ops.norm.reference import norm
from winnow.ops.paged import Clipping, Paged, encode
from winnow.ops.table import Kernels
from winnow.ops.weights import AttentionWeights, MlpWeights, Weight, expert, tensors
from winnow.spec.model import BLOCK_TOKENS

_BEFORE = 777
"""Tokens before those that are inserted, so that every row is rotated and no page begins."""
_OTHER_CODES = 0.01
"""The most of the bytes of keys that may be other ones than the reference's."""


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


def insertion(rows: int) -> Callable[[Kernels, State], Ready]:
    """What follows the projections: norms, rotation, storing. The projections rotate too, so that
    the cache holds none; in a step they have just been written."""

    def make(kernels: Kernels, state: State) -> Ready:
        spec, insert = state.spec, table.insertion(kernels.backend)
        widths = (
            (spec.num_heads + 2 * spec.num_kv_heads) * spec.head_dim,
            (spec.num_index_heads + 1) * spec.index_dim,
        )
        norms = [torch.randn(spec.head_dim, device="cuda") * 0.1 for _ in range(4)]
        none = mxfp8(16, 128)
        weights = AttentionWeights(none, norms[0], norms[1], none, norms[2], norms[3], none)
        blocks = -(-(_BEFORE + rows) // BLOCK_TOKENS)
        batches = [prefill_batch(pages, rows, _BEFORE) for pages in state.page_sets(blocks)]
        rope = rope_tables(batches[0].positions, spec)
        read = 2 * rows * sum(widths) + sum(part.nbytes for part in rope)
        copies = max(2, 1 + 2 * L2_BYTES // read)
        qkvs, indexes = (
            torch.randn(copies, rows, width, device="cuda").bfloat16() for width in widths
        )
        calls = [
            partial(
                insert, qkvs[i % copies], indexes[i % copies], weights, spec, rope,
                batches[i // len(state.layers) % len(batches)], state.layers[i % len(state.layers)],
            )
            for i in range(max(copies, len(state.layers)))
        ]  # fmt: skip

        def check() -> Checked:
            got, index_got = calls[0]()
            assert index_got is not None
            picked, layer, batch = list(sampled(rows)), state.layers[0], batches[0]
            turn = (rope[0][picked], rope[1][picked])
            q, k, v = (
                qkvs[0, picked].unflatten(1, (-1, spec.head_dim))
                .split((spec.num_heads, spec.num_kv_heads, spec.num_kv_heads), 1)
            )  # fmt: skip
            index_q, index_k = (
                indexes[0, picked].unflatten(1, (-1, spec.index_dim))
                .split((spec.num_index_heads, 1), 1)
            )  # fmt: skip
            q, k, index_q, index_k = (
                rotate(norm(x.float(), weight, spec.norm_eps), turn).bfloat16()
                for x, weight in zip((q, k, index_q, index_k), norms, strict=True)
            )
            slots = [part[picked] for part in batch.slots]
            assert layer.index is not None
            differ = [
                _bytes_that_differ(part, values, *slots)
                for part, values in ((layer.key, k), (layer.value, v), (layer.index, index_k))
            ]
            # V is stored as it came; a norm's last bit may be another one, and a code then.
            stored = differ[1] == 0 and max(differ) <= _OTHER_CODES
            worst = max(error(got[picked], q), error(index_got[picked], index_q))
            note = f"bytes that differ in K, V, index {', '.join(f'{d:.2%}' for d in differ)}"
            return Checked(worst if stored else float("inf"), BF16_TOLERANCE, note)

        written = 2 * rows * (spec.num_heads + spec.num_index_heads) * spec.head_dim
        return Ready(calls, check, read + written + rows * state.token_bytes)

    return make


def _bytes_that_differ(part: Paged, values: Tensor, pages: Tensor, offsets: Tensor) -> float:
    """The share of bytes of the tokens at these slots that are not the codec's of `values`."""
    codes, scales = encode(codec, replace(part, clipping=Clipping()), values)
    pairs = [(part.codes, codes)]
    pairs += [] if part.scales is None or scales is None else [(part.scales, scales)]
    wrong = total = 0
    for held, want in pairs:
        got = held.view(torch.uint8)[pages, :, offsets]
        wrong += int((got != want.contiguous().view(torch.uint8)).sum())
        total += got.numel()
    return wrong / total


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

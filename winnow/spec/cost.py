"""Bytes, operations and messages of one step on one rank, by part. Arithmetic, no time, no GPU.

What is counted is the least that an implementation which reads every weight and every block once
must do: weights, the cache and the residual stream of the norms. Activations between two products
are not counted, since a fused kernel keeps them. The same formulas, for one layer and one rank,
are the costs of the cases in `winnow/ops/*/cases.py`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import comb

from winnow.spec.formats import Format
from winnow.spec.memory import weight_bytes
from winnow.spec.model import BLOCK_TOKENS, ModelSpec
from winnow.spec.parallel import ParallelPlan, RankShare

STEP_PARTS = (
    "projections",
    "index_scan",
    "sparse_attention",
    "dense_attention",
    "dense_mlp",
    "router",
    "experts",
    "shared_experts",
    "norms",
    "head",
    "collectives",
)
"""What a step is counted by: `projections` hold q, k, v, index and out and write the cache; `head`
holds the embedding's rows too."""

_CANDIDATE_BYTES = 8
"""A score in fp32 and a block id in int32."""


@dataclass(frozen=True)
class Storage:
    """Formats of a served model: weights, then cache."""

    experts: Format
    linear: Format
    plain: Format
    kv: Format
    index: Format


@dataclass(frozen=True)
class StepShape:
    """`sequences` requests, each with `rows` query tokens, the last of them at `kv_len` - 1.

    `logit_rows` of them go through the head. A decode step has one row a sequence, a speculative
    one several, a chunk of a prompt many.
    """

    sequences: int
    rows: int
    kv_len: int
    logit_rows: int


@dataclass(frozen=True)
class PartCost:
    """Bytes of memory moved, operations done, bytes sent to other ranks."""

    num_bytes: float = 0.0
    num_flops: float = 0.0
    link_bytes: float = 0.0

    def __add__(self, other: PartCost) -> PartCost:
        return PartCost(
            self.num_bytes + other.num_bytes,
            self.num_flops + other.num_flops,
            self.link_bytes + other.link_bytes,
        )


def decode(sequences: int, kv_len: int) -> StepShape:
    """One token for each of `sequences` requests that are `kv_len` tokens long with it."""
    return StepShape(sequences, 1, kv_len, sequences)


def visible_tokens(rows: int, kv_len: int) -> int:
    """Tokens that the rows of one sequence see under causality, added up."""
    return _triangle(kv_len) - _triangle(kv_len - rows)


def selected_tokens(rows: int, kv_len: int, topk: int) -> int:
    """Tokens in the blocks that the rows select, added up: `topk` blocks, the last one partial."""
    return _selected_up_to(kv_len, topk) - _selected_up_to(kv_len - rows, topk)


def distinct_experts(spec: ModelSpec, tokens: int) -> float:
    """Experts that `tokens` tokens touch on average when each picks its k of E uniformly.

    E (1 - (1 - k/E)^tokens): a token misses an expert with probability 1 - k/E.
    """
    missed = (1 - spec.experts_per_token / spec.num_experts) ** tokens
    return spec.num_experts * (1 - missed)


def step_costs(
    spec: ModelSpec, storage: Storage, plan: ParallelPlan, shape: StepShape
) -> dict[str, PartCost]:
    """Each of STEP_PARTS on the busiest rank. Sequences divide among data-parallel groups."""
    share = plan.share(spec)
    weights = weight_bytes(spec, storage.experts, storage.linear, storage.plain, share=share)
    sequences = -(-shape.sequences // plan.dp_size)
    logit_rows = -(-shape.logit_rows // plan.dp_size)
    local = StepShape(sequences, shape.rows, shape.kv_len, logit_rows)
    return {
        "projections": _projections(spec, storage, share, weights, local),
        **_attention(spec, storage, plan, share, local),
        **_mlps(spec, plan, share, weights, shape, local),
        "norms": _norms(spec, storage, weights, local),
        "head": _head(spec, storage, share, local),
        "collectives": PartCost(link_bytes=_sent(spec, storage, plan, local)),
    }


def _projections(
    spec: ModelSpec,
    storage: Storage,
    share: RankShare,
    weights: Mapping[str, int],
    local: StepShape,
) -> PartCost:
    rows, num_sparse = local.sequences * local.rows, sum(spec.layer_is_sparse)
    width = 2 * (len(share.heads) + len(share.kv_heads)) * spec.head_dim * spec.num_layers
    width += (len(share.index_heads) + 1) * spec.index_dim * num_sparse
    written = 2 * len(share.kv_heads) * storage.kv.nbytes(spec.head_dim) * spec.num_layers
    written += storage.index.nbytes(spec.index_dim) * num_sparse
    return PartCost(
        weights["attention"] + weights["index"] + rows * written,
        2 * rows * width * spec.hidden_size,
    )


def _attention(
    spec: ModelSpec, storage: Storage, plan: ParallelPlan, share: RankShare, local: StepShape
) -> dict[str, PartCost]:
    """The scan of index keys, and attention over what it selects or over everything.

    Rows of one sequence share what they read, so a block counts once a KV head however many of
    them select it. Operations are those of q k and p v: 4 a token, channel and query head.
    """
    num_sparse = sum(spec.layer_is_sparse)
    num_full = spec.num_layers - num_sparse
    visible = visible_tokens(local.rows, local.kv_len)
    selected = selected_tokens(local.rows, local.kv_len, spec.topk_blocks)
    scanned = local.sequences * num_sparse / plan.dcp_size
    index_heads = len(share.index_heads)
    token = 2 * len(share.kv_heads) * storage.kv.nbytes(spec.head_dim) * local.sequences
    operations = 4 * len(share.heads) * spec.head_dim * local.sequences
    return {
        "index_scan": PartCost(
            scanned * local.kv_len * storage.index.nbytes(spec.index_dim),
            scanned * 2 * visible * spec.index_dim * index_heads,
        ),
        "sparse_attention": PartCost(
            num_sparse * min(selected, local.kv_len) * token, num_sparse * selected * operations
        ),
        "dense_attention": PartCost(
            num_full * local.kv_len * token, num_full * visible * operations
        ),
    }


def _mlps(
    spec: ModelSpec,
    plan: ParallelPlan,
    share: RankShare,
    weights: Mapping[str, int],
    shape: StepShape,
    local: StepShape,
) -> dict[str, PartCost]:
    """Experts see the rows of all groups, spread evenly; the rest those of this rank's group."""
    rows, all_rows = local.sequences * local.rows, shape.sequences * shape.rows
    num_moe = sum(spec.layer_is_moe)
    num_dense = spec.num_layers - num_moe
    # Two operations a weight and row, of gate, up and down.
    a_row = 6 * spec.hidden_size
    touched = distinct_experts(spec, all_rows) / spec.num_experts if num_moe else 0.0
    expert_rows = all_rows * spec.experts_per_token / plan.ep_size
    return {
        "dense_mlp": PartCost(weights["dense_mlp"], num_dense * rows * a_row * len(share.dense)),
        "router": PartCost(
            weights["router"], num_moe * 2 * rows * spec.hidden_size * spec.num_experts
        ),
        "experts": PartCost(
            weights["experts"] * touched,
            num_moe * expert_rows * a_row * len(share.expert_columns),
        ),
        "shared_experts": PartCost(
            weights["shared_experts"], num_moe * rows * a_row * len(share.shared)
        ),
    }


def _norms(
    spec: ModelSpec, storage: Storage, weights: Mapping[str, int], local: StepShape
) -> PartCost:
    """Two a layer and the last one: each value of the residual stream read and written."""
    rows = 2 * spec.num_layers * local.sequences * local.rows + local.logit_rows
    values = rows * spec.hidden_size
    return PartCost(weights["norms"] + 2 * storage.plain.nbytes(values), 4 * values)


def _head(spec: ModelSpec, storage: Storage, share: RankShare, local: StepShape) -> PartCost:
    vocabulary = len(share.vocabulary)
    looked_up = local.sequences * local.rows * spec.hidden_size
    # A step in the middle of a prompt asks for no logits and leaves the head alone.
    read = vocabulary * spec.hidden_size if local.logit_rows else 0
    return PartCost(
        storage.plain.nbytes(read + looked_up), 2 * local.logit_rows * vocabulary * spec.hidden_size
    )


def _sent(spec: ModelSpec, storage: Storage, plan: ParallelPlan, local: StepShape) -> float:
    """Bytes that one rank sends: reductions by rings, tokens to their experts, index candidates.

    A ring of N ranks sends (N - 1) / N of a tensor to gather it and as much again to add it up
    first (Patarasuk and Yuan 2009). With data-parallel groups a rank sends its part of the rows
    to each other rank that holds one of their experts and gets as many sums to send back.
    """
    rows, tp = local.sequences * local.rows, plan.tp_size
    row_bytes = storage.plain.nbytes(spec.hidden_size)
    num_moe = sum(spec.layer_is_moe)
    gather = (tp - 1) / tp * rows * row_bytes
    # Embedding, attention of every layer, dense MLPs; logits are gathered.
    sent = 2 * gather * (1 + spec.num_layers + spec.num_layers - num_moe)
    sent += (tp - 1) / tp * local.logit_rows * storage.plain.nbytes(spec.vocab_size)
    if plan.dp_size > 1 and num_moe:
        sent += num_moe * (gather + 2 * rows / tp * _remote_ranks(spec, plan.ep_size) * row_bytes)
    else:
        sent += num_moe * 2 * gather
    dcp = plan.dcp_size
    candidates = spec.num_index_heads * spec.topk_blocks * _CANDIDATE_BYTES
    return sent + sum(spec.layer_is_sparse) * (dcp - 1) / dcp * rows * candidates


def _remote_ranks(spec: ModelSpec, ep_size: int) -> float:
    """Other ranks that hold at least one of a token's experts, on average, picks being uniform."""
    elsewhere = spec.num_experts - spec.num_experts // ep_size
    none_here = comb(elsewhere, spec.experts_per_token)
    return (ep_size - 1) * (1 - none_here / comb(spec.num_experts, spec.experts_per_token))


def _triangle(number: int) -> int:
    return number * (number + 1) // 2


def _selected_up_to(kv_len: int, topk: int) -> int:
    """Tokens that queries at positions 0 to `kv_len` - 1 select, added up."""
    window = topk * BLOCK_TOKENS
    if kv_len <= window:
        return _triangle(kv_len)
    blocks, rest = divmod(kv_len - window, BLOCK_TOKENS)
    before = (topk - 1) * BLOCK_TOKENS
    whole = BLOCK_TOKENS * before + _triangle(BLOCK_TOKENS)
    return _triangle(window) + blocks * whole + rest * before + _triangle(rest)

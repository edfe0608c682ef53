"""Bytes of weights and of the cache, and how much cache fits. Arithmetic only, no tensors.

The engine sizes its cache with this module and `winnow plan` predicts with it. Weights are counted
as `winnow.model.weights` holds them: norms, router and routing bias in fp32, embedding and head in
the compute dtype, matrices in the formats asked for.
"""

from __future__ import annotations

from dataclasses import dataclass

from winnow.errors import CapacityError, UnsupportedError
from winnow.spec.formats import FP32, NVFP4, Format
from winnow.spec.model import BLOCK_TOKENS, ModelSpec
from winnow.spec.page import RowLayout
from winnow.spec.parallel import ParallelPlan, RankShare

PARTS = (
    "embedding",
    "head",
    "attention",
    "index",
    "dense_mlp",
    "router",
    "experts",
    "shared_experts",
    "norms",
)
"""What a model's weights are counted by."""


def matrix_bytes(weight_format: Format, rows: int, columns: int, *, row_scales: bool = True) -> int:
    """Bytes of a [rows, columns] weight; in memory NVFP4 has one fp32 global scale per row.

    `row_scales` False leaves those out, as a checkpoint does: it has two scalars a matrix.
    UnsupportedError where a row does not fill whole groups.
    """
    if weight_format.group and columns % weight_format.group:
        raise UnsupportedError(
            f"{columns} columns do not fill {weight_format.name} groups of {weight_format.group}: "
            "divide the matrix among fewer ranks or keep it in another format"
        )
    global_scales = FP32.nbytes(rows) if weight_format is NVFP4 and row_scales else 0
    return weight_format.nbytes(rows * columns) + global_scales


def weight_bytes(
    spec: ModelSpec,
    expert_format: Format,
    linear_format: Format,
    plain_format: Format,
    index_format: Format | None = None,
    *,
    share: RankShare | None = None,
    row_scales: bool = True,
) -> dict[str, int]:
    """Bytes of each of PARTS on the rank that owns `share`; None is a single rank.

    `expert_format` holds the routed experts; `linear_format` attention, dense MLPs and shared
    experts; `plain_format`, the compute dtype, embedding and head; `index_format` the index
    projections, which some checkpoints leave plain (None: `linear_format`). A head tied to the
    embedding takes no bytes of its own. `row_scales` as in `matrix_bytes`.
    """
    own = share or ParallelPlan().share(spec)
    hidden, dim = spec.hidden_size, spec.head_dim
    num_moe, num_sparse = sum(spec.layer_is_moe), sum(spec.layer_is_sparse)

    def matrix(weight_format: Format, rows: int, columns: int) -> int:
        return matrix_bytes(weight_format, rows, columns, row_scales=row_scales)

    def mlp(weight_format: Format, width: int) -> int:
        """Gate and up [2 * width, hidden], and down [hidden, width]."""
        return matrix(weight_format, 2 * width, hidden) + matrix(weight_format, hidden, width)

    qkv_rows = (len(own.heads) + 2 * len(own.kv_heads)) * dim
    attention = matrix(linear_format, qkv_rows, hidden)
    attention += matrix(linear_format, hidden, len(own.heads) * dim)
    index_rows = (len(own.index_heads) + 1) * spec.index_dim
    index = matrix(index_format or linear_format, index_rows, hidden)
    vocabulary = plain_format.nbytes(len(own.vocabulary) * hidden)
    norm_values = spec.num_layers * (2 * hidden + 2 * dim) + hidden
    norm_values += num_sparse * 2 * spec.index_dim
    return {
        "embedding": vocabulary,
        "head": 0 if spec.tied_embeddings else vocabulary,
        "attention": spec.num_layers * attention,
        "index": num_sparse * index,
        "dense_mlp": (spec.num_layers - num_moe) * mlp(linear_format, len(own.dense)),
        "router": num_moe * FP32.nbytes(spec.num_experts * (hidden + 1)),
        "experts": num_moe * len(own.experts) * mlp(expert_format, len(own.expert_columns)),
        "shared_experts": num_moe * mlp(linear_format, len(own.shared)),
        "norms": FP32.nbytes(norm_values),
    }


@dataclass(frozen=True)
class TokenBytes:
    """Bytes that one token of context takes in the cache of one rank."""

    kv: int
    index: int
    draft: int

    @property
    def total(self) -> int:
        return self.kv + self.index + self.draft


def bytes_per_token(layout: RowLayout) -> TokenBytes:
    """A row's bytes over its tokens; whole numbers, since every piece is aligned to 128 bytes."""
    return TokenBytes(
        kv=layout.kv_bytes // BLOCK_TOKENS,
        index=layout.index_bytes // BLOCK_TOKENS,
        draft=layout.draft_bytes // BLOCK_TOKENS,
    )


@dataclass(frozen=True)
class MemoryPlan:
    """How one device's memory is divided. `num_pages` includes the null page, which holds none of
    a request's tokens."""

    total_bytes: int
    usable_bytes: int
    weight_bytes: int
    reserve_bytes: int
    row_bytes: int
    num_pages: int

    @property
    def cache_bytes(self) -> int:
        return self.num_pages * self.row_bytes

    @property
    def num_tokens(self) -> int:
        """Tokens of context that fit, in whole pages."""
        return (self.num_pages - 1) * BLOCK_TOKENS

    def num_sequences(self, tokens: int) -> int:
        """Sequences of `tokens` tokens each that fit at once when they share no page."""
        return (self.num_pages - 1) // -(-tokens // BLOCK_TOKENS)


def plan_memory(
    total_bytes: int,
    weights: int,
    row_bytes: int,
    memory_fraction: float = 0.9,
    reserve: int = 0,
) -> MemoryPlan:
    """Divide `memory_fraction` of `total_bytes` into weights, reserve and as many rows as fit.

    `reserve` is kept for activations, graphs and the allocator. CapacityError when not even two
    pages fit (the null page and one of a request); ValueError for a fraction outside (0, 1].
    """
    if not 0 < memory_fraction <= 1:
        raise ValueError(f"memory_fraction is {memory_fraction}, not in (0, 1]")
    usable = int(total_bytes * memory_fraction)
    num_pages = (usable - weights - reserve) // row_bytes
    if num_pages < 2:
        needed = weights + reserve + 2 * row_bytes
        raise CapacityError(
            f"the model needs {_gb(needed)} ({_gb(weights)} of weights, {_gb(reserve)} of reserve, "
            f"two pages of {row_bytes} B), {_gb(usable)} are usable ({memory_fraction:.0%} of "
            f"{_gb(total_bytes)}): use smaller formats, fewer layers, more memory or more ranks"
        )
    return MemoryPlan(total_bytes, usable, weights, reserve, row_bytes, num_pages)


def _gb(num_bytes: int) -> str:
    return f"{num_bytes / 1e9:.3f} GB"

"""How ranks divide a model: which heads, columns and experts each of them owns. Arithmetic only.

Attention of a tensor-parallel group is divided by heads; groups of a data-parallel plan have
sequences of their own and hold all of attention. Experts are divided among all ranks. Knows
nothing of devices, processes or messages.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from winnow.errors import UnsupportedError
from winnow.spec.model import ModelSpec


@dataclass(frozen=True)
class RankShare:
    """What one rank owns, as ranges of the whole model's indices.

    `dense` and `shared` are columns of those MLPs' hidden width. Of each expert in `experts` the
    rank owns `expert_columns`. KV heads are owned by several ranks where there are more ranks
    than heads; the index key, norms and router are whole on every rank.
    """

    heads: range
    kv_heads: range
    index_heads: range
    vocabulary: range
    dense: range
    shared: range
    experts: range
    expert_columns: range


@dataclass(frozen=True)
class ParallelPlan:
    """`tp_size` ranks share the heads of a group, `dp_size` groups have sequences of their own.

    Whole experts are divided among `ep_size` ranks; where that is less than all ranks, neighbours
    hold the same experts and divide their columns. `dcp_size` ranks of a group divide the scan of
    index keys by blocks: each scores all heads over its blocks. Rank r is rank r % tp_size of
    group r // tp_size. UnsupportedError for sizes that do not fit together.
    """

    tp_size: int = 1
    dp_size: int = 1
    ep_size: int = 1
    dcp_size: int = 1

    def __post_init__(self) -> None:
        ranks = self.num_ranks
        if self.dp_size > 1 and self.ep_size != ranks:
            raise UnsupportedError(
                f"{self.dp_size} data-parallel groups with experts divided among {self.ep_size} of "
                f"{ranks} ranks is not planned: write dep{self.dp_size} to divide them among all"
            )
        if ranks % self.ep_size:
            raise UnsupportedError(
                f"{ranks} ranks do not divide into {self.ep_size} shares of the experts: "
                f"use ep with one of {_divisors(ranks)}"
            )
        if self.tp_size % self.dcp_size:
            raise UnsupportedError(
                f"{self.tp_size} tensor-parallel ranks do not divide among {self.dcp_size} for the "
                f"scan of index keys: use dcp with one of {_divisors(self.tp_size)}"
            )

    @classmethod
    def parse(cls, word: str) -> ParallelPlan:
        """From `tpN`, `epN`, `depN` and `dcpN` written together, as `tp8ep8` or `tp2dep4`.

        `depN` is N data-parallel groups with the experts divided among all ranks.
        UnsupportedError for anything else.
        """
        sizes: dict[str, int] = {}
        for name, number in re.findall(r"(dcp|dep|tp|ep)([1-9][0-9]{0,4})(?![0-9])", word):
            sizes.setdefault(name, int(number))
        written = "".join(f"{name}{size}" for name, size in sizes.items())
        if not sizes or written != word or {"ep", "dep"} <= sizes.keys():
            raise UnsupportedError(
                f"parallel plan {word!r} is not understood: write tpN, epN, dcpN, or depN "
                "instead of epN, each at most once, as tp4, tp8ep8, dep4, tp2dep4 or tp4dcp4"
            )
        tp, dp = sizes.get("tp", 1), sizes.get("dep", 1)
        # Without a word for them, experts stay on as many ranks as there are: by columns.
        ep = tp * dp if "dep" in sizes else sizes.get("ep", 1)
        return cls(tp, dp, ep, sizes.get("dcp", 1))

    def __str__(self) -> str:
        """The word that `parse` reads as this plan."""
        words = [f"tp{self.tp_size}"] if self.tp_size > 1 or self.dp_size == 1 else []
        if self.dp_size > 1:
            words.append(f"dep{self.dp_size}")
        elif self.ep_size > 1:
            words.append(f"ep{self.ep_size}")
        if self.dcp_size > 1:
            words.append(f"dcp{self.dcp_size}")
        return "".join(words)

    @property
    def num_ranks(self) -> int:
        return self.tp_size * self.dp_size

    @property
    def expert_tp_size(self) -> int:
        """Ranks that hold the same experts and divide their columns."""
        return self.num_ranks // self.ep_size

    def share(self, spec: ModelSpec, rank: int = 0) -> RankShare:
        """What `rank` owns of a model; all ranks own as much.

        UnsupportedError for a model that does not divide so, with the sizes that it takes.
        """
        if not 0 <= rank < self.num_ranks:
            raise ValueError(f"rank {rank} of a plan of {self.num_ranks}")
        tp_rank, tp = rank % self.tp_size, self.tp_size
        heads = _part(spec.num_heads, "heads", tp, tp_rank, "tp")
        kv_heads = self._kv_heads(spec, tp_rank)
        dense = 0 if all(spec.layer_is_moe) else spec.dense_width
        shared, experts, columns = spec.shared_width, spec.num_experts, spec.expert_width
        if not any(spec.layer_is_moe):
            shared = experts = columns = 0
        ep_rank, expert_tp_rank = divmod(rank, self.expert_tp_size)
        return RankShare(
            heads=heads,
            kv_heads=kv_heads,
            index_heads=kv_heads if self.dcp_size == 1 else range(spec.num_index_heads),
            vocabulary=_part(spec.vocab_size, "tokens of the vocabulary", tp, tp_rank, "tp"),
            dense=_part(dense, "columns of the dense MLPs", tp, tp_rank, "tp"),
            shared=_part(shared, "columns of the shared expert", tp, tp_rank, "tp"),
            experts=_part(experts, "experts", self.ep_size, ep_rank, "ep"),
            expert_columns=_part(
                columns, "columns of an expert", self.expert_tp_size, expert_tp_rank, "tp over ep"
            ),
        )

    def _kv_heads(self, spec: ModelSpec, tp_rank: int) -> range:
        """Those that the rank's query heads read."""
        if self.tp_size <= spec.num_kv_heads:
            return _part(spec.num_kv_heads, "KV heads", self.tp_size, tp_rank, "tp")
        if self.tp_size % spec.num_kv_heads:
            raise UnsupportedError(
                f"{self.tp_size} tensor-parallel ranks cannot hold {spec.num_kv_heads} KV heads "
                f"equally often: use tp with a multiple of {spec.num_kv_heads}"
            )
        head = tp_rank * spec.num_kv_heads // self.tp_size
        return range(head, head + 1)


def _part(count: int, what: str, size: int, rank: int, word: str) -> range:
    """The share of `rank` when `count` things divide evenly among `size` ranks."""
    if count % size:
        raise UnsupportedError(
            f"{count} {what} do not divide among {size} ranks: "
            f"use {word} with one of {_divisors(count)}"
        )
    each = count // size
    return range(rank * each, (rank + 1) * each)


def _divisors(number: int) -> str:
    """The numbers of ranks that divide `number`, those worth naming."""
    return ", ".join(str(n) for n in range(1, min(number, 128) + 1) if number % n == 0)

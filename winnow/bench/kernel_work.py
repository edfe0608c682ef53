"""The list of workloads of `winnow bench kernels` on a GPU: one layer's ops at the widths of
MiniMax-M3.1-Flash, and the times that the project asks for."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from winnow.bench.kernel_attention import (
    SPARSE_TOKENS,
    select_decode,
    select_prefill,
    sparse_decode,
    sparse_prefill,
)
from winnow.bench.kernel_products import inputs, insertion, linear, moe
from winnow.bench.kernel_state import Ready, State
from winnow.ops.table import Kernels
from winnow.spec.model import ModelSpec
from winnow.spec.presets import preset


@dataclass(frozen=True)
class Work:
    """A line of the table: an op on some shape. `goal_us` is what the project asks for, or None;
    `goal_floors` asks for so many times what its bytes take at the measured read bandwidth. `peer`
    names the shape for `winnow.bench.kernel_peers`."""

    op: str
    name: str
    make: Callable[[Kernels, State], Ready]
    shape: dict[str, int | str]
    goal_us: float | None = None
    peer: tuple[Any, ...] = ()
    formats: tuple[str, ...] = field(default=("kv", "index"))
    goal_floors: float | None = None

    def goal(self, num_bytes: int, read_tb_s: float) -> float | None:
        """Microseconds."""
        if self.goal_floors is None:
            return self.goal_us
        return self.goal_floors * num_bytes / read_tb_s / 1e6


def model() -> ModelSpec:
    """The geometry of all workloads."""
    return preset("minimax-m3.1-flash")


def works() -> Iterator[Work]:
    """Every workload, in the order in which they are run."""
    for requests, tokens, goal in (
        (1, 8192, 5.0), (1, 131_072, None), (1, 524_288, 18.0), (8, 131_072, None),
        (32, 131_072, 85.0), (64, 65_536, None),
    ):  # fmt: skip
        yield Work(
            "select_blocks", f"decode {requests} x {tokens}", select_decode(requests, tokens),
            {"requests": requests, "tokens": tokens}, goal, ("index decode", requests, tokens),
            ("index",),
        )  # fmt: skip
    for rows in (2, 4, 8):
        requests, tokens = 32, 131_072
        yield Work(
            "select_blocks", f"decode {requests} x {tokens}, {rows} rows each",
            select_decode(requests, tokens, rows),
            {"requests": requests, "tokens": tokens, "rows_each": rows}, formats=("index",),
        )  # fmt: skip
    yield Work(
        "select_blocks", "prefill 8192 @ 122880", select_prefill(8192, 122_880),
        {"rows": 8192, "context": 122_880}, 1100.0, ("prefill select", 8192, 122_880), ("index",),
    )  # fmt: skip
    for requests, goal in ((1, 5.0), (8, None), (64, 28.0), (256, 95.0)):
        yield Work(
            "sparse_attention", f"decode {requests}", sparse_decode(requests),
            {"requests": requests, "tokens": SPARSE_TOKENS}, goal, ("sparse decode", requests),
            ("kv",),
        )  # fmt: skip
    for rows, context, kind, goal in (
        (8192, 122_880, "random", 2200.0), (8192, 122_880, "clustered", 2200.0),
        (8192, 0, "random", 1500.0),
    ):  # fmt: skip
        yield Work(
            "sparse_attention", f"prefill {rows} @ {context} {kind}",
            sparse_prefill(rows, context, kind == "clustered"),
            {"rows": rows, "context": context, "selection": kind}, goal,
            ("prefill attention", rows, context), ("kv",),
        )  # fmt: skip
    for rows in (1, 64, 8192):
        yield Work(
            "attention_inputs", f"{rows} rows", inputs(rows), {"rows": rows}, None,
        )  # fmt: skip
    for rows, goal, floors in ((1, 4.0, None), (64, None, None), (8192, None, 1.3)):
        yield Work(
            "attention_inputs", f"{rows} rows, after the projections", insertion(rows),
            {"rows": rows, "part": "after the projections"}, goal, goal_floors=floors,
        )  # fmt: skip
    spec = model()
    qkv = (spec.num_heads + 2 * spec.num_kv_heads) * spec.head_dim
    index = (spec.num_index_heads + 1) * spec.index_dim
    hidden = spec.hidden_size
    for name, n, k in (
        ("qkv and index", qkv + index, hidden),
        ("output", hidden, spec.num_heads * spec.head_dim),
    ):
        for rows in (1, 8, 16, 32, 64, 256, 1024, 8192):
            goal = 22.0 if name == "qkv and index" and rows <= 64 else None
            yield Work(
                "linear", f"{name} {rows} rows", linear(rows, n, k),
                {"rows": rows, "n": n, "k": k}, goal, ("matmul", rows, n, k), ("weight",),
            )  # fmt: skip
    for rows, goal in (
        (1, 55.0),
        (8, 285.0),
        (64, 1000.0),
        (256, 1150.0),
        (1024, 1600.0),
        (8192, 8500.0),
    ):
        yield Work(
            "moe", f"{rows} tokens", moe(rows), {"tokens": rows}, goal, ("experts", rows),
            ("experts",),
        )  # fmt: skip

"""Time floors of steps on a GPU: which part binds, and what binds it. Predicts nothing faster or
slower than a floor: no launches, no latencies, no imbalance. Knows no model but by its costs.

A part takes at least the longest of its bytes over the memory's bandwidth, its operations over
the peak of its products, and its messages over the link's bandwidth (Williams, Waterman and
Patterson 2009). Parts of a step need each other's results, so a step takes at least their sum.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from winnow.spec.cost import (
    STEP_PARTS,
    PartCost,
    StepShape,
    Storage,
    decode,
    step_costs,
)
from winnow.spec.hardware import Peaks
from winnow.spec.model import ModelSpec
from winnow.spec.parallel import ParallelPlan

PREFILL_CHUNK = 8192
"""Tokens of a prompt that one step computes; each chunk reads the weights once."""


@dataclass(frozen=True)
class PartFloor:
    """The least time of one part: `limit` says what it waits for, memory, compute or link."""

    num_bytes: float
    num_flops: float
    link_bytes: float
    floor_us: float
    limit: str


@dataclass(frozen=True)
class Floor:
    """The least time of a decode step, or of a whole prompt's prefill, on one rank.

    `batch` counts the sequences of all ranks. `binds` is the part with the most time. `fits` says
    whether the cache holds that many sequences; None where no memory was given.
    """

    context: int
    batch: int
    floor_us: float
    binds: str
    parts: dict[str, PartFloor]
    fits: bool | None = None


@dataclass(frozen=True)
class Machine:
    """What runs: a model in its formats, divided among GPUs of one kind."""

    spec: ModelSpec
    storage: Storage
    plan: ParallelPlan
    peaks: Peaks

    def operand(self, part: str) -> str:
        """Width in which a part's products run: fp4, fp8 or bf16. The fp32 router counts as bf16,
        since no faster product keeps its values."""
        storage, peaks = self.storage, self.peaks
        match part:
            case "experts":
                return peaks.weight_operand(storage.experts)
            case "projections" | "dense_mlp" | "shared_experts":
                return peaks.weight_operand(storage.linear)
            case "index_scan":
                return peaks.cache_operand(storage.index)
            case "sparse_attention" | "dense_attention":
                return peaks.cache_operand(storage.kv)
        return "bf16"

    def part_floor(self, part: str, cost: PartCost) -> PartFloor:
        seconds = {
            "memory": cost.num_bytes / self.peaks.bandwidth,
            "compute": cost.num_flops / self.peaks.flops(self.operand(part)),
            "link": cost.link_bytes / self.peaks.link_bandwidth,
        }
        limit = max(seconds, key=lambda what: seconds[what])
        return PartFloor(
            cost.num_bytes, cost.num_flops, cost.link_bytes, seconds[limit] * 1e6, limit
        )

    def step(self, shape: StepShape) -> dict[str, PartFloor]:
        costs = step_costs(self.spec, self.storage, self.plan, shape)
        return {part: self.part_floor(part, cost) for part, cost in costs.items()}

    def decode(self, context: int, batch: int, fits: bool | None = None) -> Floor:
        """One token for each of `batch` sequences that are `context` tokens long."""
        return _floor(context, batch, self.step(decode(batch, context)), fits)

    def prefill(self, context: int) -> Floor:
        """A prompt of `context` tokens in each data-parallel group at once, chunk by chunk."""
        steps = []
        groups = self.plan.dp_size
        for start in range(0, context, PREFILL_CHUNK):
            end = min(start + PREFILL_CHUNK, context)
            logit_rows = groups if end == context else 0
            steps.append(self.step(StepShape(groups, end - start, end, logit_rows)))
        return _floor(context, groups, {part: _total(steps, part) for part in STEP_PARTS}, None)


def _floor(context: int, batch: int, parts: Mapping[str, PartFloor], fits: bool | None) -> Floor:
    binds = max(parts, key=lambda part: parts[part].floor_us)
    total = sum(part.floor_us for part in parts.values())
    return Floor(context, batch, total, binds, dict(parts), fits)


def _total(steps: Sequence[Mapping[str, PartFloor]], part: str) -> PartFloor:
    """A part over several steps; its limit is the one of the most time."""
    floors = [step[part] for step in steps]
    waited = dict.fromkeys(("memory", "compute", "link"), 0.0)
    for floor in floors:
        waited[floor.limit] += floor.floor_us
    return PartFloor(
        sum(floor.num_bytes for floor in floors),
        sum(floor.num_flops for floor in floors),
        sum(floor.link_bytes for floor in floors),
        sum(waited.values()),
        max(waited, key=lambda what: waited[what]),
    )

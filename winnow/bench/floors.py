"""The least time of each part of a step on the GPU at hand, beside what it took. Prints tables.

Floors are `winnow.spec.cost`'s bytes and operations over what this GPU was just seen to do, not
over its maker's peaks. Knows how parts of a step are called on both sides.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import median
from typing import Any

import torch

from winnow.bench.parts import WHOLE
from winnow.bench.step import Steps
from winnow.bench.timing import HEAD, PARTS
from winnow.engine.engine import Engine
from winnow.ops.fragments_mxfp8 import PackedMxfp8Weight
from winnow.ops.weights import MoeWeights, Mxfp8Weight, PlainWeight, Weight
from winnow.spec.cost import StepShape, Storage, distinct_experts, step_costs
from winnow.spec.formats import BF16, FP32, MXFP8, NVFP4, Format
from winnow.spec.hardware import Peaks
from winnow.spec.parallel import ParallelPlan
from winnow.spec.roofline import Machine

_GROUPS: tuple[tuple[str, tuple[str, ...], tuple[str, ...]], ...] = (
    ("experts", (PARTS["moe"],), ("router", "experts", "shared_experts")),
    (
        "projections",
        (PARTS["attention_inputs"], PARTS["linear"]),
        ("projections",),
    ),
    ("selection", (PARTS["select_blocks"],), ("index_scan",)),
    ("sparse attention", (PARTS["sparse_attention"],), ("sparse_attention",)),
    ("dense attention", (PARTS["dense_attention"],), ("dense_attention",)),
    ("dense MLP", (PARTS["mlp"],), ("dense_mlp",)),
    ("norms", (PARTS["norm"],), ("norms",)),
    ("head", (HEAD,), ("head",)),
)
"""Name, parts as they are timed, parts as they are counted."""
_READ_BYTES = 2 << 30
_SIDE = 8192
_SAMPLES = 5


@dataclass(frozen=True)
class Rates:
    """Bytes a second of reading, operations a second of bf16 products: medians, as measured."""

    read: float
    products: float


def measured_rates() -> Rates:
    """Those of the current GPU, with torch's own kernels."""
    data = torch.zeros(_READ_BYTES // 4, dtype=torch.float32, device="cuda")
    a, b = (torch.randn(_SIDE, _SIDE, device="cuda").bfloat16() for _ in range(2))
    return Rates(_READ_BYTES / _seconds(data.sum), 2 * _SIDE**3 / _seconds(lambda: a @ b))


def _seconds(work: Callable[[], Any]) -> float:
    taken = []
    for _ in range(_SAMPLES + 1):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        work()
        end.record()
        end.synchronize()
        taken.append(start.elapsed_time(end) / 1e3)
    return float(median(taken[1:]))


def floors_us(
    engine: Engine, shape: StepShape, rates: Rates, experts: float | None = None
) -> dict[str, float]:
    """The least microseconds of each part that `step_costs` counts.

    `experts` is the number that rows were routed to, a layer; None for that of uniform routing.
    """
    # Nothing is multiplied as it is stored in fewer than 16 bits, and nothing is sent.
    peaks = Peaks(rates.read, 1.0, rates.products, rates.products, rates.products, ())
    machine = Machine(engine.spec, storage_formats(engine), ParallelPlan(), peaks)
    costs = step_costs(engine.spec, machine.storage, machine.plan, shape)
    if experts is not None:
        share = experts / distinct_experts(engine.spec, shape.sequences * shape.rows)
        own = costs["experts"]
        costs["experts"] = replace(own, num_bytes=own.num_bytes * share)
    return {name: machine.part_floor(name, cost).floor_us for name, cost in costs.items()}


def storage_formats(engine: Engine) -> Storage:
    """The formats that an engine's weights and pages are in."""
    weights, layout = engine.runner.model.weights, engine.runner.storage.layout
    plain = BF16 if weights.embedding.dtype is torch.bfloat16 else FP32
    mlps = [layer.mlp for layer in weights.layers]
    experts = next((mlp.gate_up for mlp in mlps if isinstance(mlp, MoeWeights)), None)
    return Storage(
        experts=plain if experts is None else _format(experts, plain),
        linear=_format(weights.layers[0].attention.qkv, plain),
        plain=plain,
        kv=layout.kv_format,
        index=layout.index_format,
    )


def _format(weight: Weight, plain: Format) -> Format:
    if isinstance(weight, PlainWeight):
        return plain
    return MXFP8 if isinstance(weight, Mxfp8Weight | PackedMxfp8Weight) else NVFP4


def step_table(engine: Engine, measured: Sequence[Steps], rates: Rates) -> str:
    """One kind of step as text: its parts by device events, the whole by the fastest way it was
    run, each beside its floor; medians."""
    found = measured[0]
    parts = {
        part: median(seconds.get(part, 0.0) for seconds in found.seconds) * 1e6
        for part in found.seconds[0]
    }
    rows = found.rows // found.shape.requests
    counted = StepShape(found.shape.requests, rows, found.shape.context, found.shape.requests)
    floors = floors_us(engine, counted, rates, found.experts)
    wholes = [median(s[WHOLE] for s in steps.seconds) * 1e6 for steps in measured]
    fastest = wholes.index(min(wholes))
    layers = wholes[fastest] - parts.get(HEAD, 0.0) - parts.get(PARTS["sample"], 0.0)
    return "\n".join(
        (
            f"{found.what}, {found.rows} rows, {found.shape.requests} x {found.shape.context} "
            f"tokens, {engine.spec.num_layers} layers; whole by {measured[fastest].timing}, "
            f"{layers / engine.spec.num_layers:.1f} us a layer"
            + ("" if found.experts is None else f", {found.experts:.1f} experts touched in each")
            + ":",
            table(parts, floors, wholes[fastest]),
            *(
                f"  whole by {m.timing:25} {us:10.1f}"
                for m, us in zip(measured, wholes, strict=True)
            ),
        )
    )


def table(parts: Mapping[str, float], floors: Mapping[str, float], whole_us: float) -> str:
    """Microseconds of each part (`parts`, by name as timed), its floor and their ratio; then the
    whole, `whole_us`, against the sum of the floors."""
    lines = [f"  {'part':34} {'us':>10} {'floor':>10} {'ratio':>7}"]
    seen: set[str] = set()
    for name, timed, counted in _GROUPS:
        us = sum(parts.get(part, 0.0) for part in timed)
        seen.update(timed)
        if us:
            lines.append(_line(name, us, sum(floors[part] for part in counted)))
        if len(timed) > 1:
            lines += [f"    {part:32} {parts[part]:10.1f}" for part in timed if part in parts]
    rest = {part: us for part, us in parts.items() if part not in seen and part != WHOLE}
    lines += [f"  {part:34} {us:10.1f}" for part, us in rest.items()]
    lines.append(_line("whole", whole_us, sum(floors.values())))
    return "\n".join(lines)


def _line(name: str, us: float, floor: float) -> str:
    ratio = f"{us / floor:7.2f}" if floor else " " * 7
    return f"  {name:34} {us:10.1f} {floor:10.1f} {ratio}"

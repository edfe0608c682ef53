"""Engine steps without HTTP: prefill chunks and decode batches, by part of the layer, as records.

Owns what is run. What is timed within a step is `winnow.bench.timing`'s.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from winnow.bench.device_step import DeviceSteps
from winnow.bench.machine import commit, machine, software
from winnow.bench.parts import WHOLE
from winnow.bench.record import Record
from winnow.bench.timing import WatchedRunner, timed_step, watch_engine
from winnow.config import SamplingParams
from winnow.engine.engine import Engine
from winnow.errors import UnsupportedError
from winnow.ops.weights import MoeWeights, PlainWeight, Weight

PREFILL = "prefill chunk"
DECODE = "decode step"
_CACHE_STATE = {
    "cpu": "prefix caching off; K and V of the batch in its pages",
    "cuda": "random K, V and index keys in every page",
}
_WARMUP_STEPS = 2
_WARMUP_TOKENS = 32


@dataclass(frozen=True)
class Shape:
    """`requests` with `context` tokens each; every decode step has one row of each of them."""

    requests: int
    context: int


@dataclass(frozen=True)
class Steps:
    """Steps of one kind: `rows` of each, and for each step its seconds by part."""

    what: str
    shape: Shape
    rows: int
    seconds: Sequence[Mapping[str, float]]
    timing: str = "host's clock"
    experts: float | None = None
    """Experts that the rows of a step were routed to, a layer, where that was counted."""


def run_on_device(
    engine: Engine, decode: Sequence[Shape], prefill: Sequence[int], samples: int
) -> Iterator[list[Steps]]:
    """Measure steps of a GPU, `samples` times each: decode steps of the shapes `decode`, then the
    last full chunk of one prompt of each length in `prefill`. By part first, then replayed where
    the engine captures such a step."""
    chunk = engine.scheduler.max_step_tokens
    steps = [(DECODE, shape, 1) for shape in decode]
    steps += [(PREFILL, Shape(1, context), chunk) for context in prefill if context >= chunk]
    device = DeviceSteps(engine)
    for what, shape, rows in steps:
        plan, requests = device.plan(shape.requests, shape.context, rows)
        experts = device.experts_touched(plan, requests)
        seconds = device.by_part(plan, requests, samples)
        found = [Steps(what, shape, shape.requests * rows, seconds, "device events", experts)]
        replays = device.replayed(plan, requests, samples)
        if replays:
            whole = [{WHOLE: spent} for spent in replays]
            found.append(replace(found[0], seconds=whole, timing="CUDA graph replay"))
        yield found


def run(engine: Engine, shapes: Sequence[Shape], steps: int, repeats: int) -> Iterator[Steps]:
    """Measure each shape `repeats` times with `steps` decode steps.

    A prefill chunk is the last full one of the first prompt, alone in its step, so there is one a
    repeat, and none where the context is shorter than a chunk. Prompts are random ids and are
    computed in full: prefix caching must be off. UnsupportedError if it is on or the engine is not
    on a CPU.
    """
    if engine.scheduler.cache.prefix_caching:
        raise UnsupportedError("bench step computes whole prompts: start with --no-prefix-caching")
    if engine.runner.storage.rows.device.type != "cpu":
        raise UnsupportedError(
            "run() times ops on the host's clock, which a GPU's ops outlive: use run_on_device()"
        )
    runner = watch_engine(engine)
    _measure(engine, runner, Shape(1, _WARMUP_TOKENS), 1)
    chunks: dict[int, _Samples] = {}
    for shape in shapes:
        decode: _Samples = []
        for _ in range(repeats):
            chunk, tokens = _measure(engine, runner, shape, steps)
            chunks.setdefault(shape.context, []).extend(chunk)
            decode += tokens
        yield Steps(DECODE, shape, shape.requests, decode)
    for context, found in chunks.items():
        if found:
            yield Steps(PREFILL, Shape(1, context), engine.scheduler.max_step_tokens, found)


_Samples = list[Mapping[str, float]]


def _measure(
    engine: Engine, runner: WatchedRunner, shape: Shape, steps: int
) -> tuple[_Samples, _Samples]:
    """The seconds of the first prompt's last full chunk, and of decode steps of the whole batch."""
    rng = random.Random(shape.context)
    chunk = engine.scheduler.max_step_tokens
    chunks = -(-shape.requests * shape.context // chunk) + shape.requests
    # Requests that are done early decode while the others' prompts are computed.
    params = SamplingParams(
        max_tokens=steps + _WARMUP_STEPS + chunks, temperature=0.0, ignore_eos=True
    )
    names = [f"bench-{i}" for i in range(shape.requests)]
    for name in names:
        prompt = [rng.randrange(engine.spec.vocab_size) for _ in range(shape.context)]
        engine.add(name, prompt, params)
    last_start = shape.context // chunk * chunk - chunk
    prefill: _Samples = []
    decode: _Samples = []
    while len(decode) < steps + _WARMUP_STEPS:
        seconds = timed_step(engine, runner)
        assert runner.step is not None
        batch = runner.step.batch
        if batch.num_rows == shape.requests == len(runner.step.sampled):
            decode.append(seconds)
        elif batch.num_requests == 1 and int(batch.positions[0]) == last_start >= 0:
            prefill.append(seconds)
    for name in names:
        engine.abort(name)
    return prefill[:1], decode[_WARMUP_STEPS:]


def step_records(
    engine: Engine, model: str, found: Steps, run_id: str, say: Mapping[str, str]
) -> list[Record]:
    """A record of the whole step and one of each part, in milliseconds, under one `run`.

    `say` adds to the workload what the engine cannot know: layers a preset was cut to, say.
    """
    parts = sorted(
        {part for seconds in found.seconds for part in seconds},
        key=lambda part: -sum(seconds.get(part, 0.0) for seconds in found.seconds),
    )
    return [
        Record(
            level="step",
            what=found.what,
            unit="ms",
            samples=tuple(seconds.get(part, 0.0) * 1e3 for seconds in found.seconds),
            workload={
                "model": model,
                "layers": engine.spec.num_layers,
                "context": found.shape.context,
                "rows": found.rows,
                "part": part,
                "timing": found.timing,
                **({} if found.experts is None else {"experts": found.experts}),
                **say,
            },
            conditions=_conditions(engine, found.shape),
            machine=machine(torch.get_num_threads()),
            software=software(),
            commit=commit(),
            run=run_id,
        )
        for part in (WHOLE, *(part for part in parts if part != WHOLE))
    ]


def _conditions(engine: Engine, shape: Shape) -> dict[str, Any]:
    weights, layout = engine.runner.model.weights, engine.runner.storage.layout
    formats = {
        "compute": str(weights.embedding.dtype).removeprefix("torch."),
        "attention": _held(weights.layers[0].attention.qkv),
        "kv": layout.kv_format.name,
        "index": layout.index_format.name,
    }
    mlps = [layer.mlp for layer in weights.layers]
    experts = next((mlp.gate_up for mlp in mlps if isinstance(mlp, MoeWeights)), None)
    if experts is not None:
        formats["experts"] = _held(experts)
    return {
        "formats": formats,
        "backend": engine.runner.model.kernels.backend,
        "parallel": {"plan": "tp1", "devices": 1},
        "acceptance": {"kind": "none"},
        "cache_state": _CACHE_STATE[engine.runner.storage.rows.device.type],
        "concurrency": shape.requests,
        "latency_objective": None,
    }


def _held(weight: Weight) -> str:
    if isinstance(weight, PlainWeight):
        return str(weight.data.dtype).removeprefix("torch.")
    return type(weight).__name__.removeprefix("Packed").removesuffix("Weight").lower()

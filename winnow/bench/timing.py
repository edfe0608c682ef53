"""Where the time of an engine's step goes: timers around the ops and around the runner.

Owns the names of the parts and two clocks: the host's, for ops that are done when they return,
which those of the CPU backends are, and events on a GPU.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, Protocol

import torch
from torch import Tensor

from winnow.bench.parts import WHOLE
from winnow.core.plan import StepPlan
from winnow.core.request import Request
from winnow.engine.engine import Engine
from winnow.engine.inputs import StepInputs
from winnow.engine.runner import Runner
from winnow.model.transformer import Transformer
from winnow.ops.table import Kernels

HEAD = "head"
PARTS = {
    "attention_inputs": "projections and insert",
    "select_blocks": "selection",
    "sparse_attention": "sparse attention",
    "dense_attention": "dense attention",
    "linear": "output projection",
    "head": HEAD,
    "moe": "experts",
    "mlp": "dense MLP",
    "norm": "norms",
    "add_norm": "norms",
    "sample": "sampling",
}
"""What an op's time is called."""
BETWEEN = "embedding, rotation and residuals"
SCHEDULING = "scheduling"
INPUTS = "inputs"
BOOKKEEPING = "bookkeeping and text"
REST = "rest"


class Clock(Protocol):
    """Times calls by part."""

    def around(self, part: str, function: Callable[..., Any], *args: Any) -> Any:
        """Call and time it; what it returned."""
        ...

    def take(self) -> dict[str, float]:
        """Seconds of each part since the last call."""
        ...


class Stopwatch:
    """The host's clock."""

    def __init__(self) -> None:
        self._seconds: dict[str, float] = {}

    def add(self, part: str, seconds: float) -> None:
        self._seconds[part] = self._seconds.get(part, 0.0) + seconds

    def around(self, part: str, function: Callable[..., Any], *args: Any) -> Any:
        start = time.perf_counter()
        result = function(*args)
        self.add(part, time.perf_counter() - start)
        return result

    def total(self) -> float:
        return sum(self._seconds.values())

    def take(self) -> dict[str, float]:
        taken, self._seconds = self._seconds, {}
        return taken


class Events:
    """Pairs of events on the current GPU."""

    def __init__(self) -> None:
        self._pairs: list[tuple[str, torch.cuda.Event, torch.cuda.Event]] = []

    def around(self, part: str, function: Callable[..., Any], *args: Any) -> Any:
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        result = function(*args)
        end.record()
        self._pairs.append((part, start, end))
        return result

    def take(self) -> dict[str, float]:
        torch.cuda.synchronize()
        pairs, self._pairs = self._pairs, []
        seconds: dict[str, float] = {}
        for part, start, end in pairs:
            seconds[part] = seconds.get(part, 0.0) + start.elapsed_time(end) / 1e3
        return seconds


def watched(table: Kernels, clock: Clock) -> Kernels:
    """The same ops, timed by `clock`."""

    def timed(op: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any) -> Any:
            return clock.around(PARTS[op], function, *args)

        return call

    changes: dict[str, Any] = {op: timed(op, getattr(table, op)) for op in table.served_by()}
    return replace(table, **changes)


class WatchedRunner(Runner):
    """A runner that notes its inputs, and when each of its calls began and ended."""

    def __init__(self, inner: Runner, watch: Stopwatch) -> None:
        model = inner.model
        table = watched(model.kernels, watch)
        super().__init__(Transformer(model.spec, model.weights, table), inner.storage)
        self.watch = watch
        self.begun = 0.0
        self.ended = 0.0
        self.step: StepInputs | None = None

    def inputs(self, plan: StepPlan, requests: Mapping[str, Request]) -> StepInputs:
        self.begun = time.perf_counter()
        self.step = super().inputs(plan, requests)
        self.watch.add(INPUTS, time.perf_counter() - self.begun)
        return self.step

    def logits(self, inputs: StepInputs) -> Tensor:
        start, before = time.perf_counter(), self.watch.total()
        result = super().logits(inputs)
        within = self.watch.total() - before
        self.watch.add(BETWEEN, time.perf_counter() - start - within)
        return result

    def sample(self, *args: Any) -> Any:
        result = super().sample(*args)
        self.ended = time.perf_counter()
        return result


def watch_engine(engine: Engine) -> WatchedRunner:
    """Put a watched runner into an engine; the runner."""
    runner = WatchedRunner(engine.runner, Stopwatch())
    engine.runner = runner
    return runner


def timed_step(engine: Engine, runner: WatchedRunner) -> dict[str, float]:
    """One step's seconds by part, with `WHOLE`, and `REST` for what no timer saw.

    All but `WHOLE` add up to `WHOLE`. The step must have rows.
    """
    runner.watch.take()
    start = time.perf_counter()
    engine.step()
    end = time.perf_counter()
    seconds = runner.watch.take()
    seconds[SCHEDULING] = runner.begun - start
    seconds[BOOKKEEPING] = end - runner.ended
    seconds[REST] = end - start - sum(seconds.values())
    seconds[WHOLE] = end - start
    return seconds

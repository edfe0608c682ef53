"""Steps on a GPU over random weights' or a checkpoint's layers and a random cache, by part.

K, V and index keys are random, so a long context costs no prompt. A step is timed twice: op by op
between events, with its launches queued up behind a pause, so that no time of the host's is in it,
and, a decode step, whole as replays of its capture.
"""

from __future__ import annotations

import random
import time
from dataclasses import replace
from statistics import fmean

import torch
from torch import Tensor

from winnow.bench.parts import WHOLE
from winnow.bench.timing import BETWEEN, Events, watched
from winnow.core.plan import PlannedRows, StepPlan
from winnow.core.request import Request
from winnow.engine.engine import Engine
from winnow.errors import CapacityError
from winnow.model.transformer import Transformer
from winnow.ops.sample import SampleRow
from winnow.ops.weights import MoeWeights
from winnow.spec.model import BLOCK_TOKENS, ModelSpec

_CYCLES_A_SECOND = 2.0e9
"""At most; the pause may be longer than asked for."""
_LOW, _HIGH = 0x28, 0x40
"""Bytes that as two codes and as an E4M3 scale are all ordinary numbers, near 1."""


class DeviceSteps:
    """Steps of one engine on its GPU. Its pages lose what they held."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self._runner = engine.runner
        self._runner.storage.rows.random_(_LOW, _HIGH)

    def plan(self, requests: int, context: int, rows: int) -> tuple[StepPlan, dict[str, Request]]:
        """A step of `rows` rows for each of `requests`, which are `context` tokens long with them.

        CapacityError when the cache holds fewer pages.
        """
        blocks = -(-context // BLOCK_TOKENS)
        pool = self._runner.storage.num_pages
        if requests * blocks >= pool:
            raise CapacityError(
                f"{requests} x {context} tokens take {requests * blocks} pages, the cache has "
                f"{pool - 1}: ask for fewer or shorter requests, or start with --num-pages "
                f"{requests * blocks + 1}"
            )
        rng = random.Random(context)
        pages = rng.sample(range(1, pool), requests * blocks)
        prompt = tuple(rng.randrange(self.engine.spec.vocab_size) for _ in range(context))
        planned, live = [], {}
        for r in range(requests):
            # Unlike tokens, for unlike experts.
            own = prompt[r % context :] + prompt[: r % context]
            live[f"r{r}"] = Request(f"r{r}", own, max_tokens=1 << 30)
            table = tuple(pages[r * blocks : (r + 1) * blocks])
            planned.append(PlannedRows(f"r{r}", context - rows, rows, table, samples=True))
        return StepPlan(tuple(planned)), live

    def by_part(
        self, plan: StepPlan, requests: dict[str, Request], samples: int
    ) -> list[dict[str, float]]:
        """Seconds of each part of `samples` steps, computed as they are."""
        model, events = self._runner.model, Events()
        timed = Transformer(model.spec, model.weights, watched(model.kernels, events))
        inputs = self._runner.inputs(plan, requests)
        asked = [SampleRow(seed=0, index=0, temperature=0.0)] * len(plan.rows)

        def run() -> None:
            layers = self._runner.storage.layers
            logits = timed.forward(inputs.token_ids, inputs.batch, layers, inputs.logit_rows)
            timed.kernels.sample(logits, asked)

        found = []
        with torch.inference_mode():
            launch_s = 0.0
            for number in range(samples + 2):
                # The first compiles, the second says how long the launches take.
                torch.cuda._sleep(int(_CYCLES_A_SECOND * (1.5 * launch_s + 2e-3)))
                begun = time.perf_counter()
                events.around(WHOLE, run)
                launch_s = time.perf_counter() - begun
                seconds = events.take()
                between = 2 * seconds[WHOLE] - sum(seconds.values())
                if number > 1:
                    found.append({**seconds, BETWEEN: between})
        return found

    def experts_touched(self, plan: StepPlan, requests: dict[str, Request]) -> float | None:
        """Experts that a step's rows are routed to, a layer, on average; None without experts.

        Rows of a random model are more alike than those of a trained one, so they share more.
        """
        model = self._runner.model
        counts: list[int] = []

        def counting(x: Tensor, weights: MoeWeights, spec: ModelSpec) -> Tensor:
            scores = (x.float() @ weights.router.T).sigmoid() + weights.router_bias
            chosen = scores.topk(spec.experts_per_token, dim=1).indices
            counts.append(chosen.unique().numel())
            return model.kernels.moe(x, weights, spec)

        counted = Transformer(model.spec, model.weights, replace(model.kernels, moe=counting))
        inputs = self._runner.inputs(plan, requests)
        with torch.inference_mode():
            layers = self._runner.storage.layers
            counted.forward(inputs.token_ids, inputs.batch, layers, inputs.logit_rows)
        return fmean(counts) if counts else None

    def replayed(self, plan: StepPlan, requests: dict[str, Request], samples: int) -> list[float]:
        """Seconds of each of `samples` replays of a step's capture, sampling included; none where
        the engine captures no such step."""
        graphs = self._runner.graphs
        shape = None if graphs is None else graphs.shape(plan)
        if graphs is None or shape is None:
            return []
        asked = [SampleRow(seed=0, index=0, temperature=0.0)] * len(plan.rows)
        events, seconds = Events(), []
        with torch.inference_mode():
            for number in range(samples + 2):
                graphs.fill(shape, plan, requests, asked)
                events.around(WHOLE, graphs.replay, shape, "greedy")
                taken = events.take()
                if number > 1:
                    seconds.append(taken[WHOLE])
        return seconds

"""Running a step: inputs, forward pass, sampling. Decides nothing of requests.

A step of decode rows is replayed from a capture where there are any, others are computed as they
are. A replayed step may be followed, before its tokens are known, by the one that most probably
comes next, so that the device does not wait for the host in between.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from winnow.core.plan import StepPlan
from winnow.core.request import Request
from winnow.engine.ahead import covers, next_plan
from winnow.engine.graphs import StepGraphs, is_decode, sampling_mode
from winnow.engine.inputs import StepInputs, step_inputs
from winnow.engine.shapes import StepShape, fitting
from winnow.engine.storage import PageStorage
from winnow.model.transformer import Transformer
from winnow.ops.sample import Logprobs, Sampled, SampleRow


@dataclass(frozen=True)
class Result:
    """What one request sampled: `token` is -1 where none could be chosen."""

    token: int
    logprobs: Logprobs | None = None


Results = dict[str, Result]
"""By request."""


@dataclass(frozen=True)
class _Begun:
    """A captured step that was queued: what it is, and how its tokens are read."""

    plan: StepPlan
    shape: StepShape
    mode: str
    sampling: tuple[SampleRow, ...]
    read: Callable[[], list[int]]


class Runner:
    """One model over one storage.

    `widths`, ascending: what block tables of decode rows are padded to where no step is captured,
    as captured ones are: a GPU's kernels may add up in an order that follows the width.
    """

    def __init__(
        self,
        model: Transformer,
        storage: PageStorage,
        graphs: StepGraphs | None = None,
        widths: tuple[int, ...] = (),
    ) -> None:
        self.model = model
        self.storage = storage
        self.graphs = graphs
        self._widths = widths
        self.guesses = 0
        """Steps that were begun on a guess, and those of them that were of no use."""
        self.wasted = 0
        self._ahead: _Begun | None = None
        self._results = _HostIds(graphs.buffers.sampled) if graphs is not None else None

    @property
    def is_ahead(self) -> bool:
        """Whether a step that nobody asked for yet is computed or under way."""
        return self._ahead is not None

    def inputs(self, plan: StepPlan, requests: Mapping[str, Request]) -> StepInputs:
        """Tensors of a plan's rows, where the pages are."""
        width = None
        if is_decode(plan):
            width = fitting(self._widths, max(len(row.pages) for row in plan.rows))
        return step_inputs(plan, requests, width or 0).to(self.storage.rows.device)

    @torch.inference_mode()
    def logits(self, inputs: StepInputs) -> Tensor:
        """Run the rows through the model: fp32 [sampled requests, vocab_size]."""
        return self.model.forward(
            inputs.token_ids, inputs.batch, self.storage.layers, inputs.logit_rows
        )

    @torch.inference_mode()
    def sample(self, logits: Tensor, rows: Sequence[SampleRow]) -> Sampled:
        """One token a row of logits."""
        return self.model.kernels.sample(logits, rows)

    def drop_ahead(self) -> None:
        """Forget the step that was begun on a guess: it serves nobody."""
        if self._ahead is not None:
            self.wasted += 1
            self._ahead = None

    def run(
        self,
        plan: StepPlan,
        requests: Mapping[str, Request],
        sampling: Mapping[str, SampleRow],
        go_ahead: bool = False,
    ) -> Results:
        """Compute a plan and wait for what its requests sample.

        `sampling` has the requests whose rows sample. With `go_ahead` the next step is begun, if
        there is a likely one, before this one's tokens are waited for.
        """
        begun = self._ahead
        if begun is not None and covers(begun.plan, plan):
            self._ahead = None
        else:
            self.drop_ahead()
            begun = None
        if begun is None:
            rows = [sampling[row.request_id] for row in plan.rows if row.samples]
            shape = None if self.graphs is None else self.graphs.shape(plan)
            if shape is None:
                return self._eager(plan, requests, rows)
            begun = self._begin(plan, requests, shape, rows, fed=False)
            if begun is None:
                return self._from_logits(plan, rows)
        # Slots must hold the same requests for the next step to take its tokens from them.
        if go_ahead and begun.plan.rows == plan.rows:
            self._guess(plan, requests, begun)
        names = [row.request_id for row in begun.plan.rows]
        tokens = dict(zip(names, begun.read(), strict=True))
        return {row.request_id: Result(tokens[row.request_id]) for row in plan.rows}

    def _eager(
        self, plan: StepPlan, requests: Mapping[str, Request], rows: Sequence[SampleRow]
    ) -> Results:
        inputs = self.inputs(plan, requests)
        return _results(inputs.sampled, self.sample(self.logits(inputs), rows))

    @torch.inference_mode()
    def _from_logits(self, plan: StepPlan, rows: Sequence[SampleRow]) -> Results:
        """Sample a replayed step row by row, where the host edits or reports logits."""
        assert self.graphs is not None
        sampled = self.model.kernels.sample(self.graphs.logits[: len(rows)], rows)
        return _results([row.request_id for row in plan.rows], sampled)

    @torch.inference_mode()
    def _begin(
        self,
        plan: StepPlan,
        requests: Mapping[str, Request],
        shape: StepShape,
        rows: Sequence[SampleRow],
        fed: bool,
    ) -> _Begun | None:
        """Queue a captured step and its sampling; None where it stops at logits."""
        assert self.graphs is not None
        assert self._results is not None
        mode = sampling_mode(rows)
        self.graphs.fill(shape, plan, requests, rows, fed)
        self.graphs.forward(shape)
        if mode is None:
            return None
        self.graphs.sample(shape.requests, mode)
        return _Begun(plan, shape, mode, tuple(rows), self._results.copy(len(rows)))

    def _guess(self, plan: StepPlan, requests: Mapping[str, Request], now: _Begun) -> None:
        """Begin the step that follows if all of a plan's requests go on."""
        guess = next_plan(plan, requests)
        if guess is not None:
            rows = [replace(row, index=row.index + 1) for row in now.sampling]
            self._ahead = self._begin(guess, requests, now.shape, rows, fed=True)
            self.guesses += 1


class _HostIds:
    """Copies of sampled ids to the host: two, as one is read while the next is under way."""

    def __init__(self, ids: Tensor) -> None:
        self._ids = ids
        self._on_device = ids.is_cuda
        self._copies = [
            torch.zeros(ids.shape, dtype=ids.dtype, pin_memory=self._on_device) for _ in range(2)
        ]
        self._events = [torch.cuda.Event() for _ in range(2)] if self._on_device else []
        self._turn = 0

    def copy(self, count: int) -> Callable[[], list[int]]:
        """Queue a copy of the first ids; what waits for it and returns them."""
        turn = self._turn
        self._turn = 1 - turn
        self._copies[turn][:count].copy_(self._ids[:count], non_blocking=True)
        if self._on_device:
            self._events[turn].record()

        def read() -> list[int]:
            if self._on_device:
                self._events[turn].synchronize()
            return self._copies[turn][:count].tolist()

        return read


def _results(sampled: Sequence[str], found: Sampled) -> Results:
    tokens = found.ids.tolist()
    return {
        name: Result(token, logprobs)
        for name, token, logprobs in zip(sampled, tokens, found.logprobs, strict=True)
    }

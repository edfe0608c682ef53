"""Captured steps: one forward pass and one sampling a shape, recorded at first use, then replayed.

Owns the static inputs and outputs and decides which shape a step takes. Knows nothing of scheduling
or of text. What is captured reads lengths, pages and sampling parameters where the host puts them
before each replay: nothing of the step it was captured from stays in it.
"""

from __future__ import annotations

import gc
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from time import perf_counter
from typing import Protocol

import torch
from torch import Tensor

from winnow.core.plan import StepPlan
from winnow.core.request import Request
from winnow.engine.buffers import StepBuffers
from winnow.engine.shapes import MAX_ROWS, StepShape, batch_sizes, fitting, table_widths
from winnow.engine.storage import PageStorage
from winnow.model.transformer import Transformer
from winnow.ops.sample import SampleRow

log = logging.getLogger(__name__)

Work = Callable[[], None]


class Capture(Protocol):
    def __call__(self, work: Work) -> Work:
        """Something that does `work` again each time it is called, in the same memory."""
        ...


class CudaCapture:
    """CUDA graphs that share one pool of memory: they never run at the same time."""

    def __init__(self) -> None:
        self._pool = torch.cuda.graph_pool_handle()

    def __call__(self, work: Work) -> Work:
        # Once outside of the graph: compiles kernels and fills what is made at first use.
        work()
        graph = torch.cuda.CUDAGraph()
        with _uncollected(), torch.cuda.graph(graph, pool=self._pool):
            work()

        def replay() -> None:
            # The graph reads what the work holds, so it lives as long.
            assert work is not None
            graph.replay()

        return replay


@contextmanager
def _uncollected() -> Iterator[None]:
    """No garbage is collected within: a graph that is freed while another is captured spoils it."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


class StepGraphs:
    """Captured steps of one model over one storage, for up to `max_requests` requests of up to
    `max_blocks` blocks each."""

    def __init__(
        self,
        model: Transformer,
        storage: PageStorage,
        capture: Capture,
        max_requests: int,
        max_blocks: int,
    ) -> None:
        self.sizes = batch_sizes(max_requests)
        self.widths = table_widths(max_blocks)
        self.capture = capture
        self._model = model
        self._storage = storage
        device = storage.rows.device
        most = self.sizes[-1]
        self.buffers = StepBuffers(most, max_blocks, device)
        self.logits = torch.zeros(most, model.spec.vocab_size, dtype=torch.float32, device=device)
        """fp32 [requests, vocab_size] of the last step; rows of padding mean nothing."""
        self._forward: dict[StepShape, Work] = {}
        self._sampling: dict[tuple[int, str], Work] = {}

    def shape(self, plan: StepPlan) -> StepShape | None:
        """The shape that a plan of decode rows is padded to; None for one that is computed as it
        is, with chunks of prompts or more than there is room for."""
        if not is_decode(plan):
            return None
        return self.fitting(len(plan.rows), 1, max(len(row.pages) for row in plan.rows))

    def fitting(self, requests: int, rows: int, blocks: int) -> StepShape | None:
        """The smallest shape for `requests` with `rows` each and up to `blocks` blocks."""
        size, width = fitting(self.sizes, requests), fitting(self.widths, blocks)
        # Logits are kept of every row.
        if size is None or width is None or rows > MAX_ROWS or size * rows > self.sizes[-1]:
            return None
        return StepShape(size, rows, width)

    def fill(
        self,
        shape: StepShape,
        plan: StepPlan,
        requests: Mapping[str, Request],
        sampling: Sequence[SampleRow] = (),
        fed: bool = False,
    ) -> None:
        """Queue the inputs of a plan's step.

        `fed`: its tokens are those that the last step sampled, slot by slot.
        """
        self.buffers.fill(shape, plan, requests, sampling, fed)

    def forward(self, shape: StepShape) -> None:
        """Queue a filled step: its logits come to lie in `logits`, every row's, in the plan's
        order."""
        if shape not in self._forward:
            self._forward[shape] = self._captured(shape)
        self._forward[shape]()

    def replay(self, shape: StepShape, mode: str) -> None:
        """Queue a filled step and its sampling."""
        self.forward(shape)
        self.sample(shape.requests, mode)

    def sample(self, requests: int, mode: str) -> Tensor:
        """Queue the sampling of the last step, whose shape had `requests`: int64 [requests], -1
        where no token could be chosen. `mode` is one of `sampling_mode`'s but None."""
        key = (requests, mode)
        if key not in self._sampling:
            shape = StepShape(requests, 1, self.widths[0])
            columns = self.buffers.views(shape).columns
            columns = replace(columns, drawn=mode != "greedy", ranked=mode == "ranked")
            ids = self.buffers.sampled[:requests]

            def work() -> None:
                ids.copy_(self._model.kernels.sample(self.logits[:requests], columns).ids)

            self._sampling[key] = self.capture(work)
        self._sampling[key]()
        return self.buffers.sampled[:requests]

    def _captured(self, shape: StepShape) -> Work:
        begun = perf_counter()
        views = self.buffers.views(shape)
        logits = self.logits[: shape.num_rows]
        layers = self._storage.layers

        def work() -> None:
            # A batch of its own: it keeps what was once read of it.
            batch = replace(views.batch)
            self._model.forward(views.token_ids(), batch, layers, None, logits)

        captured = self.capture(work)
        log.info(
            "captured a step of %d x %d rows over %d blocks in %.2f s",
            shape.requests, shape.rows, shape.width, perf_counter() - begun,
        )  # fmt: skip
        return captured


def is_decode(plan: StepPlan) -> bool:
    """Whether a plan has one row of each request, and its token is asked for."""
    return bool(plan.rows) and all(row.samples and row.count == 1 for row in plan.rows)


def sampling_mode(rows: Sequence[SampleRow]) -> str | None:
    """How a captured sampling serves `rows`: greedy, drawn, ranked; None for what edits logits or
    reports them, for which the host must see each row."""
    if any(row.edits_logits or row.logprobs is not None for row in rows):
        return None
    drawn = [row for row in rows if row.temperature]
    if not drawn:
        return "greedy"
    return "ranked" if any(row.top_k or row.top_p < 1 for row in drawn) else "drawn"

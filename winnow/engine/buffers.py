"""Static inputs of captured steps: where a captured step reads, and how the host fills it.

One packed copy a step brings all but the block tables, of which only rows that changed are copied.
Knows which request is in which slot, and nothing of what a step computes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from winnow.core.plan import StepPlan
from winnow.core.request import Request
from winnow.engine.shapes import StepShape
from winnow.ops.batch import Batch
from winnow.ops.sample import SampleColumns, SampleRow, uniform

_ROW_FIELDS = ("feed", "positions", "token_ids")
_REQUEST_FIELDS = ("kv_lens", "top_k", "temperature", "top_p", "min_p", "uniform")
_FLOATS = ("temperature", "top_p", "min_p", "uniform")
_MOST = 2**31 - 1
_TURNS = 2
"""Host copies: one may still be read by the device while the next is written."""


@dataclass(frozen=True)
class StepViews:
    """What a captured step of one shape reads, on the device.

    `feed` int64 [rows]: where in `tokens` each row's token lies; `tokens` int64 [*] holds what was
    sampled last, one a slot, and then the tokens that the host gave. `columns` are the sampling's
    parameters, [requests, 1] each.
    """

    tokens: Tensor
    feed: Tensor
    columns: SampleColumns
    batch: Batch

    def token_ids(self) -> Tensor:
        """The rows' tokens: what failed to be sampled counts as token 0."""
        return self.tokens.index_select(0, self.feed).clamp_(min=0)


class StepBuffers:
    """Inputs for steps of up to `max_requests` requests and as many rows."""

    def __init__(self, max_requests: int, max_blocks: int, device: torch.device) -> None:
        self.max_requests = max_requests
        self._device = device
        self._pinned = device.type == "cuda"
        fields = len(_ROW_FIELDS) + len(_REQUEST_FIELDS)
        # What was sampled last comes first: the host's copy does not touch it.
        self._packed = torch.zeros((1 + fields) * max_requests, dtype=torch.int64, device=device)
        self.sampled = self._packed[:max_requests]
        """int64 [max_requests]: the token that each slot sampled last, -1 where it could not."""
        self._given = self._packed[max_requests:]
        self._turns = [self._host(fields * max_requests) for _ in range(_TURNS)]
        self._copied: list[torch.cuda.Event | None] = [None] * _TURNS
        self._turn = 0
        self._tables: dict[int, _Tables] = {}
        self._max_blocks = max_blocks

    def views(self, shape: StepShape) -> StepViews:
        """Views of a shape's inputs, to be read by one captured step."""
        requests, rows = shape.requests, shape.rows
        held = {
            name: _floats(self._given[place]) if name in _FLOATS else self._given[place]
            for name, place in _places(shape).items()
        }
        order = torch.arange(requests + 1, device=self._device)
        batch = Batch(
            positions=held["positions"],
            row_request=order[:-1].repeat_interleave(rows),
            row_starts=order * rows,
            kv_lens=held["kv_lens"],
            block_tables=self._table(shape.width).device[:requests],
        )
        column = {name: held[name].unsqueeze(1) for name in (*_FLOATS, "top_k")}
        columns = SampleColumns(
            temperature=column["temperature"],
            top_k=column["top_k"],
            top_p=column["top_p"],
            min_p=column["min_p"],
            uniform=column["uniform"],
        )
        return StepViews(self._packed, held["feed"], columns, batch)

    def fill(
        self,
        shape: StepShape,
        plan: StepPlan,
        requests: Mapping[str, Request],
        sampling: Sequence[SampleRow],
        fed: bool,
    ) -> None:
        """Put a plan's rows where a step of `shape` reads them; the plan's requests take its first
        slots in order.

        `fed` takes each row's token from what its slot sampled last, which the host need not
        know. `sampling` has a row for each request, or none where nothing is sampled.
        """
        turn, copied = self._turns[self._turn], self._copied[self._turn]
        if copied is not None:
            copied.synchronize()
        given, places = turn.numpy, _places(shape)
        self._write(given, places, shape, plan, requests, sampling, fed)
        end = places["token_ids"].stop
        self._given[:end].copy_(turn.tensor[:end], non_blocking=True)
        if self._pinned:
            if copied is None:
                copied = self._copied[self._turn] = torch.cuda.Event()
            copied.record()
        self._turn = (self._turn + 1) % _TURNS
        if not fed:
            self._table(shape.width).fill(plan, requests)

    def _write(
        self,
        given: NDArray[np.int64],
        places: Mapping[str, slice],
        shape: StepShape,
        plan: StepPlan,
        requests: Mapping[str, Request],
        sampling: Sequence[SampleRow],
        fed: bool,
    ) -> None:
        count = len(plan.rows)
        rows = count * shape.rows
        # Padding: no tokens, and token 0 at position 0 for each of its rows.
        given[: places["token_ids"].stop] = 0

        def put(name: str, values: Sequence[int] | Sequence[float] | NDArray[np.int64]) -> None:
            own = given[places[name]]
            own = own.view(np.float64) if name in _FLOATS else own
            own[: len(values)] = values

        starts = np.array([row.start for row in plan.rows], dtype=np.int64)
        put("positions", (starts[:, None] + np.arange(shape.rows)).reshape(-1))
        put("kv_lens", starts + shape.rows)
        if fed:
            put("feed", np.arange(count))
        else:
            tokens: list[int] = []
            for row in plan.rows:
                own = requests[row.request_id]
                tokens += own.token_ids(row.start, row.start + row.count)
            put("token_ids", tokens)
            first = self.max_requests + places["token_ids"].start
            put("feed", np.arange(first, first + rows))
        # Padding reads the token of the first row: no other experts for its sake.
        feed = given[places["feed"]]
        feed[rows:] = feed[0]
        given[places["temperature"]].view(np.float64)[:] = 1.0
        if sampling:
            put("temperature", [row.temperature for row in sampling])
            # No vocabulary is wider, and a larger number may be asked for than 64 bits hold.
            put("top_k", [min(row.top_k, _MOST) for row in sampling])
            put("top_p", [row.top_p for row in sampling])
            put("min_p", [row.min_p for row in sampling])
            put("uniform", [uniform(r.seed, r.index) if r.temperature else 0.0 for r in sampling])

    def _host(self, count: int) -> _Host:
        return _Host(torch.zeros(count, dtype=torch.int64, pin_memory=self._pinned))

    def _table(self, width: int) -> _Tables:
        if width not in self._tables:
            shape = (self.max_requests, width)
            host = torch.zeros(shape, dtype=torch.int64, pin_memory=self._pinned)
            device = torch.zeros(shape, dtype=torch.int64, device=self._device)
            self._tables[width] = _Tables(_Host(host), device)
        return self._tables[width]


class _Host:
    """Memory of the host, as a tensor and as an array."""

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor
        self.numpy: NDArray[np.int64] = tensor.numpy()


@dataclass
class _Slot:
    """Whose pages a row of a block table holds, and how many. Pages of a request are only added
    to until it is preempted."""

    request: Request | None = None
    preemptions: int = 0
    pages: int = 0


class _Tables:
    """Block tables of one width, a row a slot, on the host and on the device."""

    def __init__(self, host: _Host, device: Tensor) -> None:
        self._host = host
        self.device = device
        self._slots = [_Slot() for _ in range(device.shape[0])]

    def fill(self, plan: StepPlan, requests: Mapping[str, Request]) -> None:
        """Bring the rows of the plan's requests up to date, in the plan's order."""
        changed = []
        for slot, row in enumerate(plan.rows):
            request, held = requests[row.request_id], self._slots[slot]
            same = held.request is request and held.preemptions == request.num_preemptions
            if same and held.pages == len(row.pages):
                continue
            first = held.pages if same else 0
            own = self._host.numpy[slot]
            if not same:
                own[len(row.pages) :] = 0
            own[first : len(row.pages)] = row.pages[first:]
            self._slots[slot] = _Slot(request, request.num_preemptions, len(row.pages))
            changed.append(slot)
        # The host waits for a step's tokens before it writes here again, so no copy is under way
        # but of rows that only grow, past what that step reads.
        for first, end in _runs(changed):
            source, target = self._host.tensor[first:end], self.device[first:end]
            target.copy_(source, non_blocking=True)


def _runs(slots: Sequence[int]) -> list[tuple[int, int]]:
    """Ascending slots as (first, end) of runs; small gaps are copied too, as a copy costs more."""
    runs: list[tuple[int, int]] = []
    for slot in slots:
        if runs and slot - runs[-1][1] < 4:
            runs[-1] = (runs[-1][0], slot + 1)
        else:
            runs.append((slot, slot + 1))
    return runs


def _places(shape: StepShape) -> dict[str, slice]:
    """Where each field of a step lies in what the host gives, packed: first those that do not
    depend on the rows of a request."""
    places, start = {}, 0
    for name in (*_REQUEST_FIELDS, *_ROW_FIELDS):
        length = shape.num_rows if name in _ROW_FIELDS else shape.requests
        places[name] = slice(start, start + length)
        start += length
    return places


def _floats(packed: Tensor) -> Tensor:
    return packed.view(torch.float64)

"""Which request computes which tokens in each step. Knows nothing of tensors, text or time.

Continuous batching with chunked prefill, prefix caching and preemption by recomputation. Service
is in order of arrival: every running request arrived before every waiting one, and the oldest
has rows in every step, so no request starves.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass, field

from winnow.core.cache import Cache
from winnow.core.limits import check_fits, check_well_formed
from winnow.core.plan import PlannedRows, StepPlan
from winnow.core.request import FinishReason, Request, State
from winnow.errors import RequestError
from winnow.spec.model import BLOCK_TOKENS


@dataclass(frozen=True)
class Stats:
    """Counts at one moment, and totals since the start (the last three).

    `pages_used` are held by requests, `pages_cached` by none but still findable. The prefix totals
    count prompt tokens once each, when a request first runs.
    """

    num_waiting: int
    num_running: int
    pages_used: int
    pages_cached: int
    preemptions: int
    prefix_hit_tokens: int
    prefix_query_tokens: int


@dataclass
class _Draft:
    """A plan in the making; `budget` is the number of rows still free."""

    budget: int
    rows: dict[str, PlannedRows] = field(default_factory=dict)
    preempted: list[str] = field(default_factory=list)

    def add(self, request: Request, count: int) -> None:
        self.rows[request.request_id] = PlannedRows(
            request.request_id,
            request.num_computed,
            count,
            tuple(request.pages),
            samples=count == request.num_uncomputed,
        )
        self.budget -= count

    def drop(self, request_id: str) -> None:
        if request_id in self.rows:
            self.budget += self.rows.pop(request_id).count
        self.preempted.append(request_id)


class Scheduler:
    """Takes requests, plans steps, learns what they sampled.

    `plan()` and `complete()` alternate; `add()`, `abort()` and `finish()` may come at any moment.
    A step has up to `max_step_tokens` rows and up to `max_running` requests hold pages.
    `max_tokens_per_request` bounds prompt and output together (None: only the pages do).
    """

    def __init__(
        self,
        num_pages: int,
        max_step_tokens: int,
        max_running: int = 256,
        prefix_caching: bool = True,
        max_tokens_per_request: int | None = None,
    ) -> None:
        if max_step_tokens < 1 or max_running < 1:
            raise ValueError(f"a step of {max_step_tokens} rows for {max_running} requests is none")
        if max_tokens_per_request is not None and max_tokens_per_request < 2:
            raise ValueError(f"{max_tokens_per_request} tokens hold no prompt and output")
        self.max_step_tokens = max_step_tokens
        self.max_running = max_running
        self.max_tokens_per_request = max_tokens_per_request
        self.cache = Cache(num_pages, prefix_caching=prefix_caching)
        self._waiting: OrderedDict[str, Request] = OrderedDict()
        self._running: OrderedDict[str, Request] = OrderedDict()
        self._in_flight: StepPlan | None = None
        self._planned: dict[str, Request] = {}
        self._num_arrived = 0
        self._preemptions = 0
        self._prefix_hit_tokens = 0
        self._prefix_query_tokens = 0

    def add(self, request: Request) -> None:
        """Queue a new request.

        Raises RequestError for a request that means nothing or whose id is in use, CapacityError
        for one that could never fit.
        """
        assert request.state is State.WAITING
        assert not request.output, "a request is scheduled once"
        if request.request_id in self._waiting or request.request_id in self._running:
            raise RequestError(f"request id {request.request_id!r} is in use: choose another")
        check_well_formed(request)
        check_fits(request, self.cache.pool.num_usable, self.max_tokens_per_request)
        request.arrival = self._num_arrived
        self._num_arrived += 1
        self._waiting[request.request_id] = request

    def plan(self, admit: bool = True) -> StepPlan:
        """Decide the next step; it is in flight until `complete()`.

        First the running requests that need one row, then those that need more, then waiting ones,
        each in order of arrival. The plan is empty only if there are no requests, and then it is
        not in flight. Without `admit` no waiting request starts, so with none running it is empty
        too: for a caller that has begun to compute what the running ones need next.
        """
        assert self._in_flight is None, "the last plan has not been completed"
        draft = _Draft(self.max_step_tokens)
        for request in sorted(self._running.values(), key=lambda r: r.num_uncomputed > 1):
            self._continue(request, draft)
        # Whoever was preempted is now at the head of the queue. Readmitting it at once would
        # take back the page that it gave way for.
        if admit and not draft.preempted:
            self._admit(draft)
        plan = StepPlan(tuple(draft.rows.values()), tuple(draft.preempted))
        if plan.rows:
            self._in_flight = plan
            self._planned = {request_id: self._running[request_id] for request_id in draft.rows}
        return plan

    def complete(self, plan: StepPlan, tokens: Mapping[str, int]) -> tuple[str, ...]:
        """Take the results of the plan in flight; returns the requests that it finished.

        `tokens` has the sampled token of every request whose rows sample and that has not been
        aborted meanwhile; tokens of aborted ones are ignored. An empty plan completes to nothing.
        """
        if not plan.rows:
            return ()
        assert plan is self._in_flight, "another plan is in flight"
        assert tokens.keys() <= {rows.request_id for rows in plan.rows if rows.samples}
        requests, self._in_flight, self._planned = self._planned, None, {}
        finished: list[str] = []
        for rows in plan.rows:
            request = requests[rows.request_id]
            if request.is_finished:
                self.cache.release(request)
                continue
            self.cache.advance(request, rows.count)
            if rows.samples:
                request.append(tokens[rows.request_id])
            if request.is_finished:
                del self._running[rows.request_id]
                self.cache.release(request)
                finished.append(rows.request_id)
        return tuple(finished)

    def abort(self, request_id: str, reason: FinishReason = "abort") -> bool:
        """Finish a request if it is still there; False if it is not."""
        if request_id not in self._waiting and request_id not in self._running:
            return False
        self.finish(request_id, reason)
        return True

    def finish(self, request_id: str, reason: FinishReason) -> None:
        """End a request that waits or runs.

        Its pages are given back at once, or at `complete()` if the plan in flight has its rows,
        which may still be being written. After "error" nothing that it computed is found again.
        """
        queue = self._running if request_id in self._running else self._waiting
        request = queue.pop(request_id)
        request.finish(reason)
        if reason == "error":
            self.cache.distrust(request)
        if self._planned.get(request_id) is not request:
            self.cache.release(request)

    def stats(self) -> Stats:
        return Stats(
            num_waiting=len(self._waiting),
            num_running=len(self._running),
            pages_used=self.cache.pool.num_referenced,
            pages_cached=self.cache.pool.num_cached,
            preemptions=self._preemptions,
            prefix_hit_tokens=self._prefix_hit_tokens,
            prefix_query_tokens=self._prefix_query_tokens,
        )

    def _continue(self, request: Request, draft: _Draft) -> None:
        """Plan a running request's next rows, preempting from the youngest until they fit.

        The oldest always gets there: alone, it fits.
        """
        if request.state is not State.RUNNING or not draft.budget:
            return
        count = min(draft.budget, request.num_uncomputed)
        while not self.cache.grow(request, request.num_computed + count):
            if self._preempt_youngest(draft) is request:
                return
        draft.add(request, count)

    def _preempt_youngest(self, draft: _Draft) -> Request:
        request_id, request = self._running.popitem()
        self.cache.release(request)
        draft.drop(request_id)
        request.num_computed = 0
        request.num_preemptions += 1
        request.state = State.WAITING
        self._waiting[request_id] = request
        self._waiting.move_to_end(request_id, last=False)
        self._preemptions += 1
        return request

    def _admit(self, draft: _Draft) -> None:
        """Start waiting requests while there are rows and pages; the first that does not fit
        blocks those behind it.

        Pages are allocated for this step's rows only, but a request fits only if all its known
        tokens do: one that did not would give way before its first token. Rows are left only when
        no running prompt is unfinished, so the available pages are promised to nobody.
        """
        while self._waiting and draft.budget and len(self._running) < self.max_running:
            request = next(iter(self._waiting.values()))
            # Even a full hit leaves one block to compute: no look-up where there is no page.
            available = self.cache.pool.num_available
            hits = self.cache.hits(request) if available else []
            if self.cache.num_wanted(request, hits) > available:
                return
            self._start(request, hits)
            count = min(draft.budget, request.num_uncomputed)
            grown = self.cache.grow(request, request.num_computed + count)
            assert grown, "the pages that were counted are not there"
            draft.add(request, count)

    def _start(self, request: Request, hits: list[int]) -> None:
        """Move the head of the queue to the running requests."""
        self.cache.attach(request, hits)
        del self._waiting[request.request_id]
        self._running[request.request_id] = request
        request.state = State.RUNNING
        if self.cache.prefix_caching and not request.num_preemptions:
            request.num_cached = request.num_computed
            self._prefix_hit_tokens += request.num_cached
            self._prefix_query_tokens += len(request.prompt)

    def check_invariants(self) -> None:
        """Assert everything that must hold between any two calls. For tests: reads all tokens."""
        running, waiting = list(self._running.values()), list(self._waiting.values())
        arrivals = [request.arrival for request in (*running, *waiting)]
        assert arrivals == sorted(set(arrivals)), "a request is out of its order of arrival"
        assert len(running) <= self.max_running
        for request in running:
            assert request.state is State.RUNNING
            assert request.num_uncomputed > 0
        for request in waiting:
            assert request.state is State.WAITING
            assert not request.pages
            assert request.num_computed == 0
        ended = [r for r in self._planned.values() if r.is_finished]
        self.cache.check_invariants([*running, *ended])
        self._check_in_flight()

    def _check_in_flight(self) -> None:
        """The plan in flight names the pages its requests hold, and writes where none may read."""
        plan = self._in_flight or StepPlan()
        assert self._planned.keys() == {rows.request_id for rows in plan.rows}
        for rows in plan.rows:
            assert list(rows.pages) == self._planned[rows.request_id].pages
            for page in rows.pages[rows.start // BLOCK_TOKENS :]:
                assert self.cache.pool.references[page] == 1, "a page being written is shared"
                assert page not in self.cache.index, "a page being written is registered"

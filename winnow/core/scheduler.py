"""Which request computes which tokens in each step. Knows nothing of tensors, text or time.

Continuous batching with chunked prefill, prefix caching and preemption by recomputation. Service
is in order of arrival, except that short prompts go beside a long one (`winnow.core.shares`). The
oldest request has at least three quarters of a step, or all it needs, so no request starves.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass, field
from heapq import merge

from winnow.core.cache import Cache
from winnow.core.limits import check_fits, check_well_formed
from winnow.core.plan import PlannedRows, StepPlan
from winnow.core.request import FinishReason, Request, State, num_blocks
from winnow.core.shares import shares
from winnow.errors import RequestError
from winnow.spec.model import BLOCK_TOKENS

MAX_LOOKED_AT = 32
"""Waiting requests that may go beside a prompt that does not fit a step. Each costs a look-up a hit
in every such step."""


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

        First the running requests that need one row, then prompts, running or waiting, each in
        order of arrival; `shares()` says how many rows a prompt gets. The plan is empty only if
        there are no requests, and then it is not in flight. Without `admit` no waiting request
        starts, so with none running it is empty too: for a caller that has begun to compute what
        the running ones need next.
        """
        assert self._in_flight is None, "the last plan has not been completed"
        draft = _Draft(self.max_step_tokens)
        for request in list(self._running.values()):
            if request.num_uncomputed == 1:
                self._continue(request, min(1, draft.budget), draft)
        prompts = self._prompts(draft, admit)
        counts = self._shares(prompts, draft)
        # Hits are held before rows take new pages, which may be cached ones.
        for (request, hits), count in zip(prompts, counts, strict=True):
            if count and request.state is State.WAITING:
                self._start(request, hits)
        for (request, _), count in zip(prompts, counts, strict=True):
            self._continue(request, count, draft)
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

    def end_all(self, reason: FinishReason) -> None:
        """End every request and forget the plan in flight and what every page holds.

        For a step that broke off at a moment nobody knows, of this class's own calls too: nothing
        that was true before is relied on.
        """
        for request in (*self._running.values(), *self._waiting.values(), *self._planned.values()):
            request.pages.clear()
            if not request.is_finished:
                request.finish(reason)
        self._running.clear()
        self._waiting.clear()
        self._in_flight, self._planned = None, {}
        self.cache = Cache(self.cache.pool.num_pages, prefix_caching=self.cache.prefix_caching)

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

    def _continue(self, request: Request, count: int, draft: _Draft) -> None:
        """Plan a running request's next rows, preempting from the youngest until they fit.

        The oldest always gets there: alone, it fits.
        """
        if request.state is not State.RUNNING or not count:
            return
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
        _insert(self._waiting, request)
        self._preemptions += 1
        return request

    def _prompts(self, draft: _Draft, admit: bool) -> list[tuple[Request, list[int]]]:
        """The prompts that may have rows, in order of arrival, each with its hits if it waits.

        Pages are allocated for a step's rows only, but a waiting request is among them only if all
        its known tokens fit beside those of the prompts ahead of it: else it would give way before
        its first token. The first that does not fit blocks those waiting behind it.
        """
        if not draft.budget:
            return []
        waiting = self._admissible(draft) if admit else []
        running = [r for r in self._running.values() if r.num_uncomputed > 1]
        available, places = self.cache.pool.num_available, self.max_running - len(self._running)
        rows = draft.budget
        prompts: list[tuple[Request, list[int]]] = []
        for request in merge(running, waiting, key=lambda r: r.arrival):
            hits: list[int] = []
            if request.state is State.RUNNING:
                available -= num_blocks(request.num_tokens) - len(request.pages)
            elif not places:
                continue
            else:
                # Even a full hit leaves one block to compute: no look-up where there is no page.
                hits = self.cache.hits(request) if available > 0 else []
                wanted = self.cache.num_wanted(request, hits)
                if wanted > available:
                    places = 0
                    continue
                places -= 1
                available -= wanted
                if prompts and self._computes_for(*prompts[0], request, hits, draft.budget):
                    continue
            prompts.append((request, hits))
            need = request.num_uncomputed - len(hits) * BLOCK_TOKENS
            if 0 <= rows < need:
                places = min(places, MAX_LOOKED_AT)
            rows -= need
        return prompts

    def _computes_for(
        self, first: Request, first_hits: list[int], other: Request, hits: list[int], rows: int
    ) -> bool:
        """Whether the first prompt, not done in this step, computes the block that a waiting one
        lacks: that waits for it, rather than compute it beside."""
        done = first.num_computed + len(first_hits) * BLOCK_TOKENS
        if first.num_tokens - done <= rows or done // BLOCK_TOKENS != len(hits):
            return False
        return self.cache.will_hit(other, first, len(hits))

    def _admissible(self, draft: _Draft) -> list[Request]:
        """The waiting requests that may start in this step if there are pages and places.

        The first prompt in order takes pages of requests that arrived after it, as a running one
        would. Where a request gave way in this step, no other starts: whoever gave way is ahead of
        it in the queue, and would take back at once the page that it gave.
        """
        waiting = list(self._waiting.values())
        running = (r for r in self._running.values() if r.num_uncomputed > 1)
        oldest = next(running, None)
        if not waiting or waiting[0].request_id in draft.preempted:
            return []
        if oldest is None or waiting[0].arrival < oldest.arrival:
            self._make_room(waiting[0], draft)
            return waiting[:1] if draft.preempted else waiting
        return [] if draft.preempted else waiting

    def _make_room(self, request: Request, draft: _Draft) -> None:
        """Preempt younger requests until a waiting one fits; none if that would not be enough."""
        older = [r for r in self._running.values() if r.arrival < request.arrival]
        if len(older) == len(self._running) or self._fits(request):
            return
        kept = {page for r in older for page in r.pages}
        shared = kept.intersection(self.cache.hits(request))
        wanted = num_blocks(request.num_tokens) - len(shared)
        if wanted > self.cache.pool.num_usable - len(kept):
            return
        while not self._fits(request):
            self._preempt_youngest(draft)

    def _fits(self, request: Request) -> bool:
        """Whether there are pages for all known tokens of a waiting request."""
        wanted = self.cache.num_wanted(request, self.cache.hits(request))
        return wanted <= self.cache.pool.num_available

    def _shares(self, prompts: list[tuple[Request, list[int]]], draft: _Draft) -> tuple[int, ...]:
        """Rows of this step for each of the prompts."""
        needs = [r.num_uncomputed - len(hits) * BLOCK_TOKENS for r, hits in prompts]
        first = prompts[0][0].arrival if prompts else 0
        behind = sum(self._running[name].arrival > first for name in draft.rows)
        return shares(needs, draft.budget, taken_behind=behind)

    def _start(self, request: Request, hits: list[int]) -> None:
        """Move a waiting request to the running ones."""
        self.cache.attach(request, hits)
        del self._waiting[request.request_id]
        _insert(self._running, request)
        request.state = State.RUNNING
        if self.cache.prefix_caching and not request.num_preemptions:
            request.num_cached = request.num_computed
            self._prefix_hit_tokens += request.num_cached
            self._prefix_query_tokens += len(request.prompt)

    def check_invariants(self) -> None:
        """Assert everything that must hold between any two calls. For tests: reads all tokens."""
        running, waiting = list(self._running.values()), list(self._waiting.values())
        for queue in (running, waiting):
            arrivals = [request.arrival for request in queue]
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


def _insert(queue: OrderedDict[str, Request], request: Request) -> None:
    """Add a request to a queue that is, and stays, in order of arrival."""
    later = [r.request_id for r in queue.values() if r.arrival > request.arrival]
    queue[request.request_id] = request
    for request_id in later:
        queue.move_to_end(request_id)

"""The scheduler under random traffic, against a memory in which every slot says what it holds.

The simulated runner writes, for each planned row, a digest of the salt and of all tokens up to
that row: what K and V depend on. It then reads back every position that the row attends to. A page
that is shared wrongly, evicted early, found too soon or kept after an error holds other digests.
"""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import dataclass, field

import pytest

from winnow.core.request import Request, State, num_blocks
from winnow.core.scheduler import Scheduler
from winnow.errors import CapacityError

BLOCK = 128
SALTS = ("", "tenant")
VOCABULARY = 60
STOP = 0


@dataclass(frozen=True)
class Load:
    """One kind of traffic. Rates are chances per step, or per live request and step."""

    num_pages: int
    max_step_tokens: int
    max_running: int
    max_live: int
    longest_prompt: int | None = None
    """In tokens; None: all that fits."""
    arrivals: float = 0.3
    aborts: float = 0.002
    errors: float = 0.001
    prefix_caching: bool = True
    exercises: tuple[str, ...] = ()
    """Events without which this traffic would prove nothing."""


@dataclass(eq=False)
class Client:
    """What the simulation knows of a request, apart from what the scheduler does."""

    request: Request
    deadline: int
    """Step by which it must have ended unless it is aborted."""
    digests: list[int] = field(default_factory=list)
    has_run: bool = False
    has_failed: bool = False

    def known(self):
        """A digest per known token."""
        tokens = self.request.tokens
        for position in range(len(self.digests), len(tokens)):
            before = self.digests[-1] if self.digests else SALTS.index(self.request.cache_salt)
            self.digests.append(hash((before, position, tokens[position])))
        return self.digests


class Simulation:
    """Clients, runner and referee around one scheduler."""

    def __init__(self, load, seed):
        self.load = load
        self.rng = random.Random(seed)
        self.scheduler = Scheduler(
            load.num_pages, load.max_step_tokens, load.max_running, load.prefix_caching
        )
        self.capacity = BLOCK * (load.num_pages - 1)
        self.longest = load.longest_prompt or self.capacity
        self.documents = [self.tokens(self.capacity) for _ in range(3)]
        self.live: dict[str, Client] = {}
        """By id, in order of arrival."""
        self.ended: list[Request] = []
        self.memory: dict[int, list[int | None]] = {}
        self.writers: dict[int, Client] = {}
        self.step_number = 0
        self.num_added = 0
        self.last_started = -1
        self.open = True
        """Whether requests arrive and are ended from outside."""
        self.seen: Counter[str] = Counter()

    def tokens(self, count):
        return tuple(self.rng.randrange(VOCABULARY) for _ in range(count))

    def prompt(self):
        """A document's start, or an earlier conversation, or nothing; then new text."""
        rng = self.rng
        source = rng.choice([*self.documents, *(r.tokens for r in self.ended[-3:]), ()])
        edge = BLOCK * rng.randrange(1 + self.longest // BLOCK)
        shared = rng.choice((edge - 1, edge, edge + 1, rng.randrange(self.longest), len(source)))
        new = rng.choice((0, 0, 1, 2, rng.randrange(BLOCK), rng.randrange(self.longest)))
        return (*source[: max(shared, 0)], *self.tokens(new))[: self.longest + 2]

    def arrive(self):
        prompt = self.prompt() or (1,)
        max_tokens = self.rng.choice((1, 2, self.rng.randrange(1, 40), self.rng.randrange(1, 300)))
        # Now and then the id of a request that ended, perhaps in this very step.
        names = [r.request_id for r in self.ended[-1:] if r.request_id not in self.live]
        reused = names and self.rng.random() < 0.3
        request = Request(
            names[0] if reused else f"request {self.num_added}",
            prompt,
            max_tokens,
            min_tokens=self.rng.choice((0, 0, self.rng.randrange(50))),
            stop_ids=self.rng.choice((frozenset(), frozenset({STOP}))),
            cache_salt=self.rng.choice(SALTS),
        )
        if len(prompt) + max_tokens - 1 > self.capacity:
            with pytest.raises(CapacityError):
                self.scheduler.add(request)
            return
        self.scheduler.add(request)
        self.num_added += 1
        # Each step computes a row of the oldest, and the oldest is never preempted.
        ahead = [*(client.request for client in self.live.values()), request]
        work = sum(len(r.prompt) + r.max_tokens for r in ahead)
        self.live[request.request_id] = Client(request, self.step_number + work)

    def disturb(self, in_flight):
        """Ends that come from outside, and arrivals, at any moment."""
        rng, load = self.rng, self.load
        for name, client in list(self.live.items()):
            chance = rng.random()
            if chance < load.aborts:
                assert self.scheduler.abort(name)
                self.end(client, "abort", in_flight)
            elif chance < load.aborts + load.errors:
                self.scheduler.finish(name, "error")
                self.end(client, "error", in_flight)
                client.has_failed = True
            elif client.request.output and chance < 2 * load.aborts + load.errors:
                self.scheduler.finish(name, "stop")
                self.end(client, "stop", in_flight)
            else:
                continue
            self.settle()
        if len(self.live) < load.max_live and rng.random() < load.arrivals:
            self.arrive()
            self.settle()

    def end(self, client, reason, in_flight):
        request = client.request
        del self.live[request.request_id]
        self.ended.append(request)
        assert (request.state, request.finish_reason) == (State.FINISHED, reason)
        self.seen[f"{reason} in flight" if in_flight and request.pages else reason] += 1

    def execute(self, plan, clients):
        """Write every planned row, then read all that the rows attend to."""
        for rows in plan.rows:
            client = clients[rows.request_id]
            known = client.known()
            for position in range(rows.start, rows.start + rows.count):
                page, offset = rows.pages[position // BLOCK], position % BLOCK
                if offset == 0:
                    self.memory[page] = [None] * BLOCK
                    self.writers[page] = client
                assert self.writers[page] is client, "two requests write to a page"
                self.memory[page][offset] = known[position]
        for rows in plan.rows:
            known, end = clients[rows.request_id].known(), rows.start + rows.count
            for block, page in enumerate(rows.pages):
                expected = known[block * BLOCK : min(end, (block + 1) * BLOCK)]
                assert self.memory[page][: len(expected)] == expected, "a row reads another's slots"

    def settle(self):
        """Check the state between two calls, and empty the pages that nobody may read."""
        self.scheduler.check_invariants()
        registered = self.scheduler.cache.index.entries
        assert not any(self.writers[page].has_failed for page in registered), "poison is found"
        pool = self.scheduler.cache.pool
        for page in list(self.memory):
            if page not in pool.references and not pool.is_cached(page):
                del self.memory[page]

    def check_plan(self, plan):
        assert plan.num_rows <= self.load.max_step_tokens
        assert bool(plan.rows) == bool(self.live)
        names = [rows.request_id for rows in plan.rows]
        assert len(set(names)) == len(names)
        assert not set(names) & set(plan.preempted)
        for rows in plan.rows:
            client = self.live[rows.request_id]
            request = client.request
            assert rows.count >= 1
            assert rows.start == request.num_computed
            assert rows.samples == (rows.start + rows.count == request.num_tokens)
            assert len(rows.pages) == len(set(rows.pages)) == num_blocks(rows.start + rows.count)
            assert 0 not in rows.pages
            if not client.has_run:
                client.has_run = True
                self.seen["overtaken"] += request.arrival < self.last_started
                self.last_started = max(self.last_started, request.arrival)
                assert request.num_cached == rows.start <= len(request.prompt) - 1
                assert rows.start % BLOCK == 0
            self.seen["middle chunks"] += not rows.samples
            references = self.scheduler.cache.pool.references
            self.seen["shared"] += references[rows.pages[0]] > 1
        if self.live:
            oldest = next(iter(self.live))
            assert oldest in names, "the oldest request makes no progress"
            request, count = self.live[oldest].request, plan.rows[names.index(oldest)].count
            most = self.load.max_step_tokens - self.load.max_step_tokens // 4
            assert count >= min(request.num_uncomputed, most), "the oldest has too few rows"
        self.seen["preemptions"] += len(plan.preempted)

    def step(self):
        cached = [page for page in self.memory if self.scheduler.cache.pool.is_cached(page)]
        plan = self.scheduler.plan()
        self.seen["evictions"] += sum(page not in self.scheduler.cache.index for page in cached)
        self.check_plan(plan)
        clients = {rows.request_id: self.live[rows.request_id] for rows in plan.rows}
        self.settle()
        if self.open:
            self.disturb(in_flight=True)
        self.execute(plan, clients)
        tokens = {
            rows.request_id: self.rng.randrange(VOCABULARY)
            for rows in plan.rows
            if rows.samples and not clients[rows.request_id].request.is_finished
        }
        finished = self.scheduler.complete(plan, tokens)
        for name in finished:
            client = clients[name]
            self.check_output(client.request)
            self.end(client, client.request.finish_reason, in_flight=False)
        self.settle()
        self.step_number += 1
        for client in self.live.values():
            assert not client.request.is_finished
            assert self.step_number <= client.deadline, "a request starves"

    def check_output(self, request):
        """The request ended at the first token at which it should have."""
        for count, token in enumerate(request.output, start=1):
            stops = token in request.stop_ids and count >= request.min_tokens
            assert (stops or count == request.max_tokens) == (count == len(request.output))
        assert request.finish_reason == ("stop" if stops else "length")

    def run(self, num_steps):
        for _ in range(num_steps):
            self.disturb(in_flight=False)
            self.step()
        self.open = False
        while self.live:
            self.step()
        self.check_drained()

    def check_drained(self):
        scheduler = self.scheduler
        assert scheduler.plan().rows == ()
        stats = scheduler.stats()
        assert (stats.num_waiting, stats.num_running, stats.pages_used) == (0, 0, 0)
        assert scheduler.cache.pool.num_available == self.load.num_pages - 1
        assert stats.pages_cached == len(scheduler.cache.index.entries)
        assert stats.preemptions == self.seen["preemptions"]
        self.seen["hits"] = stats.prefix_hit_tokens


CROWD = ("preemptions", "shared", "middle chunks", "overtaken")

LOADS = {
    "two pages, chunks of five": Load(3, 5, 2, max_live=4, exercises=("middle chunks",)),
    "every page wanted": Load(7, 64, 6, max_live=8, longest_prompt=140, exercises=CROWD),
    "short steps, many requests": Load(
        9, 10, 8, max_live=12, longest_prompt=140, aborts=0.001, errors=0.0005, exercises=CROWD
    ),
    "whole prompts": Load(12, 4000, 8, max_live=12, exercises=("preemptions", "shared")),
    "room to spare": Load(24, 300, 10, max_live=10, exercises=("shared", "overtaken")),
    "no prefix cache": Load(
        7, 64, 6, max_live=8, longest_prompt=140, prefix_caching=False, exercises=("preemptions",)
    ),
    "one at a time": Load(5, 100, 1, max_live=3, exercises=("middle chunks",)),
    "troubled": Load(
        7, 64, 6, max_live=8, longest_prompt=140, arrivals=0.8, aborts=0.01, errors=0.01,
        exercises=CROWD,
    ),
}  # fmt: skip


@pytest.mark.parametrize("load", LOADS.values(), ids=LOADS.keys())
def test_every_row_reads_its_own_tokens_and_every_page_comes_back(load):
    simulation = Simulation(load, seed=load.num_pages)
    simulation.run(10_000)
    expected = {"stop", "length", "abort", "error"}
    expected |= {"abort in flight", "error in flight", "stop in flight"}
    expected |= {"hits", "evictions"} if load.prefix_caching else set()
    expected |= set(load.exercises)
    missing = [event for event in sorted(expected) if not simulation.seen[event]]
    assert not missing, f"the traffic had no {missing}: {simulation.seen}"


@pytest.mark.parametrize("seed", range(20))
def test_short_runs_of_other_seeds_hold_as_well(seed):
    rng = random.Random(seed)
    load = Load(
        num_pages=rng.randrange(2, 16),
        max_step_tokens=rng.choice((1, 7, 127, 128, 129, 1000)),
        max_running=rng.randrange(1, 9),
        max_live=rng.randrange(1, 16),
    )
    Simulation(load, seed).run(300)

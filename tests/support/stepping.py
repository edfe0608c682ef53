"""Driving a scheduler a step at a time without a model: every sampled token is TOKEN."""

from __future__ import annotations

from winnow.core.request import Request
from winnow.core.scheduler import Scheduler

TOKEN = 7


def text(seed, length):
    """Tokens that no other seed has."""
    return tuple(range(seed * 10_000, seed * 10_000 + length))


def added(scheduler, request_id, prompt, max_tokens=1, **fields):
    request = Request(request_id, prompt, max_tokens, **fields)
    scheduler.add(request)
    return request


def planned(scheduler):
    plan = scheduler.plan()
    scheduler.check_invariants()
    return plan


def completed(scheduler, plan, token=TOKEN):
    finished = scheduler.complete(plan, {r.request_id: token for r in plan.rows if r.samples})
    scheduler.check_invariants()
    return finished


def step(scheduler, token=TOKEN):
    plan = planned(scheduler)
    completed(scheduler, plan, token)
    return plan


def drain(scheduler):
    """Step until nothing is left, and see that every page came back."""
    for _ in range(5000):
        if not step(scheduler).rows:
            break
    stats = scheduler.stats()
    assert (stats.num_waiting, stats.num_running, stats.pages_used) == (0, 0, 0)
    assert scheduler.cache.pool.num_available == scheduler.cache.pool.num_usable


def spans(plan):
    """{request id: (start, count, samples)}"""
    return {r.request_id: (r.start, r.count, r.samples) for r in plan.rows}


def crowded():
    """Two decoding requests that hold all 4 pages, each one step before it needs a third."""
    scheduler = Scheduler(5, 512)
    old = added(scheduler, "old", text(1, 256), max_tokens=5)
    young = added(scheduler, "young", text(2, 256), max_tokens=5)
    step(scheduler)
    return scheduler, old, young

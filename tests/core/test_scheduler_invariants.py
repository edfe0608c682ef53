"""`check_invariants` notices a state that must not be."""

from __future__ import annotations

import pytest
from support.stepping import added, step, text

from winnow.core.request import State
from winnow.core.scheduler import Scheduler


def damage_share(scheduler, request):
    scheduler.cache.pool.share(request.pages[0])


def damage_register(scheduler, request):
    scheduler.cache.index.register(request.pages[-1], b"key", request.arrival)


def damage_key(scheduler, request):
    scheduler.cache.index.forget(request.pages[0])
    scheduler.cache.index.register(request.pages[0], b"key", request.arrival)


def damage_swap(scheduler, request):
    request.pages.reverse()


def damage_progress(scheduler, request):
    request.num_computed += 128


def damage_free(scheduler, request):
    scheduler.cache.pool.release(request.pages[0], keep=False)


def damage_order(scheduler, request):
    request.arrival = 99


def damage_state(scheduler, request):
    request.state = State.WAITING


@pytest.mark.parametrize(
    "damage",
    [
        damage_share,
        damage_register,
        damage_key,
        damage_swap,
        damage_progress,
        damage_free,
        damage_order,
        damage_state,
    ],
)
def test_check_invariants_notices(damage):
    scheduler = Scheduler(9, 512)
    request = added(scheduler, "a", text(1, 200), max_tokens=5)
    added(scheduler, "b", text(2, 20), max_tokens=5)
    step(scheduler)
    damage(scheduler, request)
    with pytest.raises(AssertionError):
        scheduler.check_invariants()


def test_check_invariants_notices_pages_given_back_in_flight():
    scheduler = Scheduler(9, 512)
    request = added(scheduler, "a", text(1, 200), max_tokens=5)
    scheduler.plan()
    scheduler.abort("a")
    scheduler.check_invariants()
    scheduler.cache.release(request)
    with pytest.raises(AssertionError):
        scheduler.check_invariants()

"""Requests that are ended from outside, at any moment, and after errors."""

from __future__ import annotations

import pytest
from support.stepping import added, completed, crowded, drain, planned, spans, step, text

from winnow.core.request import State
from winnow.core.scheduler import Scheduler


def test_abort_between_chunks_returns_every_page_and_keeps_what_is_complete():
    scheduler = Scheduler(9, 150)
    request = added(scheduler, "a", text(1, 400))
    step(scheduler)
    assert scheduler.abort("a")
    scheduler.check_invariants()
    assert (request.state, request.finish_reason) == (State.FINISHED, "abort")
    stats = scheduler.stats()
    assert (stats.pages_used, stats.pages_cached) == (0, 1)
    assert scheduler.cache.pool.num_available == 8
    again = added(scheduler, "b", text(1, 400))
    step(scheduler)
    assert again.num_cached == 128


def test_abort_of_a_waiting_request_leaves_the_others_in_order():
    scheduler = Scheduler(9, 64, max_running=1)
    for name in "abc":
        added(scheduler, name, (ord(name),))
    assert scheduler.abort("b")
    assert [list(spans(step(scheduler))) for _ in range(2)] == [["a"], ["c"]]


def test_abort_of_an_unknown_or_ended_request_says_so():
    scheduler = Scheduler(9, 64)
    assert not scheduler.abort("a")
    added(scheduler, "a", text(1, 5))
    step(scheduler)
    assert not scheduler.abort("a")


@pytest.mark.parametrize("reason", ["abort", "stop", "error"])
def test_pages_of_a_plan_in_flight_are_given_back_only_when_it_completes(reason):
    scheduler = Scheduler(9, 512)
    request = added(scheduler, "a", text(1, 300), max_tokens=5)
    added(scheduler, "b", text(2, 5), max_tokens=5)
    plan = planned(scheduler)
    scheduler.finish("a", reason)
    scheduler.check_invariants()
    assert scheduler.stats().pages_used == 4
    assert not scheduler.abort("a")
    assert completed(scheduler, plan) == ()
    assert (request.output, request.finish_reason) == ([], reason)
    stats = scheduler.stats()
    assert (stats.pages_used, stats.pages_cached, stats.num_running) == (1, 0, 1)
    drain(scheduler)


def test_a_running_request_without_rows_in_flight_gives_its_pages_back_at_once():
    scheduler = Scheduler(9, 2)
    for name in "ab":
        added(scheduler, name, (ord(name),), max_tokens=3)
    step(scheduler)
    scheduler.max_step_tokens = 1
    plan = planned(scheduler)
    assert list(spans(plan)) == ["a"]
    scheduler.abort("b")
    scheduler.check_invariants()
    assert scheduler.stats().pages_used == 1


def test_a_whole_step_may_fail():
    scheduler = Scheduler(9, 512)
    for name in "ab":
        added(scheduler, name, text(1, 200), max_tokens=5)
    plan = planned(scheduler)
    for name in "ab":
        scheduler.finish(name, "error")
    assert scheduler.complete(plan, {}) == ()
    scheduler.check_invariants()
    assert scheduler.stats().pages_cached == 0
    drain(scheduler)


def test_an_id_may_be_used_again_while_its_aborted_owner_is_in_flight():
    scheduler = Scheduler(9, 512)
    first = added(scheduler, "a", text(1, 5), max_tokens=2)
    plan = planned(scheduler)
    scheduler.abort("a")
    second = added(scheduler, "a", text(2, 9), max_tokens=2)
    assert completed(scheduler, plan) == ()
    assert first.output == second.output == []
    assert spans(step(scheduler)) == {"a": (0, 9, True)}
    assert scheduler.abort("a")
    drain(scheduler)


def test_finish_of_a_request_that_is_not_there_is_a_mistake():
    with pytest.raises(KeyError):
        Scheduler(9, 64).finish("a", "stop")


def test_after_an_error_nothing_that_the_request_computed_is_found():
    scheduler = Scheduler(9, 512)
    added(scheduler, "a", text(1, 300), max_tokens=5)
    step(scheduler)
    scheduler.finish("a", "error")
    scheduler.check_invariants()
    assert scheduler.stats().pages_cached == 0
    again = added(scheduler, "b", text(1, 300))
    step(scheduler)
    assert again.num_cached == 0


def test_an_error_keeps_pages_that_the_request_only_hit():
    scheduler = Scheduler(9, 512)
    added(scheduler, "writer", text(1, 129))
    drain(scheduler)
    added(scheduler, "reader", text(1, 300), max_tokens=5)
    step(scheduler)
    scheduler.finish("reader", "error")
    scheduler.check_invariants()
    again = added(scheduler, "again", text(1, 300))
    step(scheduler)
    assert again.num_cached == 128


def test_an_error_forgets_a_shared_page_but_does_not_take_it_from_its_other_holder():
    scheduler = Scheduler(9, 512)
    added(scheduler, "writer", text(1, 129), max_tokens=5)
    step(scheduler)
    reader = added(scheduler, "reader", text(1, 129), max_tokens=5)
    shared = step(scheduler).rows[1].pages[0]
    scheduler.finish("writer", "error")
    scheduler.check_invariants()
    assert reader.pages[0] == shared
    assert scheduler.cache.pool.references[shared] == 1
    assert shared not in scheduler.cache.index
    drain(scheduler)
    assert reader.finish_reason == "length"
    assert scheduler.stats().pages_cached == 0


def test_an_error_forgets_pages_from_before_a_preemption():
    scheduler, _, young = crowded()
    step(scheduler)
    assert young.state is State.WAITING
    cached = scheduler.stats().pages_cached
    assert cached == 1
    scheduler.finish("young", "error")
    scheduler.check_invariants()
    assert scheduler.stats().pages_cached == 0


def test_an_error_spares_a_page_that_another_request_computed_since():
    scheduler, _, young = crowded()
    step(scheduler)
    first = scheduler.cache.index.lookup(young.keys)[0]
    scheduler.cache.index.forget(first)
    scheduler.cache.index.register(first, young.keys[0], writer=99)
    scheduler.finish("young", "error")
    scheduler.check_invariants()
    assert scheduler.cache.index.lookup(young.keys) == [first]


def test_ending_all_amid_a_step_leaves_an_empty_scheduler_that_serves():
    scheduler, old, young = crowded()
    waiting = added(scheduler, "waiting", text(3, 100))
    planned(scheduler)
    scheduler.end_all("error")
    scheduler.check_invariants()
    assert {r.finish_reason for r in (old, young, waiting)} == {"error"}
    assert scheduler.stats().pages_used == 0
    assert scheduler.stats().pages_cached == 0
    again = added(scheduler, "old", text(1, 256), max_tokens=5)
    drain(scheduler)
    assert again.finish_reason == "length"
    assert again.num_cached == 0

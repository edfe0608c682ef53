"""Whose rows a step computes, in which order, and how many."""

from __future__ import annotations

import dataclasses

import pytest
from support.stepping import TOKEN, added, completed, drain, planned, spans, step, text

from winnow.core.plan import StepPlan
from winnow.core.scheduler import Scheduler


def test_without_requests_the_plan_is_empty_and_need_not_be_completed():
    scheduler = Scheduler(9, 64)
    assert scheduler.plan() == StepPlan((), ())
    plan = scheduler.plan()
    assert plan.num_rows == 0
    assert scheduler.complete(plan, {}) == ()


def test_a_request_runs_from_prompt_to_its_last_token():
    scheduler = Scheduler(9, 64)
    request = added(scheduler, "a", text(1, 5), max_tokens=3)
    assert spans(step(scheduler, 11)) == {"a": (0, 5, True)}
    assert spans(step(scheduler, 12)) == {"a": (5, 1, True)}
    plan = planned(scheduler)
    assert spans(plan) == {"a": (6, 1, True)}
    assert completed(scheduler, plan, 13) == ("a",)
    assert (request.output, request.finish_reason) == ([11, 12, 13], "length")
    drain(scheduler)


def test_decode_rows_come_first_then_chunks_then_new_requests():
    scheduler = Scheduler(33, 100)
    added(scheduler, "old", text(1, 10), max_tokens=9)
    added(scheduler, "long", text(2, 185), max_tokens=9)
    assert spans(step(scheduler)) == {"old": (0, 10, True), "long": (0, 90, False)}
    added(scheduler, "new", text(3, 30), max_tokens=9)
    plan = step(scheduler)
    assert [r.request_id for r in plan.rows] == ["old", "long", "new"]
    assert spans(plan) == {"old": (10, 1, True), "long": (90, 95, True), "new": (0, 4, False)}
    assert plan.num_rows == 100
    drain(scheduler)


def test_chunks_may_end_anywhere_and_pages_are_taken_as_rows_need_them():
    scheduler = Scheduler(9, 100)
    added(scheduler, "a", text(1, 300))
    plans = [step(scheduler) for _ in range(3)]
    assert [spans(p)["a"] for p in plans] == [(0, 100, False), (100, 100, False), (200, 100, True)]
    assert [len(p.rows[0].pages) for p in plans] == [1, 2, 3]
    assert plans[1].rows[0].pages[:1] == plans[0].rows[0].pages


def test_a_step_of_middle_chunks_only_samples_nothing_and_finishes_nothing():
    scheduler = Scheduler(9, 64)
    request = added(scheduler, "a", text(1, 300), max_tokens=4)
    for start in (0, 64, 128, 192):
        plan = planned(scheduler)
        assert spans(plan) == {"a": (start, 64, False)}
        assert scheduler.complete(plan, {}) == ()
        assert request.output == []
    assert spans(step(scheduler)) == {"a": (256, 44, True)}
    assert request.output == [TOKEN]


def test_decode_rows_beyond_the_budget_wait_for_the_older_ones():
    scheduler = Scheduler(9, 3)
    for name in "abc":
        added(scheduler, name, (ord(name),), max_tokens=3)
    step(scheduler)
    scheduler.max_step_tokens = 2
    assert list(spans(step(scheduler))) == ["a", "b"]
    drain(scheduler)


def test_no_more_than_max_running_requests_hold_pages():
    scheduler = Scheduler(9, 64, max_running=2)
    for name in "abc":
        added(scheduler, name, (ord(name),), max_tokens=2)
    assert list(spans(step(scheduler))) == ["a", "b"]
    assert list(spans(step(scheduler))) == ["a", "b"]
    assert list(spans(step(scheduler))) == ["c"]


def test_a_request_that_does_not_fit_blocks_those_behind_it():
    scheduler = Scheduler(5, 512)
    added(scheduler, "a", text(1, 300), max_tokens=3)
    added(scheduler, "big", text(2, 300), max_tokens=3)
    added(scheduler, "small", text(3, 10), max_tokens=3)
    for _ in range(3):
        assert list(spans(step(scheduler))) == ["a"]
    assert list(spans(step(scheduler))) == ["big", "small"]
    drain(scheduler)


def test_a_prompt_is_not_begun_before_all_of_it_fits():
    """Its first chunk would fit, only to give way later."""
    scheduler = Scheduler(5, 100)
    added(scheduler, "short", text(1, 100), max_tokens=20)
    added(scheduler, "long", text(2, 500))
    for _ in range(20):
        assert list(spans(step(scheduler))) == ["short"]
    assert spans(step(scheduler)) == {"long": (0, 100, False)}


def test_one_plan_is_in_flight_at_a_time():
    scheduler = Scheduler(9, 64)
    added(scheduler, "a", text(1, 5), max_tokens=3)
    plan = scheduler.plan()
    with pytest.raises(AssertionError, match="not been completed"):
        scheduler.plan()
    with pytest.raises(AssertionError, match="another plan"):
        scheduler.complete(dataclasses.replace(plan), {"a": TOKEN})
    scheduler.complete(plan, {"a": TOKEN})
    with pytest.raises(AssertionError, match="another plan"):
        scheduler.complete(plan, {"a": TOKEN})


def test_a_token_that_no_row_sampled_is_a_mistake():
    scheduler = Scheduler(9, 64)
    added(scheduler, "a", text(1, 100))
    with pytest.raises(AssertionError):
        scheduler.complete(scheduler.plan(), {"a": TOKEN})


def test_a_plan_cannot_be_changed():
    scheduler = Scheduler(9, 64)
    added(scheduler, "a", text(1, 5))
    plan = scheduler.plan()
    for frozen, name in (
        (plan, "rows"),
        (plan.rows[0], "count"),
        (scheduler.stats(), "pages_used"),
    ):
        with pytest.raises(dataclasses.FrozenInstanceError):
            setattr(frozen, name, None)

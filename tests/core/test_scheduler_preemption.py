"""Who gives way when no page is left, and when it returns."""

from __future__ import annotations

from support.stepping import TOKEN, added, completed, crowded, drain, planned, spans, step, text

from winnow.core.request import State
from winnow.core.scheduler import Scheduler


def test_the_youngest_running_request_gives_way():
    scheduler, old, young = crowded()
    plan = planned(scheduler)
    assert plan.preempted == ("young",)
    assert spans(plan) == {"old": (256, 1, True)}
    assert (young.state, young.num_computed, young.pages) == (State.WAITING, 0, [])
    assert young.output == [TOKEN]
    completed(scheduler, plan)
    drain(scheduler)
    assert old.output == young.output == [TOKEN] * 5
    assert (old.num_preemptions, young.num_preemptions) == (0, 1)
    assert scheduler.stats().preemptions == 1


def test_a_request_that_is_itself_the_youngest_gives_way():
    scheduler = Scheduler(5, 512)
    added(scheduler, "old", text(1, 270), max_tokens=100)
    added(scheduler, "young", text(2, 128), max_tokens=100)
    step(scheduler)
    plan = planned(scheduler)
    assert plan.preempted == ("young",)
    assert spans(plan) == {"old": (270, 1, True)}


def test_a_preempted_request_is_not_readmitted_in_the_same_plan():
    """Two copies of one prompt: the younger could at once share the older's pages."""
    scheduler = Scheduler(5, 512)
    for name in ("old", "young"):
        added(scheduler, name, text(1, 256), max_tokens=5)
    step(scheduler)
    plan = step(scheduler)
    assert plan.preempted == ("young",)
    assert list(spans(plan)) == ["old"]
    assert spans(step(scheduler)) == {"old": (257, 1, True), "young": (256, 1, True)}


def test_a_preempted_request_runs_again_before_those_that_arrived_after_it():
    scheduler, _, _ = crowded()
    added(scheduler, "late", text(3, 5), max_tokens=2)
    assert step(scheduler).preempted == ("young",)
    order = []
    while plan := step(scheduler):
        if not plan.rows:
            break
        order += [r.request_id for r in plan.rows if r.request_id not in order]
    assert order == ["old", "young", "late"]


def test_several_victims_return_in_order_of_arrival():
    scheduler = Scheduler(5, 512)
    old = added(scheduler, "old", text(1, 128), max_tokens=300)
    for seed, name in enumerate("abc", start=2):
        added(scheduler, name, text(seed, 20), max_tokens=300)
    step(scheduler)
    # Several tokens at once, as speculation accepts them.
    old.output += text(9, 300 - 128)
    plan = planned(scheduler)
    assert plan.preempted == ("c", "b")
    completed(scheduler, plan)
    assert list(scheduler._waiting) == ["b", "c"]


def test_a_victim_that_was_already_planned_loses_its_rows():
    scheduler = Scheduler(5, 512)
    old = added(scheduler, "old", text(1, 256), max_tokens=200)
    added(scheduler, "young", text(2, 200), max_tokens=200)
    step(scheduler)
    old.output += text(9, 3)
    plan = planned(scheduler)
    assert plan.preempted == ("young",)
    assert spans(plan) == {"old": (256, 4, True)}
    completed(scheduler, plan)


def test_a_preempted_request_finds_its_own_pages_again():
    scheduler, _, young = crowded()
    step(scheduler)
    while young.state is State.WAITING:
        plan = step(scheduler)
    assert spans(plan)["young"] == (128, 129, True)
    assert young.num_cached == 0
    assert scheduler.stats().prefix_query_tokens == 512

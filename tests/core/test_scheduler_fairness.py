"""Short prompts beside a long one: they go on, and nobody pays with more than the rule says."""

from __future__ import annotations

from support.stepping import TOKEN, added, completed, drain, planned, spans, step, text

from winnow.core import scheduler as scheduling
from winnow.core.request import State
from winnow.core.scheduler import Scheduler


def test_a_short_prompt_is_answered_while_a_long_one_is_computed():
    scheduler = Scheduler(65, 100)
    long = added(scheduler, "long", text(1, 1000))
    short = added(scheduler, "short", text(2, 30), max_tokens=2)
    assert spans(step(scheduler)) == {"long": (0, 75, False), "short": (0, 25, False)}
    assert spans(step(scheduler)) == {"long": (75, 95, False), "short": (25, 5, True)}
    assert spans(step(scheduler)) == {"short": (30, 1, True), "long": (170, 99, False)}
    assert short.is_finished
    assert not long.is_finished
    drain(scheduler)


def test_a_prompt_that_would_not_end_sooner_is_not_begun_beside_another():
    scheduler = Scheduler(65, 100)
    for seed, name in enumerate(("first", "second")):
        added(scheduler, name, text(seed, 1000))
    for _ in range(10):
        assert list(spans(step(scheduler))) == ["first"]
    assert list(spans(step(scheduler))) == ["second"]


def test_a_stream_of_short_prompts_takes_a_quarter_with_their_answers():
    """Each is answered by many tokens, whose rows would fill the step in time."""
    scheduler = Scheduler(999, 16, max_running=99)
    long = added(scheduler, "long", text(1, 240))
    for number in range(60):
        added(scheduler, f"short {number}", text(number + 2, 1), max_tokens=50)
    for _ in range(20):
        assert spans(step(scheduler))["long"][1] == 12
    assert long.is_finished


def test_pages_that_an_unfinished_prompt_will_need_are_not_given_to_those_behind_it():
    scheduler = Scheduler(9, 100)
    added(scheduler, "long", text(1, 900))
    added(scheduler, "short", text(2, 140))
    for _ in range(8):
        assert list(spans(step(scheduler))) == ["long"]
    assert scheduler.stats().num_waiting == 1
    drain(scheduler)
    assert scheduler.stats().preemptions == 0


def test_those_waiting_keep_pages_and_places_for_each_other_in_order():
    """A long prompt that is not begun yet is not overtaken where that would keep it out."""
    for limits in ({"num_pages": 17}, {"num_pages": 99, "max_running": 2}):
        scheduler = Scheduler(max_step_tokens=100, **limits)
        added(scheduler, "first", text(1, 1000))
        added(scheduler, "second", text(2, 1000))
        added(scheduler, "short", text(3, 10), max_tokens=99)
        for _ in range(9):
            assert list(spans(step(scheduler))) == ["first"]
        drain(scheduler)


def test_only_so_many_waiting_prompts_are_looked_at_beside_a_long_one(monkeypatch):
    monkeypatch.setattr(scheduling, "MAX_LOOKED_AT", 2)
    scheduler = Scheduler(99, 100)
    added(scheduler, "old", text(9, 10))
    for seed, name in enumerate(("first", "second", "third")):
        added(scheduler, name, text(seed, 1000))
    added(scheduler, "short", text(4, 10))
    while "second" not in (plan := spans(step(scheduler))):
        assert "short" not in plan
    assert "short" in plan


def overtaken():
    """`first` has begun to answer. `short` came past `second`, and its answer has grown into a page
    that was left for `second`."""
    scheduler = Scheduler(17, 100)
    first = added(scheduler, "first", text(1, 869), max_tokens=99)
    second = added(scheduler, "second", text(2, 1000), max_tokens=5)
    short = added(scheduler, "short", text(3, 127), max_tokens=99)
    for _ in range(10):
        step(scheduler)
    assert (first.num_uncomputed, len(short.pages)) == (1, 2)
    assert second.state is State.WAITING
    return scheduler, first, second, short


def test_a_request_that_overtook_gives_way_to_the_one_whose_turn_comes():
    scheduler, _, second, _ = overtaken()
    added(scheduler, "late", text(4, 5))
    plan = planned(scheduler)
    assert plan.preempted == ("short",)
    assert spans(plan) == {"first": (869, 1, True), "second": (0, 99, False)}
    assert list(scheduler._waiting) == ["short", "late"]
    completed(scheduler, plan)
    drain(scheduler)
    assert second.num_preemptions == 0
    assert second.output == [TOKEN] * 5


def test_nobody_gives_way_where_that_would_not_be_enough():
    scheduler, first, second, short = overtaken()
    scheduler.cache.grow(first, 1025)
    plan = planned(scheduler)
    assert plan.preempted == ()
    assert list(spans(plan)) == ["first", "short"]
    completed(scheduler, plan)
    drain(scheduler)
    assert short.num_preemptions == 0
    assert second.output == [TOKEN] * 5


def test_a_prompt_waits_for_blocks_that_the_one_ahead_computes_and_then_finds_them():
    scheduler = Scheduler(65, 128)
    document = text(1, 400)
    added(scheduler, "long", (*document, *text(2, 2600)))
    reader = added(scheduler, "reader", (*document, *text(3, 20)))
    other = added(scheduler, "other", text(4, 10))
    plans = [step(scheduler) for _ in range(5)]
    assert list(spans(plans[0])) == ["long", "other"]
    assert other.is_finished
    started = next(spans(plan)["reader"] for plan in plans if "reader" in spans(plan))
    assert started == (384, 32, False)
    assert reader.num_cached == 384
    drain(scheduler)


def test_without_prefix_caching_a_prompt_does_not_wait_for_blocks_it_cannot_find():
    scheduler = Scheduler(65, 128, prefix_caching=False)
    document = text(1, 200)
    added(scheduler, "long", (*document, *text(2, 2600)))
    added(scheduler, "reader", document)
    assert list(spans(step(scheduler))) == ["long", "reader"]


def test_who_started_beside_another_is_served_while_nobody_is_admitted():
    scheduler = Scheduler(65, 100)
    added(scheduler, "long", text(1, 1000))
    added(scheduler, "begun", text(2, 30))
    step(scheduler)
    added(scheduler, "late", text(3, 1))
    plan = scheduler.plan(admit=False)
    assert spans(plan) == {"long": (75, 95, False), "begun": (25, 5, True)}

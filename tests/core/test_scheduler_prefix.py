"""What a request finds in the cache, and what it leaves there."""

from __future__ import annotations

import pytest
from support.stepping import added, completed, drain, planned, spans, step, text

import winnow.core.request
from winnow.core.scheduler import Scheduler


@pytest.mark.parametrize(
    ("shared", "length", "hit"),
    [
        (0, 300, 0),
        (127, 300, 0),
        (128, 300, 128),
        (129, 300, 128),
        (255, 300, 128),
        (256, 300, 256),
        (257, 300, 256),
        (256, 257, 256),
        (300, 300, 256),
        (256, 256, 128),
        (128, 128, 0),
        (129, 129, 128),
    ],
)
def test_a_hit_is_the_shared_full_blocks_and_leaves_a_token_to_compute(shared, length, hit):
    scheduler = Scheduler(17, 512)
    document = text(1, 300)
    added(scheduler, "writer", document)
    written = step(scheduler).rows[0].pages
    reader = added(scheduler, "reader", (*document[:shared], *text(2, 300))[:length])
    (rows,) = step(scheduler).rows
    assert (rows.start, rows.count) == (hit, length - hit)
    assert rows.pages[: hit // 128] == written[: hit // 128]
    assert not set(rows.pages[hit // 128 :]) & set(written[: hit // 128])
    assert reader.num_cached == hit
    stats = scheduler.stats()
    assert (stats.prefix_hit_tokens, stats.prefix_query_tokens) == (hit, 300 + length)


def test_generated_tokens_are_found_as_the_prompt_of_the_next_turn():
    scheduler = Scheduler(17, 512)
    first = added(scheduler, "a", text(1, 100), max_tokens=100)
    drain(scheduler)
    second = added(scheduler, "b", (*first.tokens, *text(2, 9)))
    step(scheduler)
    assert second.num_cached == 128


def test_the_last_sampled_token_does_not_complete_a_block():
    """Its K and V are never computed, so a block that ends with it has a hole."""
    scheduler = Scheduler(17, 512)
    first = added(scheduler, "a", text(1, 100), max_tokens=28)
    drain(scheduler)
    assert len(first.tokens) == 128
    assert scheduler.stats().pages_cached == 0


def test_a_page_is_not_found_before_the_step_that_fills_it_completes():
    scheduler = Scheduler(17, 512)
    document = text(1, 200)
    added(scheduler, "a", document)
    added(scheduler, "b", document)
    plan = planned(scheduler)
    assert spans(plan) == {"a": (0, 200, True), "b": (0, 200, True)}
    assert not set(plan.rows[0].pages) & set(plan.rows[1].pages)
    completed(scheduler, plan)
    added(scheduler, "c", document)
    assert planned(scheduler).rows[0].pages[0] == plan.rows[0].pages[0]


def test_a_page_computed_twice_is_kept_once():
    scheduler = Scheduler(17, 512)
    for name in "ab":
        added(scheduler, name, text(1, 200))
    step(scheduler)
    assert scheduler.stats().pages_cached == 1
    assert scheduler.cache.pool.num_available == 16


def test_requests_of_different_salts_share_nothing():
    scheduler = Scheduler(17, 512)
    document = text(1, 200)
    for name, salt, hit in (("a", "", 0), ("b", "x", 0), ("c", "x", 128), ("d", "y", 0)):
        request = added(scheduler, name, document, cache_salt=salt)
        step(scheduler)
        assert request.num_cached == hit


def test_without_prefix_caching_nothing_is_found_and_nothing_is_kept():
    scheduler = Scheduler(17, 512, prefix_caching=False)
    for name in "ab":
        added(scheduler, name, text(1, 200))
        assert step(scheduler).rows[0].start == 0
    stats = scheduler.stats()
    assert (stats.pages_cached, stats.prefix_hit_tokens, stats.prefix_query_tokens) == (0, 0, 0)


def test_eviction_never_frees_a_page_that_a_running_request_reads():
    scheduler = Scheduler(5, 512)
    document = text(1, 129)
    added(scheduler, "writer", document)
    drain(scheduler)
    reader = added(scheduler, "reader", document, max_tokens=60)
    shared = step(scheduler).rows[0].pages[0]
    assert reader.num_cached == 128
    for seed in range(2, 9):
        added(scheduler, f"other {seed}", text(seed, 130), max_tokens=2)
        for rows in (*step(scheduler).rows, *step(scheduler).rows):
            if rows.request_id == "reader":
                assert rows.pages[0] == shared
            else:
                assert shared not in rows.pages
    assert not reader.is_finished


def test_a_prefix_is_evicted_from_its_end():
    scheduler = Scheduler(5, 512)
    document = text(1, 385)
    added(scheduler, "writer", document)
    drain(scheduler)
    added(scheduler, "other", text(2, 200))
    drain(scheduler)
    reader = added(scheduler, "reader", document)
    step(scheduler)
    assert reader.num_cached == 256


def test_pages_to_be_shared_are_not_evicted_for_the_rows_that_follow_them():
    """The hits are the oldest cached pages and everything else is taken."""
    scheduler = Scheduler(5, 512)
    document = text(1, 257)
    added(scheduler, "writer", document)
    drain(scheduler)
    added(scheduler, "other", text(2, 129))
    drain(scheduler)
    assert scheduler.stats().pages_cached == 3
    reader = added(scheduler, "reader", (*document, *text(3, 255)))
    step(scheduler)
    assert reader.num_cached == 256


def test_each_block_is_hashed_once_in_a_requests_life(monkeypatch):
    hashed = []

    def counted(parent, token_ids):
        hashed.append(token_ids[0])
        return block_key(parent, token_ids)

    block_key = winnow.core.request.block_key
    monkeypatch.setattr(winnow.core.request, "block_key", counted)
    scheduler = Scheduler(7, 200)
    requests = [added(scheduler, str(n), text(n + 1, 250), max_tokens=240) for n in range(3)]
    while scheduler.plan().rows:
        plan = scheduler._in_flight
        scheduler.complete(
            plan, {r.request_id: 10**6 + len(hashed) for r in plan.rows if r.samples}
        )
    assert sum(r.num_preemptions for r in requests) > 0
    assert len(hashed) <= sum(len(r.tokens) // 128 for r in requests)

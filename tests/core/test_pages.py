"""Free, referenced and cached pages."""

from __future__ import annotations

import random

import pytest

from winnow.core.pages import NULL_PAGE, PagePool
from winnow.errors import CapacityError


def pool_of(num_pages):
    evicted = []
    return PagePool(num_pages, on_evict=evicted.append), evicted


def test_the_null_page_is_never_handed_out():
    pool, _ = pool_of(5)
    assert sorted(pool.allocate() for _ in range(pool.num_usable)) == [1, 2, 3, 4]
    assert NULL_PAGE not in pool.references
    assert pool.num_available == 0


def test_an_exhausted_pool_hands_out_nothing():
    pool, _ = pool_of(2)
    pool.allocate()
    with pytest.raises(AssertionError, match="exhausted"):
        pool.allocate()


def test_a_cache_without_a_usable_page_is_refused_with_the_least_that_works():
    with pytest.raises(CapacityError, match=r"num_pages \(--num-pages\) 2"):
        pool_of(1)


def test_a_page_returns_only_after_its_last_holder():
    pool, _ = pool_of(2)
    page = pool.allocate()
    pool.share(page)
    pool.release(page, keep=False)
    assert pool.num_available == 0
    pool.release(page, keep=False)
    assert pool.num_available == 1
    with pytest.raises(KeyError):
        pool.release(page, keep=False)


def test_free_pages_are_used_before_a_cached_one_is_evicted():
    pool, evicted = pool_of(4)
    kept = pool.allocate()
    pool.release(kept, keep=True)
    assert kept not in {pool.allocate(), pool.allocate()}
    assert evicted == []
    assert pool.allocate() == kept
    assert evicted == [kept]


def test_the_page_released_longest_ago_is_evicted_first():
    pool, evicted = pool_of(4)
    a, b, c = (pool.allocate() for _ in range(3))
    for page in (b, a, c):
        pool.release(page, keep=True)
    pool.share(b)
    pool.release(b, keep=True)
    assert [pool.allocate() for _ in range(3)] == [a, c, b] == evicted


def test_a_shared_cached_page_is_no_longer_available():
    pool, _ = pool_of(2)
    page = pool.allocate()
    pool.release(page, keep=True)
    assert (pool.num_cached, pool.num_available) == (1, 1)
    pool.share(page)
    assert (pool.num_cached, pool.num_available, pool.references[page]) == (0, 0, 1)


def test_a_free_page_cannot_be_shared():
    pool, _ = pool_of(2)
    with pytest.raises(KeyError):
        pool.share(1)


def test_a_discarded_page_is_free_without_an_eviction():
    pool, evicted = pool_of(2)
    page = pool.allocate()
    pool.release(page, keep=True)
    pool.discard(page)
    assert (pool.num_cached, pool.num_available) == (0, 1)
    assert pool.allocate() == page
    assert evicted == []


def test_invariants_hold_after_any_sequence_of_calls():
    rng = random.Random(0)
    pool, _ = pool_of(9)
    holders: list[int] = []
    for _ in range(2000):
        cached = [page for page in range(9) if pool.is_cached(page)]
        shareable = [*holders, *cached]
        move = rng.choice(("allocate", "share", "release", "release", "discard"))
        if move == "allocate" and pool.num_available:
            holders.append(pool.allocate())
        elif move == "share" and shareable:
            holders.append(rng.choice(shareable))
            pool.share(holders[-1])
        elif move == "release" and holders:
            pool.release(holders.pop(rng.randrange(len(holders))), keep=rng.random() < 0.5)
        elif move == "discard" and cached:
            pool.discard(rng.choice(cached))
        pool.check_invariants()
        assert {page: holders.count(page) for page in holders} == pool.references


@pytest.mark.parametrize(
    "lose", [lambda p: p._free.pop(), lambda p: p._cached.pop(2), lambda p: p._references.pop(1)]
)
def test_check_invariants_notices_a_lost_page(lose):
    pool, _ = pool_of(5)
    pool.allocate()
    pool.release(pool.allocate(), keep=True)
    pool.check_invariants()
    lose(pool)
    with pytest.raises(AssertionError, match="lost"):
        pool.check_invariants()

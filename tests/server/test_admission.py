"""The bounded queue: who is let in, who must come back, and when."""

from __future__ import annotations

import asyncio

import pytest

from winnow.server.admission import Admission
from winnow.server.failures import ApiError


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def admission(max_running: int = 2, max_queue: int = 1, clock: Clock | None = None) -> Admission:
    made = Admission(max_queue, clock or Clock())
    made.open(max_running)
    return made


def test_places_are_those_that_run_and_those_that_wait_and_the_next_gets_429() -> None:
    places = admission(max_running=2, max_queue=1)
    with places.hold(), places.hold(), places.hold():
        with pytest.raises(ApiError) as refused, places.hold():
            pass
        assert refused.value.status == 429
        assert refused.value.headers["retry-after"] == "1"
        assert places.in_flight == 3
    assert places.in_flight == 0


def test_a_request_for_several_answers_takes_all_its_places_or_none() -> None:
    places = admission(max_running=3, max_queue=1)
    with places.hold() as first, places.hold() as second:
        first.extend_to(3)
        with pytest.raises(ApiError) as refused:
            second.extend_to(2)
        assert refused.value.status == 429
        assert places.in_flight == 4
    assert places.in_flight == 0


def test_more_answers_than_there_ever_are_places_for_is_the_requests_fault() -> None:
    places = admission(max_running=3, max_queue=1)
    with places.hold() as held, pytest.raises(ApiError) as refused:
        held.extend_to(5)
    assert refused.value.status == 400
    assert places.in_flight == 0


def test_an_error_gives_the_places_back() -> None:
    places = admission()

    def fail() -> None:
        with places.hold() as held:
            held.extend_to(2)
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()
    assert places.in_flight == 0


def test_nothing_is_let_in_before_the_model_is_loaded_or_after_closing() -> None:
    places = Admission(1)
    with pytest.raises(ApiError) as refused, places.hold():
        pass
    assert (refused.value.status, refused.value.code) == (503, "loading")
    places.open(1)
    with places.hold():
        places.closed = ApiError(503, "draining", code="draining")
        with pytest.raises(ApiError, match="draining"), places.hold():
            pass
    assert places.in_flight == 0


def test_retry_after_follows_the_pace_of_recent_answers_within_its_bounds() -> None:
    clock = Clock()
    places = admission(max_running=1, max_queue=0, clock=clock)
    with places.hold():
        assert places.retry_after_s(1) == 1
        for _ in range(4):
            places.ended()
            clock.now += 5.0
        assert places.retry_after_s(1) == 5
        clock.now += 10_000
        assert places.retry_after_s(1) == 60


def test_idle_is_awaited_until_the_last_place_is_given_back() -> None:
    async def run() -> None:
        places = admission()
        await asyncio.wait_for(places.idle(), 1)
        with places.hold():
            waiting = asyncio.create_task(places.idle())
            await asyncio.sleep(0)
            await asyncio.sleep(0)
            assert not waiting.done()
        await asyncio.wait_for(waiting, 1)

    asyncio.run(run())

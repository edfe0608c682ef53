"""How many answers may be under way, and when a refused client should come back.

Counts answers from the moment their request's head is in. Knows no engine.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from winnow.server.failures import ApiError

_RECENT = 64
_MIN_RETRY_S = 1
_MAX_RETRY_S = 60


class Admission:
    """The bounded queue in front of the engine, as a count: the engine orders what is let in."""

    def __init__(self, max_queue: int, clock: Callable[[], float] = time.monotonic) -> None:
        self.max_queue = max_queue
        self.limit: int | None = None
        """Answers at once; None while the model loads."""
        self.in_flight = 0
        self.closed: ApiError | None = None
        """Why nothing new is let in: draining, or the engine is gone."""
        self._idle = asyncio.Event()
        self._idle.set()
        self._clock = clock
        self._ended: deque[float] = deque(maxlen=_RECENT)

    def open(self, max_running: int) -> None:
        """The model is loaded and computes `max_running` requests side by side."""
        self.limit = max_running + self.max_queue

    def check_open(self) -> None:
        """ApiError 503 while loading, while draining, and after the engine's end."""
        if self.closed is not None:
            raise self.closed.again()
        if self.limit is None:
            raise ApiError(
                503,
                "the model is loading: try again when /ready answers 200",
                code="loading",
                headers={"retry-after": "5"},
            )

    @contextmanager
    def hold(self) -> Iterator[Held]:
        """One place, until the block ends.

        ApiError 503 where `check_open` raises it, 429 where the queue is full.
        """
        self.check_open()
        held = Held(self)
        held.extend_to(1)
        try:
            yield held
        finally:
            held.give_back()

    def ended(self) -> None:
        """An answer was completed: what `retry_after_s` is estimated from."""
        self._ended.append(self._clock())

    def retry_after_s(self, count: int) -> int:
        """Seconds until `count` places should be free, at the pace of recent completions: 1 to 60.

        Without completions to go by, 1: the queue may be one burst that passes at once.
        """
        if not self._ended:
            return _MIN_RETRY_S
        span = self._clock() - self._ended[0]
        assert self.limit is not None
        needed = self.in_flight + count - self.limit
        wait = needed * span / len(self._ended)
        return max(_MIN_RETRY_S, min(_MAX_RETRY_S, math.ceil(wait)))

    async def idle(self) -> None:
        """Returns once no answer is under way."""
        await self._idle.wait()

    def _count(self, change: int) -> None:
        self.in_flight += change
        assert self.in_flight >= 0
        if self.in_flight:
            self._idle.clear()
        else:
            self._idle.set()


class Held:
    """Places of one request."""

    def __init__(self, admission: Admission) -> None:
        self._admission = admission
        self._count = 0

    def extend_to(self, count: int) -> None:
        """`count` places in all; none is added if there are not as many.

        ApiError 429 where they are taken for now, 400 where there never are as many.
        """
        admission = self._admission
        limit, more = admission.limit, count - self._count
        assert limit is not None
        if count > limit:
            raise ApiError(
                400,
                f"the request asks for {count} answers, the server takes {limit}: ask for fewer",
            )
        if admission.in_flight + more > limit:
            raise ApiError(
                429,
                f"{admission.in_flight} answers are under way, the server takes {limit}: try again "
                "later",
                code="queue_full",
                headers={"retry-after": str(admission.retry_after_s(more))},
            )
        self._count += more
        admission._count(more)

    def give_back(self) -> None:
        """Every place; the next request may have them."""
        self._admission._count(-self._count)
        self._count = 0

"""Turns at something that one thread at a time may use. Knows nothing of what that is."""

from __future__ import annotations

from collections import deque
from threading import Lock
from types import TracebackType


class Turns:
    """A lock that is given in the order in which it was asked for.

    With threading.Lock, a thread that takes it again at once mostly gets it before those that
    wait. For `with`; a thread that has the turn must not ask for another.
    """

    def __init__(self) -> None:
        self._guard = Lock()
        self._queue: deque[Lock] = deque()
        self._taken = False

    def __enter__(self) -> None:
        with self._guard:
            if not self._taken:
                self._taken = True
                return
            own = Lock()
            own.acquire()
            self._queue.append(own)
        try:
            own.acquire()
        except BaseException:
            # An interrupt: a turn that nobody takes would be the last.
            with self._guard:
                given = own not in self._queue
                if not given:
                    self._queue.remove(own)
            if given:
                self.end()
            raise

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.end()

    def take_at_once(self) -> bool:
        """Take the turn if nobody has it; never waits, so that a finaliser may call it, which runs
        at any moment of any thread. `end` ends it."""
        if not self._guard.acquire(blocking=False):
            return False
        try:
            free = not self._taken
            self._taken = True
            return free
        finally:
            self._guard.release()

    def end(self) -> None:
        with self._guard:
            if self._queue:
                self._queue.popleft().release()
            else:
                self._taken = False

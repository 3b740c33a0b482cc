"""Bounded admission: so many requests at work, so many waiting in line, the rest refused."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable

from pdserve.errors import ErrorReason, RejectedError

_RETRY_AFTER_S = 1.0


class Permit:
    """A place at work. Whoever got it releases it, once or more often, on every way out."""

    def __init__(self, give_back: Callable[[], None]) -> None:
        self._give_back: Callable[[], None] | None = give_back

    def release(self) -> None:
        if self._give_back is not None:
            give_back, self._give_back = self._give_back, None
            give_back()


class Admission:
    """The places of one model, given in order of arrival.

    Bound to one event loop. `now` is the clock of the deadlines.
    """

    def __init__(
        self, max_running: int, max_queued: int, now: Callable[[], float] | None = None
    ) -> None:
        self._max_running = max_running
        self._max_queued = max_queued
        # Looked up late: on a virtual-time loop it tells that loop's time.
        self._now = now or time.monotonic
        self._running = 0
        self._queue: deque[asyncio.Future[None]] = deque()

    @property
    def running(self) -> int:
        """Permits that are out."""
        return self._running

    @property
    def queued(self) -> int:
        """Requests that wait for a permit."""
        return len(self._queue)

    async def acquire(self, deadline: float | None = None) -> Permit:
        """Waits for a place; cancelling the wait leaves no trace.

        Raises RejectedError QUEUE_FULL at once, or DEADLINE_EXCEEDED when `deadline` passes.
        """
        if self._running < self._max_running:
            # Nobody waits: a place that falls free goes to the head of the queue directly.
            self._running += 1
            return Permit(self._release)
        if len(self._queue) >= self._max_queued:
            raise RejectedError(
                ErrorReason.QUEUE_FULL,
                "too many requests are waiting; retry later",
                retry_after_s=_RETRY_AFTER_S,
            )
        await self._wait(deadline)
        return Permit(self._release)

    async def _wait(self, deadline: float | None) -> None:
        place: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._queue.append(place)
        delay = None if deadline is None else deadline - self._now()
        try:
            async with asyncio.timeout(delay):
                await place
        except TimeoutError:
            self._leave(place)
            raise RejectedError(
                ErrorReason.DEADLINE_EXCEEDED, "the deadline passed while the request was queued"
            ) from None
        except asyncio.CancelledError:
            self._leave(place)
            raise

    def _leave(self, place: asyncio.Future[None]) -> None:
        if not place.cancelled():
            self._release()  # the place was given in the same instant: pass it on
        elif place in self._queue:
            self._queue.remove(place)

    def _release(self) -> None:
        while self._queue:
            place = self._queue.popleft()
            if not place.done():  # else its waiter was cancelled and is about to leave
                place.set_result(None)
                return
        self._running -= 1

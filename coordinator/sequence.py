"""The reading end of one sequence: deltas are pushed by the session, pulled by the request."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

from pdserve.errors import PdserveError
from pdserve.types import Delta

Take = Callable[[str, float], bool]
"""Offered text and the time at which it came, of `time.monotonic`; says whether it took it."""


class Sequence:
    """One slot between a decode session and the request that reads from it.

    A reader that is slower than the engine gets merged deltas, so that what is held is
    bounded by the answer's own length. One task reads; `push`, `grant` and `fail` are
    called on the same event loop.
    """

    __slots__ = (
        "_failure",
        "_forward",
        "_granted",
        "_pending",
        "_scope",
        "_waiter",
        "num_chars",
        "sequence_id",
        "take",
        "token_ids",
    )

    def __init__(self, sequence_id: int) -> None:
        self.sequence_id = sequence_id
        self._pending: Delta | None = None
        self._failure: PdserveError | None = None
        self._granted = False
        self._scope: asyncio.Timeout | None = None
        self._forward: Take | None = None
        self._waiter: asyncio.Future[None] | None = None
        self.token_ids: list[int] = []
        """Of all that came, in order; whoever offers text to `take` adds what was taken."""
        self.num_chars = 0
        """Characters of text that came with them."""
        self.take: Take | None = None
        """What takes text at once, if it returns True; None while it must be pushed."""

    def forward(self, take: Take) -> None:
        """From now on `take` is offered text that comes alone, instead of waking the reader.

        Both get what comes in order. `take` returns False to have the reader woken after all.
        """
        self._forward = take

    def push(self, delta: Delta) -> None:
        self.token_ids += delta.token_ids
        self.num_chars += len(delta.text)
        if self._pending is None:
            self._pending = delta
        else:
            self._pending.extend(delta)
        self._wake()

    def grant(self) -> None:
        self._granted = True
        self._wake()

    def fail(self, failure: PdserveError) -> None:
        """The first failure stays; deltas that came before it are still read first."""
        if self._failure is None:
            self._failure = failure
            if self._scope is not None:
                self._scope.reschedule(asyncio.get_running_loop().time())
        self._wake()

    async def reserved(self) -> None:
        """Returns once there is room; raises what `fail` was given."""
        while not self._granted:
            self._raise_failure()
            await self._wait()

    async def next(self) -> Delta:
        """The next delta; raises what `fail` was given."""
        while (delta := self._pending) is None:
            self._raise_failure()
            # A reader that waits is done with all that came before.
            self.take = self._forward
            await self._wait()
        self._pending = None
        return delta

    @asynccontextmanager
    async def or_failure(self) -> AsyncIterator[None]:
        """Cancels what is awaited inside as soon as `fail` is called, and raises what it was
        given."""
        self._raise_failure()
        try:
            async with asyncio.timeout(None) as self._scope:
                yield
        except TimeoutError:
            self._raise_failure()
            raise
        finally:
            self._scope = None

    def _raise_failure(self) -> None:
        if self._failure is not None:
            raise self._failure

    async def _wait(self) -> None:
        self._waiter = asyncio.get_running_loop().create_future()
        try:
            await self._waiter
        finally:
            self._waiter = self.take = None

    def _wake(self) -> None:
        self.take = None
        waiter = self._waiter
        if waiter is not None and not waiter.done():
            waiter.set_result(None)

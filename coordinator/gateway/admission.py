"""The waiting of admission: whoever is let in is woken, whoever leaves makes room.

What is decided, and why, is in `coordinator.policy.admission`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from typing import Protocol

from coordinator.policy.admission import AdmissionQueue
from coordinator.policy.ticket import Asked, Capacity, Limits, Priority, State, Ticket, Work
from pdserve.errors import ErrorReason, PdserveError, RejectedError
from pdserve.types import Role

LOOK_S = 0.25
"""While some wait, what the fleet can take is looked at so often, as often as workers tell."""


class AdmissionListener(Protocol):
    """Told of each request, once: it was let in, or refused."""

    def let_in(self, priority: Priority, waited_s: float) -> None: ...

    def refused(self, priority: Priority, reason: ErrorReason) -> None: ...


class Permit:
    """A request's place. Whoever got it releases it, once or more often, on every way out."""

    def __init__(self, admission: Admission, ticket: Ticket) -> None:
        self._admission = admission
        self._ticket = ticket

    def waits_s(self, prompt_tokens: int) -> Mapping[Role, float]:
        """Predicted until its turn, by the pool that would read the prompt."""
        return self._admission.waits_s(self._ticket, prompt_tokens)

    async def admit(self, work: Work) -> None:
        """Waits for its turn to go to a worker; to be called once. Cancelling the wait is well.

        Raises RejectedError QUEUE_FULL or OVERLOADED at once, and DEADLINE_EXCEEDED when its
        turn would come too late for its deadline.
        """
        await self._admission.admit(self._ticket, work)

    def read(self) -> None:
        """The first token is there."""
        self._admission.read(self._ticket)

    def release(self, answer_tokens: int | None = None) -> None:
        """`answer_tokens` is None where the answer did not come to its end."""
        self._admission.leave(self._ticket, answer_tokens)


class Admission:
    """One model's queue. Bound to one event loop; `now` is the clock of the deadlines."""

    def __init__(
        self,
        limits: Limits,
        capacity: Callable[[], Capacity],
        listener: AdmissionListener,
        now: Callable[[], float],
    ) -> None:
        """`capacity` tells what the fleet can take now."""
        self._queue = AdmissionQueue(limits)
        self._capacity = capacity
        self._listener = listener
        self._now = now
        self._turns: dict[Ticket, asyncio.Future[None]] = {}
        self._look: asyncio.TimerHandle | None = None

    @property
    def running(self) -> int:
        """Requests that were let in and have not ended."""
        return self._queue.running

    @property
    def queued(self) -> int:
        """Requests that wait for their turn."""
        return self._queue.queued

    @property
    def window_tokens(self) -> int:
        """Prompt tokens on their way to the workers that read them."""
        return self._queue.window_tokens

    @property
    def wait_s(self) -> float:
        """Predicted for a request that would have to go last."""
        return self._queue.wait_s(self._now(), self._capacity())

    def waiting(self, priority: Priority) -> tuple[int, int]:
        """(requests, prompt tokens) of the class that wait."""
        return self._queue.waiting(priority)

    def arrive(self, asked: Asked) -> Permit:
        """Before the request is tokenised. Raises RejectedError QUEUE_FULL or OVERLOADED."""
        try:
            ticket = self._queue.arrive(asked, self._now(), self._capacity())
        except PdserveError as error:
            self._listener.refused(asked.priority, error.reason)
            raise
        return Permit(self, ticket)

    def waits_s(self, ticket: Ticket, prompt_tokens: int) -> Mapping[Role, float]:
        return self._queue.waits_s(ticket, prompt_tokens, self._now(), self._capacity())

    async def admit(self, ticket: Ticket, work: Work) -> None:
        priority = ticket.asked.priority
        try:
            self._queue.enqueue(ticket, work, self._now(), self._capacity())
            turn = self._turns[ticket] = asyncio.get_running_loop().create_future()
            self._let_in()
            if not turn.done():
                await self._wait(ticket, turn)
        except PdserveError as error:
            self._listener.refused(priority, error.reason)
            raise
        self._listener.let_in(priority, ticket.admitted - ticket.queued)

    def read(self, ticket: Ticket) -> None:
        self._queue.read(ticket, self._now())
        self._let_in()

    def leave(self, ticket: Ticket, answer_tokens: int | None) -> None:
        self._queue.leave(ticket, self._now(), answer_tokens)
        self._turns.pop(ticket, None)
        self._let_in()

    async def _wait(self, ticket: Ticket, turn: asyncio.Future[None]) -> None:
        deadline = ticket.asked.deadline
        wait_s = None if deadline is None else deadline - ticket.work.own_s - self._now()
        try:
            async with asyncio.timeout(wait_s):
                await turn
        except TimeoutError:
            if ticket.state is State.READING:  # let in in the same instant
                return
            raise RejectedError(
                ErrorReason.DEADLINE_EXCEEDED, "the deadline passed while the request was queued"
            ) from None

    def _let_in(self) -> None:
        if not self._queue.queued:
            return
        for ticket in self._queue.admit(self._now(), self._capacity()):
            turn = self._turns.pop(ticket)
            if not turn.done():  # else its waiter was cancelled and is about to leave
                turn.set_result(None)
        if self._queue.queued and self._look is None:
            self._look = asyncio.get_running_loop().call_later(LOOK_S, self._look_again)

    def _look_again(self) -> None:
        self._look = None
        self._let_in()

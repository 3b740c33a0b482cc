"""An admission queue with a clock that is set by hand, and what becomes of those who ask it."""

from __future__ import annotations

import pytest

from coordinator.policy.admission import AdmissionQueue
from coordinator.policy.ticket import Asked, Capacity, Limits, Pool, Priority, Ticket, Work
from pdserve.errors import RejectedError
from pdserve.types import Role

DECODE, PREFILL = Role.DECODE, Role.PREFILL
NORMAL = Priority.NORMAL
PLENTY = Capacity(1_000, 10**9, {DECODE: Pool(1, 10**6), PREFILL: Pool(1, 10**6)})


class Model:
    """An admission queue, its clock, and the order in which requests were let in."""

    def __init__(
        self,
        *,
        max_running: int | None = None,
        max_queued: int = 1_000,
        max_ttft_s: float = 60.0,
        capacity: Capacity = PLENTY,
    ) -> None:
        self.queue = AdmissionQueue(Limits(max_running, max_queued, max_ttft_s))
        self.capacity = capacity
        self.now = 0.0
        self.names: dict[Ticket, str] = {}
        self.let_in: list[str] = []

    def arrive(
        self,
        tenant: str = "acme",
        priority: Priority = NORMAL,
        *,
        weight: float = 1.0,
        deadline: float | None = None,
        chars: int = 0,
    ) -> Ticket:
        asked = Asked(tenant, priority, weight, self.now, deadline, chars)
        return self.queue.arrive(asked, self.now, self.capacity)

    def ask(
        self,
        name: str = "",
        tokens: int = 100,
        *,
        answer: int = 0,
        reader: Role = DECODE,
        own_s: float = 0.0,
        behind_s: float = 0.0,
        **asked: object,
    ) -> Ticket:
        ticket = self.arrive(**asked)  # type: ignore[arg-type]
        self.names[ticket] = name
        try:
            work = Work(tokens, answer, reader, own_s, behind_s)
            self.queue.enqueue(ticket, work, self.now, self.capacity)
        except RejectedError:
            self.queue.leave(ticket, self.now)
            raise
        self.admit()
        return ticket

    def admit(self) -> list[str]:
        names = [self.names[t] for t in self.queue.admit(self.now, self.capacity)]
        self.let_in += names
        return names

    def end(self, ticket: Ticket, answer_tokens: int | None = 0) -> list[str]:
        self.queue.read(ticket, self.now)
        self.queue.leave(ticket, self.now, answer_tokens)
        return self.admit()

    def refusal(self, **asked: object) -> RejectedError:
        with pytest.raises(RejectedError) as caught:
            self.ask(**asked)  # type: ignore[arg-type]
        return caught.value

    def paced(self, tokens: int) -> None:
        """So many tokens are seen to leave the queue in one second; at most one runs."""
        first = self.ask(tokens=1)
        second = self.ask(tokens=tokens)
        self.now += 1
        self.end(first)
        self.end(second)


def drained(model: Model) -> list[str]:
    """The order in which the rest is let in, one at a time."""
    done = 0
    while done < len(model.let_in):
        name = model.let_in[done]
        model.end(next(t for t, it in model.names.items() if it == name))
        done += 1
    return model.let_in

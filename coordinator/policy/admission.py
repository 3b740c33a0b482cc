"""Who is let in, who waits, and who is refused at once: the decisions of admission. Pure.

Order is that of a fair queue: classes by priority, in each the tenants, in each of these
prompts by size, and of one size those first that must begin first. What is let in at once is
what the workers can hold and are about to read, so that others wait here, in this order, and
not in the workers, in order of arrival. A wait is predicted from what goes before, the rate at
which the queue has moved, and that at which requests have ended. Whoever got a place keeps it:
a refusal that comes late helps nobody.
"""

from __future__ import annotations

import math
from collections import Counter
from itertools import islice

from coordinator.policy.fair_queue import FairQueue, Share
from coordinator.policy.pace import Pace
from coordinator.policy.ticket import Asked, Capacity, Limits, Pool, Priority, State, Ticket, Work
from pdserve.errors import ErrorReason, RejectedError
from pdserve.types import Role

WINDOW_STEPS = 4
"""Steps' worth of prompt tokens on the way to each worker that reads: one being read, one
waiting for it, and as much again for what is on its way to and from the worker."""

READ_AHEAD = 2
"""Requests in all, for each worker that reads for others, beyond what the decode workers run."""

MARGIN = 0.8
"""Part of the time that is left which a predicted wait may take: predictions err."""

HOARD = 8
"""A tenant may have so many times as many requests waiting as there are places left, so that
whoever fills the queue leaves some to others (Choudhury, Hahne: "Dynamic queue length
thresholds for shared-memory packet switches", 1998)."""

ANSWER_TOKEN = 2
"""Prompt tokens that a token of an answer counts for between tenants."""

LEARN = 0.1
"""Weight of the last answer, or prompt, in what is learned of them."""

_CHARS_PER_TOKEN = 4.0  # until it is learned
_LEAST_RETRY_S = 1.0
_MOST_RETRY_S = 60.0  # the longest that OpenAI's clients obey


class AdmissionQueue:
    """Everything of one model. `now` never goes back between calls."""

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self._lanes = {role: _Lane() for role in Role}
        self._waiting: Counter[tuple[Priority, str]] = Counter()
        self._arrived = 0
        self._reading_kv = 0
        self._answer_tokens = 0.0
        self._answer_token_s = 0.0
        self._chars_per_token = _CHARS_PER_TOKEN
        # Until the first has ended, one is about to (Laplace's rule of succession).
        self._turnover = Pace(done=1.0)
        self._in: dict[Ticket, None] = {}  # in order of their turns
        self._now = 0.0

    @property
    def running(self) -> int:
        """Requests that were let in and have not left."""
        return len(self._in)

    @property
    def queued(self) -> int:
        return sum(len(lane.queue) for lane in self._lanes.values())

    @property
    def window_tokens(self) -> int:
        """Prompt tokens that were let in and are not read yet, as far as they count."""
        return sum(lane.window_tokens for lane in self._lanes.values())

    def waiting(self, priority: Priority) -> tuple[int, int]:
        """(requests, prompt tokens) of the class that are in the queue."""
        parts = [lane.queue.part(priority) for lane in self._lanes.values()]
        return sum(items for items, _ in parts), sum(tokens for _, tokens in parts)

    def wait_s(self, now: float, capacity: Capacity) -> float:
        """Predicted for whoever would go behind all others, in the slower lane."""
        self._go_on(now)
        return max(
            self._wait_s(role, lane.queue.tokens, capacity) for role, lane in self._lanes.items()
        )

    def waits_s(
        self, ticket: Ticket, prompt_tokens: int, now: float, capacity: Capacity
    ) -> dict[Role, float]:
        """Predicted for a request that is about to be queued, by the pool that would read it."""
        self._go_on(now)
        path = _path(ticket.asked, prompt_tokens)
        return {
            role: self._wait_s(role, self._lanes[role].queue.ahead(path), capacity)
            for role in capacity.pools
        }

    def arrive(self, asked: Asked, now: float, capacity: Capacity) -> Ticket:
        """Takes a request in for as long as it is being tokenised, if it has any chance.

        Raises RejectedError QUEUE_FULL or OVERLOADED.
        """
        self._go_on(now)
        self._require_place(asked, self._arrived + self.queued, capacity)
        tokens = round(asked.prompt_chars / self._chars_per_token)
        late_s = [
            self._late_s(asked, Work(tokens, 0, role), now, capacity) for role in capacity.pools
        ]
        if late_s and min(late_s) > 0:
            raise _overloaded(min(late_s))
        self._arrived += 1
        self._waiting[asked.priority, asked.tenant] += 1
        return Ticket(asked)

    def enqueue(self, ticket: Ticket, work: Work, now: float, capacity: Capacity) -> None:
        """Gives a tokenised request its place; `admit` says whose turn it is.

        Raises RejectedError QUEUE_FULL or OVERLOADED.
        """
        self._go_on(now)
        asked = ticket.asked
        self._learn_chars(asked.prompt_chars, work.prompt_tokens)
        lane = self._lanes[work.reader]
        ticket.work = work
        ticket.queued = now
        ticket.kv_tokens = work.prompt_tokens + self._answer(work)
        ticket.latest = self._latest(asked, work)
        waits = len(lane.queue) or not self._fits(ticket, capacity)
        if waits and self.queued >= self._limits.max_queued:
            raise self._full(capacity)
        if (late_s := self._late_s(asked, work, now, capacity)) > 0:
            raise _overloaded(late_s)
        path = _path(asked, work.prompt_tokens)
        ticket.place = lane.queue.push(path, work.prompt_tokens, ticket.latest, ticket)
        ticket.state = State.QUEUED
        self._arrived -= 1

    def admit(self, now: float, capacity: Capacity) -> list[Ticket]:
        """Lets in, in order, all for whom there is room now."""
        self._go_on(now)
        let_in: list[Ticket] = []
        while (ticket := self._next(capacity)) is not None:
            lane = self._lanes[ticket.work.reader]
            lane.let_in(ticket, capacity.pool(ticket.work.reader), waited=now > ticket.queued)
            self._forget_wait(ticket.asked)
            self._reading_kv += ticket.kv_tokens
            self._in[ticket] = None
            ticket.admitted = now
            ticket.state = State.READING
            let_in.append(ticket)
        return let_in

    def read(self, ticket: Ticket, now: float) -> None:
        """Its first token is there: others may be let in to be read."""
        if ticket.state is State.READING:
            self._go_on(now)
            self._end_reading(ticket)
            ticket.began = now
            ticket.state = State.WRITING

    def leave(self, ticket: Ticket, now: float, answer_tokens: int | None = None) -> None:
        """However it ended, in whatever state; only the first call does anything.

        `answer_tokens` is None where nobody knows.
        """
        self._go_on(now)
        state, ticket.state = ticket.state, State.GONE
        match state:
            case State.ARRIVED:
                self._arrived -= 1
                self._forget_wait(ticket.asked)
            case State.QUEUED:
                assert ticket.place is not None
                self._lanes[ticket.work.reader].queue.remove(ticket.place)
                self._forget_wait(ticket.asked)
            case State.READING:
                self._end_reading(ticket)
                self._give_seat_back(ticket)
            case State.WRITING:
                self._give_seat_back(ticket)
                self._settle(ticket, now, answer_tokens)
            case State.GONE:
                pass

    def _go_on(self, now: float) -> None:
        for lane in self._lanes.values():
            lane.pace.go_on(now, at_it=1.0 if len(lane.queue) else 0.0)
        self._turnover.go_on(now, at_it=self.running)
        self._now = now

    def _give_seat_back(self, ticket: Ticket) -> None:
        del self._in[ticket]
        self._turnover.add(1.0)

    def _end_reading(self, ticket: Ticket) -> None:
        self._lanes[ticket.work.reader].end_reading(ticket)
        self._reading_kv -= ticket.kv_tokens

    def _settle(self, ticket: Ticket, now: float, answer_tokens: int | None) -> None:
        """Learns from the answer, and charges the tenant for it."""
        if answer_tokens is None:
            answer_tokens = self._answer(ticket.work)
        else:
            self._answer_tokens += LEARN * (answer_tokens - self._answer_tokens)
            token_s = (now - ticket.began) / max(1, answer_tokens)
            self._answer_token_s += LEARN * (token_s - self._answer_token_s)
        assert ticket.place is not None
        queue = self._lanes[ticket.work.reader].queue
        queue.charge(ticket.place, ANSWER_TOKEN * answer_tokens)

    def _answer(self, work: Work) -> int:
        """Tokens that its answer is expected to have."""
        return min(work.max_tokens, math.ceil(self._answer_tokens))

    def _learn_chars(self, chars: int, tokens: int) -> None:
        if chars:
            self._chars_per_token += LEARN * (chars / tokens - self._chars_per_token)

    def _forget_wait(self, asked: Asked) -> None:
        self._waiting[asked.priority, asked.tenant] -= 1
        if not self._waiting[asked.priority, asked.tenant]:
            del self._waiting[asked.priority, asked.tenant]

    def _latest(self, asked: Asked, work: Work) -> float:
        """When its turn must come. A prompt that takes long by itself is not refused for that,
        nor one with a deadline for the answer that it is expected to have."""
        begins = asked.arrived - work.behind_s
        if asked.deadline is None:
            bound = self._limits.max_ttft_s
            return begins + max(bound - work.own_s, bound / 2)
        bound = asked.deadline - work.own_s - asked.arrived
        answer_s = self._answer(work) * self._answer_token_s
        return begins + max(bound - answer_s, bound / 2)

    def _late_s(self, asked: Asked, work: Work, now: float, capacity: Capacity) -> float:
        """By how much too long it would wait, at most 0 where it would be in time."""
        ahead = self._lanes[work.reader].queue.ahead(_path(asked, work.prompt_tokens))
        wait_s = self._wait_s(work.reader, ahead, capacity) + work.behind_s
        left_s = self._latest(asked, work) + work.behind_s - now
        return wait_s - MARGIN * left_s if wait_s else 0.0

    def _wait_s(self, reader: Role, ahead: float, capacity: Capacity) -> float:
        """Predicted for a request behind so many tokens: until they are read, or until there are
        seats for those whose they are, and one more."""
        lane = self._lanes[reader]
        lacking = 1 + self.running - self._seats(capacity)
        if lane.queue.tokens:
            lacking += len(lane.queue) * ahead / lane.queue.tokens
        return max(lane.wait_s(ahead, capacity.pool(reader)), self._seat_s(lacking, capacity))

    def _seat_s(self, lacking: float, capacity: Capacity) -> float:
        """Until so many seats more are free: as they come free on the average, and not before
        those that have been there for longest may be expected to leave."""
        if lacking <= 0 or not self._in:
            return 0.0
        stay_s = self._turnover.seconds(1)
        index = min(math.ceil(lacking), len(self._in)) - 1
        leaves = next(islice(self._in, index, None)).admitted + stay_s
        return max(lacking * stay_s / self._seats(capacity), leaves - self._now)

    def _require_place(self, asked: Asked, waiting: int, capacity: Capacity) -> None:
        free = self._free_seats(capacity)
        if waiting < free:
            return
        left = self._limits.max_queued + free - waiting
        if left <= 0 or self._waiting[asked.priority, asked.tenant] >= HOARD * left:
            raise self._full(capacity)

    def _full(self, capacity: Capacity) -> RejectedError:
        return RejectedError(
            ErrorReason.QUEUE_FULL,
            "too many requests are waiting; retry later",
            # By then about half of them have had their turn.
            retry_after_s=_retry_s(self.wait_s(self._now, capacity) / 2),
        )

    def _seats(self, capacity: Capacity) -> float:
        """Most requests that may be in at once."""
        seats = math.inf
        if capacity.sequences:
            seats = capacity.sequences + READ_AHEAD * capacity.pool(Role.PREFILL).workers
        most = self._limits.max_running
        return seats if most is None else min(seats, most)

    def _free_seats(self, capacity: Capacity) -> float:
        return max(0.0, self._seats(capacity) - self.running)

    def _next(self, capacity: Capacity) -> Ticket | None:
        """Of the lanes' heads that fit, the one that must begin first. Nobody where another lacks
        cache alone and has waited for longer than it can still wait: what goes before it from
        the other lane would never leave it enough."""
        heads = [
            place.item for lane in self._lanes.values() if (place := lane.queue.head()) is not None
        ]
        fit = [ticket for ticket in heads if self._fits(ticket, capacity)]
        if any(ticket not in fit and self._is_passed_over(ticket, capacity) for ticket in heads):
            return None
        return min(fit, key=lambda ticket: ticket.latest, default=None)

    def _is_passed_over(self, ticket: Ticket, capacity: Capacity) -> bool:
        waited, left = self._now - ticket.queued, ticket.latest - self._now
        return waited >= left and self._has_reader(ticket, capacity)

    def _fits(self, ticket: Ticket, capacity: Capacity) -> bool:
        if self.running >= self._seats(capacity):
            return False
        if not self.running or not capacity.sequences:
            return True
        reading = sum(lane.reading for lane in self._lanes.values())
        # Answers under way are, on the average, half written.
        growth = (self.running - reading) * self._answer_tokens / 2
        needed = self._reading_kv + ticket.kv_tokens + growth
        return needed <= capacity.free_kv_tokens and self._has_reader(ticket, capacity)

    def _has_reader(self, ticket: Ticket, capacity: Capacity) -> bool:
        work = ticket.work
        return self._lanes[work.reader].has_room(work.prompt_tokens, capacity.pool(work.reader))


class _Lane:
    """The queue before one pool of readers, what these have not read yet, and their pace."""

    def __init__(self) -> None:
        self.queue: FairQueue[Ticket] = FairQueue()
        self.pace = Pace()
        self.reading = 0
        self.window_tokens = 0

    def has_room(self, prompt_tokens: int, pool: Pool) -> bool:
        """Each worker may always have two prompts on their way to it."""
        window = WINDOW_STEPS * pool.chunk_tokens
        used = max(0, self.window_tokens - pool.piled_tokens)
        return not pool.workers or used + _counted(prompt_tokens, pool) <= window

    def let_in(self, ticket: Ticket, pool: Pool, *, waited: bool) -> None:
        assert ticket.place is not None
        self.queue.take(ticket.place)
        ticket.window_tokens = _counted(ticket.work.prompt_tokens, pool)
        self.window_tokens += ticket.window_tokens
        self.reading += 1
        if waited:
            self.pace.add(ticket.work.prompt_tokens / max(1, pool.workers))

    def end_reading(self, ticket: Ticket) -> None:
        self.window_tokens -= ticket.window_tokens
        self.reading -= 1

    def wait_s(self, tokens: float, pool: Pool) -> float:
        workers = max(1, pool.workers)
        return self.pace.seconds(tokens / workers, pool.tokens_per_s / workers)


def _counted(prompt_tokens: int, pool: Pool) -> int:
    """One prompt keeps one worker busy, however long it is, and leaves it room for another."""
    return min(prompt_tokens, WINDOW_STEPS * pool.chunk_tokens // (2 * max(1, pool.workers)))


def size_of(prompt_tokens: int) -> int:
    """Prompts of one size are within a factor of four of each other, or below 512 tokens.

    They form a line of their own, so that long ones do not hold short ones up, nor the other
    way round.
    """
    return max(0, prompt_tokens.bit_length() - 8) // 2


def _path(asked: Asked, prompt_tokens: int) -> tuple[Share, ...]:
    return (
        Share(asked.priority, asked.priority.weight),
        Share(asked.tenant, asked.weight),
        Share(size_of(prompt_tokens)),
    )


def _overloaded(late_s: float) -> RejectedError:
    return RejectedError(
        ErrorReason.OVERLOADED,
        f"the answer would come too late, by {late_s:.1f} s; retry later",
        retry_after_s=_retry_s(late_s),
    )


def _retry_s(seconds: float) -> float:
    return min(max(seconds, _LEAST_RETRY_S), _MOST_RETRY_S)

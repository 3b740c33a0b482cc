"""What would come of reading a prompt on one worker and writing its answer on another. Pure.

Costs are in missed targets, so that what a request waits and what it makes others wait can be
added up: 1 is a target of one request that is just missed. What is well within its target costs
next to nothing, however many share it; what is near to it is dear; and what is beyond goes on
to cost, for others wait behind it, or are written beside it, who would miss theirs as well.
"""

from __future__ import annotations

from functools import cached_property
from math import ceil, inf
from operator import attrgetter
from typing import NamedTuple

from coordinator.policy.snapshot import ModelPolicy, Plan, RequestFacts, Snapshot, WorkerView
from pdserve.types import Role

STEEP = 4
"""Power of the share of a target by which missing it comes near, for a first token."""
STEEP_PACE = 16
"""The same for an answer's pace: the mean of many steps is known better than one wait."""
LATE = 4
"""What one target's length too late costs beyond the target itself."""
MOST_READING = 0.8
"""Part of its time that a worker is ever believed to go on reading."""

_TO_READ = attrgetter("outstanding_tokens")


class Reading(NamedTuple):
    """A prompt, read on one worker: `start_s` from now to its end, `behind_s` of which are for
    what waits there.

    `harmed` answers are being written there, whose steps take `added_s` longer meanwhile;
    `harm` is what that costs them all, and prompts that come later.
    """

    start_s: float
    behind_s: float
    harmed: int
    added_s: float
    harm: float


class Route(NamedTuple):
    """`start_s` is the time to the first token, from the request's turn on."""

    start_s: float
    reading: Reading
    cost: float


class Forecast:
    """Of one request, on workers as they are now."""

    def __init__(self, snapshot: Snapshot, policy: ModelPolicy, facts: RequestFacts) -> None:
        estimates = self._estimates = snapshot.estimates
        self._snapshot = snapshot
        self._policy = policy
        self._now = snapshot.now
        self._ttft_s = policy.ttft_target_s + policy.ttft_target_token_s * facts.prompt_tokens
        self._itl_s = policy.itl_target_s
        self._prompt_tokens = facts.prompt_tokens
        self._cached = facts.cached_tokens
        self._queue_s = facts.queue_s
        self._answer_tokens = max(1.0, estimates.answer_tokens)

    def learnt(self, prefill: WorkerView, decode: WorkerView) -> bool:
        """Whether enough was seen of both workers' pools, and of hand-overs."""
        ours, theirs = self._estimates.of(prefill.pool), self._estimates.of(decode.pool)
        reads = ours.reads_learnt and theirs.reads_learnt
        return reads and theirs.writes_learnt and self._estimates.hand_over.learnt

    def colocated(self, decode: WorkerView) -> Route:
        """The prompt is read where the answer is written."""
        step_s = self._step_s(decode)
        reading = self._reading(decode, step_s)
        cost = self._waiting(Role.DECODE, reading.start_s) + reading.harm
        cost += self._writing(decode, step_s)
        return Route(reading.start_s, reading, cost)

    def disaggregated(self, prefill: WorkerView, decode: WorkerView) -> Route:
        """The prompt is read on one worker, and the answer written on another."""
        reading = self._reading(prefill, self._step_s(prefill))
        hand_over = self._estimates.hand_over
        step_s = self._step_s(decode)
        start_s = reading.start_s + hand_over.base_s + hand_over.token_s * self._prompt_tokens
        start_s += step_s + self._room_s(decode, step_s)
        cost = self._waiting(Role.PREFILL, start_s) + reading.harm
        cost += self._writing(decode, step_s)
        return Route(start_s, reading, cost)

    def of(self, plan: Plan, snapshot: Snapshot) -> Route:
        """The route of a plan that was made on this snapshot."""
        decode = next(view for view in snapshot.decode if view.worker_id == plan.decode)
        if plan.prefill is None:
            return self.colocated(decode)
        prefill = next(view for view in snapshot.prefill if view.worker_id == plan.prefill)
        return self.disaggregated(prefill, decode)

    def handing_over(self, prefill: WorkerView) -> float:
        """What it costs to have the prompt read there for a decode worker elsewhere."""
        reading = self._reading(prefill, self._step_s(prefill))
        return self._waiting(Role.PREFILL, reading.start_s) + reading.harm

    def taking_over(self, decode: WorkerView) -> float:
        """What it costs to have the answer to a prompt written there that was read elsewhere."""
        step_s = self._step_s(decode)
        return self._writing(decode, step_s) + self._room_s(decode, step_s) / self._ttft_s

    def _reading(self, view: WorkerView, step_s: float) -> Reading:
        timings = self._estimates.of(view.pool)
        cached = min(self._cached.get(view.worker_id, 0), self._prompt_tokens - 1)
        uncached = self._prompt_tokens - cached
        read_s = timings.reading_s(uncached, uncached * (cached + uncached / 2))
        chunks = ceil(uncached / view.chunk_tokens)
        behind_s, own_s = self._unread_s(view, step_s), read_s + chunks * step_s
        start_s = behind_s + own_s + self._room_s(view, step_s)
        harmed = view.writing
        if not harmed:
            return Reading(start_s, behind_s, 0, 0.0, self._pushed_back(behind_s, own_s))
        pace_s = self._pace_s(view, step_s)
        # Each of them stands still once for as long, somewhere among its tokens.
        harm = harmed * self._slowed(pace_s, read_s / self._answer_tokens)
        harm += self._shut_out(view, pace_s, behind_s, own_s)
        return Reading(start_s, behind_s, harmed, read_s / chunks, harm)

    def _pushed_back(self, behind_s: float, own_s: float) -> float:
        """What it costs prompts like this one that come later to the same reader: in a queue that
        neither grows nor shrinks, as many as wait there before it."""
        wait_s = self._queue_s.get(Role.PREFILL, 0.0) + behind_s
        longer = _missed((wait_s + own_s) / self._ttft_s) - _missed(wait_s / self._ttft_s)
        return longer * wait_s / own_s

    def _shut_out(self, view: WorkerView, pace_s: float, behind_s: float, own_s: float) -> float:
        """What it costs prompts that come while no worker is free to read, for a while that this
        one makes longer. They come as often as answers end: as many as are written, in the time
        that one takes."""
        others_s = next((s for s, worker in self._soonest if worker != view.worker_id), inf)
        before, after = min(behind_s, others_s), min(behind_s + own_s, others_s)
        answers, ttft_s = self._typical
        rate = answers / (self._answer_tokens * pace_s)
        return rate * ttft_s * (_missed_until(after / ttft_s) - _missed_until(before / ttft_s))

    @cached_property
    def _soonest(self) -> list[tuple[float, str]]:
        """How long those take that have the least to read, two of each pool; the first first."""
        pools = self._snapshot.decode, self._snapshot.prefill
        least = [view for pool in pools for view in sorted(pool, key=_TO_READ)[:2]]
        return sorted((self._unread_s(view, self._step_s(view)), view.worker_id) for view in least)

    @cached_property
    def _typical(self) -> tuple[int, float]:
        """Answers that are written now, and the target of a first token of one like them."""
        decode = self._snapshot.decode
        answers = max(1, sum([view.writing for view in decode]))
        tokens = sum([view.context_tokens for view in decode]) / answers
        return answers, self._policy.ttft_target_s + self._policy.ttft_target_token_s * tokens

    def _writing(self, view: WorkerView, step_s: float) -> float:
        """What one answer more costs, itself and the others there."""
        timings = self._estimates.of(view.pool)
        tokens = self._prompt_tokens + self._answer_tokens / 2
        added_s = timings.sequence_s + timings.context_s * tokens
        pace_s = self._pace_s(view, step_s)
        itself = _missed((pace_s + added_s) / self._itl_s, STEEP_PACE)
        return itself + view.writing * self._slowed(pace_s, added_s)

    def _slowed(self, pace_s: float, added_s: float) -> float:
        """What it costs an answer that each of its tokens takes so much longer."""
        slower = _missed((pace_s + added_s) / self._itl_s, STEEP_PACE)
        return slower - _missed(pace_s / self._itl_s, STEEP_PACE)

    def _pace_s(self, view: WorkerView, step_s: float) -> float:
        """How long a token of an answer takes there on average: as long as steps that only write
        and, between them, prompts being read. That goes on as it was lately, or as long as what
        waits to be read takes."""
        timings = self._estimates.of(view.pool)
        queue_s = timings.reading_s(view.outstanding_tokens, view.outstanding_pairs)
        lately_s = step_s / (1 - min(view.reading, MOST_READING))
        return max(lately_s, step_s + queue_s / self._answer_tokens)

    def _unread_s(self, view: WorkerView, step_s: float) -> float:
        """How long what waits to be read there takes. The first of it has been read for a while;
        how long it is itself is not known."""
        timings = self._estimates.of(view.pool)
        read_s = timings.reading_s(view.outstanding_tokens, view.outstanding_pairs)
        whole_s = read_s + ceil(view.outstanding_tokens / view.chunk_tokens) * step_s
        spent_s = self._now - view.reading_since
        return whole_s - min(spent_s, whole_s / max(1, view.outstanding_prompts))

    def _waiting(self, reader: Role, start_s: float) -> float:
        """What a first token costs that comes so long after the request's turn in the queue
        before that pool."""
        return _missed((self._queue_s.get(reader, 0.0) + start_s) / self._ttft_s)

    def _step_s(self, view: WorkerView) -> float:
        timings = self._estimates.of(view.pool)
        if not view.writing:
            return timings.step_s
        written_s = timings.sequence_s * view.writing + timings.context_s * view.context_tokens
        return timings.step_s + written_s

    def _room_s(self, view: WorkerView, step_s: float) -> float:
        """How long the request waits for room in the cache, which answers give back as they end,
        evenly."""
        needed = view.context_tokens + view.outstanding_tokens + self._prompt_tokens
        lacking = needed + self._answer_tokens - view.capacity_tokens
        if lacking <= 0 or not view.capacity_tokens:
            return 0.0
        return lacking * self._answer_tokens * step_s / max(view.context_tokens, 1.0)


def _missed(share: float, steep: int = STEEP) -> float:
    """How far a target is missed by whoever takes so many times what it allows."""
    return share**steep if share < 1 else 1 + LATE * (share - 1)


def _missed_until(share: float) -> float:
    """What `_missed` adds up to from 0 on, of first tokens."""
    if share < 1:
        return share ** (STEEP + 1) / (STEEP + 1)
    return 1 / (STEEP + 1) + (share - 1) + LATE / 2 * (share - 1) ** 2

"""What would come of reading a prompt on one worker and writing its answer on another. Pure.

Costs are in shares of the model's latency targets, so that what a request waits and what it
makes others wait can be added up: 1 is a whole target, of one request.
"""

from __future__ import annotations

from math import ceil
from typing import NamedTuple

from coordinator.policy.estimate import Estimates
from coordinator.policy.snapshot import ModelPolicy, Plan, RequestFacts, Snapshot, WorkerView

LEAST_SLACK = 0.25
"""Part of the inter-token target that running answers are always said to have left."""
LATE = 3.0
"""How much dearer waiting is beyond the target than before it."""


class Reading(NamedTuple):
    """A prompt, read on one worker: `start_s` from now to its end, behind what waits there.

    `harmed` answers are being written there, whose steps take `added_s` longer meanwhile;
    `harm` is what that costs them all.
    """

    start_s: float
    harmed: int
    added_s: float
    harm: float


class Route(NamedTuple):
    """`start_s` is the time to the first token."""

    start_s: float
    reading: Reading
    cost: float


class Forecast:
    """Of one request, on workers as they are now."""

    def __init__(self, estimates: Estimates, policy: ModelPolicy, facts: RequestFacts) -> None:
        self._estimates = estimates
        self._ttft_s = policy.ttft_target_s
        self._itl_s = policy.itl_target_s
        self._prompt_tokens = facts.prompt_tokens
        self._cached = facts.cached_tokens
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
        cost = self._waiting(reading.start_s) + reading.harm + self._writing(decode, step_s)
        return Route(reading.start_s, reading, cost)

    def disaggregated(self, prefill: WorkerView, decode: WorkerView) -> Route:
        """The prompt is read on one worker, and the answer written on another."""
        reading = self._reading(prefill, self._step_s(prefill))
        hand_over = self._estimates.hand_over
        step_s = self._step_s(decode)
        start_s = reading.start_s + hand_over.base_s + hand_over.token_s * self._prompt_tokens
        start_s += step_s + self._room_s(decode, step_s)
        cost = self._waiting(start_s) + reading.harm + self._writing(decode, step_s)
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
        return self._waiting(reading.start_s) + reading.harm

    def taking_over(self, decode: WorkerView) -> float:
        """What it costs to have the answer to a prompt written there that was read elsewhere."""
        step_s = self._step_s(decode)
        return self._writing(decode, step_s) + self._room_s(decode, step_s) / self._ttft_s

    def _reading(self, view: WorkerView, step_s: float) -> Reading:
        timings = self._estimates.of(view.pool)
        cached = min(self._cached.get(view.worker_id, 0), self._prompt_tokens - 1)
        uncached = self._prompt_tokens - cached
        read_s = timings.token_s * uncached
        read_s += timings.pair_s * uncached * (cached + uncached / 2)
        queue_s = timings.token_s * view.outstanding_tokens
        queue_s += timings.pair_s * view.outstanding_pairs
        chunks = ceil((view.outstanding_tokens + uncached) / view.chunk_tokens)
        start_s = queue_s + read_s + chunks * step_s + self._room_s(view, step_s)
        harmed = view.writing
        if not harmed:
            return Reading(start_s, 0, 0.0, 0.0)
        share = read_s / (self._answer_tokens * self._slack_s(step_s))
        added_s = read_s / ceil(uncached / view.chunk_tokens)
        # A running answer misses its target once at most.
        return Reading(start_s, harmed, added_s, harmed * min(1.0, share))

    def _writing(self, view: WorkerView, step_s: float) -> float:
        """What one answer more costs, itself and the others there."""
        timings = self._estimates.of(view.pool)
        tokens = self._prompt_tokens + self._answer_tokens / 2
        added_s = timings.sequence_s + timings.context_s * tokens
        return (step_s + added_s) / self._itl_s + view.writing * added_s / self._slack_s(step_s)

    def _waiting(self, start_s: float) -> float:
        """What a first token after so long costs. Beyond the target others wait behind it, who
        would miss theirs as well."""
        share = start_s / self._ttft_s
        return share if share < 1 else 1 + LATE * (share - 1)

    def _step_s(self, view: WorkerView) -> float:
        timings = self._estimates.of(view.pool)
        if not view.writing:
            return timings.step_s
        written_s = timings.sequence_s * view.writing + timings.context_s * view.context_tokens
        return timings.step_s + written_s

    def _slack_s(self, step_s: float) -> float:
        return max(self._itl_s - step_s, LEAST_SLACK * self._itl_s)

    def _room_s(self, view: WorkerView, step_s: float) -> float:
        """How long the request waits for room in the cache, which answers give back as they end,
        evenly."""
        needed = view.context_tokens + view.outstanding_tokens + self._prompt_tokens
        lacking = needed + self._answer_tokens - view.capacity_tokens
        if lacking <= 0 or not view.capacity_tokens:
            return 0.0
        return lacking * self._answer_tokens * step_s / max(view.context_tokens, 1.0)

"""The coordinator's own policy over modelled workers: the same `choose`, on what it has learnt and
what it was last told. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import product

from coordinator.policy.choose import choose
from coordinator.policy.estimate import Estimator
from coordinator.policy.pace import Pace
from coordinator.policy.snapshot import ModelPolicy, RequestFacts, Snapshot, WorkerView
from coordinator.worker import READING_MEMORY_S
from measure.plan.server import Job, Server
from measure.simulation.traces import Arrival

REPORTED_S = 0.5
"""So often workers tell what they did."""


class Router:
    """What one coordinator knows and decides. `readers` are empty where nobody reads for
    others."""

    def __init__(
        self, policy: ModelPolicy, readers: Sequence[Server], writers: Sequence[Server]
    ) -> None:
        self._policy = policy
        self._readers = [_Known(f"p{number}", it) for number, it in enumerate(readers)]
        self._writers = [_Known(f"d{number}", it) for number, it in enumerate(writers)]
        self._by_id = {it.worker_id: it for it in (*self._readers, *self._writers)}
        self._known = {it.server: it for it in self._by_id.values()}
        names = product(
            (it.worker_id for it in self._readers), (it.worker_id for it in self._writers)
        )
        self._pairs = dict.fromkeys(names, ("nixl",))
        self._estimator = Estimator()
        self._turn = 0

    def choose(self, arrival: Arrival, now: float) -> tuple[Server, Server] | None:
        """(who reads, who writes); None where whoever would write has no room in its cache."""
        self._turn += 1
        cached = {name: it.server.found(arrival) for name, it in self._by_id.items()}
        snapshot = Snapshot(
            tuple(it.view() for it in self._readers),
            tuple(it.view() for it in self._writers),
            self._pairs,
            self._turn,
            self._estimator.estimates,
            now,
        )
        facts = RequestFacts(arrival.prompt_tokens, cached_tokens=cached)
        plan = choose(snapshot, self._policy, facts)
        while not _has_room(writer := self._by_id[plan.decode].server, arrival):
            if plan.prefill is None:
                return None
            # As in production, another one is asked for room.
            facts = replace(facts, full_decode=facts.full_decode | {plan.decode})
            plan = choose(snapshot, self._policy, facts)
            if plan.prefill is None:
                return None
        return writer if plan.prefill is None else self._by_id[plan.prefill].server, writer

    def began(self, reader: Server, job: Job, now: float) -> None:
        """The job is on its way to be read."""
        self._known[reader].give(job, now)

    def read(self, reader: Server, job: Job, now: float) -> None:
        self._known[reader].take(job, now)

    def handed_over(self, job: Job, seconds: float) -> None:
        self._estimator.observe_hand_over(job.arrival.prompt_tokens, seconds)

    def done(self, job: Job) -> None:
        self._estimator.observe_answer(job.arrival.answer_tokens)

    def stepped(self, server: Server, now: float) -> None:
        """A step has ended: what was done is told when it is time to."""
        known = self._known[server]
        if now < known.tells_at:
            return
        known.tells_at = now + REPORTED_S
        known.context_tokens = server.context_tokens
        work = server.work
        server.work = type(work)()
        self._estimator.observe_work(known.pool, work, server.pool.kv_tokens)
        timings = self._estimator.estimates.of(known.pool)
        known.reading.go_on(now, 1.0)
        known.reading.add(timings.reading_s(work.prefill_tokens, work.prefill_pairs))


class _Known:
    """One worker as the coordinator knows it."""

    def __init__(self, worker_id: str, server: Server) -> None:
        self.worker_id = worker_id
        self.pool = worker_id[0]
        self.server = server
        self.tells_at = 0.0
        self.context_tokens = 0
        self.reading = Pace(memory_s=READING_MEMORY_S)
        self._prompts = self._tokens = self._pairs = 0
        self._reading_since = 0.0

    def give(self, job: Job, now: float) -> None:
        if not self._prompts:
            self._reading_since = now
        self._count(job, 1)

    def take(self, job: Job, now: float) -> None:
        self._reading_since = now
        self._count(job, -1)

    def _count(self, job: Job, sign: int) -> None:
        new = job.arrival.prompt_tokens - job.cached
        self._prompts += sign
        self._tokens += sign * new
        self._pairs += sign * new * (job.cached + new // 2)

    def view(self) -> WorkerView:
        server = self.server
        return WorkerView(
            worker_id=self.worker_id,
            outstanding_sequences=server.sequences,
            outstanding_tokens=self._tokens,
            outstanding_pairs=self._pairs,
            outstanding_prompts=self._prompts,
            reading_since=self._reading_since,
            writing=server.sequences,
            context_tokens=self.context_tokens,
            capacity_tokens=server.pool.kv_tokens,
            chunk_tokens=server.pool.chunk_tokens,
            pool=self.pool,
            reading=self.reading.rate,
        )


def _has_room(writer: Server, arrival: Arrival) -> bool:
    needed = arrival.prompt_tokens + arrival.answer_tokens
    return not writer.kv_tokens or writer.kv_tokens + needed <= writer.pool.kv_tokens

"""The coordinator's own policy over modelled workers: the same `choose`, on what it has learnt and
what it was last told. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import product

from coordinator.capacity import FRESH_S
from coordinator.policy.choose import choose
from coordinator.policy.estimate import Estimator
from coordinator.policy.pace import Pace
from coordinator.policy.readers import pool_of
from coordinator.policy.snapshot import ModelPolicy, RequestFacts, Snapshot, WorkerView
from coordinator.policy.ticket import Capacity, Ticket, Work
from coordinator.policy.turn import work_of
from coordinator.worker import READING_MEMORY_S
from measure.plan.server import Job, Server
from measure.simulation.traces import Arrival
from pdserve.types import Role

REPORTED_S = 0.5
"""So often workers tell what they did."""
SEQUENCES = 1024
"""A worker writes so many at once, at most."""


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
        self._capacity = Capacity()
        self._stale_at = 0.0

    def capacity(self, now: float) -> Capacity:
        """What the workers can take, as far as is known; summed up now and then."""
        if now >= self._stale_at:
            self._capacity = self._sum_up()
            self._stale_at = now + FRESH_S
        return self._capacity

    def _sum_up(self) -> Capacity:
        free_kv_tokens = sum(it.server.pool.kv_tokens - it.context_tokens for it in self._writers)
        pools = {}
        for role, known in ((Role.DECODE, self._writers), (Role.PREFILL, self._readers)):
            if known:
                pools[role] = pool_of([it.view() for it in known], self._estimator.estimates)
        return Capacity(SEQUENCES * len(self._writers), free_kv_tokens, pools)

    def work(self, arrival: Arrival, waits_s: Mapping[Role, float], now: float) -> Work:
        """What a request waits for, were it its turn now; `waits_s` is how long it is to wait for
        that, by who would read."""
        snapshot, facts = self._seen(arrival, now)
        facts = replace(facts, queue_s=waits_s)
        return work_of(snapshot, self._policy, facts, arrival.answer_tokens)

    def send(self, arrival: Arrival, ticket: Ticket, now: float) -> Job:
        """Gives a request to a worker, whose turn it is. As in production, room is promised by
        whoever writes what others read, and where none of them has any, one of them reads it,
        too; what a worker reads for itself waits there for room."""
        snapshot, facts = self._seen(arrival, now)
        plan = choose(snapshot, self._policy, facts)
        while plan.prefill and not self._by_id[plan.decode].server.has_room(arrival):
            facts = replace(facts, full_decode=facts.full_decode | {plan.decode})
            plan = choose(snapshot, self._policy, facts)
        writer = self._by_id[plan.decode].server
        reader = self._by_id[plan.prefill].server if plan.prefill else writer
        job = Job(
            arrival,
            ticket,
            reader,
            writer,
            lacked_room=bool(facts.full_decode and not plan.prefill),
        )
        if plan.prefill:
            writer.promises_room(job)
        writer.sequences += 1
        reader.read(job)
        self._known[reader].give(job, now)
        return job

    def _seen(self, arrival: Arrival, now: float) -> tuple[Snapshot, RequestFacts]:
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
        return snapshot, RequestFacts(arrival.prompt_tokens, cached_tokens=cached)

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

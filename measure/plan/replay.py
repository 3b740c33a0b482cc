"""A trace through the queues of a fleet: when first tokens come, and how far apart the rest. Pure.

A queueing model, between a formula and the simulation. Each worker is a server whose service time
is a roofline's for what it has in its step, with chunked prefill (Agrawal et al.,
"Sarathi-Serve", OSDI 2024); before all that read there is the coordinator's own queue, which
refuses nobody, and the coordinator's own policy says who reads and who writes. Bursts and lengths
are those of the trace: nothing is assumed of their distributions, as M/G/k would. Prompt and
answer of a request are promised room in a KV cache before it begins.

Left out is what the simulation has besides: the protocol, loads that are known late, lengths of
answers that nobody knows beforehand. It takes a fifth to a tenth of the
simulation's time.
"""

from __future__ import annotations

import heapq
import sys
from collections.abc import Sequence
from itertools import count

import numpy as np

from coordinator.policy.admission import AdmissionQueue
from coordinator.policy.snapshot import ModelPolicy
from coordinator.policy.ticket import Asked, Limits, Priority, Ticket
from measure.plan.router import Router
from measure.plan.server import Job, Pool, Server
from measure.plan.slo import Latencies
from measure.simulation.traces import Arrival

_REFUSES_NOBODY = Limits(max_running=None, max_queued=sys.maxsize, max_ttft_s=1e9)


def replay(
    arrivals: Sequence[Arrival], policy: ModelPolicy, prefill: Pool | None, decode: Pool
) -> Latencies:
    """Without a prefill pool, `decode` reads its own prompts. At least one arrival, in order."""
    return _Run(policy, prefill, decode).serve(arrivals)


class _Run:
    def __init__(self, policy: ModelPolicy, prefill: Pool | None, decode: Pool) -> None:
        self._writers = [Server(decode, hands_over=False) for _ in range(decode.workers)]
        readers = []
        if prefill is not None:
            readers = [Server(prefill, hands_over=True) for _ in range(prefill.workers)]
        self._splits = prefill is not None
        self._router = Router(policy, readers, self._writers)
        self._admission = AdmissionQueue(_REFUSES_NOBODY)
        self._asking: dict[Ticket, Arrival] = {}
        # (time, order, server, a request that comes to it; None where its step ends)
        self._events: list[tuple[float, int, Server, Job | None]] = []
        self._order = count()
        self._ttft_s: list[float] = []
        self._asked = self._cached = 0
        self._without_room = 0

    def serve(self, arrivals: Sequence[Arrival]) -> Latencies:
        for arrival in arrivals:
            self._go_on_to(arrival.at_s)
            self._enter(arrival, arrival.at_s)
            self._dispatch(arrival.at_s)
        self._go_on_to(float("inf"))
        gaps = [gap for server in self._writers for gap in server.gaps]
        return Latencies(
            float(np.percentile(self._ttft_s, 99)),
            _weighted_p99(gaps) if gaps else 0.0,
            self._cached / self._asked,
            self._without_room / len(arrivals),
            self._splits,
        )

    def _go_on_to(self, end: float) -> None:
        while self._events and self._events[0][0] < end:
            now, _, server, joins = heapq.heappop(self._events)
            if joins is not None:
                self._router.handed_over(joins, now - joins.read_at)
                server.join(joins)
            else:
                self._end_step(server, now)
                self._dispatch(now)
            self._begin_step(server, now)

    def _enter(self, arrival: Arrival, now: float) -> None:
        capacity = self._router.capacity(now)
        ticket = self._admission.arrive(Asked("", Priority.NORMAL, 1.0, now), now, capacity)
        waits_s = self._admission.waits_s(ticket, arrival.prompt_tokens, now, capacity)
        work = self._router.work(arrival, waits_s, now)
        self._admission.enqueue(ticket, work, now, capacity)
        self._asking[ticket] = arrival

    def _dispatch(self, now: float) -> None:
        """Lets in, in order, what the workers are about to read."""
        if not self._admission.queued:
            return
        for ticket in self._admission.admit(now, self._router.capacity(now)):
            job = self._router.send(self._asking.pop(ticket), ticket, now)
            self._asked += job.arrival.prompt_tokens
            self._cached += job.cached
            self._begin_step(job.reader, now)

    def _begin_step(self, server: Server, now: float) -> None:
        if not server.busy and (seconds := server.begin()) is not None:
            self._at(now + seconds, server)

    def _end_step(self, server: Server, now: float) -> None:
        read, first, done = server.end()
        for job in read:
            self._router.read(server, job, now)
            if server is not job.writer:
                job.read_at = now
                transfer_s = server.pool.timing.transfer_s(job.arrival.prompt_tokens)
                self._at(now + transfer_s, job.writer, job)
        for job in first:
            self._admission.read(job.ticket, now)
            self._ttft_s.append(now - job.arrival.at_s)
            self._without_room += job.lacked_room
        for job in done:
            job.writer.kv_tokens -= job.tokens
            job.writer.sequences -= 1
            self._admission.leave(job.ticket, now, job.arrival.answer_tokens)
            self._router.done(job)
        self._router.stepped(server, now)

    def _at(self, when: float, server: Server, joins: Job | None = None) -> None:
        heapq.heappush(self._events, (when, next(self._order), server, joins))


def _weighted_p99(gaps: Sequence[tuple[float, int]]) -> float:
    """Of so many tokens each."""
    seconds, tokens = np.asarray(gaps).T
    order = np.argsort(seconds)
    reached = np.cumsum(tokens[order])
    return float(seconds[order][np.searchsorted(reached, 0.99 * reached[-1])])

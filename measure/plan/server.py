"""One worker as a server in a queueing model: what it reads and writes, step by step. Pure."""

from __future__ import annotations

import heapq
from collections import OrderedDict, deque
from dataclasses import dataclass
from itertools import takewhile

from coordinator.policy.ticket import Ticket
from measure.simulation.traces import Arrival
from pdserve.engine.sim_timing import StepWork, Timing
from pdserve.types import EngineWork

_BLOCK = 512
"""Tokens of a block of a trace."""


@dataclass(frozen=True, slots=True)
class Pool:
    """Equal workers: how long their steps take, prompt tokens that a step reads at most, and
    what a worker's KV cache holds, in tokens. `cached` is the part of each prompt that is in it
    at the least, whatever prefixes the trace tells of."""

    workers: int
    timing: Timing
    chunk_tokens: int
    kv_tokens: int
    cached: float = 0.0


@dataclass(slots=True, eq=False)
class Job:
    """One request, who reads its prompt, and who writes its answer.

    `cached` and `unread` are tokens of its prompt; `has_room` says whether its writer's cache has
    promised it room, and `lacked_room` whether it ever found none; `read_at` is when it was read,
    where that is elsewhere."""

    arrival: Arrival
    ticket: Ticket
    reader: Server
    writer: Server
    cached: int = 0
    unread: int = 0
    has_room: bool = False
    lacked_room: bool = False
    read_at: float = 0.0

    @property
    def tokens(self) -> int:
        """Of prompt and answer."""
        return self.arrival.prompt_tokens + self.arrival.answer_tokens


class Server:
    """`kv_tokens` are promised to requests, `sequences` are how many. `gaps` has the seconds of
    steps, and of how many sequences each was one; `work` adds up what was done."""

    def __init__(self, pool: Pool, *, hands_over: bool) -> None:
        self.pool = pool
        self.busy = False
        self.kv_tokens = 0
        self.sequences = 0
        self.gaps: list[tuple[float, int]] = []
        self.work = EngineWork()
        self._hands_over = hands_over
        self._reading: deque[Job] = deque()
        self._joined: list[Job] = []
        self._ends: list[tuple[int, int, Job]] = []
        self._step = 0
        self._context = 0
        self._first: list[Job] = []
        self._read: list[Job] = []
        self._blocks: OrderedDict[int, None] = OrderedDict()

    @property
    def context_tokens(self) -> int:
        """In its cache: of prompts that are read, and of answers so far."""
        return self._context

    def found(self, arrival: Arrival) -> int:
        """Tokens of the prompt that are cached; never all, for the last must be computed."""
        hits = sum(1 for _ in takewhile(self._blocks.__contains__, arrival.blocks)) * _BLOCK
        least = int(self.pool.cached * arrival.prompt_tokens)
        return min(max(hits, least), arrival.prompt_tokens - 1)

    def read(self, job: Job) -> None:
        """Takes a prompt, behind those that it has."""
        job.cached = self.found(job.arrival)
        job.unread = job.arrival.prompt_tokens - job.cached
        self._reading.append(job)

    def join(self, job: Job) -> None:
        """Takes a request whose prompt was read elsewhere."""
        self._joined.append(job)

    def has_room(self, arrival: Arrival) -> bool:
        """For prompt and answer; an empty cache is enough for anything."""
        needed = arrival.prompt_tokens + arrival.answer_tokens
        return not self.kv_tokens or self.kv_tokens + needed <= self.pool.kv_tokens

    def promises_room(self, job: Job) -> bool:
        """To one that is written here."""
        job.has_room = self.has_room(job.arrival)
        if job.has_room:
            self.kv_tokens += job.tokens
        else:
            job.lacked_room = True
        return job.has_room

    def begin(self) -> float | None:
        """Puts the next step together; its seconds, or None where there is nothing to do."""
        budget = self.pool.chunk_tokens
        pairs = 0
        while self._reading and budget:
            job = self._reading[0]
            if not job.has_room and not job.writer.promises_room(job):
                break
            chunk = min(job.unread, budget)
            budget -= chunk
            job.unread -= chunk
            at = job.arrival.prompt_tokens - job.unread
            pairs += chunk * (at - chunk) + chunk * chunk // 2
            if job.unread:
                break
            self._read.append(self._reading.popleft())
        self._first, self._joined = self._joined, []
        if not self._hands_over:
            self._first += self._read
        work = StepWork(
            self.pool.chunk_tokens - budget,
            pairs,
            len(self._ends) + len(self._first),
            self._context + sum(job.arrival.prompt_tokens for job in self._first),
        )
        self.busy = bool(work.read_tokens or work.writing)
        if not self.busy:
            return None
        seconds = self.pool.timing.step_s(work)
        usage = work.write_context / self.pool.kv_tokens
        self.work += EngineWork(1, seconds, work.read_tokens, pairs, work.writing, usage)
        if self._ends:
            self.gaps.append((seconds, len(self._ends)))
        return seconds

    def end(self) -> tuple[list[Job], list[Job], list[Job]]:
        """What the step brought: prompts that are read, requests that have their first token, and
        those that have their last."""
        self._step += 1
        self._context += len(self._ends)
        done = []
        while self._ends and self._ends[0][0] <= self._step:
            job = heapq.heappop(self._ends)[2]
            self._context -= job.tokens
            done.append(job)
        for job in self._first:
            if (left := job.arrival.answer_tokens - 1) > 0:
                heapq.heappush(self._ends, (self._step + left, id(job), job))
                self._context += job.arrival.prompt_tokens + 1
            else:
                done.append(job)
        for job in (*self._read, *self._first):
            self._keep(job.arrival)
        read, self._read = self._read, []
        self.busy = False
        return read, self._first, done

    def _keep(self, arrival: Arrival) -> None:
        for block in reversed(arrival.blocks):
            self._blocks[block] = None
            self._blocks.move_to_end(block)
        while len(self._blocks) * _BLOCK > self.pool.kv_tokens:
            self._blocks.popitem(last=False)

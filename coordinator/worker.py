"""One worker as the coordinator knows it, and how its silence is told."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import structlog

from coordinator.policy.duty import Duty
from coordinator.policy.health import WorkerState, state_of
from coordinator.policy.pace import Pace
from coordinator.policy.pairs import PairState, Process, Standing
from coordinator.policy.prefix import CacheBelief
from coordinator.policy.snapshot import WorkerView
from coordinator.worker_client import Session, WorkerClient
from pdserve.errors import DecodeError, ErrorReason, PrefillError
from pdserve.types import Load, Role, WorkerInfo

log = structlog.get_logger("fleet")

SUSPICION_S = 2.0
"""A worker whose load reports have been missing for this long gets nothing new, and prompts that
it reads are read elsewhere."""
SILENCE_S = 5.0
"""By default, one for which they have been missing for this long is taken for lost. A machine with
more work than cores leaves a process unheard for two or three seconds, and to end its streams for
that does more harm than to wait; with what follows, a client waits for ten seconds at most."""
_TICK_S = 0.25
READING_MEMORY_S = 5.0
"""Seconds after which what a worker read counts for a third, about as long as an answer takes."""


@dataclass(slots=True)
class Worker:
    """One address. `info` is None until the worker has been reached for the first time;
    `tried` says that it was reached or found away once.

    `dismissed` says that it is not listed any more, `told_to_drain` that it is about to say
    itself that it drains; `standing` is that of this very process;
    `outstanding_*` count what this coordinator has given it, `writing` those of its sequences
    that have a first token; `reading` is paced in seconds of reading prompts; `cache` is there
    once it was reached.
    """

    client: WorkerClient
    info: WorkerInfo | None = None
    load: Load = field(default_factory=Load)
    session: Session | None = None
    tried: bool = False
    connected: bool = False
    silent: bool = False
    dismissed: bool = False
    told_to_drain: bool = False
    duty: Duty = Duty.COLOCATED
    standing: Standing = field(default_factory=Standing)
    detail: str = "not reached yet"
    outstanding_sequences: int = 0
    outstanding_tokens: int = 0
    writing: int = 0
    outstanding_prompts: int = 0
    outstanding_pairs: int = 0
    reading_since: float = 0.0
    cache: CacheBelief | None = None
    reading: Pace = field(default_factory=lambda: Pace(memory_s=READING_MEMORY_S))
    _calls: set[asyncio.Timeout] = field(default_factory=set)
    _view: WorkerView | None = None

    def give(self, sequences: int) -> None:
        """Counts answers given to it, or with a negative number those that it is done with."""
        self.outstanding_sequences += sequences
        self._view = None

    def give_prompt(self, tokens: int, pairs: int, now: float) -> None:
        """Counts a prompt that it is to read."""
        if not self.outstanding_prompts:
            self.reading_since = now
        self._count_prompt(1, tokens, pairs)

    def take_prompt(self, tokens: int, pairs: int, now: float) -> None:
        """Counts it no more: it was read, or is not wanted there."""
        self.reading_since = now
        self._count_prompt(-1, -tokens, -pairs)

    def _count_prompt(self, prompts: int, tokens: int, pairs: int) -> None:
        self.outstanding_prompts += prompts
        self.outstanding_tokens += tokens
        self.outstanding_pairs += pairs
        self._view = None

    def report(self, load: Load) -> None:
        """Takes its newest load."""
        self.load = load
        self._view = None

    @asynccontextmanager
    async def or_loss(self) -> AsyncIterator[None]:
        """Cancels what is awaited inside as soon as the worker is suspected or lost, and raises
        PrefillError: a call to a process that was stopped breaks much later, or never."""
        if self.silent or not self.connected:
            raise self._lost()
        try:
            async with asyncio.timeout(None) as call:
                self._calls.add(call)
                yield
        except TimeoutError:
            raise self._lost() from None
        finally:
            self._calls.discard(call)

    def suspect(self) -> None:
        """Ends what waits in `or_loss`; the rest goes on."""
        self.silent = True
        self._end_calls()

    def lose(self) -> None:
        """Forgets what was true of the process, and ends what waits in `or_loss`."""
        self.connected = False
        self.silent = self.told_to_drain = False
        self.session = None
        self.report(Load())
        # The process may be gone for good; one that only lost its network proves itself anew.
        self.standing = Standing()
        self._end_calls()

    def _lost(self) -> PrefillError:
        what = "is silent" if self.silent else "was lost"
        return PrefillError(ErrorReason.PREFILL_FAILED, f"the prefill worker {what}")

    def _end_calls(self) -> None:
        now = asyncio.get_running_loop().time()
        for call in self._calls:
            call.reschedule(now)
        self._calls.clear()  # one that is being ended cannot be ended again

    def hosts(self, role: Role) -> bool:
        return self.info is not None and role in self.info.roles

    @property
    def reads(self) -> bool:
        """Whether it reads prompts for others now."""
        return self.hosts(Role.PREFILL) and self.duty is not Duty.DECODE

    @property
    def writes(self) -> bool:
        """Whether it writes answers now."""
        return self.hosts(Role.DECODE) and self.duty is not Duty.PREFILL

    @property
    def pool(self) -> str:
        """The workers of the same roles, which are timed together."""
        assert self.info is not None
        return next(iter(self.info.roles)).value if len(self.info.roles) == 1 else "both"

    @property
    def view(self) -> WorkerView:
        """What the policy sees of it; of a worker that has been reached."""
        if self._view is None:
            assert self.info is not None
            # One that reads prompts for others counts these as running.
            running = 0 if self.hosts(Role.PREFILL) else self.load.running
            capacity = self.info.kv_capacity_tokens
            self._view = WorkerView(
                worker_id=self.info.worker_id,
                outstanding_sequences=self.outstanding_sequences,
                outstanding_tokens=self.outstanding_tokens,
                outstanding_pairs=self.outstanding_pairs,
                outstanding_prompts=self.outstanding_prompts,
                reading_since=self.reading_since,
                writing=max(self.outstanding_sequences, running),
                context_tokens=self.load.kv_usage * capacity,
                capacity_tokens=capacity,
                chunk_tokens=self.info.chunk_tokens,
                pool=self.pool,
                reading=self.reading.rate,
            )
        return self._view

    @property
    def process(self) -> Process:
        """Of a worker that has been reached."""
        assert self.info is not None
        return self.info.worker_id, self.info.epoch

    @property
    def leaving(self) -> bool:
        """Whether it gets nothing new, by its own word or its operator's."""
        return self.load.draining or self.dismissed or self.told_to_drain

    @property
    def is_idle(self) -> bool:
        """Whether it holds nothing for this coordinator, nor prompts for anybody."""
        held = self.outstanding_sequences, self.outstanding_tokens, self.load.open_leases
        return held == (0, 0, 0)

    @property
    def proven(self) -> bool:
        """Whether a real generation went through it, and it has not been quarantined since."""
        return self.standing.state is PairState.PROVEN

    @property
    def state(self) -> WorkerState:
        return state_of(
            reached=self.info is not None,
            connected=self.connected,
            silent=self.silent,
            leaving=self.leaving,
            standing=self.standing,
            waiting=self.load.waiting,
        )


class Silence:
    """How long nothing has been heard of a worker, counted in ticks of the coordinator's own
    loop: while that stands still, reports wait to be read, and nobody is silent."""

    def __init__(self, worker: Worker, worker_id: str, silence_s: float) -> None:
        self._worker = worker
        self._worker_id = worker_id
        self._silence_s = silence_s
        self._ticks = 0

    def broken(self) -> None:
        self._ticks = 0
        self._worker.silent = False

    async def over(self) -> None:
        """Has the worker suspected after SUSPICION_S, and raises DecodeError at the end."""
        while (silent_s := self._ticks * _TICK_S) < self._silence_s:
            if silent_s >= SUSPICION_S and not self._worker.silent:
                self._worker.suspect()
                log.warning("worker silent", worker=self._worker_id, seconds=silent_s)
            self._ticks += 1
            await asyncio.sleep(_TICK_S)
        raise DecodeError(
            ErrorReason.DECODE_FAILED, f"nothing was heard of the worker for {self._silence_s:g} s"
        )

"""What a worker process is busy with: one shared object between its services and its reports."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import contextmanager, suppress

from pdserve.clock import Clock
from pdserve.engine.base import EngineLoad, StepStats
from pdserve.errors import DecodeError, ErrorReason, PdserveError
from pdserve.room import Room
from pdserve.tracing import Attributes, Tracer
from pdserve.types import EngineWork, LeaseSnapshot, Load, Role

FINISHED = "finished"
CANCELLED = ErrorReason.CANCELLED.label

EndListener = Callable[[Role, str], None]
"""Told of each sequence's end: the role it was served in, then FINISHED or a reason's label."""


class Workload:
    """Counts of work begun and not ended, and who wants to know of them.

    Services report to it; `WorkerService`, metrics and the drain read it. It lives on one
    event loop. `room` is that of the decode role; None where the worker does not have it.
    """

    def __init__(self, on_end: EndListener, tracer: Tracer | None = None) -> None:
        self.room: Room | None = None
        self._on_end = on_end
        self._tracer = tracer
        self._engine = EngineLoad()
        self._work = EngineWork()
        self._sequences = 0
        self._leases: Callable[[], LeaseSnapshot] = LeaseSnapshot
        self._reserved_tokens = 0
        self._draining = False
        self._closed = False
        self._changed = asyncio.Event()

    @property
    def load(self) -> Load:
        leases = self._leases()
        waiting = 0 if self.room is None else self.room.waiting
        return Load(
            running=self._engine.running,
            waiting=self._engine.waiting + waiting,
            kv_usage=self._engine.kv_usage,
            open_leases=leases.open,
            reserved_tokens=self._reserved_tokens,
            draining=self._draining,
            lease_tokens=leases.tokens,
            oldest_lease_s=leases.oldest_s,
            work=self._work,
        )

    @property
    def leases(self) -> LeaseSnapshot:
        """What is held for others now; none where no prefill service runs."""
        return self._leases()

    @property
    def unfinished(self) -> int:
        """Sequences and leases that a drain waits for."""
        return self._sequences + self._leases().open

    def step(self, stats: StepStats) -> None:
        """Takes an engine step's load and work; a StepListener."""
        self._engine = stats.load
        self._work += stats.work
        self._notify()

    def show_leases(self, read: Callable[[], LeaseSnapshot]) -> None:
        """Has `read` tell what is held for others from now on; any thread may call it."""
        self._leases = read

    def leases_changed(self) -> None:
        """To be called when a lease was opened or ended."""
        self._notify()

    def set_reserved_tokens(self, tokens: int) -> None:
        self._reserved_tokens = tokens
        self._notify()

    @contextmanager
    def sequence(self, role: Role, traceparent: str = "") -> Iterator[Attributes]:
        """Counts one sequence while the context lasts; how it ends is how the context ends.

        It is a span, too, where it has a trace and there is a tracer, with the attributes that
        are put in what this yields.
        """
        told: Attributes = {}
        self._sequences += 1
        outcome = FINISHED
        began = time.time_ns()
        try:
            yield told
        except PdserveError as error:
            outcome = error.reason.label
            raise
        except (asyncio.CancelledError, GeneratorExit):
            outcome = CANCELLED
            raise
        except Exception:
            outcome = ErrorReason.INTERNAL.label
            raise
        finally:
            self._sequences -= 1
            self._on_end(role, outcome)
            if self._tracer is not None and traceparent:
                failure = None if outcome == FINISHED else outcome
                self._tracer.add_child(role.value, traceparent, began, told, failure)
            self._notify()

    def require_open(self) -> None:
        """Raises DecodeError DRAINING once the worker takes no new work."""
        if self._draining:
            raise DecodeError(ErrorReason.DRAINING, "the worker is draining; retry elsewhere")

    def start_drain(self) -> None:
        self._draining = True
        self._notify()

    async def ended(self) -> None:
        """Returns when nothing is unfinished and no room is promised."""
        while self.unfinished or self._reserved_tokens:
            await self._changed.wait()

    async def watch(
        self, clock: Clock, interval_s: float, heartbeat_s: float
    ) -> AsyncIterator[Load]:
        """The load now, then whenever it differs: not sooner than `interval_s` after the last,
        and at the latest `heartbeat_s` after it, for silence means that the worker is lost.

        Ends with `close`.
        """
        while not self._closed:
            load = self.load
            yield load
            await clock.sleep(interval_s)
            await self._differs(load, heartbeat_s - interval_s)

    async def _differs(self, load: Load, within_s: float) -> None:
        """Returns when the load is another one, the process stops, or the time is over."""
        with suppress(TimeoutError):
            async with asyncio.timeout(within_s):
                while self.load == load and not self._closed:
                    await self._changed.wait()

    def close(self) -> None:
        """Ends every watch; the process stops."""
        self._closed = True
        self._notify()

    def _notify(self) -> None:
        # Every waiter holds the event of its own time: setting it wakes them all, once.
        self._changed.set()
        self._changed = asyncio.Event()

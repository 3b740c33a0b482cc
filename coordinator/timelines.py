"""What became of requests that ended: the latest, and those that waited longest."""

from __future__ import annotations

import time
from bisect import insort
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from coordinator.record import RequestRecord
from pdserve.errors import PdserveError

RECENT = 1024
"""Requests that are remembered whatever they were."""

SLOWEST = 32
SLOW_FOR_S = 3600.0
"""Of the last hour, the requests that waited longest are remembered besides."""


@dataclass(frozen=True, slots=True)
class Timeline:
    """One request that ended. Times are in seconds, `began` since the Unix epoch.

    `outcome` is "ok" or the error's reason; `segments` are the phases in the order in which
    they passed, and add up to `duration_s`.
    """

    request_id: str
    trace_id: str
    began: float
    surface: str
    operation: str
    stream: bool
    model: str
    tenant: str
    outcome: str
    error: str | None
    mode: str | None
    reason: str | None
    arm: str | None
    prefill_worker: str
    decode_worker: str
    fallbacks: tuple[str, ...]
    recoveries: tuple[str, ...]
    prompt_tokens: int
    completion_tokens: int | None
    cached_tokens: int | None
    ttft_s: float | None
    duration_s: float
    segments: tuple[tuple[str, float], ...]

    @property
    def waited_s(self) -> float:
        """The time in which no answer was being written: long answers are not slow."""
        return sum(spent for phase, spent in self.segments if phase != "decode")


def timeline(
    record: RequestRecord, error: PdserveError | None, at: float, wall_time: float
) -> Timeline:
    """Of a request that ended `at` on the clock of `record.received`, which is now."""
    route, usage = record.route, record.usage
    duration_s = at - record.received
    first_token = record.first_token
    return Timeline(
        request_id=record.request_id,
        trace_id=record.trace_id,
        began=wall_time - duration_s,
        surface=record.surface,
        operation=record.operation,
        stream=record.stream,
        model=record.model,
        tenant=record.tenant,
        outcome="ok" if error is None else error.reason.label,
        error=None if error is None else error.message,
        mode=None if route is None else route.mode.value,
        reason=None if route is None else route.reason,
        arm=None if route is None else route.arm or None,
        prefill_worker=record.prefill_worker,
        decode_worker=record.decode_worker,
        fallbacks=tuple(record.fallbacks),
        recoveries=tuple(record.recoveries),
        prompt_tokens=record.prompt_tokens,
        completion_tokens=None if usage is None else usage.completion_tokens,
        cached_tokens=None if usage is None else usage.cached_tokens,
        ttft_s=None if first_token is None else first_token - record.received,
        duration_s=duration_s,
        segments=tuple(record.segments),
    )


class Timelines:
    """Remembers ends, in memory that is bounded; an EndListener.

    Not those of requests that named no model of ours: whoever has no key could fill it up.
    """

    def __init__(self, wall_clock: Callable[[], float] = time.time) -> None:
        """`wall_clock`: seconds since the Unix epoch."""
        self._wall_clock = wall_clock
        self._recent: deque[Timeline] = deque(maxlen=RECENT)
        self._slowest: list[Timeline] = []

    def ended(self, record: RequestRecord, error: PdserveError | None, at: float) -> None:
        if not record.model:
            return
        now = self._wall_clock()
        it = timeline(record, error, at, now)
        self._recent.append(it)
        self._slowest = [each for each in self._slowest if now - each.began < SLOW_FOR_S]
        insort(self._slowest, it, key=lambda each: -each.waited_s)
        del self._slowest[SLOWEST:]

    def recent(self, most: int) -> list[Timeline]:
        """The last that ended, the latest first."""
        return [it for it, _ in zip(reversed(self._recent), range(most), strict=False)]

    def slowest(self) -> list[Timeline]:
        """Those of the last hour that waited longest, the slowest first."""
        return list(self._slowest)

    def find(self, asked: str) -> list[Timeline]:
        """The request of that id; else those of that trace, or of which either id begins so, the
        latest first. Of an id that came again, for clients may choose it, the last."""
        if not asked:  # every id begins so
            return []
        last: dict[str, Timeline] = {}
        for it in self._all():
            last.setdefault(it.request_id, it)
        if asked in last:
            return [last[asked]]
        whole = [it for it in last.values() if it.trace_id == asked]
        return whole or [
            it
            for it in last.values()
            if it.request_id.startswith(asked) or it.trace_id.startswith(asked)
        ]

    def _all(self) -> Iterator[Timeline]:
        yield from reversed(self._recent)
        yield from sorted(self._slowest, key=lambda it: -it.began)

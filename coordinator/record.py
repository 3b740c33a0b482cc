"""What is remembered of one request, and the one place where its end is told."""

from __future__ import annotations

import time
from dataclasses import dataclass, field

import structlog

from coordinator.lifecycle import Event, State, advance
from coordinator.metrics import CoordinatorMetrics
from pdserve.errors import ErrorReason, PdserveError
from pdserve.types import Route, Usage

access_log = structlog.get_logger("access")


@dataclass(slots=True)
class RequestRecord:
    """One per request, made by a façade on arrival; dispatch fills in what it learns.

    `received` and all times are seconds of `time.monotonic`; `phases` are durations in the
    order they passed, which add up to the time of the first token.
    """

    request_id: str
    surface: str
    operation: str
    stream: bool
    trace_id: str
    received: float
    model: str = ""
    tenant: str = ""
    route: Route | None = None
    prompt_tokens: int = 0
    usage: Usage | None = None
    prefill_worker: str = ""
    decode_worker: str = ""
    fallbacks: list[str] = field(default_factory=list)
    phases: dict[str, float] = field(default_factory=dict)
    first_token: float | None = None
    last_token: float = 0.0
    state: State = State.QUEUED
    done: bool = False
    _phase_began: float = 0.0

    def __post_init__(self) -> None:
        self._phase_began = self.received

    def apply(self, event: Event) -> None:
        self.state = advance(self.state, event)

    def phase(self, name: str) -> None:
        """Ends a phase now: the time since the last one ended is counted to `name`."""
        now = time.monotonic()
        self.phases[name] = self.phases.get(name, 0.0) + now - self._phase_began
        self._phase_began = now

    def split_phase(self, name: str, seconds: float, rest: str) -> None:
        """Ends two phases now: `name` took `seconds` at the end, `rest` what was before."""
        self.phase(rest)
        # A worker's clock may run a little ahead of ours; phases never go below nothing.
        taken = min(seconds, self.phases[rest])
        self.phases[rest] -= taken
        self.phases[name] = self.phases.get(name, 0.0) + taken


class Observer:
    """Tells metrics and the access log how each request ended."""

    def __init__(self, metrics: CoordinatorMetrics) -> None:
        self.metrics = metrics

    def done(self, record: RequestRecord, error: PdserveError | None) -> None:
        """Counts and logs the request; only the first call for a record does anything."""
        if record.done:
            return
        record.done = True
        outcome = "ok" if error is None else error.reason.label
        ended = time.monotonic()
        self.metrics.request_done(record, None if error is None else error.reason, ended)
        usage = record.usage
        route = record.route
        first_token = record.first_token
        access_log.info(
            "request",
            request_id=record.request_id,
            trace_id=record.trace_id,
            surface=record.surface,
            operation=record.operation,
            stream=record.stream,
            model=record.model,
            tenant=record.tenant,
            outcome=outcome,
            error=None if error is None else error.message,
            mode=None if route is None else route.mode.value,
            reason=None if route is None else route.reason,
            arm=None if route is None else route.arm or None,
            prefill_worker=record.prefill_worker or None,
            decode_worker=record.decode_worker or None,
            fallbacks=record.fallbacks or None,
            prompt_tokens=record.prompt_tokens,
            completion_tokens=None if usage is None else usage.completion_tokens,
            cached_tokens=None if usage is None else usage.cached_tokens,
            ttft_ms=_ms(None if first_token is None else first_token - record.received),
            duration_ms=_ms(ended - record.received),
            phases_ms={name: _ms(spent) for name, spent in record.phases.items()},
        )


def ended_by(error: PdserveError | None) -> Event:
    """The lifecycle event of an end."""
    if error is None:
        return Event.FINISH
    return Event.CANCEL if error.reason is ErrorReason.CANCELLED else Event.FAIL


def _ms(seconds: float | None) -> float | None:
    return None if seconds is None else round(seconds * 1000, 2)

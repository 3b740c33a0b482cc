"""The one place where a request's end is told: to the metrics, to the access log, and to
whoever else listens."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Protocol

import structlog

from coordinator.metrics import CoordinatorMetrics
from coordinator.record import RequestRecord
from pdserve.errors import PdserveError

access_log = structlog.get_logger("access")


class EndListener(Protocol):
    """Is told of each request's end, once, on the event loop: it must neither wait nor raise."""

    def ended(self, record: RequestRecord, error: PdserveError | None, at: float) -> None:
        """`error` is None where it ended well; `at` is on the clock of `record.received`."""


class Observer:
    """Tells metrics, the access log and `listeners` how each request ended."""

    def __init__(self, metrics: CoordinatorMetrics, listeners: Sequence[EndListener] = ()) -> None:
        self.metrics = metrics
        self._listeners = listeners

    def done(self, record: RequestRecord, error: PdserveError | None) -> None:
        """Counts and logs the request; only the first call for a record does anything."""
        if record.done:
            return
        record.done = True
        outcome = "ok" if error is None else error.reason.label
        ended = time.monotonic()
        record.close(ended)
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
            recoveries=record.recoveries or None,
            prompt_tokens=record.prompt_tokens,
            completion_tokens=None if usage is None else usage.completion_tokens,
            cached_tokens=None if usage is None else usage.cached_tokens,
            ttft_ms=_ms(None if first_token is None else first_token - record.received),
            duration_ms=_ms(ended - record.received),
            phases_ms={name: _ms(spent) for name, spent in record.phases.items()},
        )
        for listener in self._listeners:
            listener.ended(record, error, ended)


def _ms(seconds: float | None) -> float | None:
    return None if seconds is None else round(seconds * 1000, 2)

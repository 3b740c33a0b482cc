"""What is remembered of one request."""

from __future__ import annotations

import time
from dataclasses import dataclass, field, replace

from coordinator.lifecycle import Event, State, advance
from pdserve.errors import ErrorReason, PdserveError
from pdserve.types import Route, Usage


@dataclass(slots=True)
class RequestRecord:
    """One per request, made by a façade on arrival; dispatch fills in what it learns.

    `received` and all times are seconds of `time.monotonic`; `phases` are durations in the
    order they passed, which add up to the time of the first token; what comes after it, as
    when an answer is continued elsewhere, is no phase. `recoveries` are the reasons for which
    it was. `predicted_cached_tokens` are those that the worker which read the prompt
    was believed to have cached.
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
    predicted_cached_tokens: int = 0
    prefill_worker: str = ""
    decode_worker: str = ""
    fallbacks: list[str] = field(default_factory=list)
    recoveries: list[str] = field(default_factory=list)
    phases: dict[str, float] = field(default_factory=dict)
    first_token: float | None = None
    last_token: float = 0.0
    state: State = State.QUEUED
    done: bool = False
    _phase_began: float = 0.0

    def __post_init__(self) -> None:
        self._phase_began = self.received

    def twin(self, request_id: str) -> RequestRecord:
        """That of another request of the same call, of which nothing has been learnt yet."""
        return replace(self, request_id=request_id, fallbacks=[], recoveries=[], phases={})

    def apply(self, event: Event) -> None:
        self.state = advance(self.state, event)

    def phase(self, name: str) -> None:
        """Ends a phase now: the time since the last one ended is counted to `name`."""
        if self.first_token is not None:
            return
        now = time.monotonic()
        self.phases[name] = self.phases.get(name, 0.0) + now - self._phase_began
        self._phase_began = now

    def split_phase(self, name: str, seconds: float, rest: str) -> None:
        """Ends two phases now: `name` took `seconds` at the end, `rest` what was before."""
        if self.first_token is not None:
            return
        self.phase(rest)
        # A worker's clock may run a little ahead of ours; phases never go below nothing.
        taken = min(seconds, self.phases[rest])
        self.phases[rest] -= taken
        self.phases[name] = self.phases.get(name, 0.0) + taken


def ended_by(error: PdserveError | None) -> Event:
    """The lifecycle event of an end."""
    if error is None:
        return Event.FINISH
    return Event.CANCEL if error.reason is ErrorReason.CANCELLED else Event.FAIL

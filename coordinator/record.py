"""What is remembered of one request."""

from __future__ import annotations

import time
from dataclasses import dataclass, field, replace

from coordinator.lifecycle import Event, State, advance
from coordinator.policy.pricing import Seat
from coordinator.tally import Tally
from pdserve.errors import ErrorReason, PdserveError
from pdserve.tracing import Place, new_span_id
from pdserve.types import FinishReason, Route, Usage

SHADOW = "shadow"
"""The surface of a copy, which came from no client."""


@dataclass(slots=True)
class RequestRecord:
    """One per request, made by a façade on arrival; dispatch fills in what it learns.

    `received` and all times are seconds of `time.monotonic`. `segments` are the phases and
    their durations in the order in which they passed, one after another without a gap, so that
    they add up to the time since arrival; a phase may come again, as when an attempt failed.
    `recoveries` are the reasons for which an answer was continued elsewhere.
    `place` is that of its own span, None where its caller wants no trace of it.
    `predicted_cached_tokens` are those that the worker which read the prompt was believed to
    have cached. `reader` and `writer` are its places where its prompt was read and its answer
    is written; `answered_tokens` are set in the end. Of the choices of one prompt one alone
    `counts_prompt`. `tally` is the slot of an experiment that it counts for, and `gaps` its own
    times between tokens then: a histogram in FINE_BUCKETS, and their sum.
    """

    request_id: str
    surface: str
    operation: str
    stream: bool
    trace_id: str
    received: float
    model: str = ""
    tenant: str = ""
    key_id: str = ""
    route: Route | None = None
    prompt_tokens: int = 0
    counts_prompt: bool = True
    usage: Usage | None = None
    finish_reason: FinishReason | None = None
    place: Place | None = None
    answered_tokens: int = 0
    reader: Seat | None = None
    writer: Seat | None = None
    predicted_cached_tokens: int = 0
    prefill_worker: str = ""
    decode_worker: str = ""
    fallbacks: list[str] = field(default_factory=list)
    recoveries: list[str] = field(default_factory=list)
    segments: list[tuple[str, float]] = field(default_factory=list)
    first_token: float | None = None
    last_token: float = 0.0
    tally: Tally | None = None
    gaps: tuple[list[int], list[float]] | None = None
    state: State = State.QUEUED
    done: bool = False
    _ended: float = 0.0
    _running: str = "tokenise"

    def __post_init__(self) -> None:
        self._ended = self.received

    @property
    def phases(self) -> dict[str, float]:
        """The seconds of each phase in all."""
        phases: dict[str, float] = {}
        for name, spent in self.segments:
            phases[name] = phases.get(name, 0.0) + spent
        return phases

    def twin(self, request_id: str, *, counts_prompt: bool) -> RequestRecord:
        """That of another request of the same call, of which nothing has been learnt yet."""
        place = self.place and replace(self.place, span_id=new_span_id())
        return replace(
            self,
            request_id=request_id,
            counts_prompt=counts_prompt,
            place=place,
            fallbacks=[],
            recoveries=[],
            segments=[],
        )

    def apply(self, event: Event) -> None:
        self.state = advance(self.state, event)
        if self.first_token is None:
            self._running = _PHASE_OF.get(self.state, self._running)

    def phase(self, name: str, **then: float) -> None:
        """Ends phases now: those of `then` took so many seconds, one after another, and `name`
        what was before. Does nothing while an answer is continued: that is one phase."""
        if self.first_token is not None:
            return
        now = time.monotonic()
        left = now - self._ended
        parts = []
        for part, seconds in reversed(then.items()):
            # By a worker's clock, which may run a little ahead of ours; none goes below nothing.
            taken = min(seconds, left)
            parts.append((part, taken))
            left -= taken
        for part, taken in ((name, left), *reversed(parts)):
            self._add(part, taken)
        self._ended = now
        if name == "tokenise":
            self._running = "queue"

    def answers(self) -> None:
        """The first token is about to be sent."""
        now = time.monotonic()
        self._end("first_step", now)
        self.first_token = self.last_token = now
        self._running = "decode"

    def continued(self) -> None:
        """Another worker goes on with the answer, of which nothing came since its last token."""
        self._end("decode", self.last_token)
        self._end("recovery", time.monotonic())

    def close(self, at: float) -> None:
        """The request ended: so does the phase that it was in."""
        self._end(self._running, at)

    def _end(self, name: str, at: float) -> None:
        self._add(name, at - self._ended)
        self._ended = at

    def _add(self, name: str, spent: float) -> None:
        if self.segments and self.segments[-1][0] == name:
            spent += self.segments.pop()[1]
        self.segments.append((name, spent))


_PHASE_OF = {
    State.PLANNED: "failed_attempts",
    State.RESERVING: "reserve",
    State.PREFILLING: "prefill",
    State.DECODING: "decode_queue",
}
"""What a request that ends in that state was at; in PLANNED it looks for another way."""


def ended_by(error: PdserveError | None) -> Event:
    """The lifecycle event of an end."""
    if error is None:
        return Event.FINISH
    return Event.CANCEL if error.reason is ErrorReason.CANCELLED else Event.FAIL

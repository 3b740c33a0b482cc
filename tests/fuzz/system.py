"""What is fuzzed: a coordinator and its workers in a thread of their own, and what was seen."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from anyio.from_thread import BlockingPortal, start_blocking_portal

from pdserve.errors import ErrorReason
from tests.support.asking import decode, prefill
from tests.support.sim_fleet import SimFleet, sim_fleet

CONTEXT_LENGTH = 256
"""Tokens: small, so that the longest answers that may be asked for are short."""

TIMEOUT_S = 60.0
"""From when on a request hangs; far more than the largest answer takes on a busy machine."""

MAX_CPU_S = 3.0
"""Of one request, client and workers included: from when on it holds up all others. The costliest
ones take a tenth of it."""

OVERLOAD = frozenset(
    reason for reason in ErrorReason if reason.value.openai_type == "overloaded_error"
)
"""The only server errors that are an answer: the request may well be served later."""


@dataclass
class Tally:
    """Answers by operation and status, the slowest one in seconds, and what the costliest one took
    of a core: on a busy machine the two have little to do with each other."""

    answers: Counter[tuple[str, str]] = field(default_factory=Counter)
    slowest_s: float = 0.0
    costliest_cpu_s: float = 0.0

    @contextmanager
    def timed(self) -> Iterator[None]:
        began, cpu_s = time.monotonic(), -time.process_time()
        yield
        cpu_s += time.process_time()
        self.slowest_s = max(self.slowest_s, time.monotonic() - began)
        self.costliest_cpu_s = max(self.costliest_cpu_s, cpu_s)
        assert cpu_s < MAX_CPU_S, f"one request took {cpu_s:.1f} s of a core"

    @property
    def total(self) -> int:
        return self.answers.total()


@dataclass
class System:
    """`http` and `grpc` are addresses."""

    http: str
    grpc: str
    tally: Tally
    _portal: BlockingPortal
    _fleet: SimFleet

    def assert_idle(self) -> None:
        """No lease, room, running or queued request is left a second after the last answer."""
        self._portal.call(self._fleet.until_idle)


@contextmanager
def running() -> Iterator[System]:
    fleet = sim_fleet(prefill("prefill"), decode("decode"), context_length=CONTEXT_LENGTH)
    with (
        start_blocking_portal() as portal,
        portal.wrap_async_context_manager(fleet) as started,
    ):
        addresses = started.coordinator.addresses
        yield System(addresses["http"], addresses["grpc"], Tally(), portal, started)

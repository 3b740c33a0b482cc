"""What is remembered of a request, and that its end is told once."""

from __future__ import annotations

import time
from collections.abc import Iterator

import pytest
from prometheus_client import CollectorRegistry
from structlog.testing import capture_logs

from coordinator.lifecycle import Event
from coordinator.metrics import CoordinatorMetrics
from coordinator.observer import Observer
from coordinator.record import RequestRecord, ended_by
from pdserve.errors import ErrorReason, PdserveError
from pdserve.types import Mode, Route, Usage

CANCELLED = PdserveError(ErrorReason.CANCELLED, "the client left")


class Time:
    """Stands in for `time.monotonic`, and is moved by hand."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Time:
    clock = Time()
    monkeypatch.setattr(time, "monotonic", clock)
    return clock


@pytest.fixture
def registry() -> CollectorRegistry:
    return CollectorRegistry()


@pytest.fixture
def observer(registry: CollectorRegistry) -> Observer:
    return Observer(CoordinatorMetrics(registry))


@pytest.fixture
def logs() -> Iterator[list[dict[str, object]]]:
    with capture_logs() as entries:
        yield entries  # type: ignore[misc]


def record(received: float = 100.0) -> RequestRecord:
    return RequestRecord("r1", "http", "chat", True, "t1", received, tenant="acme")


def test_phases_add_up_to_the_time_since_arrival(clock: Time) -> None:
    told = record()
    for phase, seconds in (("queue", 0.5), ("tokenise", 0.25), ("reserve", 1.0)):
        clock.now += seconds
        told.phase(phase)
    clock.now += 4
    told.phase("prefill_queue", prefill=3.0)
    clock.now += 2
    told.phase("decode_queue", transfer=0.25, first_step=0.5)
    told.answers()
    clock.now += 8
    told.close(clock.now)
    assert told.segments == [
        ("queue", 0.5),
        ("tokenise", 0.25),
        ("reserve", 1.0),
        ("prefill_queue", 1.0),
        ("prefill", 3.0),
        ("decode_queue", 1.25),
        ("transfer", 0.25),
        ("first_step", 0.5),
        ("decode", 8.0),
    ]
    assert sum(told.phases.values()) == clock.now - told.received


def test_what_another_worker_needed_to_go_on_is_no_decoding(clock: Time) -> None:
    told = record()
    told.phase("queue")
    told.answers()
    told.last_token = clock.now = 102.0
    clock.now += 4
    told.phase("decode_queue", first_step=1.0)  # of the other worker
    told.continued()
    clock.now += 8
    told.close(clock.now)
    assert told.segments == [
        *(("queue", 0), ("first_step", 0)),
        *(("decode", 2), ("recovery", 4), ("decode", 8)),
    ]
    assert told.phases == {"queue": 0, "first_step": 0, "decode": 10, "recovery": 4}


@pytest.mark.parametrize(
    ("events", "phase"),
    [
        ([], "queue"),
        ([Event.PLAN], "failed_attempts"),
        ([Event.PLAN, Event.RESERVE], "reserve"),
        ([Event.PLAN, Event.RESERVE, Event.PREFILL], "prefill"),
        ([Event.PLAN, Event.START], "decode_queue"),
    ],
)
def test_a_request_that_ends_early_ends_in_a_phase(
    clock: Time, events: list[Event], phase: str
) -> None:
    told = record()
    clock.now += 1
    told.phase("tokenise")
    for event in events:
        told.apply(event)
    told.apply(Event.FAIL)
    clock.now += 2
    told.close(clock.now)
    assert told.segments == [("tokenise", 1), (phase, 2)]


def test_a_request_that_is_refused_at_the_door_has_one_phase(clock: Time) -> None:
    told = record()
    clock.now += 1
    told.close(clock.now)
    assert told.segments == [("tokenise", 1)]


def test_a_phase_that_comes_again_is_added_to(clock: Time) -> None:
    told = record()
    for _ in range(2):
        clock.now += 1
        told.phase("reserve")
    assert told.phases == {"reserve": 2.0}
    told.phase("queue")
    told.phase("reserve")
    assert told.segments == [("reserve", 2.0), ("queue", 0.0), ("reserve", 0.0)]


def test_a_worker_whose_clock_runs_ahead_makes_no_phase_negative(clock: Time) -> None:
    told = record()
    clock.now += 1
    told.phase("decode_queue", transfer=0.75, first_step=0.5)
    assert told.phases == {"decode_queue": 0.0, "transfer": 0.5, "first_step": 0.5}


@pytest.mark.parametrize(
    ("error", "event"),
    [
        (None, Event.FINISH),
        (CANCELLED, Event.CANCEL),
        (PdserveError(ErrorReason.DECODE_FAILED, "lost"), Event.FAIL),
        (PdserveError(ErrorReason.DEADLINE_EXCEEDED, "late"), Event.FAIL),
    ],
)
def test_ended_by(error: PdserveError | None, event: Event) -> None:
    assert ended_by(error) is event


def test_an_end_is_told_once(
    observer: Observer, registry: CollectorRegistry, logs: list[dict[str, object]]
) -> None:
    told = record()
    observer.done(told, CANCELLED)
    observer.done(told, None)
    assert [entry["outcome"] for entry in logs] == ["cancelled"]
    ends = [
        sample.value
        for family in registry.collect()
        for sample in family.samples
        if sample.name == "pdserve_requests_total"
    ]
    assert ends == [1.0]


class Heard:
    """A listener that writes down what it is told."""

    def __init__(self) -> None:
        self.ends: list[tuple[str, PdserveError | None, float]] = []

    def ended(self, record: RequestRecord, error: PdserveError | None, at: float) -> None:
        self.ends.append((record.request_id, error, at))


def test_each_listener_hears_of_an_end_once(clock: Time, registry: CollectorRegistry) -> None:
    first, second = Heard(), Heard()
    observer = Observer(CoordinatorMetrics(registry), [first, second])
    told = record()
    clock.now += 2
    observer.done(told, CANCELLED)
    observer.done(told, None)
    assert first.ends == second.ends == [("r1", CANCELLED, 102.0)]


def test_the_access_log_says_what_became_of_a_request(
    clock: Time, observer: Observer, logs: list[dict[str, object]]
) -> None:
    told = record()
    told.model = "tiny"
    told.route = Route(Mode.DISAGGREGATED, "disaggregated: asked for", "blue")
    told.prefill_worker, told.decode_worker = "p", "d"
    told.fallbacks.append("colocated: no_room")
    told.recoveries.append("decode_failed")
    told.prompt_tokens = 7
    told.usage = Usage(7, 3, 2)
    clock.now += 0.25
    told.phase("queue")
    told.answers()
    clock.now += 1
    observer.done(told, None)
    assert logs == [
        {
            "event": "request",
            "log_level": "info",
            "request_id": "r1",
            "trace_id": "t1",
            "surface": "http",
            "operation": "chat",
            "stream": True,
            "model": "tiny",
            "tenant": "acme",
            "outcome": "ok",
            "error": None,
            "mode": "disaggregated",
            "reason": "disaggregated: asked for",
            "arm": "blue",
            "prefill_worker": "p",
            "decode_worker": "d",
            "fallbacks": ["colocated: no_room"],
            "recoveries": ["decode_failed"],
            "prompt_tokens": 7,
            "completion_tokens": 3,
            "cached_tokens": 2,
            "ttft_ms": 250.0,
            "duration_ms": 1250.0,
            "phases_ms": {"queue": 250.0, "first_step": 0.0, "decode": 1000.0},
        }
    ]


def test_the_access_log_says_why_a_request_failed(
    observer: Observer, logs: list[dict[str, object]]
) -> None:
    observer.done(record(), PdserveError(ErrorReason.NO_WORKER, "no decode worker is ready"))
    assert logs[0]["outcome"] == "no_worker"
    assert logs[0]["error"] == "no decode worker is ready"
    assert logs[0]["ttft_ms"] is None

"""What an ended request is as OpenTelemetry spans."""

from __future__ import annotations

import pytest
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import SpanKind, StatusCode, format_span_id, format_trace_id
from pydantic import ValidationError

from coordinator.facade.intake import begin
from coordinator.record import RequestRecord
from coordinator.spans import Spans
from pdserve.errors import ErrorReason, PdserveError
from pdserve.tracing import Place, Tracer, caller_of, resource, tracer
from pdserve.tracing_config import TracingConfig
from pdserve.types import FinishReason, Mode, Role, Route, Usage
from pdserve.workload import Workload

TRACE, CALLER, OWN = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7", "00f067aa0ba90200"


class Exported:
    """A tracer, and the spans that it made."""

    def __init__(self) -> None:
        self._exporter = InMemorySpanExporter()
        self.tracer = Tracer(SimpleSpanProcessor(self._exporter), resource("test"))

    @property
    def spans(self) -> list[ReadableSpan]:
        return list(self._exporter.get_finished_spans())


@pytest.fixture
def exported() -> Exported:
    return Exported()


def record() -> RequestRecord:
    told = RequestRecord("r1", "http", "chat", True, TRACE, 10.0, model="tiny", tenant="acme")
    told.place = Place(TRACE, OWN, CALLER)
    told.segments = [("queue", 0.5), ("first_step", 0.25), ("decode", 1.0)]
    told.route = Route(Mode.DISAGGREGATED, "asked for", "blue")
    told.prompt_tokens = 7
    told.usage = Usage(7, 3, 2)
    told.finish_reason = FinishReason.LENGTH
    told.first_token = 10.75
    told.prefill_worker, told.decode_worker = "p", "d"
    told.recoveries.append("decode_failed")
    return told


def ids(span: ReadableSpan) -> tuple[str, str, str]:
    assert span.context is not None
    parent = "" if span.parent is None else format_span_id(span.parent.span_id)
    return format_trace_id(span.context.trace_id), format_span_id(span.context.span_id), parent


def lasted_s(span: ReadableSpan) -> float:
    assert span.start_time is not None
    assert span.end_time is not None
    return (span.end_time - span.start_time) / 1e9


def test_a_request_is_a_span_with_a_child_for_each_phase(exported: Exported) -> None:
    Spans(exported.tracer).ended(record(), None, 11.75)
    *phases, whole = exported.spans
    assert ids(whole) == (TRACE, OWN, CALLER)
    assert (whole.name, whole.kind) == ("chat tiny", SpanKind.SERVER)
    assert whole.status.status_code is StatusCode.UNSET
    assert lasted_s(whole) == pytest.approx(1.75)
    assert [(span.name, lasted_s(span)) for span in phases] == [
        ("queue", pytest.approx(0.5)),
        ("first_step", pytest.approx(0.25)),
        ("decode", pytest.approx(1.0)),
    ]
    assert [span.start_time for span in phases] == [
        whole.start_time,
        *[span.end_time for span in phases[:-1]],
    ]
    assert {(ids(span)[0], ids(span)[2]) for span in phases} == {(TRACE, OWN)}
    assert dict(whole.attributes or {}) == {
        "gen_ai.operation.name": "chat",
        "gen_ai.provider.name": "pdserve",
        "gen_ai.request.model": "tiny",
        "gen_ai.request.stream": True,
        "gen_ai.response.model": "tiny",
        "gen_ai.response.finish_reasons": ["length"],
        "gen_ai.response.time_to_first_chunk": 0.75,
        "gen_ai.usage.input_tokens": 7,
        "gen_ai.usage.output_tokens": 3,
        "gen_ai.usage.cache_read.input_tokens": 2,
        "pdserve.request_id": "r1",
        "pdserve.surface": "http",
        "pdserve.operation": "chat",
        "pdserve.tenant": "acme",
        "pdserve.mode": "disaggregated",
        "pdserve.reason": "asked for",
        "pdserve.arm": "blue",
        "pdserve.prefill_worker": "p",
        "pdserve.decode_worker": "d",
        "pdserve.recoveries": ["decode_failed"],
    }


def test_it_began_when_it_did_however_late_that_is_told(
    exported: Exported, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("coordinator.spans.time.monotonic", lambda: 13.0)
    monkeypatch.setattr("coordinator.spans.time.time_ns", lambda: 1_000_000_000_000)
    Spans(exported.tracer).ended(record(), None, 11.75)
    # Received at 10, and it is 13 now.
    assert exported.spans[-1].start_time == 997_000_000_000


def test_a_failure_is_told_by_its_reason_and_not_in_words(exported: Exported) -> None:
    told = RequestRecord("r1", "grpc", "completion", False, TRACE, 10.0, place=Place(TRACE, OWN))
    error = PdserveError(ErrorReason.INVALID_ARGUMENT, "words of the client's")
    told.segments = [("tokenise", 1.0)]
    Spans(exported.tracer).ended(told, error, 11.0)
    whole = exported.spans[-1]
    assert (whole.name, whole.parent) == ("text_completion", None)
    assert whole.status.status_code is StatusCode.ERROR
    assert (whole.attributes or {})["error.type"] == "invalid_argument"
    assert "words" not in whole.to_json()


def test_nothing_is_made_of_what_its_caller_does_not_trace(exported: Exported) -> None:
    for flags, traced in (("00", False), ("01", True)):
        told = begin("http", "chat", "r", f"00-{TRACE}-{CALLER}-{flags}")
        assert told.trace_id == TRACE
        assert (told.place is not None) is traced
        if told.place is not None:
            assert (told.place.trace_id, told.place.parent_id) == (TRACE, CALLER)
    told.place = None
    Spans(exported.tracer).ended(told, None, told.received)
    assert exported.spans == []


def test_a_request_without_a_caller_begins_a_trace() -> None:
    first, second = (begin("http", "chat", "r", None) for _ in range(2))
    assert first.place is not None
    assert first.place.parent_id == ""
    assert first.trace_id == first.place.trace_id != second.trace_id
    twin = first.twin("r-1", counts_prompt=True)
    assert twin.place is not None
    assert (twin.place.trace_id, twin.place.parent_id) == (first.trace_id, "")
    assert twin.place.span_id != first.place.span_id
    caller = caller_of(first.place.traceparent)
    assert caller is not None
    assert format_span_id(caller.span_id) == first.place.span_id
    assert caller.trace_flags.sampled


def test_what_a_worker_does_is_a_child_of_the_request(exported: Exported) -> None:
    workload = Workload(lambda role, outcome: None, exported.tracer)
    with workload.sequence(Role.PREFILL, Place(TRACE, OWN).traceparent) as told:
        told["pdserve.queue_s"] = 0.5
    with pytest.raises(PdserveError), workload.sequence(Role.DECODE, Place(TRACE, OWN).traceparent):
        raise PdserveError(ErrorReason.KV_EXPIRED, "late")
    with workload.sequence(Role.DECODE):
        pass
    read, failed = exported.spans
    assert (ids(read)[0], ids(read)[2]) == (ids(failed)[0], ids(failed)[2]) == (TRACE, OWN)
    assert (read.name, read.kind) == ("prefill", SpanKind.SERVER)
    assert dict(read.attributes or {}) == {"pdserve.queue_s": 0.5}
    assert failed.status.status_code is StatusCode.ERROR
    assert dict(failed.attributes or {}) == {"error.type": "kv_expired"}


def test_no_collector_no_tracer_and_no_secret_in_its_address() -> None:
    assert tracer(TracingConfig(), "test") is None
    for endpoint in ("collector:4318", "http://me:secret@collector:4318", "http://a b"):
        with pytest.raises(ValidationError):
            TracingConfig(endpoint=endpoint)

"""Spans of what was done for a request, for an OpenTelemetry collector.

They are made when it has ended, from what was measured anyway, and carry no text of a client's.
Contexts are W3C's `traceparent`: a worker's spans are children of the coordinator's.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass

from opentelemetry import trace
from opentelemetry.context import Context
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import ReadableSpan, SpanProcessor
from opentelemetry.sdk.trace.id_generator import RandomIdGenerator
from opentelemetry.sdk.util.instrumentation import InstrumentationScope
from opentelemetry.trace import SpanContext, SpanKind, Status, StatusCode, TraceFlags
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

import pdserve
from pdserve.tracing_config import TracingConfig

Attributes = dict[str, str | int | float | bool | list[str]]

_IDS = RandomIdGenerator()
_W3C = TraceContextTextMapPropagator()
_SCOPE = InstrumentationScope("pdserve", pdserve.__version__)
_SAMPLED = TraceFlags(TraceFlags.SAMPLED)
_FLUSH_S = 2.0


@dataclass(frozen=True, slots=True)
class Place:
    """A span's place in a trace, in hex digits; `parent_id` is empty for a trace's first."""

    trace_id: str
    span_id: str
    parent_id: str = ""

    @property
    def traceparent(self) -> str:
        return f"00-{self.trace_id}-{self.span_id}-01"

    def child(self) -> Place:
        return Place(self.trace_id, new_span_id(), self.span_id)


def new_span_id() -> str:
    return trace.format_span_id(_IDS.generate_span_id())


def new_trace_id() -> str:
    return trace.format_trace_id(_IDS.generate_trace_id())


def caller_of(traceparent: str | None) -> SpanContext | None:
    """Who calls, by a W3C `traceparent`; None without one, or with one that is malformed."""
    if not traceparent:
        return None
    context = _W3C.extract({"traceparent": traceparent}, context=Context())
    caller = trace.get_current_span(context).get_span_context()
    return caller if caller.is_valid else None


class Tracer:
    """Hands spans that have ended on to a collector, from a thread: whoever adds one never waits.
    What the collector does not take in time is dropped, and logged."""

    def __init__(self, processor: SpanProcessor, resource: Resource) -> None:
        self._processor = processor
        self._resource = resource

    def add(
        self,
        name: str,
        place: Place,
        times_ns: tuple[int, int],
        attributes: Attributes,
        *,
        kind: SpanKind = SpanKind.INTERNAL,
        error: str | None = None,
    ) -> None:
        """A span from and to these nanoseconds since the Unix epoch; `error` is the reason for
        which it failed, a word of ours."""
        if error is not None:
            attributes = attributes | {"error.type": error}
        began, ended = times_ns
        self._processor.on_end(
            ReadableSpan(
                name,
                _context(place.trace_id, place.span_id),
                parent=_context(place.trace_id, place.parent_id) if place.parent_id else None,
                resource=self._resource,
                attributes=attributes,
                kind=kind,
                status=Status(StatusCode.UNSET if error is None else StatusCode.ERROR),
                start_time=began,
                end_time=ended,
                instrumentation_scope=_SCOPE,
            )
        )

    def add_child(
        self, name: str, traceparent: str, began_ns: int, attributes: Attributes, error: str | None
    ) -> None:
        """A span that ends now, of what a server did for the one of `traceparent`."""
        caller = caller_of(traceparent)
        if caller is not None:
            place = Place(
                trace.format_trace_id(caller.trace_id),
                new_span_id(),
                trace.format_span_id(caller.span_id),
            )
            times = began_ns, time.time_ns()
            self.add(name, place, times, attributes, kind=SpanKind.SERVER, error=error)

    def close(self) -> None:
        """Sends what is left, for at most two seconds."""
        # By itself it would wait for a collector that does not answer, half a minute or more.
        last = threading.Thread(target=self._processor.shutdown, daemon=True)
        last.start()
        last.join(_FLUSH_S)


def tracer(config: TracingConfig, service: str, instance: str = "") -> Tracer | None:
    """None where no collector is configured. `service` and `instance` say whose spans they are."""
    if config.endpoint is None:
        return None
    from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
    from opentelemetry.sdk.trace.export import BatchSpanProcessor

    exporter = OTLPSpanExporter(config.endpoint.removesuffix("/") + "/v1/traces")
    return Tracer(BatchSpanProcessor(exporter), resource(service, instance))


def resource(service: str, instance: str = "") -> Resource:
    attributes = {"service.name": service, "service.version": pdserve.__version__}
    if instance:
        attributes["service.instance.id"] = instance
    return Resource.create(attributes)


def given(attributes: Mapping[str, str | int | float | bool | None]) -> Attributes:
    """Those that say something."""
    return {name: value for name, value in attributes.items() if value is not None and value != ""}


def _context(trace_id: str, span_id: str) -> SpanContext:
    return SpanContext(int(trace_id, 16), int(span_id, 16), is_remote=False, trace_flags=_SAMPLED)

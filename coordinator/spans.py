"""A request that ended, as OpenTelemetry spans: one for it, and a child for each phase.

Attributes named `gen_ai.*` are those of OpenTelemetry's semantic conventions for generative AI.
"""

from __future__ import annotations

import time

from opentelemetry.semconv._incubating.attributes import gen_ai_attributes as gen_ai
from opentelemetry.trace import SpanKind

from coordinator.record import RequestRecord
from pdserve.errors import PdserveError
from pdserve.tracing import Attributes, Tracer, given

_TEXT = gen_ai.GenAiOperationNameValues.TEXT_COMPLETION.value
_CHAT = gen_ai.GenAiOperationNameValues.CHAT.value


class Spans:
    """Makes spans of requests whose callers did not ask for none; an EndListener."""

    def __init__(self, tracer: Tracer) -> None:
        self._tracer = tracer

    def ended(self, record: RequestRecord, error: PdserveError | None, at: float) -> None:
        place = record.place
        if place is None:
            return
        operation = _TEXT if record.operation == "completion" else _CHAT
        # Others may have been told first: what is `at` on that clock is past on this one, too.
        began = time.time_ns() - round((time.monotonic() - record.received) * 1e9)
        start = began
        for phase, spent in record.segments:
            end = start + round(spent * 1e9)
            self._tracer.add(phase, place.child(), (start, end), {})
            start = end
        self._tracer.add(
            f"{operation} {record.model}".rstrip(),
            place,
            (began, start),
            _attributes(record, operation),
            kind=SpanKind.SERVER,
            error=None if error is None else error.reason.label,
        )


def _attributes(record: RequestRecord, operation: str) -> Attributes:
    route, usage = record.route, record.usage
    first_s = None if record.first_token is None else record.first_token - record.received
    attributes = given(
        {
            gen_ai.GEN_AI_OPERATION_NAME: operation,
            gen_ai.GEN_AI_PROVIDER_NAME: "pdserve",
            gen_ai.GEN_AI_REQUEST_MODEL: record.model,
            gen_ai.GEN_AI_REQUEST_STREAM: record.stream,
            gen_ai.GEN_AI_RESPONSE_MODEL: "" if route is None else record.model,
            gen_ai.GEN_AI_RESPONSE_TIME_TO_FIRST_CHUNK: first_s,
            gen_ai.GEN_AI_USAGE_INPUT_TOKENS: record.prompt_tokens or None,
            gen_ai.GEN_AI_USAGE_OUTPUT_TOKENS: None if usage is None else usage.completion_tokens,
            gen_ai.GEN_AI_USAGE_CACHE_READ_INPUT_TOKENS: None
            if usage is None
            else usage.cached_tokens,
            "pdserve.request_id": record.request_id,
            "pdserve.surface": record.surface,
            "pdserve.operation": record.operation,
            "pdserve.tenant": record.tenant,
            "pdserve.mode": None if route is None else route.mode.value,
            "pdserve.reason": None if route is None else route.reason,
            "pdserve.arm": None if route is None else route.arm,
            "pdserve.prefill_worker": record.prefill_worker,
            "pdserve.decode_worker": record.decode_worker,
        }
    )
    if record.finish_reason is not None:
        attributes[gen_ai.GEN_AI_RESPONSE_FINISH_REASONS] = [record.finish_reason.value]
    if record.fallbacks:
        attributes["pdserve.fallbacks"] = list(record.fallbacks)
    if record.recoveries:
        attributes["pdserve.recoveries"] = list(record.recoveries)
    return attributes

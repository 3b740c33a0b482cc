"""One trace through coordinator, prefill and decode, as an OpenTelemetry collector gets it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from pdserve import tracing
from pdserve.tracing import Tracer, tracer
from pdserve.tracing_config import TracingConfig
from pdserve.types import Role
from tests.support.otlp import Collector, attributes, collector
from tests.support.patience import WITHIN_S
from tests.support.sim_fleet import MODEL, SimFleetWorker, sim_fleet

TRACE, CALLER = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"
PROMPT = "words that nobody else may read"


@pytest.fixture
def otlp() -> Iterator[Collector]:
    with collector() as kept:
        yield kept


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """All spans are sent, however long that takes."""
    monkeypatch.setattr(tracing, "_FLUSH_S", WITHIN_S)


async def test_workers_spans_are_children_of_the_request_s(otlp: Collector) -> None:
    tracers: list[Tracer] = []

    def of(service: str) -> Tracer:
        made = tracer(TracingConfig(endpoint=otlp.endpoint), service)
        assert made is not None
        tracers.append(made)
        return made

    reader = SimFleetWorker("p", Role.PREFILL, tracer=of("reader"))
    writer = SimFleetWorker("d", Role.DECODE, tracer=of("writer"))
    async with sim_fleet(reader, writer, tracer=of("coordinator")) as fleet:
        answer = await fleet.coordinator.http.post(
            "/v1/completions",
            json={"model": MODEL, "prompt": PROMPT, "max_tokens": 5},
            headers={
                "traceparent": f"00-{TRACE}-{CALLER}-01",
                "x-pdserve-mode": "disaggregated",
                "authorization": "Bearer pd-secret",
            },
        )
        assert answer.status_code == 200
    for each in tracers:
        each.close()

    assert {path for path, _ in otlp.bodies} == {"/v1/traces"}
    spans = otlp.spans()
    (whole,) = [span for span in spans["coordinator"] if span.parent_span_id.hex() == CALLER]
    (read,), (written,) = spans["reader"], spans["writer"]
    assert {span.trace_id.hex() for sent in spans.values() for span in sent} == {TRACE}
    assert (whole.name, read.name, written.name) == (
        f"text_completion {MODEL}",
        "prefill",
        "decode",
    )
    inner = [span for span in spans["coordinator"] if span is not whole]
    assert {span.parent_span_id for span in (read, written, *inner)} == {whole.span_id}
    assert {"queue", "prefill", "transfer", "decode"} <= {span.name for span in inner}
    # All on one machine here, so that their clocks are one, but for the time between two looks.
    for span in (read, written, *inner):
        assert whole.start_time_unix_nano <= span.start_time_unix_nano + 100_000_000
    told = attributes(list(whole.attributes))
    assert told["gen_ai.usage.output_tokens"] == 5
    assert attributes(list(read.attributes))["gen_ai.usage.input_tokens"] == len(PROMPT)
    assert attributes(list(written.attributes))["gen_ai.response.finish_reasons"] == ["length"]
    text = answer.json()["choices"][0]["text"]
    for secret in (PROMPT, text, "pd-secret"):
        assert not any(secret.strip().encode() in body for _, body in otlp.bodies)


async def test_a_request_that_is_not_traced_sends_nothing(otlp: Collector) -> None:
    made = tracer(TracingConfig(endpoint=otlp.endpoint), "all")
    assert made is not None
    async with sim_fleet(SimFleetWorker("d", Role.DECODE, tracer=made), tracer=made) as fleet:
        await fleet.coordinator.http.post(
            "/v1/completions",
            json={"model": MODEL, "prompt": PROMPT, "max_tokens": 5},
            headers={"traceparent": f"00-{TRACE}-{CALLER}-00"},
        )
    made.close()
    assert otlp.bodies == []

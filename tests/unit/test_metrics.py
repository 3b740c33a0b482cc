"""The coordinator's metrics: right numbers, and labels that no client can choose."""

from __future__ import annotations

from collections.abc import Iterable

import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry, Histogram
from prometheus_client.metrics_core import Metric

from coordinator.metrics import ITL_BUCKETS, CoordinatorMetrics, InterTokenLatency
from coordinator.record import RequestRecord
from pdserve.errors import ErrorReason
from pdserve.types import Mode, Route, Usage

NAME = "pdserve_inter_token_latency_seconds"
MODES = ("colocated", "disaggregated")

observations = st.lists(
    st.tuples(
        st.sampled_from(MODES),
        st.floats(0, 10) | st.sampled_from(ITL_BUCKETS),  # the bounds themselves are the hard part
    ),
    max_size=100,
)


def samples(families: Iterable[Metric]) -> dict[tuple[str, frozenset[tuple[str, str]]], float]:
    return {
        (sample.name, frozenset(sample.labels.items())): sample.value
        for family in families
        for sample in family.samples
        if not sample.name.endswith("_created")
    }


@given(observations)
def test_inter_token_latency_is_what_prometheus_own_histogram_is(
    values: list[tuple[str, float]],
) -> None:
    ours = InterTokenLatency()
    theirs = Histogram(NAME, "text", ["model", "mode"], buckets=ITL_BUCKETS, registry=None)
    for mode, value in values:
        ours.observe(ours.series("tiny", mode), value)
        theirs.labels("tiny", mode).observe(value)
    expected = samples(theirs.collect())
    measured = samples(ours.collect())
    assert measured.keys() == expected.keys()
    assert measured == pytest.approx(expected)


def test_inter_token_latency_is_exposed_once_registered() -> None:
    registry = CollectorRegistry()
    metrics = CoordinatorMetrics(registry)
    metrics.inter_token.observe(metrics.inter_token.series("tiny", "colocated"), 0.01)
    labels = {"model": "tiny", "mode": "colocated"}
    assert registry.get_sample_value(f"{NAME}_count", labels) == 1


def finished(**fields: object) -> RequestRecord:
    record = RequestRecord("r1", "http", "chat", False, "", 10.0)
    for name, value in fields.items():
        setattr(record, name, value)
    return record


@pytest.mark.parametrize(
    ("reason", "outcome"),
    [
        (None, "ok"),
        (ErrorReason.CANCELLED, "cancelled"),
        (ErrorReason.RATE_LIMITED, "rejected"),
        (ErrorReason.NO_WORKER, "rejected"),
        (ErrorReason.DECODE_FAILED, "failed"),
        (ErrorReason.DEADLINE_EXCEEDED, "failed"),
    ],
)
def test_a_request_is_counted_by_its_outcome(reason: ErrorReason | None, outcome: str) -> None:
    registry = CollectorRegistry()
    CoordinatorMetrics(registry).request_done(finished(model="tiny"), reason, ended=11.0)
    labels = {
        "model": "tiny",
        "surface": "http",
        "mode": "none",
        "arm": "none",
        "outcome": outcome,
        "reason": "none" if reason is None else reason.label,
    }
    assert registry.get_sample_value("pdserve_requests_total", labels) == 1


def test_an_answered_request_is_measured_by_route_and_arm() -> None:
    registry = CollectorRegistry()
    record = finished(
        model="tiny",
        route=Route(Mode.DISAGGREGATED, "", "blue"),
        first_token=10.5,
        usage=Usage(7, 3, 2),
        segments=[("queue", 0.25), ("decode", 1.0), ("queue", 0.25)],
    )
    CoordinatorMetrics(registry).request_done(record, None, ended=12.0)
    by_arm = {"model": "tiny", "mode": "disaggregated", "arm": "blue"}
    by_mode = {"model": "tiny", "mode": "disaggregated"}
    value = registry.get_sample_value
    assert value("pdserve_time_to_first_token_seconds_sum", by_arm) == 0.5
    assert value("pdserve_request_duration_seconds_sum", by_arm) == 2.0
    for phase, spent in (("queue", 0.5), ("decode", 1.0)):
        labels = {"mode": "disaggregated", "arm": "blue", "phase": phase}
        assert value("pdserve_phase_seconds_sum", labels) == spent
        assert value("pdserve_phase_seconds_count", labels) == 1
    for kind, tokens in (("prompt", 7), ("cached", 2), ("completion", 3)):
        assert value("pdserve_tokens_total", {**by_mode, "kind": kind}) == tokens


@pytest.mark.parametrize(
    ("predicted", "true", "counted"),
    [(64, 64, (64, 0, 0)), (64, 32, (32, 32, 0)), (0, 32, (0, 0, 32))],
)
def test_what_was_believed_of_a_cache_is_compared_with_what_it_saved(
    predicted: int, true: int, counted: tuple[int, int, int]
) -> None:
    registry = CollectorRegistry()
    record = finished(
        model="tiny",
        route=Route(Mode.COLOCATED, "", ""),
        first_token=10.5,
        usage=Usage(100, 3, true),
        predicted_cached_tokens=predicted,
    )
    CoordinatorMetrics(registry).request_done(record, None, ended=12.0)
    labels = {"model": "tiny", "mode": "colocated"}
    assert counted == tuple(
        registry.get_sample_value(
            "pdserve_prefix_predicted_tokens_total", {**labels, "outcome": outcome}
        )
        for outcome in ("hit", "missed", "unforeseen")
    )


def test_what_another_worker_s_cache_saved_tells_nothing_of_a_belief() -> None:
    registry = CollectorRegistry()
    record = finished(
        model="tiny",
        route=Route(Mode.COLOCATED, "", ""),
        usage=Usage(100, 3, 32),
        predicted_cached_tokens=64,
        recoveries=["decode_failed"],
    )
    CoordinatorMetrics(registry).request_done(record, None, ended=12.0)
    labels = {"model": "tiny", "mode": "colocated"}
    for outcome in ("hit", "missed", "unforeseen"):
        name = "pdserve_prefix_predicted_tokens_total"
        assert registry.get_sample_value(name, {**labels, "outcome": outcome}) is None


def test_a_request_that_failed_before_its_first_token_leaves_latencies_alone() -> None:
    registry = CollectorRegistry()
    record = finished(model="tiny", segments=[("queue", 0.5)])
    CoordinatorMetrics(registry).request_done(record, ErrorReason.NO_ROOM, ended=12.0)
    measured = {sample.name for family in registry.collect() for sample in family.samples}
    assert not [name for name in measured if name.endswith("_seconds_sum")]

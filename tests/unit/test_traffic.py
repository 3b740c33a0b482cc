"""What the dashboard takes its rates and quantiles from."""

from __future__ import annotations

from prometheus_client import CollectorRegistry

from coordinator.metrics import CoordinatorMetrics
from coordinator.record import SHADOW, RequestRecord
from coordinator.traffic import traffic
from pdserve.errors import ErrorReason
from pdserve.types import Mode, Route


def ended(model: str, arm: str, ttft_s: float | None) -> RequestRecord:
    record = RequestRecord("r", "http", "chat", True, "t", 10.0, model=model)
    if ttft_s is not None:
        record.route = Route(Mode.COLOCATED, "", arm)
        record.first_token = 10.0 + ttft_s
    return record


def requests(registry: CollectorRegistry, surface: str) -> float:
    (family,) = (it for it in registry.collect() if it.name == "pdserve_requests")
    return sum(
        it.value
        for it in family.samples
        if it.name == "pdserve_requests_total" and it.labels["surface"] == surface
    )


def test_requests_and_first_tokens_are_summed_over_models_and_arms() -> None:
    registry = CollectorRegistry()
    metrics = CoordinatorMetrics(registry)
    for model, arm, ttft_s in (("m", "a", 0.02), ("m", "b", 0.02), ("n", "a", 2.0)):
        metrics.request_done(ended(model, arm, ttft_s), None, 20.0)
    metrics.request_done(ended("m", "", None), ErrorReason.NO_WORKER, 20.0)
    copied = ended("m", "b", 9.0)
    copied.surface = SHADOW  # no client waited for it
    metrics.request_done(copied, None, 20.0)
    assert requests(registry, SHADOW) == 1
    told = traffic(registry)
    assert told["requests"] == [
        {"mode": "colocated", "outcome": "ok", "count": 3},
        {"mode": "none", "outcome": "rejected", "count": 1},
    ]
    counts = dict(zip(told["ttft"]["bounds"], told["ttft"]["modes"]["colocated"], strict=False))
    assert [counts[bound] for bound in (0.01, 0.025, 1.5, 3.0)] == [0, 2, 2, 3]
    assert told["ttft"]["modes"]["colocated"][-1] == 3, "without an upper bound"


def test_nothing_went_through_yet() -> None:
    registry = CollectorRegistry()
    CoordinatorMetrics(registry)
    nothing = {"bounds": [], "modes": {}}
    assert traffic(registry) == {"requests": [], "ttft": nothing, "itl": nothing}

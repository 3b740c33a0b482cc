"""What went through since the start, by route, for whoever takes differences of it."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

from prometheus_client import CollectorRegistry
from prometheus_client.metrics_core import Metric

from coordinator.record import SHADOW

_TTFT = "pdserve_time_to_first_token_seconds"
_ITL = "pdserve_inter_token_latency_seconds"
_REQUESTS = "pdserve_requests"


def traffic(registry: CollectorRegistry) -> dict[str, Any]:
    """Requests by mode and outcome; time to first token and between tokens by mode, as
    cumulative counts of buckets, whose upper bounds are in seconds but for the last, which has
    none. Of all models together, without copies."""
    families = {family.name: family for family in registry.collect()}
    requests: dict[tuple[str, str], float] = defaultdict(float)
    for sample in families[_REQUESTS].samples:
        if sample.name == "pdserve_requests_total" and sample.labels["surface"] != SHADOW:
            requests[sample.labels["mode"], sample.labels["outcome"]] += sample.value
    return {
        "requests": [
            {"mode": mode, "outcome": outcome, "count": count}
            for (mode, outcome), count in requests.items()
        ],
        "ttft": _buckets(families[_TTFT]),
        "itl": _buckets(families[_ITL]),
    }


def _buckets(family: Metric) -> dict[str, Any]:
    counts: dict[str, dict[float, float]] = defaultdict(lambda: defaultdict(float))
    for sample in family.samples:
        if sample.name.endswith("_bucket"):
            counts[sample.labels["mode"]][float(sample.labels["le"])] += sample.value
    bounds = sorted({bound for by_bound in counts.values() for bound in by_bound})
    return {
        "bounds": bounds[:-1],
        "modes": {mode: [by_bound[at] for at in bounds] for mode, by_bound in counts.items()},
    }

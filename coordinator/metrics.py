"""The coordinator's Prometheus metrics, on a registry of its own."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Iterator
from itertools import accumulate
from operator import add

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from prometheus_client.core import HistogramMetricFamily
from prometheus_client.registry import Collector

from coordinator.histogram import FINE_BUCKETS, ITL_BUCKETS, empty
from coordinator.policy.ticket import Priority
from coordinator.record import SHADOW, RequestRecord
from pdserve.errors import ErrorReason

TTFT_BUCKETS = (0.01, 0.025, 0.05, 0.1, 0.2, 0.4, 0.8, 1.5, 3, 6, 12, 25, 50)
"""Seconds; from a cached short prompt on a GPU to a long one on a CPU."""

PHASE_BUCKETS = (0.001, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300)
"""Seconds; from a short prompt's tokens to a long answer."""

LATENCY_BUCKETS = (0.1, 0.25, 0.5, 1, 2, 4, 8, 15, 30, 60, 120, 300)
"""Seconds of a whole request."""


class InterTokenLatency(Collector):
    """A histogram that costs a bisect and two additions an observation.

    prometheus_client's own takes a lock and walks its buckets each time, which is too much
    for something done once a token. Written and read on the event loop's thread alone.
    """

    def __init__(self) -> None:
        self._counts: dict[tuple[str, str], list[int]] = {}
        self._sums: dict[tuple[str, str], list[float]] = {}

    def series(self, model: str, mode: str) -> tuple[list[int], list[float]]:
        """(counts per bucket, [sum]) to be given to `observe`; looked up once a request."""
        key = (model, mode)
        return self._counts.setdefault(key, empty()), self._sums.setdefault(key, [0.0])

    def fold(self, model: str, mode: str, series: tuple[list[int], list[float]]) -> None:
        """Adds a series that a request had for itself."""
        counts, total = self.series(model, mode)
        counts[:] = map(add, counts, series[0])
        total[0] += series[1][0]

    @staticmethod
    def observe(series: tuple[list[int], list[float]], seconds: float) -> None:
        counts, total = series
        counts[bisect_left(FINE_BUCKETS, seconds)] += 1
        total[0] += seconds

    def collect(self) -> Iterable[HistogramMetricFamily]:
        family = HistogramMetricFamily(
            "pdserve_inter_token_latency_seconds",
            "Time between two deltas of one answer, as they leave the coordinator.",
            labels=["model", "mode"],
        )
        for key, counts in self._counts.items():
            family.add_metric(key, list(_cumulative(counts)), self._sums[key][0])
        yield family


_TOLD = [FINE_BUCKETS.index(bound) for bound in ITL_BUCKETS] + [len(FINE_BUCKETS)]


def _cumulative(counts: list[int]) -> Iterator[tuple[str, float]]:
    bounds = [str(float(bound)) for bound in ITL_BUCKETS] + ["+Inf"]
    below = list(accumulate(counts))
    return zip(bounds, (float(below[place]) for place in _TOLD), strict=True)


def _outcome(reason: ErrorReason | None) -> str:
    if reason is None:
        return "ok"
    if reason is ErrorReason.CANCELLED:
        return "cancelled"
    return "rejected" if reason.touched_no_worker else "failed"


class ModelAdmission:
    """Counts who was let in to one model, and who was refused."""

    def __init__(self, model: str, waits: Histogram, refusals: Counter) -> None:
        self._model = model
        self._waits = waits
        self._refusals = refusals

    def let_in(self, priority: Priority, waited_s: float) -> None:
        self._waits.labels(self._model, priority.value).observe(waited_s)

    def refused(self, priority: Priority, reason: ErrorReason) -> None:
        self._refusals.labels(self._model, priority.value, reason.label).inc()


class CoordinatorMetrics:
    """Labels: `mode` is the route taken, `arm` the experiment's arm, `outcome` ok, rejected
    (no worker was touched), failed or cancelled, `reason` the error's; each "none" where there
    is none. No label takes a value from a client."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self.registry = registry
        self.inter_token = InterTokenLatency()
        registry.register(self.inter_token)
        self._requests = Counter(
            "pdserve_requests_total",
            "Requests that ended.",
            ["model", "surface", "mode", "arm", "outcome", "reason"],
            registry=registry,
        )
        self._tokens = Counter(
            "pdserve_tokens_total",
            "Tokens of requests that ended well: prompt, cached (a part of prompt), completion.",
            ["model", "mode", "kind"],
            registry=registry,
        )
        self._predictions = Counter(
            "pdserve_prefix_predicted_tokens_total",
            "Prompt tokens by what was believed and what was true of the reading worker's cache.",
            ["model", "mode", "outcome"],
            registry=registry,
        )
        self.cached_blocks = Gauge(
            "pdserve_prefix_index_blocks",
            "Blocks that a worker's prefix cache is believed to hold.",
            ["worker"],
            registry=registry,
        )
        self._ttft = self._histogram(
            registry, "time_to_first_token_seconds", "From arrival to first token.", TTFT_BUCKETS
        )
        self._latency = self._histogram(
            registry, "request_duration_seconds", "From arrival to last token.", LATENCY_BUCKETS
        )
        self._phase = Histogram(
            "pdserve_phase_seconds",
            "Phases of a request; they add up to its duration, those before decode to its TTFT.",
            ["mode", "arm", "phase"],
            buckets=PHASE_BUCKETS,
            registry=registry,
        )
        self._route_metrics(registry)
        self._admission_metrics(registry)
        self.workers = Gauge(
            "pdserve_workers", "Workers by state.", ["role", "state"], registry=registry
        )

    def _admission_metrics(self, registry: CollectorRegistry) -> None:
        by_class = ["model", "priority"]
        self.running = Gauge(
            "pdserve_requests_running",
            "Requests that were let in and have not ended.",
            ["model"],
            registry=registry,
        )
        self.queued = Gauge(
            "pdserve_queue_depth", "Requests that wait.", by_class, registry=registry
        )
        self.queued_tokens = Gauge(
            "pdserve_queue_tokens", "Prompt tokens that wait.", by_class, registry=registry
        )
        self._waits = Histogram(
            "pdserve_queue_wait_seconds",
            "How long those that were let in had waited.",
            by_class,
            buckets=(0, *TTFT_BUCKETS),
            registry=registry,
        )
        self._refusals = Counter(
            "pdserve_admission_rejections_total",
            "Requests that were refused for want of room or of time.",
            [*by_class, "reason"],
            registry=registry,
        )

    def _route_metrics(self, registry: CollectorRegistry) -> None:
        self._fallbacks = Counter(
            "pdserve_fallbacks_total",
            "Steps down the ladder before the first token, and requests that began below its top.",
            ["model", "step", "reason"],
            registry=registry,
        )
        self._recoveries = Counter(
            "pdserve_recoveries_total",
            "Answers cut off by their decode worker, by whether another one went on with them.",
            ["model", "reason", "outcome"],
            registry=registry,
        )
        self._quarantines = Counter(
            "pdserve_kv_pair_quarantines_total",
            "Pairs of workers taken out of traffic after failures in a row.",
            ["transport"],
            registry=registry,
        )
        self._stopped_arms = Counter(
            "pdserve_experiment_arms_stopped_total",
            "Arms of experiments that their guard rail stopped.",
            ["model", "arm"],
            registry=registry,
        )
        self.pairs = Gauge(
            "pdserve_kv_pairs",
            "Pairs of workers by standing.",
            ["state", "transport"],
            registry=registry,
        )
        self.route_ready = Gauge(
            "pdserve_route_ready",
            "1 while a probe has gone through on this route.",
            ["model", "mode"],
            registry=registry,
        )

    @staticmethod
    def _histogram(
        registry: CollectorRegistry, name: str, text: str, buckets: tuple[float, ...]
    ) -> Histogram:
        return Histogram(
            f"pdserve_{name}", text, ["model", "mode", "arm"], buckets=buckets, registry=registry
        )

    def admission(self, model: str) -> ModelAdmission:
        return ModelAdmission(model, self._waits, self._refusals)

    def fell_back(self, record: RequestRecord, step: str, reason: str) -> None:
        """`step` is what was tried instead: transport, prefill, decode or colocated. A copy's are
        not counted."""
        if record.surface != SHADOW:
            self._fallbacks.labels(record.model, step, reason).inc()

    def recovered(self, record: RequestRecord, reason: str, outcome: str) -> None:
        """`reason` is the decode worker's; `outcome` is continued or failed. A copy's are not
        counted, nor those whose client left meanwhile, or whose deadline passed."""
        if record.surface != SHADOW:
            self._recoveries.labels(record.model, reason, outcome).inc()

    def quarantined(self, transport: str) -> None:
        self._quarantines.labels(transport).inc()

    def arm_stopped(self, model: str, arm: str) -> None:
        self._stopped_arms.labels(model, arm).inc()

    def request_done(self, record: RequestRecord, reason: ErrorReason | None, ended: float) -> None:
        """`ended` on the clock of `record.received`. A copy is counted and no more: what else is
        told is what clients saw."""
        route = record.route
        mode = "none" if route is None else route.mode.value
        arm = (route.arm if route is not None else "") or "none"
        self._requests.labels(
            record.model or "none",
            record.surface,
            mode,
            arm,
            _outcome(reason),
            "none" if reason is None else reason.label,
        ).inc()
        if record.surface == SHADOW:
            return
        if record.first_token is not None:
            if record.gaps is not None:
                self.inter_token.fold(record.model, mode, record.gaps)
            self._ttft.labels(record.model, mode, arm).observe(record.first_token - record.received)
            for phase, spent in record.phases.items():
                self._phase.labels(mode, arm, phase).observe(spent)
        if record.usage is not None:
            self._latency.labels(record.model, mode, arm).observe(ended - record.received)
            tokens = self._tokens
            tokens.labels(record.model, mode, "prompt").inc(record.usage.prompt_tokens)
            tokens.labels(record.model, mode, "cached").inc(record.usage.cached_tokens)
            tokens.labels(record.model, mode, "completion").inc(record.usage.completion_tokens)
            if not record.recoveries:  # else another worker's cache saved it than was asked about
                self._compare(record, mode, record.usage.cached_tokens)

    def _compare(self, record: RequestRecord, mode: str, saved: int) -> None:
        predicted = record.predicted_cached_tokens
        met = min(predicted, saved)
        predictions = self._predictions
        predictions.labels(record.model, mode, "hit").inc(met)
        predictions.labels(record.model, mode, "missed").inc(predicted - met)
        predictions.labels(record.model, mode, "unforeseen").inc(saved - met)

"""A worker's Prometheus metrics, and the small HTTP server that shows a registry.

Every metric lives on the registry that is passed in. Series of a worker:

    pdserve_engine_running, pdserve_engine_waiting      sequences in the engine
    pdserve_kv_cache_usage_ratio                        0 to 1
    pdserve_prefix_cache_queries_total, _hits_total     prompt tokens looked up, and found
    pdserve_kv_transfer_bytes_total{transport}          fetched from prefill workers
    pdserve_kv_transfer_seconds{transport}              histogram of one transfer
    pdserve_kv_leases_open                              handles whose blocks are held
    pdserve_kv_lease_tokens_held{age}                   prompt tokens held for them, by their age
    pdserve_kv_lease_oldest_seconds                     age of the oldest
    pdserve_kv_leases_total{end}                        by `LeaseEnd`
    pdserve_kv_reserved_tokens                          room promised to sequences
    pdserve_sequences_total{role,outcome}               "finished", or the reason of the failure
    pdserve_build_info{version,engine,model,worker_id}  always 1
    process_*                                           CPU, memory and files of the process
"""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Iterable
from contextlib import contextmanager
from socketserver import ThreadingMixIn
from typing import TYPE_CHECKING, Any
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    ProcessCollector,
    make_wsgi_app,
)
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

import pdserve
from pdserve.config import Listen
from pdserve.engine.base import StepStats
from pdserve.errors import ConfigError
from pdserve.fleet_key import carries_key
from pdserve.types import Role
from pdserve.worker_service import WorkerIdentity
from pdserve.workload import Workload

if TYPE_CHECKING:
    from collections.abc import Iterator
    from wsgiref.types import StartResponse, WSGIApplication, WSGIEnvironment

TRANSFER_BUCKETS_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)
"""Of one KV transfer: from a short prompt over shared memory to a long one over slow TCP."""

_READ_TIMEOUT_S = 10.0


class WorkerMetrics:
    """Counts what the engine and the services report; gauges are read when scraped."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._registry = registry
        self._prefix_queries = Counter(
            "pdserve_prefix_cache_queries_total",
            "Prompt tokens looked up in the prefix cache",
            registry=registry,
        )
        self._prefix_hits = Counter(
            "pdserve_prefix_cache_hits_total",
            "Prompt tokens found in the prefix cache",
            registry=registry,
        )
        self._transfer_bytes = Counter(
            "pdserve_kv_transfer_bytes_total",
            "Bytes of KV fetched from prefill workers",
            ["transport"],
            registry=registry,
        )
        self._transfer_seconds = Histogram(
            "pdserve_kv_transfer_seconds",
            "Seconds of one KV transfer",
            ["transport"],
            buckets=TRANSFER_BUCKETS_S,
            registry=registry,
        )
        self._sequences = Counter(
            "pdserve_sequences_total",
            "Sequences that ended, by role and outcome",
            ["role", "outcome"],
            registry=registry,
        )
        ProcessCollector(registry=registry)

    def sequence_ended(self, role: Role, outcome: str) -> None:
        """An EndListener."""
        self._sequences.labels(role.value, outcome).inc()

    def step(self, stats: StepStats) -> None:
        """A StepListener; the counters are touched only where there is something to count."""
        if stats.prefix_queries:
            self._prefix_queries.inc(stats.prefix_queries)
        if stats.prefix_hits:
            self._prefix_hits.inc(stats.prefix_hits)
        for transfer in stats.transfers:
            self._transfer_bytes.labels(transfer.transport).inc(transfer.num_bytes)
            self._transfer_seconds.labels(transfer.transport).observe(transfer.seconds)

    def watch(self, workload: Workload, identity: WorkerIdentity, engine: str) -> None:
        """Adds the gauges of `workload`, and the info of a worker with that kind of engine."""
        gauges: tuple[tuple[str, str, Callable[[], float]], ...] = (
            ("engine_running", "Sequences in the engine", lambda: workload.load.running),
            ("engine_waiting", "Sequences before the engine", lambda: workload.load.waiting),
            ("kv_cache_usage_ratio", "KV cache in use, 0 to 1", lambda: workload.load.kv_usage),
            (
                "kv_reserved_tokens",
                "Tokens of KV room promised to sequences",
                lambda: workload.load.reserved_tokens,
            ),
        )
        for name, text, read in gauges:
            Gauge(f"pdserve_{name}", text, registry=self._registry).set_function(read)
        self._registry.register(_LeaseCollector(workload))
        labels = {
            "version": pdserve.__version__,
            "engine": engine,
            "model": identity.model,
            "worker_id": identity.worker_id,
        }
        info = Gauge("pdserve_build_info", "Always 1", list(labels), registry=self._registry)
        info.labels(**labels).set(1)


class _LeaseCollector(Collector):
    """Reads the lease table when scraped, all of it at one moment."""

    def __init__(self, workload: Workload) -> None:
        self._workload = workload

    def collect(self) -> Iterator[Metric]:
        leases = self._workload.leases
        yield GaugeMetricFamily("pdserve_kv_leases_open", "Open KV leases", leases.open)
        yield GaugeMetricFamily(
            "pdserve_kv_lease_oldest_seconds", "Age of the oldest open KV lease", leases.oldest_s
        )
        held = GaugeMetricFamily(
            "pdserve_kv_lease_tokens_held",
            "Prompt tokens held for open KV leases, by the lease's age",
            labels=["age"],
        )
        for age, num_tokens in leases.tokens_by_age.items():
            held.add_metric([age], num_tokens)
        yield held
        ended = CounterMetricFamily(
            "pdserve_kv_leases", "KV leases that ended, by how", labels=["end"]
        )
        for end, count in leases.ended.items():
            ended.add_metric([end], count)
        yield ended


class _Server(ThreadingMixIn, WSGIServer):
    daemon_threads = True

    # The base class asks the resolver for the host's full name, which can take seconds.
    def server_bind(self) -> None:
        # A worker that starts again finds its last scrapes' connections in TIME_WAIT.
        self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        self.socket.bind(self.server_address)
        self.server_address = self.socket.getsockname()
        self.server_name, self.server_port = self.server_address[:2]  # type: ignore[assignment]
        self.setup_environ()


class _Handler(WSGIRequestHandler):
    timeout = _READ_TIMEOUT_S

    def log_message(self, format: str, *args: Any) -> None:
        pass


@contextmanager
def metrics_server(listen: Listen, registry: CollectorRegistry, key: str | None) -> Iterator[str]:
    """Serves the registry over HTTP while the context lasts; gives the address, host:port.

    A scrape must carry `Authorization: Bearer KEY` where a key is given. Runs on threads of
    its own: it answers also while the event loop is busy. Raises ConfigError when the address
    cannot be had.
    """
    app = make_wsgi_app(registry)
    try:
        server = _Server((listen.host, listen.port), _Handler)
    except OSError as error:
        raise ConfigError(
            f"cannot serve metrics on {listen.address}: {error.strerror}; choose another port"
        ) from None
    server.set_app(app if key is None else _demanding(app, key))
    thread = threading.Thread(target=server.serve_forever, name="metrics", daemon=True)
    thread.start()
    try:
        yield listen.model_copy(update={"port": server.server_port}).address
    finally:
        server.shutdown()
        server.server_close()


def _demanding(app: WSGIApplication, key: str) -> WSGIApplication:
    def guarded(environ: WSGIEnvironment, start_response: StartResponse) -> Iterable[bytes]:
        if carries_key(environ.get("HTTP_AUTHORIZATION"), key):
            return app(environ, start_response)
        start_response("401 Unauthorized", [("WWW-Authenticate", "Bearer")])
        return [b"the fleet key is missing or wrong\n"]

    return guarded

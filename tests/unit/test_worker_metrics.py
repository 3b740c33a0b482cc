"""A worker's metrics as Prometheus scrapes them."""

from __future__ import annotations

import socket

import httpx
import pytest
from prometheus_client import CollectorRegistry
from prometheus_client.parser import text_string_to_metric_families

from pdserve.config import Listen
from pdserve.engine.base import EngineLoad, StepStats, Transfer
from pdserve.errors import ConfigError
from pdserve.metrics import WorkerMetrics, metrics_server
from pdserve.types import LeaseSnapshot, Role
from pdserve.worker_service import WorkerIdentity
from pdserve.workload import Workload

IDENTITY = WorkerIdentity("worker-0", "epoch", frozenset(Role), "tiny")


def scrape(address: str, **headers: str) -> dict[str, float]:
    """Values by name and labels, as in the text that Prometheus reads."""
    answer = httpx.get(f"http://{address}/metrics", headers=headers, trust_env=False)
    answer.raise_for_status()
    values = {}
    for family in text_string_to_metric_families(answer.text):
        for sample in family.samples:
            labels = ",".join(f"{k}={v}" for k, v in sorted(sample.labels.items()))
            values[f"{sample.name}{{{labels}}}"] = sample.value
    return values


def test_a_scrape_shows_what_was_reported() -> None:
    registry = CollectorRegistry()
    metrics = WorkerMetrics(registry)
    workload = Workload(metrics.sequence_ended)
    metrics.watch(workload, IDENTITY, "sim")
    stats = StepStats(
        EngineLoad(running=3, waiting=2, kv_usage=0.5),
        prefix_queries=100,
        prefix_hits=64,
        transfers=(Transfer("nixl", 1_000, 0.004), Transfer("nixl", 500, 0.04)),
    )
    workload.step(stats)
    metrics.step(stats)
    workload.show_leases(
        lambda: LeaseSnapshot(4, 2.5, {"0-1s": 80, "1-10s": 1_000}, {"fetched": 9, "lost": 0})
    )
    workload.set_reserved_tokens(77)
    with workload.sequence(Role.DECODE):
        pass

    with metrics_server(Listen(), registry, None) as address:
        values = scrape(address)
    expected = {
        "pdserve_engine_running{}": 3,
        "pdserve_engine_waiting{}": 2,
        "pdserve_kv_cache_usage_ratio{}": 0.5,
        "pdserve_prefix_cache_queries_total{}": 100,
        "pdserve_prefix_cache_hits_total{}": 64,
        "pdserve_kv_transfer_bytes_total{transport=nixl}": 1_500,
        "pdserve_kv_transfer_seconds_count{transport=nixl}": 2,
        "pdserve_kv_transfer_seconds_bucket{le=0.005,transport=nixl}": 1,
        "pdserve_kv_leases_open{}": 4,
        "pdserve_kv_lease_oldest_seconds{}": 2.5,
        "pdserve_kv_lease_tokens_held{age=0-1s}": 80,
        "pdserve_kv_lease_tokens_held{age=1-10s}": 1_000,
        "pdserve_kv_leases_total{end=fetched}": 9,
        "pdserve_kv_leases_total{end=lost}": 0,
        "pdserve_kv_reserved_tokens{}": 77,
        "pdserve_sequences_total{outcome=finished,role=decode}": 1,
        "pdserve_build_info{engine=sim,model=tiny,version=0.1.0,worker_id=worker-0}": 1,
    }
    assert {name: values.get(name) for name in expected} == expected
    assert values["process_resident_memory_bytes{}"] > 0


def test_a_scrape_must_carry_the_fleet_key() -> None:
    with metrics_server(Listen(), CollectorRegistry(), "key") as address:
        for headers in ({}, {"authorization": "Bearer other"}, {"authorization": "key"}):
            answer = httpx.get(f"http://{address}/metrics", headers=headers, trust_env=False)
            assert answer.status_code == 401
            assert answer.headers["www-authenticate"] == "Bearer"
        scrape(address, authorization="Bearer key")


def test_a_taken_port_is_told_in_one_line() -> None:
    with metrics_server(Listen(), CollectorRegistry(), None) as address:
        port = int(address.rpartition(":")[2])
        with (
            pytest.raises(ConfigError, match=f"127.0.0.1:{port}: Address already in use; choose"),
            metrics_server(Listen(port=port), CollectorRegistry(), None),
        ):
            pass


def test_a_worker_that_starts_again_gets_its_port_back_after_scrapes() -> None:
    with metrics_server(Listen(), CollectorRegistry(), None) as address:
        host, _, digits = address.rpartition(":")
        port = int(digits)
        # The side that closes first, here the server, keeps the port in TIME_WAIT.
        with socket.create_connection((host, port)) as scraper:
            scraper.sendall(b"GET /metrics HTTP/1.0\r\n\r\n")
            while scraper.recv(65_536):
                pass
    with metrics_server(Listen(port=port), CollectorRegistry(), None) as again:
        assert again == address
        scrape(again)

"""What operators are shown."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from pdserve.config import GatewayConfig
from pdserve.config_experiment import Arm, Experiment
from pdserve.errors import RejectedError
from pdserve.types import Load, Mode, Role
from tests.support.core import Core, running
from tests.support.fake_worker import MODEL, FakeWorker
from tests.support.virtual_time import on_virtual_time, settle


def prefill(**info: Any) -> FakeWorker:
    return FakeWorker("p", Role.PREFILL, **info)


def decode(**info: Any) -> FakeWorker:
    return FakeWorker("d", Role.DECODE, **info)


def samples(core: Core, name: str, *labels: str) -> dict[tuple[str, ...], float]:
    """By the values of the labels."""
    return {
        tuple(sample.labels[label] for label in labels): sample.value
        for family in text_string_to_metric_families(core.ops.metrics().decode())
        for sample in family.samples
        if sample.name == name
    }


@on_virtual_time
async def test_the_fleet_view_shows_workers_pairs_and_requests() -> None:
    worker = decode()
    async with running(prefill(), worker) as core:
        worker.report(Load(running=2, waiting=1, kv_usage=0.5, reserved_tokens=40))
        await settle()
        stream = await core.open()
        view = core.ops.fleet()
        assert view["ready"]
        assert view["routes"][MODEL]["disaggregated"] == {"ready": True, "detail": ""}
        assert view["requests"] == {
            MODEL: {
                "running": 1,
                "queued": 0,
                "queued_tokens": 0,
                "queued_by_priority": {"high": 0, "normal": 0, "low": 0},
                "unread_tokens": 0,
                "wait_s": 0.0,
            }
        }
        assert view["pairs"] == [
            {
                "prefill": "p",
                "decode": "d",
                "transport": "nixl",
                "state": "proven",
                "detail": "",
                "failures": 0,
                "next_probe_s": None,
            }
        ]
        assert view["workers"][1] == {
            "id": "d",
            "roles": ["decode"],
            "duty": "decode",
            "state": "loaded",
            "detail": "",
            "epoch": "1",
            "model": MODEL,
            "engine": "fake",
            "weights": "bfloat16",
            "running": 2,
            "waiting": 1,
            "kv_usage": 0.5,
            "open_leases": 0,
            "lease_tokens": 0,
            "oldest_lease_s": 0.0,
            "reserved_tokens": 40,
        }
        await stream.aclose()


@on_virtual_time
async def test_the_fleet_view_has_no_addresses() -> None:
    worker = decode()
    async with running(prefill(), worker) as core:
        worker.stop()
        await settle()
        assert "host-" not in str(core.ops.fleet())


@on_virtual_time
async def test_a_lost_worker_is_shown_without_the_load_it_once_had() -> None:
    worker = decode()
    async with running(worker) as core:
        worker.report(Load(running=2))
        await settle()
        worker.stop()
        await settle()
        (shown,) = core.ops.fleet()["workers"]
        assert (shown["state"], shown["running"]) == ("lost", 0)
        assert shown["detail"]


@on_virtual_time
async def test_looking_takes_nobody_s_turn() -> None:
    async with running(decode(), FakeWorker("d2", Role.DECODE)) as core:
        for _ in range(4):
            await core.ask()
            core.ops.ready()
        assert len({record.decode_worker for record in core.records}) == 2


@on_virtual_time
async def test_gauges_are_read_when_asked_for() -> None:
    async with running(prefill(), decode(), gateway=GatewayConfig(max_running=1)) as core:
        first = await core.open()
        queued = asyncio.create_task(core.open("hello", priority=1))
        await settle()
        assert samples(core, "pdserve_requests_running", "model") == {(MODEL,): 1}
        waiting = {(MODEL, "high"): 0, (MODEL, "normal"): 0, (MODEL, "low"): 1}
        assert samples(core, "pdserve_queue_depth", "model", "priority") == waiting
        waiting[MODEL, "low"] = len("hello")
        assert samples(core, "pdserve_queue_tokens", "model", "priority") == waiting
        assert samples(core, "pdserve_route_ready", "model", "mode") == {
            (MODEL, "colocated"): 1,
            (MODEL, "disaggregated"): 1,
        }
        states = samples(core, "pdserve_workers", "role", "state")
        assert {labels for labels, count in states.items() if count} == {
            ("prefill", "ready"),
            ("decode", "ready"),
        }
        assert samples(core, "pdserve_kv_pairs", "state", "transport") == {("proven", "nixl"): 1}
        assert samples(core, "pdserve_prefix_index_blocks", "worker") == {("p",): 0, ("d",): 0}
        await first.aclose()
        await (await queued).aclose()
        assert samples(core, "pdserve_requests_running", "model") == {(MODEL,): 0}


@on_virtual_time
async def test_no_label_takes_a_value_from_a_client() -> None:
    async with running(decode()) as core:
        secret = "made-up-by-the-client"
        with pytest.raises(RejectedError):
            await core.open(model=secret)
        await core.ask(session=secret, tenant=secret, cache_salt=secret)
        assert secret not in core.ops.metrics().decode()


@on_virtual_time
async def test_metrics_carry_the_arm() -> None:
    split = Experiment(
        name="split",
        model=MODEL,
        arms=(
            Arm(name="blue", mode=Mode.COLOCATED),
            Arm(name="green", mode=Mode.DISAGGREGATED, weight=0),
        ),
    )
    async with running(prefill(), decode(), experiments=(split,)) as core:
        answer = await core.ask()
        assert answer.route.arm == "blue"
        assert samples(core, "pdserve_requests_total", "mode", "arm", "outcome") == {
            ("colocated", "blue", "ok"): 1
        }

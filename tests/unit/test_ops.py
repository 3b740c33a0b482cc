"""Readiness by its rules, and what operators are shown."""

from __future__ import annotations

import asyncio
from asyncio import CancelledError
from contextlib import suppress
from typing import Any
from unittest import mock

import pytest
from prometheus_client.parser import text_string_to_metric_families

from coordinator.gateway.charge import Charge
from coordinator.gateway.ledger_store import LedgerError, Sums, TooManyEntriesError
from coordinator.ops import Ops, RouteStatus
from coordinator.policy.health import WorkerState
from pdserve.config import GatewayConfig
from pdserve.config_experiment import Arm, Experiment
from pdserve.errors import (
    DecodeError,
    ErrorReason,
    PdserveError,
    PrefillError,
    RejectedError,
)
from pdserve.types import Fallback, Load, Mode, Role, WorkerInfo
from tests.support.core import Core, running
from tests.support.fake_worker import MODEL, FakeWorker, Gate
from tests.support.virtual_time import on_virtual_time, settle

BROKEN = PrefillError(ErrorReason.PREFILL_FAILED, "broken")
READY = RouteStatus(True, "")
NO_DECODE = RouteStatus(False, "no proven decode worker")
NO_PAIR = RouteStatus(False, "no proven pair of workers")


def prefill(**info: Any) -> FakeWorker:
    return FakeWorker("p", Role.PREFILL, **info)


def decode(**info: Any) -> FakeWorker:
    return FakeWorker("d", Role.DECODE, **info)


class LateWorker(FakeWorker):
    """Says who it is when its gate is opened."""

    def __init__(self, worker_id: str, *roles: Role) -> None:
        super().__init__(worker_id, *roles)
        self.gate = Gate()

    async def info(self) -> WorkerInfo:
        await self.gate.passed()
        return await super().info()


def is_ready(core: Core) -> bool:
    return core.ops.ready()[0]


def samples(core: Core, name: str, *labels: str) -> dict[tuple[str, ...], float]:
    """By the values of the labels."""
    return {
        tuple(sample.labels[label] for label in labels): sample.value
        for family in text_string_to_metric_families(core.ops.metrics().decode())
        for sample in family.samples
        if sample.name == name
    }


# Which routes there are.


@on_virtual_time
async def test_a_fleet_without_prefill_workers_has_one_route() -> None:
    async with running(decode()) as core:
        assert core.ops.routes(MODEL) == {Mode.COLOCATED: READY}
        assert is_ready(core)


@on_virtual_time
async def test_a_prefill_worker_makes_a_second_route() -> None:
    async with running(prefill(), decode()) as core:
        assert core.ops.routes(MODEL) == {Mode.COLOCATED: READY, Mode.DISAGGREGATED: READY}
        assert is_ready(core)


@on_virtual_time
async def test_a_model_that_may_not_disaggregate_has_one_route() -> None:
    async with running(prefill(), decode(), mode_override=False) as core:
        assert core.ops.routes(MODEL) == {Mode.COLOCATED: READY}


@on_virtual_time
@pytest.mark.parametrize("mode", [Mode.DISAGGREGATED, Mode.AUTO])
async def test_a_mode_that_cannot_do_without_prefill_workers_waits_for_them(mode: Mode) -> None:
    async with running(decode(), mode=mode, fallback=Fallback.FAIL) as core:
        assert core.ops.routes(MODEL) == {Mode.COLOCATED: READY, Mode.DISAGGREGATED: NO_PAIR}
        assert not is_ready(core)


@on_virtual_time
async def test_a_mode_that_may_fall_back_does_without() -> None:
    async with running(decode(), mode=Mode.DISAGGREGATED) as core:
        assert core.ops.routes(MODEL) == {Mode.COLOCATED: READY}
        assert is_ready(core)


@on_virtual_time
async def test_a_prefill_worker_of_another_model_makes_no_route() -> None:
    async with running(prefill(model="other"), decode()) as core:
        assert core.ops.routes(MODEL) == {Mode.COLOCATED: READY}


# Becoming ready.


@on_virtual_time
async def test_a_coordinator_without_workers_is_not_ready() -> None:
    async with running() as core:
        assert core.ops.routes(MODEL) == {Mode.COLOCATED: NO_DECODE}
        assert not is_ready(core)


@on_virtual_time
async def test_a_worker_that_is_away_from_the_start_does_not_hold_up_the_others() -> None:
    away = FakeWorker("d2", Role.DECODE)
    away.stop()
    async with running(decode(), away) as core:
        assert is_ready(core)


@on_virtual_time
async def test_at_the_start_no_worker_may_be_untried() -> None:
    late = LateWorker("late", Role.DECODE)
    async with running(decode(), late) as core:
        assert not is_ready(core)
        late.gate.open()
        await settle()
        assert is_ready(core)


@on_virtual_time
async def test_a_worker_that_is_found_later_may_be_untried() -> None:
    async with running(decode()) as core:
        late = LateWorker("late", Role.DECODE)
        core.fleet.follow(["host-0", "late"], lambda _: late)
        await settle()
        assert not core.fleet.by_id("late")
        assert is_ready(core)


@on_virtual_time
async def test_one_that_is_to_end_is_not_ready_and_serves() -> None:
    async with running(decode()) as core:
        core.ops.stop()
        assert not is_ready(core)
        await core.ask()


@on_virtual_time
async def test_a_decode_worker_must_have_answered_a_probe() -> None:
    worker, gate = decode(), Gate()
    worker.starts.append([gate])
    async with running(worker) as core:
        assert not is_ready(core)
        gate.open()
        await settle()
        assert is_ready(core)


@on_virtual_time
async def test_a_route_that_never_worked_keeps_the_coordinator_waiting() -> None:
    worker = prefill()
    worker.prefills.append([BROKEN])
    async with running(worker, decode()) as core:
        assert core.ops.routes(MODEL)[Mode.DISAGGREGATED] == NO_PAIR
        assert not is_ready(core)


# Staying ready.


@on_virtual_time
async def test_a_route_that_requests_fall_back_from_may_be_away_later() -> None:
    worker = prefill()
    async with running(worker, decode(), mode=Mode.DISAGGREGATED) as core:
        worker.stop()
        await settle()
        assert core.ops.routes(MODEL)[Mode.DISAGGREGATED] == NO_PAIR
        assert is_ready(core)


@on_virtual_time
async def test_a_route_without_fallback_may_not_be_away() -> None:
    worker = prefill()
    async with running(worker, decode(), mode=Mode.DISAGGREGATED, fallback=Fallback.FAIL) as core:
        assert is_ready(core)
        worker.stop()
        await settle()
        assert not is_ready(core)


@on_virtual_time
async def test_a_route_that_only_some_requests_ask_for_may_be_away_later() -> None:
    worker = prefill()
    async with running(worker, decode(), fallback=Fallback.FAIL) as core:
        worker.stop()
        await settle()
        assert is_ready(core)


@on_virtual_time
async def test_without_a_decode_worker_nothing_is_ready() -> None:
    worker = decode()
    async with running(prefill(), worker) as core:
        assert is_ready(core)
        worker.stop()
        await settle()
        assert core.ops.routes(MODEL)[Mode.COLOCATED] == NO_DECODE
        assert not is_ready(core)


@on_virtual_time
async def test_a_worker_that_drains_carries_no_route() -> None:
    worker = decode()
    async with running(worker) as core:
        worker.report(Load(draining=True))
        await settle()
        assert not is_ready(core)


@pytest.mark.parametrize("cause", [DecodeError(ErrorReason.INTERNAL, "no"), CancelledError()])
@on_virtual_time
async def test_a_worker_that_did_not_take_the_order_to_drain_goes_on(cause: BaseException) -> None:
    worker = decode()
    async with running(worker) as core:
        with mock.patch.object(worker, "drain", side_effect=cause), suppress(type(cause)):
            await core.ops.drain("d", 30)
        assert core.worker("d").state is WorkerState.READY


# What is shown.


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


@on_virtual_time
async def test_a_request_is_found_by_how_its_id_begins() -> None:
    async with running(decode()) as core:
        await core.ask()
        assert core.ops.request("r")["request_id"] == "r1"
        await core.ask()
        with pytest.raises(RejectedError, match=r"'r' may be any of 2 requests.*r2") as refused:
            core.ops.request("r")
        assert refused.value.reason is ErrorReason.INVALID_ARGUMENT
        with pytest.raises(RejectedError, match="no request 'x' is remembered") as refused:
            core.ops.request("x")
        assert refused.value.reason is ErrorReason.NOT_FOUND


class Unreadable:
    """A ledger that cannot be read, for a reason."""

    currency = "USD"

    def __init__(self, why: Exception) -> None:
        self._why = why

    async def entries(self, since_us: int, until_us: int) -> list[Charge]:
        raise self._why

    async def sums(self, by: str, since_us: int, until_us: int) -> list[Sums]:
        raise self._why


@pytest.mark.parametrize("by", ["tenant", "request"])
@pytest.mark.parametrize(
    ("why", "reason", "words"),
    [
        (TooManyEntriesError("ask for less"), ErrorReason.INVALID_ARGUMENT, "ask for less"),
        (LedgerError("no such host"), ErrorReason.LEDGER_UNAVAILABLE, "cannot be read now"),
        (OSError("read-only"), ErrorReason.LEDGER_UNAVAILABLE, "cannot be read now"),
    ],
)
@on_virtual_time
async def test_a_ledger_that_cannot_be_read_says_what_its_reader_can_do(
    by: str, why: Exception, reason: ErrorReason, words: str
) -> None:
    async with running(decode()) as core:
        ops = Ops(
            core.models, core.fleet, core.gateway, core.metrics, core.timelines, core.experiments,
            ledger=Unreadable(why),  # type: ignore[arg-type]
        )  # fmt: skip
        with pytest.raises(PdserveError, match=words) as refused:
            await ops.usage(by, 0, 1)
        assert refused.value.reason is reason
        assert reason.value.http < 500 or refused.value.retry_after_s == 10.0

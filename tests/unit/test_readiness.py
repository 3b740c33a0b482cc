"""Readiness by its rules: which routes there are, and which of them must be there."""

from __future__ import annotations

from asyncio import CancelledError
from contextlib import suppress
from typing import Any
from unittest import mock

import pytest

from coordinator.ops import RouteStatus
from coordinator.policy.health import WorkerState
from pdserve.errors import DecodeError, ErrorReason, PrefillError
from pdserve.types import Fallback, Load, Mode, Role, WorkerInfo
from tests.support.core import Core, running
from tests.support.fake_script import Gate
from tests.support.fake_worker import MODEL, FakeWorker
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

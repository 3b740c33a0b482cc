"""What a worker counts, and who is told of it."""

from __future__ import annotations

import asyncio
import contextlib

import pytest

from pdserve.clock import RealClock
from pdserve.engine.base import EngineLoad, StepStats
from pdserve.errors import DecodeError, ErrorReason
from pdserve.room import Room
from pdserve.types import EngineWork, LeaseSnapshot, Load, Role
from pdserve.worker_service import drain
from pdserve.workload import Workload
from tests.support.virtual_time import on_virtual_time, settle

INTERVAL_S = 0.1
HEARTBEAT_S = 2.0


def workload() -> tuple[Workload, list[tuple[Role, str]]]:
    outcomes: list[tuple[Role, str]] = []
    return Workload(lambda role, outcome: outcomes.append((role, outcome))), outcomes


@pytest.mark.parametrize(
    ("error", "outcome"),
    [
        (None, "finished"),
        (DecodeError(ErrorReason.KV_REUSED, ""), "kv_reused"),
        (asyncio.CancelledError(), "cancelled"),
        (GeneratorExit(), "cancelled"),
        (KeyError(), "internal"),
    ],
)
def test_a_sequence_ends_as_its_context_does(error: BaseException | None, outcome: str) -> None:
    load, outcomes = workload()
    with contextlib.suppress(BaseException), load.sequence(Role.DECODE):
        assert load.unfinished == 1
        if error is not None:
            raise error
    assert load.unfinished == 0
    assert outcomes == [(Role.DECODE, outcome)]


def test_a_draining_worker_refuses() -> None:
    load, _ = workload()
    load.require_open()
    load.start_drain()
    with pytest.raises(DecodeError) as caught:
        load.require_open()
    assert caught.value.reason is ErrorReason.DRAINING


@on_virtual_time
async def test_a_watch_gives_changes_at_most_every_interval_and_a_heartbeat_without_any() -> None:
    load, _ = workload()
    loop = asyncio.get_running_loop()
    begun = loop.time()
    seen: list[tuple[float, Load]] = []

    async def watch() -> None:
        async for value in load.watch(RealClock(), INTERVAL_S, HEARTBEAT_S):
            seen.append((round(loop.time() - begun, 3), value))

    watching = asyncio.create_task(watch())
    await settle()
    for running in range(10):
        load.step(StepStats(EngineLoad(running=running)))
        await asyncio.sleep(0.015)
    load.step(StepStats(EngineLoad(running=9)))
    await asyncio.sleep(4.85)
    load.show_leases(lambda: LeaseSnapshot(open=3, oldest_s=0.5, tokens_by_age={"0-1s": 70}))
    load.leases_changed()
    await settle()
    load.close()
    await watching

    times, values = zip(*seen, strict=True)
    assert times == (0.0, 0.1, 0.2, 2.2, 4.2, 5.0)
    assert [value.running for value in values] == [0, 6, 9, 9, 9, 9]
    assert values[-1] == Load(running=9, open_leases=3, lease_tokens=70, oldest_lease_s=0.5)


def test_the_work_of_steps_adds_up_and_is_no_news() -> None:
    load, _ = workload()
    before = load.load
    load.step(StepStats(EngineLoad(), work=EngineWork(1, 0.5, 20, 200, 3, 0.25)))
    load.step(StepStats(EngineLoad(), work=EngineWork(1, 0.25, 0, 0, 4, 0.5)))
    assert load.load.work == EngineWork(2, 0.75, 20, 200, 7, 0.75)
    assert load.load == before


def test_what_waits_for_room_counts_as_waiting_for_the_engine() -> None:
    load, _ = workload()
    load.room = Room(lambda: 100)
    assert load.room.hold("held", 60)
    assert load.room.commit("waits", 50, lambda: None)
    load.step(StepStats(EngineLoad(waiting=2)))
    assert load.load.waiting == 3


@on_virtual_time
async def test_a_drain_waits_for_sequences_leases_and_promised_room() -> None:
    load, _ = workload()
    load.show_leases(lambda: LeaseSnapshot(open=1))
    load.set_reserved_tokens(10)
    with load.sequence(Role.PREFILL):
        draining = asyncio.create_task(drain(load, 100))
        await settle()
    assert load.load.draining
    await settle()
    assert not draining.done()
    load.show_leases(LeaseSnapshot)
    load.leases_changed()
    await settle()
    assert not draining.done()
    load.set_reserved_tokens(0)
    await draining


@on_virtual_time
async def test_a_drain_ends_at_its_deadline() -> None:
    load, _ = workload()
    load.show_leases(lambda: LeaseSnapshot(open=1))
    begun = asyncio.get_running_loop().time()
    await drain(load, 7)
    assert asyncio.get_running_loop().time() - begun == pytest.approx(7)
    assert load.unfinished == 1

"""Requests that end before their time, at every point where they wait: nothing stays held."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable

import pytest

from coordinator.lifecycle import State
from coordinator.response import ResponseStream
from pdserve.config import GatewayConfig
from pdserve.errors import ErrorReason, PdserveError, PrefillError
from pdserve.types import Mode, Role
from tests.support.core import Core, assert_idle, running
from tests.support.fake_script import Gate, first_delta
from tests.support.fake_worker import FakeWorker
from tests.support.virtual_time import on_virtual_time, settle

DEADLINE_S = 5.0
ONE_AT_A_TIME = GatewayConfig(max_running=1)


class Held:
    """A coordinator with one request that has come to a certain point and stays there."""

    def __init__(self, core: Core, reader: FakeWorker, writer: FakeWorker) -> None:
        self.core = core
        self.reader = reader
        self.writer = writer
        self.gate = Gate()
        self.occupant: ResponseStream | None = None

    async def queued(self) -> None:
        self.occupant = await self.core.open()
        self.gate.reached.set()

    async def tokenising(self) -> None:
        self.core.encoder.gates.append(self.gate)

    async def reserving(self) -> None:
        self.writer.reservations.append([self.gate])

    async def reading(self) -> None:
        self.reader.prefills.append([self.gate])

    async def writing(self) -> None:
        self.writer.starts.append([self.gate])

    async def streaming(self) -> None:
        self.writer.starts.append([first_delta(), self.gate])

    async def leave(self) -> None:
        if self.occupant is not None:
            await self.occupant.aclose()


POINTS: dict[str, tuple[Callable[[Held], Awaitable[None]], Mode]] = {
    "queued": (Held.queued, Mode.COLOCATED),
    "tokenising": (Held.tokenising, Mode.COLOCATED),
    "reserving": (Held.reserving, Mode.DISAGGREGATED),
    "in prefill": (Held.reading, Mode.DISAGGREGATED),
    "before the first token": (Held.writing, Mode.COLOCATED),
    "before the first token, handed over": (Held.writing, Mode.DISAGGREGATED),
    "in the stream": (Held.streaming, Mode.COLOCATED),
    "in the stream, handed over": (Held.streaming, Mode.DISAGGREGATED),
}


def at_every_point(test: Callable[..., None]) -> Callable[..., None]:
    """On the way by either transport: over gRPC, decoding starts before the prefill is done."""
    by_transport = pytest.mark.parametrize("transport", ["nixl", "grpc"])
    return pytest.mark.parametrize("point", POINTS)(by_transport(test))


def workers(transport: str = "nixl") -> tuple[FakeWorker, FakeWorker]:
    offered = (transport,)
    return (
        FakeWorker("p", Role.PREFILL, transports=offered),
        FakeWorker("d", Role.DECODE, transports=offered),
    )


@at_every_point
@on_virtual_time
async def test_a_client_that_leaves_leaves_nothing_behind(point: str, transport: str) -> None:
    hold, mode = POINTS[point]
    both = workers(transport)
    async with running(*both, gateway=ONE_AT_A_TIME) as core:
        held = Held(core, *both)
        await hold(held)
        asking = asyncio.create_task(core.ask(mode=mode))
        await held.gate.reached.wait()
        await settle()
        asking.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asking
        record = core.record
        assert record.state is State.CANCELLED
        assert [e["outcome"] for e in core.access if e["request_id"] == record.request_id] == [
            "cancelled"
        ]
        await held.leave()
        await settle()
        assert_idle(core)
        await core.ask(mode=mode)  # the place is free again


@at_every_point
@on_virtual_time
async def test_a_deadline_leaves_nothing_behind(point: str, transport: str) -> None:
    hold, mode = POINTS[point]
    both = workers(transport)
    async with running(*both, gateway=ONE_AT_A_TIME) as core:
        held = Held(core, *both)
        await hold(held)
        began = time.monotonic()
        with pytest.raises(PdserveError) as failure:
            await core.ask(mode=mode, deadline=began + DEADLINE_S)
        assert failure.value.reason is ErrorReason.DEADLINE_EXCEEDED
        assert time.monotonic() == pytest.approx(began + DEADLINE_S)
        record = core.record
        assert record.state is State.FAILED
        assert [e["outcome"] for e in core.access if e["request_id"] == record.request_id] == [
            "deadline_exceeded"
        ]
        await held.leave()
        await settle()
        assert_idle(core)
        await core.ask(mode=mode)


@at_every_point
@on_virtual_time
async def test_a_deadline_that_is_kept_changes_nothing(point: str, transport: str) -> None:
    hold, mode = POINTS[point]
    both = workers(transport)
    async with running(*both, gateway=ONE_AT_A_TIME) as core:
        held = Held(core, *both)
        await hold(held)
        asking = asyncio.create_task(core.ask(mode=mode, deadline=time.monotonic() + DEADLINE_S))
        await held.gate.reached.wait()
        await asyncio.sleep(DEADLINE_S - 1)
        held.gate.open()
        await held.leave()
        await asking
        await asyncio.sleep(2 * DEADLINE_S)
        assert core.record.state is State.FINISHED


@on_virtual_time
async def test_a_deadline_bounds_the_whole_ladder() -> None:
    reader, writer = workers()
    async with running(reader, writer) as core:
        failing = PrefillError(ErrorReason.PREFILL_FAILED, "broken")
        reader.prefills.append([3.0, failing])
        writer.starts.append([3.0])
        began = time.monotonic()
        with pytest.raises(PdserveError) as failure:
            await core.ask(mode=Mode.DISAGGREGATED, deadline=began + DEADLINE_S)
        assert failure.value.reason is ErrorReason.DEADLINE_EXCEEDED


@on_virtual_time
async def test_a_deadline_frees_the_workers_whether_or_not_somebody_reads() -> None:
    _, writer = workers()
    gate = Gate()
    async with running(writer) as core:
        writer.starts.append([first_delta("a"), first_delta("b"), gate])
        stream = await core.open(deadline=time.monotonic() + DEADLINE_S)
        await asyncio.sleep(DEADLINE_S)
        await settle()
        assert not writer.sequences
        assert [(await anext(stream)).text for _ in range(2)] == ["a", "b"]
        with pytest.raises(PdserveError) as failure:
            await anext(stream)
        assert failure.value.reason is ErrorReason.DEADLINE_EXCEEDED
        await stream.aclose()


@on_virtual_time
async def test_an_answer_that_is_complete_is_no_longer_late() -> None:
    _, writer = workers()
    async with running(writer) as core:
        stream = await core.open(deadline=time.monotonic() + DEADLINE_S)
        await asyncio.sleep(2 * DEADLINE_S)
        assert [delta async for delta in stream][-1].finish_reason is not None
        await stream.aclose()
        assert core.record.state is State.FINISHED


EVERY_WAY = [
    (Mode.COLOCATED, "nixl"),
    (Mode.DISAGGREGATED, "nixl"),
    (Mode.DISAGGREGATED, "grpc"),
]


@pytest.mark.parametrize(("mode", "transport"), EVERY_WAY)
@on_virtual_time
async def test_a_client_may_leave_in_any_turn_of_the_event_loop(mode: Mode, transport: str) -> None:
    """Cancelled after one step of its life more each time, until it gets to its end."""
    async with running(*workers(transport)) as core:
        steps, ended = 0, False
        while not ended:
            asking = asyncio.create_task(core.ask(mode=mode))
            for _ in range(steps):
                await asyncio.sleep(0)
            ended = asking.done()
            asking.cancel()
            await asyncio.wait([asking])
            await settle()
            assert_idle(core)
            steps += 1
        assert steps > 5
        assert core.record.state is State.FINISHED


@pytest.mark.parametrize(("mode", "transport"), EVERY_WAY)
@pytest.mark.parametrize("victim", [0, 1], ids=["prefill", "decode"])
@on_virtual_time
async def test_a_worker_may_die_in_any_turn_of_the_event_loop(
    mode: Mode, transport: str, victim: int
) -> None:
    steps, ended = 0, False
    while not ended:
        both = workers(transport)
        async with running(*both) as core:
            asking = asyncio.create_task(core.ask(mode=mode))
            for _ in range(steps):
                await asyncio.sleep(0)
            ended = asking.done()
            both[victim].stop()
            await asyncio.wait([asking])
            error = asking.exception()
            assert error is None or isinstance(error, PdserveError)
            if victim == 0:
                assert error is None, "the decode worker could have served alone"
        steps += 1
    assert steps > 5

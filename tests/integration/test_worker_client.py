"""How the coordinator speaks to a worker: over real gRPC, to a worker on a simulated engine."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
import pytest_asyncio

from coordinator.worker_client import GrpcSession, GrpcWorkerClient, PrefillCall
from pdserve.channel import channel
from pdserve.config import SimConfig
from pdserve.errors import DecodeError, ErrorReason, PrefillError
from pdserve.types import Delta, EngineRequest, FinishReason, Role, SamplingParams
from pdserve.v1 import prefill_pb2
from pdserve.v1.prefill_pb2_grpc import (
    PrefillServiceServicer,
    add_PrefillServiceServicer_to_server,
)
from tests.support.grpc_servers import serve
from tests.support.patience import WITHIN_S, within
from tests.support.sim_fleet import FAST, SimFleetWorker

SLOW = SimConfig(prefill_token_s=0.001, decode_step_s=0.01, chunk_tokens=16)
ROOM = FAST.kv_capacity_tokens


def request(num_tokens: int = 80, max_tokens: int = 5) -> EngineRequest:
    sampling = SamplingParams(max_tokens=max_tokens, temperature=0, ignore_eos=True)
    return EngineRequest("r1", tuple(range(1, num_tokens + 1)), sampling)


@asynccontextmanager
async def started(sim: SimConfig = FAST) -> AsyncIterator[tuple[SimFleetWorker, GrpcWorkerClient]]:
    """A worker of both roles, and a client of it; in the end nothing may be held."""
    worker = await SimFleetWorker("w", Role.PREFILL, Role.DECODE, sim=sim).start()
    client = GrpcWorkerClient(channel(worker.address), None)
    try:
        yield worker, client
        async with asyncio.timeout(WITHIN_S):
            await worker.until_idle()
    finally:
        await client.close()
        await worker.kill()


@asynccontextmanager
async def session(client: GrpcWorkerClient) -> AsyncIterator[GrpcSession]:
    opened = client.open_session()
    running = asyncio.create_task(opened.run())
    try:
        yield opened
    finally:
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)


@pytest_asyncio.fixture
async def client() -> AsyncIterator[GrpcWorkerClient]:
    async with started() as (_, client):
        yield client


async def whole(opened: GrpcSession, asked: EngineRequest, kv: Any = None) -> list[Delta]:
    sequence = opened.open()
    opened.start(sequence, asked, kv)
    deltas = [await sequence.next()]
    while deltas[-1].finish_reason is None:
        deltas.append(await sequence.next())
    return deltas


def tokens(deltas: list[Delta]) -> list[int]:
    """However they were merged on the way."""
    return [token for delta in deltas for token in delta.token_ids]


async def test_a_worker_says_who_it_is_and_how_busy(client: GrpcWorkerClient) -> None:
    info = await client.info()
    assert (info.worker_id, info.roles) == ("w", frozenset(Role))
    load = await anext(aiter(client.watch_load()))
    assert not load.draining


@asynccontextmanager
async def prefill(
    client: GrpcWorkerClient, asked: EngineRequest, transport: str = "nixl"
) -> AsyncIterator[PrefillCall]:
    call = client.prefill(asked, transport)
    try:
        yield call
    finally:
        call.end()


async def refusal_of(call: PrefillCall) -> ErrorReason:
    with pytest.raises(PrefillError) as failure:
        await call.admitted()
        await call.finished()
    return failure.value.reason


@pytest.mark.parametrize("transport", ["nixl", "grpc"])
async def test_a_prompt_is_read_and_handed_over(client: GrpcWorkerClient, transport: str) -> None:
    async with session(client) as opened:
        alone = await whole(opened, request())
        async with prefill(client, request(), transport) as call:
            early = await call.admitted()
            result = await call.finished()
            assert early == (result.handle if transport == "grpc" else None)
            assert result.handle.num_tokens == 80
            handed_over = await whole(opened, request(), result.handle)
        assert tokens(handed_over) == tokens(alone)
        assert handed_over[0].timings is not None
        assert handed_over[-1].finish_reason is FinishReason.LENGTH


async def test_over_grpc_a_sequence_may_begin_before_its_prompt_is_read() -> None:
    async with started(SLOW) as (_, client), session(client) as opened:
        alone = await whole(opened, request())
        async with prefill(client, request(), "grpc") as call:
            early = await call.admitted()
            sequence = opened.open()
            opened.start(sequence, request(), early)
            first = await sequence.next()
            await call.finished()
            assert first.token_ids[0] == tokens(alone)[0]
            opened.abort(sequence)


async def test_a_lease_ends_with_its_call() -> None:
    async with started() as (worker, client):
        call = client.prefill(request(), "nixl")
        await call.admitted()
        await call.finished()
        assert worker.workload.load.open_leases == 1
        for _ in range(2):
            call.end()
        await worker.until_idle()


async def test_a_call_may_end_in_any_turn_of_the_event_loop() -> None:
    """Also while its events are on their way, or there and not read."""
    async with started() as (worker, client):
        for steps in range(30):
            call = client.prefill(request(), "nixl")

            async def read(call: PrefillCall = call) -> None:
                await call.admitted()
                await call.finished()

            reading = asyncio.create_task(read())
            for _ in range(steps):
                await asyncio.sleep(0)
            if steps % 2:
                time.sleep(0.005)  # noqa: ASYNC251  (the answer arrives, but is not read)
            reading.cancel()
            await asyncio.wait([reading])
            call.end()
            async with within(1):
                await worker.until_idle()


async def test_a_prefill_that_is_cancelled_stops_the_work() -> None:
    async with started(SLOW) as (worker, client):
        call = client.prefill(request(5000), "nixl")
        await call.admitted()
        reading = asyncio.create_task(call.finished())
        await worker.until(lambda load: load.running > 0)
        reading.cancel()
        with pytest.raises(asyncio.CancelledError):
            await reading
        async with within(1):
            await worker.until_idle()


async def test_what_a_prefill_worker_refuses_keeps_its_reason(client: GrpcWorkerClient) -> None:
    call = client.prefill(request(FAST.context_length), "nixl")
    assert await refusal_of(call) is ErrorReason.CONTEXT_LENGTH_EXCEEDED


async def test_room_is_granted_or_refused_with_a_reason(client: GrpcWorkerClient) -> None:
    async with session(client) as opened:
        sequences = [opened.open() for _ in range(ROOM // FAST.context_length + 1)]
        for sequence in sequences:
            opened.reserve(sequence, FAST.context_length)
        *granted, refused = sequences
        for sequence in granted:
            await sequence.reserved()
        with pytest.raises(DecodeError) as refusal:
            await refused.reserved()
        assert refusal.value.reason is ErrorReason.NO_ROOM
        opened.abort(granted[0])
        again = opened.open()
        opened.reserve(again, FAST.context_length)
        await again.reserved()


async def test_an_aborted_sequence_stops_the_work_and_says_no_more() -> None:
    async with started(SLOW) as (worker, client), session(client) as opened:
        sequence = opened.open()
        opened.start(sequence, request(max_tokens=500), None)
        await sequence.next()
        for _ in range(2):
            opened.abort(sequence)
        async with within(1):
            await worker.until_idle()
        await whole(opened, request())


async def test_a_session_that_ends_frees_the_worker() -> None:
    async with started(SLOW) as (worker, client):
        async with session(client) as opened:
            sequence = opened.open()
            opened.start(sequence, request(max_tokens=500), None)
            await sequence.next()
        async with within(1):
            await worker.until_idle()


# A worker that is lost.


async def test_a_lost_worker_fails_every_sequence_with_an_error_of_its_own() -> None:
    async with started(SLOW) as (worker, client):
        opened = client.open_session()
        running = asyncio.create_task(opened.run())
        sequences = [opened.open() for _ in range(2)]
        for sequence in sequences:
            opened.start(sequence, request(max_tokens=500), None)
            await sequence.next()
        await worker.kill()
        with pytest.raises(DecodeError) as lost:
            await running
        assert lost.value.reason is ErrorReason.DECODE_FAILED
        failures = []
        for sequence in sequences:
            with pytest.raises(DecodeError) as failure:
                while True:
                    await sequence.next()
            failures.append(failure.value)
        assert failures[0] is not failures[1]


async def test_a_sequence_of_a_session_that_has_ended_fails_at_once() -> None:
    """A request may have got hold of the session a moment before the fleet lets go of it."""
    async with started() as (worker, client):
        opened = client.open_session()
        running = asyncio.create_task(opened.run())
        await whole(opened, request())
        await worker.kill()
        await asyncio.wait([running])
        assert running.exception() is not None
        sequence = opened.open()
        opened.start(sequence, request(), None)
        with pytest.raises(DecodeError):
            await sequence.next()
        opened.abort(sequence)


async def test_a_lost_worker_ends_its_load_reports() -> None:
    async with started() as (worker, client):
        loads = aiter(client.watch_load())
        await anext(loads)
        await worker.kill()
        with pytest.raises(DecodeError) as lost:
            while True:
                await anext(loads)
        assert lost.value.reason is ErrorReason.DECODE_FAILED


async def test_a_lost_worker_fails_its_prefills() -> None:
    async with started(SLOW) as (worker, client):
        failing = asyncio.create_task(refusal_of(client.prefill(request(5000), "nixl")))
        await worker.until(lambda load: load.running > 0)
        await worker.kill()
        assert await failing is ErrorReason.PREFILL_FAILED


async def test_a_worker_that_is_gone_is_told() -> None:
    async with started() as (worker, client):
        await client.info()
        await worker.kill()
        assert await refusal_of(client.prefill(request(), "nixl")) is ErrorReason.PREFILL_FAILED
        with pytest.raises(DecodeError) as lost:
            await client.info()
        assert worker.address not in lost.value.message


# A worker of another version.


class StrangePrefillService(PrefillServiceServicer):
    """Sends what this version does not know."""

    def __init__(self, *responses: prefill_pb2.PrefillResponse) -> None:
        self._responses = responses

    async def Prefill(self, request: Any, context: Any) -> AsyncIterator[Any]:
        for response in self._responses:
            yield response


ADMITTED = prefill_pb2.PrefillResponse(admitted=prefill_pb2.PrefillAdmitted())


@pytest.mark.parametrize(
    ("responses", "reason"),
    [
        ([], ErrorReason.PREFILL_FAILED),
        ([prefill_pb2.PrefillResponse()], ErrorReason.PREFILL_FAILED),
        ([ADMITTED], ErrorReason.PREFILL_FAILED),
        ([ADMITTED, ADMITTED], ErrorReason.PREFILL_FAILED),
        (
            [ADMITTED, prefill_pb2.PrefillResponse(finished=prefill_pb2.PrefillFinished())],
            ErrorReason.KV_INCOMPATIBLE,
        ),
    ],
    ids=["nothing", "no event", "no end", "no handle", "a handle without a known transport"],
)
async def test_what_a_prefill_worker_says_is_not_trusted(
    responses: list[prefill_pb2.PrefillResponse], reason: ErrorReason
) -> None:
    service = StrangePrefillService(*responses)
    descriptor = prefill_pb2.DESCRIPTOR
    async with serve((add_PrefillServiceServicer_to_server, service, descriptor)) as server:
        client = GrpcWorkerClient(channel(server.address), None)
        assert await refusal_of(client.prefill(request(), "nixl")) is reason
        await client.close()

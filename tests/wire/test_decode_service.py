"""DecodeService over real sockets, on a simulated engine."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from dataclasses import replace

import grpc
import pytest

from pdserve import convert
from pdserve.config import SimConfig
from pdserve.errors import ErrorReason
from pdserve.rpc_errors import from_rpc_error
from pdserve.types import EngineRequest, FinishReason, Role, Usage
from pdserve.v1 import decode_pb2
from tests.support.gates import GatedEngine
from tests.support.sim_worker import (
    FAST,
    REVISION,
    SessionClient,
    SimWorker,
    prefill,
    request,
    sim_worker,
)

LONG = 4_000
"""Tokens of an answer that is still running when a test ends it."""


@pytest.fixture
async def worker() -> AsyncIterator[SimWorker]:
    async with sim_worker() as running:
        yield running


@pytest.fixture
def session(worker: SimWorker) -> SessionClient:
    return SessionClient(worker.channel)


async def reason_of(session: SessionClient) -> ErrorReason:
    """Why the stream as a whole was ended by the worker."""
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        while await session.read():
            pass
    return from_rpc_error(caught.value, ErrorReason.DECODE_FAILED).reason


async def test_a_sequence_ends_once_with_its_usage(session: SessionClient) -> None:
    answer = await session.run(request(max_tokens=5))

    assert len(answer.token_ids) == 5
    assert answer.steps[0].timings is not None
    assert all(delta.timings is None for delta in answer.steps[1:])
    assert answer.steps[-1].finish_reason is FinishReason.LENGTH
    assert answer.steps[-1].usage == Usage(80, 5, 0)
    assert all(delta.usage is None for delta in answer.steps[:-1])


async def test_one_message_carries_the_tokens_of_all_sequences_of_a_step() -> None:
    sim = FAST.model_copy(update={"decode_step_s": 0.005, "chunk_tokens": 64 * 80})
    engine = GatedEngine(sim, REVISION, {})
    engine.gates.steps.close()
    async with sim_worker(engine=engine) as worker:
        session = SessionClient(worker.channel)
        for sequence_id in range(1, 65):
            await session.start(sequence_id, request(max_tokens=40))
        assert await session.reserve(65, 32) is None  # asked for, and so answered, after these
        engine.gates.steps.open()
        for sequence_id in range(1, 65):
            assert len((await session.answer(sequence_id)).token_ids) == 40

        # The first may have a step of its own, and so may the last: between them all run.
        steps = [
            {delta.sequence_id for delta in message.deltas} | set(message.tokens.sequence_ids)
            for message in session.messages
        ]
        began = [min(n for n, s in enumerate(steps) if i in s) for i in range(1, 65)]
        ended = [max(n for n, s in enumerate(steps) if i in s) for i in range(1, 65)]
        assert max(began) < min(ended)
        assert all(len(s) == 64 for s in steps[max(began) : min(ended) + 1])
        await session.abort(65)


async def test_handed_over_kv_gives_the_answer_of_a_colocated_run(
    worker: SimWorker, session: SessionClient
) -> None:
    alone = await session.run(request())
    async with sim_worker() as other:
        claim = await prefill(other, request())
        answer = await session.run(request(), claim.handle)

    assert answer.failure is None
    assert answer.token_ids == alone.token_ids
    assert answer.text == alone.text
    assert answer.steps[-1].usage == Usage(80, 8, cached_tokens=0)


async def test_a_refused_handle_ends_its_own_sequence_alone(
    worker: SimWorker, session: SessionClient
) -> None:
    handle = replace((await prefill(worker, request())).handle, epoch="")
    await session.start(1, request(max_tokens=300))
    await session.start(2, request(), handle)
    assert (await session.answer(2)).failure is not None
    assert len((await session.answer(1)).token_ids) == 300


async def test_an_empty_command_ends_the_stream(session: SessionClient) -> None:
    await session.call.write(decode_pb2.SessionRequest())
    assert await reason_of(session) is ErrorReason.INVALID_ARGUMENT


async def test_an_aborted_sequence_frees_everything(
    worker: SimWorker, session: SessionClient
) -> None:
    await session.start(1, request(max_tokens=LONG))
    await session.read()
    await session.abort(1)
    await session.abort(99)
    await worker.workload.ended()

    assert worker.engine.load.running == 0
    assert worker.workload.load.reserved_tokens == 0
    assert worker.outcomes == [(Role.DECODE, "cancelled")]
    assert (await session.run(request())).failure is None


async def test_a_broken_stream_drops_sequences_and_reservations(
    worker: SimWorker, session: SessionClient
) -> None:
    for sequence_id in range(1, 9):
        await session.start(sequence_id, request(max_tokens=LONG))
    assert await session.reserve(9, 500) is None
    session.call.cancel()
    await worker.workload.ended()

    assert worker.engine.load.running == worker.engine.load.waiting == 0
    assert worker.engine.load.kv_usage == 0
    assert worker.workload.load.reserved_tokens == 0
    assert worker.outcomes == [(Role.DECODE, "cancelled")] * 8


async def test_a_call_that_is_cancelled_twice_still_gives_everything_back(
    worker: SimWorker,
) -> None:
    """As happens where a client leaves while the server stops."""

    async def commands() -> AsyncIterator[decode_pb2.SessionRequest]:
        reserve = decode_pb2.ReserveSequence(sequence_id=1, num_tokens=500)
        yield decode_pb2.SessionRequest(reserve=reserve)
        start = convert.start_to_proto(2, request(max_tokens=LONG), None)
        yield decode_pb2.SessionRequest(start=start)
        await asyncio.Event().wait()

    running = asyncio.Event()

    async def serve_call() -> None:
        async for message in worker.decode.Session(commands(), None):  # type: ignore[arg-type]
            if message.tokens.sequence_ids:
                running.set()

    call = asyncio.create_task(serve_call())
    await running.wait()
    for _ in range(2):
        call.cancel()
        await asyncio.sleep(0)
    await asyncio.wait({call})
    await worker.workload.ended()
    assert worker.engine.load.kv_usage == 0


async def test_a_half_closed_stream_finishes_what_runs_and_ends(session: SessionClient) -> None:
    await session.start(1, request(max_tokens=20))
    await session.call.done_writing()
    while await session.read():
        pass
    assert len(session.answers[1].token_ids) == 20
    assert await session.call.code() is grpc.StatusCode.OK


async def test_room_is_promised_only_where_there_is_room() -> None:
    async with sim_worker(FAST.model_copy(update={"kv_capacity_tokens": 1_000})) as worker:
        session = SessionClient(worker.channel)
        assert await session.reserve(1, 600) is None
        assert worker.workload.load.reserved_tokens == 608  # nineteen whole blocks of 32
        refused = await session.reserve(2, 600)
        assert refused is not None
        assert refused.reason is ErrorReason.NO_ROOM
        await session.abort(1)
        assert await session.reserve(3, 600) is None


async def test_a_colocated_sequence_waits_for_room_but_not_for_ever() -> None:
    async with sim_worker(FAST.model_copy(update={"kv_capacity_tokens": 200})) as worker:
        session = SessionClient(worker.channel)
        for sequence_id in (1, 2, 3):
            await session.start(sequence_id, request(max_tokens=100))
        for sequence_id in (1, 2, 3):
            assert len((await session.answer(sequence_id)).token_ids) == 100
        await session.start(4, request(max_tokens=121))
        failure = (await session.answer(4)).failure
        assert failure is not None
        assert failure.reason is ErrorReason.NO_ROOM


@pytest.mark.parametrize(
    ("asked", "reason"),
    [
        (request(max_tokens=9_000), ErrorReason.CONTEXT_LENGTH_EXCEEDED),
        (request(prompt=()), ErrorReason.INVALID_ARGUMENT),
        (request(max_tokens=0), ErrorReason.INVALID_ARGUMENT),
    ],
)
async def test_an_impossible_sequence_is_refused(
    session: SessionClient, asked: EngineRequest, reason: ErrorReason
) -> None:
    failure = (await session.run(asked)).failure
    assert failure is not None
    assert failure.reason is reason


async def test_an_over_long_reservation_is_refused(session: SessionClient) -> None:
    failure = await session.reserve(1, 9_000)
    assert failure is not None
    assert failure.reason is ErrorReason.CONTEXT_LENGTH_EXCEEDED


async def test_a_draining_worker_takes_nothing_new_and_ends_what_runs(
    worker: SimWorker, session: SessionClient
) -> None:
    await session.start(1, request(max_tokens=200))
    assert await session.reserve(2, 100) is None
    worker.workload.start_drain()

    refused = await session.reserve(3, 100)
    assert refused is not None
    assert refused.reason is ErrorReason.DRAINING
    await session.start(4, request())
    failure = (await session.answer(4)).failure
    assert failure is not None
    assert failure.reason is ErrorReason.DRAINING
    # Its room was promised before.
    await session.start(2, request(max_tokens=8))
    assert (await session.answer(2)).failure is None
    assert len((await session.answer(1)).token_ids) == 200
    worker.decode.finish()
    assert not await session.read()
    assert await session.call.code() is grpc.StatusCode.OK


async def test_a_dead_engine_fails_every_sequence(
    worker: SimWorker, session: SessionClient
) -> None:
    await session.start(1, request(max_tokens=LONG))
    await session.start(2, request(max_tokens=LONG))
    await session.read()
    worker.engine.fail("the engine died")
    for sequence_id in (1, 2):
        failure = (await session.answer(sequence_id)).failure
        assert failure is not None
        assert failure.reason is ErrorReason.DECODE_FAILED
    assert worker.workload.load.reserved_tokens == 0


@pytest.mark.parametrize("command", ["start", "reserve"])
async def test_beginning_a_sequence_twice_ends_the_stream(
    worker: SimWorker, session: SessionClient, command: str
) -> None:
    await session.start(1, request(max_tokens=LONG))
    if command == "start":
        await session.start(1, request())
        assert await reason_of(session) is ErrorReason.INVALID_ARGUMENT
    else:
        with pytest.raises(grpc.aio.AioRpcError):
            await session.reserve(1, 100)
    await worker.workload.ended()


async def test_a_coordinator_that_reads_late_loses_no_token(worker: SimWorker) -> None:
    late, prompt = SessionClient(worker.channel), SessionClient(worker.channel)
    await late.start(1, request(max_tokens=500))
    in_time = await prompt.run(request(max_tokens=500))
    assert (await late.answer(1)).token_ids == in_time.token_ids
    assert late.answers[1].text == in_time.text


async def test_kv_transfers_are_timed_in_the_first_delta() -> None:
    slow = SimConfig(decode_step_s=0.0, prefill_token_s=0.0, transfer_token_s=0.001)
    async with sim_worker(slow) as worker:
        handle = (await prefill(worker, request())).handle
        begun = time.monotonic()
        answer = await SessionClient(worker.channel).run(request(), handle)
        assert answer.steps[0].timings is not None
        assert 0.08 <= answer.steps[0].timings.queue_s <= time.monotonic() - begun


async def test_two_sessions_may_use_the_same_sequence_ids(worker: SimWorker) -> None:
    sessions = [SessionClient(worker.channel) for _ in range(2)]
    for session in sessions:
        await session.start(1, request(max_tokens=30))
    answers = await asyncio.gather(*(session.answer(1) for session in sessions))
    assert answers[0].token_ids == answers[1].token_ids

"""WorkerService over real sockets, on a simulated engine."""

from __future__ import annotations

from collections.abc import AsyncIterator

import grpc
import pytest

import pdserve
from pdserve import convert, convert_worker
from pdserve.prefix import chain
from pdserve.types import Load, Role, WorkerInfo
from pdserve.v1 import worker_pb2
from pdserve.v1.worker_pb2_grpc import WorkerServiceStub
from tests.support.sim_worker import SessionClient, SimWorker, request, sim_worker

PROMPT = tuple(range(1, 131))


@pytest.fixture
async def worker() -> AsyncIterator[SimWorker]:
    async with sim_worker() as running:
        yield running


async def test_info_says_who_the_worker_is(worker: SimWorker) -> None:
    stub = WorkerServiceStub(worker.channel)
    info = convert_worker.worker_info_from_proto(
        await stub.GetWorkerInfo(worker_pb2.GetWorkerInfoRequest())
    )
    assert info == WorkerInfo(
        worker_id="worker-1",
        epoch="epoch-1",
        roles=frozenset({Role.PREFILL, Role.DECODE}),
        model="tiny",
        fingerprint=worker.engine.info.fingerprint,
        engine="sim",
        context_length=8_192,
        kv_capacity_tokens=262_144,
        transports=("nixl", "grpc"),
        weights="bfloat16",
        version=pdserve.__version__,
        chunk_tokens=256,
        max_sequences=256,
        tells_cache=True,
    )


async def test_load_comes_at_once_and_then_at_each_change(worker: SimWorker) -> None:
    call = WorkerServiceStub(worker.channel).WatchLoad(worker_pb2.WatchLoadRequest())
    assert convert_worker.load_from_proto(await call.read()) == Load()

    session = SessionClient(worker.channel)
    await session.start(1, request(max_tokens=4_000))
    load = convert_worker.load_from_proto(await call.read())
    while not load.running:
        load = convert_worker.load_from_proto(await call.read())
    assert load.reserved_tokens == 4_096  # 4,080 in whole blocks of 32
    assert load.kv_usage > 0

    worker.workload.start_drain()
    await session.abort(1)
    while load != Load(draining=True):
        load = convert_worker.load_from_proto(await call.read())
    call.cancel()


async def test_the_cache_is_told_whole_and_then_each_change(worker: SimWorker) -> None:
    session = SessionClient(worker.channel)
    await session.start(1, request(PROMPT[:70], max_tokens=1))
    await session.answer(1)
    call = WorkerServiceStub(worker.channel).WatchCache(worker_pb2.WatchCacheRequest())
    whole = await call.read()
    first = chain(PROMPT[:70], "", 32)
    assert (whole.sequence, whole.anew, set(whole.added)) == (0, True, set(first))
    await session.start(2, request(PROMPT, max_tokens=1))
    await session.answer(2)
    change = await call.read()
    longer = chain(PROMPT, "", 32)
    assert (change.sequence, change.anew) == (1, False)
    assert (set(change.added), list(change.removed)) == (set(longer) - set(first), [])
    worker.engine.cached.close()
    assert await call.read() is grpc.aio.EOF
    assert await call.code() is grpc.StatusCode.OK


async def test_drain_answers_when_running_work_has_ended(worker: SimWorker) -> None:
    session = SessionClient(worker.channel)
    await session.start(1, request(max_tokens=100))
    await session.read()
    answer = await WorkerServiceStub(worker.channel).Drain(worker_pb2.DrainRequest())
    assert answer.unfinished == 0
    assert len((await session.answer(1)).token_ids) == 100


async def test_drain_answers_at_its_deadline_with_what_is_left(worker: SimWorker) -> None:
    session = SessionClient(worker.channel)
    await session.start(1, request(max_tokens=4_000))
    await session.read()
    answer = await WorkerServiceStub(worker.channel).Drain(
        worker_pb2.DrainRequest(deadline=convert.duration(0.01))
    )
    assert answer.unfinished == 1
    await session.abort(1)


async def test_closing_the_workload_ends_its_watches(worker: SimWorker) -> None:
    call = WorkerServiceStub(worker.channel).WatchLoad(worker_pb2.WatchLoadRequest())
    await call.read()
    worker.workload.close()
    assert await call.read() is grpc.aio.EOF
    assert await call.code() is grpc.StatusCode.OK

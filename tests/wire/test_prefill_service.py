"""PrefillService over real sockets, on a simulated engine."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator

import grpc
import pytest

from pdserve import convert
from pdserve.channel import channel
from pdserve.engine.sim import SimEngine
from pdserve.errors import ErrorReason
from pdserve.handle import digest, is_intact
from pdserve.rpc_errors import from_rpc_error
from pdserve.types import EngineRequest, LeaseEnd, Role
from pdserve.v1 import prefill_pb2
from pdserve.v1.prefill_pb2_grpc import PrefillServiceStub
from prefill_svc import service
from tests.support.sim_worker import (
    FAST,
    SEAL_KEY,
    SessionClient,
    SimWorker,
    prefill,
    request,
    sim_worker,
)


@pytest.fixture
async def worker() -> AsyncIterator[SimWorker]:
    async with sim_worker() as running:
        yield running


async def refusal(worker: SimWorker, message: prefill_pb2.PrefillRequest) -> ErrorReason:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        async for _ in PrefillServiceStub(worker.channel).Prefill(message):
            pass
    return from_rpc_error(caught.value, ErrorReason.PREFILL_FAILED).reason


async def test_the_handle_says_all_that_the_decode_side_verifies(worker: SimWorker) -> None:
    asked = EngineRequest("r", request().token_ids, request().sampling, cache_salt="salt")
    before = time.time()
    claim = await prefill(worker, asked)

    handle = claim.handle
    assert is_intact(handle, SEAL_KEY)
    assert len(handle.handle_id) == 32
    assert (handle.worker_id, handle.epoch) == ("worker-1", "epoch-1")
    assert handle.fingerprint == worker.engine.info.fingerprint
    assert handle.digest == digest(asked.token_ids, "salt", "")
    assert handle.num_tokens == 80
    assert before + 30 <= handle.lease_expiry_ns / 1e9 <= time.time() + 30
    assert claim.result.cached_tokens == 0
    assert worker.workload.load.open_leases == 1
    assert worker.outcomes == [(Role.PREFILL, "finished")]


async def test_a_second_prefill_of_the_prompt_hits_the_cache_and_has_its_own_handle(
    worker: SimWorker,
) -> None:
    first = await prefill(worker, request())
    second = await prefill(worker, request())
    assert second.result.cached_tokens == 64
    assert second.handle.handle_id != first.handle.handle_id


async def test_over_grpc_the_handle_comes_with_the_admission_and_stays_the_same(
    worker: SimWorker,
) -> None:
    message = convert.prefill_request_to_proto(request(), "grpc")
    call = PrefillServiceStub(worker.channel).Prefill(message)
    admitted, finished = await call.read(), await call.read()
    assert admitted.admitted.handle.sim.transport == "grpc"
    assert admitted.admitted.handle == finished.finished.handle
    assert worker.workload.load.open_leases == 1


async def test_a_prefill_that_is_cancelled_takes_its_early_handle_along() -> None:
    async with sim_worker(FAST.model_copy(update={"prefill_token_s": 1.0})) as worker:
        message = convert.prefill_request_to_proto(request(), "grpc")
        call = PrefillServiceStub(worker.channel).Prefill(message)
        async for event in call:
            assert event.admitted.HasField("handle")
            break
        assert worker.workload.load.open_leases == 1
        call.cancel()
        await worker.workload.ended()
        assert worker.workload.load.open_leases == 0
        assert worker.engine.load.kv_usage == 0


async def test_a_transport_that_is_not_offered_is_refused(worker: SimWorker) -> None:
    message = convert.prefill_request_to_proto(request(), "pigeon")
    assert await refusal(worker, message) is ErrorReason.KV_INCOMPATIBLE


@pytest.mark.parametrize("seconds", [-1, 0, 25 * 3600, 2 * 10**10])
async def test_a_lease_of_no_time_or_of_ages_is_refused_and_leaves_nothing(
    worker: SimWorker, seconds: int
) -> None:
    message = convert.prefill_request_to_proto(request(), "grpc")
    message.lease.FromSeconds(seconds)
    assert await refusal(worker, message) is ErrorReason.INVALID_ARGUMENT
    assert worker.workload.load.open_leases == 0
    await worker.workload.ended()


def ends(worker: SimWorker) -> dict[str, int]:
    """How leases ended so far."""
    return {end: count for end, count in worker.workload.leases.ended.items() if count}


async def test_a_lease_lasts_as_long_as_its_call(worker: SimWorker) -> None:
    claim = await prefill(worker, request())
    assert worker.engine.load.kv_usage > 0
    load = worker.workload.load
    assert (load.open_leases, load.lease_tokens) == (1, 80)
    assert 0 <= load.oldest_lease_s < 10
    claim.call.cancel()
    await worker.workload.ended()
    assert worker.engine.load.kv_usage == 0
    assert ends(worker) == {"released": 1}


async def test_a_lease_ends_with_the_connection_of_its_call(worker: SimWorker) -> None:
    async with channel(worker.address) as opened:
        call = PrefillServiceStub(opened).Prefill(
            convert.prefill_request_to_proto(request(), "nixl")
        )
        await call.read()
        await call.read()
        assert worker.workload.load.open_leases == 1
    await worker.workload.ended()
    assert worker.engine.load.kv_usage == 0


async def test_an_expired_lease_ends_its_call(worker: SimWorker) -> None:
    claim = await prefill(worker, request(), lease_s=0.05)
    assert await claim.call.read() is grpc.aio.EOF
    assert await claim.call.code() is grpc.StatusCode.OK
    assert worker.engine.load.kv_usage == 0
    assert ends(worker) == {"expired": 1}


async def test_a_lease_whose_blocks_were_fetched_ends_as_such(worker: SimWorker) -> None:
    claim = await prefill(worker, request())
    await SessionClient(worker.channel).run(request(), claim.handle)
    assert worker.engine.load.kv_usage == 0
    claim.call.cancel()
    await worker.workload.ended()
    assert ends(worker) == {"fetched": 1}


async def test_a_lease_whose_blocks_were_fetched_ends_of_itself(worker: SimWorker) -> None:
    claim = await prefill(worker, request())
    await SessionClient(worker.channel).run(request(), claim.handle)
    assert await claim.call.read() is grpc.aio.EOF
    assert ends(worker) == {"fetched": 1}


@pytest.mark.parametrize("asked_by", ["renew", "release"])
@pytest.mark.parametrize("end", LeaseEnd)
async def test_a_lease_ends_as_the_engine_says_that_its_hold_ended(
    worker: SimWorker, end: LeaseEnd, asked_by: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def renew(*_: object) -> LeaseEnd | None:
        return end if asked_by == "renew" else None

    async def release(*_: object) -> LeaseEnd:
        await SimEngine.release(worker.engine, *_)  # type: ignore[arg-type]
        return end

    monkeypatch.setattr(worker.engine, "renew", renew)
    monkeypatch.setattr(worker.engine, "release", release)
    monkeypatch.setattr(service, "RENEW_S", 0.01)
    claim = await prefill(worker, request())
    if asked_by == "release":
        claim.call.cancel()
    await worker.workload.ended()
    assert ends(worker) == {end: 1}


async def test_a_prompt_that_is_not_read_to_its_end_loses_its_early_lease() -> None:
    async with sim_worker(FAST.model_copy(update={"prefill_token_s": 1.0})) as worker:
        message = convert.prefill_request_to_proto(request(), "grpc")
        call = PrefillServiceStub(worker.channel).Prefill(message)
        await call.read()
        assert worker.workload.load.open_leases == 1
        worker.engine.fail("the engine died")
        with pytest.raises(grpc.aio.AioRpcError):
            await call.read()
        assert ends(worker) == {"lost": 1}


async def test_a_worker_that_stops_ends_every_lease_and_its_call() -> None:
    async with sim_worker() as worker:
        claims = [await prefill(worker, request()) for _ in range(2)]
        await worker.prefill.close()
        assert worker.workload.load.open_leases == 0
        assert worker.engine.load.kv_usage == 0
        assert ends(worker) == {"lost": 2}
        for claim in claims:
            assert await claim.call.read() is grpc.aio.EOF


async def test_cancelling_the_call_stops_the_work_and_frees_the_blocks() -> None:
    async with sim_worker(FAST.model_copy(update={"prefill_token_s": 1.0})) as worker:
        call = PrefillServiceStub(worker.channel).Prefill(
            convert.prefill_request_to_proto(request(), "nixl")
        )
        async for event in call:
            assert event.HasField("admitted")
            break
        call.cancel()
        await worker.workload.ended()
        assert worker.engine.load.running == worker.engine.load.waiting == 0
        assert worker.engine.load.kv_usage == 0
        assert worker.outcomes == [(Role.PREFILL, "cancelled")]


async def test_a_draining_worker_refuses(worker: SimWorker) -> None:
    worker.workload.start_drain()
    message = convert.prefill_request_to_proto(request(), "nixl")
    assert await refusal(worker, message) is ErrorReason.DRAINING


async def test_a_dead_engine_fails_the_call(worker: SimWorker) -> None:
    worker.engine.fail("the engine died")
    message = convert.prefill_request_to_proto(request(), "nixl")
    assert await refusal(worker, message) is ErrorReason.PREFILL_FAILED
    assert worker.outcomes == [(Role.PREFILL, "prefill_failed")]


@pytest.mark.parametrize(
    ("prompt", "reason"),
    [
        ((), ErrorReason.INVALID_ARGUMENT),
        (tuple(range(8_192)), ErrorReason.CONTEXT_LENGTH_EXCEEDED),
    ],
)
async def test_an_impossible_prompt_is_refused(
    worker: SimWorker, prompt: tuple[int, ...], reason: ErrorReason
) -> None:
    message = convert.prefill_request_to_proto(request(prompt), "nixl")
    assert await refusal(worker, message) is reason


async def test_a_lease_of_no_time_is_refused(worker: SimWorker) -> None:
    message = convert.prefill_request_to_proto(request(), "nixl")
    message.lease.CopyFrom(convert.duration(0))
    assert await refusal(worker, message) is ErrorReason.INVALID_ARGUMENT


async def test_a_prompt_larger_than_the_cache_is_refused() -> None:
    async with sim_worker(FAST.model_copy(update={"kv_capacity_tokens": 64})) as worker:
        message = convert.prefill_request_to_proto(request(), "nixl")
        assert await refusal(worker, message) is ErrorReason.NO_ROOM

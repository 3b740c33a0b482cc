"""A fleet over sockets whose workers, clients and coordinators go; idle when all is done."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import grpc
import httpx
import pytest

from pdserve.errors import ErrorReason
from pdserve.rpc_errors import from_rpc_error
from pdserve.types import Fallback, Mode, Role
from pdserve.v1 import inference_pb2
from tests.support.asking import (
    LONG_ANSWER,
    LONG_TEXT,
    MAX_TOKENS,
    SLOW_READER,
    TEXT,
    body,
    decode,
    events,
    grpc_whole,
    http_whole,
    message,
    prefill,
)
from tests.support.gated_worker import GatedWorker
from tests.support.gates import Gate
from tests.support.patience import WITHIN_S
from tests.support.sim_fleet import MODEL, Answer, SimFleet, coordinator, sim_fleet


async def in_prefill(fleet: SimFleet, worker_id: str = "p") -> None:
    await fleet.workers[worker_id].until(lambda load: load.running > 0)


by_each_transport = pytest.mark.parametrize("transport", ["nixl", "grpc"])


@by_each_transport
async def test_a_prefill_worker_killed_in_mid_prefill_costs_a_detour(transport: str) -> None:
    async with sim_fleet(prefill(sim=SLOW_READER), decode(), transport=transport) as fleet:
        expected = await http_whole(fleet.coordinator, LONG_TEXT, Mode.COLOCATED)
        asking = asyncio.create_task(http_whole(fleet.coordinator, LONG_TEXT, Mode.DISAGGREGATED))
        await in_prefill(fleet)
        await fleet.workers["p"].kill()
        answer = await asking
        assert answer.text == expected.text
        assert answer.mode == "colocated"
        way = "disaggregated: asked for by the request; fell back to colocated: "
        # The call and the link break at once, and either may be heard of first.
        assert answer.reason.removeprefix(way) in (
            "the connection to the worker was lost",
            "the prefill worker was lost",
        )
        assert fleet.coordinator.metric("fallbacks_total", reason="prefill_failed") == 1


async def test_a_prefill_worker_killed_in_mid_prefill_is_an_error_without_fallback() -> None:
    async with sim_fleet(prefill(sim=SLOW_READER), decode(), fallback=Fallback.FAIL) as fleet:
        asking = asyncio.create_task(
            fleet.coordinator.http.post(
                "/v1/completions",
                json=body(LONG_TEXT, stream=True),
                headers={"x-pdserve-mode": "disaggregated"},
            )
        )
        await in_prefill(fleet)
        await fleet.workers["p"].kill()
        response = await asking
        assert response.status_code == 502
        assert response.json()["error"]["code"] == "prefill_failed"


async def stream_lines(response: httpx.Response) -> AsyncIterator[str]:
    async for line in response.aiter_lines():
        if line:
            yield line


@pytest.mark.parametrize("mode", ["colocated", "disaggregated"])
async def test_without_recoveries_a_killed_decode_worker_is_told_over_http(mode: str) -> None:
    async with sim_fleet(prefill(), decode(), max_recoveries=0) as fleet:
        request = body(TEXT, stream=True, max_tokens=LONG_ANSWER, ignore_eos=True)
        async with fleet.coordinator.http.stream(
            "POST", "/v1/completions", json=request, headers={"x-pdserve-mode": mode}
        ) as response:
            assert response.status_code == 200
            lines = stream_lines(response)
            seen = [await anext(lines) for _ in range(3)]
            await fleet.workers["d"].kill()
            seen += [line async for line in lines]
        *chunks, error = events(seen)
        assert all("choices" in chunk for chunk in chunks)
        assert error["error"]["code"] == "decode_failed"
        assert fleet.coordinator.metric("requests_total", reason="decode_failed") == 1


async def test_without_recoveries_a_killed_decode_worker_is_told_over_grpc() -> None:
    async with sim_fleet(prefill(), decode(), max_recoveries=0) as fleet:
        asked = message(TEXT, None, LONG_ANSWER)
        asked.sampling.ignore_eos = True
        call = fleet.coordinator.grpc.GenerateStream(
            inference_pb2.GenerateStreamRequest(request=asked)
        )
        assert await call.read() is not grpc.aio.EOF
        await fleet.workers["d"].kill()
        with pytest.raises(grpc.aio.AioRpcError) as failure:
            while await call.read() is not grpc.aio.EOF:
                pass
        assert failure.value.code() is grpc.StatusCode.UNAVAILABLE
        told = from_rpc_error(failure.value, ErrorReason.INTERNAL)
        assert told.reason is ErrorReason.DECODE_FAILED


async def test_a_decode_worker_killed_before_the_first_token_is_not_noticed() -> None:
    async with sim_fleet(decode("d1", SLOW_READER), decode("d2", SLOW_READER)) as fleet:
        asking = asyncio.create_task(http_whole(fleet.coordinator, LONG_TEXT, Mode.COLOCATED))
        async with asyncio.timeout(WITHIN_S):
            waits = {
                asyncio.create_task(in_prefill(fleet, worker_id)): worker_id
                for worker_id in fleet.workers
            }
            done, others = await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
            for other in others:
                other.cancel()
        await fleet.workers[waits[done.pop()]].kill()
        answer = await asking
        assert answer.completion_tokens == MAX_TOKENS
        assert "tried another decode worker: " in answer.reason


async def test_a_worker_that_comes_back_is_proven_and_used_again() -> None:
    async with sim_fleet(prefill(), decode()) as fleet:
        core = fleet.coordinator
        for worker in fleet.workers.values():
            old = set(core.fleet.pairs)
            await worker.kill()
            await worker.start()
            await core.until(lambda old=old: set(core.fleet.pairs) - old != set())  # type: ignore[misc]
            await core.until_proven(("p", "d"))
            answer = await http_whole(core, TEXT, Mode.DISAGGREGATED)
            assert answer.mode == "disaggregated"


# The KV on its way.


@asynccontextmanager
async def in_transfer(transport: str) -> AsyncIterator[tuple[SimFleet, Gate, asyncio.Task[Answer]]]:
    """A fleet and a request to it, whose KV a closed gate keeps on its way."""
    writer = GatedWorker("d", Role.DECODE)
    async with sim_fleet(prefill(), writer, transport=transport) as fleet:
        gate = writer.gates.transfers
        gate.close()
        asking = asyncio.create_task(http_whole(fleet.coordinator, TEXT, Mode.DISAGGREGATED))
        await gate.until_waited_for()
        yield fleet, gate, asking


@by_each_transport
async def test_a_prefill_worker_killed_in_mid_transfer_costs_a_detour(transport: str) -> None:
    async with in_transfer(transport) as (fleet, gate, asking):
        await fleet.workers["p"].kill()
        gate.open()
        answer = await asking
        assert answer.mode == "colocated"
        assert answer.reason == (
            "disaggregated: asked for by the request; fell back to colocated: "
            "the holder of the KV blocks was lost"
        )


@by_each_transport
async def test_a_client_that_leaves_in_mid_transfer_frees_the_fleet(transport: str) -> None:
    async with in_transfer(transport) as (fleet, _, asking):
        asking.cancel()
        await asyncio.wait([asking])
        await fleet.until_idle()
        assert fleet.workers["p"].metric("kv_leases_total", end="released") == 1


@by_each_transport
async def test_blocks_are_held_until_they_are_fetched_and_no_longer(transport: str) -> None:
    async with sim_fleet(prefill(), decode(), transport=transport) as fleet:
        await fleet.until_idle()  # the probe's lease too
        before = fleet.workers["p"].metric("kv_leases_total", end="fetched")
        for _ in range(3):
            await http_whole(fleet.coordinator, TEXT, Mode.DISAGGREGATED)
        await fleet.until_idle()
        assert fleet.workers["p"].metric("kv_leases_total", end="fetched") == before + 3


# Clients that leave.


@pytest.mark.parametrize("mode", ["colocated", "disaggregated"])
async def test_an_http_client_that_leaves_in_mid_stream_frees_the_fleet(mode: str) -> None:
    async with sim_fleet(prefill(), decode()) as fleet:
        request = body(TEXT, stream=True, max_tokens=LONG_ANSWER, ignore_eos=True)
        async with fleet.coordinator.http.stream(
            "POST", "/v1/completions", json=request, headers={"x-pdserve-mode": mode}
        ) as response:
            await anext(stream_lines(response))
        await fleet.until_idle()
        assert fleet.coordinator.metric("requests_total", outcome="cancelled") == 1


@by_each_transport
async def test_an_http_client_that_leaves_in_mid_prefill_frees_the_fleet(transport: str) -> None:
    async with sim_fleet(prefill(sim=SLOW_READER), decode(), transport=transport) as fleet:
        asking = asyncio.create_task(http_whole(fleet.coordinator, LONG_TEXT, Mode.DISAGGREGATED))
        await in_prefill(fleet)
        asking.cancel()
        await asyncio.wait([asking])
        await fleet.until_idle()
        assert fleet.coordinator.metric("requests_total", outcome="cancelled") == 1


async def test_a_grpc_call_that_is_cancelled_frees_the_fleet() -> None:
    async with sim_fleet(prefill(sim=SLOW_READER), decode()) as fleet:
        call = fleet.coordinator.grpc.Generate(message(LONG_TEXT, Mode.DISAGGREGATED))
        await in_prefill(fleet)
        call.cancel()
        await fleet.until_idle()
        assert fleet.coordinator.metric("requests_total", surface="grpc", outcome="cancelled") == 1


async def test_a_grpc_deadline_frees_the_fleet() -> None:
    async with sim_fleet(prefill(sim=SLOW_READER), decode()) as fleet:
        call = fleet.coordinator.grpc.Generate(message(TEXT * 20, Mode.DISAGGREGATED), timeout=0.5)
        with pytest.raises(grpc.aio.AioRpcError) as failure:
            await call
        assert failure.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
        await fleet.until_idle()


# Coordinators that come and go.


async def test_a_coordinator_that_ends_leaves_nothing_on_the_workers() -> None:
    workers = [await prefill().start(), await decode().start()]
    first, second = coordinator(workers), coordinator(workers)
    async with first.running():
        await first.until_proven(("p", "d"))
        asked = message(TEXT, Mode.DISAGGREGATED, LONG_ANSWER)
        asked.sampling.ignore_eos = True
        call = first.grpc.GenerateStream(inference_pb2.GenerateStreamRequest(request=asked))
        await call.read()
    async with asyncio.timeout(WITHIN_S):
        for worker in workers:
            await worker.until_idle()
    async with second.running():
        await second.until_proven(("p", "d"))
        assert (await grpc_whole(second, TEXT, Mode.DISAGGREGATED)).mode == "disaggregated"
    for worker in workers:
        await worker.kill()


async def test_two_coordinators_share_the_workers() -> None:
    async with sim_fleet(prefill(), decode()) as fleet:
        other = coordinator(list(fleet.workers.values()))
        async with other.running():
            await other.until_proven(("p", "d"))
            texts = await asyncio.gather(
                *(
                    http_whole(core, TEXT, mode)
                    for core in (fleet.coordinator, other)
                    for mode in (Mode.COLOCATED, Mode.DISAGGREGATED)
                )
            )
            assert len({answer.text for answer in texts}) == 1


async def test_a_draining_worker_gets_nothing_new_and_ends_what_it_has() -> None:
    workers = [GatedWorker(name, Role.DECODE) for name in ("d1", "d2")]
    async with sim_fleet(*workers) as fleet:
        core = fleet.coordinator
        for worker in workers:
            worker.stop_after(5)
        asked = message(TEXT, None, 200)
        asked.sampling.ignore_eos = True
        call = core.grpc.GenerateStream(inference_pb2.GenerateStreamRequest(request=asked))
        pieces = aiter(call)
        await anext(pieces)
        busy, other = sorted(workers, key=lambda worker: -worker.workload.unfinished)
        busy.workload.start_drain()
        await core.until(lambda: len(core.fleet.snapshot(MODEL).decode) == 1)
        ended = busy.metric("sequences_total", role="decode", outcome="finished")
        other.gates.steps.open()
        for _ in range(3):
            await http_whole(core, TEXT, Mode.COLOCATED)
        assert busy.metric("sequences_total", role="decode", outcome="finished") == ended
        busy.gates.steps.open()
        *_, last = [piece async for piece in pieces]
        assert last.usage.completion_tokens == 200

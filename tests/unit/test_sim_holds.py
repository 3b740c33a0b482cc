"""What a simulated engine holds for others, and fetches from them, on virtual time."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest

from pdserve.channel import HOLDER_SILENCE_S
from pdserve.engine.base import StepStats
from pdserve.engine.sim import SimEngine
from pdserve.errors import DecodeError, ErrorReason
from pdserve.types import (
    LeaseEnd,
    NixlDescriptor,
    SimDescriptor,
)
from tests.support.prefilling import read
from tests.support.sim_engine import (
    CONFIG,
    request,
    sim_descriptor,
    started,
    timed,
    times,
)
from tests.support.virtual_time import on_virtual_time


@on_virtual_time
async def test_handed_over_kv_waits_for_its_transfer_and_reads_nothing() -> None:
    steps: list[StepStats] = []
    async with started() as holder, started(steps=steps) as engine:
        prefilled = await read(holder, request(50), "nixl", 50)
        assert isinstance(prefilled.descriptor, SimDescriptor)
        answer = await timed(engine, request(50), prefilled.descriptor)
        assert times(answer)[0] == pytest.approx(0.1 + 0.11)
        timings = answer[0][1].timings
        assert timings is not None
        assert (timings.queue_s, timings.transfer_s) == pytest.approx((0.1, 0.1))
    (transfer,) = [transfer for stats in steps for transfer in stats.transfers]
    num_bytes = 50 * CONFIG.kv_bytes_per_token
    assert (transfer.transport, transfer.num_bytes) == ("nixl", num_bytes)
    assert transfer.seconds == pytest.approx(0.1)
    assert sum(stats.prefix_queries for stats in steps) == 0


@on_virtual_time
async def test_kv_of_another_kind_cannot_be_fetched() -> None:
    async with started() as engine:
        with pytest.raises(DecodeError) as caught:
            async for _ in engine.generate(request(), NixlDescriptor("e", "r", (), "h", 1, 1)):
                pass
    assert caught.value.reason is ErrorReason.KV_TRANSFER_FAILED


@on_virtual_time
async def test_a_prefill_holds_its_blocks_until_its_lease_ends() -> None:
    async with started() as engine:
        prefilled = await read(engine, request(50), "nixl", 5)
        assert prefilled.prefill_s == pytest.approx(0.05)
        assert engine.load.kv_usage == 50 / CONFIG.kv_capacity_tokens
        await asyncio.sleep(4.9)
        assert engine.load.kv_usage > 0
        await asyncio.sleep(0.2)


@on_virtual_time
async def test_held_blocks_keep_others_waiting_until_they_are_released() -> None:
    async with started(CONFIG.model_copy(update={"kv_capacity_tokens": 100})) as engine:
        one = await read(engine, request(60), "nixl", 100)
        waiting = asyncio.create_task(timed(engine, request(60, first=500)))
        await asyncio.sleep(20)
        assert not waiting.done()
        await engine.release(one.descriptor)
        assert len(await waiting) == 3


@on_virtual_time
async def test_blocks_pass_from_being_read_to_being_held_with_nothing_in_between() -> None:
    async with started(CONFIG.model_copy(update={"kv_capacity_tokens": 100})) as engine:
        reading = asyncio.create_task(read(engine, request(60), "nixl", 100))
        await asyncio.sleep(0.01)
        waiting = asyncio.create_task(timed(engine, request(60, first=500)))
        descriptor = (await reading).descriptor
        await asyncio.sleep(20)
        assert (engine.load.running, engine.load.waiting) == (0, 1)
        await engine.release(descriptor)
        assert len(await waiting) == 3


@on_virtual_time
async def test_a_hold_can_be_renewed_until_it_is_over() -> None:
    async with started() as engine:
        descriptor = (await read(engine, request(50), "nixl", 5)).descriptor
        await asyncio.sleep(4)
        assert await engine.renew(descriptor, 5) is None
        await asyncio.sleep(4.9)
        assert engine.load.kv_usage > 0
        await asyncio.sleep(0.2)
        assert engine.load.kv_usage == 0
        assert await engine.renew(descriptor, 5) is LeaseEnd.EXPIRED
        assert await engine.release(descriptor) is LeaseEnd.EXPIRED


@on_virtual_time
async def test_over_grpc_blocks_can_be_asked_for_from_admission_and_come_as_they_are_read() -> None:
    async with started() as reader, started() as writer:
        busy = asyncio.create_task(timed(reader, request(200, 1, 1000)))
        await asyncio.sleep(0)
        events = reader.prefill(request(150), 5, "grpc")
        admitted = await anext(events)
        assert admitted.descriptor is not None
        answer = asyncio.create_task(timed(writer, request(150), sim_descriptor(admitted)))
        prefilled = await anext(events)
        assert prefilled.descriptor is admitted.descriptor
        # 350 tokens are read, and one is written, before the last block is there; the last 100
        # travel after that.
        assert times(await answer)[0] == pytest.approx(0.35 + 0.11 + 0.2 + 0.11)
        assert await reader.release(prefilled.descriptor) is LeaseEnd.FETCHED
        await busy


@on_virtual_time
async def test_blocks_are_released_once_and_apart() -> None:
    async with started() as engine:
        one = await read(engine, request(50), "nixl", 5)
        two = await read(engine, request(50), "nixl", 5)
        assert await engine.release(one.descriptor) is LeaseEnd.RELEASED
        assert await engine.release(one.descriptor) is LeaseEnd.RELEASED
        assert engine.load.kv_usage == 50 / CONFIG.kv_capacity_tokens
        assert await engine.release(two.descriptor) is LeaseEnd.RELEASED
        assert engine.load.kv_usage == 0


@on_virtual_time
async def test_blocks_that_were_fetched_are_free() -> None:
    async with started() as holder, started() as engine:
        descriptor = sim_descriptor(await read(holder, request(50), "nixl", 50))
        await timed(engine, request(50), descriptor)
        assert holder.load.kv_usage == 0
        assert await holder.renew(descriptor, 5) is LeaseEnd.FETCHED
        assert await holder.release(descriptor) is LeaseEnd.FETCHED


async def refusal(engine: SimEngine, descriptor: SimDescriptor) -> ErrorReason:
    with pytest.raises(DecodeError) as caught:
        await timed(engine, request(50), descriptor)
    return caught.value.reason


@on_virtual_time
async def test_a_holder_refuses_what_it_does_not_hold_and_says_why() -> None:
    async with started() as holder, started() as other, started() as engine:
        descriptor = sim_descriptor(await read(holder, request(50), "nixl", 50))
        theirs = sim_descriptor(await read(other, request(50), "nixl", 5))
        foreign = replace(descriptor, transfer_id=theirs.transfer_id)
        assert await refusal(engine, foreign) is ErrorReason.KV_FOREIGN
        stale = replace(descriptor, epoch=theirs.epoch)
        assert await refusal(engine, stale) is ErrorReason.KV_STALE_EPOCH
        await asyncio.sleep(6)
        assert await refusal(engine, theirs) is ErrorReason.KV_EXPIRED
        await timed(engine, request(50), descriptor)
        assert await refusal(engine, descriptor) is ErrorReason.KV_REUSED


@on_virtual_time
async def test_a_lease_that_ends_in_mid_transfer_voids_it() -> None:
    async with started() as holder, started() as engine:
        descriptor = sim_descriptor(await read(holder, request(50), "nixl", 0.05))
        assert await refusal(engine, descriptor) is ErrorReason.KV_EXPIRED


@on_virtual_time
async def test_a_holder_that_dies_in_mid_transfer_fails_it() -> None:
    async with started() as holder, started() as engine:
        descriptor = sim_descriptor(await read(holder, request(50), "nixl", 50))
        fetching = asyncio.create_task(refusal(engine, descriptor))
        await asyncio.sleep(0.05)
        await holder.close()
        assert await fetching is ErrorReason.KV_TRANSFER_FAILED
        assert await refusal(engine, descriptor) is ErrorReason.KV_TRANSFER_FAILED


@on_virtual_time
@pytest.mark.parametrize("said", [b"", b"read\n", b"wait\n"])
async def test_a_holder_that_is_silent_in_mid_transfer_is_taken_for_dead(said: bytes) -> None:
    async def say(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writers.append(writer)
        writer.write(said)

    writers: list[asyncio.StreamWriter] = []
    async with await asyncio.start_server(say, "127.0.0.1", 0) as holder, started() as engine:
        port = holder.sockets[0].getsockname()[1]
        now = asyncio.get_running_loop().time
        begun = now()
        silent = SimDescriptor(1, "nixl", "transfer", "epoch", "127.0.0.1", port)
        assert await refusal(engine, silent) is ErrorReason.KV_TRANSFER_FAILED
        # After the 50 tokens have come, where it said that they would.
        assert now() - begun == pytest.approx(
            HOLDER_SILENCE_S + (0.1 if said == b"read\n" else 0.0)
        )
        for writer in writers:
            writer.close()


@on_virtual_time
async def test_a_holder_that_reads_for_long_is_waited_for() -> None:
    slow = CONFIG.model_copy(update={"prefill_token_s": 1.0})
    async with started(slow) as holder, started() as engine:
        events = holder.prefill(request(50), 50, "grpc")
        admitted = await anext(events)
        answer = asyncio.create_task(timed(engine, request(50), sim_descriptor(admitted)))
        await anext(events)
        assert times(await answer)[0] == pytest.approx(50 + 0.1 + 0.11)


@on_virtual_time
async def test_a_prompt_whose_reading_is_aborted_is_not_handed_over() -> None:
    async with started() as holder, started() as engine:
        events = holder.prefill(request(150), 5, "grpc")
        admitted = await anext(events)
        fetching = asyncio.create_task(refusal(engine, sim_descriptor(admitted)))
        await asyncio.sleep(0.05)
        await events.aclose()
        assert await fetching is ErrorReason.KV_TRANSFER_FAILED

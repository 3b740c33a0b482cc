"""The slot between a decode session and the request that reads from it."""

from __future__ import annotations

import asyncio

import pytest

from coordinator.sequence import Sequence
from pdserve.errors import DecodeError, ErrorReason
from pdserve.types import Delta, FinishReason, FirstTokenTimings, Usage
from tests.support.virtual_time import on_virtual_time, settle

LOST = DecodeError(ErrorReason.DECODE_FAILED, "lost")
NO_ROOM = DecodeError(ErrorReason.NO_ROOM, "full")


@on_virtual_time
async def test_a_reader_that_waits_is_woken_by_a_delta() -> None:
    sequence = Sequence(1)
    reading = asyncio.create_task(sequence.next())
    await settle()
    sequence.push(Delta("a", [1]))
    assert await reading == Delta("a", [1])


@on_virtual_time
async def test_a_slow_reader_gets_deltas_merged_in_order() -> None:
    sequence = Sequence(1)
    timings = FirstTokenTimings(0.1, 0.2)
    usage = Usage(5, 3, 1)
    sequence.push(Delta("a", [1], timings=timings))
    sequence.push(Delta("b", [2, 3]))
    sequence.push(Delta("", [4], FinishReason.STOP, usage))
    assert await sequence.next() == Delta("ab", [1, 2, 3, 4], FinishReason.STOP, usage, timings)


@on_virtual_time
async def test_deltas_that_were_read_are_not_touched_again() -> None:
    sequence = Sequence(1)
    sequence.push(Delta("a", [1]))
    first = await sequence.next()
    sequence.push(Delta("b", [2]))
    assert await sequence.next() == Delta("b", [2])
    assert first == Delta("a", [1])


@on_virtual_time
async def test_what_came_before_a_failure_is_read_first() -> None:
    sequence = Sequence(1)
    sequence.push(Delta("a", [1]))
    sequence.fail(LOST)
    assert (await sequence.next()).text == "a"
    with pytest.raises(DecodeError, match="lost"):
        await sequence.next()


@on_virtual_time
async def test_the_first_failure_stays() -> None:
    sequence = Sequence(1)
    sequence.fail(NO_ROOM)
    sequence.fail(LOST)
    for _ in range(2):
        with pytest.raises(DecodeError, match="full"):
            await sequence.next()


@on_virtual_time
async def test_a_waiting_reader_hears_of_a_failure() -> None:
    sequence = Sequence(1)
    reading = asyncio.create_task(sequence.next())
    await settle()
    sequence.fail(LOST)
    with pytest.raises(DecodeError, match="lost"):
        await reading


@on_virtual_time
async def test_reserved_returns_once_granted() -> None:
    sequence = Sequence(1)
    waiting = asyncio.create_task(sequence.reserved())
    await settle()
    assert not waiting.done()
    sequence.grant()
    await waiting
    await sequence.reserved()


@on_virtual_time
async def test_reserved_raises_the_refusal() -> None:
    sequence = Sequence(1)
    waiting = asyncio.create_task(sequence.reserved())
    await settle()
    sequence.fail(NO_ROOM)
    with pytest.raises(DecodeError, match="full"):
        await waiting


@on_virtual_time
async def test_a_cancelled_reader_loses_nothing() -> None:
    sequence = Sequence(1)
    reading = asyncio.create_task(sequence.next())
    await settle()
    sequence.push(Delta("a", [1]))
    reading.cancel()
    with pytest.raises(asyncio.CancelledError):
        await reading
    assert (await sequence.next()).text == "a"


@on_virtual_time
async def test_or_failure_lets_work_end() -> None:
    async with Sequence(1).or_failure():
        await asyncio.sleep(1)


@on_virtual_time
async def test_or_failure_ends_work_at_once() -> None:
    sequence = Sequence(1)
    asyncio.get_running_loop().call_later(1, sequence.fail, LOST)
    began = asyncio.get_running_loop().time()
    with pytest.raises(DecodeError, match="lost"):
        async with sequence.or_failure():
            await asyncio.sleep(60)
    assert asyncio.get_running_loop().time() == pytest.approx(began + 1)


@on_virtual_time
async def test_or_failure_does_not_begin_after_a_failure() -> None:
    sequence = Sequence(1)
    sequence.fail(LOST)
    with pytest.raises(DecodeError, match="lost"):
        async with sequence.or_failure():
            raise AssertionError("not to be entered")


@on_virtual_time
async def test_or_failure_leaves_a_time_out_of_the_work_alone() -> None:
    with pytest.raises(TimeoutError):
        async with Sequence(1).or_failure(), asyncio.timeout(1):
            await asyncio.sleep(60)


@on_virtual_time
async def test_a_failure_after_the_work_cancels_nothing() -> None:
    sequence = Sequence(1)
    async with sequence.or_failure():
        await asyncio.sleep(1)
    sequence.fail(LOST)
    await asyncio.sleep(1)

"""How changes of a prefix cache are told: whole at first, then the differences."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import aclosing
from random import Random
from typing import cast

from pdserve.cache_reports import cache_reports
from pdserve.cached_blocks import PART_BLOCKS, CacheChange, CachedBlocks
from pdserve.clock import RealClock
from tests.support.virtual_time import on_virtual_time

INTERVAL_S = 0.25


def watch(blocks: CachedBlocks) -> aclosing[AsyncIterator[CacheChange]]:  # type: ignore[type-var]
    return aclosing(cache_reports(blocks, RealClock(), INTERVAL_S))  # type: ignore[type-var]


def parts(change: CacheChange) -> tuple[bool, set[int], set[int]]:
    return change.anew, set(change.added), set(change.removed)


@on_virtual_time
async def test_the_first_report_is_all_and_the_next_is_what_changed() -> None:
    blocks = CachedBlocks()
    blocks.add([1, 2, 3])
    async with watch(blocks) as reports:
        assert parts(await anext(reports)) == (True, {1, 2, 3}, set())
        blocks.add([3, 4])
        blocks.remove([1, 9])
        assert parts(await anext(reports)) == (False, {4}, {1})


@on_virtual_time
async def test_an_empty_cache_is_told_too() -> None:
    async with watch(CachedBlocks()) as reports:
        assert parts(await anext(reports)) == (True, set(), set())


@on_virtual_time
async def test_what_changes_within_an_interval_is_told_at_once_and_back_and_forth_is_not() -> None:
    blocks = CachedBlocks()
    loop = asyncio.get_running_loop()
    async with watch(blocks) as reports:
        await anext(reports)
        begun = loop.time()
        report = asyncio.ensure_future(cast(asyncio.Future[CacheChange], anext(reports)))
        for name in range(10):
            blocks.add([name])
            blocks.remove([name - 1])
            await asyncio.sleep(INTERVAL_S / 20)
        assert not report.done()
        assert parts(await report) == (False, {9}, set())
        assert loop.time() - begun == INTERVAL_S


@on_virtual_time
async def test_nothing_is_told_while_nothing_changes() -> None:
    blocks = CachedBlocks()
    async with watch(blocks) as reports:
        await anext(reports)
        report = asyncio.ensure_future(cast(asyncio.Future[CacheChange], anext(reports)))
        await asyncio.sleep(INTERVAL_S / 2)
        blocks.add([1])
        blocks.remove([1])
        await asyncio.sleep(600)
        assert not report.done()
        blocks.add([2])
        assert parts(await report) == (False, {2}, set())


@on_virtual_time
async def test_a_slow_reader_is_told_all_anew_where_that_is_less() -> None:
    blocks = CachedBlocks()
    blocks.add(range(100))
    async with watch(blocks) as reports:
        await anext(reports)
        blocks.clear()
        blocks.add(range(200, 203))
        assert parts(await anext(reports)) == (True, {200, 201, 202}, set())


@on_virtual_time
async def test_a_large_change_comes_in_parts() -> None:
    blocks = CachedBlocks()
    blocks.add(range(2 * PART_BLOCKS + 1))
    async with watch(blocks) as reports:
        sizes = [
            (change.anew, len(change.added)) for change in [await anext(reports) for _ in "abc"]
        ]
        assert sizes == [(True, PART_BLOCKS), (False, PART_BLOCKS), (False, 1)]


@on_virtual_time
async def test_closing_ends_a_watch_that_waits() -> None:
    blocks = CachedBlocks()

    async def read() -> int:
        return len([change async for change in cache_reports(blocks, RealClock(), INTERVAL_S)])

    reading = asyncio.create_task(read())
    await asyncio.sleep(1)
    blocks.close()
    assert await reading == 1


@on_virtual_time
async def test_whoever_follows_the_reports_holds_what_the_cache_holds() -> None:
    random = Random(3)
    blocks, followed = CachedBlocks(), set[int]()

    async def follow() -> None:
        async for change in cache_reports(blocks, RealClock(), INTERVAL_S):
            if change.anew:
                followed.clear()
            followed.update(change.added)
            followed.difference_update(change.removed)
            await asyncio.sleep(random.random())

    following = asyncio.create_task(follow())
    held = set[int]()
    for _ in range(500):
        added, removed = random.sample(range(60), 5), random.sample(range(60), 5)
        blocks.add(added)
        blocks.remove(removed)
        held = (held | set(added)) - set(removed)
        if random.random() < 0.05:
            blocks.clear()
            held.clear()
        await asyncio.sleep(random.random() / 5)
    await asyncio.sleep(10)
    assert followed == held
    blocks.close()
    await following

"""How a worker tells what its prefix cache holds."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

from pdserve.cached_blocks import CacheChange, CachedBlocks
from pdserve.clock import Clock


async def cache_reports(
    cached: CachedBlocks, clock: Clock, interval_s: float
) -> AsyncIterator[CacheChange]:
    """All blocks, then what changes: with a pause of `interval_s` before it is looked for again,
    and nothing while nothing changes. Ends when `cached` is closed."""
    news = asyncio.Event()
    untold = cached.listen(news.set)
    try:
        while not cached.closed:
            for change in untold.take():
                yield change
            await clock.sleep(interval_s)
            while not (untold.pending or cached.closed):
                news.clear()
                await news.wait()
    finally:
        cached.leave(untold)

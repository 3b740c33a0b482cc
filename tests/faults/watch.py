"""Waiting for what must happen, within a time that a busy machine does not shorten."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

TICK_S = 0.01


async def happens(condition: Callable[[], Awaitable[bool]], within_s: float) -> bool:
    """Whether it does so in time, which is counted in pauses of this very process: while the
    machine gives it none, time does not pass."""
    for _ in range(round(within_s / TICK_S)):
        if await condition():
            return True
        await asyncio.sleep(TICK_S)
    return await condition()

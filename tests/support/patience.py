"""Waiting for what must happen, within a time that a busy machine does not shorten.

It is counted in pauses of this very process: while the machine gives it none, no time passes.
Whatever tells of itself is waited for by its event; the rest, in other processes and threads, is
asked for again and again, here and nowhere else.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import TypeVar

T = TypeVar("T")

WITHIN_S = 240.0
"""How long a test waits for what must happen, so that it ends where that does not: far more than it
takes, also where processes start beside others that leave them a twentieth of a core."""

TICK_S = 0.01


@asynccontextmanager
async def within(seconds: float) -> AsyncIterator[None]:
    """As `asyncio.timeout` does, raises TimeoutError where the body takes longer."""

    async def count(scope: asyncio.Timeout) -> None:
        for _ in range(round(seconds / TICK_S)):
            await asyncio.sleep(TICK_S)
        scope.reschedule(asyncio.get_running_loop().time())

    async with asyncio.timeout(None) as scope:
        counting = asyncio.create_task(count(scope))
        try:
            yield
        finally:
            counting.cancel()


async def happens(ask: Callable[[], Awaitable[T]], within_s: float, every_s: float = TICK_S) -> T:
    """The first answer that is true, or the last one where none is in time."""
    for _ in range(round(within_s / every_s)):
        if answer := await ask():
            return answer
        await asyncio.sleep(every_s)
    return await ask()


def eventually(ask: Callable[[], T], within_s: float, every_s: float = TICK_S) -> T:
    """As `happens`, where there is no event loop."""
    for _ in range(round(within_s / every_s)):
        if answer := ask():
            return answer
        threading.Event().wait(every_s)
    return ask()

"""Time as a value that is passed in, so that tests and simulations can bring their own."""

from __future__ import annotations

import asyncio
from typing import Protocol


class Clock(Protocol):
    def now(self) -> float:
        """Seconds since some fixed moment; never goes back."""
        ...

    async def sleep(self, seconds: float) -> None:
        """Returns after `seconds`; 0 lets everything that is ready run first."""
        ...


class RealClock:
    """The running event loop's time: real in production, virtual on a virtual-time loop."""

    def now(self) -> float:
        return asyncio.get_running_loop().time()

    async def sleep(self, seconds: float) -> None:
        await asyncio.sleep(seconds)

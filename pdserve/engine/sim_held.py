"""Prompts that the simulated engine has read and holds until they are released or expire."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass

from pdserve.clock import Clock
from pdserve.types import KvDescriptor


@dataclass(slots=True)
class _Held:
    """Keeps its descriptor alive, and with it the descriptor's identity."""

    descriptor: KvDescriptor
    num_tokens: int
    expiry: asyncio.Task[None]


class HeldPrompts:
    """Keyed by the descriptor object itself: those of two prompts of one length are equal."""

    def __init__(self, clock: Clock, on_release: Callable[[], None]) -> None:
        self._clock = clock
        self._on_release = on_release
        self._held: dict[int, _Held] = {}
        self.num_tokens = 0

    def add(self, descriptor: KvDescriptor, num_tokens: int, lease_s: float) -> None:
        """Holds the prompt for `lease_s` seconds, unless it is released before."""

        self._held[id(descriptor)] = _Held(
            descriptor, num_tokens, self._expiry(descriptor, lease_s)
        )
        self.num_tokens += num_tokens

    def renew(self, descriptor: KvDescriptor, lease_s: float) -> bool:
        """Holds it for `lease_s` seconds from now; False where it is not held."""
        held = self._held.get(id(descriptor))
        if held is None:
            return False
        held.expiry.cancel()
        held.expiry = self._expiry(descriptor, lease_s)
        return True

    def release(self, descriptor: KvDescriptor) -> None:
        """Idempotent."""
        held = self._held.pop(id(descriptor), None)
        if held is not None:
            held.expiry.cancel()
            self.num_tokens -= held.num_tokens
            self._on_release()

    def _expiry(self, descriptor: KvDescriptor, lease_s: float) -> asyncio.Task[None]:
        async def expire() -> None:
            await self._clock.sleep(lease_s)
            self.release(descriptor)

        return asyncio.create_task(expire(), name="sim lease")

    def release_all(self) -> None:
        for held in tuple(self._held.values()):
            self.release(held.descriptor)

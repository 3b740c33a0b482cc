"""Request rates, one moving window for each key."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import lru_cache

import limits
from limits.aio.storage import MemoryStorage, Storage
from limits.aio.strategies import MovingWindowRateLimiter

from coordinator.gateway.keys import Caller
from pdserve.errors import ConfigError, ErrorReason, RejectedError


class RateLimiter:
    """Counts the requests of each key; `storage` may be shared between coordinators.

    `default` is the rate of keys without their own, as in "600/minute"; None is no limit.
    Anonymous callers share one window. `now` is in seconds since the Unix epoch, the
    clock that the storage counts by.
    """

    def __init__(
        self,
        default: str | None,
        storage: Storage | None = None,
        now: Callable[[], float] = time.time,
    ) -> None:
        if default is not None:
            try:
                limits.parse(default)
            except ValueError as error:
                raise ConfigError(f"gateway.rate: {error}") from None
        self._default = default
        self._limiter = MovingWindowRateLimiter(MemoryStorage() if storage is None else storage)
        self._now = now

    async def check(self, caller: Caller) -> None:
        """Counts one request. Raises RejectedError RATE_LIMITED, which counts for nothing."""
        rate = caller.rate or self._default
        if rate is None:
            return
        item = _parsed(rate)
        if await self._limiter.hit(item, caller.key_id):
            return
        window = await self._limiter.get_window_stats(item, caller.key_id)
        raise RejectedError(
            ErrorReason.RATE_LIMITED,
            f"the key's rate of {rate} is used up",
            retry_after_s=max(0.0, window.reset_time - self._now()),
        )


@lru_cache(maxsize=1024)
def _parsed(rate: str) -> limits.RateLimitItem:
    return limits.parse(rate)

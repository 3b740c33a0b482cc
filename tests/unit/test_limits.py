from __future__ import annotations

import time

import pytest
from limits.aio.storage import MemoryStorage

from coordinator.gateway.keys import Caller
from coordinator.gateway.limits import RateLimiter
from pdserve.errors import ConfigError, ErrorReason, RejectedError


def caller(key_id: str, rate: str | None = None) -> Caller:
    return Caller("acme", key_id, admin=False, may_choose_mode=True, rate=rate)


async def refused(limiter: RateLimiter, who: Caller) -> RejectedError:
    with pytest.raises(RejectedError) as caught:
        await limiter.check(who)
    assert caught.value.reason is ErrorReason.RATE_LIMITED
    return caught.value


async def test_each_key_has_its_own_window() -> None:
    limiter = RateLimiter("2/hour")
    for _ in range(2):
        await limiter.check(caller("a"))
    error = await refused(limiter, caller("a"))
    assert error.retry_after_s is not None
    assert 3590 < error.retry_after_s <= 3600
    await limiter.check(caller("b"))


async def test_the_key_overrules_the_default() -> None:
    limiter = RateLimiter("1/hour")
    for _ in range(3):
        await limiter.check(caller("a", "3/hour"))
    await refused(limiter, caller("a", "3/hour"))


async def test_a_refused_request_counts_for_nothing() -> None:
    storage = MemoryStorage()
    limiter = RateLimiter("1/hour", storage)
    await limiter.check(caller("a"))
    for _ in range(5):
        await refused(limiter, caller("a"))
    assert [len(entries) for entries in storage.events.values()] == [1]


async def test_retry_after_is_never_negative() -> None:
    limiter = RateLimiter("1/second", now=lambda: time.time() + 10)
    await limiter.check(caller("a"))
    assert (await refused(limiter, caller("a"))).retry_after_s == 0.0


async def test_no_rate_is_no_limit() -> None:
    limiter = RateLimiter(None)
    for _ in range(100):
        await limiter.check(caller("a"))


@pytest.mark.parametrize("rate", ["often", "", "10", "10/fortnight"])
def test_a_default_that_is_no_rate(rate: str) -> None:
    with pytest.raises(ConfigError, match=r"gateway\.rate"):
        RateLimiter(rate)

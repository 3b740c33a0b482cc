"""What waits for a worker is ended once, however the worker ends."""

from __future__ import annotations

import asyncio

import pytest

from coordinator.worker import Worker
from pdserve.errors import PrefillError
from tests.support.fake_worker import FakeWorker
from tests.support.virtual_time import on_virtual_time


@pytest.mark.parametrize("turns", range(4))
@on_virtual_time
async def test_a_worker_may_be_lost_at_any_moment_after_it_was_suspected(turns: int) -> None:
    worker = Worker(FakeWorker("p"), connected=True)

    async def wait() -> None:
        async with worker.or_loss():
            await asyncio.Event().wait()

    waiting = asyncio.create_task(wait())
    await asyncio.sleep(0)
    worker.suspect()
    for _ in range(turns):
        await asyncio.sleep(0)
    worker.lose()
    with pytest.raises(PrefillError):
        await waiting

"""What a session of a decode worker holds is given back, whenever its call is cancelled."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import aclosing
from typing import Any

from decode_svc.service import DecodeService
from pdserve import convert
from pdserve.clock import RealClock
from pdserve.engine.sim import SimEngine
from pdserve.v1 import decode_pb2
from pdserve.workload import Workload
from tests.support.patience import WITHIN_S
from tests.support.sim_worker import FAST, REVISION, SEAL_KEY, request


async def test_a_sequence_that_is_started_as_its_call_is_cancelled_leaves_nothing() -> None:
    workload = Workload(lambda *_: None)
    engine = SimEngine(FAST, REVISION, RealClock())
    await engine.start(workload.step)
    service = DecodeService(engine, workload, time.time, SEAL_KEY)
    sent: asyncio.Queue[decode_pb2.SessionRequest] = asyncio.Queue()

    async def commands() -> AsyncIterator[decode_pb2.SessionRequest]:
        while True:
            yield await sent.get()

    async def call() -> None:
        context: Any = None
        async with aclosing(service.Session(commands(), context)) as messages:  # type: ignore[type-var]
            async for _ in messages:
                pass

    for turns in range(6):
        calling = asyncio.create_task(call())
        for _ in range(5):
            await asyncio.sleep(0)
        start = convert.start_to_proto(1, request(), None)
        sent.put_nowait(decode_pb2.SessionRequest(start=start))
        for _ in range(turns):
            await asyncio.sleep(0)
        calling.cancel()
        await asyncio.gather(calling, return_exceptions=True)
        async with asyncio.timeout(WITHIN_S):
            await workload.ended()
        # The callbacks of a task that has ended run in the loop's next turn.
        await asyncio.sleep(0)
        assert workload.room is not None
        assert workload.room.charged_tokens == 0
        assert workload.load.reserved_tokens == 0
    await engine.close()

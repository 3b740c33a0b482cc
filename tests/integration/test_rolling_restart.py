"""Every process of a fleet is replaced under load, one after another, and no request fails."""

from __future__ import annotations

import asyncio
import json
from contextlib import AsyncExitStack
from pathlib import Path

import httpx

from pdserve.config import SimConfig
from pdserve.types import Role
from tests.support.coordinator_process import Running, coordinator
from tests.support.doors import Doors
from tests.support.patience import WITHIN_S
from tests.support.sim_fleet import MODEL
from tests.support.worker_process import WorkerProcess, worker_process

SIM = SimConfig(prefill_token_s=0.0005, decode_step_s=0.01, chunk_tokens=64)
"""An answer takes about a quarter of a second."""
TOKENS = 20
NOTICE_S = 5
"""More than lies between an asker's look at a coordinator's health and its request."""
ASKERS = 4
ROLES = {"p1": Role.PREFILL, "p2": Role.PREFILL, "d1": Role.DECODE, "d2": Role.DECODE}


class Rolling:
    """Two prefill and two decode workers, found in a file, behind two coordinators."""

    def __init__(self, folder: Path, life: AsyncExitStack, client: httpx.AsyncClient) -> None:
        self._folder = folder
        self._life = life
        self._workers: dict[str, WorkerProcess] = {}
        self._list = folder / "workers.yaml"
        self.doors = Doors(client, MODEL, TOKENS)
        self.coordinators: list[Running] = []

    async def start(self) -> None:
        workers = await asyncio.gather(*map(self._start_worker, ROLES))
        self._workers.update(zip(ROLES, workers, strict=True))
        self._tell()
        for running, address in await asyncio.gather(
            *map(self._start_coordinator, ("first", "second"))
        ):
            self.coordinators.append(running)
            self.doors.addresses.append(address)

    async def replace_worker(self, worker_id: str) -> None:
        first = self.doors.addresses[0]
        before = await self.doors.until_serves(first, worker_id, None, WITHIN_S)
        process = self._workers[worker_id].process
        process.terminate()
        assert await process.wait() == 0
        self._workers[worker_id] = await self._start_worker(worker_id)
        self._tell()
        for address in self.doors.addresses:
            await self.doors.until_serves(address, worker_id, before, WITHIN_S)

    async def replace_coordinator(self, at: int) -> None:
        """The new one starts while the old one drains."""
        process = self.coordinators[at].process
        process.terminate()
        (running, address), status = await asyncio.gather(
            self._start_coordinator(f"again-{at}"), process.wait()
        )
        assert status == 0
        self.coordinators[at], self.doors.addresses[at] = running, address

    async def _start_worker(self, worker_id: str) -> WorkerProcess:
        started = worker_process(self._folder, worker_id, ROLES[worker_id], SIM)
        return await self._life.enter_async_context(started)

    async def _start_coordinator(self, name: str) -> tuple[Running, str]:
        running = await self._life.enter_async_context(
            coordinator(self._folder, [f"file:{self._list}"], name=name, notice_s=NOTICE_S)
        )
        address: str = (await running.wait_for("listening"))["http"]
        await running.wait_for("ready")
        return running, address

    def _tell(self) -> None:
        self._list.write_text(json.dumps([worker.address for worker in self._workers.values()]))


async def test_no_request_fails_while_every_process_is_replaced(tmp_path: Path) -> None:
    # One connection for each request.
    limits = httpx.Limits(max_keepalive_connections=0)
    async with (
        httpx.AsyncClient(trust_env=False, timeout=WITHIN_S, limits=limits) as client,
        AsyncExitStack() as life,
    ):
        fleet = Rolling(tmp_path, life, client)
        await fleet.start()
        async with fleet.doors.under_load(ASKERS) as load:
            for worker_id in ROLES:
                await fleet.replace_worker(worker_id)
                await load.goes_on()
            for at in range(2):
                await fleet.replace_coordinator(at)
                await load.goes_on()
        assert min(load.asked) > 10

"""Every process of a fleet is replaced under load, one after another, and no request fails."""

from __future__ import annotations

import asyncio
import itertools
import json
from contextlib import AsyncExitStack, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx

from pdserve.config import SimConfig
from pdserve.types import Role
from tests.support.asking import TEXT, events
from tests.support.coordinator_process import Running, coordinator
from tests.support.sim_fleet import MODEL, WITHIN_S
from tests.support.worker_process import WorkerProcess, worker_process

SIM = SimConfig(prefill_token_s=0.0005, decode_step_s=0.01, chunk_tokens=64)
"""An answer takes about half a second."""
TOKENS = 40
NOTICE_S = 5
"""More than lies between an asker's look at a coordinator's health and its request."""
ASKERS = 6
ROLES = {"p1": Role.PREFILL, "p2": Role.PREFILL, "d1": Role.DECODE, "d2": Role.DECODE}


@dataclass
class Doors:
    """The coordinators' addresses as a load balancer knows them: it asks for their health."""

    client: httpx.AsyncClient
    addresses: list[str] = field(default_factory=list)

    async def pick(self) -> str:
        for at in itertools.count():
            address = self.addresses[at % len(self.addresses)]
            with suppress(httpx.TransportError):
                if (await self.client.get(f"http://{address}/health/ready")).status_code == 200:
                    return address
        raise AssertionError


async def ask(doors: Doors, number: int) -> None:
    """One streamed request on a connection of its own; fails if it is not answered in full."""
    mode = ("colocated", "disaggregated")[number % 2]
    body = {
        "model": MODEL,
        "prompt": f"{number} {TEXT}",
        "max_tokens": TOKENS,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    address = await doors.pick()
    async with doors.client.stream(
        "POST",
        f"http://{address}/v1/completions",
        json=body,
        headers={"x-pdserve-mode": mode, "connection": "close"},
    ) as response:
        lines = [line async for line in response.aiter_lines()]
        assert response.status_code == 200, lines
    *_, usage, done = events(lines)
    assert done == "[DONE]", usage
    assert usage["usage"]["completion_tokens"] == TOKENS


async def asking(doors: Doors, numbers: itertools.count[int], enough: asyncio.Event) -> int:
    asked = 0
    while not enough.is_set():
        await ask(doors, next(numbers))
        asked += 1
    return asked


async def fleet_of(client: httpx.AsyncClient, address: str) -> dict[str, str]:
    """The epoch of each worker that is ready, by its id; None of it but of ready ones."""
    fleet: Any = (await client.get(f"http://{address}/fleet")).json()
    serving = ("ready", "loaded")
    return {w["id"]: w["epoch"] for w in fleet["workers"] if w["state"] in serving}


async def until_replaced(doors: Doors, worker_id: str, before: dict[str, str]) -> None:
    """Returns when each coordinator has proven the worker's new process."""
    async with asyncio.timeout(WITHIN_S):
        for address in doors.addresses:
            old = before[worker_id]
            while (await fleet_of(doors.client, address)).get(worker_id, old) == old:  # noqa: ASYNC110
                await asyncio.sleep(0.2)


class Rolling:
    """Two prefill and two decode workers, found in a file, behind two coordinators."""

    def __init__(self, folder: Path, life: AsyncExitStack, client: httpx.AsyncClient) -> None:
        self._folder = folder
        self._life = life
        self._workers: dict[str, WorkerProcess] = {}
        self._list = folder / "workers.yaml"
        self.doors = Doors(client)
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
        before = await fleet_of(self.doors.client, self.doors.addresses[0])
        process = self._workers[worker_id].process
        process.terminate()
        assert await process.wait() == 0
        self._workers[worker_id] = await self._start_worker(worker_id)
        self._tell()
        await until_replaced(self.doors, worker_id, before)

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
        enough, numbers = asyncio.Event(), itertools.count()
        async with asyncio.TaskGroup() as load:
            askers = [load.create_task(asking(fleet.doors, numbers, enough)) for _ in range(ASKERS)]
            for worker_id in ROLES:
                await fleet.replace_worker(worker_id)
            for at in range(2):
                await fleet.replace_coordinator(at)
            enough.set()
        assert sum(asker.result() for asker in askers) > 10 * ASKERS

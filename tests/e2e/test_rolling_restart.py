"""Real workers and a coordinator are restarted under load, one after another, and no request
fails."""

from __future__ import annotations

import asyncio
import json
import os
import sys
from asyncio.subprocess import DEVNULL, PIPE, Process
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import httpx
import pytest

from tests.support.doors import Doors
from tests.support.fleet import Fleet, until
from tests.support.second_coordinator import second_coordinator

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(900)]

ASKERS = 3
TOKENS = 24
STARTED_WITHIN_S = 300.0


@asynccontextmanager
async def one_more_decode_worker(fleet: Fleet) -> AsyncIterator[str]:
    """Its address: a pool of one has nobody to take over."""
    env = fleet.system.child("decode-0").environ()
    config = json.loads(env["PDSERVE_WORKER"])
    config["id"] = "decode-more"
    for listen in (config["grpc"], config["metrics"], config["vllm"]["side_channel"]):
        listen["port"] = 0
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "cli.main", "worker", "--parent", str(os.getpid())),
        stdout=PIPE,
        stderr=DEVNULL,
        env={**os.environ, "PDSERVE_WORKER": json.dumps(config)},
    )
    try:
        async with asyncio.timeout(STARTED_WITHIN_S):
            address = await _address(process)
        yield address
    finally:
        process.terminate()
        await process.communicate()


async def _address(worker: Process) -> str:
    assert worker.stdout is not None
    async for line in worker.stdout:
        if line.startswith(b'{"event"'):  # its engine writes there, too
            told = json.loads(line)
            return str(told["grpc"])
    raise AssertionError("the worker ended")


class Rolling:
    """The fleet behind its own coordinator and a second one, which knows one more worker."""

    def __init__(self, fleet: Fleet, doors: Doors) -> None:
        self._fleet = fleet
        self._doors = doors

    async def restart_worker(self, name: str) -> None:
        """Returns when each coordinator has proven its new process."""
        before = await self.until_served(name)
        await self._restart(name)
        await self.until_served(name, not_in=before)

    async def until_served(self, name: str, not_in: str | None = None) -> str:
        """The epoch of the process of the worker that each coordinator has proven."""
        for address in self._doors.addresses:
            epoch = await self._doors.until_serves(address, name, not_in, STARTED_WITHIN_S)
        return epoch

    async def restart_coordinator(self) -> None:
        await self._restart("coordinator")
        await asyncio.to_thread(until, self._fleet.ready, STARTED_WITHIN_S)

    async def _restart(self, name: str) -> None:
        since = len(self._fleet.system.events)
        self._fleet.system.child(name).terminate()
        await asyncio.to_thread(
            self._fleet.system.wait_for,
            *("restarted",),
            name=name,
            since=since,
            timeout=STARTED_WITHIN_S,
        )


async def test_no_request_fails_while_all_is_restarted(fleet: Fleet) -> None:
    mine = [fleet.system.worker_address(name) for name in ("prefill-0", "decode-0")]
    # One connection for each request.
    limits = httpx.Limits(max_keepalive_connections=0)
    async with (
        one_more_decode_worker(fleet) as more,
        httpx.AsyncClient(trust_env=False, timeout=STARTED_WITHIN_S, limits=limits) as client,
    ):
        with second_coordinator(fleet, workers=(*mine, more)) as second:
            addresses = [door.base_url.removeprefix("http://") for door in (second, fleet)]
            doors = Doors(client, fleet.model, TOKENS, addresses)
            rolling = Rolling(fleet, doors)
            await doors.until_serves(addresses[0], "decode-more", None, STARTED_WITHIN_S)
            async with doors.under_load(ASKERS) as load:
                for name in ("decode-0", "prefill-0"):
                    await rolling.restart_worker(name)
                await rolling.restart_coordinator()
            assert min(load.asked) > 3
    # For the tests that follow.
    until(fleet.ready)

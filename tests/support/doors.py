"""Clients of several coordinators, who know them as a load balancer does: by their health."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from typing import Any

import httpx

from tests.support.asking import TEXT, events
from tests.support.patience import happens

LOOK_S = 0.2
SERVING = ("ready", "loaded")
"""The states of workers that may be given work."""


@dataclass
class Load:
    """`asked` tells how often each of the askers has been answered."""

    asked: list[int]
    _news: asyncio.Event = field(default_factory=asyncio.Event)

    def answered(self, asker: int) -> None:
        self.asked[asker] += 1
        self._news.set()

    async def goes_on(self) -> None:
        """Returns when each has asked anew from now on, and has been answered."""
        enough = [number + 2 for number in self.asked]
        while any(number < least for number, least in zip(self.asked, enough, strict=True)):
            self._news.clear()
            await self._news.wait()


@dataclass
class Doors:
    """Streams requests through whichever coordinator is ready.

    `client` must keep no connection open; `addresses` are the coordinators', and may change at
    any time.
    """

    client: httpx.AsyncClient
    model: str
    tokens: int
    addresses: list[str] = field(default_factory=list)

    async def pick(self) -> str:
        for at in itertools.count():
            address = self.addresses[at % len(self.addresses)]
            with suppress(httpx.TransportError):
                if (await self.client.get(f"http://{address}/health/ready")).status_code == 200:
                    return address
        raise AssertionError

    async def ask(self, number: int) -> None:
        """One request, by turns in either mode; fails if it is not answered in full."""
        mode = ("colocated", "disaggregated")[number % 2]
        body = {
            "model": self.model,
            "prompt": f"{number} {TEXT}",
            "max_tokens": self.tokens,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        address = await self.pick()
        async with self.client.stream(
            "POST",
            f"http://{address}/v1/completions",
            json=body,
            headers={"x-pdserve-mode": mode, "connection": "close"},
        ) as response:
            lines = [line async for line in response.aiter_lines()]
            assert response.status_code == 200, lines
        *_, usage, done = events(lines)
        assert done == "[DONE]", usage
        assert usage["usage"]["completion_tokens"] == self.tokens

    @asynccontextmanager
    async def under_load(self, askers: int) -> AsyncIterator[Load]:
        """Each asks one thing after another for as long as the context is open."""
        enough, numbers, load = asyncio.Event(), itertools.count(), Load([0] * askers)

        async def keep_asking(asker: int) -> None:
            while not enough.is_set():
                await self.ask(next(numbers))
                load.answered(asker)

        async with asyncio.TaskGroup() as asking:
            for asker in range(askers):
                asking.create_task(keep_asking(asker))
            yield load
            enough.set()

    async def epochs(self, address: str) -> dict[str, str]:
        """Of the workers that this coordinator may give work, by their ids."""
        fleet: Any = (await self.client.get(f"http://{address}/fleet")).json()
        return {w["id"]: w["epoch"] for w in fleet["workers"] if w["state"] in SERVING}

    async def until_serves(
        self, address: str, worker_id: str, not_in: str | None, within_s: float
    ) -> str:
        """The epoch of the process of the worker that this coordinator has proven, once there is
        one other than that of `not_in`."""

        async def proven() -> str | None:
            epoch = (await self.epochs(address)).get(worker_id)
            return None if epoch == not_in else epoch

        epoch = await happens(proven, within_s, LOOK_S)
        assert epoch is not None, f"{address} has not proven {worker_id}"
        return epoch

"""The HTTP façade on a real socket, over a scripted dispatcher."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import httpx

from coordinator.facade.http import build_app
from coordinator.gateway.keys import KeyRing
from coordinator.main import HttpServer
from pdserve.config import GatewayConfig, Listen
from pdserve.parsing import ChatParser
from tests.support.fake_dispatch import (
    MODEL,
    ROUTE,
    FakeDispatcher,
    FakeObserver,
    FakeOps,
    answer,
    gateway_without_fleet,
    served,
)
from tests.support.patience import WITHIN_S

CHAT_PATH, COMPLETION_PATH = "/v1/chat/completions", "/v1/completions"
CHAT = {"model": MODEL, "messages": [{"role": "user", "content": "Hi"}]}
COMPLETION = {"model": MODEL, "prompt": "Hi"}
MAX_BODY = 64 * 1024


@dataclass(slots=True)
class HttpFacade:
    address: str
    client: httpx.AsyncClient
    dispatcher: FakeDispatcher
    observer: FakeObserver
    ops: FakeOps

    def reset(self) -> None:
        """Forgets what earlier tests did."""
        self.dispatcher.script = answer("Hello", " world")
        self.dispatcher.route = ROUTE
        self.dispatcher.seen.clear()
        self.dispatcher.streams.clear()
        self.dispatcher.opening.clear()
        self.dispatcher.open_cancelled.clear()
        self.observer.ends.clear()
        self.observer.ended.clear()
        self.ops.is_ready = True


@asynccontextmanager
async def http_facade(
    config: GatewayConfig | None = None,
    keys: KeyRing | None = None,
    parser: ChatParser | None = None,
) -> AsyncIterator[HttpFacade]:
    config = config or GatewayConfig()
    observer = FakeObserver()
    dispatcher = FakeDispatcher(observer, served(parser=parser))
    gateway = gateway_without_fleet(config, keys or KeyRing.open_to_all(), dispatcher.models)
    ops = FakeOps()
    server = HttpServer(build_app(dispatcher, gateway, observer, ops), Listen(), drain_s=1)
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(server.serve_until_stopped())
        await server.listening.wait()
        base = f"http://{server.address}"
        async with httpx.AsyncClient(base_url=base, timeout=WITHIN_S) as client:
            yield HttpFacade(server.address, client, dispatcher, observer, ops)
        server.should_exit = True


async def chat(facade: HttpFacade, **fields: Any) -> httpx.Response:
    return await facade.client.post(CHAT_PATH, json={**CHAT, **fields})


def assert_error(response: httpx.Response, status: int, code: str, param: str | None) -> None:
    """An error in OpenAI's shape, whole and with nothing else in it."""
    assert (response.status_code, response.headers["content-type"]) == (status, "application/json")
    error = response.json()["error"]
    assert set(response.json()) == {"error"}
    assert set(error) == {"message", "type", "param", "code"}
    assert (error["code"], error["param"]) == (code, param)
    assert error["message"]
    assert response.headers["x-request-id"]

"""Calls between simulated hosts end for both sides, whatever happens on the way."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from random import Random
from typing import Any

import grpc
import pytest

from measure.simulation import virtual_time
from measure.simulation.network import KEEPALIVE_S, Host, Network
from measure.simulation.rpc import Channel, Server


class Serving:
    """A method that answers once, and then for ever not."""

    def __init__(self) -> None:
        self.running = 0

    async def __call__(self, request: Any, context: Any) -> AsyncIterator[Any]:
        self.running += 1
        try:
            yield request
            await asyncio.Event().wait()
        finally:
            self.running -= 1


async def hosts(serving: Serving) -> tuple[Host, Host, Channel]:
    network = Network(Random(1))
    client, server = network.add("client"), network.add("server")
    offered = Server(server)
    handler = grpc.unary_stream_rpc_method_handler(serving)
    offered.add_registered_method_handlers("a.Service", {"Serve": handler})
    await offered.start()
    client.up = True
    return client, server, Channel(client, server)


def crash(server: Host) -> None:
    server.go_down()


def stay_apart(_: Host) -> None:
    """Long enough for the keepalive of whoever has not hung up."""


@pytest.mark.parametrize("then", [crash, stay_apart])
def test_a_server_that_cannot_hear_its_client_leave_ends_all_the_same(
    then: Callable[[Host], None],
) -> None:
    async def play() -> None:
        serving = Serving()
        client, server, channel = await hosts(serving)
        call = channel.unary_stream("/a.Service/Serve")("asked")
        assert await call.read() == "asked"
        network = client.network
        for path in (network.path(client, server), network.path(server, client)):
            path.block()
        call.cancel()
        await virtual_time.settle()
        assert serving.running == 1, "it has not heard of it"
        then(server)
        await asyncio.sleep(KEEPALIVE_S + 1)
        assert serving.running == 0

    virtual_time.run(play())

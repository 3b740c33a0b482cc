"""Real gRPC servers on free ports, as context managers."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import grpc
from google.protobuf.descriptor import FileDescriptor

from pdserve.config import Listen
from pdserve.server import GrpcServer

Service = tuple[Callable[[Any, grpc.aio.Server], None], Any, FileDescriptor]
"""The generated adder, the servicer, and the descriptor of its proto file."""


@asynccontextmanager
async def serve(
    *services: Service, key: str | None = None, serving: bool = True
) -> AsyncIterator[GrpcServer]:
    """A running server, SERVING unless told otherwise."""
    server = GrpcServer(Listen(), key)
    for adder, servicer, file in services:
        server.add(adder, servicer, file)
    async with server:
        if serving:
            await server.set_serving(True)
        yield server

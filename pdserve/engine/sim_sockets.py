"""Where simulated holders of KV listen and their readers connect: sockets, or a simulated network.

asyncio's own streams are both ends of a connection; only what is used of them is asked for.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Protocol

from pdserve.config import Listen


class Writer(Protocol):
    """The sending end of a connection; asyncio.StreamWriter is one."""

    def write(self, data: bytes) -> None: ...

    async def drain(self) -> None:
        """Raises ConnectionError where the peer is gone."""
        ...

    def close(self) -> None: ...


class Listener(Protocol):
    """An open port; `host` and `port` are what peers connect to."""

    host: str
    port: int

    def close(self) -> None: ...


Accept = Callable[[asyncio.StreamReader, Writer], None]


class Sockets(Protocol):
    async def listen(self, accept: Accept, at: Listen) -> Listener:
        """Has `accept` called for each connection from now on."""
        ...

    async def connect(self, host: str, port: int) -> tuple[asyncio.StreamReader, Writer]:
        """Raises OSError where nobody listens."""
        ...


class RealSockets:
    """Those of this machine."""

    async def listen(self, accept: Accept, at: Listen) -> Listener:
        return _RealListener(await asyncio.start_server(accept, at.host, at.port))

    async def connect(self, host: str, port: int) -> tuple[asyncio.StreamReader, Writer]:
        return await asyncio.open_connection(host, port)


class _RealListener:
    def __init__(self, server: asyncio.Server) -> None:
        self._server = server
        self.host, self.port = server.sockets[0].getsockname()[:2]

    def close(self) -> None:
        self._server.close()

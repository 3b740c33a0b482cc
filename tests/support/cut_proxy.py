"""A TCP proxy that can stop forwarding without closing anything, as a broken network does."""

from __future__ import annotations

import asyncio
from contextlib import suppress

from pdserve.config import LOOPBACK


class CutProxy:
    """From a port of its own to `target`, a port on this machine that may be set later."""

    def __init__(self) -> None:
        self.target = 0
        self.port = 0
        self._whole = asyncio.Event()
        self._whole.set()
        self._server: asyncio.Server | None = None
        self._connections: set[asyncio.Task[None]] = set()

    async def start(self) -> None:
        self._server = await asyncio.start_server(self._accept, LOOPBACK, 0)
        self.port = self._server.sockets[0].getsockname()[1]

    async def close(self) -> None:
        assert self._server is not None
        self._server.close()
        for task in self._connections:
            task.cancel()
        await asyncio.gather(*self._connections, return_exceptions=True)

    def cut(self) -> None:
        """Whatever is sent from now on, an end too, is kept until `heal`."""
        self._whole.clear()

    def heal(self) -> None:
        self._whole.set()

    def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.create_task(self._connect(reader, writer))
        self._connections.add(task)
        task.add_done_callback(self._connections.discard)

    async def _connect(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        onward: asyncio.StreamWriter | None = None
        try:
            await self._whole.wait()
            with suppress(OSError):
                back, onward = await asyncio.open_connection(LOOPBACK, self.target)
                async with asyncio.TaskGroup() as ways:
                    ways.create_task(self._forward(reader, onward))
                    ways.create_task(self._forward(back, writer))
        finally:
            for end in (writer, onward):
                if end is not None:
                    end.transport.abort()

    async def _forward(self, source: asyncio.StreamReader, sink: asyncio.StreamWriter) -> None:
        with suppress(ConnectionError):
            while data := await source.read(65536):
                await self._whole.wait()
                sink.write(data)
                await sink.drain()
        await self._whole.wait()
        with suppress(OSError):
            sink.close()

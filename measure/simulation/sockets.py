"""Byte streams between simulated hosts: what engines fetch each other's KV by."""

from __future__ import annotations

import asyncio

from measure.simulation.network import Host
from pdserve.config import Listen
from pdserve.engine.sim_sockets import Accept, Listener, Writer

_FIRST_PORT = 10_000


class HostSockets:
    """The `Sockets` of one host's process."""

    def __init__(self, host: Host) -> None:
        self._host = host

    async def listen(self, accept: Accept, at: Listen) -> Listener:
        port = _FIRST_PORT + len(self._host.ports)
        self._host.ports[port] = accept
        return _HostListener(self._host, port)

    async def connect(self, host: str, port: int) -> tuple[asyncio.StreamReader, Writer]:
        pipe = _Pipe(self._host, self._host.network.hosts[host])
        try:
            await pipe.connect(port)
        except BaseException:
            pipe.close(self._host)
            raise
        return pipe.readers[self._host], _PipeWriter(pipe, self._host)


class _HostListener:
    def __init__(self, host: Host, port: int) -> None:
        self._ports = host.ports
        self.host = host.name
        self.port = port

    def close(self) -> None:
        self._ports.pop(self.port, None)


class _Pipe:
    """A connection between two hosts, both ends of it."""

    def __init__(self, source: Host, target: Host) -> None:
        self._source = source
        self._target = target
        self.readers = {host: asyncio.StreamReader() for host in (source, target)}
        self._flows = {source: source.network.open(self, source, target)}
        self._connected: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        # Whoever connects may have left by then.
        self._connected.add_done_callback(lambda done: done.cancelled() or done.exception())
        self._broken: set[Host] = set()

    async def connect(self, port: int) -> None:
        self._flows[self._source].send(self._accept, port)
        await self._connected

    def _accept(self, port: int) -> None:
        target = self._target
        accept = target.ports.get(port) if target.up else None
        back = self._flows[target] = target.network.open(self, target, self._source)
        if accept is None:
            back.send(self.broken, self._source)
            target.network.close(self, target, self._source)
            return
        accept(self.readers[self._target], _PipeWriter(self, self._target))
        back.send(self._established)

    def _established(self) -> None:
        if not self._connected.done():
            self._connected.set_result(None)

    def write(self, at: Host, data: bytes) -> None:
        peer = self._target if at is self._source else self._source
        self._flows[at].send(self._feed, peer, data)

    def _feed(self, at: Host, data: bytes) -> None:
        reader = self.readers[at]
        if reader.exception() is None and not reader.at_eof():
            reader.feed_data(data)

    def close(self, at: Host) -> None:
        peer = self._target if at is self._source else self._source
        at.network.close(self, at, peer)
        self._flows[at].send(self._feed_eof, peer)

    def _feed_eof(self, at: Host) -> None:
        if self.readers[at].exception() is None:
            self.readers[at].feed_eof()

    def is_broken(self, at: Host) -> bool:
        return at in self._broken

    def broken(self, at: Host) -> None:
        self._broken.add(at)
        self.readers[at].set_exception(ConnectionResetError())
        if at is self._source and not self._connected.done():
            self._connected.set_exception(ConnectionRefusedError())


class _PipeWriter:
    def __init__(self, pipe: _Pipe, host: Host) -> None:
        self._pipe = pipe
        self._host = host

    def write(self, data: bytes) -> None:
        self._pipe.write(self._host, data)

    async def drain(self) -> None:
        if self._pipe.is_broken(self._host):
            raise ConnectionResetError

    def close(self) -> None:
        self._pipe.close(self._host)

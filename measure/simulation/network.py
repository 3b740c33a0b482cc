"""Hosts in one process and the paths between them, on virtual time.

What is sent over a path arrives in order, after its latency. A path can be cut, slowed, or
blocked for a while; what is under way on a blocked path waits, as TCP has it. Connections learn
of a path that stays blocked by their keepalive pings.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from random import Random
from typing import Any, Protocol

KEEPALIVE_S = 9.0
"""From a peer's silence to the end of its connections: KEEPALIVE_OPTIONS in pdserve/channel.py."""

_ORDER_S = 2e-9
"""Between two arrivals on one flow, so that the loop's heap keeps them in order."""


class Connection(Protocol):
    """What two hosts have open between them."""

    def broken(self, at: Host) -> None:
        """The end at this host finds the connection broken."""
        ...


class Host:
    """A machine's process: up or down, and open to whoever listens on it.

    `paused` says that it is stopped, as by SIGSTOP; `speed` divides the time that its clock's
    sleeps take.
    """

    def __init__(self, name: str, network: Network) -> None:
        self.name = name
        self.network = network
        self.up = False
        self.speed = 1.0
        self.services: dict[str, Any] = {}
        self.ports: dict[int, Any] = {}
        self._resumed = asyncio.Event()
        self._resumed.set()

    @property
    def paused(self) -> bool:
        return not self._resumed.is_set()

    def go_down(self) -> None:
        """The process dies: nothing listens any more, and its peers find that out."""
        self.up = False
        self.services.clear()
        self.ports.clear()
        self.network.reset(self)
        self.resume()

    def pause(self) -> None:
        """Quiet where no process runs."""
        if self.up and not self.paused:
            self._resumed.clear()
            self.network.block(self)

    def resume(self) -> None:
        if self.paused:
            self._resumed.set()
            self.network.unblock(self)

    # Clock

    def now(self) -> float:
        return asyncio.get_running_loop().time()

    async def sleep(self, seconds: float) -> None:
        await asyncio.sleep(seconds / self.speed)
        if self.paused:
            await self._resumed.wait()


class Path:
    """The way from one host to another, one direction of it."""

    def __init__(self, network: Network, source: Host, target: Host) -> None:
        self.source = source
        self.target = target
        self.late_s = 0.0
        """What arrives is late by up to so much, at random."""
        self._network = network
        self._blocks = 0
        self._waiting: list[tuple[Callable[..., None], tuple[Any, ...]]] = []
        self.connections: dict[Connection, None] = {}
        """With their end at the source open: each end closes for itself."""

    @property
    def blocked(self) -> bool:
        return self._blocks > 0

    @property
    def is_instant(self) -> bool:
        return not (self._blocks or self.late_s or self._network.latency_s)

    def delay_s(self) -> float:
        late_s = self.late_s and self._network.random.uniform(0, self.late_s)
        return self._network.latency_s + late_s

    def arrive(self, deliver: Callable[..., None], args: tuple[Any, ...]) -> None:
        if self._blocks:
            self._waiting.append((deliver, args))
        else:
            deliver(*args)

    def block(self) -> None:
        self._blocks += 1
        if self._blocks == 1:
            loop = asyncio.get_running_loop()
            self._keepalive = loop.call_later(KEEPALIVE_S, self._give_up)

    def unblock(self) -> None:
        self._blocks -= 1
        if self._blocks == 0:
            self._keepalive.cancel()
            waiting, self._waiting = self._waiting, []
            for deliver, args in waiting:
                deliver(*args)

    def reset(self) -> None:
        """Nothing that waits will arrive: one of the hosts has died."""
        self._waiting.clear()

    def _give_up(self) -> None:
        """The source has not heard from the target for too long, and the other way round."""
        for connection in tuple(self.connections):
            connection.broken(self.source)


class Flow:
    """One direction of one connection: what is sent arrives in order."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._due = 0.0

    def send(self, deliver: Callable[..., None], *args: Any) -> None:
        path = self._path
        loop = asyncio.get_running_loop()
        now = loop.time()
        if path.is_instant and self._due < now:
            deliver(*args)
            return
        self._due = max(self._due + _ORDER_S, now + path.delay_s())
        loop.call_at(self._due, path.arrive, deliver, args)


class Network:
    """All hosts and paths. `random` decides how late what is late comes."""

    def __init__(self, random: Random, latency_s: float = 0.0) -> None:
        self.random = random
        self.latency_s = latency_s
        self.hosts: dict[str, Host] = {}
        self._paths: dict[tuple[Host, Host], Path] = {}

    def add(self, name: str) -> Host:
        """A host that is down; its name is its address."""
        host = self.hosts[name] = Host(name, self)
        return host

    def path(self, source: Host, target: Host) -> Path:
        path = self._paths.get((source, target))
        if path is None:
            path = self._paths[source, target] = Path(self, source, target)
            for _ in range(source.paused + target.paused):
                path.block()
        return path

    def open(self, connection: Connection, at: Host, peer: Host) -> Flow:
        """One end of a connection, to be closed by `close`, and the way from it to the other."""
        path = self.path(at, peer)
        path.connections[connection] = None
        return Flow(path)

    def close(self, connection: Connection, at: Host, peer: Host) -> None:
        """Idempotent."""
        self.path(at, peer).connections.pop(connection, None)

    def block(self, host: Host) -> None:
        """Nothing reaches or leaves the host."""
        for path in self._of(host):
            path.block()

    def unblock(self, host: Host) -> None:
        for path in self._of(host):
            path.unblock()

    def reset(self, host: Host) -> None:
        """Ends all connections of a host that has died; peers behind blocked paths hear of it
        once they hear anything."""
        paths = self._of(host)
        for path in paths:
            path.reset()
        for path in paths:
            for connection in tuple(path.connections):
                if path.source is host:
                    connection.broken(host)
                else:
                    self.path(host, path.source).arrive(connection.broken, (path.source,))

    def _of(self, host: Host) -> list[Path]:
        return [path for path in self._paths.values() if host in (path.source, path.target)]

"""Finds workers, and tells the fleet who belongs to it from now on.

What cannot be looked up changes nothing: a name server that is away, or that knows no address,
takes no worker out, for whoever is really gone is lost of itself.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable, Iterable
from contextlib import AsyncExitStack

import structlog
import yaml

from coordinator.fleet import Fleet
from coordinator.worker_client import WorkerClient
from pdserve.errors import ConfigError
from pdserve.sources import (
    DnsName,
    FixedAddress,
    WatchedFile,
    WorkerSource,
    parse_address,
    parse_source,
)

log = structlog.get_logger("discovery")

LOOK_S = 2.0
"""Pause between two looks at a name or a file."""


class Discovery:
    """Keeps a fleet's addresses up to date, until cancelled."""

    def __init__(
        self, sources: Iterable[str], fleet: Fleet, connect: Callable[[str], WorkerClient]
    ) -> None:
        """`sources` as in the configuration; `connect` makes the client of an address.

        Raises ConfigError for a file that cannot be read or understood now: later such a file
        changes nothing.
        """
        self._sources = [parse_source(text) for text in sources]
        self._fleet = fleet
        self._connect = connect
        self._found: dict[WorkerSource, frozenset[str]] = {}
        self._trouble: dict[WorkerSource, str] = {}
        self._unseen = set(self._sources)
        for source in self._sources:
            if isinstance(source, WatchedFile):
                try:
                    read_file(source)
                except (OSError, ValueError) as error:
                    raise ConfigError(f"coordinator.workers: {error}") from None

    async def run(self) -> None:
        async with AsyncExitStack() as stack:
            looks = await stack.enter_async_context(asyncio.TaskGroup())
            for source in self._sources:
                looks.create_task(self._keep(source))

    async def _keep(self, source: WorkerSource) -> None:
        while True:
            await self._look(source)
            if isinstance(source, FixedAddress):
                return
            await self._fleet.clock.sleep(LOOK_S)

    async def _look(self, source: WorkerSource) -> None:
        trouble = ""
        try:
            found = await find(source)
        except (OSError, ValueError) as error:
            trouble = str(error)
        else:
            if found != self._found.get(source):
                log.info("workers found", source=source, addresses=sorted(found))
            self._found[source] = found
        if trouble != self._trouble.get(source, ""):
            if trouble:
                log.warning("workers cannot be looked up", source=source, cause=trouble)
            else:
                log.info("workers can be looked up again", source=source)
        self._trouble[source] = trouble
        self._unseen.discard(source)
        # A fleet that is told in parts would be ready before it is whole.
        if not self._unseen:
            self._fleet.follow(frozenset().union(*self._found.values()), self._connect)


async def find(source: WorkerSource) -> frozenset[str]:
    """The addresses, host:port each. Raises OSError or ValueError where none can be told."""
    match source:
        case FixedAddress(address):
            return frozenset({address})
        case DnsName(name, port):
            return await _resolve(name, port)
        case WatchedFile():
            return await asyncio.to_thread(read_file, source)


def read_file(source: WatchedFile) -> frozenset[str]:
    """Raises OSError or ValueError."""
    try:
        content = yaml.safe_load(source.path.read_text(encoding="utf-8"))
    except yaml.YAMLError as error:
        raise ValueError(f"{source.path}: {' '.join(str(error).split())}") from None
    if not isinstance(content, list):
        raise ValueError(f"{source.path} does not hold a list of host:port")
    try:
        return frozenset(map(parse_address, content))
    except ValueError as error:
        raise ValueError(f"{source.path}: {error}") from None


async def _resolve(name: str, port: int) -> frozenset[str]:
    """All addresses of the family that the system prefers: a worker that has one of each is one."""
    loop = asyncio.get_running_loop()
    answers = await loop.getaddrinfo(name, port, type=socket.SOCK_STREAM)
    if not answers:
        raise OSError(f"{name} has no address")
    preferred = answers[0][0]
    return frozenset(
        f"[{where[0]}]:{port}" if family == socket.AF_INET6 else f"{where[0]}:{port}"
        for family, _, _, _, where in answers
        if family == preferred
    )

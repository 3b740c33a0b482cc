"""A worker in process that answers by script, stepped by gates and never by time.

It keeps account of what is held on it, so that a test can ask what was left behind.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator
from contextlib import suppress
from dataclasses import replace
from typing import Any

from coordinator.sequence import Sequence
from pdserve.cached_blocks import CacheChange
from pdserve.errors import DecodeError, ErrorReason
from pdserve.handle import digest
from pdserve.types import (
    EngineRequest,
    Fingerprint,
    KvHandle,
    Load,
    Role,
    SimDescriptor,
    WorkerInfo,
)
from pdserve.worker_service import HEARTBEAT_S
from tests.support.fake_call import FakePrefillCall
from tests.support.fake_script import Script, lost, next_of
from tests.support.fake_session import FakeSession

MODEL = "tiny"
FINGERPRINT = Fingerprint("rev-1", "bfloat16", 32, "NHD")


class FakeWorker:
    """A `WorkerClient`. The next call of a kind takes the next script of that kind.

    While it is `silent` it reports no load, and all else goes on.

    `sequences`, `leases` and `prefilling` are what is held on the worker now. `served` has
    (verb, request id) of all that it was asked to do, `requests` what it was given, and
    `reserved` how many tokens it was asked to promise, `transports` what its prefills were for.
    """

    def __init__(self, worker_id: str, *roles: Role, **info: Any) -> None:
        self.worker_id = worker_id
        self.prefills: deque[Script] = deque()
        self.reservations: deque[Script] = deque()
        self.starts: deque[Script] = deque()
        self.sequences: dict[Sequence, asyncio.Task[None] | None] = {}
        self.leases: set[str] = set()
        self.prefilling = 0
        self.served: list[tuple[str, str]] = []
        self.requests: list[EngineRequest] = []
        self.reserved: list[int] = []
        self.transports: list[str] = []
        self.closed = False
        self.up = True
        self.silent = False
        self._info = WorkerInfo(
            worker_id=worker_id,
            epoch="1",
            roles=frozenset(roles),
            model=MODEL,
            fingerprint=FINGERPRINT,
            engine="fake",
            context_length=1000,
            kv_capacity_tokens=10_000,
            transports=("nixl",),
            weights="bfloat16",
            version="0",
            tells_cache=False,
            chunk_tokens=256,
            max_sequences=64,
        )
        self._info = replace(self._info, **info)
        self._load = Load()
        self._watchers: set[asyncio.Queue[Load | None]] = set()
        self._cache_watchers: set[asyncio.Queue[CacheChange | None]] = set()
        self._sessions: set[FakeSession] = set()
        self._handles = 0

    # What a test does to the worker.

    def report(self, load: Load) -> None:
        self._load = load
        self._tell(load)

    def tell(self, change: CacheChange) -> None:
        """Of what its prefix cache holds, to whoever listens."""
        for news in self._cache_watchers:
            news.put_nowait(change)

    def stop(self) -> None:
        """Dies: every stream breaks, and nothing is held any more."""
        self.up = False
        self._tell(None)
        for news in self._cache_watchers:
            news.put_nowait(None)
        for session in list(self._sessions):
            session.broken.set()
        self.leases.clear()

    def restart(self) -> None:
        """Comes back as a new process."""
        if self.up:
            self.stop()
        self.up = True
        self._load = Load()
        self._info = replace(self._info, epoch=str(int(self._info.epoch) + 1))

    @property
    def epoch(self) -> str:
        return self._info.epoch

    # WorkerClient

    async def info(self) -> WorkerInfo:
        self._require_up()
        return self._info

    async def watch_load(self) -> AsyncIterator[Load]:
        self._require_up()
        news: asyncio.Queue[Load | None] = asyncio.Queue()
        self._watchers.add(news)
        try:
            load: Load | None = self._load
            while load is not None:
                if not self.silent:
                    yield load
                with suppress(TimeoutError):
                    load = await asyncio.wait_for(news.get(), HEARTBEAT_S)
        finally:
            self._watchers.discard(news)
        raise lost()

    async def watch_cache(self) -> AsyncIterator[CacheChange]:
        news: asyncio.Queue[CacheChange | None] = asyncio.Queue()
        self._cache_watchers.add(news)
        try:
            yield CacheChange(True, (), ())
            while (change := await news.get()) is not None:
                yield change
        finally:
            self._cache_watchers.discard(news)
        raise lost()

    async def drain(self, deadline_s: float) -> int:
        """Waits for nothing."""
        self._require_up()
        self.report(replace(self._load, draining=True))
        return len(self.sequences) + len(self.leases)

    def prefill(self, request: EngineRequest, transport: str) -> FakePrefillCall:
        self.served.append(("prefill", request.request_id))
        self.transports.append(transport)
        self.requests.append(request)
        self._handles += 1
        handle = KvHandle(
            handle_id=f"{self.worker_id}-{self._handles}",
            worker_id=self.worker_id,
            epoch=self._info.epoch,
            fingerprint=self._info.fingerprint,
            digest=digest(request.token_ids, request.cache_salt, request.lora),
            num_tokens=len(request.token_ids),
            lease_expiry_ns=2 * 10**18,
            descriptor=SimDescriptor(1, transport, "t", "e", "h", 1),
        )
        return FakePrefillCall(self, handle, next_of(self.prefills))

    def open_session(self) -> FakeSession:
        session = FakeSession(self)
        self._sessions.add(session)
        if not self.up:
            session.broken.set()
        return session

    async def close(self) -> None:
        self.closed = True

    def _require_up(self) -> None:
        if not self.up:
            raise DecodeError(ErrorReason.DECODE_FAILED, "the worker cannot be reached")

    def _tell(self, load: Load | None) -> None:
        for news in self._watchers:
            news.put_nowait(load)

    def _left(self, session: FakeSession) -> None:
        self._sessions.discard(session)


def pool(number: int, *roles: Role, name: str, **info: Any) -> list[FakeWorker]:
    """Workers that share their scripts: the next call to any of them takes the next one."""
    workers = [FakeWorker(f"{name}{i + 1}", *roles, **info) for i in range(number)]
    first = workers[0]
    for worker in workers[1:]:
        worker.prefills = first.prefills
        worker.reservations = first.reservations
        worker.starts = first.starts
    return workers


def prefills(number: int = 1, **info: Any) -> list[FakeWorker]:
    return pool(number, Role.PREFILL, name="p", **info)


def decodes(number: int = 1, **info: Any) -> list[FakeWorker]:
    return pool(number, Role.DECODE, name="d", **info)

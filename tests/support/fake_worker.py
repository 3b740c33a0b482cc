"""A worker in process that answers by script, stepped by gates and never by time.

It keeps account of what is held on it, so that a test can ask what was left behind.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator
from collections.abc import Sequence as Steps
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any

from coordinator.sequence import Sequence
from pdserve.cached_blocks import CacheChange
from pdserve.errors import DecodeError, ErrorReason, PdserveError, PrefillError
from pdserve.handle import digest
from pdserve.types import (
    Delta,
    EngineRequest,
    Fingerprint,
    FinishReason,
    FirstTokenTimings,
    KvHandle,
    Load,
    PrefillResult,
    Role,
    SimDescriptor,
    Usage,
    WorkerInfo,
)
from pdserve.worker_service import HEARTBEAT_S

MODEL = "tiny"
FINGERPRINT = Fingerprint("rev-1", "bfloat16", 32, "NHD")
ANSWER_TOKENS = 3
CACHED_AT_PREFILL = 2
PREFILL_S = 0.25
FIRST_STEP_S = 0.125
TRANSFER_S = 0.5


@dataclass(slots=True)
class Gate:
    """A point of a script: `reached` tells the test, `open` lets the script go on."""

    reached: asyncio.Event = field(default_factory=asyncio.Event)
    _opened: asyncio.Event = field(default_factory=asyncio.Event)

    def open(self) -> None:
        self._opened.set()

    async def passed(self) -> None:
        self.reached.set()
        await self._opened.wait()


Step = Gate | float | PdserveError | Delta
"""Something to wait at, seconds to take, something to fail with, or to say in an answer."""

Script = Steps[Step]
"""What happens to one call before it succeeds of itself."""


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
        raise _lost()

    async def watch_cache(self) -> AsyncIterator[CacheChange]:
        news: asyncio.Queue[CacheChange | None] = asyncio.Queue()
        self._cache_watchers.add(news)
        try:
            yield CacheChange(True, (), ())
            while (change := await news.get()) is not None:
                yield change
        finally:
            self._cache_watchers.discard(news)
        raise _lost()

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
        return FakePrefillCall(self, handle, _next(self.prefills))

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


class FakePrefillCall:
    """A `PrefillCall`. As on a real worker, the reading goes on until it is done or the call is
    ended; the lease lasts as long as the call."""

    def __init__(self, worker: FakeWorker, handle: KvHandle, script: Script) -> None:
        self._worker = worker
        self._handle = handle
        self._early = handle.descriptor.transport == "grpc"
        self._reading = asyncio.create_task(self._read(script))
        # A call may be ended before anybody has heard of its failure.
        self._reading.add_done_callback(lambda task: task.cancelled() or task.exception())

    async def admitted(self) -> KvHandle | None:
        await asyncio.sleep(0)
        if not self._worker.up:
            raise PrefillError(ErrorReason.PREFILL_FAILED, "the prefill worker is away")
        return self._handle if self._early else None

    async def finished(self) -> PrefillResult:
        try:
            await asyncio.shield(self._reading)
        except asyncio.CancelledError:
            self.end()
            raise
        return PrefillResult(self._handle, CACHED_AT_PREFILL, queue_s=0.0, prefill_s=PREFILL_S)

    def end(self) -> None:
        self._reading.cancel()
        self._worker.leases.discard(self._handle.handle_id)

    async def _read(self, script: Script) -> None:
        worker = self._worker
        if self._early:
            worker.leases.add(self._handle.handle_id)
        worker.prefilling += 1
        try:
            await _play(script)
        finally:
            worker.prefilling -= 1
        if not worker.up:
            raise PrefillError(ErrorReason.PREFILL_FAILED, "the prefill worker died")
        if worker.epoch == self._handle.epoch:
            worker.leases.add(self._handle.handle_id)


class FakeSession:
    """A `Session`; `broken` ends it as a lost connection does."""

    def __init__(self, worker: FakeWorker) -> None:
        self.broken = asyncio.Event()
        self._worker = worker
        self._open: list[Sequence] = []
        self._last_id = 0
        self._over = False

    async def run(self) -> None:
        try:
            await self.broken.wait()
        finally:
            self._over = True
            for sequence in list(self._open):
                self.abort(sequence)
                sequence.fail(_lost())
            self._worker._left(self)
        raise _lost()

    @property
    def lost(self) -> bool:
        return self._over

    def open(self) -> Sequence:
        self._last_id += 1
        sequence = Sequence(self._last_id)
        if self._over:
            sequence.fail(_lost())
        else:
            self._open.append(sequence)
        return sequence

    def reserve(self, sequence: Sequence, num_tokens: int) -> None:
        self._worker.reserved.append(num_tokens)
        if sequence in self._open:
            self._begin(sequence, self._grant(sequence, _next(self._worker.reservations)))

    def start(self, sequence: Sequence, request: EngineRequest, kv: KvHandle | None) -> None:
        verb = "colocated" if kv is None else "decode"
        self._worker.served.append((verb, request.request_id))
        self._worker.requests.append(request)
        if sequence in self._open:
            script = _next(self._worker.starts)
            self._begin(sequence, self._answer(sequence, request, kv, script))

    def abort(self, sequence: Sequence) -> None:
        if sequence in self._open:
            self._open.remove(sequence)
            if (task := self._worker.sequences.pop(sequence, None)) is not None:
                task.cancel()

    def give_up(self, cause: DecodeError) -> None:
        for sequence in list(self._open):
            self.abort(sequence)
            sequence.fail(cause)

    def _begin(self, sequence: Sequence, work: Any) -> None:
        self._worker.sequences[sequence] = asyncio.create_task(work)

    async def _grant(self, sequence: Sequence, script: Script) -> None:
        try:
            await _play(script)
        except PdserveError as error:
            self._fail(sequence, error)
        else:
            sequence.grant()

    async def _answer(
        self, sequence: Sequence, request: EngineRequest, kv: KvHandle | None, script: Script
    ) -> None:
        try:
            await _play(script, sequence)
        except PdserveError as error:
            self._fail(sequence, error)
            return
        for delta in answer(request, handed_over=kv is not None):
            sequence.push(delta)
            await asyncio.sleep(0)
        self._end(sequence)

    def _fail(self, sequence: Sequence, error: PdserveError) -> None:
        self._end(sequence)
        sequence.fail(error)

    def _end(self, sequence: Sequence) -> None:
        self._open.remove(sequence)
        del self._worker.sequences[sequence]


def answer(request: EngineRequest, *, handed_over: bool = False) -> list[Delta]:
    """What every worker answers, one delta each step: each token depends on those before.

    As engines do, a decode worker takes handed-over blocks for hits of its own cache, and
    gives out nothing of what it replays.
    """
    tokens = list(request.replay.token_ids if request.replay else ())
    replayed = len(tokens)
    while len(tokens) < min(ANSWER_TOKENS, request.sampling.max_tokens or ANSWER_TOKENS):
        tokens.append((sum(request.token_ids) + sum(tokens)) % 10_007)
    deltas = [Delta(f"t{token} ", [token]) for token in tokens[replayed:]]
    transfer_s = TRANSFER_S if handed_over else 0.0
    deltas[0].timings = FirstTokenTimings(transfer_s, FIRST_STEP_S, transfer_s)
    prompt_tokens = len(request.token_ids)
    deltas[-1].finish_reason = FinishReason.LENGTH
    deltas[-1].usage = Usage(prompt_tokens, len(tokens), prompt_tokens - 1 if handed_over else 0)
    return deltas


def first_delta(text: str = "first ") -> Delta:
    """A delta that may begin an answer and does not end it."""
    return Delta(text, [7], timings=FirstTokenTimings(0.0, FIRST_STEP_S))


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


def _next(scripts: deque[Script]) -> Script:
    return scripts.popleft() if scripts else ()


async def _play(script: Script, sequence: Sequence | None = None) -> None:
    for step in script:
        match step:
            case Gate():
                await step.passed()
            case float():
                await asyncio.sleep(step)
            case PdserveError():
                raise step
            case Delta():
                assert sequence is not None, "only an answer says something"
                sequence.push(step)
                await asyncio.sleep(0)


def _lost() -> DecodeError:
    return DecodeError(ErrorReason.DECODE_FAILED, "the decode worker was lost")

"""Who is alive, how loaded, and which pairs of workers are proven.

A link per address keeps one worker's client, session and load up to date. Nothing here
decides where a request goes: `snapshot` hands the facts to the policy.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from enum import StrEnum

import structlog

from coordinator.policy.pairs import Pair, PairTable, Process
from coordinator.policy.prefix import CacheBelief, PrefixIndex, PromptBlocks
from coordinator.policy.snapshot import Plan, Snapshot, WorkerView
from coordinator.worker_client import Session, WorkerClient
from pdserve.clock import Clock
from pdserve.errors import DecodeError, ErrorReason, PdserveError, PrefillError
from pdserve.types import Load, Role, WorkerInfo

log = structlog.get_logger("fleet")

RECONNECT_S = 0.25
"""Pause between attempts to reach a worker that is away."""

SILENCE_S = 2.0
"""A worker whose load reports have been missing for this long is taken for lost."""
_SILENCE_TICKS = 8


class WorkerState(StrEnum):
    CONNECTING = "connecting"
    UNPROVEN = "unproven"
    READY = "ready"
    DRAINING = "draining"
    LOST = "lost"


@dataclass(slots=True)
class Worker:
    """One address. `info` is None until the worker has been reached for the first time;
    `tried` says that it was reached or found away once.

    `proven` says that a colocated probe went through this very process; `outstanding_*`
    count what this coordinator has given it; `cache` is there once it was reached.
    """

    client: WorkerClient
    info: WorkerInfo | None = None
    load: Load = field(default_factory=Load)
    session: Session | None = None
    tried: bool = False
    connected: bool = False
    proven: bool = False
    detail: str = "not reached yet"
    outstanding_sequences: int = 0
    outstanding_tokens: int = 0
    cache: CacheBelief | None = None
    _calls: set[asyncio.Timeout] = field(default_factory=set)

    @asynccontextmanager
    async def or_loss(self) -> AsyncIterator[None]:
        """Cancels what is awaited inside as soon as the worker is lost, and raises
        PrefillError: a call to a process that was stopped breaks much later, or never."""
        lost = PrefillError(ErrorReason.PREFILL_FAILED, "the prefill worker was lost")
        if not self.connected:
            raise lost
        try:
            async with asyncio.timeout(None) as call:
                self._calls.add(call)
                yield
        except TimeoutError:
            raise lost from None
        finally:
            self._calls.discard(call)

    def lose(self) -> None:
        """Forgets what was true of the process, and ends what waits in `or_loss`."""
        self.connected = False
        self.session = None
        self.load = Load()
        # The process may be gone for good; one that only lost its network proves itself anew.
        self.proven = False
        now = asyncio.get_running_loop().time()
        for call in self._calls:
            call.reschedule(now)

    def hosts(self, role: Role) -> bool:
        return self.info is not None and role in self.info.roles

    @property
    def process(self) -> Process:
        """Of a worker that has been reached."""
        assert self.info is not None
        return self.info.worker_id, self.info.epoch

    @property
    def state(self) -> WorkerState:
        if not self.connected:
            return WorkerState.CONNECTING if self.info is None else WorkerState.LOST
        if self.load.draining:
            return WorkerState.DRAINING
        if self.hosts(Role.DECODE) and not self.proven:
            return WorkerState.UNPROVEN
        return WorkerState.READY


class Fleet:
    """All workers. `run` keeps them; everything else is called on the same event loop."""

    def __init__(
        self, clients: dict[str, WorkerClient], quarantine_after: int, clock: Clock
    ) -> None:
        """`clients` by address; the fleet owns and closes them. `quarantine_after` is the
        number of failures in a row for which a pair is taken out of traffic."""
        self.clock = clock
        self._workers = {address: Worker(client) for address, client in clients.items()}
        self._turns: Counter[str] = Counter()
        self._prefixes = PrefixIndex()
        self.pairs = PairTable(quarantine_after)
        """Of connected processes alone."""
        self.changed = asyncio.Event()
        """Set whenever there may be something to probe: a worker appeared, was lost or was
        restarted, or a pair was quarantined."""

    async def run(self) -> None:
        """Keeps every link until cancelled, then closes the clients."""
        try:
            async with asyncio.TaskGroup() as links:
                for address, worker in self._workers.items():
                    links.create_task(self._link(worker), name=f"link {address}")
        finally:
            for worker in self._workers.values():
                await worker.client.close()

    def workers(self) -> Iterator[Worker]:
        return iter(self._workers.values())

    def by_id(self, worker_id: str) -> Worker | None:
        """None for an id that no connected worker has."""
        for worker in self._workers.values():
            if worker.connected and worker.info is not None and worker.info.worker_id == worker_id:
                return worker
        return None

    def context_length(self, model: str) -> int | None:
        """The shortest context among the model's known workers; None while none is known."""
        lengths = [
            worker.info.context_length
            for worker in self._workers.values()
            if worker.info is not None and worker.info.model == model
        ]
        return min(lengths, default=None)

    def snapshot(self, model: str) -> Snapshot:
        """What may be given work now."""
        ready = [
            worker
            for worker in self._workers.values()
            if worker.info is not None
            and worker.info.model == model
            and worker.state is WorkerState.READY
        ]
        return Snapshot(
            prefill=tuple(_view(worker) for worker in ready if worker.hosts(Role.PREFILL)),
            decode=tuple(_view(worker) for worker in ready if worker.hosts(Role.DECODE)),
            pairs=self.pairs.proven,
            turn=self._turns[model],
        )

    def next_turn(self, model: str) -> Snapshot:
        """The snapshot for one more decision: among equals the next worker has its turn."""
        self._turns[model] += 1
        return self.snapshot(model)

    def pair(self, plan: Plan) -> Pair | None:
        """The pair of processes that a plan means now; None for a colocated one, and where a
        worker was lost meanwhile."""
        if plan.prefill is None:
            return None
        prefill, decode = self.by_id(plan.prefill), self.by_id(plan.decode)
        if prefill is None or decode is None:
            return None
        return Pair(prefill.process, decode.process, plan.transport)

    def request_failed(self, pair: Pair, cause: str) -> bool:
        """Counts a failure of the pair itself; whether it is quarantined for it."""
        quarantined = self.pairs.request_failed(pair, cause, self.clock.now())
        if quarantined:
            self.changed.set()
            log.warning(
                "pair quarantined",
                prefill=pair.prefill[0],
                decode=pair.decode[0],
                transport=pair.transport,
                cause=cause,
            )
        return quarantined

    def cached_tokens(self, model: str, prompt: PromptBlocks) -> dict[str, int]:
        """Prompt tokens that the cache of each worker of the model is believed to save, by id."""
        caches = {
            worker.info.worker_id: worker.cache
            for worker in self._workers.values()
            if worker.connected
            and worker.info is not None
            and worker.cache is not None
            and worker.info.model == model
        }
        saved = self._prefixes.cached_tokens(prompt, list(caches.values()))
        return dict(zip(caches, saved, strict=True))

    async def _link(self, worker: Worker) -> None:
        while True:
            try:
                await self._follow(worker)
            except* PdserveError as group:
                worker.detail = _first_leaf(group)
            except* Exception as group:
                # What one worker sends must not end the coordinator.
                log.error("a link failed", exc_info=group)
                worker.detail = "internal error"
            if worker.connected:
                self._lose(worker)
            elif not worker.tried:
                worker.tried = True
                self.changed.set()
            await asyncio.sleep(RECONNECT_S)

    async def _follow(self, worker: Worker) -> None:
        """One life of one worker process, from the first answer until it is lost."""
        info = await worker.client.info()
        async with asyncio.TaskGroup() as life:
            session = None
            if Role.DECODE in info.roles:
                session = worker.client.open_session()
                life.create_task(session.run())
            silence = _Silence()
            life.create_task(silence.over())
            life.create_task(self._watch(worker, info, session, silence))

    async def _watch(
        self, worker: Worker, info: WorkerInfo, session: Session | None, silence: _Silence
    ) -> None:
        async for load in worker.client.watch_load():
            silence.broken()
            was_draining = worker.load.draining
            worker.load = load
            if not worker.connected:
                self._gain(worker, info, session)
            elif was_draining != load.draining:
                self.changed.set()

    def _gain(self, worker: Worker, info: WorkerInfo, session: Session | None) -> None:
        if self.by_id(info.worker_id) is not None:
            raise PdserveError(
                ErrorReason.INTERNAL,
                f"another worker is called {info.worker_id!r} too; give each its own id",
            )
        restarted = worker.info is None or worker.info.epoch != info.epoch
        worker.info = info
        worker.session = session
        worker.connected = worker.tried = True
        worker.detail = ""
        if restarted:
            if worker.cache is not None:
                worker.cache.leave()
            worker.cache = self._prefixes.join(info.fingerprint.block_size, info.kv_capacity_tokens)
        log.info("worker connected", worker=info.worker_id, restarted=restarted)
        self.changed.set()

    def _lose(self, worker: Worker) -> None:
        assert worker.info is not None
        worker.lose()
        self.pairs.forget(worker.process)
        log.warning("worker lost", worker=worker.info.worker_id, cause=worker.detail)
        self.changed.set()


class _Silence:
    """How long nothing has been heard of a worker, counted in ticks of the coordinator's own
    loop: while that stands still, reports wait to be read, and nobody is silent."""

    def __init__(self) -> None:
        self._ticks = 0

    def broken(self) -> None:
        self._ticks = 0

    async def over(self) -> None:
        """Raises DecodeError once it has lasted for SILENCE_S."""
        while self._ticks < _SILENCE_TICKS:
            self._ticks += 1
            await asyncio.sleep(SILENCE_S / _SILENCE_TICKS)
        raise DecodeError(
            ErrorReason.DECODE_FAILED, f"nothing was heard of the worker for {SILENCE_S:g} s"
        )


def _first_leaf(group: BaseExceptionGroup[PdserveError]) -> str:
    first = group.exceptions[0]
    return _first_leaf(first) if isinstance(first, BaseExceptionGroup) else first.message


def _view(worker: Worker) -> WorkerView:
    assert worker.info is not None
    return WorkerView(
        worker_id=worker.info.worker_id,
        outstanding_sequences=worker.outstanding_sequences,
        outstanding_tokens=worker.outstanding_tokens,
        kv_usage=worker.load.kv_usage,
    )

"""Who is alive, how loaded, and which pairs of workers are proven.

A link per address keeps one worker's client, session and load up to date. Nothing here
decides where a request goes: `snapshot` hands the facts to the policy.
"""

from __future__ import annotations

import asyncio
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Coroutine, Iterator
from contextlib import suppress
from typing import Any

import structlog

from coordinator.policy.duty import duty_of
from coordinator.policy.estimate import Estimator
from coordinator.policy.health import SERVING
from coordinator.policy.pairs import Pair, PairState, PairTable
from coordinator.policy.prefix import CacheBelief, PrefixIndex, PromptBlocks
from coordinator.policy.snapshot import Plan, Snapshot
from coordinator.worker import SILENCE_S, Silence, Worker
from coordinator.worker_client import Session, WorkerClient
from pdserve.clock import Clock
from pdserve.errors import DecodeError, ErrorReason, PdserveError
from pdserve.types import Role, WorkerInfo

log = structlog.get_logger("fleet")

RECONNECT_S = 0.25
"""Pause between attempts to reach a worker that is away."""
LEAVE_S = 1.0
"""How often it is looked whether a worker that is to leave has finished; longer than a load report
may be on its way."""


class Fleet:
    """All workers. `run` keeps them; everything else is called on the same event loop."""

    def __init__(
        self,
        clients: dict[str, WorkerClient],
        quarantine_after: int,
        clock: Clock,
        silence_s: float = SILENCE_S,
    ) -> None:
        """`clients` by address are those from the start; the fleet owns and closes them.
        `quarantine_after` is the number of failures in a row for which a pair or a worker is
        taken out of traffic, `silence_s` how long nothing may be heard of a worker until it is
        lost."""
        self.clock = clock
        self._quarantine_after = quarantine_after
        self._silence_s = silence_s
        self._workers = {address: Worker(client) for address, client in clients.items()}
        self._tasks: asyncio.TaskGroup | None = None
        self._by_id: dict[str, Worker] = {}
        self._turns: Counter[str] = Counter()
        self._prefixes = PrefixIndex()
        self.estimators: defaultdict[str, Estimator] = defaultdict(Estimator)
        """What each model's workers take, by its name."""
        self.pairs = PairTable(quarantine_after)
        """Of connected processes alone."""
        self.changed = asyncio.Event()
        """Set whenever there may be something to probe: a worker appeared, was lost or was
        restarted, or a pair was quarantined."""
        self._news = asyncio.Event()

    async def run(self) -> None:
        """Keeps every link until cancelled, then closes the clients."""
        try:
            async with asyncio.TaskGroup() as tasks:
                self._tasks = tasks
                for address in self._workers:
                    tasks.create_task(self._belong(address))
                await asyncio.Event().wait()
        finally:
            for worker in self._workers.values():
                await worker.client.close()

    def follow(self, addresses: Collection[str], connect: Callable[[str], WorkerClient]) -> None:
        """Whom the fleet has from now on; `connect` makes the client of one that is new.

        One that is not among them any more gets nothing new, and is forgotten when what runs
        there has ended.
        """
        for address, worker in self._workers.items():
            if worker.dismissed is (address in addresses):
                worker.dismissed = address not in addresses
                self.tell()
                log.info("worker listed", address=address, listed=not worker.dismissed)
                self.changed.set()
        for address in addresses:
            if address not in self._workers:
                self._workers[address] = Worker(connect(address))
                if self._tasks is not None:
                    self._tasks.create_task(self._belong(address))

    def tell(self) -> None:
        """Wakes whoever waits for `news`: a worker may be ready that was not."""
        self._news.set()
        self._news = asyncio.Event()

    async def news(self, timeout_s: float) -> None:
        """Returns when a worker may have become ready, or after so long."""
        with suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                await self._news.wait()

    def workers(self) -> Iterator[Worker]:
        return iter(self._workers.values())

    def by_id(self, worker_id: str) -> Worker | None:
        """None for an id that no connected worker has."""
        return self._by_id.get(worker_id)

    def context_length(self, model: str) -> int | None:
        """The shortest context among the model's known workers; None while none is known."""
        lengths = [
            worker.info.context_length
            for worker in self._workers.values()
            if worker.info is not None and worker.info.model == model
        ]
        return min(lengths, default=None)

    def serving(self, model: str) -> list[Worker]:
        """The workers that may be given work now."""
        return [
            worker
            for worker in self._workers.values()
            if worker.info is not None and worker.info.model == model and worker.state in SERVING
        ]

    def snapshot(self, model: str) -> Snapshot:
        """What may be given work now."""
        ready = self.serving(model)
        return Snapshot(
            prefill=tuple(worker.view for worker in ready if worker.reads),
            decode=tuple(worker.view for worker in ready if worker.writes),
            pairs=self.pairs.proven,
            turn=self._turns[model],
            estimates=self.estimators[model].estimates,
            now=self.clock.now(),
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
        workers = self.by_id(pair.prefill[0]), self.by_id(pair.decode[0])
        if any(worker is not None and worker.silent for worker in workers):
            return False  # that is its silence, which is judged by itself
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

    def prefill_proven(self, pair: Pair) -> None:
        """A hand-over went through, and with it a worker that can be proven in no other way."""
        worker = self.by_id(pair.prefill[0])
        if worker is not None and worker.process == pair.prefill and not worker.hosts(Role.DECODE):
            worker.standing = worker.standing.probe_passed("")
            worker.detail = ""

    def worker_failed(self, worker_id: str, cause: str) -> None:
        """Counts a failure of the worker's own infrastructure."""
        worker = self.by_id(worker_id)
        if worker is None or worker.silent or not worker.proven:
            return
        now = self.clock.now()
        standing = worker.standing.request_failed(cause, now, self._quarantine_after)
        worker.standing = standing
        if standing.state is PairState.QUARANTINED:
            self._quarantine(worker, now)

    def _quarantine(self, worker: Worker, now: float) -> None:
        worker.detail = worker.standing.detail
        if not worker.hosts(Role.DECODE):
            # It can be probed in pairs alone.
            self.pairs.quarantine(worker.process, worker.detail, now)
        log.warning("worker quarantined", worker=worker.process[0], cause=worker.detail)
        self.changed.set()

    def request_passed(self, plan: Plan, pair: Pair | None) -> None:
        """A first token came on this way: what failed before does not count any more."""
        if pair is not None:
            self.pairs.request_passed(pair)
        for worker_id in (plan.prefill, plan.decode):
            worker = self._by_id.get(worker_id or "")
            if worker is not None and worker.proven:
                worker.standing = worker.standing.request_passed()

    def move(self, worker: Worker) -> bool:
        """Has what a decode worker runs for this coordinator go on elsewhere; False where there
        is nobody else, or nothing to move."""
        assert worker.info is not None
        others = any(other.writes for other in self.serving(worker.info.model))
        if worker.session is None or not others:
            return False
        log.info("moving answers", worker=worker.info.worker_id, count=worker.outstanding_sequences)
        worker.session.give_up(DecodeError(ErrorReason.DRAINING, "the worker is draining"))
        return True

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

    async def _belong(self, address: str) -> None:
        """From a worker's first day to its last."""
        worker = self._workers[address]
        async with asyncio.TaskGroup() as life:
            link = life.create_task(self._link(worker), name=f"link {address}")
            await self._left(worker)
            link.cancel()
        self._lose(worker, "not listed any more")
        if worker.cache is not None:
            worker.cache.leave()
            worker.cache = None
        del self._workers[address]
        await worker.client.close()
        self.changed.set()

    async def _left(self, worker: Worker) -> None:
        """Returns when the worker is dismissed, and has been idle for as long as it may take to
        hear that it is not."""
        idle = False
        while not (worker.dismissed and (idle or not worker.connected)):
            idle = worker.dismissed and worker.is_idle
            await self.clock.sleep(LEAVE_S)

    async def _link(self, worker: Worker) -> None:
        while True:
            try:
                await self._follow(worker)
            except* PdserveError as group:
                self._lose(worker, _first_leaf(group))
            except* Exception as group:
                # What one worker sends must not end the coordinator.
                log.error("a link failed", exc_info=group)
                self._lose(worker, "internal error")
            if not worker.tried:
                worker.tried = True
                self.changed.set()
            await asyncio.sleep(RECONNECT_S)

    async def _follow(self, worker: Worker) -> None:
        """One life of one worker process, from the first answer until it is lost."""
        info = await worker.client.info()
        if worker.cache is None or worker.info is None or worker.info.epoch != info.epoch:
            if worker.cache is not None:
                worker.cache.leave()
            worker.cache = self._prefixes.join(info.fingerprint.block_size, info.kv_capacity_tokens)
        async with asyncio.TaskGroup() as life:
            session = None
            if Role.DECODE in info.roles:
                session = worker.client.open_session()
                life.create_task(self._or_lose(worker, session.run()))
            silence = Silence(worker, info.worker_id, self._silence_s)
            life.create_task(self._or_lose(worker, silence.over()))
            life.create_task(self._or_lose(worker, self._watch(worker, info, session, silence)))
            if info.tells_cache:
                life.create_task(self._or_lose(worker, self._watch_cache(worker, worker.cache)))

    async def _or_lose(self, worker: Worker, part: Coroutine[Any, Any, None]) -> None:
        """One part of a life. It is lost before anybody hears of a request that failed for that:
        such a failure is the loss itself, and counts against nobody."""
        try:
            await part
        except PdserveError as error:
            self._lose(worker, error.message)
            raise

    async def _watch(
        self, worker: Worker, info: WorkerInfo, session: Session | None, silence: Silence
    ) -> None:
        async for load in worker.client.watch_load():
            before = worker.load.draining, worker.silent
            silence.broken()
            if info.tells_cache and worker.cache is not None:
                worker.cache.grow_older()
            if worker.connected:
                work = load.work - worker.load.work
                estimator = self.estimators[info.model]
                believed = estimator.observe_work(worker.pool, work, info.kv_capacity_tokens)
                worker.reading.go_on(self.clock.now(), 1.0)
                if believed:
                    timings = estimator.estimates.of(worker.pool)
                    worker.reading.add(timings.reading_s(work.prefill_tokens, work.prefill_pairs))
            worker.report(load)
            if not worker.connected:
                self._gain(worker, info, session)
            elif before != (load.draining, worker.silent):
                self.changed.set()
                self.tell()

    @staticmethod
    async def _watch_cache(worker: Worker, cache: CacheBelief) -> None:
        async for change in worker.client.watch_cache():
            if change.anew:
                cache.forget()
            cache.apply(change.added, change.removed)

    def _gain(self, worker: Worker, info: WorkerInfo, session: Session | None) -> None:
        if self.by_id(info.worker_id) is not None:
            raise PdserveError(
                ErrorReason.INTERNAL,
                f"another worker is called {info.worker_id!r} too; give each its own id",
            )
        restarted = worker.info is None or worker.info.epoch != info.epoch
        worker.info = info
        worker.report(worker.load)
        worker.session = session
        worker.connected = worker.tried = True
        worker.detail = ""
        worker.duty = duty_of(info.roles)
        self._by_id[info.worker_id] = worker
        log.info("worker connected", worker=info.worker_id, restarted=restarted)
        self.changed.set()
        self.tell()

    def _lose(self, worker: Worker, cause: str) -> None:
        """Idempotent."""
        worker.detail = cause
        if not worker.connected:
            return
        assert worker.info is not None
        del self._by_id[worker.info.worker_id]
        worker.lose()
        self.pairs.forget(worker.process)
        log.warning("worker lost", worker=worker.info.worker_id, cause=worker.detail)
        self.changed.set()


def _first_leaf(group: BaseExceptionGroup[PdserveError]) -> str:
    first = group.exceptions[0]
    return _first_leaf(first) if isinstance(first, BaseExceptionGroup) else first.message

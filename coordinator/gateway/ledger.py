"""The ledger: each request is charged exactly once, whatever becomes of this process.

A charge is *settled* when it is in the journal, which happens in the call that tells of the
request's end, before the client is told of it; a task then posts it to the database, and
only then is it gone from the journal. Whatever a killed process left there, the next one posts;
posting again is harmless, for each charge has an id of its own. See docs/adr/0007.
"""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import structlog
from prometheus_client import CollectorRegistry, Counter, Gauge

from coordinator.gateway.charge import Charge, charge_of, from_line, to_line
from coordinator.gateway.journal import Journal
from coordinator.gateway.ledger_store import LedgerError, LedgerStore, Sums
from coordinator.policy.pricing import NANO
from coordinator.record import RequestRecord
from pdserve.config_ledger import LedgerConfig, Prices
from pdserve.errors import PdserveError

log = structlog.get_logger("ledger")

POST_EVERY_S = 0.1
"""Charges that come meanwhile are posted together."""
RETRY_S = (0.5, 10.0)
"""The first and the longest wait after a failure; it doubles."""
FLUSH_S = 10.0
"""How long the end waits for the database; what it does not take stays in the journal."""


class LedgerMetrics:
    """Costs are in the ledger's currency."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self.cost = Counter(
            "pdserve_cost_total",
            "What requests cost, in the currency of the prices.",
            ["model", "mode", "arm", "phase"],
            registry=registry,
        )
        self.gpu_s = Counter(
            "pdserve_charged_gpu_seconds_total",
            "GPU seconds that requests were charged.",
            ["model", "mode", "arm", "phase"],
            registry=registry,
        )
        self.entries = Counter(
            "pdserve_ledger_entries_total",
            "Charges: settled (written down), posted (in the database), lost (neither).",
            ["state"],
            registry=registry,
        )
        self.failures = Counter(
            "pdserve_ledger_failures_total",
            "Attempts to post charges that failed; they are tried again.",
            registry=registry,
        )
        self.lag = Gauge(
            "pdserve_ledger_lag_seconds",
            "Age of the oldest charge that is not posted yet.",
            registry=registry,
        )

    def settled(self, charge: Charge) -> None:
        self.entries.labels("settled").inc()
        labels = charge.model, charge.mode, charge.arm or "none"
        for phase, gpu_s, nano in (
            ("prefill", charge.prefill_gpu_s, charge.prefill_nano),
            ("decode", charge.decode_gpu_s, charge.decode_nano),
        ):
            self.gpu_s.labels(*labels, phase).inc(gpu_s)
            self.cost.labels(*labels, phase).inc(nano / NANO)


class Ledger:
    """Is told of each request's end, and has its charge kept."""

    def __init__(
        self,
        config: LedgerConfig,
        prices: Mapping[str, Prices],
        metrics: LedgerMetrics,
        now: Callable[[], float] = time.time,
    ) -> None:
        """`config` has a folder; `prices` are those of each model. Raises ConfigError where the
        folder cannot be had; a database that is away is waited for."""
        assert config.folder is not None
        self.currency = config.currency
        self._prices = prices
        self._metrics = metrics
        self._now = now
        self._journal = Journal(config.folder / "journal")
        self._store = LedgerStore(config)
        # One thread: it alone writes to the database.
        self._thread = ThreadPoolExecutor(1, "ledger")
        self._posting = asyncio.Lock()
        self._news = asyncio.Event()
        self._news.set()  # what another process may have left
        self._written_at: float | None = None
        self._taken_at: float | None = None
        metrics.lag.set_function(self._lag_s)

    def ended(self, record: RequestRecord, error: PdserveError | None, at: float) -> None:
        """As `EndListener`: writes its charge down."""
        now = self._now()
        prices = self._prices.get(record.model, Prices())
        charge = charge_of(record, error, prices, uuid.uuid4().hex, round(now * 1e6))
        if charge is None:
            return
        try:
            self._journal.append(to_line(charge))
        except OSError as failure:
            log.error("charge lost", request_id=charge.request_id, cause=str(failure))
            self._metrics.entries.labels("lost").inc()
            return
        self._metrics.settled(charge)
        if self._written_at is None:
            self._written_at = now
        self._news.set()

    async def run(self) -> None:
        """Posts what was written down, until it is cancelled."""
        wait_s = RETRY_S[0]
        while True:
            await self._news.wait()
            try:
                await self._post()
            except (LedgerError, OSError) as error:
                log.error("ledger cannot be written", cause=str(error), again_in_s=wait_s)
                await asyncio.sleep(wait_s)
                wait_s = min(2 * wait_s, RETRY_S[1])
            else:
                wait_s = RETRY_S[0]
                await asyncio.sleep(POST_EVERY_S)

    async def close(self) -> None:
        """Posts the rest, if the database takes it. After `run` has ended."""
        try:
            async with asyncio.timeout(FLUSH_S):
                await self._post()
        except (LedgerError, OSError) as error:  # a timeout is an OSError
            log.warning("charges stay in the journal for the next start", cause=str(error))
        self._thread.shutdown(wait=False)
        self._store.close()
        self._journal.close()

    async def sums(self, by: str, since_us: int, until_us: int) -> list[Sums]:
        """As `LedgerStore.sums`, of all that is settled."""
        await self._post()
        return await asyncio.to_thread(self._store.sums, by, since_us, until_us)

    async def entries(self, since_us: int, until_us: int) -> list[Charge]:
        """As `LedgerStore.entries`, of all that is settled."""
        await self._post()
        return await asyncio.to_thread(self._store.entries, since_us, until_us)

    async def _post(self) -> None:
        """Posts all that is settled. Raises LedgerError; then it is still in the journal."""
        async with self._posting:
            self._news.clear()
            if self._taken_at is None:
                self._taken_at = self._written_at
            self._written_at = None
            loop = asyncio.get_running_loop()
            for file in self._journal.take():
                try:
                    number = await loop.run_in_executor(self._thread, self._post_file, file)
                except BaseException:
                    self._news.set()
                    raise
                # Were it killed here, the file would be posted again, which changes nothing.
                self._journal.done(file)
                self._metrics.entries.labels("posted").inc(number)
            self._taken_at = None

    def _post_file(self, file: Path) -> int:
        """In the ledger's thread; how many charges it held."""
        found = list(_read(file))
        try:
            self._store.add(found)
        except LedgerError:
            self._metrics.failures.inc()
            raise
        return len(found)

    def _lag_s(self) -> float:
        oldest = self._written_at if self._taken_at is None else self._taken_at
        return 0.0 if oldest is None else max(0.0, self._now() - oldest)


def _read(file: Path) -> Iterator[Charge]:
    """A line that a kill cut short was of no settled charge."""
    for line in file.read_bytes().splitlines():
        try:
            yield from_line(line)
        except ValueError as error:
            log.warning("journal line unreadable", file=file.name, cause=str(error))

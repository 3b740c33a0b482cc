"""The coordinator's core on fake workers, without façades: what most of its tests drive."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import ExitStack, asynccontextmanager, contextmanager
from dataclasses import dataclass
from typing import Any
from unittest import mock

import structlog
from prometheus_client import CollectorRegistry
from structlog.testing import capture_logs

from coordinator.catalog import ServedModel, build
from coordinator.dispatch import Dispatcher
from coordinator.experiments import Experiments
from coordinator.fleet import Fleet
from coordinator.gateway.gateway import Gateway
from coordinator.gateway.keys import Caller, KeyRing
from coordinator.lifecycle import TERMINAL
from coordinator.metrics import CoordinatorMetrics
from coordinator.observer import Observer
from coordinator.ops import Ops
from coordinator.prompts import ByteEncoder
from coordinator.proving import Prover
from coordinator.record import RequestRecord
from coordinator.response import ResponseStream
from coordinator.timelines import Timelines
from coordinator.worker import Worker
from pdserve.clock import RealClock
from pdserve.config import CoordinatorConfig, GatewayConfig, ModelConfig
from pdserve.types import (
    Delta,
    EngineRequest,
    FinishReason,
    GenerateSpec,
    Prompt,
    Route,
    SamplingParams,
    TextPrompt,
    Truncation,
    Usage,
)
from tests.support.fake_script import Gate, answer
from tests.support.fake_worker import MODEL, FakeWorker
from tests.support.virtual_time import settle

CALLER = Caller(tenant="acme", key_id="k1", admin=False, may_choose_mode=True, rate=None)
CONTEXT_LENGTH = 1000


class GatedEncoder(ByteEncoder):
    """One token for each byte; waits at the next gate, if there is one."""

    def __init__(self) -> None:
        super().__init__(CONTEXT_LENGTH)
        self.gates: deque[Gate] = deque()

    async def encode_async(
        self, prompt: Prompt, truncation: Truncation | None = None
    ) -> tuple[int, ...]:
        if self.gates:
            await self.gates.popleft().passed()
        return self.encode(prompt, truncation)


@dataclass(frozen=True, slots=True)
class Answer:
    route: Route
    deltas: list[Delta]

    @property
    def text(self) -> str:
        return "".join(delta.text for delta in self.deltas)

    @property
    def finish_reason(self) -> FinishReason | None:
        return self.deltas[-1].finish_reason

    @property
    def usage(self) -> Usage | None:
        return self.deltas[-1].usage


class Core:
    """Everything of a coordinator but its façades, and a log of what it told.

    `records` are those of all requests, `logs` everything that was logged.
    """

    def __init__(
        self, workers: Mapping[str, FakeWorker], config: CoordinatorConfig, logs: list[Any]
    ) -> None:
        self.fakes = workers
        self.fakes_by_id = {worker.worker_id: worker for worker in workers.values()}
        self.logs = logs
        self.records: list[RequestRecord] = []
        self.reports: list[str] = []
        self.rounds = 0
        self.encoder = GatedEncoder()
        self.registry = CollectorRegistry()
        self.metrics = CoordinatorMetrics(self.registry)
        self.models: dict[str, ServedModel] = build(
            config, {model.name: self.encoder for model in config.models}
        )
        self.fleet = Fleet(dict(workers), config.quarantine_after, RealClock(), config.silence_s)
        self.gateway = Gateway(
            config.gateway, KeyRing.open_to_all(), self.models, self.fleet, self.metrics
        )
        self.timelines = Timelines()
        self.experiments = Experiments(self.models, self.fleet, self.metrics, config.experiments)
        self.observer = Observer(self.metrics, [self.timelines, self.experiments])
        self.dispatcher = Dispatcher(
            self.models, self.fleet, self.gateway, self.observer, self.experiments
        )
        self.ops = Ops(
            self.models, self.fleet, self.gateway, self.metrics, self.timelines, self.experiments
        )
        self.prover = Prover(self.fleet, self.models, self.reports.append, self._count_round)

    def _count_round(self) -> None:
        self.rounds += 1
        self.ops.ready()  # as the process does, which so remembers what once worked

    async def open(
        self, text: str = "hello", *, max_tokens: int | None = 8, **fields: Any
    ) -> ResponseStream:
        """Opens a request as a façade does. `fields` are those of GenerateSpec."""
        request_id = f"r{len(self.records) + 1}"
        record = RequestRecord(
            request_id, "http", "completion", False, "trace", time.monotonic(), tenant=CALLER.tenant
        )
        self.records.append(record)
        values: dict[str, Any] = {
            "model": MODEL,
            "prompt": TextPrompt(text),
            "sampling": SamplingParams(max_tokens=max_tokens),
            **fields,
        }
        spec = GenerateSpec(request_id=request_id, **values)
        return await self.dispatcher.open(spec, CALLER, record)

    async def ask(self, text: str = "hello", **fields: Any) -> Answer:
        """Reads one answer to its end."""
        stream = await self.open(text, **fields)
        try:
            return Answer(stream.route, [delta async for delta in stream])
        finally:
            await stream.aclose()

    def worker(self, worker_id: str) -> Worker:
        """The fleet's own entry for a worker that it has met."""
        return next(
            worker
            for worker in self.fleet.workers()
            if worker.info is not None and worker.info.worker_id == worker_id
        )

    @property
    def record(self) -> RequestRecord:
        """Of the last request."""
        return self.records[-1]

    @property
    def access(self) -> list[Any]:
        """The access log."""
        return [entry for entry in self.logs if entry["event"] == "request"]

    @property
    def verbs(self) -> list[str]:
        """What workers were asked to do for the last request, in the order of the alphabet."""
        return sorted(verb for verb, _ in self._served())

    def asked(self, verb: str) -> list[str]:
        """The workers that were asked to do so for the last request."""
        return [worker_id for served, worker_id in self._served() if served == verb]

    def _served(self) -> Iterator[tuple[str, str]]:
        for worker in self.fakes.values():
            for verb, request_id in worker.served:
                if request_id == self.record.request_id:
                    yield verb, worker.worker_id


@contextmanager
def _fresh_loggers() -> Iterator[None]:
    """Those of the modules may have been tied to a configuration for good, by an earlier test."""
    with ExitStack() as stack:
        for logger in (
            "coordinator.observer.access_log",
            "coordinator.climb.log",
            "coordinator.experiments.log",
            "coordinator.fleet.log",
            "coordinator.worker.log",
            "coordinator.proving.log",
        ):
            stack.enter_context(mock.patch(logger, structlog.get_logger()))
        yield


@asynccontextmanager
async def running(
    *workers: FakeWorker,
    models: tuple[ModelConfig, ...] = (),
    gateway: GatewayConfig | None = None,
    experiments: tuple[Any, ...] = (),
    quarantine_after: int = 100,
    **model: Any,
) -> AsyncIterator[Core]:
    """A core whose workers are connected and proven, as far as they can be.

    `model` are fields of its ModelConfig. Left without an exception, everything must have
    been given back.
    """
    config = CoordinatorConfig(
        models=models or (ModelConfig(name=MODEL, **model),),
        gateway=gateway or GatewayConfig(),
        experiments=experiments,
        quarantine_after=quarantine_after,
    )
    with _fresh_loggers(), capture_logs() as logs:
        core = Core({f"host-{i}": worker for i, worker in enumerate(workers)}, config, logs)
        tasks = [asyncio.create_task(core.fleet.run()), asyncio.create_task(core.prover.run())]
        try:
            await settle()
            yield core
            await settle()
            assert_idle(core)
        finally:
            for task in tasks:
                task.cancel()
            outcomes = await asyncio.gather(*tasks, return_exceptions=True)
        # Without workers the fleet has nothing to do and ends of itself.
        assert all(o is None or isinstance(o, asyncio.CancelledError) for o in outcomes), outcomes


def assert_complete(given: Answer, text: str = "hello") -> None:
    """The answer is the one that an undisturbed worker gives, neither more nor less."""
    request = EngineRequest("", tuple(byte + 3 for byte in text.encode()), SamplingParams())
    assert given.text == "".join(delta.text for delta in answer(request))
    assert given.finish_reason is FinishReason.LENGTH


def assert_idle(core: Core) -> None:
    """Nothing is held, on either side, and every request was told of exactly once."""
    for admission in core.gateway.admissions.values():
        assert (admission.running, admission.queued) == (0, 0)
    for worker in core.fleet.workers():
        assert (worker.outstanding_sequences, worker.outstanding_tokens) == (0, 0)
    for fake in core.fakes.values():
        assert not fake.sequences, f"{fake.worker_id} still works"
        assert not fake.leases, f"{fake.worker_id} still holds KV"
        assert not fake.prefilling, f"{fake.worker_id} still reads"
    assert all(record.state in TERMINAL and record.done for record in core.records)
    told = [entry["request_id"] for entry in core.access]
    assert sorted(told) == sorted(record.request_id for record in core.records)

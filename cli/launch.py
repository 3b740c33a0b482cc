"""Brings up a whole system on this machine and keeps it up: what `pdserve up` does."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
import tempfile
from collections.abc import Coroutine
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import cli
from cli import plan, ports
from cli.child import ChildFailedError, ChildSpec, Ending
from cli.failure import CliError
from cli.plan import ModelChoice, Pools, WorkerPorts
from cli.report import Endpoints, Reporter
from cli.supervisor import GaveUpError, Supervisor
from pdserve.config import Listen, ModelConfig, Settings
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
    choice: ModelChoice
    log_dir: Path | None


def up(options: UpOptions, reporter: Reporter) -> None:
    """Runs until a signal stops it. Raises ConfigError before anything is started, else CliError."""
    model = plan.the_model(options.settings, options.choice, options.pools)
    settings = _fixed_ports(options.settings)
    log_dir = options.log_dir or Path(tempfile.mkdtemp(prefix="pdserve-"))
    log_dir.mkdir(parents=True, exist_ok=True)

    async def run() -> None:
        supervisor = Supervisor(reporter, log_dir)
        system = _System(settings, options.pools, supervisor, reporter)
        try:
            await _serve(system, model, supervisor, reporter)
        finally:
            supervisor.close()

    try:
        asyncio.run(run())
    except ChildFailedError as failed:
        reporter.died(failed.ending, None)
        raise CliError(_why(failed, failed.ending, log_dir)) from None
    except GaveUpError as failed:
        reporter.died(failed.ending, None)
        raise CliError(_why(failed, failed.ending, log_dir)) from None
    reporter.stopped()


class _System:
    """The processes, and the order in which they come and go."""

    def __init__(
        self, settings: Settings, pools: Pools, supervisor: Supervisor, reporter: Reporter
    ) -> None:
        self._settings = settings
        self._pools = pools
        self._supervisor = supervisor
        self._reporter = reporter

    async def start(self, model: ModelConfig) -> Endpoints:
        workers = plan.worker_names(self._pools)
        available = sorted(os.sched_getaffinity(0))
        cores = plan.share_cores(available, len(workers), self._pools.cores)
        async with asyncio.TaskGroup() as group:
            starts = [
                group.create_task(self._start_worker(worker, model, plan.core_list(own)))
                for worker, own in zip(workers, cores, strict=True)
            ]
        ready = [start.result() for start in starts]
        metrics = {name: message["metrics"] for (name, _), message in zip(workers, ready, strict=True)}
        addresses = [message["grpc"] for message in ready]
        return await self._start_coordinator(model, addresses, metrics)

    async def stop(self) -> None:
        """The coordinator first: it lets running requests end while their workers are there."""
        self._reporter.failed()
        self._reporter.step("stop", "stopping")
        await self._supervisor.stop([COORDINATOR])
        await self._supervisor.stop()
        self._reporter.done("stop", "every process has ended")

    async def _start_worker(
        self, worker: tuple[str, Role], model: ModelConfig, cores: str
    ) -> dict[str, Any]:
        name, role = worker
        engine = self._settings.worker.engine
        where = f", cores {cores}" if engine == "vllm" else ""
        self._reporter.step(name, f"starting {name} ({engine}{where})")
        for tries_left in reversed(range(_PORT_TRIES)):
            chosen = ports.pick(3)
            settings = plan.worker_settings(
                self._settings, worker, model, cores, WorkerPorts(*chosen)
            )
            stop_s = settings.worker.drain_s + _STOP_MARGIN_S
            spec = ChildSpec(name, _argv(role, "--id", name), _env(settings), stop_s)
            try:
                message = await self._supervisor.start(spec)
                break
            except ChildFailedError:
                # Only a port that somebody took in the meantime is worth another try.
                if not tries_left or all(map(ports.is_free, chosen)):
                    raise
        self._reporter.done(name, f"{name} is ready")
        return message

    async def _start_coordinator(
        self, model: ModelConfig, workers: list[str], metrics: dict[str, str]
    ) -> Endpoints:
        settings = plan.coordinator_settings(self._settings, model, workers)
        config = settings.coordinator
        self._reporter.step(COORDINATOR, "starting coordinator, sending a request down each route")
        stop_s = config.drain_s + _STOP_MARGIN_S
        await self._supervisor.start(
            ChildSpec(COORDINATOR, _argv(COORDINATOR), _env(settings), stop_s)
        )
        self._reporter.done(COORDINATOR, "coordinator is ready")
        http = _reachable(config.http)
        return Endpoints(
            http=http,
            grpc=_reachable(config.grpc),
            metrics={COORDINATOR: http, **metrics},
            model=model.name,
            needs_key=config.gateway.keys_file is not None,
            log_dir=self._supervisor.log_path(COORDINATOR).parent,
        )


async def _serve(
    system: _System, model: ModelConfig, supervisor: Supervisor, reporter: Reporter
) -> None:
    asked = asyncio.Event()

    def on_signal() -> None:
        if asked.is_set():
            supervisor.kill()
        asked.set()

    async def start_and_stay() -> None:
        reporter.ready(await system.start(model))
        await asyncio.get_running_loop().create_future()

    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, on_signal)
    ticker = asyncio.create_task(_tick(reporter))
    try:
        await _first_of(start_and_stay(), asked.wait(), supervisor.gave_up())
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


def _fixed_ports(settings: Settings) -> Settings:
    """With ports instead of 0, so that a restart keeps them. Raises ConfigError if one is taken."""
    config = settings.coordinator
    ports.check(config.http, "--port")
    ports.check(config.grpc, "--grpc-port")
    spare = ports.pick(2)
    http, grpc = (
        listen if listen.port else listen.model_copy(update={"port": port})
        for listen, port in zip((config.http, config.grpc), spare, strict=True)
    )
    return settings.model_copy(
        update={"coordinator": config.model_copy(update={"http": http, "grpc": grpc})}
    )


def _reachable(listen: Listen) -> str:
    return Listen(host=_WILDCARDS.get(listen.host, listen.host), port=listen.port).address


def _argv(verb: str, *flags: str) -> tuple[str, ...]:
    # -P: a folder called cli where the user stands must not be taken for this one.
    parent = ("--parent", str(os.getpid()))
    return (sys.executable, "-P", "-m", "cli.main", verb, *flags, *parent)


def _env(settings: Settings) -> dict[str, str]:
    env = plan.child_env(settings)
    root = str(Path(cli.__file__).parents[1])
    env["PYTHONPATH"] = os.pathsep.join(filter(None, (root, env.get("PYTHONPATH"))))
    return env


def _why(error: Exception, ending: Ending, log_dir: Path) -> str:
    last = f": {ending.reason[-1]}" if ending.reason else ""
    return f"{error}{last} (log: {log_dir / ending.name}.log)"

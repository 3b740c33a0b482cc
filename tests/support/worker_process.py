"""A simulated worker as a process of its own, which a test can stop and let go on."""

from __future__ import annotations

import asyncio
import json
import signal
import sys
from asyncio.subprocess import DEVNULL, PIPE, Process
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, aclosing, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from coordinator.worker_client import GrpcWorkerClient
from pdserve.channel import channel
from pdserve.config import SimConfig
from pdserve.types import Load, Role
from tests.support.patience import WITHIN_S
from tests.support.sim_fleet import MODEL, SimCoordinator, coordinator


@dataclass(frozen=True)
class WorkerProcess:
    """`address` is that of its gRPC server."""

    worker_id: str
    address: str
    process: Process

    def stop(self) -> None:
        """SIGSTOP: it stands still, and its connections stay."""
        self.process.send_signal(signal.SIGSTOP)

    def go_on(self) -> None:
        self.process.send_signal(signal.SIGCONT)

    async def until(self, condition: Callable[[Load], bool]) -> None:
        """Returns when it reports such a load."""
        client = GrpcWorkerClient(channel(self.address), None)
        try:
            async with asyncio.timeout(WITHIN_S), aclosing(client.watch_load()) as loads:
                async for told in loads:
                    if condition(told):
                        return
        finally:
            await client.close()


def idle(load: Load) -> bool:
    return load == Load()


@asynccontextmanager
async def worker_process(
    folder: Path, worker_id: str, role: Role, sim: SimConfig
) -> AsyncIterator[WorkerProcess]:
    config = {
        "id": worker_id,
        "engine": "sim",
        "model": {"name": MODEL, "tokenizer": "bytes"},
        "sim": sim.model_dump(),
    }
    path = folder / f"{worker_id}.yaml"
    path.write_text(yaml.safe_dump({"worker": config}))
    argv = (sys.executable, "-m", "cli.main", role.value, "--config", str(path))
    process = await asyncio.create_subprocess_exec(*argv, stdout=PIPE, stderr=DEVNULL)
    try:
        assert process.stdout is not None
        async with asyncio.timeout(WITHIN_S):
            ready = json.loads(await process.stdout.readline())
        yield WorkerProcess(worker_id, ready["grpc"], process)
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()


@dataclass(frozen=True)
class ProcessFleet:
    """Worker processes by id, and a coordinator in the test's own process."""

    coordinator: SimCoordinator
    workers: dict[str, WorkerProcess]

    async def until_idle(self) -> None:
        """Returns when nothing is held anywhere; the coordinator must hold nothing now."""
        self.coordinator.assert_idle()
        for worker in self.workers.values():
            await worker.until(idle)


@asynccontextmanager
async def process_fleet(
    folder: Path, *workers: tuple[str, Role, SimConfig], **model: Any
) -> AsyncIterator[ProcessFleet]:
    """`model` are fields of its ModelConfig. Left without an exception, all must be idle."""
    async with AsyncExitStack() as stack:
        started = await asyncio.gather(
            *(stack.enter_async_context(worker_process(folder, *worker)) for worker in workers)
        )
        core = coordinator(list(started), **model)
        await stack.enter_async_context(core.running())
        await core.until_all_proven()
        fleet = ProcessFleet(core, {worker.worker_id: worker for worker in started})
        yield fleet
        await fleet.until_idle()

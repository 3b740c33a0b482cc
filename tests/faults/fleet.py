"""Two prefill and two decode workers as processes, a coordinator, and a network that can break."""

from __future__ import annotations

import asyncio
import itertools
import json
import multiprocessing
import os
import signal
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

from cli import ports
from pdserve.config import LOOPBACK, CoordinatorConfig, GatewayConfig, ModelConfig
from pdserve.types import Role
from tests.faults.child import WorkerSpec, run_coordinator, run_worker
from tests.faults.client import Doors, doors
from tests.support.cut_proxy import CutProxy
from tests.support.patience import WITHIN_S
from tests.support.sim_fleet import MODEL, SimCoordinator

PLACES = 3
"""Requests at work at once in one coordinator."""

# Forked from a process that has imported everything: a worker is there in a tenth of a second.
_processes = multiprocessing.get_context("forkserver")
_processes.set_forkserver_preload(["__main__", "tests.faults.child"])

State = dict[str, Any]


class Child:
    """A process and the line to it."""

    def __init__(self, process: BaseProcess, controls: Controls, name: str) -> None:
        self._process = process
        self._controls = controls
        self._name = name
        self._numbers = itertools.count()
        self.hello: dict[str, str] = {}

    async def start(self) -> None:
        connected = self._controls.expect(self._name)
        self._process.start()
        async with asyncio.timeout(WITHIN_S):
            self.hello, self._reader, self._writer = await connected

    async def do(self, command: str, **arguments: Any) -> State:
        """Its answer. To be called by one task at a time."""
        number = next(self._numbers)
        line = json.dumps({"do": command, "number": number, **arguments})
        self._writer.write(line.encode() + b"\n")
        async with asyncio.timeout(WITHIN_S):
            answer: State = {}
            while answer.pop("number", None) != number:  # one that nobody waited for, before
                answer = json.loads(await self._reader.readline())
        return answer

    def kill(self) -> None:
        """SIGKILL; idempotent."""
        self._process.kill()
        self._process.join()
        self._writer.close()

    def signal(self, number: signal.Signals) -> None:
        assert self._process.pid is not None
        os.kill(self._process.pid, number)


class Controls:
    """Where children report themselves."""

    def __init__(self, folder: Path) -> None:
        self.path = str(folder / "control")
        self._expected: dict[str, asyncio.Future[Any]] = {}

    @asynccontextmanager
    async def listening(self) -> AsyncIterator[None]:
        async with await asyncio.start_unix_server(self._connected, self.path):
            yield

    def expect(self, name: str) -> asyncio.Future[Any]:
        future = self._expected[name] = asyncio.get_running_loop().create_future()
        return future

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        hello = json.loads(await reader.readline())
        self._expected.pop(hello.pop("name")).set_result((hello, reader, writer))


class Worker:
    """A worker that is killed and started again at its address, behind `proxy`."""

    def __init__(self, spec: WorkerSpec, controls: Controls) -> None:
        self.spec = spec
        self.worker_id = spec.worker_id
        self.role = spec.role
        self.proxy = CutProxy()
        self.proxy.target = spec.port
        self._controls = controls
        self._child: Child | None = None
        self._stopped = False

    @property
    def address(self) -> str:
        """As the coordinator sees it."""
        return f"{LOOPBACK}:{self.proxy.port}"

    async def start(self) -> None:
        process = _processes.Process(target=run_worker, args=(self.spec,), daemon=True)
        child = Child(process, self._controls, self.worker_id)
        await child.start()
        self._child = child

    async def do(self, command: str, **arguments: Any) -> State:
        assert self._child is not None
        return await self._child.do(command, **arguments)

    def kill(self) -> None:
        if self._child is not None:
            self._child.kill()
            self._child, self._stopped = None, False

    def stop(self) -> None:
        assert self._child is not None
        self._stopped = True
        self._child.signal(signal.SIGSTOP)

    async def be_well(self) -> None:
        """Lives, and goes on, whatever was done to it."""
        if self._child is None:
            await self.start()
        elif self._stopped:
            self._stopped = False
            self._child.signal(signal.SIGCONT)


class FaultFleet:
    """`core` is the coordinator; `links` are the ways between workers, by prefill and decode."""

    def __init__(self, folder: Path, transport: str) -> None:
        self.transport = transport
        self.controls = Controls(folder)
        self.links = {(p, d): CutProxy() for p in ("p1", "p2") for d in ("d1", "d2")}
        self.workers: dict[str, Worker] = {}
        self.core: SimCoordinator
        self.doors: Doors
        self._coordinators = 0

    @property
    def prefills(self) -> list[Worker]:
        return [worker for worker in self.workers.values() if worker.role is Role.PREFILL]

    @property
    def decodes(self) -> list[Worker]:
        return [worker for worker in self.workers.values() if worker.role is Role.DECODE]

    @property
    def config(self) -> CoordinatorConfig:
        return CoordinatorConfig(
            workers=tuple(worker.address for worker in self.workers.values()),
            models=(
                ModelConfig(
                    name=MODEL,
                    tokenizer="bytes",
                    transport=self.transport,
                    # The other requests are to be on both decode workers, whatever was learnt of
                    # these in the cases before.
                    prefill_balance="least-outstanding",
                    decode_balance="least-outstanding",
                ),
            ),
            gateway=GatewayConfig(max_running=PLACES),
            # The suite breaks every pair again and again.
            quarantine_after=1_000_000,
            silence_s=3,
        )

    @asynccontextmanager
    async def another_coordinator(self) -> AsyncIterator[tuple[Child, Doors]]:
        """One more, in a process of its own; whoever gets it kills it."""
        self._coordinators += 1
        name = f"coordinator-{self._coordinators}"
        arguments = (name, self.controls.path, self.config)
        process = _processes.Process(target=run_coordinator, args=arguments, daemon=True)
        child = Child(process, self.controls, name)
        await child.start()
        async with doors(child.hello["http"], child.hello["grpc"]) as ways:
            yield child, ways


@asynccontextmanager
async def fault_fleet(folder: Path, transport: str) -> AsyncIterator[FaultFleet]:
    fleet = FaultFleet(folder, transport)
    async with AsyncExitStack() as stack:
        await stack.enter_async_context(fleet.controls.listening())
        numbers = iter(ports.pick(8))
        kv_ports = {p: next(numbers) for p in ("p1", "p2")}
        for (p, _), link in fleet.links.items():
            link.target = kv_ports[p]
            await link.start()
            stack.push_async_callback(link.close)
        for name, role in (
            ("p1", Role.PREFILL),
            ("p2", Role.PREFILL),
            ("d1", Role.DECODE),
            ("d2", Role.DECODE),
        ):
            routes = {kv_ports[p]: link.port for (p, d), link in fleet.links.items() if d == name}
            kv_port = kv_ports.get(name, 0)
            spec = WorkerSpec(name, role, next(numbers), kv_port, routes, fleet.controls.path)
            worker = fleet.workers[name] = Worker(spec, fleet.controls)
            await worker.proxy.start()
            stack.push_async_callback(worker.proxy.close)
            stack.callback(worker.kill)
            await worker.start()
        fleet.core = SimCoordinator(fleet.config)
        await stack.enter_async_context(fleet.core.running())
        addresses = fleet.core.addresses
        ways = doors(addresses["http"], addresses["grpc"])
        fleet.doors = await stack.enter_async_context(ways)
        await fleet.core.until_all_proven()
        yield fleet

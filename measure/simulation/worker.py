"""A whole worker on a simulated host: the real services on a simulated engine."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import Any

from decode_svc.service import DecodeService
from measure.simulation.network import Host
from measure.simulation.rpc import Server
from measure.simulation.sockets import HostSockets
from pdserve.config import SimConfig
from pdserve.engine.base import StepStats
from pdserve.engine.sim import SimEngine
from pdserve.engine.sim_model import Filler
from pdserve.engine.sim_timing import Timing
from pdserve.handle import seal_key
from pdserve.types import Role
from pdserve.v1.decode_pb2_grpc import add_DecodeServiceServicer_to_server
from pdserve.v1.prefill_pb2_grpc import add_PrefillServiceServicer_to_server
from pdserve.v1.worker_pb2_grpc import add_WorkerServiceServicer_to_server
from pdserve.worker_service import WorkerIdentity, WorkerService
from pdserve.workload import Workload
from prefill_svc.service import PrefillService

MODEL = "simulated"
LEASE_S = 30.0
EPOCH_1970 = 1.8e9
"""Seconds since 1970 at the moment 0 of the loop's clock."""

_SEAL_KEY = seal_key("simulated")


@dataclass(frozen=True, slots=True)
class WorkerSpec:
    """`timing` of None leaves the engine with its own constants; `filler` has it answer nothing
    in particular, which is cheaper; `skew_s` is how much its wall
    clock is ahead."""

    roles: frozenset[Role]
    engine: SimConfig
    timing: Timing | None = None
    filler: bool = False
    skew_s: float = 0.0


class SimWorker:
    """One address; `start` after a `crash` is another process there."""

    def __init__(self, host: Host, spec: WorkerSpec) -> None:
        self.host = host
        self.spec = spec
        self.starts = 0
        self.prefix_queries = 0
        self.prefix_hits = 0
        self.workload = Workload(lambda role, outcome: None)
        self.engine: SimEngine
        self._prefill: PrefillService | None = None
        self._changing = asyncio.Lock()
        self._decode: DecodeService | None = None

    async def start(self) -> None:
        """Quiet where it runs already."""
        async with self._changing:
            if not self.host.up:
                await self._start()

    async def crash(self) -> None:
        """Dies at once, and nothing of it is left; quiet where it does not run."""
        async with self._changing:
            if not self.host.up:
                return
            self.host.go_down()
            self.workload.close()
            if self._prefill is not None:
                await self._prefill.close()
            await self.engine.close()

    async def _start(self) -> None:
        self.starts += 1
        host, spec = self.host, self.spec
        self.workload = Workload(lambda role, outcome: None)
        self.engine = SimEngine(
            spec.engine,
            "simulated",
            host,
            spec.timing,
            HostSockets(host),
            (lambda _, max_tokens: Filler(max_tokens)) if spec.filler else None,
        )
        await self.engine.start(self._on_step)
        identity = WorkerIdentity(host.name, f"{host.name}-{self.starts}", spec.roles, MODEL)
        server: Any = Server(host)
        worker = WorkerService(identity, self.engine, self.workload, host)
        add_WorkerServiceServicer_to_server(worker, server)
        if Role.PREFILL in spec.roles:
            self._prefill = PrefillService(
                identity, self.engine, self.workload, LEASE_S, self._wall_clock, _SEAL_KEY
            )
            add_PrefillServiceServicer_to_server(self._prefill, server)
        if Role.DECODE in spec.roles:
            self._decode = DecodeService(self.engine, self.workload, self._wall_clock, _SEAL_KEY)
            add_DecodeServiceServicer_to_server(self._decode, server)
        await server.start()

    def _on_step(self, stats: StepStats) -> None:
        self.prefix_queries += stats.prefix_queries
        self.prefix_hits += stats.prefix_hits
        self.workload.step(stats)

    def _wall_clock(self) -> float:
        return EPOCH_1970 + self.host.now() + self.spec.skew_s

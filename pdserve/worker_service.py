"""WorkerService: who a worker is, how busy it is, and how it is drained; the same for all roles."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import dataclass

import pdserve
from pdserve import convert, convert_worker
from pdserve.cache_reports import cache_reports
from pdserve.clock import Clock
from pdserve.engine.base import Engine
from pdserve.rpc_errors import Context
from pdserve.types import Role, WorkerInfo
from pdserve.v1 import worker_pb2
from pdserve.v1.worker_pb2_grpc import WorkerServiceServicer
from pdserve.workload import Workload

LOAD_INTERVAL_S = 0.5
HEARTBEAT_S = 0.5
CACHE_INTERVAL_S = 0.25
DEFAULT_DRAIN_S = 30.0


@dataclass(frozen=True, slots=True)
class WorkerIdentity:
    """What a worker is called; `epoch` is random for each process start."""

    worker_id: str
    epoch: str
    roles: frozenset[Role]
    model: str


class WorkerService(WorkerServiceServicer):
    """Needs the engine to have started by the first call."""

    def __init__(
        self, identity: WorkerIdentity, engine: Engine, workload: Workload, clock: Clock
    ) -> None:
        self._identity = identity
        self._engine = engine
        self._workload = workload
        self._clock = clock

    async def GetWorkerInfo(
        self, request: worker_pb2.GetWorkerInfoRequest, context: Context
    ) -> worker_pb2.GetWorkerInfoResponse:
        engine = self._engine.info
        return convert_worker.worker_info_to_proto(
            WorkerInfo(
                worker_id=self._identity.worker_id,
                epoch=self._identity.epoch,
                roles=self._identity.roles,
                model=self._identity.model,
                fingerprint=engine.fingerprint,
                engine=engine.kind,
                context_length=engine.context_length,
                kv_capacity_tokens=engine.kv_capacity_tokens,
                transports=engine.transports,
                weights=engine.weights,
                version=pdserve.__version__,
                chunk_tokens=engine.chunk_tokens,
                max_sequences=engine.max_sequences,
                adapters=engine.adapters,
                tells_cache=self._engine.cached is not None,
            )
        )

    async def WatchLoad(
        self, request: worker_pb2.WatchLoadRequest, context: Context
    ) -> AsyncIterator[worker_pb2.WatchLoadResponse]:
        async for load in self._workload.watch(self._clock, LOAD_INTERVAL_S, HEARTBEAT_S):
            yield convert_worker.load_to_proto(load)

    async def WatchCache(
        self, request: worker_pb2.WatchCacheRequest, context: Context
    ) -> AsyncIterator[worker_pb2.WatchCacheResponse]:
        if (cached := self._engine.cached) is None:
            return
        sequence = 0
        async for change in cache_reports(cached, self._clock, CACHE_INTERVAL_S):
            yield convert_worker.cache_change_to_proto(change, sequence)
            sequence += 1

    async def Drain(
        self, request: worker_pb2.DrainRequest, context: Context
    ) -> worker_pb2.DrainResponse:
        given = request.HasField("deadline")
        deadline_s = convert.seconds(request.deadline) if given else DEFAULT_DRAIN_S
        await drain(self._workload, deadline_s)
        return worker_pb2.DrainResponse(unfinished=self._workload.unfinished)


async def drain(workload: Workload, deadline_s: float) -> None:
    """Takes no new work; returns when all has ended, or after `deadline_s` seconds."""
    workload.start_drain()
    try:
        await asyncio.wait_for(workload.ended(), deadline_s)
    except TimeoutError:
        return

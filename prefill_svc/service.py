"""PrefillService on an engine: reads prompts, hands out claims on their KV, ends them in time."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import AsyncIterator, Callable
from contextlib import aclosing

import structlog

from pdserve import convert
from pdserve.engine.base import Admitted, Engine, Prefilled
from pdserve.errors import ErrorReason, PrefillError, RejectedError
from pdserve.handle import digest
from pdserve.rpc_errors import Context
from pdserve.types import EngineRequest, KvDescriptor, KvHandle, PrefillResult, Role
from pdserve.v1 import prefill_pb2
from pdserve.v1.prefill_pb2_grpc import PrefillServiceServicer
from pdserve.worker_service import WorkerIdentity
from pdserve.workload import Workload
from prefill_svc.leases import Lease, LeaseTable

_log = structlog.get_logger(__name__)


class PrefillService(PrefillServiceServicer):
    """Needs the engine to have started by the first call.

    `wall_clock` gives seconds since the Unix epoch, for expiries that other machines read.
    """

    def __init__(
        self,
        identity: WorkerIdentity,
        engine: Engine,
        workload: Workload,
        lease_s: float,
        wall_clock: Callable[[], float],
    ) -> None:
        self._identity = identity
        self._engine = engine
        self._workload = workload
        self._lease_s = lease_s
        self._wall_clock = wall_clock
        self._leases = LeaseTable()
        self._sweep_timer: asyncio.TimerHandle | None = None
        self._releases: set[asyncio.Task[None]] = set()

    async def Prefill(
        self, request: prefill_pb2.PrefillRequest, context: Context
    ) -> AsyncIterator[prefill_pb2.PrefillResponse]:
        self._workload.require_open()
        prompt = convert.prefill_request_from_proto(request)
        lease_s = convert.seconds(request.lease) if request.HasField("lease") else self._lease_s
        self._validate(prompt, lease_s)
        self._check_transport(request.transport)
        handle: KvHandle | None = None
        told = False
        events = self._engine.prefill(prompt, lease_s, request.transport)
        try:
            with self._workload.sequence(Role.PREFILL):
                async with aclosing(events):
                    async for event in events:
                        if handle is None and event.descriptor is not None:
                            handle = self._open(prompt, event.descriptor, lease_s)
                        yield _response(event, handle)
                        told = isinstance(event, Prefilled)
        finally:
            if handle is not None and not told:
                # Not good for anything, or nobody knows of it: nobody would release it.
                self._end(handle.handle_id)

    async def Release(
        self, request: prefill_pb2.ReleaseRequest, context: Context
    ) -> prefill_pb2.ReleaseResponse:
        release = self._end(request.handle_id)
        if release is not None:
            await asyncio.shield(release)
        return prefill_pb2.ReleaseResponse(was_open=release is not None)

    async def close(self) -> None:
        """Ends every lease; nothing can be fetched any more."""
        for lease in self._leases.expire(float("inf")):
            self._release(lease)
        self._changed()
        if self._releases:
            await asyncio.wait(self._releases)

    def _validate(self, prompt: EngineRequest, lease_s: float) -> None:
        if not prompt.token_ids:
            raise RejectedError(ErrorReason.INVALID_ARGUMENT, "the prompt is empty", param="prompt")
        if lease_s <= 0:
            raise RejectedError(
                ErrorReason.INVALID_ARGUMENT, "the lease must be above 0 s", param="lease"
            )
        info = self._engine.info
        num_tokens = len(prompt.token_ids)
        if num_tokens >= info.context_length:
            raise RejectedError(
                ErrorReason.CONTEXT_LENGTH_EXCEEDED,
                f"a prompt of {num_tokens} tokens leaves no room for an answer in a context "
                f"of {info.context_length}",
                param="prompt",
            )
        if num_tokens >= info.kv_capacity_tokens:
            raise PrefillError(
                ErrorReason.NO_ROOM,
                f"a prompt of {num_tokens} tokens does not fit a KV cache of "
                f"{info.kv_capacity_tokens}",
            )

    def _check_transport(self, transport: str) -> None:
        offered = self._engine.info.transports
        if transport not in offered:
            raise PrefillError(
                ErrorReason.KV_INCOMPATIBLE,
                f"the KV transport {transport!r} is not offered here: {', '.join(offered)}",
            )

    def _open(self, prompt: EngineRequest, descriptor: KvDescriptor, lease_s: float) -> KvHandle:
        handle = KvHandle(
            handle_id=uuid.uuid4().hex,
            worker_id=self._identity.worker_id,
            epoch=self._identity.epoch,
            fingerprint=self._engine.info.fingerprint,
            digest=digest(prompt.token_ids, prompt.cache_salt),
            num_tokens=len(prompt.token_ids),
            lease_expiry=self._wall_clock() + lease_s,
            descriptor=descriptor,
        )
        now = asyncio.get_running_loop().time()
        self._leases.open(handle.handle_id, descriptor, now, lease_s)
        self._changed()
        return handle

    def _end(self, handle_id: str) -> asyncio.Task[None] | None:
        """Ends a lease; the task frees its blocks. None where it is not open."""
        lease = self._leases.release(handle_id)
        if lease is None:
            return None
        self._changed()
        return self._release(lease)

    def _release(self, lease: Lease) -> asyncio.Task[None]:
        # A task of its own, which no cancelled call takes along.
        task = asyncio.create_task(self._engine.release(lease.descriptor))
        self._releases.add(task)
        task.add_done_callback(self._releases.discard)
        return task

    def _changed(self) -> None:
        """Reports the open leases and sets the timer for the next one that expires."""
        self._workload.set_open_leases(len(self._leases))
        if self._sweep_timer is not None:
            self._sweep_timer.cancel()
            self._sweep_timer = None
        expiry = self._leases.next_expiry()
        if expiry is not None:
            self._sweep_timer = asyncio.get_running_loop().call_at(expiry, self._sweep)

    def _sweep(self) -> None:
        # The loop may call a moment early, by its clock's resolution; then the timer is set anew.
        for lease in self._leases.expire(asyncio.get_running_loop().time()):
            _log.warning("KV lease expired unfetched", handle_id=lease.handle_id)
            self._release(lease)
        self._changed()


def _response(event: Admitted | Prefilled, handle: KvHandle | None) -> prefill_pb2.PrefillResponse:
    if isinstance(event, Admitted):
        claim = None if handle is None else convert.handle_to_proto(handle)
        return prefill_pb2.PrefillResponse(admitted=prefill_pb2.PrefillAdmitted(handle=claim))
    assert handle is not None
    result = PrefillResult(handle, event.cached_tokens, event.queue_s, event.prefill_s)
    return prefill_pb2.PrefillResponse(finished=convert.prefill_result_to_proto(result))

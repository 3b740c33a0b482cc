"""PrefillService on an engine: reads prompts and holds their KV for as long as the call is open."""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterator
from contextlib import aclosing, contextmanager

import structlog

from pdserve import convert
from pdserve.engine.base import Admitted, Engine, Prefilled
from pdserve.errors import ErrorReason, PrefillError, RejectedError
from pdserve.handle import digest, sealed
from pdserve.rpc_errors import Context
from pdserve.tracing import Attributes
from pdserve.types import (
    EngineRequest,
    KvDescriptor,
    KvHandle,
    LeaseEnd,
    PrefillResult,
    Role,
)
from pdserve.v1 import prefill_pb2
from pdserve.v1.prefill_pb2_grpc import PrefillServiceServicer
from pdserve.worker_service import WorkerIdentity
from pdserve.workload import Workload
from prefill_svc.leases import LeaseTable

_log = structlog.get_logger(__name__)

HOLD_S = 10.0
"""How long the engine holds blocks without being told to go on: the most that a service which
hangs can cost."""
MAX_LEASE_S = 24 * 3600.0
RENEW_S = 1.0
"""How often it is told so, and asked whether they have been fetched meanwhile."""

_Ending = asyncio.Future[LeaseEnd]
"""Set by whoever ends a lease from outside: its call, or the worker's own end."""


class PrefillService(PrefillServiceServicer):
    """Needs the engine to have started by the first call.

    `lease_s` holds where a request does not name its own; `wall_clock` gives seconds since the
    Unix epoch, for expiries that other machines read; `key` is that of the fleet's seals.
    """

    def __init__(
        self,
        identity: WorkerIdentity,
        engine: Engine,
        workload: Workload,
        lease_s: float,
        wall_clock: Callable[[], float],
        key: bytes,
    ) -> None:
        self._identity = identity
        self._engine = engine
        self._workload = workload
        self._lease_s = lease_s
        self._wall_clock = wall_clock
        self._key = key
        self._leases = LeaseTable()
        self._keepers: dict[asyncio.Task[None], _Ending] = {}
        workload.show_leases(lambda: self._leases.snapshot(time.monotonic()))

    async def Prefill(
        self, request: prefill_pb2.PrefillRequest, context: Context
    ) -> AsyncIterator[prefill_pb2.PrefillResponse]:
        self._workload.require_open()
        prompt = convert.prefill_request_from_proto(request)
        lease_s = convert.seconds(request.lease) if request.HasField("lease") else self._lease_s
        self._validate(prompt, lease_s, request.transport)
        with self._room_for(len(prompt.token_ids)):
            async with aclosing(self._held(prompt, lease_s, request.transport)) as responses:
                async for response in responses:
                    yield response

    @contextmanager
    def _room_for(self, num_tokens: int) -> Iterator[None]:
        """Raises PrefillError NO_ROOM where blocks held here could break what was promised."""
        room = self._workload.room
        if room is None:
            yield
            return
        key = object()
        if not room.hold(key, self._engine.info.in_blocks(num_tokens)):
            raise PrefillError(
                ErrorReason.NO_ROOM,
                f"no room to hold {num_tokens} tokens in the KV cache now; retry later",
            )
        self._workload.set_reserved_tokens(room.charged_tokens)
        try:
            yield
        finally:
            room.release(key)
            self._workload.set_reserved_tokens(room.charged_tokens)

    async def _held(
        self, prompt: EngineRequest, lease_s: float, transport: str
    ) -> AsyncGenerator[prefill_pb2.PrefillResponse]:
        """Reads the prompt, then holds its blocks until they are fetched or this is closed."""
        handle: KvHandle | None = None
        ending: _Ending = asyncio.get_running_loop().create_future()
        keeper: asyncio.Task[None] | None = None
        events = self._engine.prefill(prompt, HOLD_S, transport)
        try:
            with self._workload.sequence(Role.PREFILL, prompt.traceparent) as told:
                async with aclosing(events):
                    async for event in events:
                        if handle is None and event.descriptor is not None:
                            handle = self._open(prompt, event.descriptor, lease_s)
                        if isinstance(event, Prefilled):
                            assert handle is not None
                            self._leases.renew(handle.handle_id, time.monotonic(), lease_s)
                            keeper = self._keep(handle, ending)
                            if prompt.traceparent:
                                told.update(self._described(prompt, event, transport))
                        yield _response(event, handle)
            if keeper is not None:
                await asyncio.wait([keeper])
                keeper.result()
        except (asyncio.CancelledError, GeneratorExit):
            _set(ending, LeaseEnd.RELEASED)
            raise
        finally:
            # Nothing else was set where the prompt could not be read.
            _set(ending, LeaseEnd.LOST)
            if handle is not None and keeper is None:
                self._ended(handle, ending.result())

    def _described(self, prompt: EngineRequest, event: Prefilled, transport: str) -> Attributes:
        return {
            "gen_ai.request.model": self._identity.model,
            "gen_ai.usage.input_tokens": len(prompt.token_ids),
            "gen_ai.usage.cache_read.input_tokens": event.cached_tokens,
            "pdserve.request_id": prompt.request_id,
            "pdserve.transport": transport,
            "pdserve.queue_s": event.queue_s,
            "pdserve.prefill_s": event.prefill_s,
        }

    async def close(self) -> None:
        """Ends every lease; nothing can be fetched any more."""
        for ending in self._keepers.values():
            _set(ending, LeaseEnd.LOST)
        if self._keepers:
            await asyncio.wait(self._keepers)

    def _validate(self, prompt: EngineRequest, lease_s: float, transport: str) -> None:
        if not prompt.token_ids:
            raise RejectedError(ErrorReason.INVALID_ARGUMENT, "the prompt is empty", param="prompt")
        if not 0 < lease_s <= MAX_LEASE_S:
            raise RejectedError(
                ErrorReason.INVALID_ARGUMENT,
                f"the lease must be above 0 s and at most {MAX_LEASE_S:.0f} s",
                param="lease",
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
        if not info.has_adapter(prompt.lora):
            raise PrefillError(
                ErrorReason.KV_INCOMPATIBLE, f"the LoRA adapter {prompt.lora!r} is not here"
            )
        if transport not in info.transports:
            raise PrefillError(
                ErrorReason.KV_INCOMPATIBLE,
                f"the KV transport {transport!r} is not offered here: {', '.join(info.transports)}",
            )

    def _open(self, prompt: EngineRequest, descriptor: KvDescriptor, lease_s: float) -> KvHandle:
        handle = KvHandle(
            handle_id=uuid.uuid4().hex,
            worker_id=self._identity.worker_id,
            epoch=self._identity.epoch,
            fingerprint=self._engine.info.fingerprint,
            digest=digest(prompt.token_ids, prompt.cache_salt, prompt.lora),
            num_tokens=len(prompt.token_ids),
            lease_expiry_ns=round((self._wall_clock() + lease_s) * 1e9),
            descriptor=descriptor,
        )
        handle = sealed(handle, self._key)
        self._leases.open(handle.handle_id, handle.num_tokens, time.monotonic(), lease_s)
        self._workload.leases_changed()
        return handle

    def _keep(self, handle: KvHandle, ending: _Ending) -> asyncio.Task[None]:
        """Has the blocks held until the lease ends, then freed; no cancelled call stops that."""
        keeper = asyncio.create_task(self._hold_and_free(handle, ending))
        self._keepers[keeper] = ending
        keeper.add_done_callback(self._keepers.pop)
        return keeper

    async def _hold_and_free(self, handle: KvHandle, ending: _Ending) -> None:
        end = LeaseEnd.LOST
        try:
            end = await self._end_of(handle, ending)
            freed = await self._engine.release(handle.descriptor)
            if freed is not LeaseEnd.RELEASED:
                end = freed  # before the call's end came to the engine
        finally:
            self._ended(handle, end)

    async def _end_of(self, handle: KvHandle, ending: _Ending) -> LeaseEnd:
        while (left_s := self._leases.left_s(handle.handle_id, time.monotonic())) > 0:
            await asyncio.wait([ending], timeout=min(left_s, RENEW_S))
            if ending.done():
                return ending.result()
            if (end := await self._engine.renew(handle.descriptor, HOLD_S)) is not None:
                return end
        return LeaseEnd.EXPIRED

    def _ended(self, handle: KvHandle, end: LeaseEnd) -> None:
        if end is LeaseEnd.EXPIRED:
            _log.warning("KV lease expired unfetched", handle_id=handle.handle_id)
        self._leases.end(handle.handle_id, end)
        self._workload.leases_changed()


def _set(ending: _Ending, end: LeaseEnd) -> None:
    """The first end counts."""
    if not ending.done():
        ending.set_result(end)


def _response(event: Admitted | Prefilled, handle: KvHandle | None) -> prefill_pb2.PrefillResponse:
    if isinstance(event, Admitted):
        claim = None if handle is None else convert.handle_to_proto(handle)
        return prefill_pb2.PrefillResponse(admitted=prefill_pb2.PrefillAdmitted(handle=claim))
    assert handle is not None
    result = PrefillResult(handle, event.cached_tokens, event.queue_s, event.prefill_s)
    return prefill_pb2.PrefillResponse(finished=convert.prefill_result_to_proto(result))

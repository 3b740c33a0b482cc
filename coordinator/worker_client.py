"""How the coordinator speaks to a worker: one small interface, and gRPC behind it.

Everything that goes wrong here is a PrefillError or a DecodeError; nothing above this
module sees a gRPC status.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from typing import TYPE_CHECKING, Protocol, TypeVar

import grpc
from grpc.aio import AioRpcError, StreamStreamCall, UnaryStreamCall

from coordinator.sequence import Sequence
from pdserve import convert, convert_worker
from pdserve.cached_blocks import CacheChange
from pdserve.errors import DecodeError, ErrorReason, PdserveError, PrefillError
from pdserve.fleet_key import call_metadata
from pdserve.rpc_errors import from_rpc_error
from pdserve.types import (
    Delta,
    EngineRequest,
    KvHandle,
    Load,
    PrefillResult,
    WorkerInfo,
)
from pdserve.v1 import decode_pb2 as decode
from pdserve.v1.decode_pb2_grpc import DecodeServiceStub
from pdserve.v1.prefill_pb2 import PrefillRequest, PrefillResponse
from pdserve.v1.prefill_pb2_grpc import PrefillServiceStub
from pdserve.v1.worker_pb2 import (
    DrainRequest,
    GetWorkerInfoRequest,
    WatchCacheRequest,
    WatchLoadRequest,
)
from pdserve.v1.worker_pb2_grpc import WorkerServiceStub

if TYPE_CHECKING:  # these exist in the stubs' types alone
    from pdserve.v1.decode_pb2_grpc import DecodeServiceAsyncStub
    from pdserve.v1.prefill_pb2_grpc import PrefillServiceAsyncStub
    from pdserve.v1.worker_pb2_grpc import WorkerServiceAsyncStub

T = TypeVar("T")
M = TypeVar("M")

INFO_TIMEOUT_S = 5.0


class WorkerClient(Protocol):
    """A worker as the coordinator sees it; one for each address, for as long as it is listed."""

    async def info(self) -> WorkerInfo:
        """Raises DecodeError when the worker cannot be reached within INFO_TIMEOUT_S."""
        ...

    def watch_load(self) -> AsyncIterator[Load]:
        """The load now and at each change; raises DecodeError when the worker is lost."""
        ...

    def watch_cache(self) -> AsyncIterator[CacheChange]:
        """All that the prefix cache holds, then each change, of a worker that tells it; raises
        DecodeError when the worker is lost."""
        ...

    async def drain(self, deadline_s: float) -> int:
        """Has the worker take nothing new; how much was unfinished when it had ended, or the
        deadline passed. Raises DecodeError when the worker is lost."""
        ...

    def prefill(self, request: EngineRequest, transport: str) -> PrefillCall:
        """Has a prompt read that is to be fetched by a KV transport; the caller must end it."""
        ...

    def open_session(self) -> Session:
        """A new session, to be run by the caller."""
        ...

    async def close(self) -> None: ...


class PrefillCall(Protocol):
    """A prompt that is read and held elsewhere, for as long as this call is open.

    Leaving a wait by a cancellation ends the call too.
    """

    async def admitted(self) -> KvHandle | None:
        """The claim on the blocks, where it is good this early. Raises PrefillError."""
        ...

    async def finished(self) -> PrefillResult:
        """To be awaited after `admitted`. Raises PrefillError."""
        ...

    def end(self) -> None:
        """Stops the reading or frees the blocks; idempotent, and never waits."""
        ...


class Session(Protocol):
    """The one stream of sequences to a decode worker."""

    async def run(self) -> None:
        """Carries deltas until the stream breaks, fails every open sequence, then raises
        DecodeError; cancelling ends the stream."""
        ...

    def open(self) -> Sequence:
        """A new sequence, not known to the worker yet; one that has failed once `run` ended."""
        ...

    def reserve(self, sequence: Sequence, num_tokens: int) -> None:
        """Asks for room; `Sequence.reserved` awaits the answer."""
        ...

    def start(self, sequence: Sequence, request: EngineRequest, kv: KvHandle | None) -> None: ...

    def abort(self, sequence: Sequence) -> None:
        """Drops the sequence and what it reserved; idempotent, and quiet after the end."""
        ...

    def give_up(self, cause: DecodeError) -> None:
        """Drops every sequence, and fails each with `cause`, for its request to go on elsewhere."""
        ...

    @property
    def lost(self) -> bool:
        """Whether `run` has ended: nothing more comes of this session."""
        ...


class GrpcWorkerClient:
    """A WorkerClient over one gRPC channel, which it owns."""

    def __init__(self, channel: grpc.aio.Channel, fleet_key: str | None) -> None:
        """Connects when it is first used."""
        self._channel = channel
        self._metadata = call_metadata(fleet_key)
        # The generated stubs serve sync and async channels; their types tell the two apart.
        self._worker: WorkerServiceAsyncStub = WorkerServiceStub(self._channel)
        self._prefill: PrefillServiceAsyncStub = PrefillServiceStub(self._channel)
        self._decode: DecodeServiceAsyncStub = DecodeServiceStub(self._channel)

    async def info(self) -> WorkerInfo:
        try:
            answer = await self._worker.GetWorkerInfo(
                GetWorkerInfoRequest(), timeout=INFO_TIMEOUT_S, metadata=self._metadata
            )
        except AioRpcError as error:
            raise _lost(error) from error
        return convert_worker.worker_info_from_proto(answer)

    async def watch_load(self) -> AsyncIterator[Load]:
        try:
            call = self._worker.WatchLoad(WatchLoadRequest(), metadata=self._metadata)
            async for message in call:
                yield convert_worker.load_from_proto(message)
        except AioRpcError as error:
            raise _lost(error) from error
        raise DecodeError(ErrorReason.DECODE_FAILED, "the worker ended its load reports")

    async def watch_cache(self) -> AsyncIterator[CacheChange]:
        expected = 0
        try:
            call = self._worker.WatchCache(WatchCacheRequest(), metadata=self._metadata)
            async for message in call:
                if message.sequence != expected:
                    raise DecodeError(
                        ErrorReason.DECODE_FAILED,
                        f"cache report {message.sequence} came where {expected} was due",
                    )
                expected += 1
                yield convert_worker.cache_change_from_proto(message)
        except AioRpcError as error:
            raise _lost(error) from error
        raise DecodeError(ErrorReason.DECODE_FAILED, "the worker ended its cache reports")

    async def drain(self, deadline_s: float) -> int:
        request = DrainRequest()
        request.deadline.FromNanoseconds(round(deadline_s * 1e9))
        try:
            answer = await self._worker.Drain(request, metadata=self._metadata)
        except AioRpcError as error:
            raise _lost(error) from error
        return answer.unfinished

    def prefill(self, request: EngineRequest, transport: str) -> GrpcPrefillCall:
        message = convert.prefill_request_to_proto(request, transport)
        return GrpcPrefillCall(self._prefill.Prefill(message, metadata=self._metadata))

    def open_session(self) -> GrpcSession:
        return GrpcSession(self._decode, self._metadata)

    async def close(self) -> None:
        await self._channel.close()


class GrpcPrefillCall:
    """A PrefillCall over one gRPC call: the lease lasts as long as the call."""

    def __init__(self, call: UnaryStreamCall[PrefillRequest, PrefillResponse]) -> None:
        self._call = call

    async def admitted(self) -> KvHandle | None:
        event = await self._event("admitted")
        if not event.admitted.HasField("handle"):
            return None
        return _understood(convert.handle_from_proto, event.admitted.handle)

    async def finished(self) -> PrefillResult:
        event = await self._event("finished")
        return _understood(convert.prefill_result_from_proto, event.finished)

    def end(self) -> None:
        self._call.cancel()

    async def _event(self, name: str) -> PrefillResponse:
        try:
            event = await self._call.read()
            if isinstance(event, PrefillResponse) and event.WhichOneof("event") == name:
                return event
            # Ended by the worker, if not by a breach of the contract; the status says why.
            if event is grpc.aio.EOF and await self._call.code() is not grpc.StatusCode.OK:
                await self._call.read()
        except AioRpcError as error:
            cause = from_rpc_error(error, lost=ErrorReason.PREFILL_FAILED)
            raise PrefillError(cause.reason, cause.message) from error
        raise PrefillError(ErrorReason.PREFILL_FAILED, "the prefill ended without a KV handle")


def _understood(from_proto: Callable[[M], T], message: M) -> T:
    try:
        return from_proto(message)
    except PdserveError as error:  # a handle that this version does not understand
        raise PrefillError(error.reason, error.message) from error


class GrpcSession:
    """A Session over one bidirectional gRPC stream."""

    def __init__(self, stub: DecodeServiceAsyncStub, metadata: tuple[tuple[str, str], ...]) -> None:
        self._stub = stub
        self._metadata = metadata
        self._outgoing: asyncio.Queue[decode.SessionRequest] = asyncio.Queue()
        self._sequences: dict[int, Sequence] = {}
        self._last_id = 0
        self._lost: DecodeError | None = None

    async def run(self) -> None:
        call = self._stub.Session(metadata=self._metadata)
        writer = asyncio.create_task(self._write(call))
        cause = DecodeError(ErrorReason.DECODE_FAILED, "the decode worker was lost")
        try:
            while isinstance(message := await call.read(), decode.SessionResponse):
                self._deliver(message)
            # Ended by the worker; the status says whether as it should have.
            if await call.code() is not grpc.StatusCode.OK:
                await call.read()
        except AioRpcError as error:
            cause = _lost(error)
        finally:
            writer.cancel()
            call.cancel()
            self._lost = cause
            for sequence in self._sequences.values():
                sequence.fail(_copy(cause))
            self._sequences.clear()
        raise cause

    @property
    def lost(self) -> bool:
        return self._lost is not None

    def open(self) -> Sequence:
        self._last_id += 1
        sequence = Sequence(self._last_id)
        if self._lost is None:
            self._sequences[sequence.sequence_id] = sequence
        else:
            sequence.fail(_copy(self._lost))
        return sequence

    def reserve(self, sequence: Sequence, num_tokens: int) -> None:
        self._send(
            reserve=decode.ReserveSequence(sequence_id=sequence.sequence_id, num_tokens=num_tokens)
        )

    def start(self, sequence: Sequence, request: EngineRequest, kv: KvHandle | None) -> None:
        self._send(start=convert.start_to_proto(sequence.sequence_id, request, kv))

    def abort(self, sequence: Sequence) -> None:
        if self._sequences.pop(sequence.sequence_id, None) is not None:
            self._send(abort=decode.AbortSequence(sequence_id=sequence.sequence_id))

    def give_up(self, cause: DecodeError) -> None:
        for sequence in list(self._sequences.values()):
            self.abort(sequence)
            sequence.fail(_copy(cause))

    def _send(self, **command: object) -> None:
        self._outgoing.put_nowait(decode.SessionRequest(**command))  # type: ignore[arg-type]

    async def _write(
        self, call: StreamStreamCall[decode.SessionRequest, decode.SessionResponse]
    ) -> None:
        try:
            while True:
                await call.write(await self._outgoing.get())
        except (AioRpcError, asyncio.InvalidStateError):
            # The stream broke; the reading side reports it.
            return

    def _deliver(self, message: decode.SessionResponse) -> None:
        sequences = self._sequences
        now = time.monotonic()
        tokens = message.tokens
        # The token path. Columns are told to be of one length: a worker that breaks this breaks
        # its session.
        for sequence_id, token_id, text in zip(
            tokens.sequence_ids, tokens.token_ids, tokens.texts, strict=True
        ):
            sequence = sequences.get(sequence_id)
            if sequence is None:  # aborted while this was on its way
                continue
            if (take := sequence.take) is not None and take(text, now):
                sequence.token_ids.append(token_id)
                sequence.num_chars += len(text)
            else:
                sequence.push(Delta(text, [token_id]))
        for delta in message.deltas:
            sequence = sequences.get(delta.sequence_id)
            if sequence is None:
                continue
            if delta.finish_reason or delta.HasField("failure"):
                del sequences[delta.sequence_id]
                _end(sequence, delta)
            else:
                sequence.push(convert.delta_from_proto(delta))
        for reservation in message.reservations:
            sequence = sequences.get(reservation.sequence_id)
            if sequence is None:
                continue
            if reservation.HasField("failure"):
                del sequences[reservation.sequence_id]
                sequence.fail(_failure(reservation.failure))
            else:
                sequence.grant()


def _end(sequence: Sequence, delta: decode.SequenceDelta) -> None:
    """What a sequence ends with: its last tokens, and a failure where there is one."""
    try:
        if delta.token_ids or delta.finish_reason:
            sequence.push(convert.delta_from_proto(delta))
    except DecodeError as unknown:
        sequence.fail(unknown)
    if delta.HasField("failure"):
        sequence.fail(_failure(delta.failure))


def _failure(message: decode.Failure) -> DecodeError:
    failure = convert.failure_from_proto(message)
    return DecodeError(failure.reason, failure.message, param=failure.param or None)


def _copy(error: DecodeError) -> DecodeError:
    """For each request its own: raising writes to an exception."""
    return DecodeError(error.reason, error.message)


def _lost(error: AioRpcError) -> DecodeError:
    cause = from_rpc_error(error, lost=ErrorReason.DECODE_FAILED)
    return DecodeError(cause.reason, cause.message)

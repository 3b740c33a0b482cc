"""One coordinator's stream: its sequences, its reservations, and what is sent to it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterable, Callable
from dataclasses import dataclass

import structlog

from decode_svc.outgoing import Outgoing
from decode_svc.verify import HandleVerifier
from pdserve import convert
from pdserve.engine.base import Engine
from pdserve.errors import DecodeError, ErrorReason, PdserveError, RejectedError
from pdserve.room import Room
from pdserve.tracing import Attributes
from pdserve.types import (
    Delta,
    EngineRequest,
    Failure,
    FirstTokenTimings,
    KvDescriptor,
    KvHandle,
    Mode,
    Role,
)
from pdserve.v1 import decode_pb2
from pdserve.workload import Workload

_log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True)
class Shared:
    """What the sessions of one worker share. `wall_clock`: seconds since the Unix epoch."""

    engine: Engine
    workload: Workload
    room: Room
    verifier: HandleVerifier
    wall_clock: Callable[[], float]

    def report_room(self) -> None:
        self.workload.set_reserved_tokens(self.room.charged_tokens)


class Session:
    """Obeys commands and fills `outgoing`; `close` ends all that it began."""

    def __init__(self, shared: Shared) -> None:
        self._shared = shared
        self._tasks: dict[int, asyncio.Task[None]] = {}
        self._reserved: set[int] = set()
        self._finishing = False
        self.outgoing = Outgoing()

    async def obey(self, commands: AsyncIterable[decode_pb2.SessionRequest]) -> None:
        """Carries commands out until the coordinator sends no more; running sequences go on.

        Raises RejectedError for a command that breaks the protocol.
        """
        try:
            async for command in commands:
                match command.WhichOneof("command"):
                    case "reserve":
                        self._reserve(command.reserve)
                    case "start":
                        self._start(command.start)
                    case "abort":
                        self._abort(command.abort.sequence_id)
                    case _:
                        raise RejectedError(ErrorReason.INVALID_ARGUMENT, "an empty command")
        except BaseException:
            self.outgoing.close()
            raise
        self.finish()

    def finish(self) -> None:
        """Ends the stream in good order as soon as nothing runs on it."""
        self._finishing = True
        self._close_if_done()

    def close(self) -> None:
        """Aborts every sequence and drops every reservation; idempotent.

        What a sequence holds is given back as its task ends, within the running engine step.
        """
        for task in self._tasks.values():
            task.cancel()
        for sequence_id in self._reserved:
            self._shared.room.release(self._key(sequence_id))
        self._reserved.clear()
        self._shared.report_room()

    def _key(self, sequence_id: int) -> tuple[Session, int]:
        return self, sequence_id

    def _reserve(self, command: decode_pb2.ReserveSequence) -> None:
        sequence_id = command.sequence_id
        self._require_new(sequence_id)
        failure: Failure | None = None
        try:
            self._shared.workload.require_open()
            self._check_context(command.num_tokens)
            charge = self._shared.engine.info.in_blocks(command.num_tokens)
            if not self._shared.room.reserve(self._key(sequence_id), charge):
                raise DecodeError(
                    ErrorReason.NO_ROOM,
                    f"no room for {command.num_tokens} tokens in the KV cache now; retry later",
                )
            self._reserved.add(sequence_id)
            self._shared.report_room()
        except PdserveError as error:
            failure = _told(error)
        self.outgoing.answer_reservation(sequence_id, failure)

    def _start(self, command: decode_pb2.StartSequence) -> None:
        sequence_id = command.sequence_id
        reserved = sequence_id in self._reserved
        if not reserved:
            self._require_new(sequence_id)
        self._reserved.discard(sequence_id)
        try:
            # Room once promised is kept in a drain: the prompt may be read already.
            if not reserved:
                self._shared.workload.require_open()
            request, kv = convert.start_from_proto(command)
            turn = self._charge(sequence_id, request)
        except PdserveError as error:
            self._shared.room.release(self._key(sequence_id))
            self._shared.report_room()
            self.outgoing.fail(sequence_id, _told(error))
            self._close_if_done()
            return
        task = asyncio.create_task(self._run(sequence_id, request, kv, turn))
        self._tasks[sequence_id] = task
        # Not in the task itself: one that is cancelled before its first step runs nothing.
        task.add_done_callback(lambda _: self._ended(sequence_id))

    def _abort(self, sequence_id: int) -> None:
        task = self._tasks.get(sequence_id)
        if task is not None:
            task.cancel()
        elif sequence_id in self._reserved:
            self._reserved.remove(sequence_id)
            self._shared.room.release(self._key(sequence_id))
            self._shared.report_room()
        self.outgoing.forget(sequence_id)

    def _require_new(self, sequence_id: int) -> None:
        if sequence_id in self._tasks or sequence_id in self._reserved:
            raise RejectedError(
                ErrorReason.INVALID_ARGUMENT, f"sequence {sequence_id} was begun before"
            )

    def _check_context(self, num_tokens: int) -> None:
        context_length = self._shared.engine.info.context_length
        if num_tokens > context_length:
            raise DecodeError(
                ErrorReason.CONTEXT_LENGTH_EXCEEDED,
                f"prompt and answer of {num_tokens} tokens exceed the context of {context_length}",
            )

    def _charge(self, sequence_id: int, request: EngineRequest) -> asyncio.Event:
        """Charges a sequence; its turn to begin is when the event is set."""
        max_tokens = request.sampling.max_tokens
        if not request.token_ids or not max_tokens:
            missing = "prompt" if not request.token_ids else "max_tokens"
            raise DecodeError(ErrorReason.INVALID_ARGUMENT, f"{missing} is not set", param=missing)
        if request.replay is not None and len(request.replay.token_ids) >= max_tokens:
            raise DecodeError(
                ErrorReason.INVALID_ARGUMENT,
                "nothing is left to answer after what is replayed",
                param="replay",
            )
        if not self._shared.engine.info.has_adapter(request.lora):
            raise DecodeError(
                ErrorReason.MODEL_NOT_FOUND,
                f"the LoRA adapter {request.lora!r} is not here",
                param="model",
            )
        num_tokens = len(request.token_ids) + max_tokens
        self._check_context(num_tokens)
        turn = asyncio.Event()
        charge = self._shared.engine.info.in_blocks(num_tokens)
        if not self._shared.room.commit(self._key(sequence_id), charge, turn.set):
            raise DecodeError(
                ErrorReason.NO_ROOM, f"no room for {num_tokens} tokens in the KV cache"
            )
        self._shared.report_room()
        return turn

    async def _run(
        self, sequence_id: int, request: EngineRequest, kv: KvHandle | None, turn: asyncio.Event
    ) -> None:
        """Runs one sequence to its end, whatever that is, and tells it."""
        try:
            with self._shared.workload.sequence(Role.DECODE, request.traceparent) as told:
                await turn.wait()
                told.update(await self._generate(sequence_id, request, kv))
        except PdserveError as error:
            self.outgoing.fail(sequence_id, _told(error))
        except Exception:
            _log.exception("sequence failed", request_id=request.request_id)
            self.outgoing.fail(sequence_id, Failure(ErrorReason.INTERNAL, "internal error"))

    def _ended(self, sequence_id: int) -> None:
        del self._tasks[sequence_id]
        self._shared.room.release(self._key(sequence_id))
        self._shared.report_room()
        self._close_if_done()

    async def _generate(
        self, sequence_id: int, request: EngineRequest, kv: KvHandle | None
    ) -> Attributes:
        """Returns what its span tells of the sequence, where it has one."""
        descriptor: KvDescriptor | None = None
        if kv is not None:
            now = self._shared.wall_clock()
            descriptor = self._shared.verifier.use(kv, request, now)
        add = self.outgoing.add
        # Never left early but by a cancellation, which the engine sees in its own await.
        deltas = self._shared.engine.generate(request, descriptor)
        first = last = await anext(deltas)
        timings = first.timings
        add(sequence_id, first)
        async for last in deltas:
            add(sequence_id, last)
        return _described(request, kv, timings, last) if request.traceparent else {}

    def _close_if_done(self) -> None:
        if self._finishing and not self._tasks:
            self.outgoing.close()


def _described(
    request: EngineRequest, kv: KvHandle | None, timings: FirstTokenTimings | None, last: Delta
) -> Attributes:
    assert last.usage is not None
    assert last.finish_reason is not None
    told: Attributes = {
        "gen_ai.usage.output_tokens": last.usage.completion_tokens,
        "gen_ai.response.finish_reasons": [last.finish_reason.value],
        "pdserve.request_id": request.request_id,
        "pdserve.mode": (Mode.COLOCATED if kv is None else Mode.DISAGGREGATED).value,
    }
    if kv is not None:
        told["pdserve.transport"] = kv.descriptor.transport
    if timings is not None:
        told["pdserve.queue_s"] = timings.queue_s
        told["pdserve.transfer_s"] = timings.transfer_s
        told["pdserve.first_step_s"] = timings.first_step_s
    return told


def _told(error: PdserveError) -> Failure:
    return Failure(error.reason, error.message, error.param or "")

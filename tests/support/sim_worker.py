"""A whole worker on a simulated engine inside the test's own process, reached by real gRPC."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import grpc
from grpc.aio import UnaryStreamCall

from decode_svc.service import DecodeService
from pdserve import convert
from pdserve.channel import channel
from pdserve.clock import RealClock
from pdserve.config import SimConfig
from pdserve.engine.sim import SimEngine
from pdserve.handle import seal_key
from pdserve.types import (
    Delta,
    EngineRequest,
    Failure,
    KvHandle,
    PrefillResult,
    Role,
    SamplingParams,
)
from pdserve.v1 import decode_pb2, prefill_pb2, worker_pb2
from pdserve.v1.decode_pb2_grpc import DecodeServiceStub, add_DecodeServiceServicer_to_server
from pdserve.v1.prefill_pb2_grpc import PrefillServiceStub, add_PrefillServiceServicer_to_server
from pdserve.v1.worker_pb2_grpc import add_WorkerServiceServicer_to_server
from pdserve.worker_service import WorkerIdentity, WorkerService
from pdserve.workload import Workload
from prefill_svc.service import PrefillService
from tests.support.grpc_servers import serve

FAST = SimConfig(decode_step_s=0.001, prefill_token_s=0.0, transfer_token_s=0.0)
REVISION = "sim-test"
SEAL_KEY = seal_key("the key of the fleet")


def request(
    prompt: tuple[int, ...] = tuple(range(1, 81)), max_tokens: int = 8, **sampling: object
) -> EngineRequest:
    """A greedy request that runs to `max_tokens` unless `sampling` says otherwise."""
    params: dict[str, object] = {"temperature": 0.0, "ignore_eos": True, **sampling}
    return EngineRequest("test", prompt, SamplingParams(max_tokens=max_tokens, **params))  # type: ignore[arg-type]


@dataclass
class SimWorker:
    """`outcomes` lists how sequences ended, in order."""

    address: str
    engine: SimEngine
    workload: Workload
    prefill: PrefillService
    decode: DecodeService
    channel: grpc.aio.Channel
    outcomes: list[tuple[Role, str]]
    claims: list[Claim] = field(default_factory=list)
    """Of `prefill`: a call of which nobody keeps hold ends, and its lease with it."""


@asynccontextmanager
async def sim_worker(
    config: SimConfig = FAST, revision: str = REVISION, engine: SimEngine | None = None
) -> AsyncIterator[SimWorker]:
    """Hosts both roles, on the engine that is given or on one of its own; asserts at the end that
    the worker holds nothing any more."""
    outcomes: list[tuple[Role, str]] = []
    workload = Workload(lambda role, outcome: outcomes.append((role, outcome)))
    engine = engine or SimEngine(config, revision, RealClock())
    await engine.start(workload.step)
    identity = WorkerIdentity("worker-1", "epoch-1", frozenset(Role), "tiny")
    prefill = PrefillService(identity, engine, workload, 30.0, time.time, SEAL_KEY)
    decode = DecodeService(engine, workload, time.time, SEAL_KEY)
    worker = WorkerService(identity, engine, workload, RealClock())
    async with (
        serve(
            (add_PrefillServiceServicer_to_server, prefill, prefill_pb2.DESCRIPTOR),
            (add_DecodeServiceServicer_to_server, decode, decode_pb2.DESCRIPTOR),
            (add_WorkerServiceServicer_to_server, worker, worker_pb2.DESCRIPTOR),
        ) as server,
        channel(server.address) as opened,
    ):
        yield SimWorker(server.address, engine, workload, prefill, decode, opened, outcomes)
        await prefill.close()
    await workload.ended()
    await engine.close()
    assert engine.load.kv_usage == 0


@dataclass
class Claim:
    """A prompt that was read, and the open call that its lease hangs on."""

    result: PrefillResult
    call: UnaryStreamCall[prefill_pb2.PrefillRequest, prefill_pb2.PrefillResponse]

    @property
    def handle(self) -> KvHandle:
        return self.result.handle


async def prefill(
    worker: SimWorker, asked: EngineRequest, transport: str = "nixl", lease_s: float | None = None
) -> Claim:
    """Reads a prompt and gives the claim on its KV."""
    message = convert.prefill_request_to_proto(asked, transport)
    if lease_s is not None:
        message.lease.CopyFrom(convert.duration(lease_s))
    call = PrefillServiceStub(worker.channel).Prefill(message)
    events = [await call.read(), await call.read()]
    assert [event.WhichOneof("event") for event in events] == ["admitted", "finished"]
    if events[0].admitted.HasField("handle"):
        assert events[0].admitted.handle == events[1].finished.handle
    claim = Claim(convert.prefill_result_from_proto(events[-1].finished), call)
    worker.claims.append(claim)
    return claim


@dataclass
class Answer:
    """What came of one sequence; `steps` are its deltas one by one."""

    steps: list[Delta] = field(default_factory=list)
    failure: Failure | None = None

    @property
    def text(self) -> str:
        return "".join(delta.text for delta in self.steps)

    @property
    def token_ids(self) -> list[int]:
        return [token for delta in self.steps for token in delta.token_ids]

    @property
    def ended(self) -> bool:
        return self.failure is not None or bool(self.steps and self.steps[-1].finish_reason)


class SessionClient:
    """The coordinator's side of one session stream; `messages` are all that came."""

    def __init__(self, opened: grpc.aio.Channel) -> None:
        self.call = DecodeServiceStub(opened).Session()
        self.messages: list[decode_pb2.SessionResponse] = []
        self.answers: dict[int, Answer] = {}
        self._reservations: dict[int, Failure | None] = {}

    async def start(
        self, sequence_id: int, asked: EngineRequest, kv: KvHandle | None = None
    ) -> None:
        self.answers[sequence_id] = Answer()
        await self._send(start=convert.start_to_proto(sequence_id, asked, kv))

    async def abort(self, sequence_id: int) -> None:
        await self._send(abort=decode_pb2.AbortSequence(sequence_id=sequence_id))

    async def reserve(self, sequence_id: int, num_tokens: int) -> Failure | None:
        """None when the room is granted."""
        await self._send(
            reserve=decode_pb2.ReserveSequence(sequence_id=sequence_id, num_tokens=num_tokens)
        )
        while sequence_id not in self._reservations:
            assert await self.read(), "the stream ended"
        return self._reservations.pop(sequence_id)

    async def answer(self, sequence_id: int) -> Answer:
        """The whole answer of a sequence that was started."""
        answer = self.answers[sequence_id]
        while not answer.ended:
            assert await self.read(), "the stream ended"
        return answer

    async def run(self, asked: EngineRequest, kv: KvHandle | None = None) -> Answer:
        sequence_id = len(self.answers) + 1
        await self.start(sequence_id, asked, kv)
        return await self.answer(sequence_id)

    async def read(self) -> bool:
        """Takes the next message in; False at the end of the stream."""
        message = await self.call.read()
        if message is grpc.aio.EOF:
            return False
        self.messages.append(message)
        columns = message.tokens
        for sequence_id, token_id, text in zip(
            columns.sequence_ids, columns.token_ids, columns.texts, strict=True
        ):
            answer = self.answers[sequence_id]
            assert not answer.ended, "a token after the end"
            answer.steps.append(Delta(text, [token_id]))
        for delta in message.deltas:
            answer = self.answers[delta.sequence_id]
            assert not answer.ended, "a delta after the end"
            if delta.HasField("failure"):
                answer.failure = convert.failure_from_proto(delta.failure)
            else:
                answer.steps.append(convert.delta_from_proto(delta))
        for item in message.reservations:
            failed = item.HasField("failure")
            self._reservations[item.sequence_id] = (
                convert.failure_from_proto(item.failure) if failed else None
            )
        return True

    async def _send(self, **command: object) -> None:
        await self.call.write(decode_pb2.SessionRequest(**command))  # type: ignore[arg-type]

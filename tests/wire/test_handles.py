"""One valid KV handle, misused in every way: refused with its reason before a token is written."""

from __future__ import annotations

import re
import time
from collections.abc import AsyncIterator, Iterator
from dataclasses import replace

import grpc
import pytest
from google.protobuf.message import Message

from pdserve import convert
from pdserve.config import Listen
from pdserve.errors import ErrorReason
from pdserve.handle import sealed
from pdserve.types import EngineRequest, KvHandle, NixlDescriptor, SimDescriptor
from pdserve.v1 import decode_pb2, kv_pb2
from tests.support.sim_worker import (
    FAST,
    SEAL_KEY,
    Answer,
    SessionClient,
    SimWorker,
    prefill,
    request,
    sim_worker,
)


@pytest.fixture
async def worker() -> AsyncIterator[SimWorker]:
    async with sim_worker() as running:
        yield running


@pytest.fixture
def session(worker: SimWorker) -> SessionClient:
    return SessionClient(worker.channel)


async def refusal(
    session: SessionClient, handle: KvHandle, asked: EngineRequest | None = None
) -> tuple[ErrorReason, str]:
    return told(await session.run(asked or request(), handle))


def told(answer: Answer) -> tuple[ErrorReason, str]:
    assert answer.steps == []
    assert answer.failure is not None
    return answer.failure.reason, answer.failure.message


async def refusal_on_the_wire(session: SessionClient, handle: kv_pb2.KvHandle) -> ErrorReason:
    sequence_id = len(session.answers) + 1
    start = convert.start_to_proto(sequence_id, request(), None)
    start.kv.CopyFrom(handle)
    session.answers[sequence_id] = Answer()
    await session.call.write(decode_pb2.SessionRequest(start=start))
    return told(await session.answer(sequence_id))[0]


def fields_of(message: Message, path: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    """The path of every field that is set and holds no message itself."""
    for field, value in message.ListFields():
        if isinstance(value, Message):
            yield from fields_of(value, (*path, field.name))
        else:
            yield (*path, field.name)


def with_a_bit_flipped(handle: kv_pb2.KvHandle, path: tuple[str, ...], bit: int) -> kv_pb2.KvHandle:
    """The lowest byte of a number, the last one of text and bytes."""
    altered = kv_pb2.KvHandle()
    altered.CopyFrom(handle)
    owner: Message = altered
    for name in path[:-1]:
        owner = getattr(owner, name)
    value = getattr(owner, path[-1])
    if isinstance(value, int):
        value ^= 1 << bit
    elif isinstance(value, bytes):
        value = value[:-1] + bytes([value[-1] ^ 1 << bit])
    else:
        value = value[:-1] + chr(ord(value[-1]) ^ 1 << bit)
    setattr(owner, path[-1], value)
    return altered


@pytest.mark.parametrize("transport", ["nixl", "grpc"])
async def test_a_handle_with_any_bit_of_any_field_flipped_is_refused(
    worker: SimWorker, session: SessionClient, transport: str
) -> None:
    handle = (await prefill(worker, request(), transport)).handle
    message = convert.handle_to_proto(handle)
    paths = set(fields_of(message))
    assert len(paths) == 20, "a new field is looked at too"
    for path in paths:
        for bit in range(7):
            altered = with_a_bit_flipped(message, path, bit)
            reason = await refusal_on_the_wire(session, altered)
            assert reason is ErrorReason.KV_ALTERED, (path, bit)
    # None of this has used it up.
    assert (await session.run(request(), handle)).failure is None


async def test_a_handle_without_one_of_its_fields_is_refused(
    worker: SimWorker, session: SessionClient
) -> None:
    message = convert.handle_to_proto((await prefill(worker, request())).handle)
    for field, _ in message.ListFields():
        altered = kv_pb2.KvHandle()
        altered.CopyFrom(message)
        altered.ClearField(field.name)  # type: ignore[arg-type]
        unknown = field.name == "sim"
        expected = ErrorReason.KV_INCOMPATIBLE if unknown else ErrorReason.KV_ALTERED
        assert await refusal_on_the_wire(session, altered) is expected, field.name


@pytest.mark.parametrize(("seconds", "nanos"), [(2**62, 0), (-1, 0), (0, -1), (-(2**63), 0)])
async def test_a_time_that_cannot_be_is_refused(
    worker: SimWorker, session: SessionClient, seconds: int, nanos: int
) -> None:
    message = convert.handle_to_proto((await prefill(worker, request())).handle)
    message.lease_expiry.seconds = seconds
    message.lease_expiry.nanos = nanos
    assert await refusal_on_the_wire(session, message) is ErrorReason.KV_ALTERED


async def test_a_handle_of_another_fleet_is_refused(
    worker: SimWorker, session: SessionClient
) -> None:
    handle = (await prefill(worker, request())).handle
    forged = sealed(handle, b"another key, of thirty-two bytes")
    assert (await refusal(session, forged))[0] is ErrorReason.KV_ALTERED


async def test_a_handle_for_another_prompt_is_refused(
    worker: SimWorker, session: SessionClient
) -> None:
    handle = (await prefill(worker, request())).handle
    for other in (request(prompt=tuple(range(2, 82))), request(prompt=(*range(1, 80), 7))):
        reason, _ = await refusal(session, handle, other)
        assert reason is ErrorReason.KV_DIGEST_MISMATCH


async def test_a_handle_is_good_once_across_sessions(
    worker: SimWorker, session: SessionClient
) -> None:
    handle = (await prefill(worker, request())).handle
    assert (await session.run(request(), handle)).failure is None
    for again in (session, SessionClient(worker.channel)):
        assert (await refusal(again, handle))[0] is ErrorReason.KV_REUSED


async def test_a_handle_is_refused_after_its_lease(
    worker: SimWorker, session: SessionClient
) -> None:
    began = time.monotonic()
    claim = await prefill(worker, request(), lease_s=0.05)
    assert await claim.call.read() is grpc.aio.EOF
    reason, message = await refusal(session, claim.handle)
    assert reason is ErrorReason.KV_EXPIRED
    told = re.match(r"the KV lease ended (\d+\.\d+) s ago", message)
    assert told is not None, message
    assert float(told[1]) <= time.monotonic() - began


async def test_a_handle_whose_call_was_ended_is_refused(
    worker: SimWorker, session: SessionClient
) -> None:
    claim = await prefill(worker, request())
    claim.call.cancel()
    await worker.workload.ended()
    assert (await refusal(session, claim.handle))[0] is ErrorReason.KV_EXPIRED


async def test_a_handle_from_another_pool_is_refused_naming_the_difference(
    worker: SimWorker, session: SessionClient
) -> None:
    async with sim_worker(revision="other") as foreign:
        handle = (await prefill(foreign, request())).handle
        reason, message = await refusal(session, handle)
    assert reason is ErrorReason.KV_INCOMPATIBLE
    assert "model_revision 'other', not 'sim-test'" in message


async def test_a_handle_that_names_a_worker_which_never_gave_it_is_refused(
    worker: SimWorker, session: SessionClient
) -> None:
    async with sim_worker() as other:
        theirs = (await prefill(other, request())).handle
        ours = (await prefill(worker, request())).handle
        assert isinstance(ours.descriptor, SimDescriptor)
        assert isinstance(theirs.descriptor, SimDescriptor)
        moved = replace(ours.descriptor, transfer_id=theirs.descriptor.transfer_id)
        forged = sealed(replace(theirs, descriptor=moved), SEAL_KEY)
        assert (await refusal(session, forged))[0] is ErrorReason.KV_FOREIGN


async def test_a_handle_from_before_a_restart_is_refused(session: SessionClient) -> None:
    async with sim_worker() as before:
        handle = (await prefill(before, request())).handle
    assert isinstance(handle.descriptor, SimDescriptor)
    same = FAST.model_copy(update={"side_channel": Listen(port=handle.descriptor.port)})
    async with sim_worker(same) as after:
        assert (await prefill(after, request())).handle.descriptor != handle.descriptor
        assert (await refusal(session, handle))[0] is ErrorReason.KV_STALE_EPOCH


async def test_a_handle_whose_worker_is_gone_is_refused(session: SessionClient) -> None:
    async with sim_worker() as gone:
        handle = (await prefill(gone, request())).handle
    assert (await refusal(session, handle))[0] is ErrorReason.KV_TRANSFER_FAILED


async def test_a_handle_for_blocks_that_this_engine_cannot_fetch_is_refused(
    worker: SimWorker, session: SessionClient
) -> None:
    handle = (await prefill(worker, request())).handle
    real = replace(handle, descriptor=NixlDescriptor("e", "r", ((1,),), "h", 1, 1))
    reason, _ = await refusal(session, sealed(real, SEAL_KEY))
    assert reason is ErrorReason.KV_TRANSFER_FAILED

"""Answers of the public gRPC service as a client on a socket sees them."""

from __future__ import annotations

import asyncio
import time

import grpc
import pytest

from coordinator.defaults import Defaults
from pdserve.chat import ChatMessage
from pdserve.errors import DecodeError, ErrorReason, PdserveError, RejectedError
from pdserve.types import ChatPrompt, Delta, Mode, Route, SamplingParams, TextPrompt, TokenPrompt
from pdserve.v1 import generation_pb2 as gen
from pdserve.v1 import inference_pb2 as pb
from tests.support.fake_dispatch import MODEL, answer, served
from tests.support.grpc_facade import CHAT, GENERATE, GrpcFacade, refused
from tests.support.patience import within

LOST = DecodeError(ErrorReason.DECODE_FAILED, "the decode worker was lost")


async def test_generate(service: GrpcFacade) -> None:
    service.dispatcher.script = answer("Hel", "", "lo", cached=3)
    call = service.stub.Generate(GENERATE, metadata=(("x-request-id", "mine"),))
    metadata = dict(await call.initial_metadata())
    assert metadata["x-request-id"] == "mine"
    assert metadata["x-pdserve-mode"] == "disaggregated"
    assert metadata["x-pdserve-reason"] == "auto: 37 of 512 uncached tokens"
    assert metadata["x-pdserve-arm"] == "blue"
    assert await call == pb.GenerateResponse(
        id="mine",
        text="Hello",
        finish_reason=gen.FINISH_REASON_STOP,
        usage=gen.Usage(prompt_tokens=7, completion_tokens=3, cached_tokens=3),
        route=gen.Route(
            mode=gen.MODE_DISAGGREGATED, reason="auto: 37 of 512 uncached tokens", arm="blue"
        ),
    )
    seen = service.dispatcher.seen[0]
    assert seen.spec.prompt == TextPrompt("Hi")
    assert seen.spec.sampling == SamplingParams(max_tokens=16)
    assert (seen.spec.mode, seen.spec.deadline) == (None, None)
    assert (seen.record.surface, seen.record.operation) == ("grpc", "completion")
    assert service.observer.ends == [("mine", "ok")]
    assert service.dispatcher.streams[0].closed.is_set()


async def test_chat(service: GrpcFacade) -> None:
    response = await service.stub.Chat(CHAT)
    assert response.message == pb.ChatMessage(role="assistant", content="Hello world")
    seen = service.dispatcher.seen[0]
    assert response.id == seen.spec.request_id
    assert seen.spec.prompt == ChatPrompt((ChatMessage("user", "Hi"),))
    assert seen.spec.sampling == SamplingParams()


async def test_every_field_arrives(service: GrpcFacade) -> None:
    request = pb.GenerateRequest(
        model=MODEL,
        token_ids=gen.TokenIds(ids=[1, 2]),
        sampling=gen.SamplingParams(max_tokens=5, temperature=0, top_k=3, stop=["x"]),
        options=pb.RequestOptions(
            mode=gen.MODE_COLOCATED, session="s", arm="a", cache_salt="c", priority=-2
        ),
    )
    trace = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"
    await service.stub.Generate(request, timeout=60, metadata=(("traceparent", trace),))
    seen = service.dispatcher.seen[0]
    spec = seen.spec
    assert spec.prompt == TokenPrompt((1, 2))
    assert spec.sampling == SamplingParams(max_tokens=5, temperature=0.0, top_k=3, stop=("x",))
    assert (spec.mode, spec.session, spec.cache_salt) == (Mode.COLOCATED, "s", "c")
    assert (spec.arm, spec.priority) == ("a", -2)
    assert spec.deadline is not None
    assert 50 < spec.deadline - time.monotonic() <= 61
    assert seen.record.trace_id == "4bf92f3577b34da6a3ce929d0e0e4736"


async def test_streams(service: GrpcFacade) -> None:
    service.dispatcher.script = answer("", "Hel", "", "lo")
    service.dispatcher.route = Route(Mode.COLOCATED, "colocated by configuration")
    route = gen.Route(mode=gen.MODE_COLOCATED, reason="colocated by configuration")
    usage = gen.Usage(prompt_tokens=7, completion_tokens=4)
    for method, request, message in (
        ("GenerateStream", pb.GenerateStreamRequest(request=GENERATE), pb.GenerateStreamResponse),
        ("ChatStream", pb.ChatStreamRequest(request=CHAT), pb.ChatStreamResponse),
    ):
        call = getattr(service.stub, method)(request)
        assert (await call.initial_metadata())["x-pdserve-mode"] == "colocated"
        assert [received async for received in call] == [
            message(route=route),
            message(text="Hel"),
            message(text="lo", finish_reason=gen.FINISH_REASON_STOP, usage=usage),
        ]
    assert [label for _, label in service.observer.ends] == ["ok", "ok"]
    assert [seen.record.stream for seen in service.dispatcher.seen] == [True, True]


async def test_a_stream_of_one_message_has_it_all(service: GrpcFacade) -> None:
    service.dispatcher.script = answer("Hi")
    call = service.stub.ChatStream(pb.ChatStreamRequest(request=CHAT))
    messages = [message async for message in call]
    assert len(messages) == 1
    assert messages[0].text == "Hi"
    assert messages[0].HasField("route")
    assert messages[0].HasField("usage")


async def test_first_message_does_not_wait_for_the_second(service: GrpcFacade) -> None:
    gate = asyncio.Event()
    service.dispatcher.script = [Delta("first"), gate, *answer("second")]
    call = service.stub.ChatStream(pb.ChatStreamRequest(request=CHAT))
    assert (await call.read()).text == "first"
    gate.set()
    assert (await call.read()).text == "second"
    assert await call.read() is grpc.aio.EOF


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (LOST, grpc.StatusCode.UNAVAILABLE),
        (RejectedError(ErrorReason.QUEUE_FULL, "full", retry_after_s=1.0), "RESOURCE_EXHAUSTED"),
        (PdserveError(ErrorReason.NO_ROOM, "no room"), "RESOURCE_EXHAUSTED"),
    ],
)
async def test_errors_before_the_first_token(
    service: GrpcFacade, error: PdserveError, code: grpc.StatusCode | str
) -> None:
    service.dispatcher.script = [error]
    call = service.stub.Generate(GENERATE, metadata=(("x-request-id", "mine"),))
    status, told = await refused(call)
    assert status in (code, grpc.StatusCode[error.reason.value.grpc])
    assert (told.reason, told.message) == (error.reason, error.message)
    assert told.retry_after_s == error.retry_after_s
    assert (await call.trailing_metadata())["x-request-id"] == "mine"
    # gRPC's clients try nothing again that has begun to be answered.
    assert not await call.initial_metadata()
    status, told = await refused(service.stub.ChatStream(pb.ChatStreamRequest(request=CHAT)).read())
    assert told.reason is error.reason
    assert [label for _, label in service.observer.ends] == [error.reason.label] * 2


async def test_error_after_the_first_token(service: GrpcFacade) -> None:
    service.dispatcher.script = [Delta("a"), LOST]
    call = service.stub.ChatStream(pb.ChatStreamRequest(request=CHAT))
    assert (await call.read()).text == "a"
    _, told = await refused(call.read())
    assert told.reason is ErrorReason.DECODE_FAILED
    assert service.dispatcher.streams[0].closed.is_set()
    assert [label for _, label in service.observer.ends] == ["decode_failed"]


async def test_faults_of_ours_are_not_told(service: GrpcFacade) -> None:
    service.dispatcher.script = [Delta("a"), ValueError("10.0.0.7: secret")]
    status, told = await refused(service.stub.Generate(GENERATE))
    assert status is grpc.StatusCode.INTERNAL
    assert told.message == "internal error"
    assert [label for _, label in service.observer.ends] == ["internal"]


@pytest.mark.parametrize("stream", [True, False])
async def test_client_cancels_before_the_first_token(service: GrpcFacade, stream: bool) -> None:
    service.dispatcher.script = [asyncio.Event()]
    if stream:
        call = service.stub.ChatStream(pb.ChatStreamRequest(request=CHAT))
    else:
        call = service.stub.Generate(GENERATE)
    await service.dispatcher.opening.wait()
    call.cancel()
    async with within(1):
        await service.dispatcher.open_cancelled.wait()
        await service.observer.ended.wait()
    assert [label for _, label in service.observer.ends] == ["cancelled"]


async def test_client_cancels_between_tokens(service: GrpcFacade) -> None:
    service.dispatcher.script = [Delta("a"), asyncio.Event()]
    call = service.stub.ChatStream(pb.ChatStreamRequest(request=CHAT))
    assert (await call.read()).text == "a"
    call.cancel()
    async with within(1):
        await service.dispatcher.streams[0].closed.wait()
    assert [label for _, label in service.observer.ends] == ["cancelled"]


async def test_deadline_ends_the_call(service: GrpcFacade) -> None:
    service.dispatcher.script = [asyncio.Event()]
    status, _ = await refused(service.stub.Generate(GENERATE, timeout=0.2))
    assert status is grpc.StatusCode.DEADLINE_EXCEEDED
    async with within(1):
        await service.observer.ended.wait()


async def test_models(service: GrpcFacade) -> None:
    response = await service.stub.ListModels(pb.ListModelsRequest())
    assert response == pb.ListModelsResponse(models=[pb.Model(name=MODEL, context_length=1000)])


async def test_what_a_request_leaves_out_is_the_models_default(service: GrpcFacade) -> None:
    own = SamplingParams(temperature=0.5, top_k=7)
    before, service.dispatcher.models = service.dispatcher.models, served(defaults=Defaults(own))
    try:
        await service.stub.Chat(CHAT)
    finally:
        service.dispatcher.models = before
    assert service.dispatcher.seen[-1].spec.sampling == own

"""What the gRPC façade refuses, and how it says so."""

from __future__ import annotations

from typing import Any

import grpc
import pytest

from coordinator.gateway.keys import KeyRing, new_key
from pdserve.errors import ErrorReason
from pdserve.v1 import generation_pb2 as gen
from pdserve.v1 import inference_pb2 as pb
from tests.support.fake_dispatch import MODEL
from tests.support.grpc_facade import CHAT, GENERATE, GrpcFacade, grpc_facade, refused


def generate(**sampling: Any) -> pb.GenerateRequest:
    return pb.GenerateRequest(model=MODEL, text="Hi", sampling=gen.SamplingParams(**sampling))


def with_tools(**fields: Any) -> pb.ChatRequest:
    said = [pb.ChatMessage(role="user", content="Hi")]
    return pb.ChatRequest(model=MODEL, messages=said, tools=[pb.Tool(name="f")], **fields)


@pytest.mark.parametrize(
    ("request_", "param"),
    [
        (pb.GenerateRequest(model=MODEL), "prompt"),
        (pb.GenerateRequest(model=MODEL, text=""), "prompt"),
        (pb.GenerateRequest(model=MODEL, token_ids=gen.TokenIds()), "prompt"),
        (generate(max_tokens=0), "sampling.max_tokens"),
        (generate(max_tokens=1001), "sampling.max_tokens"),
        (generate(temperature=2.5), "sampling.temperature"),
        (generate(temperature=float("nan")), "sampling.temperature"),
        (generate(top_p=0), "sampling.top_p"),
        (generate(stop=[""]), "sampling.stop"),
        (generate(min_tokens=17), "sampling.min_tokens"),
        (generate(stop_token_ids=[2**32 - 1]), "sampling.stop_token_ids"),
        (
            pb.GenerateRequest(
                model=MODEL, text="Hi", options=pb.RequestOptions(session="x" * 257)
            ),
            "options.session",
        ),
        (
            pb.GenerateRequest(model=MODEL, text="Hi", options=pb.RequestOptions(mode=99)),  # type: ignore[arg-type]
            "options.mode",
        ),
        (pb.ChatRequest(model=MODEL), "messages"),
        (
            pb.ChatRequest(model=MODEL, messages=[pb.ChatMessage(role="critic", content="x")]),
            "messages.0.role",
        ),
        (with_tools(), "tool_choice"),  # this model has no parser
        (with_tools(tool_choice=pb.ToolChoice(name="g")), "tool_choice"),
        (with_tools(tool_choice=pb.ToolChoice(mode=99)), "tool_choice"),  # type: ignore[arg-type]
        (with_tools(reasoning_effort="huge"), "reasoning_effort"),
    ],
)
async def test_bad_requests(
    service: GrpcFacade, request_: pb.GenerateRequest | pb.ChatRequest, param: str
) -> None:
    is_chat = isinstance(request_, pb.ChatRequest)
    method = service.stub.Chat if is_chat else service.stub.Generate
    status, told = await refused(method(request_))
    assert status is grpc.StatusCode.INVALID_ARGUMENT
    assert (told.reason, told.param) == (ErrorReason.INVALID_ARGUMENT, param)
    assert service.dispatcher.seen == []
    assert [label for _, label in service.observer.ends] == ["invalid_argument"]


async def test_unknown_model(service: GrpcFacade) -> None:
    status, told = await refused(service.stub.Generate(pb.GenerateRequest(model="x", text="Hi")))
    assert status is grpc.StatusCode.NOT_FOUND
    assert told.reason is ErrorReason.MODEL_NOT_FOUND


async def test_keys() -> None:
    key, entry = new_key("acme", may_choose_mode=False)
    async with grpc_facade(KeyRing([entry])) as keyed:
        good = (("authorization", f"Bearer {key}"),)
        for metadata in ((), (("authorization", "Bearer pd-wrong"),)):
            for call in (
                keyed.stub.Generate(GENERATE, metadata=metadata),
                keyed.stub.ListModels(pb.ListModelsRequest(), metadata=metadata),
            ):
                status, told = await refused(call)
                assert status is grpc.StatusCode.UNAUTHENTICATED
                assert told.reason is ErrorReason.UNAUTHENTICATED
        await keyed.stub.ListModels(pb.ListModelsRequest(), metadata=good)
        await keyed.stub.Generate(GENERATE, metadata=good)
        assert keyed.dispatcher.seen[0].spec.tenant == "acme"
        asking = pb.ChatRequest(
            model=MODEL, messages=CHAT.messages, options=pb.RequestOptions(mode=gen.MODE_AUTO)
        )
        status, told = await refused(keyed.stub.Chat(asking, metadata=good))
        assert status is grpc.StatusCode.PERMISSION_DENIED
        assert told.param == "options.mode"
        asking = pb.ChatRequest(
            model=MODEL, messages=CHAT.messages, options=pb.RequestOptions(priority=-1)
        )
        status, told = await refused(keyed.stub.Chat(asking, metadata=good))
        assert status is grpc.StatusCode.PERMISSION_DENIED
        assert told.param == "options.priority"

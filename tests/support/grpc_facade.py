"""The public gRPC service on a real socket, over a scripted dispatcher."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import grpc
import pytest

from coordinator.facade.grpc_service import InferenceServicer
from coordinator.gateway.keys import KeyRing
from pdserve.config import GatewayConfig
from pdserve.errors import ErrorReason, PdserveError
from pdserve.parsing import ChatParser
from pdserve.rpc_errors import from_rpc_error
from pdserve.v1 import inference_pb2 as pb
from pdserve.v1.inference_pb2_grpc import (
    InferenceServiceStub,
    add_InferenceServiceServicer_to_server,
)
from tests.support.fake_dispatch import (
    MODEL,
    FakeDispatcher,
    FakeObserver,
    gateway_without_fleet,
    served,
)
from tests.support.grpc_servers import serve

GENERATE = pb.GenerateRequest(model=MODEL, text="Hi")
CHAT = pb.ChatRequest(model=MODEL, messages=[pb.ChatMessage(role="user", content="Hi")])


@dataclass(slots=True)
class GrpcFacade:
    address: str
    stub: Any
    dispatcher: FakeDispatcher
    observer: FakeObserver


@asynccontextmanager
async def grpc_facade(keys: KeyRing, parser: ChatParser | None = None) -> AsyncIterator[GrpcFacade]:
    observer = FakeObserver()
    dispatcher = FakeDispatcher(observer, served(parser=parser))
    gateway = gateway_without_fleet(GatewayConfig(), keys, dispatcher.models)
    service = InferenceServicer(dispatcher, gateway, observer)
    async with (
        serve((add_InferenceServiceServicer_to_server, service, pb.DESCRIPTOR)) as server,
        grpc.aio.insecure_channel(server.address) as channel,
    ):
        yield GrpcFacade(server.address, InferenceServiceStub(channel), dispatcher, observer)


async def refused(call: Any) -> tuple[grpc.StatusCode, PdserveError]:
    """The status of a call that fails, and what pdserve says of it."""
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call
    return caught.value.code(), from_rpc_error(caught.value, ErrorReason.DECODE_FAILED)

"""`pdserve.client` against the gRPC façade on a socket, sync and async alike."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import aclosing
from pathlib import Path
from typing import Any, TypeVar

import grpc
import pytest

from coordinator.facade.grpc_service import InferenceServicer
from coordinator.gateway.keys import KeyRing, new_key
from pdserve.client import AsyncClient, CallError, Client
from pdserve.config import GatewayConfig
from pdserve.errors import DecodeError, ErrorReason, PdserveError, RejectedError
from pdserve.types import Delta
from pdserve.v1 import inference_pb2 as pb
from pdserve.v1.inference_pb2_grpc import add_InferenceServiceServicer_to_server
from tests.support.fake_dispatch import (
    MODEL,
    FakeDispatcher,
    FakeObserver,
    gateway_without_fleet,
)
from tests.support.grpc_facade import CHAT, GENERATE, GrpcFacade, grpc_facade
from tests.support.patience import within

T = TypeVar("T")
FULL = RejectedError(ErrorReason.QUEUE_FULL, "full", retry_after_s=0.01)
LOST = DecodeError(ErrorReason.DECODE_FAILED, "the decode worker was lost")
REFUSALS = (FULL, LOST, RejectedError(ErrorReason.NO_WORKER, "none is ready"))


class Sync:
    """A Client with the methods of an AsyncClient: each call blocks a thread of its own."""

    def __init__(self, address: str, **settings: Any) -> None:
        self.client = Client(address, **settings)

    async def __aenter__(self) -> Any:
        return self

    async def __aexit__(self, *_: object) -> None:
        self.client.close()

    def __getattr__(self, name: str) -> Callable[..., Any]:
        method = getattr(self.client, name)
        if name.endswith("_stream"):
            return lambda *asked, **call: _in_threads(method(*asked, **call))
        return lambda *asked, **call: asyncio.to_thread(method, *asked, **call)


async def _in_threads(parts: Any) -> AsyncIterator[Any]:
    end = object()
    try:
        while (part := await asyncio.to_thread(next, parts, end)) is not end:
            yield part
    finally:
        parts.close()


either = pytest.mark.parametrize("kind", [Sync, AsyncClient])


async def failure(call: Awaitable[Any]) -> CallError:
    with pytest.raises(CallError) as caught:
        await call
    return caught.value


@either
async def test_every_call(service: GrpcFacade, kind: Any) -> None:
    async with kind(service.address) as client:
        whole = await client.generate(GENERATE)
        assert (whole.text, whole.usage.completion_tokens) == ("Hello world", 2)
        assert (await client.chat(CHAT)).message.content == "Hello world"
        for parts in (client.generate_stream(GENERATE), client.chat_stream(CHAT)):
            assert [part.text async for part in parts] == ["Hello", " world"]
        assert await client.list_models() == [pb.Model(name=MODEL, context_length=1000)]


@either
@pytest.mark.parametrize("streamed", [True, False])
async def test_what_cannot_be_served_now_is_asked_for_again(
    service: GrpcFacade, kind: Any, streamed: bool
) -> None:
    service.dispatcher.refusals = list(REFUSALS)
    async with kind(service.address) as client:
        if streamed:
            texts = [part.text async for part in client.chat_stream(CHAT)]
        else:
            texts = [(await client.chat(CHAT)).message.content]
    assert "".join(texts) == "Hello world"
    assert [label for _, label in service.observer.ends] == [
        *(refusal.reason.label for refusal in REFUSALS),
        "ok",
    ]


async def test_the_last_attempt_tells_why(service: GrpcFacade) -> None:
    service.dispatcher.script = [FULL]
    async with AsyncClient(service.address, attempts=2) as client:
        told = await failure(client.generate(GENERATE))
    assert (told.code, told.reason) == (
        grpc.StatusCode.RESOURCE_EXHAUSTED,
        ErrorReason.QUEUE_FULL,
    )
    assert (told.message, told.retry_after_s) == ("full", 0.01)
    assert told.metadata == {"retryable": "true", "retry_after_s": "0.010"}
    assert told.request_id == service.dispatcher.seen[-1].spec.request_id
    assert str(told) == "queue_full: full"
    assert len(service.dispatcher.seen) == 2


@pytest.mark.parametrize("streamed", [True, False])
async def test_an_answer_that_has_begun_is_never_asked_for_again(
    service: GrpcFacade, streamed: bool
) -> None:
    service.dispatcher.script = [Delta("a"), LOST]
    async with AsyncClient(service.address) as client:
        if streamed:
            parts = client.chat_stream(CHAT)
            assert (await anext(parts)).text == "a"
            told = await failure(anext(parts))
        else:
            told = await failure(client.chat(CHAT))
    assert told.reason is ErrorReason.DECODE_FAILED
    assert len(service.dispatcher.seen) == 1


@pytest.mark.parametrize(
    "refusal",
    [
        RejectedError(ErrorReason.INVALID_ARGUMENT, "no", param="sampling.seed"),
        # RESOURCE_EXHAUSTED too, and the same ever after.
        RejectedError(ErrorReason.BODY_TOO_LARGE, "no"),
        # After the deadline: what is known now is worth more.
        RejectedError(ErrorReason.RATE_LIMITED, "no", retry_after_s=3600),
        PdserveError(ErrorReason.KV_ALTERED, "no"),
    ],
    ids=lambda refusal: refusal.reason.label,
)
async def test_what_is_in_vain_is_not_asked_for_again(
    service: GrpcFacade, refusal: PdserveError
) -> None:
    service.dispatcher.script = [refusal]
    async with AsyncClient(service.address) as client:
        told = await failure(client.generate(GENERATE, timeout_s=60))
    assert (told.reason, told.param) == (refusal.reason, refusal.param)
    assert len(service.dispatcher.seen) == 1


async def test_one_attempt_is_one(service: GrpcFacade) -> None:
    service.dispatcher.script = [FULL]
    async with AsyncClient(service.address, attempts=1) as client:
        assert (await failure(client.generate(GENERATE))).reason is ErrorReason.QUEUE_FULL
    assert len(service.dispatcher.seen) == 1
    for attempts in (0, 6):
        with pytest.raises(ValueError, match="between 1 and 5"):
            AsyncClient(service.address, attempts=attempts)


@either
async def test_a_deadline_ends_the_call(service: GrpcFacade, kind: Any) -> None:
    service.dispatcher.script = [asyncio.Event()]
    async with kind(service.address, timeout_s=0.1) as client:
        told = await failure(client.chat(CHAT))
    assert told.reason is ErrorReason.DEADLINE_EXCEEDED
    async with within(1):
        await service.observer.ended.wait()


@either
async def test_closing_a_stream_cancels_it(service: GrpcFacade, kind: Any) -> None:
    service.dispatcher.script = [Delta("a"), asyncio.Event()]
    async with kind(service.address) as client:
        async with aclosing(client.chat_stream(CHAT)) as parts:
            assert (await anext(parts)).text == "a"
        async with within(1):
            await service.dispatcher.streams[0].closed.wait()
    assert [label for _, label in service.observer.ends] == ["cancelled"]


@either
async def test_nobody_there(kind: Any, unused_tcp_port: int) -> None:
    async with kind(f"127.0.0.1:{unused_tcp_port}", attempts=2) as client:
        told = await failure(client.list_models())
    assert (told.code, told.reason) == (grpc.StatusCode.UNAVAILABLE, None)


async def test_keys_and_metadata_travel() -> None:
    key, entry = new_key("acme")
    async with grpc_facade(KeyRing([entry])) as keyed:
        async with AsyncClient(keyed.address, key=key) as client:
            await client.chat(CHAT, metadata=[("x-request-id", "mine")])
        async with AsyncClient(keyed.address, key="pd-wrong") as client:
            assert (await failure(client.chat(CHAT))).reason is ErrorReason.UNAUTHENTICATED
        seen = keyed.dispatcher.seen[0].spec
        assert (seen.tenant, seen.request_id) == ("acme", "mine")


@pytest.fixture
def own_certificate(tmp_path: Path) -> tuple[bytes, bytes]:
    """A private key, and its certificate for localhost."""
    key, certificate = tmp_path / "key.pem", tmp_path / "certificate.pem"
    subprocess.run(
        [
            *("openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256"),
            *("-nodes", "-keyout", key, "-out", certificate, "-subj", "/CN=localhost"),
            *("-addext", "subjectAltName=DNS:localhost"),
        ],
        check=True,
        capture_output=True,
    )
    return key.read_bytes(), certificate.read_bytes()


async def test_it_speaks_tls(own_certificate: tuple[bytes, bytes]) -> None:
    observer = FakeObserver()
    dispatcher = FakeDispatcher(observer)
    gateway = gateway_without_fleet(GatewayConfig(), KeyRing.open_to_all(), dispatcher.models)
    server = grpc.aio.server()
    add_InferenceServiceServicer_to_server(InferenceServicer(dispatcher, gateway, observer), server)
    port = server.add_secure_port("localhost:0", grpc.ssl_server_credentials([own_certificate]))
    await server.start()
    trusting = grpc.ssl_channel_credentials(own_certificate[1])
    async with AsyncClient(f"localhost:{port}", credentials=trusting) as client:
        assert (await client.chat(CHAT)).message.content == "Hello world"
    async with AsyncClient(
        f"localhost:{port}", credentials=grpc.ssl_channel_credentials(), attempts=1
    ) as client:
        assert (await failure(client.chat(CHAT))).code is grpc.StatusCode.UNAVAILABLE
    await server.stop(0)


def test_it_imports_nothing_heavy() -> None:
    """So that whoever has only this dependency's few installs the client, too."""
    code = "import sys, pdserve.client; print(*sys.modules)"
    loaded = subprocess.run(
        [sys.executable, "-c", code], check=True, capture_output=True, text=True
    ).stdout.split()
    assert "grpc" in loaded
    assert not {"vllm", "torch", "transformers", "fastapi", "pydantic", "numpy"} & set(loaded)

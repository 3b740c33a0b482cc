"""What gRPC itself promises of a call, kept from the client to the simulated engines."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import grpc
import pytest
import pytest_asyncio
from google.rpc import error_details_pb2  # type: ignore[import-untyped]
from grpc_status import rpc_status

from pdserve.client import AsyncClient, CallError, ChatMessage, ChatRequest, Client
from pdserve.config import GatewayConfig, SimConfig
from pdserve.errors import ErrorReason
from pdserve.types import Mode
from pdserve.v1 import inference_pb2 as pb
from pdserve.v1.generation_pb2 import MODE_COLOCATED, MODE_DISAGGREGATED, SamplingParams
from tests.support.asking import LONG_TEXT, decode, prefill
from tests.support.patience import within
from tests.support.sim_fleet import MODEL, SimFleet, sim_fleet

pytestmark = pytest.mark.asyncio(loop_scope="module")

# A second's answer: time enough to leave before its end.
UNHURRIED = SimConfig(prefill_token_s=0.0, decode_step_s=0.01, transfer_token_s=0.0)
MAX_BODY = GatewayConfig().max_body_bytes
ROUTES = {Mode.COLOCATED: MODE_COLOCATED, Mode.DISAGGREGATED: MODE_DISAGGREGATED}
both_routes = pytest.mark.parametrize("mode", ROUTES)
METHODS = ("generate", "chat", "generate_stream", "chat_stream")
every_method = pytest.mark.parametrize("method", METHODS)


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def fleet() -> AsyncIterator[SimFleet]:
    async with sim_fleet(prefill(sim=UNHURRIED), decode(sim=UNHURRIED)) as running:
        yield running


@pytest_asyncio.fixture(loop_scope="module")
async def client(fleet: SimFleet) -> AsyncIterator[AsyncClient]:
    async with AsyncClient(fleet.coordinator.addresses["grpc"]) as made:
        yield made


def asked(method: str, mode: Mode, max_tokens: int, text: str = "Hello") -> Any:
    sampling = SamplingParams(max_tokens=max_tokens, temperature=0, ignore_eos=True)
    options = pb.RequestOptions(mode=ROUTES[mode])
    if method.startswith("chat"):
        messages = [ChatMessage(role="user", content=text)]
        return ChatRequest(model=MODEL, messages=messages, sampling=sampling, options=options)
    return pb.GenerateRequest(model=MODEL, text=text, sampling=sampling, options=options)


async def ask(client: AsyncClient, method: str, request: Any, **call: Any) -> str:
    """The text of an answer, whichever way it comes."""
    made = getattr(client, method)(request, **call)
    if not method.endswith("_stream"):
        answer = await made
        return str(answer.message.content if method == "chat" else answer.text)
    return "".join([part.text async for part in made])


@both_routes
async def test_the_client_reads_the_same_in_every_way(
    client: AsyncClient, fleet: SimFleet, mode: Mode
) -> None:
    sync = Client(fleet.coordinator.addresses["grpc"])
    for whole, streamed in (("generate", "generate_stream"), ("chat", "chat_stream")):
        request = asked(whole, mode, 8)
        text = await ask(client, whole, request)
        assert text
        assert await ask(client, streamed, request) == text
        parts = await asyncio.to_thread(lambda s=streamed, r=request: [*getattr(sync, s)(r)])
        assert "".join(part.text for part in parts) == text
        assert parts[0].route.mode == ROUTES[mode]
        assert parts[-1].usage.completion_tokens == 8
    assert await asyncio.to_thread(sync.list_models) == await client.list_models()
    sync.close()


@every_method
@both_routes
async def test_a_deadline_ends_the_work_for_it(
    client: AsyncClient, fleet: SimFleet, method: str, mode: Mode
) -> None:
    with pytest.raises(CallError) as caught:
        async with within(5):
            await ask(client, method, asked(method, mode, 3000), timeout_s=0.2)
    assert caught.value.reason is ErrorReason.DEADLINE_EXCEEDED
    await fleet.until_idle()


@every_method
@both_routes
async def test_cancelling_ends_the_work_for_it(
    client: AsyncClient, fleet: SimFleet, method: str, mode: Mode
) -> None:
    asking = asyncio.create_task(ask(client, method, asked(method, mode, 3000)))
    await fleet.workers["d"].until(lambda load: load.running > 0)
    asking.cancel()
    with pytest.raises(asyncio.CancelledError):
        await asking
    await fleet.until_idle()


@every_method
@pytest.mark.parametrize("algorithm", [grpc.Compression.Gzip, grpc.Compression.Deflate])
async def test_requests_may_be_compressed(
    client: AsyncClient, fleet: SimFleet, method: str, algorithm: grpc.Compression
) -> None:
    request = asked(method, Mode.COLOCATED, 4, LONG_TEXT)
    address = fleet.coordinator.addresses["grpc"]
    async with AsyncClient(address, compression=algorithm) as compressing:
        assert await ask(compressing, method, request) == await ask(client, method, request)


@every_method
@pytest.mark.parametrize("algorithm", [grpc.Compression.NoCompression, grpc.Compression.Gzip])
async def test_requests_are_bounded_as_they_are_uncompressed(
    fleet: SimFleet, method: str, algorithm: grpc.Compression
) -> None:
    request = asked(method, Mode.COLOCATED, 4, "a" * MAX_BODY)
    async with AsyncClient(fleet.coordinator.addresses["grpc"], compression=algorithm) as client:
        with pytest.raises(CallError) as caught:
            await ask(client, method, request)
    assert caught.value.reason is ErrorReason.BODY_TOO_LARGE
    assert caught.value.code is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert caught.value.metadata == {"retryable": "false"}


async def test_a_bomb_is_not_unpacked(fleet: SimFleet) -> None:
    """65 MiB of one letter are 64 KiB on their way."""
    async with grpc.aio.insecure_channel(
        fleet.coordinator.addresses["grpc"],
        options=(("grpc.max_send_message_length", -1),),
        compression=grpc.Compression.Gzip,
    ) as channel:
        generate = channel.unary_unary("/pdserve.v1.InferenceService/Generate")
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await generate(b"a" * (65 << 20))
    assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert caught.value.details() == "Decompressed message larger than max"


async def test_an_error_says_all_that_is_known(fleet: SimFleet) -> None:
    stub: Any = fleet.coordinator.grpc
    request = asked("generate", Mode.COLOCATED, 0)
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await stub.Generate(request, metadata=(("x-request-id", "mine"),))
    status = rpc_status.from_call(caught.value)  # type: ignore[arg-type]
    assert status is not None
    (detail,) = status.details
    info = error_details_pb2.ErrorInfo()
    assert detail.Unpack(info)
    assert (info.domain, info.reason) == ("pdserve", "INVALID_ARGUMENT")
    assert dict(info.metadata) == {"retryable": "false", "param": "sampling.max_tokens"}
    assert dict(caught.value.trailing_metadata())["x-request-id"] == "mine"

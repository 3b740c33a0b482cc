"""The life of a gRPC server and its errors, over real sockets."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from pdserve.channel import channel
from pdserve.config import FleetConfig, Listen
from pdserve.errors import ConfigError, ErrorReason, PdserveError
from pdserve.fleet_key import call_metadata, read_key, require_trust
from pdserve.rpc_errors import from_rpc_error
from pdserve.server import GrpcServer, capture_signals, unless
from pdserve.v1 import errors_pb2, prefill_pb2, worker_pb2
from pdserve.v1.decode_pb2 import DESCRIPTOR as DECODE
from pdserve.v1.decode_pb2 import SessionRequest, SessionResponse
from pdserve.v1.decode_pb2_grpc import (
    DecodeServiceServicer,
    DecodeServiceStub,
    add_DecodeServiceServicer_to_server,
)
from pdserve.v1.prefill_pb2_grpc import (
    PrefillServiceServicer,
    PrefillServiceStub,
    add_PrefillServiceServicer_to_server,
)
from pdserve.v1.worker_pb2_grpc import (
    WorkerServiceServicer,
    WorkerServiceStub,
    add_WorkerServiceServicer_to_server,
)
from tests.support.grpc_servers import Service, serve
from tests.support.patience import within

KEY = "a fleet's key"
SERVING = health_pb2.HealthCheckResponse.SERVING
NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING


class Failing(PrefillServiceServicer, DecodeServiceServicer, WorkerServiceServicer):
    """Raises `error` in a unary, a streaming and a bidirectional method."""

    def __init__(self, error: BaseException | None) -> None:
        self._error = error
        self.closed = asyncio.Event()

    def _fail(self) -> None:
        if self._error is not None:
            raise self._error

    async def Drain(self, request: Any, context: Any) -> worker_pb2.DrainResponse:
        self._fail()
        return worker_pb2.DrainResponse()

    async def Prefill(self, request: Any, context: Any) -> AsyncIterator[Any]:
        try:
            yield prefill_pb2.PrefillResponse()
            self._fail()
            while True:
                yield prefill_pb2.PrefillResponse()
        finally:
            self.closed.set()

    async def Session(self, request_iterator: Any, context: Any) -> AsyncIterator[Any]:
        async for _ in request_iterator:
            yield SessionResponse()
            self._fail()


def services(error: BaseException | None = None) -> tuple[Service, ...]:
    servicer = Failing(error)
    return (
        (add_PrefillServiceServicer_to_server, servicer, prefill_pb2.DESCRIPTOR),
        (add_DecodeServiceServicer_to_server, servicer, DECODE),
        (add_WorkerServiceServicer_to_server, servicer, worker_pb2.DESCRIPTOR),
    )


Call = Callable[[grpc.aio.Channel, str | None], Any]


async def unary(opened: grpc.aio.Channel, key: str | None = None) -> None:
    await WorkerServiceStub(opened).Drain(worker_pb2.DrainRequest(), metadata=call_metadata(key))


async def stream(opened: grpc.aio.Channel, key: str | None = None) -> None:
    call = PrefillServiceStub(opened).Prefill(
        prefill_pb2.PrefillRequest(), metadata=call_metadata(key)
    )
    await call.read()
    await call.read()
    call.cancel()


async def session(opened: grpc.aio.Channel, key: str | None = None) -> None:
    call = DecodeServiceStub(opened).Session(metadata=call_metadata(key))
    # Nothing is written where the call must fail: a refusal may not wait for a message.
    if key is None:
        await call.write(SessionRequest())
        await call.read()
    await call.done_writing()
    if await call.code() is not grpc.StatusCode.OK:
        await call.read()


async def error_of(call: Call, opened: grpc.aio.Channel, key: str | None = None) -> PdserveError:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call(opened, key)
    return from_rpc_error(caught.value, ErrorReason.DECODE_FAILED)


async def health(opened: grpc.aio.Channel, service: str = "") -> int:
    stub = health_pb2_grpc.HealthStub(opened)
    answer = await stub.Check(health_pb2.HealthCheckRequest(service=service))
    return answer.status


@pytest.mark.parametrize("reason", ErrorReason)
@pytest.mark.parametrize("call", [unary, stream, session])
async def test_every_reason_crosses_the_wire(call: Call, reason: ErrorReason) -> None:
    error = PdserveError(reason, "what went wrong: ü", param="messages[0]", retry_after_s=1.5)
    async with serve(*services(error)) as server, channel(server.address) as opened:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await call(opened, None)
        assert caught.value.code() is grpc.StatusCode[reason.value.grpc]
        told = from_rpc_error(caught.value, ErrorReason.DECODE_FAILED)
    assert told.reason is reason
    assert told.message == "what went wrong: ü"
    assert (told.param, told.retry_after_s) == ("messages[0]", 1.5)


def test_the_table_and_the_wire_contract_name_the_same_reasons() -> None:
    contract = {
        name.removeprefix("ERROR_REASON_"): number
        for name, number in errors_pb2.ErrorReason.items()
        if number
    }
    assert contract == {reason.name: reason.value.number for reason in ErrorReason}


@pytest.mark.parametrize("call", [unary, stream, session])
async def test_any_other_exception_is_internal_and_not_shown(
    call: Call, caplog: pytest.LogCaptureFixture, capsys: pytest.CaptureFixture[str]
) -> None:
    error = ValueError("secret detail")
    async with serve(*services(error)) as server, channel(server.address) as opened:
        told = await error_of(call, opened)
    assert told.reason is ErrorReason.INTERNAL
    assert "secret" not in told.message
    assert "secret detail" in caplog.text + "".join(capsys.readouterr())


@pytest.mark.parametrize("method", ["WorkerService/Drain", "PrefillService/Prefill"])
async def test_what_cannot_be_parsed_is_refused(
    method: str, capsys: pytest.CaptureFixture[str]
) -> None:
    async with serve(*services()) as server, channel(server.address) as opened:
        call = opened.unary_stream(f"/pdserve.v1.{method}")
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await call(b"\xff\xff").read()
    told = from_rpc_error(caught.value, ErrorReason.DECODE_FAILED)
    assert told.reason is ErrorReason.INVALID_ARGUMENT
    assert "Traceback" not in "".join(capsys.readouterr())


async def test_a_cancelled_call_closes_the_handler_at_once() -> None:
    servicer = Failing(None)
    added = (add_PrefillServiceServicer_to_server, servicer, prefill_pb2.DESCRIPTOR)
    async with serve(added) as server, channel(server.address) as opened:
        call = PrefillServiceStub(opened).Prefill(prefill_pb2.PrefillRequest())
        await call.read()
        call.cancel()
        await servicer.closed.wait()


async def test_a_lost_peer_is_told_from_a_refusal() -> None:
    async with serve(*services()) as server:
        address = server.address
    async with channel(address) as opened:
        told = await error_of(unary, opened)
    assert told.reason is ErrorReason.DECODE_FAILED
    assert address not in told.message


async def test_a_restarted_server_is_found_within_a_second_or_two() -> None:
    async with serve(*services()) as server:
        listen = Listen(port=int(server.address.rpartition(":")[2]))
    async with channel(listen.address) as opened:
        assert (await error_of(unary, opened)).reason is ErrorReason.DECODE_FAILED
        restarted = GrpcServer(listen)
        for service in services():
            restarted.add(*service)
        async with restarted:
            await restarted.set_serving(True)
            async with within(2):
                await opened.channel_ready()
            await unary(opened)


async def test_health_starts_not_serving_and_follows() -> None:
    async with serve(*services(), serving=False) as server, channel(server.address) as opened:
        for name in ("", "pdserve.v1.PrefillService"):
            assert await health(opened, name) == NOT_SERVING
        await server.set_serving(True)
        for name in ("", "pdserve.v1.PrefillService", "pdserve.v1.DecodeService"):
            assert await health(opened, name) == SERVING
        await server.set_serving(False)
        assert await health(opened) == NOT_SERVING


async def test_a_watcher_sees_not_serving_before_the_server_stops() -> None:
    async with serve(*services()) as server, channel(server.address) as opened:
        watch = health_pb2_grpc.HealthStub(opened).Watch(health_pb2.HealthCheckRequest())
        assert (await watch.read()).status == SERVING
        draining = asyncio.create_task(server.drain(0.1))
        assert (await watch.read()).status == NOT_SERVING
        await draining


@pytest.mark.parametrize("call", [unary, stream, session])
async def test_calls_are_refused_until_the_server_is_ready(call: Call) -> None:
    async with serve(*services(), serving=False) as server, channel(server.address) as opened:
        assert (await error_of(call, opened)).reason is ErrorReason.NO_WORKER
        await server.set_serving(True)
        await server.set_serving(False)
        await call(opened, None)


@pytest.mark.parametrize("call", [unary, stream, session])
async def test_the_fleet_key_is_demanded(call: Call) -> None:
    async with serve(*services(), key=KEY) as server, channel(server.address) as opened:
        await call(opened, KEY)
        for wrong in (None, KEY + "x", ""):
            told = await error_of(call, opened, wrong)
            assert told.reason is ErrorReason.UNAUTHENTICATED
            assert KEY not in told.message
        assert await health(opened) == SERVING


async def test_reflection_lists_the_services() -> None:
    async with serve(*services()) as server, channel(server.address) as opened:
        call = reflection_pb2_grpc.ServerReflectionStub(opened).ServerReflectionInfo()
        await call.write(reflection_pb2.ServerReflectionRequest(list_services=""))
        answer = await call.read()
        await call.done_writing()
    names = {service.name for service in answer.list_services_response.service}
    assert names >= {
        "grpc.health.v1.Health",
        "pdserve.v1.DecodeService",
        "pdserve.v1.PrefillService",
    }


async def test_a_taken_port_is_told_in_one_line() -> None:
    async with serve() as server:
        port = int(server.address.rpartition(":")[2])
        with pytest.raises(ConfigError) as caught:
            GrpcServer(Listen(port=port))
    assert str(caught.value).startswith(
        f"cannot listen on 127.0.0.1:{port}: address already in use; choose another port"
    )


async def test_a_foreign_address_is_told_in_one_line() -> None:
    with pytest.raises(
        ConfigError, match=r"^cannot listen on 192\.0\.2\.1:0: cannot assign requested address$"
    ):
        GrpcServer(Listen(host="192.0.2.1"))


@pytest.mark.parametrize(
    ("host", "fleet", "trusted"),
    [
        ("127.0.0.1", FleetConfig(), True),
        ("localhost", FleetConfig(), True),
        ("::1", FleetConfig(), True),
        ("0.0.0.0", FleetConfig(), False),
        ("worker.internal", FleetConfig(), False),
        ("0.0.0.0", FleetConfig(key_file=Path("key")), True),
        ("0.0.0.0", FleetConfig(allow_anonymous=True), True),
    ],
)
def test_listening_beyond_loopback_needs_a_key_or_consent(
    host: str, fleet: FleetConfig, trusted: bool
) -> None:
    if trusted:
        require_trust(Listen(host=host), fleet)
    else:
        with pytest.raises(ConfigError, match="without a fleet key"):
            require_trust(Listen(host=host), fleet)


def test_the_fleet_key_is_read_without_its_line_end(tmp_path: Path) -> None:
    file = tmp_path / "key"
    assert read_key(FleetConfig()) is None
    file.write_text("secret\n")
    assert read_key(FleetConfig(key_file=file)) == "secret"


@pytest.mark.parametrize("content", [b"", b" \n", b"two\nlines", "schlüssel".encode(), b"\xff"])
def test_an_unusable_fleet_key_is_refused(tmp_path: Path, content: bytes) -> None:
    file = tmp_path / "key"
    file.write_bytes(content)
    with pytest.raises(ConfigError, match=r"fleet\.key_file"):
        read_key(FleetConfig(key_file=file))


def test_a_missing_fleet_key_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="No such file"):
        read_key(FleetConfig(key_file=tmp_path / "none"))


async def test_the_first_signal_asks_and_the_second_forces() -> None:
    with capture_signals() as signals:
        os.kill(os.getpid(), signal.SIGTERM)
        await signals.asked.wait()
        assert not signals.forced.is_set()
        os.kill(os.getpid(), signal.SIGINT)
        await signals.forced.wait()


async def test_work_goes_on_unless_the_event_comes_first() -> None:
    event = asyncio.Event()
    assert await unless(event, asyncio.sleep(0))
    never = asyncio.get_running_loop().create_future()
    event.set()
    assert not await unless(event, never)
    assert never.cancelled()


async def fails() -> None:
    raise ValueError("told")


async def test_an_error_of_the_work_is_raised() -> None:
    with pytest.raises(ValueError, match="told"):
        await unless(asyncio.Event(), fails())

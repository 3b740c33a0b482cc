"""The life of a gRPC process: bind, serve, be asked to stop, drain, stop."""

from __future__ import annotations

import asyncio
import errno
import signal
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, Self

import grpc
from google.protobuf.descriptor import FileDescriptor
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from pdserve.channel import KEEPALIVE_OPTIONS, MAX_MESSAGE_BYTES, PEER_OPTIONS, SIZE_OPTIONS
from pdserve.config import Listen
from pdserve.errors import ConfigError, ErrorReason, RejectedError
from pdserve.fleet_key import FleetKeyInterceptor, refusing
from pdserve.probe import probe
from pdserve.rpc_errors import Continuation, ErrorInterceptor, Handler

_STOP_GRACE_S = 0.5
_SERVER_OPTIONS = (
    *SIZE_OPTIONS,
    # With it a second process could share the port unnoticed, and take half of the calls.
    ("grpc.so_reuseport", 0),
    # Clients ping every 4 s; gRPC's default would end their connections for that.
    ("grpc.http2.min_recv_ping_interval_without_data_ms", 1_000),
    ("grpc.http2.max_ping_strikes", 0),
)
_SERVING = health_pb2.HealthCheckResponse.SERVING
_NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING


class GrpcServer:
    """A gRPC server that owns its port from construction until it is left as a context.

    Entered, it answers health checks (NOT_SERVING) and reflection, and refuses every other
    call with NO_WORKER until `set_serving(True)`. Left, it says NOT_SERVING first, then ends
    what still runs after half a second: whoever wants to wait longer drains before.
    """

    def __init__(
        self,
        listen: Listen,
        key: str | None = None,
        *,
        serves_peers: bool = False,
        max_request_bytes: int = MAX_MESSAGE_BYTES,
    ) -> None:
        """Binds the port. Calls must carry the fleet key, where one is given; `serves_peers`
        says that they come from the fleet's own processes, of which one that stands still is
        noticed within five seconds. Requests beyond `max_request_bytes` are refused.

        Raises ConfigError when the address cannot be had. Needs a running event loop.
        """
        self._gate = _Gate()
        self._names: list[str] = [reflection.SERVICE_NAME, health.SERVICE_NAME]
        self._health = health.aio.HealthServicer()
        checks = [] if key is None else [FleetKeyInterceptor(key)]
        self._server = grpc.aio.server(
            interceptors=[ErrorInterceptor(max_request_bytes), *checks, self._gate],
            options=(*_SERVER_OPTIONS, *(PEER_OPTIONS if serves_peers else KEEPALIVE_OPTIONS)),
        )
        self._port = _bind(self._server, listen)
        self._listen = listen

    @property
    def address(self) -> str:
        """host:port, with the real port."""
        return self._listen.model_copy(update={"port": self._port}).address

    def add(
        self, adder: Callable[[Any, grpc.aio.Server], None], servicer: Any, file: FileDescriptor
    ) -> None:
        """Registers a service before the server is entered.

        `adder` is the generated add_XServicer_to_server, `file` the descriptor of the proto
        file that defines the service X.
        """
        adder(servicer, self._server)
        self._names += [service.full_name for service in file.services_by_name.values()]

    async def __aenter__(self) -> Self:
        health_pb2_grpc.add_HealthServicer_to_server(self._health, self._server)
        reflection.enable_server_reflection(self._names, self._server)
        await self._report(_NOT_SERVING)
        await self._server.start()
        return self

    async def __aexit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        await self.drain(_STOP_GRACE_S)

    async def set_serving(self, serving: bool) -> None:
        """Sets the health of every service. The first True lets calls in for good.

        NOT_SERVING keeps new clients away; calls that come all the same are the services'
        to answer.
        """
        self._gate.open |= serving
        await self._report(_SERVING if serving else _NOT_SERVING)

    async def drain(self, deadline_s: float) -> None:
        """Says NOT_SERVING, refuses new calls and waits for the running ones.

        Those that still run after `deadline_s` seconds are ended.
        """
        await self._health.enter_graceful_shutdown()
        await self._server.stop(deadline_s)

    async def _report(self, status: int) -> None:
        for name in ("", *self._names):
            await self._health.set(name, status)


def _bind(server: grpc.aio.Server, listen: Listen) -> int:
    try:
        probe(listen)
        return server.add_insecure_port(listen.address)
    except OSError as error:
        reason = (error.strerror or str(error)).lower()
        hint = "; choose another port with a `port` setting or flag"
        if error.errno not in (errno.EADDRINUSE, errno.EACCES):
            hint = ""
        raise ConfigError(f"cannot listen on {listen.address}: {reason}{hint}") from None
    except RuntimeError:
        raise ConfigError(f"cannot listen on {listen.address}") from None


class _Gate(grpc.aio.ServerInterceptor):
    """Holds calls off, but for grpc's own services, until the process is ready."""

    def __init__(self) -> None:
        self.open = False

    async def intercept_service(
        self, continuation: Continuation, handler_call_details: grpc.HandlerCallDetails
    ) -> Handler | None:
        if self.open or handler_call_details.method.startswith("/grpc."):
            return await continuation(handler_call_details)
        return refusing(RejectedError(ErrorReason.NO_WORKER, "still starting; retry later"))


@dataclass(frozen=True, slots=True)
class StopSignals:
    """`asked` is set by the first SIGTERM or SIGINT, `forced` by the second."""

    asked: asyncio.Event = field(default_factory=asyncio.Event)
    forced: asyncio.Event = field(default_factory=asyncio.Event)


@contextmanager
def capture_signals() -> Iterator[StopSignals]:
    """Turns SIGTERM and SIGINT into events while the context lasts. Main thread only."""
    loop = asyncio.get_running_loop()
    signals = StopSignals()

    def received() -> None:
        (signals.forced if signals.asked.is_set() else signals.asked).set()

    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, received)
    try:
        yield signals
    finally:
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.remove_signal_handler(number)


async def unless(event: asyncio.Event, work: Awaitable[object]) -> bool:
    """Awaits `work` unless `event` is set first; then cancels it. True when it ended.

    Raises what `work` raises.
    """
    task = asyncio.ensure_future(work)
    stop = asyncio.ensure_future(event.wait())
    try:
        await asyncio.wait({task, stop}, return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            task.result()
            return True
        return False
    finally:
        for future in (task, stop):
            future.cancel()
        await asyncio.gather(task, stop, return_exceptions=True)

"""gRPC without wires: the generated stubs and servicers, joined by a simulated network.

The coordinator's own client and the workers' own services run unchanged on top of it; messages
are handed over as they are, not serialised. Statuses are those of grpc.aio: a peer that is away
is UNAVAILABLE, and an error of a service passes its own interceptor.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import dataclass
from typing import Any, NoReturn

import grpc
from grpc.aio import AioRpcError, Metadata

from measure.simulation.network import Host
from pdserve.rpc_errors import ErrorInterceptor

_OK = grpc.StatusCode.OK


@dataclass(frozen=True, slots=True)
class _Status:
    code: grpc.StatusCode
    details: str = ""
    trailing: tuple[tuple[str, str | bytes], ...] = ()

    def error(self) -> AioRpcError:
        return AioRpcError(self.code, Metadata(), Metadata.from_tuple(self.trailing), self.details)


_AWAY = _Status(grpc.StatusCode.UNAVAILABLE, "the host is away")
_CANCELLED = _Status(grpc.StatusCode.CANCELLED, "cancelled by the client")


class Server:
    """What `add_XServicer_to_server` registers with; the services of one host."""

    def __init__(self, host: Host) -> None:
        self._host = host

    def add_generic_rpc_handlers(self, handlers: Any) -> None:
        """The generated code registers everything twice."""

    def add_registered_method_handlers(
        self, service: str, handlers: Mapping[str, grpc.RpcMethodHandler[Any, Any]]
    ) -> None:
        for name, handler in handlers.items():
            self._host.services[f"/{service}/{name}"] = handler

    async def start(self) -> None:
        """Gives each method the status codes of its errors, as a real server does, and answers
        from now on."""
        for method, handler in tuple(self._host.services.items()):
            self._host.services[method] = await _guarded(method, handler)
        self._host.up = True


async def _guarded(method: str, handler: Any) -> Callable[[Any, _Context], Any]:
    async def continuation(_: grpc.HandlerCallDetails) -> Any:
        return handler

    guarded: Any = await ErrorInterceptor().intercept_service(continuation, _Details(method))
    behaviour = guarded.unary_unary or guarded.unary_stream or guarded.stream_stream
    return behaviour  # type: ignore[no-any-return]


class _Details(grpc.HandlerCallDetails):
    def __init__(self, method: str) -> None:
        self.method = method
        self.invocation_metadata = ()


class Channel:
    """From one host to another; stubs are made from it as from a grpc.aio.Channel."""

    def __init__(self, source: Host, target: Host) -> None:
        self._source = source
        self._target = target

    def unary_unary(self, method: str, **_: Any) -> Callable[..., Any]:
        async def ask(request: Any, timeout: float | None = None, metadata: Any = ()) -> Any:
            call = Call(self._source, self._target, method)
            call.requests.put(request)
            try:
                async with asyncio.timeout(timeout):
                    return await call.answer()
            except TimeoutError:
                raise _Status(grpc.StatusCode.DEADLINE_EXCEEDED).error() from None
            finally:
                call.cancel()

        return ask

    def unary_stream(self, method: str, **_: Any) -> Callable[..., Any]:
        def ask(request: Any, metadata: Any = ()) -> Call:
            call = Call(self._source, self._target, method)
            call.requests.put(request)
            return call

        return ask

    def stream_stream(self, method: str, **_: Any) -> Callable[..., Any]:
        return lambda metadata=(): Call(self._source, self._target, method)

    async def close(self) -> None:
        """Calls end with those that made them."""


class Inbox:
    """What has arrived and was not read yet; one task reads."""

    def __init__(self) -> None:
        self._items: deque[Any] = deque()
        self._waiter: asyncio.Future[None] | None = None

    def put(self, item: Any) -> None:
        self._items.append(item)
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    async def get(self) -> Any:
        while not self._items:
            self._waiter = asyncio.get_running_loop().create_future()
            await self._waiter
        return self._items.popleft()


class Call:
    """The client's end of a call, and behind it the server's."""

    def __init__(self, client: Host, server: Host, method: str) -> None:
        self._client = client
        self._server = server
        self._method = method
        self.requests = Inbox()
        self._responses = Inbox()
        self._status: _Status | None = None
        self._serving: asyncio.Task[None] | None = None
        self._up = client.network.open(self, client, server)
        self._up.send(self._begin)

    # The client's end.

    def __aiter__(self) -> AsyncIterator[Any]:
        return self

    async def __anext__(self) -> Any:
        message = await self.read()
        if message is grpc.aio.EOF:
            raise StopAsyncIteration
        return message

    async def read(self) -> Any:
        """The next message; EOF at the end. Raises AioRpcError for a call that failed."""
        message = await self._next()
        if not isinstance(message, _Status):
            return message
        if message.code is _OK:
            return grpc.aio.EOF
        raise message.error()

    async def answer(self) -> Any:
        """The one message of a unary call."""
        message = await self.read()
        assert message is not grpc.aio.EOF
        return message

    async def write(self, message: Any) -> None:
        if self._status is not None:
            raise asyncio.InvalidStateError("the call is over")
        self._up.send(self.requests.put, message)

    async def code(self) -> grpc.StatusCode:
        while self._status is None:
            await self._next()
        return self._status.code

    def cancel(self) -> None:
        if self._status is None:
            self._end(_CANCELLED)
            self._up.send(self._drop)

    async def _next(self) -> Any:
        try:
            item = await self._responses.get()
        except asyncio.CancelledError:
            # As in grpc.aio: a cancelled wait ends the call.
            self.cancel()
            raise
        if isinstance(item, _Status):
            self._responses.put(item)  # to be read again
        return item

    def _receive(self, message: Any) -> None:
        if self._status is None:
            self._responses.put(message)

    def _end(self, status: _Status) -> None:
        if self._status is None:
            self._status = status
            self._responses.put(status)
            self._client.network.close(self, self._client, self._server)

    # The server's end.

    def _begin(self) -> None:
        server = self._server
        self._down = server.network.open(self, server, self._client)
        behaviour = server.services.get(self._method) if server.up else None
        if behaviour is None:
            self.finish(_AWAY)
            self._served()
            return
        self._serving = asyncio.create_task(self._serve(behaviour))
        self._serving.add_done_callback(self._served)

    async def _serve(self, behaviour: Callable[[Any, _Context], Any]) -> None:
        context = _Context(self)
        streams = self._method.endswith("/Session")
        request = self._commands() if streams else await self.requests.get()
        try:
            response = await behaviour(request, context)
            if response is not None:
                await context.write(response)
        except grpc.aio.AbortError:
            self.finish(context.status)
        else:
            self.finish(_Status(_OK))

    def _served(self, _: object = None) -> None:
        self._server.network.close(self, self._server, self._client)

    async def _commands(self) -> AsyncIterator[Any]:
        while True:
            yield await self.requests.get()

    def send(self, message: Any) -> None:
        self._down.send(self._receive, message)

    def finish(self, status: _Status) -> None:
        self._down.send(self._end, status)

    def _drop(self) -> None:
        if self._serving is not None:
            self._serving.cancel()

    # Both.

    def broken(self, at: Host) -> None:
        if at is self._client:
            self._end(_AWAY)
        else:
            self._drop()


class _Context:
    """As much of a grpc.aio.ServicerContext as pdserve's services use."""

    def __init__(self, call: Call) -> None:
        self._call = call
        self.status = _Status(grpc.StatusCode.UNKNOWN)

    async def write(self, message: Any) -> None:
        self._call.send(message)

    def time_remaining(self) -> None:
        """Deadlines are kept by the client's end."""

    def trailing_metadata(self) -> tuple[tuple[str, str | bytes], ...]:
        return ()

    async def abort(
        self,
        code: grpc.StatusCode,
        details: str = "",
        trailing_metadata: tuple[tuple[str, str | bytes], ...] = (),
    ) -> NoReturn:
        self.status = _Status(code, details, tuple(trailing_metadata))
        raise grpc.aio.AbortError

"""PdserveError to gRPC status and back: the interceptor on the way out, one function in."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import aclosing
from typing import Any, NoReturn, TypeAlias, cast

import grpc
import structlog
from google.protobuf.message import DecodeError as ParseError
from google.rpc import error_details_pb2, status_pb2  # type: ignore[import-untyped]
from grpc_status import rpc_status

from pdserve.channel import MAX_MESSAGE_BYTES
from pdserve.errors import ERROR_DOMAIN, ErrorReason, PdserveError

_log = structlog.get_logger(__name__)

# In quotes: generic for the type checker alone.
Handler: TypeAlias = "grpc.RpcMethodHandler[Any, Any]"
Context: TypeAlias = "grpc.aio.ServicerContext[Any, Any]"
Continuation: TypeAlias = "Callable[[grpc.HandlerCallDetails], Awaitable[Handler | None]]"

_INTERNAL = PdserveError(ErrorReason.INTERNAL, "internal error")
_PUSHBACK = "grpc-retry-pushback-ms"


def to_status(error: PdserveError) -> grpc.Status:
    """The gRPC status of the error, with a google.rpc.ErrorInfo in its details, and a RetryInfo
    where the error says when to come back.

    The info's metadata has `retryable` ("true" or "false") and, where the error has them,
    `param` and `retry_after_s` (seconds, decimal).
    """
    traits = error.reason.value
    metadata = {"retryable": str(traits.retryable).lower()}
    if error.param is not None:
        metadata["param"] = error.param
    if error.retry_after_s is not None:
        metadata["retry_after_s"] = f"{error.retry_after_s:.3f}"
    info = error_details_pb2.ErrorInfo(
        reason=error.reason.name, domain=ERROR_DOMAIN, metadata=metadata
    )
    code: int = grpc.StatusCode[traits.grpc].value[0]
    status = status_pb2.Status(code=code, message=error.message)
    status.details.add().Pack(info)
    if error.retry_after_s is not None:
        retry = error_details_pb2.RetryInfo()
        retry.retry_delay.FromMilliseconds(round(error.retry_after_s * 1000))
        status.details.add().Pack(retry)
    return rpc_status.to_status(status)


async def abort(context: Context, error: PdserveError) -> NoReturn:
    """Ends the call with the error's status, and what the service has set to follow it."""
    status = to_status(error)
    # None without a deadline, whatever its type says.
    time_left_s = cast(float | None, context.time_remaining())
    trailing = (
        *(context.trailing_metadata() or ()),
        *(status.trailing_metadata or ()),
        *_pushback(error, time_left_s),
    )
    await context.abort(status.code, status.details, trailing)
    raise AssertionError("abort raises")


def _pushback(error: PdserveError, time_left_s: float | None) -> tuple[tuple[str, str], ...]:
    """When clients with a retry policy are to try again, as gRPC tells it: not in vain, and not
    when no time would be left."""
    if not error.reason.value.retryable:
        return ((_PUSHBACK, "-1"),)
    if error.retry_after_s is None:
        return ()
    is_late = time_left_s is not None and error.retry_after_s >= time_left_s
    return ((_PUSHBACK, "-1" if is_late else str(round(error.retry_after_s * 1000))),)


def from_rpc_error(error: grpc.RpcError, lost: ErrorReason) -> PdserveError:
    """What a failed call means, of grpc or of grpc.aio. `lost` is the reason for a lost peer.

    A status without pdserve's ErrorInfo was not made by a pdserve service: the peer cannot
    be reached, died in mid-call or was stopped (`lost`), or gRPC itself refused.
    """
    info = error_info(error)
    if info is not None and info.reason in ErrorReason.__members__:
        return PdserveError(
            ErrorReason[info.reason],
            error.details() or "",
            param=info.metadata.get("param"),
            retry_after_s=seconds(info.metadata.get("retry_after_s")),
        )
    match error.code():
        case grpc.StatusCode.DEADLINE_EXCEEDED:
            return PdserveError(ErrorReason.DEADLINE_EXCEEDED, "the deadline passed")
        # INTERNAL is what gRPC calls a stream that broke; our own would have said why.
        case (
            grpc.StatusCode.UNAVAILABLE
            | grpc.StatusCode.CANCELLED
            | grpc.StatusCode.UNKNOWN
            | grpc.StatusCode.INTERNAL
        ):
            return PdserveError(lost, "the connection to the worker was lost")
        case code:
            return PdserveError(ErrorReason.INTERNAL, f"a worker answered {code.name}")


def error_info(error: grpc.RpcError) -> error_details_pb2.ErrorInfo | None:
    """pdserve's own. None as well for one that is damaged: what failed is then told by the code
    alone."""
    info = error_details_pb2.ErrorInfo()
    try:
        # Typed for a Call, whose methods the errors that gRPC raises have too.
        status = rpc_status.from_call(error)  # type: ignore[arg-type]
        for detail in () if status is None else status.details:
            if detail.Unpack(info) and info.domain == ERROR_DOMAIN:
                return info
    except (ValueError, ParseError):
        return None
    return None


def seconds(text: str | None) -> float | None:
    """None as well for a text that is no number."""
    try:
        return None if text is None else float(text)
    except ValueError:
        return None


class ErrorInterceptor(grpc.aio.ServerInterceptor):
    """Gives every PdserveError its status; hides any other exception behind INTERNAL.

    A request of more than `max_bytes`, decompressed, is refused with BODY_TOO_LARGE.
    """

    def __init__(self, max_bytes: int = MAX_MESSAGE_BYTES) -> None:
        self._max_bytes = max_bytes

    async def intercept_service(
        self, continuation: Continuation, handler_call_details: grpc.HandlerCallDetails
    ) -> Handler | None:
        handler = await continuation(handler_call_details)
        if handler is None:
            return None
        method = handler_call_details.method
        kinds = "unary_unary", "unary_stream", "stream_unary", "stream_stream"
        kind = next(kind for kind in kinds if getattr(handler, kind))
        guard = _guard_stream if handler.response_streaming else _guard_unary
        make: Callable[..., Handler] = getattr(grpc, f"{kind}_rpc_method_handler")
        return make(
            guard(getattr(handler, kind), method),
            request_deserializer=(
                handler.request_deserializer
                if handler.request_streaming
                else _parser(handler.request_deserializer, self._max_bytes)
            ),
            response_serializer=handler.response_serializer,
        )


def _parser(parse: Callable[[bytes], Any] | None, max_bytes: int) -> Callable[[bytes], Any] | None:
    """gRPC answers what cannot be parsed with UNKNOWN, and logs a traceback of its own; a guard
    answers the error that this returns."""

    def parsed(data: bytes) -> Any:
        assert parse is not None
        if len(data) > max_bytes:
            words = f"the message is larger than the limit of {max_bytes} bytes"
            return PdserveError(ErrorReason.BODY_TOO_LARGE, words)
        try:
            return parse(data)
        except ParseError:
            return PdserveError(ErrorReason.INVALID_ARGUMENT, "the message cannot be parsed")

    return None if parse is None else parsed


def _check(request: Any) -> None:
    if isinstance(request, PdserveError):
        raise request


def _guard_unary(behaviour: Callable[..., Any], method: str) -> Callable[..., Any]:
    async def guarded(request: Any, context: Context) -> Any:
        try:
            _check(request)
            return await behaviour(request, context)
        except Exception as error:
            await abort(context, _told(error, method))

    return guarded


def _guard_stream(behaviour: Callable[..., Any], method: str) -> Callable[..., Any]:
    # Writes by itself instead of passing messages on as a generator: that costs nothing per
    # message, and a call cancelled in a write closes the service's generator at once, where
    # gRPC leaves it to the garbage collector.
    async def guarded(request: Any, context: Context) -> None:
        try:
            _check(request)
            result = behaviour(request, context)
            if asyncio.iscoroutine(result):
                await result
                return
            async with aclosing(result):
                async for message in result:
                    await context.write(message)
        except Exception as error:
            await abort(context, _told(error, method))

    return guarded


def _told(error: Exception, method: str) -> PdserveError:
    """The error to tell the client. Re-raises gRPC's own: an abort, or a server that stopped."""
    if isinstance(error, grpc.aio.BaseError):
        raise error
    if isinstance(error, PdserveError):
        return error
    _log.error("call failed", method=method, exc_info=error)
    return _INTERNAL

"""A typed client of the public gRPC API, sync and async.

    with Client("127.0.0.1:50051") as client:
        chat = ChatRequest(model="tiny", messages=[ChatMessage(role="user", content="Hello!")])
        for part in client.chat_stream(chat):
            print(part.text, end="")

Requests and answers are the messages of `protos/pdserve/v1/inference.proto`, so that nothing which
the API has is missing here. A call that cannot be served now is tried again, by gRPC's own retry
policy: after UNAVAILABLE and RESOURCE_EXHAUSTED, when the server would have it again or else after
growing pauses, and never once its answer has begun. A call that fails raises CallError.
"""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator, Generator, Mapping, Sequence
from dataclasses import dataclass, field
from types import TracebackType
from typing import TYPE_CHECKING, Any, ClassVar, Self, TypeVar

import grpc

from pdserve.channel import MAX_MESSAGE_BYTES, SIZE_OPTIONS
from pdserve.errors import REQUEST_ID, ErrorReason
from pdserve.rpc_errors import error_info, seconds
from pdserve.v1 import inference_pb2 as pb
from pdserve.v1.generation_pb2 import SamplingParams, StructuredOutputs, TokenIds
from pdserve.v1.inference_pb2 import (
    ChatMessage,
    ChatRequest,
    GenerateRequest,
    RequestOptions,
    Tool,
    ToolCall,
    ToolChoice,
    ToolMode,
)
from pdserve.v1.inference_pb2_grpc import InferenceServiceStub

if TYPE_CHECKING:
    from pdserve.v1.inference_pb2_grpc import InferenceServiceAsyncStub

__all__ = [
    "AsyncClient",
    "CallError",
    "ChatMessage",
    "ChatRequest",
    "Client",
    "GenerateRequest",
    "RequestOptions",
    "SamplingParams",
    "StructuredOutputs",
    "TokenIds",
    "Tool",
    "ToolCall",
    "ToolChoice",
    "ToolMode",
]

MAX_ATTEMPTS = 5
"""gRPC makes no more of one call."""

Metadata = Sequence[tuple[str, str]]
_Asked = TypeVar("_Asked")
_Told = TypeVar("_Told")

_OPTIONS: tuple[tuple[str, Any], ...] = (
    *SIZE_OPTIONS,
    # A server that vanished without a word is noticed while a call waits for it.
    ("grpc.keepalive_time_ms", 30_000),
    ("grpc.keepalive_timeout_ms", 10_000),
    ("grpc.http2.max_pings_without_data", 0),
    # What may have to be sent again is kept; gRPC's default gives up on more than 256 KiB.
    ("grpc.per_rpc_retry_buffer_size", MAX_MESSAGE_BYTES),
    ("grpc.service_config_disable_resolution", 1),
)


@dataclass(eq=False)
class CallError(Exception):
    """A call that was refused or failed.

    `reason` is None where gRPC itself ended the call, for want of a connection for example, or the
    server gave a reason that this client does not know: `code` is all there is to go by then.
    `param` names the field at fault, `retry_after_s` says when the server would have the call
    again. `metadata` is all that came with the reason; `request_id` is the server's name of the
    call.
    """

    code: grpc.StatusCode
    reason: ErrorReason | None
    message: str
    param: str | None = None
    retry_after_s: float | None = None
    metadata: Mapping[str, str] = field(default_factory=dict)
    request_id: str | None = None

    def __str__(self) -> str:
        return f"{self.code.name if self.reason is None else self.reason.label}: {self.message}"


class _Access:
    """How to reach a server: what the sync and the async client have in common."""

    _library: ClassVar[Any]
    """The module that makes its channels."""

    def __init__(
        self,
        target: str,
        *,
        key: str | None = None,
        credentials: grpc.ChannelCredentials | None = None,
        timeout_s: float | None = 600.0,
        attempts: int = 4,
        compression: grpc.Compression = grpc.Compression.NoCompression,
    ) -> None:
        """`target` is host:port, or whatever else gRPC resolves; it is connected to by the first
        call. With `credentials`, for example `grpc.ssl_channel_credentials()`, by TLS; without
        them the key travels in the clear. `timeout_s` bounds each call that names no other, with
        all its attempts; None is no bound. `attempts` counts the first one: 1 to 5.
        `compression` is that of requests.
        """
        if not 1 <= attempts <= MAX_ATTEMPTS:
            raise ValueError(f"attempts must be between 1 and {MAX_ATTEMPTS}")
        self._metadata = () if key is None else (("authorization", f"Bearer {key}"),)
        self._timeout_s = timeout_s
        options = (*_OPTIONS, ("grpc.service_config", _service_config(attempts)))
        if credentials is None:
            channel = self._library.insecure_channel(target, options, compression)
        else:
            channel = self._library.secure_channel(target, credentials, options, compression)
        self._channel = channel
        self._stub = InferenceServiceStub(channel)

    def _call(self, timeout_s: float | None, metadata: Metadata) -> dict[str, Any]:
        return {
            "timeout": self._timeout_s if timeout_s is None else timeout_s,
            "metadata": (*self._metadata, *metadata),
        }


class Client(_Access):
    """Calls that block. Threads may share one; each answer is read by one of them.

    Every method takes `timeout_s`, seconds for the whole call, and `metadata` to send along, such
    as `x-request-id` or `traceparent`. Streams are asked for when their first part is read, and
    closing one cancels it.
    """

    _library: ClassVar[Any] = grpc
    _stub: InferenceServiceStub

    def generate(
        self, request: GenerateRequest, *, timeout_s: float | None = None, metadata: Metadata = ()
    ) -> pb.GenerateResponse:
        """Continues a prompt."""
        return _whole(self._stub.Generate, request, self._call(timeout_s, metadata))

    def generate_stream(
        self, request: GenerateRequest, *, timeout_s: float | None = None, metadata: Metadata = ()
    ) -> Generator[pb.GenerateStreamResponse]:
        """Continues a prompt, part by part."""
        asked = pb.GenerateStreamRequest(request=request)
        return _parts(self._stub.GenerateStream, asked, self._call(timeout_s, metadata))

    def chat(
        self, request: ChatRequest, *, timeout_s: float | None = None, metadata: Metadata = ()
    ) -> pb.ChatResponse:
        """Answers a conversation."""
        return _whole(self._stub.Chat, request, self._call(timeout_s, metadata))

    def chat_stream(
        self, request: ChatRequest, *, timeout_s: float | None = None, metadata: Metadata = ()
    ) -> Generator[pb.ChatStreamResponse]:
        """Answers a conversation, part by part."""
        asked = pb.ChatStreamRequest(request=request)
        return _parts(self._stub.ChatStream, asked, self._call(timeout_s, metadata))

    def list_models(
        self, *, timeout_s: float | None = None, metadata: Metadata = ()
    ) -> list[pb.Model]:
        """What is served, by name."""
        call = self._call(timeout_s, metadata)
        return list(_whole(self._stub.ListModels, pb.ListModelsRequest(), call).models)

    def close(self) -> None:
        """Ends what still runs."""
        self._channel.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()


class AsyncClient(_Access):
    """As `Client`, for asyncio: made, used and closed in one running event loop."""

    _library: ClassVar[Any] = grpc.aio
    _stub: InferenceServiceAsyncStub

    async def generate(
        self, request: GenerateRequest, *, timeout_s: float | None = None, metadata: Metadata = ()
    ) -> pb.GenerateResponse:
        """Continues a prompt."""
        return await _whole_async(self._stub.Generate, request, self._call(timeout_s, metadata))

    def generate_stream(
        self, request: GenerateRequest, *, timeout_s: float | None = None, metadata: Metadata = ()
    ) -> AsyncGenerator[pb.GenerateStreamResponse]:
        """Continues a prompt, part by part."""
        asked = pb.GenerateStreamRequest(request=request)
        return _parts_async(self._stub.GenerateStream, asked, self._call(timeout_s, metadata))

    async def chat(
        self, request: ChatRequest, *, timeout_s: float | None = None, metadata: Metadata = ()
    ) -> pb.ChatResponse:
        """Answers a conversation."""
        return await _whole_async(self._stub.Chat, request, self._call(timeout_s, metadata))

    def chat_stream(
        self, request: ChatRequest, *, timeout_s: float | None = None, metadata: Metadata = ()
    ) -> AsyncGenerator[pb.ChatStreamResponse]:
        """Answers a conversation, part by part."""
        asked = pb.ChatStreamRequest(request=request)
        return _parts_async(self._stub.ChatStream, asked, self._call(timeout_s, metadata))

    async def list_models(
        self, *, timeout_s: float | None = None, metadata: Metadata = ()
    ) -> list[pb.Model]:
        """What is served, by name."""
        call = self._call(timeout_s, metadata)
        told = await _whole_async(self._stub.ListModels, pb.ListModelsRequest(), call)
        return list(told.models)

    async def close(self) -> None:
        """Ends what still runs."""
        await self._channel.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        await self.close()


def _whole(
    method: grpc.UnaryUnaryMultiCallable[_Asked, _Told], asked: _Asked, call: dict[str, Any]
) -> _Told:
    try:
        return method(asked, **call)
    except grpc.RpcError as error:
        raise _told(error) from None


def _parts(
    method: grpc.UnaryStreamMultiCallable[_Asked, _Told], asked: _Asked, call: dict[str, Any]
) -> Generator[_Told]:
    parts = method(asked, **call)
    try:
        yield from parts
    except grpc.RpcError as error:
        raise _told(error) from None
    finally:
        parts.cancel()


async def _whole_async(
    method: grpc.aio.UnaryUnaryMultiCallable[_Asked, _Told], asked: _Asked, call: dict[str, Any]
) -> _Told:
    try:
        return await method(asked, **call)
    except grpc.RpcError as error:
        raise _told(error) from None


async def _parts_async(
    method: grpc.aio.UnaryStreamMultiCallable[_Asked, _Told], asked: _Asked, call: dict[str, Any]
) -> AsyncGenerator[_Told]:
    parts = method(asked, **call)
    try:
        async for part in parts:
            yield part
    except grpc.RpcError as error:
        raise _told(error) from None
    finally:
        parts.cancel()


def _told(error: grpc.RpcError) -> CallError:
    info = error_info(error)
    metadata = {} if info is None else dict(info.metadata)
    trailing: Any = error.trailing_metadata()  # pairs, sync and async, whatever its type says
    is_late = error.code() is grpc.StatusCode.DEADLINE_EXCEEDED  # gRPC or the server was first
    name = "DEADLINE_EXCEEDED" if is_late else "" if info is None else info.reason
    return CallError(
        error.code(),
        ErrorReason.__members__.get(name),
        error.details() or "",
        metadata.get("param"),
        seconds(metadata.get("retry_after_s")),
        metadata,
        dict(trailing or ()).get(REQUEST_ID),
    )


def _service_config(attempts: int) -> str:
    policy = {
        "maxAttempts": attempts,
        "initialBackoff": "0.2s",
        "maxBackoff": "5s",
        "backoffMultiplier": 2,
        "retryableStatusCodes": ["UNAVAILABLE", "RESOURCE_EXHAUSTED"],
    }
    method: dict[str, Any] = {"name": [{"service": pb.DESCRIPTOR.package + ".InferenceService"}]}
    if attempts > 1:
        method["retryPolicy"] = policy
    return json.dumps({"methodConfig": [method]})

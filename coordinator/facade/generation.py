"""Answers chats and completions over HTTP: the token path, in plain ASGI."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from starlette.datastructures import Headers
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from coordinator.facade.http_errors import REQUEST_ID, error_json, error_response, json_response
from coordinator.facade.http_wire import WhileConnected, read_json_body
from coordinator.facade.intake import Intake, begin, request_id_from
from coordinator.facade.openai_answer import chat_completion, completion
from coordinator.facade.openai_schema import (
    ChatCompletionRequest,
    CompletionRequest,
    GenerationBody,
    parse,
)
from coordinator.facade.ports import TokenStream
from coordinator.facade.sse import (
    CHAT_CHUNK,
    COMPLETION_CHUNK,
    AnswerIdentity,
    ChunkShape,
    Frames,
    error_event,
)
from coordinator.record import RequestRecord
from pdserve.errors import ErrorReason, PdserveError, RejectedError
from pdserve.types import Delta, FinishReason, GenerateSpec, Mode, Route, Usage

_MAX_REASON_CHARS = 256


@dataclass(frozen=True, slots=True)
class Operation:
    """What sets chats and completions apart."""

    name: str
    body: type[GenerationBody]
    id_prefix: str
    chunk: ChunkShape
    answer: Callable[[AnswerIdentity, str, FinishReason, Usage], dict[str, Any]]


CHAT = Operation("chat", ChatCompletionRequest, "chatcmpl-", CHAT_CHUNK, chat_completion)
COMPLETION = Operation("completion", CompletionRequest, "cmpl-", COMPLETION_CHUNK, completion)


class GenerationResponse(Response):
    """Does all the work of a request when it is sent.

    So one place has the client's connection in hand from the body to the last token,
    and each token goes from the dispatcher to the socket with nothing between.
    """

    background = None

    def __init__(self, intake: Intake, operation: Operation) -> None:
        self._intake = intake
        self._operation = operation

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        headers = Headers(scope=scope)
        record = begin(
            "http",
            self._operation.name,
            request_id_from(headers.get(REQUEST_ID)),
            headers.get("traceparent"),
        )
        try:
            await self._serve(headers, record, receive, send)
        except Exception as error:
            told = self._intake.failed(record, error)
            await error_response(told, record.request_id)(scope, receive, send)
        except BaseException as error:
            self._intake.failed(record, error)
            raise

    async def _serve(
        self, headers: Headers, record: RequestRecord, receive: Receive, send: Send
    ) -> None:
        caller = self._intake.authenticate(headers.get("authorization"))
        record.tenant = caller.tenant
        data = await read_json_body(headers, receive, self._intake.max_body_bytes)
        body = parse(self._operation.body, data)
        record.stream = bool(body.stream)
        spec = _spec(body, headers, record)
        stream: TokenStream | None = None
        try:
            async with WhileConnected(receive):
                stream = await self._intake.open(spec, caller, record, body.param_names)
                respond = self._stream if record.stream else self._collect
                last = await respond(stream, body, record, send)
        finally:
            if stream is not None:
                await stream.aclose()
        # Sent last, for nothing may watch the connection once the response is complete.
        await last(send)
        await send({"type": "http.response.body", "body": last})
'''

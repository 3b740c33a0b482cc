"""Anthropic's Message, whole, and the events that build one up; and its errors."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import msgspec
import orjson
from starlette.datastructures import Headers
from starlette.responses import Response

from coordinator.facade.http_errors import error_response
from coordinator.facade.intake import Answer
from coordinator.facade.messages import MessagesChat, MessagesRequest, read_messages
from coordinator.facade.named_events import named_event
from coordinator.facade.operation import Asked
from coordinator.facade.parsed import brought
from coordinator.template import arguments_of
from pdserve.chat import AnsweredMessage, ToolCallDelta
from pdserve.errors import PdserveError
from pdserve.types import Delta, FinishReason, Usage

_STOP_REASONS = {
    FinishReason.STOP: "end_turn",
    FinishReason.LENGTH: "max_tokens",
    FinishReason.TOOL_CALLS: "tool_use",
}
_ERROR_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}
"""By HTTP status; what is not here is the client's below 500, and the server's from there on."""


class MessagesErrorDetail(msgspec.Struct):
    """`type` goes by the HTTP status."""

    type: str
    message: str


class MessagesError(msgspec.Struct):
    """Every answer that is no success, and the last event of a stream that breaks."""

    error: MessagesErrorDetail
    request_id: str
    type: Literal["error"] = "error"


class Messages:
    """The Operation."""

    name = "messages"
    id_prefix = "msg_"
    document = MessagesRequest

    def authorization(self, headers: Headers) -> str | None:
        """Anthropic's clients have a header of their own for a key."""
        key = headers.get("x-api-key")
        return headers.get("authorization") if key is None else f"Bearer {key}"

    def read(self, data: bytes) -> MessagesChat:
        return read_messages(data)

    def answer(self, asked: Asked, answers: Sequence[Answer], usage: Usage) -> dict[str, Any]:
        (answer,) = answers
        message = answer.message or AnsweredMessage(content=answer.text)
        parts = (("thinking", message.reasoning), ("text", message.content))
        content = [_block(kind, text) for kind, text in parts if text]
        content += [_use(call.id, call.name, arguments_of(call)) for call in message.tool_calls]
        arguments = [call.arguments for call in message.tool_calls]
        end = _end(answer.finish_reason, answer.stop_reason, arguments)
        return {**_message(asked, content, _usage(answer.usage)), **end}

    def events(self, asked: Asked, prompt_token_ids: Sequence[int], index: int) -> MessageEvents:
        return MessageEvents(asked, len(prompt_token_ids))

    def refusal(self, error: PdserveError, request_id: str) -> Response:
        return error_response(error, request_id, body=error_body(error, request_id))


def error_body(error: PdserveError, request_id: str) -> dict[str, Any]:
    status = error.reason.value.http
    kind = _ERROR_TYPES.get(status, "invalid_request_error" if status < 500 else "api_error")
    detail = MessagesErrorDetail(kind, error.message)
    told: dict[str, Any] = msgspec.to_builtins(MessagesError(error=detail, request_id=request_id))
    return told


class MessageEvents:
    """The events of one streamed message."""

    before = (
        b"event: content_block_delta\n"
        b'data: {"type":"content_block_delta","index":0,"delta":{"type":"text_delta","text":'
    )
    after = b"}}\n\n"

    def __init__(self, asked: Asked, prompt_tokens: int) -> None:
        self._asked = asked
        self._prompt_tokens = prompt_tokens
        self._index = -1
        self._kind = ""
        self._arguments: list[str] = []

    @property
    def is_plain(self) -> bool:
        return self._asked.parser is None

    @property
    def opening(self) -> bytes:
        usage = _usage(Usage(self._prompt_tokens, 0))
        end = {"stop_reason": None, "stop_sequence": None}
        begun = named_event("message_start", message={**_message(self._asked, [], usage), **end})
        return begun + self._open("text", _block("text", "")) if self.is_plain else begun

    def piece(self, delta: Delta) -> bytes:
        """Empty for a delta that has nothing to show."""
        new = brought(delta)
        said = self._add("thinking", new.reasoning) + self._add("text", new.content)
        return said + b"".join(map(self._call, new.tool_calls))

    def last(self, delta: Delta) -> bytes:
        assert delta.finish_reason is not None
        assert delta.usage is not None
        piece = self.piece(delta)
        end = _end(delta.finish_reason, delta.stop_reason, self._arguments)
        told = named_event("message_delta", delta=end, usage=_usage(delta.usage))
        return piece + self._close() + told

    def end(self, usage: Usage) -> bytes:
        return named_event("message_stop")

    def broken(self, error: PdserveError) -> bytes:
        """The end of a stream that cannot go on."""
        body = orjson.dumps(error_body(error, self._asked.record.request_id))
        return b"event: error\ndata: %b\n\n" % body

    def _add(self, kind: str, text: str | None) -> bytes:
        """Text of one kind makes one block, for as long as no other kind comes."""
        if not text:
            return b""
        turned = b"" if kind == self._kind else self._close() + self._open(kind, _block(kind, ""))
        return turned + self._delta({"type": f"{kind}_delta", kind: text})

    def _call(self, call: ToolCallDelta) -> bytes:
        begun = b""
        if call.name is not None:
            self._arguments.append("")
            begun = self._close() + self._open("tool_use", _use(call.id or "", call.name, {}))
        if not call.arguments:
            return begun
        self._arguments[-1] += call.arguments
        return begun + self._delta({"type": "input_json_delta", "partial_json": call.arguments})

    def _delta(self, new: dict[str, str]) -> bytes:
        return named_event("content_block_delta", index=self._index, delta=new)

    def _open(self, kind: str, block: dict[str, Any]) -> bytes:
        self._kind, self._index = kind, self._index + 1
        return named_event("content_block_start", index=self._index, content_block=block)

    def _close(self) -> bytes:
        return named_event("content_block_stop", index=self._index) if self._kind else b""


def _message(asked: Asked, content: list[dict[str, Any]], usage: dict[str, int]) -> dict[str, Any]:
    return {
        "id": asked.identity.id,
        "type": "message",
        "role": "assistant",
        "model": asked.identity.model,
        "content": content,
        "usage": usage,
    }


def _block(kind: str, text: str) -> dict[str, Any]:
    return {"type": kind, kind: text, **({"signature": ""} if kind == "thinking" else {})}


def _use(id_: str, name: str, arguments: dict[str, Any]) -> dict[str, Any]:
    return {"type": "tool_use", "id": id_, "name": name, "input": arguments}


def _end(reason: FinishReason, met: str | int | None, arguments: Sequence[str]) -> dict[str, Any]:
    """As in vLLM: with calls, of which these are the arguments, it is them, also where the answer
    had to; unless a full length or a stop string has cut one short, which must not be run."""
    if isinstance(met, str) and not (arguments and all(map(_is_json, arguments))):
        return {"stop_reason": "stop_sequence", "stop_sequence": met}
    calls = arguments and reason is FinishReason.STOP
    why = _STOP_REASONS[FinishReason.TOOL_CALLS if calls else reason]
    return {"stop_reason": why, "stop_sequence": None}


def _is_json(text: str) -> bool:
    try:
        orjson.loads(text)
    except orjson.JSONDecodeError:
        return False
    return True


def _usage(usage: Usage) -> dict[str, int]:
    """What a cache saved is no part of `input_tokens`."""
    return {
        "input_tokens": usage.prompt_tokens - usage.cached_tokens,
        "cache_read_input_tokens": usage.cached_tokens,
        "cache_creation_input_tokens": 0,
        "output_tokens": usage.completion_tokens,
    }

"""OpenAI's Response, whole, and the events that build one up."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import msgspec
from starlette.datastructures import Headers
from starlette.responses import Response

from coordinator.facade.http_errors import error_response
from coordinator.facade.intake import Answer
from coordinator.facade.logprobs import ChatLogprobs
from coordinator.facade.named_events import named_event
from coordinator.facade.operation import Asked
from coordinator.facade.parsed import brought
from coordinator.facade.responses import ResponsesChat, ResponsesRequest, read_responses
from coordinator.facade.sse import AnswerIdentity
from pdserve.chat import AnsweredMessage, ToolCall, ToolCallDelta
from pdserve.errors import PdserveError
from pdserve.types import Delta, FinishReason, PositionLogprobs, SamplingParams, Usage


class Responses:
    """The Operation."""

    name = "responses"
    id_prefix = "resp_"
    document = ResponsesRequest

    def authorization(self, headers: Headers) -> str | None:
        return headers.get("authorization")

    def read(self, data: bytes) -> ResponsesChat:
        return read_responses(data)

    def answer(self, asked: Asked, answers: Sequence[Answer], usage: Usage) -> dict[str, Any]:
        (answer,) = answers
        return _shape(asked).whole(answer)

    def events(self, asked: Asked, prompt_token_ids: Sequence[int], index: int) -> ResponseEvents:
        return ResponseEvents(_shape(asked))

    def refusal(self, error: PdserveError, request_id: str) -> Response:
        return error_response(error, request_id)


def _shape(asked: Asked) -> ResponseShape:
    assert isinstance(asked.body, ResponsesChat)
    return ResponseShape(asked.identity, asked.body, asked.spec.sampling)


@dataclass(frozen=True, slots=True)
class ResponseShape:
    """What all forms of one response have in common."""

    identity: AnswerIdentity
    body: ResponsesChat
    sampling: SamplingParams

    def whole(self, answer: Answer) -> dict[str, Any]:
        message = answer.message or AnsweredMessage(content=answer.text)
        status = _status(answer.finish_reason)
        output: list[dict[str, Any]] = []
        if message.reasoning:
            ended = "completed" if message.content else status
            output.append(self.reasoning(message.reasoning, ended))
        calls = message.tool_calls
        if message.content or not (output or calls):
            output.append(self.message(status, message.content or "", answer.logprobs))
        for call in calls:
            output.append(self.call(len(output), status, call))
        return self.ended(output, answer.finish_reason, answer.usage)

    def ended(
        self, output: list[dict[str, Any]], finish_reason: FinishReason, usage: Usage
    ) -> dict[str, Any]:
        is_cut = finish_reason is FinishReason.LENGTH
        return {
            **self.response(_status(finish_reason), output),
            "incomplete_details": {"reason": "max_output_tokens"} if is_cut else None,
            "usage": _usage(usage),
        }

    def response(self, status: str, output: list[dict[str, Any]]) -> dict[str, Any]:
        body, asked, sampling = self.body, self.body.asked, self.sampling
        return {
            "id": self.identity.id,
            "object": "response",
            "created_at": self.identity.created,
            "status": status,
            "background": False,
            "error": None,
            "incomplete_details": None,
            "instructions": asked.instructions,
            "max_output_tokens": asked.max_output_tokens,
            "metadata": asked.metadata or {},
            "model": self.identity.model,
            "output": output,
            "parallel_tool_calls": asked.parallel_tool_calls is not False,
            "previous_response_id": None,
            "reasoning": {"effort": body.reasoning_effort, "summary": None},
            "service_tier": "default",
            "store": False,
            "temperature": sampling.temperature,
            "text": {"format": self._format()},
            "tool_choice": msgspec.to_builtins(
                asked.tool_choice or ("auto" if asked.tools else "none")
            ),
            "tools": msgspec.to_builtins(asked.tools or []),
            "top_logprobs": asked.top_logprobs or 0,
            "top_p": sampling.top_p,
            "truncation": asked.truncation or "disabled",
            "usage": None,
            "user": asked.user,
        }

    def message(
        self, status: str, text: str | None, logprobs: list[PositionLogprobs]
    ) -> dict[str, Any]:
        """Without a text it has no part yet."""
        return {
            "id": self.item_id("msg"),
            "type": "message",
            "status": status,
            "role": "assistant",
            "content": [] if text is None else [self.part(text, logprobs)],
        }

    def reasoning(self, text: str | None, status: str) -> dict[str, Any]:
        """What the model thought before its message."""
        return {
            "id": self.item_id("rs"),
            "type": "reasoning",
            "status": status,
            "summary": [],
            "content": [] if text is None else [{"type": "reasoning_text", "text": text}],
        }

    def call(self, index: int, status: str, call: ToolCall) -> dict[str, Any]:
        """A function that is to be called, as the item of that index."""
        return {
            "id": f"{self.item_id('fc')}_{index}",
            "type": "function_call",
            "status": status,
            "call_id": call.id,
            "name": call.name,
            "arguments": call.arguments,
        }

    def part(self, text: str, logprobs: list[PositionLogprobs]) -> dict[str, Any]:
        shown = self.logprobs(logprobs)
        return {"type": "output_text", "text": text, "annotations": [], "logprobs": shown}

    def logprobs(self, positions: list[PositionLogprobs]) -> list[dict[str, Any]]:
        top = self.sampling.logprobs
        return [] if top is None else list(ChatLogprobs(top)(positions)["content"])

    def item_id(self, prefix: str) -> str:
        return self.identity.id.replace("resp", prefix, 1)

    def _format(self) -> dict[str, Any]:
        text = self.body.asked.text
        if text is None or text.format is None:
            return {"type": "text"}
        asked = text.format
        if asked.type != "json_schema":
            return {"type": asked.type}
        return {
            "type": asked.type,
            "name": asked.name or "",
            "description": asked.description,
            "schema": asked.schema,
            "strict": asked.strict,
        }


_NO_CALL = ToolCall("", "", "")


@dataclass(slots=True)
class ResponseEvents:
    """The events of one streamed response; each has the number that follows the last one's.

    An item is opened with its first text, a message at the end if nothing else was there.
    """

    shape: ResponseShape
    _number: int = 0
    _output: list[dict[str, Any]] = field(default_factory=list)
    _kind: str = ""
    _texts: list[str] = field(default_factory=list)
    _logprobs: list[PositionLogprobs] = field(default_factory=list)
    _told: int = 0
    _call: ToolCall = _NO_CALL

    is_plain = False
    before = after = b""

    @property
    def opening(self) -> bytes:
        begun = self.shape.response("in_progress", [])
        return self._event("created", response=begun) + self._event("in_progress", response=begun)

    def piece(self, delta: Delta) -> bytes:
        """Empty for a delta that has nothing to show."""
        new = brought(delta)
        self._logprobs += delta.logprobs or ()
        said = self._add("reasoning", new.reasoning) + self._add("message", new.content)
        return said + b"".join(map(self._add_call, new.tool_calls))

    def last(self, delta: Delta) -> bytes:
        assert delta.finish_reason is not None
        assert delta.usage is not None
        events = self.piece(delta)
        if not (self._kind or self._output):
            events += self._open("message")
        events += self._close(_status(delta.finish_reason))
        response = self.shape.ended(self._output, delta.finish_reason, delta.usage)
        return events + self._event(response["status"], response=response)

    def end(self, usage: Usage) -> bytes:
        """The last event was the end."""
        return b""

    def broken(self, error: PdserveError) -> bytes:
        """The end of a stream that cannot go on."""
        told = {"code": "server_error", "message": f"{error.reason.label}: {error.message}"}
        begun = [self._item("incomplete", "".join(self._texts))] if self._kind else []
        response = {**self.shape.response("failed", [*self._output, *begun]), "error": told}
        return self._event("failed", response=response)

    def _add(self, kind: str, text: str | None) -> bytes:
        if not text:
            return b""
        turned = b"" if kind == self._kind else self._close("completed") + self._open(kind)
        self._texts.append(text)
        if kind == "reasoning":
            return turned + self._event("reasoning_text.delta", **self._place, delta=text)
        new, self._told = self._logprobs[self._told :], len(self._logprobs)
        shown = self.shape.logprobs(new)
        return turned + self._event("output_text.delta", **self._place, delta=text, logprobs=shown)

    def _add_call(self, new: ToolCallDelta) -> bytes:
        begun = b""
        if new.name is not None:
            begun = self._close("completed")
            self._call = ToolCall(new.id or "", new.name, "")
            begun += self._open("function_call")
        if not new.arguments:
            return begun
        self._texts.append(new.arguments)
        item_id, index = self._item("in_progress", "")["id"], len(self._output)
        return begun + self._event(
            "function_call_arguments.delta",
            item_id=item_id,
            output_index=index,
            delta=new.arguments,
        )

    def _open(self, kind: str) -> bytes:
        self._kind, self._texts = kind, []
        index, item = len(self._output), self._item("in_progress", None)
        added = self._event("output_item.added", output_index=index, item=item)
        if kind == "function_call":
            return added
        return added + self._event("content_part.added", **self._place, part=self._part(""))

    def _close(self, status: str) -> bytes:
        if not self._kind:
            return b""
        text = "".join(self._texts)
        item = self._item(status, text)
        done = self._done(text, item)
        done += self._event("output_item.done", output_index=len(self._output), item=item)
        self._output.append(item)
        self._kind = ""
        return done

    def _done(self, text: str, item: dict[str, Any]) -> bytes:
        if self._kind == "function_call":
            told = {"item_id": item["id"], "output_index": len(self._output)}
            name = self._call.name
            return self._event("function_call_arguments.done", **told, name=name, arguments=text)
        place = self._place
        if self._kind == "reasoning":
            done = self._event("reasoning_text.done", **place, text=text)
        else:
            shown = self.shape.logprobs(self._logprobs)
            done = self._event("output_text.done", **place, text=text, logprobs=shown)
        return done + self._event("content_part.done", **place, part=self._part(text))

    def _item(self, status: str, text: str | None) -> dict[str, Any]:
        if self._kind == "function_call":
            call = replace(self._call, arguments=text or "")
            return self.shape.call(len(self._output), status, call)
        if self._kind == "reasoning":
            return self.shape.reasoning(text, status)
        return self.shape.message(status, text, self._logprobs)

    def _part(self, text: str) -> dict[str, Any]:
        if self._kind == "reasoning":
            return {"type": "reasoning_text", "text": text}
        return self.shape.part(text, self._logprobs if text else [])

    @property
    def _place(self) -> dict[str, Any]:
        item_id = self.shape.item_id("rs" if self._kind == "reasoning" else "msg")
        return {"item_id": item_id, "output_index": len(self._output), "content_index": 0}

    def _event(self, kind: str, /, **fields: Any) -> bytes:
        number, self._number = self._number, self._number + 1
        return named_event(f"response.{kind}", sequence_number=number, **fields)


def _status(finish_reason: FinishReason) -> str:
    return "incomplete" if finish_reason is FinishReason.LENGTH else "completed"


def _usage(usage: Usage) -> dict[str, Any]:
    return {
        "input_tokens": usage.prompt_tokens,
        "input_tokens_details": {"cached_tokens": usage.cached_tokens, "cache_write_tokens": 0},
        "output_tokens": usage.completion_tokens,
        "output_tokens_details": {"reasoning_tokens": usage.reasoning_tokens or 0},
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
    }

"""OpenAI's conversations and tools, with what vLLM adds: bodies, and what they mean."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, Literal

import msgspec

from coordinator.facade.validate import MAX_MESSAGES, MAX_TOOLS
from pdserve.chat import ChatMessage, NamedTool, Tool, ToolCall, ToolChoice, ToolMode
from pdserve.errors import ErrorReason, RejectedError


class _Body(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    pass


class TextPart(_Body, kw_only=True):
    type: Literal["text"]
    text: str


class CalledFunction(_Body, kw_only=True):
    name: str
    arguments: str


class MessageToolCall(_Body, kw_only=True):
    id: str
    type: Literal["function"] = "function"
    function: CalledFunction


class MessageBody(_Body, kw_only=True):
    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | list[TextPart] | None = None
    name: str | None = None
    tool_calls: list[MessageToolCall] | None = None
    tool_call_id: str | None = None
    reasoning: str | None = None
    reasoning_content: str | None = None

    # As OpenAI's answers have them, which are sent back whole.
    refusal: None = None
    audio: None = None
    function_call: None = None
    annotations: Annotated[list[Any], msgspec.Meta(max_length=0)] | None = None

    @property
    def text(self) -> str:
        """Parts are joined as vLLM joins them."""
        if isinstance(self.content, list):
            return "\n".join(part.text for part in self.content)
        return self.content or ""


Conversation = Annotated[list[MessageBody], msgspec.Meta(max_length=MAX_MESSAGES)]


class FunctionBody(_Body, kw_only=True):
    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class ToolBody(_Body, kw_only=True):
    type: Literal["function"] = "function"
    function: FunctionBody


class FunctionName(_Body, kw_only=True):
    name: str


class NamedToolChoice(_Body, kw_only=True):
    type: Literal["function"] = "function"
    function: FunctionName


Tools = Annotated[list[ToolBody], msgspec.Meta(max_length=MAX_TOOLS)]
ToolChoiceBody = Literal["none", "auto", "required"] | NamedToolChoice
ReasoningEffort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]


def messages_of(bodies: Sequence[MessageBody]) -> tuple[ChatMessage, ...]:
    """Raises RejectedError for more than there may be, and fields that are not of a message's
    role."""
    if len(bodies) + sum(len(body.tool_calls or ()) for body in bodies) > MAX_MESSAGES:
        raise _rejected("messages", f"and their tool_calls may be {MAX_MESSAGES} together")
    return tuple(_message(f"messages.{index}", body) for index, body in enumerate(bodies))


def _message(place: str, body: MessageBody) -> ChatMessage:
    if body.content is None and not body.tool_calls:
        raise _rejected(f"{place}.content", "is missing")
    reasoning = body.reasoning_content if body.reasoning is None else body.reasoning
    if body.role != "assistant" and body.tool_calls:
        raise _rejected(f"{place}.tool_calls", "belong to the role assistant")
    if body.role != "assistant" and reasoning is not None:
        raise _rejected(f"{place}.reasoning", "belongs to the role assistant")
    if body.role != "tool" and body.tool_call_id is not None:
        raise _rejected(f"{place}.tool_call_id", "belongs to the role tool")
    calls = (ToolCall(c.id, c.function.name, c.function.arguments) for c in body.tool_calls or ())
    return ChatMessage(
        role="system" if body.role == "developer" else body.role,
        content=body.text,
        name=body.name or "",
        tool_calls=tuple(calls),
        tool_call_id=body.tool_call_id or "",
        reasoning=reasoning,
    )


def tools_of(bodies: Sequence[ToolBody] | None) -> tuple[Tool, ...]:
    """Raises RejectedError for an empty list, as OpenAI and vLLM do."""
    if bodies is not None and not bodies:
        raise _rejected("tools", "must have at least one tool, or be left out")
    return tuple(
        Tool(
            name=body.function.name,
            description=body.function.description,
            parameters=_parameters(f"tools.{index}.function.parameters", body.function),
            strict=body.function.strict,
        )
        for index, body in enumerate(bodies or ())
    )


def choice_of(body: ToolChoiceBody | None, has_tools: bool) -> ToolChoice:
    """Tools are there to be called, where nothing else is said."""
    if body is None:
        return ToolMode.AUTO if has_tools else ToolMode.NONE
    return NamedTool(body.function.name) if isinstance(body, NamedToolChoice) else ToolMode(body)


def _parameters(place: str, function: FunctionBody) -> str | None:
    return None if function.parameters is None else json_text(place, function.parameters)


def json_text(place: str, value: dict[str, Any]) -> str:
    """Raises RejectedError for what is nested too deeply; `place` is where it was given."""
    try:
        return msgspec.json.encode(value).decode()
    except RecursionError:
        raise _rejected(place, "is nested too deeply") from None


def _rejected(param: str, words: str) -> RejectedError:
    return RejectedError(ErrorReason.INVALID_ARGUMENT, f"{param} {words}", param=param)

"""Anthropic's Messages: what is accepted, and the chat that it is here."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Any, Literal

import msgspec

from coordinator.facade.body import decode, rejected
from coordinator.facade.openai_chat import (
    CalledFunction,
    FunctionBody,
    FunctionName,
    MessageBody,
    MessageToolCall,
    NamedToolChoice,
    ToolBody,
    ToolChoiceBody,
    json_text,
)
from coordinator.facade.openai_schema import ChatCompletionRequest
from coordinator.facade.validate import MAX_MESSAGES, MAX_TOOLS, ParamNames


class _Body(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    pass


class TextBlock(_Body, kw_only=True, tag_field="type", tag="text"):
    """`cache_control` has no effect, here and below: prefixes are cached without it."""

    text: str
    cache_control: Any = None
    citations: None = None


class ThinkingBlock(_Body, kw_only=True, tag_field="type", tag="thinking"):
    """What the model thought, sent back."""

    thinking: str
    signature: str | None = None


class ToolUseBlock(_Body, kw_only=True, tag_field="type", tag="tool_use"):
    """A call that the model made, sent back."""

    id: str
    name: str
    input: dict[str, Any]
    cache_control: Any = None


class ToolResultBlock(_Body, kw_only=True, tag_field="type", tag="tool_result"):
    """`is_error` has no effect: chat templates do not know it, and the content says it."""

    tool_use_id: str
    content: str | list[TextBlock] | None = None
    is_error: bool | None = None
    cache_control: Any = None


class Turn(_Body, kw_only=True):
    role: Literal["user", "assistant", "system"]
    content: str | list[TextBlock | ThinkingBlock | ToolUseBlock | ToolResultBlock]


class ThinkingConfig(_Body, kw_only=True):
    """A budget of tokens to think with cannot be held to, and is refused."""

    type: Literal["disabled", "adaptive"]
    display: Any = None


class Metadata(_Body, kw_only=True):
    user_id: str | None = None


class ClientTool(_Body, kw_only=True):
    """One that the client runs; there are no others here."""

    name: str
    input_schema: dict[str, Any]
    type: Literal["custom"] | None = None
    description: str | None = None
    strict: bool | None = None
    cache_control: Any = None


class MessagesToolChoice(_Body, kw_only=True):
    """`name` belongs to the type tool."""

    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool | None = None


class CountTokensRequest(_Body, kw_only=True):
    """What of a request for a message becomes its prompt."""

    model: str
    messages: Annotated[list[Turn], msgspec.Meta(max_length=MAX_MESSAGES)]
    system: str | list[TextBlock] | None = None
    thinking: ThinkingConfig | None = None
    tools: Annotated[list[ClientTool], msgspec.Meta(max_length=MAX_TOOLS)] | None = None
    tool_choice: MessagesToolChoice | None = None

    # As in vLLM.
    chat_template_kwargs: dict[str, Any] | None = None


class MessagesRequest(CountTokensRequest, kw_only=True):
    max_tokens: int
    stop_sequences: list[str] | None = None
    stream: bool | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None

    # As in vLLM.
    cache_salt: str | None = None

    # Accepted, and without effect.
    metadata: Metadata | None = None
    service_tier: Literal["auto", "standard_only"] | None = None


_SAME = ("max_tokens", "stream", "temperature", "top_p", "top_k", "cache_salt")
"""What chats call by the same name."""


class MessagesChat(ChatCompletionRequest, kw_only=True):
    """A chat that came as a request for a message."""

    @property
    def param_names(self) -> ParamNames:
        return {**super().param_names, "stop": "stop_sequences", "reasoning_effort": "thinking"}


def read_messages(data: bytes) -> MessagesChat:
    """Raises RejectedError INVALID_ARGUMENT that names the first field at fault."""
    asked = decode(MessagesRequest, data)
    same = {name: getattr(asked, name) for name in _SAME}
    return _chat(asked, stop=asked.stop_sequences, **same)


def read_count_tokens(data: bytes) -> MessagesChat:
    """As `read_messages`."""
    return _chat(decode(CountTokensRequest, data))


def _chat(asked: CountTokensRequest, **more: Any) -> MessagesChat:
    turns = [body for index, turn in enumerate(asked.messages) for body in _bodies(index, turn)]
    # An answer that the client has begun is gone on with.
    goes_on = turns[-1].role == "assistant" if turns else False
    if asked.system is not None:
        turns.insert(0, MessageBody(role="system", content=_joined(asked.system)))
    disabled = asked.thinking is not None and asked.thinking.type == "disabled"
    choice = asked.tool_choice
    chat = MessagesChat(
        model=asked.model,
        messages=turns,
        tools=[_tool(tool) for tool in asked.tools or ()] or None,
        tool_choice=_choice(choice, has_tools=bool(asked.tools)),
        parallel_tool_calls=choice is None or not choice.disable_parallel_tool_use,
        add_generation_prompt=not goes_on,
        continue_final_message=goes_on,
        reasoning_effort="none" if disabled else None,
        chat_template_kwargs=asked.chat_template_kwargs,
        **more,
    )
    chat.check()
    return chat


def _bodies(index: int, turn: Turn) -> Iterator[MessageBody]:
    """Results of tools are messages of their own, before what else the turn says."""
    if isinstance(turn.content, str):
        yield MessageBody(role=turn.role, content=turn.content)
        return
    said, thought = [], []
    calls: list[MessageToolCall] = []
    has_results = False
    for number, block in enumerate(turn.content):
        place = f"messages.{index}.content.{number}"
        match block:
            case TextBlock():
                said.append(block.text)
            case ThinkingBlock():
                thought.append(block.thinking)
            case ToolUseBlock():
                _require_role("assistant", turn, place, "tool_use")
                function = CalledFunction(
                    name=block.name, arguments=json_text(f"{place}.input", block.input)
                )
                calls.append(MessageToolCall(id=block.id, function=function))
            case ToolResultBlock():
                _require_role("user", turn, place, "tool_result")
                has_results = True
                told = _joined(block.content or "")
                yield MessageBody(role="tool", content=told, tool_call_id=block.tool_use_id)
    if said or not has_results:
        yield MessageBody(
            role=turn.role,
            content="\n".join(said),
            reasoning="\n".join(thought) if thought else None,
            tool_calls=calls or None,
        )


def _require_role(role: str, turn: Turn, place: str, kind: str) -> None:
    if turn.role != role:
        raise rejected(f"{place}: {kind} belongs to the role {role}", place)


def _tool(tool: ClientTool) -> ToolBody:
    return ToolBody(
        function=FunctionBody(
            name=tool.name,
            description=tool.description,
            parameters=tool.input_schema,
            strict=tool.strict,
        )
    )


def _choice(choice: MessagesToolChoice | None, *, has_tools: bool) -> ToolChoiceBody | None:
    """Raises RejectedError for a name that is missing, or has no place."""
    if choice is None:
        return None
    if (choice.type == "tool") is not (choice.name is not None):
        raise rejected("tool_choice.name belongs to the type tool", "tool_choice.name")
    if choice.name is not None:
        return NamedToolChoice(function=FunctionName(name=choice.name))
    if choice.type == "any":
        return "required"
    return "auto" if choice.type == "auto" and has_tools else "none"


def _joined(content: str | list[TextBlock]) -> str:
    return content if isinstance(content, str) else "\n".join(block.text for block in content)

"""Conversations: what was said, what may be called, and what an answer is made of; a part of
`pdserve.types`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any


@dataclass(frozen=True, slots=True)
class ToolCall:
    """`arguments` are JSON in text, as the model wrote them: not always valid."""

    id: str
    name: str
    arguments: str


@dataclass(frozen=True, slots=True)
class ChatMessage:
    """One message of a conversation. `name` is its speaker's. `tool_calls` and `reasoning` are
    an assistant's, `tool_call_id` names the call that a message of the role "tool" answers."""

    role: str
    content: str
    name: str = ""
    tool_calls: tuple[ToolCall, ...] = ()
    tool_call_id: str = ""
    reasoning: str | None = None


@dataclass(frozen=True, slots=True)
class Tool:
    """A function that the model may call; `parameters` is a JSON schema in text."""

    name: str
    description: str | None = None
    parameters: str | None = None
    strict: bool | None = None


class ToolMode(StrEnum):
    """Whether the answer calls tools: never, where the model wants to, always."""

    NONE = "none"
    AUTO = "auto"
    REQUIRED = "required"


@dataclass(frozen=True, slots=True)
class NamedTool:
    """The one tool that the answer must call."""

    name: str


ToolChoice = ToolMode | NamedTool


@dataclass(frozen=True, slots=True)
class ChatPrompt:
    """A conversation, to be rendered by the model's chat template, and what may be answered.

    The tools are rendered whatever `tool_choice` is, as in vLLM. `include_reasoning` says
    whether an answer shows what the model thought before it; `reasoning_effort`, where it is
    not empty, is told to the template, as are `template_kwargs`, JSON values for variables of its
    own. The template opens the assistant's turn with `add_generation_prompt`, and leaves the last
    message open with `continue_final_message`; never both.
    """

    messages: tuple[ChatMessage, ...]
    tools: tuple[Tool, ...] = ()
    tool_choice: ToolChoice = ToolMode.NONE
    parallel_tool_calls: bool = True
    include_reasoning: bool = True
    reasoning_effort: str = ""
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    template_kwargs: Mapping[str, Any] = field(default_factory=dict)
    add_special_tokens: bool = False


@dataclass(frozen=True, slots=True)
class ToolCallDelta:
    """What is new of the call at `index`; its first delta has `id` and `name`."""

    index: int
    id: str | None = None
    name: str | None = None
    arguments: str | None = None


@dataclass(frozen=True, slots=True)
class MessageDelta:
    """What is new of a message; None is nothing new."""

    content: str | None = None
    reasoning: str | None = None
    tool_calls: tuple[ToolCallDelta, ...] = ()


@dataclass(frozen=True, slots=True)
class AnsweredMessage:
    """An assistant's message, taken apart."""

    content: str | None
    reasoning: str | None = None
    tool_calls: tuple[ToolCall, ...] = ()

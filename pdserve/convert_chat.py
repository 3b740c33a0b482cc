"""Copies conversations: as `pdserve.convert`, of which it is a part."""

from __future__ import annotations

import json
from typing import Any

import msgspec

from pdserve.chat import (
    AnsweredMessage,
    ChatMessage,
    ChatPrompt,
    MessageDelta,
    NamedTool,
    Tool,
    ToolCall,
    ToolChoice,
    ToolMode,
)
from pdserve.errors import ErrorReason, PdserveError
from pdserve.v1 import inference_pb2 as pb

_MODE_TO_PROTO = {
    ToolMode.NONE: pb.TOOL_MODE_NONE,
    ToolMode.AUTO: pb.TOOL_MODE_AUTO,
    ToolMode.REQUIRED: pb.TOOL_MODE_REQUIRED,
}
_MODE_FROM_PROTO: dict[int, ToolMode] = {number: mode for mode, number in _MODE_TO_PROTO.items()}


def chat_to_proto(prompt: ChatPrompt) -> pb.ChatRequest:
    """The part of a request that a ChatPrompt holds."""
    return pb.ChatRequest(
        messages=[_message_to_proto(message) for message in prompt.messages],
        tools=[
            pb.Tool(
                name=tool.name,
                description=tool.description,
                parameters=tool.parameters,
                strict=tool.strict,
            )
            for tool in prompt.tools
        ],
        tool_choice=_choice_to_proto(prompt.tool_choice),
        parallel_tool_calls=prompt.parallel_tool_calls,
        include_reasoning=prompt.include_reasoning,
        reasoning_effort=prompt.reasoning_effort,
        template=pb.ChatTemplate(
            add_generation_prompt=prompt.add_generation_prompt,
            continue_final_message=prompt.continue_final_message,
            kwargs=json.dumps(dict(prompt.template_kwargs)) if prompt.template_kwargs else "",
        ),
        prompt_options=pb.PromptOptions(add_special_tokens=prompt.add_special_tokens),
    )


def chat_from_proto(request: pb.ChatRequest) -> ChatPrompt:
    """Raises PdserveError INVALID_ARGUMENT for a tool mode, or values for a template, that are
    none."""
    template = request.template
    tools = tuple(_tool_from_proto(tool) for tool in request.tools)
    return ChatPrompt(
        messages=tuple(_message_from_proto(message) for message in request.messages),
        tools=tools,
        tool_choice=_choice_from_proto(request.tool_choice, has_tools=bool(tools)),
        parallel_tool_calls=(
            request.parallel_tool_calls if request.HasField("parallel_tool_calls") else True
        ),
        include_reasoning=(
            request.include_reasoning if request.HasField("include_reasoning") else True
        ),
        reasoning_effort=request.reasoning_effort,
        add_generation_prompt=(
            template.add_generation_prompt if template.HasField("add_generation_prompt") else True
        ),
        continue_final_message=template.continue_final_message,
        template_kwargs=_kwargs_from_proto(template.kwargs) if template.kwargs else {},
        add_special_tokens=request.prompt_options.add_special_tokens,
    )


def _kwargs_from_proto(text: str) -> dict[str, Any]:
    try:
        return msgspec.json.decode(text, type=dict[str, Any])
    except (msgspec.DecodeError, RecursionError):
        raise PdserveError(
            ErrorReason.INVALID_ARGUMENT,
            "template.kwargs must be a JSON object",
            param="template.kwargs",
        ) from None


def answered_to_proto(message: AnsweredMessage) -> pb.ChatMessage:
    return pb.ChatMessage(
        role="assistant",
        content=message.content or "",
        tool_calls=[_call_to_proto(call) for call in message.tool_calls],
        reasoning=message.reasoning,
    )


def calls_to_proto(delta: MessageDelta) -> list[pb.ToolCallDelta]:
    return [
        pb.ToolCallDelta(
            index=call.index,
            id=call.id or "",
            name=call.name or "",
            arguments=call.arguments or "",
        )
        for call in delta.tool_calls
    ]


def _message_to_proto(message: ChatMessage) -> pb.ChatMessage:
    return pb.ChatMessage(
        role=message.role,
        content=message.content,
        name=message.name,
        tool_calls=[_call_to_proto(call) for call in message.tool_calls],
        tool_call_id=message.tool_call_id,
        reasoning=message.reasoning,
    )


def _message_from_proto(message: pb.ChatMessage) -> ChatMessage:
    return ChatMessage(
        role=message.role,
        content=message.content,
        name=message.name,
        tool_calls=tuple(ToolCall(one.id, one.name, one.arguments) for one in message.tool_calls),
        tool_call_id=message.tool_call_id,
        reasoning=message.reasoning if message.HasField("reasoning") else None,
    )


def _call_to_proto(call: ToolCall) -> pb.ToolCall:
    return pb.ToolCall(id=call.id, name=call.name, arguments=call.arguments)


def _tool_from_proto(tool: pb.Tool) -> Tool:
    return Tool(
        name=tool.name,
        description=tool.description if tool.HasField("description") else None,
        parameters=tool.parameters if tool.HasField("parameters") else None,
        strict=tool.strict if tool.HasField("strict") else None,
    )


def _choice_to_proto(choice: ToolChoice) -> pb.ToolChoice:
    if isinstance(choice, NamedTool):
        return pb.ToolChoice(name=choice.name)
    return pb.ToolChoice(mode=_MODE_TO_PROTO[choice])


def _choice_from_proto(message: pb.ToolChoice, *, has_tools: bool) -> ToolChoice:
    if message.WhichOneof("choice") == "name":
        return NamedTool(message.name)
    if message.mode == pb.TOOL_MODE_UNSPECIFIED:
        return ToolMode.AUTO if has_tools else ToolMode.NONE
    try:
        return _MODE_FROM_PROTO[message.mode]
    except KeyError:
        raise PdserveError(
            ErrorReason.INVALID_ARGUMENT,
            f"tool mode {message.mode} is not known",
            param="tool_choice",
        ) from None

"""Conversations as chat templates want them: the very values that vLLM's own server renders. Pure.

`vllm/renderers/chat_utils.py` of 0.32 is what this follows.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from typing import Any

from pdserve.chat import ChatMessage, ChatPrompt, Tool, ToolCall


def template_messages(messages: Iterable[ChatMessage]) -> list[dict[str, Any]]:
    return [_message(message) for message in messages]


def template_tools(tools: Sequence[Tool]) -> list[Any] | None:
    """None for none, which templates tell from an empty list."""
    return [_tool(tool) for tool in tools] or None


def template_kwargs(prompt: ChatPrompt) -> dict[str, Any]:
    """With what a reasoning effort is to a template. One that must be told to think, is."""
    effort, given = prompt.reasoning_effort, prompt.template_kwargs
    if not effort:
        return dict(given)
    return {"enable_thinking": effort != "none", **given, "reasoning_effort": effort}


def _message(message: ChatMessage) -> dict[str, Any]:
    told: dict[str, Any] = {"role": message.role, "content": message.content}
    if message.tool_calls:
        told["tool_calls"] = [_call(call) for call in message.tool_calls]
    if message.reasoning is not None:
        told["reasoning"] = told["reasoning_content"] = message.reasoning
    if message.tool_call_id:
        told["tool_call_id"] = message.tool_call_id
    if message.name:
        told["name"] = message.name
    return told


def _call(call: ToolCall) -> dict[str, Any]:
    function = {"name": call.name, "arguments": arguments_of(call)}
    return {"id": call.id, "type": "function", "function": function}


def arguments_of(call: ToolCall) -> dict[str, Any]:
    """An object, whatever the model once wrote: else the conversation could never go on."""
    try:
        arguments = json.loads(call.arguments) if call.arguments else {}
    except (ValueError, RecursionError):
        return {}
    return arguments if isinstance(arguments, dict) else {}


def _tool(tool: Tool) -> dict[str, Any]:
    function: dict[str, Any] = {
        "name": tool.name,
        "description": tool.description,
        "parameters": None if tool.parameters is None else json.loads(tool.parameters),
    }
    if tool.strict is not None:
        function["strict"] = tool.strict
    return {"type": "function", "function": function}

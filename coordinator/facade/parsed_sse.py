"""Bytes of server-sent events of answers that are taken apart, as vLLM's own server sends them."""

from __future__ import annotations

from typing import Any

import orjson

from coordinator.facade.parsed import ParsedDelta
from coordinator.facade.sse import Frames
from pdserve.chat import MessageDelta, ToolCallDelta
from pdserve.types import Delta


class ParsedFrames(Frames):
    """Takes ParsedDelta alone."""

    @property
    def is_plain(self) -> bool:
        return False

    def piece(self, delta: Delta) -> bytes:
        self._count(delta)
        shows = _parsed(delta).delta is not None or self._has_more(delta)
        return self._choice(delta, b"null") if shows else b""

    def last(self, delta: Delta) -> bytes:
        self._count(delta)
        return super().last(delta)

    def _count(self, delta: Delta) -> None:
        so_far = _parsed(delta).so_far
        self._completion_tokens = len(so_far.token_ids)
        if self._shown.continuous_usage:
            self._reasoning_tokens = so_far.reasoning_tokens

    def _content(self, delta: Delta) -> bytes:
        return self._head + b'"delta":' + orjson.dumps(_delta_json(_parsed(delta).delta))


def _parsed(delta: Delta) -> ParsedDelta:
    assert isinstance(delta, ParsedDelta)
    return delta


def _delta_json(delta: MessageDelta | None) -> dict[str, Any]:
    if delta is None:
        return {}
    shown: dict[str, Any] = {}
    if delta.content is not None:
        shown["content"] = delta.content
    if delta.reasoning is not None:
        shown["reasoning"] = delta.reasoning
    if delta.tool_calls:
        shown["tool_calls"] = [_call_json(call) for call in delta.tool_calls]
    return shown


def _call_json(call: ToolCallDelta) -> dict[str, Any]:
    shown: dict[str, Any] = {"index": call.index}
    if call.id is not None:
        shown |= {"id": call.id, "type": "function"}
    function = {"name": call.name, "arguments": call.arguments}
    shown["function"] = {name: value for name, value in function.items() if value is not None}
    return shown

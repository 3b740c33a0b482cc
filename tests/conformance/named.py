"""What answers of Responses and Messages showed, whole or in events."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import httpx

from tests.conformance.seen import Seen, calls_of

Took = tuple[str, str]
"""Mode and reason."""


def _response(response: httpx.Response, took: Took) -> Seen:
    events = _events(response)
    whole = events[-1]["response"] if events else response.json()
    parts = [part for item in whole["output"] for part in item.get("content") or ()]
    calls = [item for item in whole["output"] if item["type"] == "function_call"]
    text = "".join(part["text"] for part in parts)
    deltas = [event["delta"] for event in events if event["type"] == "response.output_text.delta"]
    assert not events or "".join(deltas) == text
    return Seen(
        text=text,
        calls=calls_of(list(enumerate(calls))),
        finish_reason="length" if whole["status"] == "incomplete" else "stop",
        usage=(whole["usage"]["input_tokens"], whole["usage"]["output_tokens"]),
        mode=took[0],
        reason=took[1],
    )


def _message(response: httpx.Response, took: Took) -> Seen:
    events = _events(response)
    if not events:
        end = whole = response.json()
        texts = [block["text"] for block in whole["content"] if block["type"] == "text"]
        uses = [block for block in whole["content"] if block["type"] == "tool_use"]
        calls = [
            (index, {"name": use["name"], "arguments": json.dumps(use["input"])})
            for index, use in enumerate(uses)
        ]
        usage = whole["usage"]
    else:
        deltas = [event for event in events if event["type"] == "content_block_delta"]
        texts = [event["delta"].get("text", "") for event in deltas]
        calls = [
            (event["index"], {"name": event["content_block"]["name"]})
            for event in events
            if event["type"] == "content_block_start"
            and event["content_block"]["type"] == "tool_use"
        ]
        calls += [
            (event["index"], {"arguments": event["delta"]["partial_json"]})
            for event in deltas
            if event["delta"]["type"] == "input_json_delta"
        ]
        (last,) = (event for event in events if event["type"] == "message_delta")
        end, usage = last["delta"], last["usage"]
        assert events[-1]["type"] == "message_stop"
    read = usage["input_tokens"] + (usage.get("cache_read_input_tokens") or 0)
    return Seen(
        text="".join(texts),
        calls=calls_of(calls),
        finish_reason=f"{end['stop_reason']} {end.get('stop_sequence') or ''}",
        usage=(read, usage["output_tokens"]),
        mode=took[0],
        reason=took[1],
    )


def _events(response: httpx.Response) -> list[dict[str, Any]]:
    """None of an answer that is whole."""
    if not response.headers["content-type"].startswith("text/event-stream"):
        return []
    lines = (line for line in response.text.split("\n") if line.startswith("data: "))
    return [json.loads(line.removeprefix("data: ")) for line in lines]


NAMED: dict[str, Callable[[httpx.Response, Took], Seen]] = {
    "response": _response,
    "message": _message,
}

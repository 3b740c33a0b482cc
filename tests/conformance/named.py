"""What answers of Responses and Messages showed, whole or in events."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import httpx

from tests.conformance.seen import Seen

Took = tuple[str, str]
"""Mode and reason."""


def _response(response: httpx.Response, took: Took) -> Seen:
    events = _events(response)
    whole = events[-1]["response"] if events else response.json()
    parts = [part for item in whole["output"] for part in item["content"]]
    text = "".join(part["text"] for part in parts)
    deltas = [event["delta"] for event in events if event["type"] == "response.output_text.delta"]
    assert not events or "".join(deltas) == text
    return Seen(
        text=text,
        finish_reason="length" if whole["status"] == "incomplete" else "stop",
        usage=(whole["usage"]["input_tokens"], whole["usage"]["output_tokens"]),
        mode=took[0],
        reason=took[1],
    )


def _message(response: httpx.Response, took: Took) -> Seen:
    events = _events(response)
    if not events:
        end = whole = response.json()
        texts = [block["text"] for block in whole["content"]]
        usage = whole["usage"]
    else:
        deltas = [event for event in events if event["type"] == "content_block_delta"]
        texts = [event["delta"]["text"] for event in deltas]
        (last,) = (event for event in events if event["type"] == "message_delta")
        end, usage = last["delta"], last["usage"]
        assert events[-1]["type"] == "message_stop"
    read = usage["input_tokens"] + (usage.get("cache_read_input_tokens") or 0)
    return Seen(
        text="".join(texts),
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

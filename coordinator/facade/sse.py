"""Bytes of server-sent events, made ready once a stream so that a token costs next to nothing."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import orjson

from pdserve.types import FinishReason, Usage

DONE = b"data: [DONE]\n\n"


@dataclass(frozen=True, slots=True)
class AnswerIdentity:
    """What all chunks of an answer repeat. `created` is in seconds since the Unix epoch."""

    id: str
    created: int
    model: str


@dataclass(frozen=True, slots=True)
class ChunkShape:
    """What a choice of a chunk looks like around its text, as JSON in bytes."""

    kind: str
    before: bytes
    after: bytes
    opening: bytes = b""


CHAT_CHUNK = ChunkShape(
    kind="chat.completion.chunk",
    before=b'"delta":{"content":',
    after=b"}",
    opening=b'"delta":{"role":"assistant","content":""}',
)
COMPLETION_CHUNK = ChunkShape(kind="text_completion", before=b'"text":', after=b"")


class Frames:
    """The events of one stream: `opening`, a `delta` for each text, `closing` with the last.

    A delta is the text as JSON between `before` and `after`.
    """

    __slots__ = ("_finish", "_include_usage", "_prefix", "after", "before", "opening")

    def __init__(self, identity: AnswerIdentity, shape: ChunkShape, include_usage: bool) -> None:
        head = {
            "id": identity.id,
            "object": shape.kind,
            "created": identity.created,
            "model": identity.model,
        }
        usage = b',"usage":null' if include_usage else b""
        end = b',"logprobs":null,"finish_reason":%b}]' + usage + b"}\n\n"
        self._prefix = b"data: " + orjson.dumps(head)[:-1] + b',"choices":['
        self._include_usage = include_usage
        self.before = self._prefix + b'{"index":0,' + shape.before
        self.after = shape.after + end % b"null"
        self._finish = {
            reason: shape.after + end % orjson.dumps(reason.value) for reason in FinishReason
        }
        self.opening = b""
        if shape.opening:
            self.opening = self._prefix + b'{"index":0,' + shape.opening + end % b"null"

    def delta(self, text: str) -> bytes:
        return self.before + orjson.dumps(text) + self.after

    def closing(self, text: str, reason: FinishReason, usage: Usage) -> bytes:
        """The last text with its finish reason, the usage where it was asked for, the end."""
        last = self.before + orjson.dumps(text) + self._finish[reason]
        if not self._include_usage:
            return last + DONE
        counts = orjson.dumps(usage_json(usage))
        return last + self._prefix + b'],"usage":' + counts + b"}\n\n" + DONE


def error_event(body: dict[str, Any]) -> bytes:
    """A failure after the first token. No [DONE] follows, so that no client takes it for an end."""
    return b"data: " + orjson.dumps(body) + b"\n\n"


def usage_json(usage: Usage) -> dict[str, Any]:
    return {
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.completion_tokens,
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
        "prompt_tokens_details": {"cached_tokens": usage.cached_tokens},
    }

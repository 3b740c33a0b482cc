"""Bytes of server-sent events, made ready once a stream so that a token costs next to nothing."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import orjson

from coordinator.facade.http_errors import error_json
from coordinator.facade.logprobs import LogprobsShape
from pdserve.errors import PdserveError
from pdserve.types import Delta, Usage

DONE = b"data: [DONE]\n\n"
_NULL = b"null"
_END = b"}\n\n"


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


@dataclass(frozen=True, slots=True)
class Shown:
    """What events have beside text and finish reason, where it was asked for.

    With `continuous_usage` each tells the usage so far, with `reasoning` that of reasoning, too;
    `logprobs` is of the choice's own.
    """

    include_usage: bool = False
    continuous_usage: bool = False
    token_ids: bool = False
    reasoning: bool = False
    logprobs: LogprobsShape | None = None


class Frames:
    """The events of one choice, as OpenAI's chunks: see `Events` in `facade.operation`.

    Of a plain stream an event is its text as JSON between `before` and `after`.
    """

    def __init__(
        self,
        identity: AnswerIdentity,
        shape: ChunkShape,
        shown: Shown,
        prompt_token_ids: Sequence[int],
        index: int = 0,
    ) -> None:
        """`index` is the choice's."""
        head = {
            "id": identity.id,
            "object": shape.kind,
            "created": identity.created,
            "model": identity.model,
        }
        self._shape = shape
        self._shown = shown
        self._prompt_tokens = len(prompt_token_ids)
        self._completion_tokens = 0
        self._reasoning_tokens = 0 if shown.reasoning else None
        self._prefix = b"data: " + orjson.dumps(head)[:-1] + b',"choices":['
        self._head = self._prefix + b'{"index":%d,' % index
        self.before = self._head + shape.before
        end = self._end(_NULL, _NULL)
        self.after = shape.after + end
        self._prompt = b""
        if shown.token_ids:
            self._prompt = b',"prompt_token_ids":' + orjson.dumps(prompt_token_ids)
        self.opening = b""
        if shape.opening:
            opening = self._head + shape.opening + end
            self.opening = opening.removesuffix(_END) + self._prompt + _END
            self._prompt = b""

    @property
    def is_plain(self) -> bool:
        """Whether an event needs no more of a delta than its text."""
        shown = self._shown
        return not (shown.logprobs or shown.continuous_usage or shown.token_ids)

    def delta(self, text: str) -> bytes:
        return self.before + orjson.dumps(text) + self.after

    def piece(self, delta: Delta) -> bytes:
        """Empty for a delta that has nothing to show."""
        if self.is_plain:
            return self.delta(delta.text) if delta.text else b""
        self._completion_tokens += len(delta.token_ids)
        return self._choice(delta, _NULL) if delta.text or self._has_more(delta) else b""

    def last(self, delta: Delta) -> bytes:
        """The last delta, with its finish reason."""
        assert delta.finish_reason is not None
        assert delta.usage is not None
        self._completion_tokens = delta.usage.completion_tokens
        reasons = (delta.finish_reason.value, delta.stop_reason)
        return self._choice(delta, b'%b,"stop_reason":%b' % tuple(map(orjson.dumps, reasons)))

    def end(self, usage: Usage) -> bytes:
        """The usage where it was asked for, and the end of the stream."""
        if not self._shown.include_usage:
            return DONE
        return self._prefix + b'],"usage":' + orjson.dumps(usage_json(usage)) + b"}\n\n" + DONE

    def broken(self, error: PdserveError) -> bytes:
        """No [DONE] follows, so that no client takes it for an end."""
        return b"data: " + orjson.dumps(error_json(error)) + b"\n\n"

    def _choice(self, delta: Delta, finish: bytes) -> bytes:
        logprobs = _NULL
        if self._shown.logprobs is not None:
            logprobs = orjson.dumps(self._shown.logprobs(delta.logprobs or ()))
        if self._shown.token_ids:
            finish += self._prompt + b',"token_ids":' + orjson.dumps(delta.token_ids)
            self._prompt = b""
        return self._content(delta) + self._end(logprobs, finish)

    def _content(self, delta: Delta) -> bytes:
        """The event up to what the delta has beside its text."""
        return self.before + orjson.dumps(delta.text) + self._shape.after

    def _has_more(self, delta: Delta) -> bool:
        return bool(delta.logprobs or (self._shown.token_ids and delta.token_ids))

    def _end(self, logprobs: bytes, finish: bytes) -> bytes:
        return b',"logprobs":%b,"finish_reason":%b}]%b' % (logprobs, finish, self._usage()) + _END

    def _usage(self) -> bytes:
        if self._shown.continuous_usage:
            usage = Usage(
                self._prompt_tokens,
                self._completion_tokens,
                reasoning_tokens=self._reasoning_tokens,
            )
            return b',"usage":' + orjson.dumps(_counts_json(usage))
        return b',"usage":null' if self._shown.include_usage else b""


def usage_json(usage: Usage) -> dict[str, Any]:
    return {
        **_counts_json(usage),
        "prompt_tokens_details": {"cached_tokens": usage.cached_tokens},
    }


def _counts_json(usage: Usage) -> dict[str, Any]:
    counts: dict[str, Any] = {
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.completion_tokens,
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
    }
    if usage.reasoning_tokens is not None:
        counts["completion_tokens_details"] = {"reasoning_tokens": usage.reasoning_tokens}
    return counts

"""OpenAI's answers, whole."""

from __future__ import annotations

from typing import Any

from coordinator.facade.sse import AnswerIdentity, usage_json
from pdserve.types import FinishReason, Usage


def chat_completion(
    identity: AnswerIdentity, text: str, reason: FinishReason, usage: Usage
) -> dict[str, Any]:
    message = {"role": "assistant", "content": text}
    return _answer(identity, "chat.completion", {"message": message}, reason, usage)


def completion(
    identity: AnswerIdentity, text: str, reason: FinishReason, usage: Usage
) -> dict[str, Any]:
    return _answer(identity, "text_completion", {"text": text}, reason, usage)


def _answer(
    identity: AnswerIdentity,
    kind: str,
    content: dict[str, Any],
    reason: FinishReason,
    usage: Usage,
) -> dict[str, Any]:
    return {
        "id": identity.id,
        "object": kind,
        "created": identity.created,
        "model": identity.model,
        "choices": [{"index": 0, **content, "logprobs": None, "finish_reason": reason.value}],
        "usage": usage_json(usage),
    }

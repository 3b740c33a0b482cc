"""OpenAI's answers, whole."""

from __future__ import annotations

from typing import Any

from coordinator.facade.intake import Answer
from coordinator.facade.logprobs import LogprobsShape
from coordinator.facade.sse import AnswerIdentity, usage_json


def chat_completion(
    identity: AnswerIdentity, answer: Answer, logprobs: LogprobsShape | None
) -> dict[str, Any]:
    message = {"role": "assistant", "content": answer.text}
    return _answer(identity, "chat.completion", {"message": message}, answer, logprobs)


def completion(
    identity: AnswerIdentity, answer: Answer, logprobs: LogprobsShape | None
) -> dict[str, Any]:
    return _answer(identity, "text_completion", {"text": answer.text}, answer, logprobs)


def _answer(
    identity: AnswerIdentity,
    kind: str,
    content: dict[str, Any],
    answer: Answer,
    logprobs: LogprobsShape | None,
) -> dict[str, Any]:
    choice = {
        "index": 0,
        **content,
        "logprobs": None if logprobs is None else logprobs(answer.logprobs),
        "finish_reason": answer.finish_reason.value,
    }
    return {
        "id": identity.id,
        "object": kind,
        "created": identity.created,
        "model": identity.model,
        "choices": [choice],
        "usage": usage_json(answer.usage),
    }

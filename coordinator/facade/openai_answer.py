"""OpenAI's answers, whole, with what vLLM's own server adds to them."""

from __future__ import annotations

from typing import Any

from coordinator.facade.intake import Answer
from coordinator.facade.logprobs import LogprobsShape, prompt_logprobs
from coordinator.facade.sse import AnswerIdentity, usage_json


def chat_completion(
    identity: AnswerIdentity, answer: Answer, logprobs: LogprobsShape | None
) -> dict[str, Any]:
    message = {"role": "assistant", "content": answer.text}
    choice = _choice({"message": message}, answer, logprobs)
    return {**_answer("chat.completion", identity, choice, answer), **_of_prompt(answer)}


def completion(
    identity: AnswerIdentity, answer: Answer, logprobs: LogprobsShape | None
) -> dict[str, Any]:
    choice = _choice({"text": answer.text}, answer, logprobs)
    return _answer("text_completion", identity, {**choice, **_of_prompt(answer)}, answer)


def _choice(
    content: dict[str, Any], answer: Answer, logprobs: LogprobsShape | None
) -> dict[str, Any]:
    return {
        "index": 0,
        **content,
        "logprobs": None if logprobs is None else logprobs(answer.logprobs),
        "finish_reason": answer.finish_reason.value,
        "stop_reason": answer.stop_reason,
    }


def _of_prompt(answer: Answer) -> dict[str, Any]:
    if not answer.prompt_logprobs:
        return {}
    return {"prompt_logprobs": prompt_logprobs(answer.prompt_logprobs)}


def _answer(
    kind: str, identity: AnswerIdentity, choice: dict[str, Any], answer: Answer
) -> dict[str, Any]:
    return {
        "id": identity.id,
        "object": kind,
        "created": identity.created,
        "model": identity.model,
        "choices": [choice],
        "usage": usage_json(answer.usage),
    }

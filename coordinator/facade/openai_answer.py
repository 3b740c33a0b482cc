"""OpenAI's answers, whole, with what vLLM's own server adds to them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from coordinator.facade.intake import Answer
from coordinator.facade.logprobs import LogprobsShape, prompt_logprobs
from coordinator.facade.sse import AnswerIdentity, usage_json
from pdserve.types import Usage

Shapes = Sequence[LogprobsShape | None]
"""One for each answer."""


def chat_completion(
    identity: AnswerIdentity, answers: Sequence[Answer], shapes: Shapes, usage: Usage
) -> dict[str, Any]:
    choices = [
        _choice(index, {"message": _message(answer)}, answer, shape)
        for index, (answer, shape) in enumerate(zip(answers, shapes, strict=True))
    ]
    return {**_whole("chat.completion", identity, choices, usage), **_of_prompt(answers[0])}


def completion(
    identity: AnswerIdentity, answers: Sequence[Answer], shapes: Shapes, usage: Usage
) -> dict[str, Any]:
    choices = [
        {**_choice(index, {"text": answer.text}, answer, shape), **_of_prompt(answer)}
        for index, (answer, shape) in enumerate(zip(answers, shapes, strict=True))
    ]
    return _whole("text_completion", identity, choices, usage)


def _message(answer: Answer) -> dict[str, Any]:
    if answer.message is None:
        return {"role": "assistant", "content": answer.text}
    message = answer.message
    shown: dict[str, Any] = {"role": "assistant", "content": message.content}
    if message.tool_calls:
        shown["tool_calls"] = [
            {
                "id": call.id,
                "type": "function",
                "function": {"name": call.name, "arguments": call.arguments},
            }
            for call in message.tool_calls
        ]
    return {**shown, "reasoning": message.reasoning}


def _choice(
    index: int, content: dict[str, Any], answer: Answer, shape: LogprobsShape | None
) -> dict[str, Any]:
    return {
        "index": index,
        **content,
        "logprobs": None if shape is None else shape(answer.logprobs),
        "finish_reason": answer.finish_reason.value,
        "stop_reason": answer.stop_reason,
        **({} if answer.prompt_token_ids is None else {"token_ids": answer.token_ids}),
    }


def _of_prompt(answer: Answer) -> dict[str, Any]:
    shown: dict[str, Any] = {}
    if answer.prompt_logprobs:
        shown["prompt_logprobs"] = prompt_logprobs(answer.prompt_logprobs)
    if answer.prompt_token_ids is not None:
        shown["prompt_token_ids"] = answer.prompt_token_ids
    return shown


def _whole(
    kind: str, identity: AnswerIdentity, choices: list[dict[str, Any]], usage: Usage
) -> dict[str, Any]:
    return {
        "id": identity.id,
        "object": kind,
        "created": identity.created,
        "model": identity.model,
        "choices": choices,
        "usage": usage_json(usage),
    }

"""OpenAI's chats and completions."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from starlette.datastructures import Headers
from starlette.responses import Response

from coordinator.facade.http_errors import error_response
from coordinator.facade.intake import Answer
from coordinator.facade.logprobs import ChatLogprobs, CompletionLogprobs, LogprobsShape
from coordinator.facade.openai_answer import Shapes, chat_completion, completion
from coordinator.facade.openai_schema import (
    ChatCompletionRequest,
    CompletionRequest,
    GenerationBody,
    parse,
)
from coordinator.facade.operation import Asked
from coordinator.facade.parsed_sse import ParsedFrames
from coordinator.facade.sse import (
    CHAT_CHUNK,
    COMPLETION_CHUNK,
    AnswerIdentity,
    ChunkShape,
    Frames,
    Shown,
)
from pdserve.errors import PdserveError
from pdserve.types import ChatPrompt, Usage


@dataclass(frozen=True, slots=True)
class Chunked:
    """An Operation whose streams are of chunks; what sets chats and completions apart."""

    name: str
    document: type[GenerationBody]
    id_prefix: str
    chunk: ChunkShape
    logprobs: type[LogprobsShape]
    whole: Callable[[AnswerIdentity, Sequence[Answer], Shapes, Usage], dict[str, Any]]

    def authorization(self, headers: Headers) -> str | None:
        return headers.get("authorization")

    def read(self, data: bytes) -> GenerationBody:
        return parse(self.document, data)

    def answer(self, asked: Asked, answers: Sequence[Answer], usage: Usage) -> dict[str, Any]:
        shapes = [self._shape(asked) for _ in answers]
        return self.whole(asked.identity, answers, shapes, usage)

    def events(self, asked: Asked, prompt_token_ids: Sequence[int], index: int) -> Frames:
        body = asked.body
        shown = Shown(
            body.include_usage,
            body.continuous_usage,
            bool(body.return_token_ids),
            asked.parses_reasoning,
            self._shape(asked),
        )
        kind = Frames if asked.parser is None else ParsedFrames
        return kind(asked.identity, self.chunk, shown, prompt_token_ids, index)

    def refusal(self, error: PdserveError, request_id: str) -> Response:
        return error_response(error, request_id)

    def _shape(self, asked: Asked) -> LogprobsShape | None:
        """How the log probabilities of one choice are shown, where they are."""
        prompt, top = asked.spec.prompt, asked.spec.sampling.logprobs
        hides = isinstance(prompt, ChatPrompt) and not prompt.include_reasoning
        return None if top is None or (hides and asked.parser) else self.logprobs(top)


CHAT = Chunked(
    "chat", ChatCompletionRequest, "chatcmpl-", CHAT_CHUNK, ChatLogprobs, chat_completion
)
COMPLETION = Chunked(
    "completion", CompletionRequest, "cmpl-", COMPLETION_CHUNK, CompletionLogprobs, completion
)

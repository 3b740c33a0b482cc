"""`/tokenize` and `/detokenize`, as vLLM's own server has them: no worker is asked."""

from __future__ import annotations

from typing import Any

import msgspec
from fastapi import FastAPI, Request
from starlette.responses import Response

from coordinator.catalog import ServedModel
from coordinator.facade.body import Body, decode, rejected
from coordinator.facade.http_errors import json_response, request_id_header
from coordinator.facade.http_wire import read_json_body
from coordinator.facade.intake import Intake
from coordinator.facade.openai_chat import Conversation, Tools, messages_of, tools_of
from coordinator.facade.openapi import request_body
from coordinator.facade.validate import validate_prompt
from coordinator.prompts import EVERY_TOKEN, num_chars
from coordinator.token_threads import THREAD_CHARS, THREAD_TOKENS, looked_up
from pdserve.types import ChatPrompt, Prompt, TextPrompt

_NAMES = {"template_kwargs": "chat_template_kwargs"}


class TokenizeRequest(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """Of a prompt, or of a conversation. `model` may be left out where only one is served."""

    model: str | None = None
    prompt: str | None = None
    messages: Conversation | None = None
    tools: Tools | None = None
    add_special_tokens: bool | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    return_token_strs: bool | None = None

    def to_prompt(self) -> Prompt:
        """Raises RejectedError unless it has one."""
        if (self.prompt is None) is (self.messages is None):
            raise rejected("either prompt or messages must be given", "prompt")
        if self.prompt is not None:
            return TextPrompt(self.prompt, add_special_tokens=self.add_special_tokens is not False)
        return ChatPrompt(
            messages_of(self.messages or ()),
            tools_of(self.tools),
            add_generation_prompt=self.add_generation_prompt is not False,
            continue_final_message=bool(self.continue_final_message),
            template_kwargs=self.chat_template_kwargs or {},
            add_special_tokens=bool(self.add_special_tokens),
        )


class DetokenizeRequest(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """`model` may be left out where only one is served."""

    model: str | None = None
    tokens: list[int]


def add_tokenization(app: FastAPI, intake: Intake) -> None:
    """Both count as requests of their key."""

    @app.post("/tokenize", openapi_extra=request_body(TokenizeRequest))
    async def tokenize(request: Request) -> Response:
        body = await read(request, TokenizeRequest)
        model = _model_of(intake, body.model)
        prompt = body.to_prompt()
        validate_prompt(prompt, _NAMES)
        async with intake.turn(is_quick=num_chars(prompt) < THREAD_CHARS):
            ids = await model.encoder.encode_async(prompt, EVERY_TOKEN)
            strings = None
            if body.return_token_strs:
                strings = await looked_up(model.encoder.token_strings, ids)
        told = {
            "count": len(ids),
            "max_model_len": model.context_length,
            "tokens": ids,
            "token_strs": strings,
        }
        return json_response(told, request_id_header(request))

    @app.post("/detokenize", openapi_extra=request_body(DetokenizeRequest))
    async def detokenize(request: Request) -> Response:
        body = await read(request, DetokenizeRequest)
        model = _model_of(intake, body.model)
        encoder, ids = model.encoder, tuple(body.tokens)
        if len(ids) > model.context_length:
            raise rejected(f"tokens may be {model.context_length}, the model's context", "tokens")
        if not all(0 <= token_id < encoder.vocab_size for token_id in ids):
            raise rejected(f"tokens must be ids below {encoder.vocab_size}", "tokens")
        async with intake.turn(is_quick=len(ids) < THREAD_TOKENS):
            text = await looked_up(encoder.decode, ids)
        return json_response({"prompt": text}, request_id_header(request))

    async def read(request: Request, kind: type[Body]) -> Body:
        caller = intake.authenticate(request.headers.get("authorization"))
        await intake.count(caller)
        return decode(
            kind, await read_json_body(request.headers, request.receive, intake.max_body_bytes)
        )


def _model_of(intake: Intake, name: str | None) -> ServedModel:
    if name is not None:
        return intake.model(name)
    if len(intake.models) != 1:
        raise rejected("model must be given: more than one is served", "model")
    return next(iter(intake.models.values()))

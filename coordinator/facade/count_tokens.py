"""Anthropic's `/v1/messages/count_tokens`: how long a prompt would be; no worker is asked."""

from __future__ import annotations

from fastapi import FastAPI, Request
from starlette.responses import Response

from coordinator.facade.http_errors import json_response, request_id_header, request_id_of
from coordinator.facade.http_wire import read_json_body
from coordinator.facade.intake import Intake, told_error
from coordinator.facade.messages import CountTokensRequest, read_count_tokens
from coordinator.facade.messages_answer import Messages
from coordinator.facade.openapi import request_body
from coordinator.facade.validate import validate_prompt
from coordinator.prompts import EVERY_TOKEN, num_chars
from coordinator.token_threads import THREAD_CHARS


def add_count_tokens(app: FastAPI, intake: Intake, messages: Messages) -> None:
    """Counts as a request of its key; errors are those of Messages."""

    @app.post("/v1/messages/count_tokens", openapi_extra=request_body(CountTokensRequest))
    async def count_tokens(request: Request) -> Response:
        try:
            count = await counted(request)
        except Exception as error:
            return messages.refusal(told_error(error), request_id_of(request))
        return json_response({"input_tokens": count}, request_id_header(request))

    async def counted(request: Request) -> int:
        await intake.count(intake.authenticate(messages.authorization(request.headers)))
        data = await read_json_body(request.headers, request.receive, intake.max_body_bytes)
        chat = read_count_tokens(data)
        encoder = intake.model(chat.model).encoder
        (prompt,) = chat.to_prompts()
        validate_prompt(prompt, chat.param_names)
        async with intake.turn(is_quick=num_chars(prompt) < THREAD_CHARS):
            return len(await encoder.encode_async(prompt, EVERY_TOKEN))

"""The HTTP surface: OpenAI's API and what operators ask, on one application."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

from fastapi import FastAPI, Request
from starlette.exceptions import HTTPException
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

import pdserve
from coordinator.facade.count_tokens import add_count_tokens
from coordinator.facade.generation import GenerationResponse
from coordinator.facade.http_errors import (
    error_response,
    json_response,
    request_id_header,
    request_id_of,
)
from coordinator.facade.intake import Intake, told_error
from coordinator.facade.messages import CountTokensRequest
from coordinator.facade.messages_answer import Messages, MessagesError
from coordinator.facade.openai_operations import CHAT, COMPLETION
from coordinator.facade.openapi import add_document, request_body, steering_headers
from coordinator.facade.operation import Operation
from coordinator.facade.ops import add_ops
from coordinator.facade.ports import Dispatch, EndObserver, Ops
from coordinator.facade.responses_answer import Responses
from coordinator.facade.tokenization import (
    DetokenizeRequest,
    TokenizeRequest,
    add_tokenization,
)
from coordinator.gateway.gateway import Gateway
from pdserve.errors import ErrorReason, PdserveError, RejectedError

_NOT_TEXT = frozenset(
    {
        *("audio", "images", "videos", "realtime", "embeddings", "moderations"),
        *("rerank", "score", "classify", "pooling"),
    }
)
"""What OpenAI's or vLLM's servers have for other models."""


class _Application(FastAPI):
    """FastAPI, except for the token path.

    FastAPI's layers each wrap `send`, which adds a fifth or more to the cost of a token; and
    `GenerationResponse` needs none of them, for it tells its own failures.
    """

    def __init__(self, shortcuts: Mapping[str, ASGIApp], **settings: Any) -> None:
        """`shortcuts` answer a POST to their path. They are to be routed as well, for the
        document and for other methods."""
        super().__init__(**settings)
        self._shortcuts = shortcuts

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        app: ASGIApp = super().__call__
        if scope["type"] == "http" and scope["method"] == "POST":
            app = self._shortcuts.get(scope["path"], app)
        await app(scope, receive, send)


def build_app(dispatcher: Dispatch, gateway: Gateway, observer: EndObserver, ops: Ops) -> FastAPI:
    """One application over one dispatcher; it has no life of its own to start or stop."""
    intake = Intake(dispatcher, gateway, observer)
    messages = Messages()
    operations: dict[str, Operation] = {
        "/v1/chat/completions": CHAT,
        "/v1/completions": COMPLETION,
        "/v1/responses": Responses(),
        "/v1/messages": messages,
    }
    generation = {
        path: GenerationResponse(intake, operation) for path, operation in operations.items()
    }
    app = _Application(
        generation,
        title="pdserve",
        version=pdserve.__version__,
        openapi_url=None,
        # The pages of both would load scripts from elsewhere; /openapi.json is enough.
        docs_url=None,
        redoc_url=None,
        redirect_slashes=False,
    )
    for path, response in generation.items():
        _add_generation(app, path, response)
    _add_models(app, intake)
    add_tokenization(app, intake)
    add_count_tokens(app, intake, messages)
    add_ops(app, intake, ops)
    _add_error_handlers(app)
    documents = [operation.document for operation in operations.values()]
    documents += [TokenizeRequest, DetokenizeRequest, CountTokensRequest]
    own_errors = dict.fromkeys(("/v1/messages", "/v1/messages/count_tokens"), MessagesError)
    add_document(app, *documents, errors=own_errors)
    return app


def _task(path: str) -> str:
    """ "audio" of /v1/audio/speech."""
    first, _, rest = path.strip("/").partition("/")
    return rest.partition("/")[0] if first in ("v1", "v2") else first


def _add_generation(app: FastAPI, path: str, response: GenerationResponse) -> None:
    @app.post(
        path,
        summary=path,
        openapi_extra=request_body(response.operation.document) | steering_headers(),
    )
    async def generate() -> Response:
        return response


def _add_models(app: FastAPI, intake: Intake) -> None:
    created = int(time.time())

    def card(name: str) -> dict[str, Any]:
        model = intake.model(name)
        return {
            "id": name,
            "object": "model",
            "created": created,
            "owned_by": "pdserve",
            "parent": model.config.name if model.adapter else None,
            "max_model_len": model.context_length,
        }

    @app.get("/v1/models")
    async def models(request: Request) -> Response:
        intake.authenticate(request.headers.get("authorization"))
        cards = [card(name) for name in intake.names]
        return json_response({"object": "list", "data": cards}, request_id_header(request))

    @app.get("/v1/models/{name:path}")
    async def model(request: Request, name: str) -> Response:
        intake.authenticate(request.headers.get("authorization"))
        return json_response(card(name), request_id_header(request))


def _add_error_handlers(app: FastAPI) -> None:
    @app.exception_handler(PdserveError)
    async def refused(request: Request, error: PdserveError) -> Response:
        return error_response(error, request_id_of(request))

    @app.exception_handler(HTTPException)
    async def unknown(request: Request, error: HTTPException) -> Response:
        words = f"no endpoint {request.method} {request.url.path}"
        if _task(request.url.path) in _NOT_TEXT:
            words += ": this server writes text, and does nothing else with a model"
        else:
            words += "; /openapi.json lists those that there are"
        told = RejectedError(ErrorReason.NOT_FOUND, words)
        return error_response(
            told, request_id_of(request), status=error.status_code, headers=error.headers
        )

    @app.exception_handler(Exception)
    async def broken(request: Request, error: Exception) -> Response:
        return error_response(told_error(error), request_id_of(request))

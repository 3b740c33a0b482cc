"""The HTTP surface: OpenAI's API and what operators ask, on one application."""

from __future__ import annotations

import time
from typing import Any

from fastapi import FastAPI, Request
from starlette.exceptions import HTTPException
from starlette.responses import Response

import pdserve
from coordinator.facade.generation import CHAT, COMPLETION, GenerationResponse
from coordinator.facade.http_errors import (
    error_response,
    json_response,
    request_id_header,
    request_id_of,
)
from coordinator.facade.intake import Intake, told_error
from coordinator.facade.openapi import describe, request_body
from coordinator.facade.ops import add_ops
from coordinator.facade.ports import Dispatch, EndObserver, Ops
from coordinator.gateway.gateway import Gateway
from pdserve.errors import ErrorReason, PdserveError, RejectedError


def build_app(dispatcher: Dispatch, gateway: Gateway, observer: EndObserver, ops: Ops) -> FastAPI:
    """One application over one dispatcher; it has no life of its own to start or stop."""
    intake = Intake(dispatcher, gateway, observer)
    app = FastAPI(
        title="pdserve",
        version=pdserve.__version__,
        # The pages of both would load scripts from elsewhere; /openapi.json is enough.
        docs_url=None,
        redoc_url=None,
        redirect_slashes=False,
    )
    _add_generation(app, intake)
    _add_models(app, intake)
    add_ops(app, intake, ops)
    _add_error_handlers(app)
    describe(app, CHAT.body, COMPLETION.body)
    return app


def _add_generation(app: FastAPI, intake: Intake) -> None:
    @app.post("/v1/chat/completions", openapi_extra=request_body(CHAT.body))
    async def chat_completions() -> Response:
        return GenerationResponse(intake, CHAT)

    @app.post("/v1/completions", openapi_extra=request_body(COMPLETION.body))
    async def completions() -> Response:
        return GenerationResponse(intake, COMPLETION)


def _add_models(app: FastAPI, intake: Intake) -> None:
    created = int(time.time())

    def card(name: str) -> dict[str, Any]:
        return {
            "id": name,
            "object": "model",
            "created": created,
            "owned_by": "pdserve",
            "max_model_len": intake.model(name).context_length,
        }

    @app.get("/v1/models")
    async def models(request: Request) -> Response:
        intake.authenticate(request.headers.get("authorization"))
        cards = [card(name) for name in sorted(intake.models)]
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
        told = RejectedError(
            ErrorReason.NOT_FOUND, f"no endpoint {request.method} {request.url.path}"
        )
        return error_response(
            told, request_id_of(request), status=error.status_code, headers=error.headers
        )

    @app.exception_handler(Exception)
    async def broken(request: Request, error: Exception) -> Response:
        return error_response(told_error(error), request_id_of(request))

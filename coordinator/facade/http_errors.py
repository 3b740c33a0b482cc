"""Failures in OpenAI's shape."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import orjson
from starlette.requests import Request
from starlette.responses import Response

from coordinator.facade.intake import request_id_from
from pdserve.errors import REQUEST_ID, ErrorReason, PdserveError


def request_id_of(request: Request) -> str:
    """The same each time for one request, its own or a fresh one."""
    state = request.state
    if not hasattr(state, "request_id"):
        state.request_id = request_id_from(request.headers.get(REQUEST_ID))
    return str(state.request_id)


def request_id_header(request: Request) -> dict[str, str]:
    return {REQUEST_ID: request_id_of(request)}


def error_json(error: PdserveError) -> dict[str, Any]:
    return {
        "error": {
            "message": error.message,
            "type": error.reason.value.openai_type,
            "param": error.param,
            "code": error.reason.label,
        }
    }


def error_response(
    error: PdserveError,
    request_id: str,
    *,
    status: int | None = None,
    headers: Mapping[str, str] | None = None,
    body: Mapping[str, Any] | None = None,
) -> Response:
    """`status` overrules that of the table, for what HTTP tells apart and the table does not;
    `body` is OpenAI's where none is given."""
    out = {REQUEST_ID: request_id, **(headers or {})}
    if error.reason is ErrorReason.UNAUTHENTICATED:
        out["www-authenticate"] = "Bearer"
    if error.reason.value.retryable and error.retry_after_s is not None:
        out["retry-after"] = str(math.ceil(error.retry_after_s))
    content = error_json(error) if body is None else body
    return json_response(content, out, status=status or error.reason.value.http)


def json_response(
    content: Mapping[str, Any], headers: Mapping[str, str], *, status: int = 200
) -> Response:
    return Response(orjson.dumps(content), status, headers=headers, media_type="application/json")

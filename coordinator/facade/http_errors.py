"""Failures in OpenAI's shape."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import orjson
from starlette.responses import Response

from pdserve.errors import ErrorReason, PdserveError

REQUEST_ID = "x-request-id"


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
) -> Response:
    """`status` overrules that of the table, for what HTTP tells apart and the table does not."""
    out = {REQUEST_ID: request_id, **(headers or {})}
    if error.reason is ErrorReason.UNAUTHENTICATED:
        out["www-authenticate"] = "Bearer"
    if error.reason.value.retryable and error.retry_after_s is not None:
        out["retry-after"] = str(math.ceil(error.retry_after_s))
    return json_response(error_json(error), out, status=status or error.reason.value.http)


def json_response(
    content: Mapping[str, Any], headers: Mapping[str, str], *, status: int = 200
) -> Response:
    return Response(
        orjson.dumps(content), status, headers=headers, media_type="application/json"
    )

"""The document at /openapi.json: bodies are read by hand, and described here all the same."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec
from fastapi import FastAPI, Request
from fastapi.openapi.utils import get_openapi
from starlette.responses import Response

from coordinator.facade.http_errors import json_response, request_id_header
from coordinator.facade.openai_schema import ARM, MODE, SESSION
from coordinator.facade.validate import MAX_LABEL_CHARS
from pdserve.types import Mode

_REFERENCE = "#/components/schemas/{name}"


def steering_headers() -> dict[str, Any]:
    """The part of an operation that says by which headers a request is steered."""
    schemas = {
        MODE: {"type": "string", "enum": [mode.value for mode in Mode]},
        SESSION: {"type": "string", "maxLength": MAX_LABEL_CHARS},
        ARM: {"type": "string", "maxLength": MAX_LABEL_CHARS},
    }
    return {
        "parameters": [
            {"name": name, "in": "header", "required": False, "schema": schema}
            for name, schema in schemas.items()
        ]
    }


def request_body(body: type[msgspec.Struct]) -> dict[str, Any]:
    """The part of an operation that says which body it takes."""
    schema = {"$ref": _REFERENCE.format(name=body.__name__)}
    return {"requestBody": {"required": True, "content": {"application/json": {"schema": schema}}}}


class ErrorDetail(msgspec.Struct):
    """`code` is one of docs/api.md; `param` names the field at fault."""

    message: str
    type: str
    param: str | None
    code: str


class ErrorAnswer(msgspec.Struct):
    """Every answer that is no success."""

    error: ErrorDetail


def add_document(
    app: FastAPI, *bodies: type[msgspec.Struct], errors: Mapping[str, type[msgspec.Struct]]
) -> None:
    """Serves the document of all routes that `app` has by now, with the schemas of `bodies`.

    `errors` are those of paths whose errors have a shape of their own.
    """
    document = get_openapi(title=app.title, version=app.version, routes=app.routes)
    kinds = (*bodies, *errors.values(), ErrorAnswer)
    _, document["components"]["schemas"] = msgspec.json.schema_components(
        kinds, ref_template=_REFERENCE
    )
    for path, operations in document["paths"].items():
        schema = {"$ref": _REFERENCE.format(name=errors.get(path, ErrorAnswer).__name__)}
        failure = {"description": "Error", "content": {"application/json": {"schema": schema}}}
        for operation in operations.values():
            operation["responses"].pop("422", None)  # FastAPI's own shape, which is never used
            operation["responses"]["default"] = failure

    @app.get("/openapi.json", include_in_schema=False)
    async def openapi(request: Request) -> Response:
        return json_response(document, request_id_header(request))

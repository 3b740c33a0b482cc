"""The document at /openapi.json: bodies are read by hand, and described here all the same."""

from __future__ import annotations

from typing import Any

import msgspec
from fastapi import FastAPI, Request
from fastapi.openapi.utils import get_openapi
from starlette.responses import Response

from coordinator.facade.http_errors import json_response, request_id_header

_REFERENCE = "#/components/schemas/{name}"


def request_body(body: type[msgspec.Struct]) -> dict[str, Any]:
    """The part of an operation that says which body it takes."""
    schema = {"$ref": _REFERENCE.format(name=body.__name__)}
    return {"requestBody": {"required": True, "content": {"application/json": {"schema": schema}}}}


def add_document(app: FastAPI, *bodies: type[msgspec.Struct]) -> None:
    """Serves the document of all routes that `app` has by now, with the schemas of `bodies`."""
    document = get_openapi(title=app.title, version=app.version, routes=app.routes)
    _, schemas = msgspec.json.schema_components(bodies, ref_template=_REFERENCE)
    document.setdefault("components", {}).setdefault("schemas", {}).update(schemas)

    @app.get("/openapi.json", include_in_schema=False)
    async def openapi(request: Request) -> Response:
        return json_response(document, request_id_header(request))

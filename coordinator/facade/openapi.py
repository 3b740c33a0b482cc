"""The document at /openapi.json: bodies are read by hand, and described here all the same."""

from __future__ import annotations

from typing import Any

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi
from pydantic import BaseModel
from pydantic.json_schema import models_json_schema

_REFERENCE = "#/components/schemas/{model}"


def request_body(body: type[BaseModel]) -> dict[str, Any]:
    """The part of an operation that says which body it takes."""
    schema = {"$ref": _REFERENCE.format(model=body.__name__)}
    return {"requestBody": {"required": True, "content": {"application/json": {"schema": schema}}}}


def describe(app: FastAPI, *bodies: type[BaseModel]) -> None:
    """Makes the document hold the schemas of `bodies`."""

    def openapi() -> dict[str, Any]:
        if app.openapi_schema is None:
            document = get_openapi(title=app.title, version=app.version, routes=app.routes)
            _, schemas = models_json_schema(
                [(body, "validation") for body in bodies], ref_template=_REFERENCE
            )
            components = document.setdefault("components", {}).setdefault("schemas", {})
            components.update(schemas["$defs"])
            app.openapi_schema = document
        return app.openapi_schema

    app.openapi = openapi  # type: ignore[method-assign]  # as FastAPI's manual has it

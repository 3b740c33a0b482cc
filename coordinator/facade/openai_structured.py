"""What OpenAI's `response_format` and vLLM's `structured_outputs` hold an answer to."""

from __future__ import annotations

from typing import Any, Literal

import msgspec

from pdserve.errors import ErrorReason, RejectedError
from pdserve.structured import (
    Choice,
    Constraint,
    Grammar,
    JsonObject,
    JsonSchema,
    Regex,
    StructuralTag,
)


class _Body(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    pass


class JsonSchemaFormat(_Body, kw_only=True):
    """`strict` is honoured whatever it is: a schema always holds."""

    name: str
    description: str | None = None
    schema: dict[str, Any] | None = None
    strict: bool | None = None


class ResponseFormat(_Body, kw_only=True):
    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchemaFormat | None = None


class StructuredOutputsBody(_Body, kw_only=True):
    """vLLM's own field."""

    json: str | dict[str, Any] | None = None
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None
    json_object: bool | None = None
    structural_tag: str | None = None


def constraint_of(
    response_format: ResponseFormat | None, structured_outputs: StructuredOutputsBody | None
) -> Constraint | None:
    """Raises RejectedError INVALID_ARGUMENT where they name none, or more than one."""
    asked = None if response_format is None else _of_format(response_format)
    if structured_outputs is None:
        return asked
    if asked is not None:
        raise _rejected("structured_outputs", "cannot be used together with response_format")
    return _of_structured(structured_outputs)


def _of_format(body: ResponseFormat) -> Constraint | None:
    if (body.type == "json_schema") is not (body.json_schema is not None):
        raise _rejected("response_format.json_schema", "belongs to the type json_schema")
    if body.json_schema is not None:
        if body.json_schema.schema is None:
            raise _rejected("response_format.json_schema.schema", "is missing")
        return JsonSchema(_json(body.json_schema.schema, "response_format"))
    return JsonObject() if body.type == "json_object" else None


def _of_structured(body: StructuredOutputsBody) -> Constraint:
    given: list[Constraint] = []
    if body.json is not None:
        schema = body.json
        given.append(
            JsonSchema(schema if isinstance(schema, str) else _json(schema, "structured_outputs"))
        )
    if body.json_object:
        given.append(JsonObject())
    if body.regex is not None:
        given.append(Regex(body.regex))
    if body.choice is not None:
        given.append(Choice(tuple(body.choice)))
    if body.grammar is not None:
        given.append(Grammar(body.grammar))
    if body.structural_tag is not None:
        given.append(StructuralTag(body.structural_tag))
    if len(given) != 1:
        raise _rejected("structured_outputs", "must name exactly one constraint")
    return given[0]


def _json(value: dict[str, Any], param: str) -> str:
    try:
        return msgspec.json.encode(value).decode()
    except RecursionError:
        raise _rejected(param, "is nested too deeply") from None


def _rejected(param: str, words: str) -> RejectedError:
    return RejectedError(ErrorReason.INVALID_ARGUMENT, f"{param} {words}", param=param)

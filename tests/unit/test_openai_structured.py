"""What response_format and structured_outputs come to."""

from __future__ import annotations

import json
from typing import Any

import pytest

from coordinator.facade.openai_schema import ChatCompletionRequest, CompletionRequest, parse
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

CHAT = {"model": "tiny", "messages": [{"role": "user", "content": "Hi"}]}
COMPLETION = {"model": "tiny", "prompt": "Hi"}
SCHEMA = {"type": "object", "properties": {"b": {"type": "integer"}, "a": {}}}
TEXT = '{"type":"object","properties":{"b":{"type":"integer"},"a":{}}}'
NAMED = {"name": "n", "description": "d", "schema": SCHEMA, "strict": True}


def constraint(fields: dict[str, Any]) -> Constraint | None:
    """The same for chats and for completions."""
    chat = parse(ChatCompletionRequest, json.dumps({**CHAT, **fields}).encode()).to_sampling()
    other = parse(CompletionRequest, json.dumps({**COMPLETION, **fields}).encode()).to_sampling()
    assert chat.structured_outputs == other.structured_outputs
    return chat.structured_outputs


@pytest.mark.parametrize(
    ("asked", "expected"),
    [
        ({"type": "text"}, None),
        ({"type": "json_object"}, JsonObject()),
        ({"type": "json_schema", "json_schema": NAMED}, JsonSchema(TEXT)),
        ({"type": "json_schema", "json_schema": {"name": "n", "schema": {}}}, JsonSchema("{}")),
    ],
)
def test_response_format(asked: dict[str, Any], expected: Constraint | None) -> None:
    assert constraint({"response_format": asked}) == expected


@pytest.mark.parametrize(
    ("asked", "expected"),
    [
        ({"json": SCHEMA}, JsonSchema(TEXT)),
        ({"json": "{}"}, JsonSchema("{}")),
        ({"regex": "a+"}, Regex("a+")),
        ({"choice": ["yes", "no"]}, Choice(("yes", "no"))),
        ({"grammar": 'root ::= "a"'}, Grammar('root ::= "a"')),
        ({"json_object": True}, JsonObject()),
        ({"structural_tag": "{}"}, StructuralTag("{}")),
        ({"regex": "a", "json_object": False, "choice": None}, Regex("a")),
    ],
)
def test_structured_outputs(asked: dict[str, Any], expected: Constraint) -> None:
    assert constraint({"structured_outputs": asked}) == expected


def test_text_and_a_structure_go_together() -> None:
    fields = {"response_format": {"type": "text"}, "structured_outputs": {"regex": "a"}}
    assert constraint(fields) == Regex("a")


@pytest.mark.parametrize(
    ("param", "fields"),
    [
        ("response_format.type", {"response_format": {"type": "xml"}}),
        ("response_format.type", {"response_format": {}}),
        ("response_format.json_schema", {"response_format": {"type": "json_schema"}}),
        (
            "response_format.json_schema",
            {"response_format": {"type": "json_object", "json_schema": NAMED}},
        ),
        (
            "response_format.json_schema.schema",
            {"response_format": {"type": "json_schema", "json_schema": {"name": "n"}}},
        ),
        (
            "response_format.json_schema.name",
            {"response_format": {"type": "json_schema", "json_schema": {"schema": {}}}},
        ),
        (
            "response_format.json_schema.schema",
            {"response_format": {"type": "json_schema", "json_schema": {"name": "", "schema": []}}},
        ),
        ("structured_outputs", {"structured_outputs": {}}),
        ("structured_outputs", {"structured_outputs": {"regex": "a", "choice": ["a"]}}),
        ("structured_outputs.backend", {"structured_outputs": {"regex": "a", "backend": "x"}}),
        (
            "structured_outputs.whitespace_pattern",
            {"structured_outputs": {"json": {}, "whitespace_pattern": " "}},
        ),
        (
            "structured_outputs",
            {
                "structured_outputs": {"regex": "a"},
                "response_format": {"type": "json_object"},
            },
        ),
    ],
)
def test_what_is_refused(param: str, fields: dict[str, Any]) -> None:
    with pytest.raises(RejectedError) as caught:
        constraint(fields)
    assert caught.value.reason is ErrorReason.INVALID_ARGUMENT
    assert caught.value.param == param

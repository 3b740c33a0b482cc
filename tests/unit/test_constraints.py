"""What a constraint may be, before a worker compiles it."""

from __future__ import annotations

import pytest

from coordinator.facade.constraints import MAX_CHARS, fault_of
from pdserve.structured import (
    Choice,
    Constraint,
    Grammar,
    JsonObject,
    JsonSchema,
    Regex,
    StructuralTag,
)


def nested(depth: int) -> str:
    """An object with arrays in it, so many levels in all."""
    return '{"a":' + "[" * (depth - 1) + "]" * (depth - 1) + "}"


@pytest.mark.parametrize(
    "constraint",
    [
        JsonObject(),
        JsonSchema("{}"),
        JsonSchema(nested(64)),
        JsonSchema('{"a":"' + "x" * (MAX_CHARS - 8) + '"}'),
        StructuralTag(nested(80)),
        Regex(""),
        Regex("(a+)+b"),
        Choice(("a",)),
        Grammar('root ::= "a"'),
    ],
)
def test_good(constraint: Constraint) -> None:
    assert fault_of(constraint) is None


@pytest.mark.parametrize(
    ("constraint", "words"),
    [
        (JsonSchema("[]"), "a JSON object"),
        (JsonSchema("true"), "a JSON object"),
        (JsonSchema("{"), "valid JSON"),
        (JsonSchema(""), "valid JSON"),
        (JsonSchema(nested(65)), "nested at most 64 deep"),
        (JsonSchema(nested(30_000)), "nested at most 64 deep"),
        (JsonSchema('{"a":"' + "x" * (MAX_CHARS - 7) + '"}'), "at most 65536 characters long"),
        (StructuralTag(nested(81)), "nested at most 80 deep"),
        (Regex("a\0"), "free of NUL characters"),
        (Regex("a" * (MAX_CHARS + 1)), "at most 65536 characters long"),
        (Choice(()), "at least one text, none of them empty"),
        (Choice(("a", "")), "at least one text, none of them empty"),
        (Choice(("a" * MAX_CHARS, "b")), "at most 65536 characters long"),
        (Grammar(" \n"), "a grammar that is not empty"),
        (Grammar("a" * (MAX_CHARS + 1)), "at most 65536 characters long"),
    ],
)
def test_bad(constraint: Constraint, words: str) -> None:
    assert fault_of(constraint) == words

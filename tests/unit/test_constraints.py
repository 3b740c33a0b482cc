"""What a constraint may be, before a worker compiles it."""

from __future__ import annotations

import time

import pytest

from coordinator.facade.constraints import MAX_CHARS, fault_of
from coordinator.facade.regex_cost import ambiguity
from pdserve.structured import (
    Choice,
    Constraint,
    Grammar,
    JsonObject,
    JsonSchema,
    Regex,
    StructuralTag,
)

AMBIGUOUS = "free of repetitions of repetitions, which match one text in very many ways"


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


@pytest.mark.parametrize(
    ("pattern", "expected"),
    [
        ("", 1),
        ("a+b*c?", 1),
        ("(a+)+b", 1),
        ("a{1000}", 1),
        (r"(\w{32},){10}", 1),
        ("a{1,9}b{2,3}", 9),
        (r"(\d{1,3}\.){3}\d{1,3}", 9),
        ("(.{1,8}){1,8}", 64),
        ("(?:.{1,8}){1,8}", 64),
        ("(.{1,8})*", 16),
        ("(.{1,8}){3,}", 16),
        ("((.{0,2}){0,3}){0,4}x", 24),
        ("(a|(b{1,4}c)|d){1,5}", 20),
        (r"(\({1,8}\)){1,2}", 16),
        ("[(]{1,8}[)]{1,8}", 8),
        ("(x{,9}){,2}", 18),
        ("(.{1,8", 1),
        ("a[b{1,8}", 1),
        ("(((.{1,8}", 8),
        ("a{1,8})){1,3}", 24),
    ],
)
def test_ambiguity(pattern: str, expected: int) -> None:
    assert ambiguity(pattern) == expected


@pytest.mark.parametrize("part", ["(", "[", "[^", "(?P<", "{", "\\", "a{1,9}", "[\\]", "{1,"])
def test_no_text_takes_long(part: str) -> None:
    began = time.process_time()
    ambiguity(part * (MAX_CHARS // len(part)))
    assert time.process_time() - began < 5

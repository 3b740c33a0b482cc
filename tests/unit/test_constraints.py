"""What a constraint may be, before a worker compiles it."""

from __future__ import annotations

import json
import time

import pytest

from coordinator.facade.constraints import MAX_CHARS, MAX_CODE_CHARS, fault_of
from coordinator.facade.regex_cost import ambiguity, grammar_work, work
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
COSTLY = "simpler: compiling it would take too long"
PROPERTIES = {str(n): {} for n in range(2000)}


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
        JsonSchema(json.dumps({"properties": {str(n): {} for n in range(300)}})),
        JsonSchema(json.dumps({"anyOf": [{"maxLength": 500}] * 1000})),
        JsonSchema(json.dumps({"properties": PROPERTIES, "required": list(PROPERTIES)})),
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
        (Regex("a" * (MAX_CODE_CHARS + 1)), "at most 8192 characters long"),
        (Choice(()), "at least one text, none of them empty"),
        (Choice(("a", "")), "at least one text, none of them empty"),
        (Choice(("a" * MAX_CHARS, "b")), "at most 65536 characters long"),
        (Grammar(" \n"), "a grammar that is not empty"),
        (Grammar("a" * (MAX_CODE_CHARS + 1)), "at most 8192 characters long"),
        # Each of these took 10 s to several minutes of one core to compile.
        (Regex(".?" * 64), COSTLY),
        (Regex("(.a)?" * 100), COSTLY),
        (Regex(".*" * 200), COSTLY),
        (Regex("." * 1000), COSTLY),
        (Regex("[a-z]" * 1600), COSTLY),
        (JsonSchema(json.dumps({"patternProperties": {".?" * 64: {}}})), COSTLY),
        (JsonSchema(json.dumps({"items": {"pattern": ".*" * 200}})), COSTLY),
        (JsonSchema(json.dumps({"properties": {str(n): {} for n in range(1000)}})), COSTLY),
        (JsonSchema(json.dumps({"anyOf": [{"maxLength": n} for n in range(500, 540)]})), COSTLY),
        (Grammar("root ::= " + "[^x]? " * 32), COSTLY),
        (Grammar("\n".join(f"r{n} ::= [a-z]* r{n + 1}" for n in range(300))), COSTLY),
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


@pytest.mark.parametrize(
    ("pattern", "expected"),
    [
        ("", 0),
        ("plain text", 0),
        ("a{9}", 0),
        ("[0-9a-f]{8}", 1),
        (r"\w\d\s\.", 3),
        (".[^a]\\S", 6),
        ("a?", 32),
        ("a*b+c{1,2}d{,2}e{2,}", 40),
        ("a*?b??", 40),
        ("(?:ab)?", 32),
        ("[?*+.]", 1),
        (r"(\d{1,3}\.){3}\d{1,3}", 18),
    ],
)
def test_work(pattern: str, expected: int) -> None:
    assert work(pattern) == expected


def test_work_of_a_grammar_is_that_of_its_classes() -> None:
    assert grammar_work('root ::= "[a]?" rule? "\\"[b]?" [c] | [^d]? # x') == 1 + 2 + 32


@pytest.mark.parametrize("part", ["(", "[", "[^", "(?P<", "{", "\\", "a{1,9}", "[\\]", "{1,"])
def test_no_text_takes_long(part: str) -> None:
    began = time.process_time()
    text = part * (MAX_CHARS // len(part))
    ambiguity(text), work(text), grammar_work(text)
    assert time.process_time() - began < 5

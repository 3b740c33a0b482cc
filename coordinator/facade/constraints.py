"""What structured outputs may ask for: checked before a worker compiles it. Pure."""

from __future__ import annotations

import json

from coordinator.facade.regex_cost import (
    MAX_AMBIGUITY,
    MAX_WORK,
    ambiguity,
    grammar_work,
    work,
)
from pdserve.structured import (
    Choice,
    Constraint,
    Grammar,
    JsonObject,
    JsonSchema,
    Regex,
    StructuralTag,
)

_AMBIGUOUS = "free of repetitions of repetitions, which match one text in very many ways"
_COSTLY = "simpler: compiling it would take too long"
MAX_CHARS = 64 * 1024
MAX_CODE_CHARS = 8 * 1024
"""Of an expression or a grammar, where each character may be a step of the automaton."""

MAX_SCHEMA_WORK = 8 * MAX_WORK
"""Of all that a schema asks for, each part of which is compiled by itself."""

MAX_NESTING = 64
"""As in vLLM: the work of compiling grows steeply with it. A structural tag may wrap that."""


def fault_of(constraint: Constraint) -> str | None:
    """What is wrong with it, as "must be ..." goes on; None if nothing is."""
    match constraint:
        case JsonObject():
            return None
        case JsonSchema(text):
            return _length(text) or _json(text, MAX_NESTING)
        case StructuralTag(text):
            return _length(text) or _json(text, MAX_NESTING + 16)
        case Choice(texts):
            if not texts or not all(texts):
                return "at least one text, none of them empty"
            return _length(*texts)
        case Regex(text):
            return _regex(text)
        case Grammar(text):
            if not text.strip():
                return "a grammar that is not empty"
            return _code_length(text) or (_COSTLY if grammar_work(text) > MAX_WORK else None)


def _length(*texts: str) -> str | None:
    return None if sum(map(len, texts)) <= MAX_CHARS else f"at most {MAX_CHARS} characters long"


def _code_length(text: str) -> str | None:
    too_long = f"at most {MAX_CODE_CHARS} characters long"
    return None if len(text) <= MAX_CODE_CHARS else too_long


def _json(text: str, max_nesting: int) -> str | None:
    deep = f"nested at most {max_nesting} deep"
    try:
        value = json.loads(text)
    except RecursionError:
        return deep
    except ValueError:
        return "valid JSON"
    if not isinstance(value, dict):
        return "a JSON object"
    level: list[object] = [value]
    total = 0
    lengths: set[int] = set()
    for _ in range(max_nesting):
        for schema in level:
            if not isinstance(schema, dict):
                continue
            expressions = _expressions(schema)
            if fault := next(filter(None, map(_regex, expressions)), None):
                return fault
            total += sum(map(work, expressions)) + _optional_work(schema)
            lengths |= _lengths(schema)
        # A string of bounded length is one expression, `[^"]{0,128}` for example, however many
        # properties have it; from 128 on they cost the same.
        if total + sum(2 * min(length, 128) for length in lengths) > MAX_SCHEMA_WORK:
            return _COSTLY
        level = [inner for outer in level for inner in _inside(outer)]
        if not level:
            return None
    return deep


def _regex(text: str) -> str | None:
    if "\0" in text:
        return "free of NUL characters"
    if too_long := _code_length(text):
        return too_long
    if ambiguity(text) > MAX_AMBIGUITY:
        return _AMBIGUOUS
    return _COSTLY if work(text) > MAX_WORK else None


def _expressions(schema: dict[str, object]) -> list[str]:
    """The regular expressions of one object of a schema."""
    named = schema.get("patternProperties")
    texts = [schema.get("pattern"), *(named if isinstance(named, dict) else ())]
    return [text for text in texts if isinstance(text, str)]


def _optional_work(schema: dict[str, object]) -> int:
    """Of properties that may be missing: after each, all later ones may come. 1000 took 3 to 16 s
    of one core."""
    properties, required = schema.get("properties"), schema.get("required")
    if not isinstance(properties, dict):
        return 0
    optional = len(properties) - (len(required) if isinstance(required, list) else 0)
    return max(optional, 0) ** 2 // 64


def _lengths(schema: dict[str, object]) -> set[int]:
    bounds = (schema.get("minLength"), schema.get("maxLength"))
    return {bound for bound in bounds if isinstance(bound, int) and bound > 0}


def _inside(value: object) -> list[object]:
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return [one for one in inner if isinstance(one, dict | list)]

"""What structured outputs may ask for: checked before a worker compiles it. Pure."""

from __future__ import annotations

import json

from coordinator.facade.regex_cost import MAX_AMBIGUITY, ambiguity
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
MAX_CHARS = 64 * 1024
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
            return _length(text) or _regex(text)
        case Grammar(text):
            return _length(text) or (None if text.strip() else "a grammar that is not empty")


def _length(*texts: str) -> str | None:
    return None if sum(map(len, texts)) <= MAX_CHARS else f"at most {MAX_CHARS} characters long"


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
    for _ in range(max_nesting):
        if fault := next(filter(None, map(_patterns, level)), None):
            return fault
        level = [inner for outer in level for inner in _inside(outer)]
        if not level:
            return None
    return deep


def _regex(text: str) -> str | None:
    if "\0" in text:
        return "free of NUL characters"
    return None if ambiguity(text) <= MAX_AMBIGUITY else _AMBIGUOUS


def _patterns(value: object) -> str | None:
    """The fault of a regular expression in one object of a schema."""
    if not isinstance(value, dict):
        return None
    named = value.get("patternProperties")
    texts = [value.get("pattern"), *(named if isinstance(named, dict) else ())]
    return next(filter(None, (_regex(text) for text in texts if isinstance(text, str))), None)


def _inside(value: object) -> list[object]:
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return [one for one in inner if isinstance(one, dict | list)]

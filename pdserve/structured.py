"""What an answer can be held to: the constraints of structured outputs, one of them a request.

See `StructuredOutputs` in generation.proto.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class JsonSchema:
    """`schema` is a JSON object in text."""

    schema: str


@dataclass(frozen=True, slots=True)
class JsonObject:
    """Any JSON object."""


@dataclass(frozen=True, slots=True)
class Regex:
    pattern: str


@dataclass(frozen=True, slots=True)
class Choice:
    texts: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Grammar:
    """In EBNF or Lark."""

    text: str


@dataclass(frozen=True, slots=True)
class StructuralTag:
    """JSON in text, in the engine's own terms."""

    tag: str


Constraint = JsonSchema | JsonObject | Regex | Choice | Grammar | StructuralTag

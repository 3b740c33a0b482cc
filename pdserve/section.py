"""What sections of the configuration are made of, and what is said of a fault in one."""

from __future__ import annotations

import reprlib
from collections.abc import Mapping, Sequence
from typing import Annotated, Any

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError


def _printable(name: str) -> str:
    """Names get into headers, logs, metrics and databases, not all of which take any character."""
    if not name.isprintable():
        raise ValueError("must be printable, in one line")
    return name


Name = Annotated[str, Field(min_length=1), AfterValidator(_printable)]


class Section(BaseModel):
    """Part of a frozen configuration; a field that it does not know is an error."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)


_WHOLE = "must be a whole number, not {given}"
_NUMBER = "must be a number, not {given}"
_BOOLEAN = "must be true or false, not {given}"
_TEXT = "must be text, in quotes, not {given}"
_LIST = "must be a list, not {given}"
_FIELDS = "must have fields, `name: value`, and not be {given}"
_WORDS: Mapping[str, str] = {
    "missing": "must be given",
    "extra_forbidden": "no such field here; look at its spelling, and how far it is indented",
    "int_type": _WHOLE,
    "int_parsing": _WHOLE,
    "int_from_float": _WHOLE,
    "float_type": _NUMBER,
    "float_parsing": _NUMBER,
    "finite_number": "must be a finite number, not {given}",
    "bool_type": _BOOLEAN,
    "bool_parsing": _BOOLEAN,
    "string_type": _TEXT,
    "string_too_short": "must have a length of {min_length} or more",
    "string_pattern_mismatch": "must be like {pattern}",
    "path_type": _TEXT,
    "list_type": _LIST,
    "tuple_type": _LIST,
    "too_short": "must have a length of {min_length} or more, not {actual_length}",
    "too_long": "must have a length of {max_length} or less, not {actual_length}",
    "dict_type": _FIELDS,
    "model_type": _FIELDS,
    "model_attributes_type": _FIELDS,
    "literal_error": "must be {expected}, not {given}",
    "enum": "must be {expected}, not {given}",
    "greater_than": "must be more than {gt}, not {given}",
    "greater_than_equal": "must be {ge} or more, not {given}",
    "less_than": "must be less than {lt}, not {given}",
    "less_than_equal": "must be {le} or less, not {given}",
    "value_error": "{error}",
}
"""What is said instead of pydantic's words, which are a programmer's, by its type of the error:
https://docs.pydantic.dev/latest/errors/validation_errors/"""


def first_of(error: ValidationError) -> tuple[str, str]:
    """The field that is wrong first, dotted and empty where it is the whole, and what it must be
    instead, for the one who wrote it."""
    first = error.errors(include_url=False)[0]
    field = ".".join(str(part) for part in first["loc"])
    words = _WORDS.get(first["type"])
    if words is None:  # of a kind that no field here has: another library's
        words = first["msg"]
    else:
        words = words.format(given=_given(first["input"]), **first.get("ctx", {}))
    return field, " ".join(words.split())


def in_words(error: ValidationError) -> str:
    """`first_of` in one line, "field: what it must be"."""
    return ": ".join(part for part in first_of(error) if part)


def _given(value: Any) -> str:
    match value:
        case None:
            return "empty"
        case Mapping():
            return "a section"
        case str():
            return reprlib.repr(value)
        case Sequence():
            return "a list"
        case bool():
            return str(value).lower()
    return reprlib.repr(value)

"""What sections of the configuration are made of."""

from __future__ import annotations

from typing import Annotated

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


def first_of(error: ValidationError) -> tuple[str, str]:
    """The field that is wrong first, dotted and empty where it is the whole, and why."""
    first = error.errors(include_url=False, include_input=False, include_context=False)[0]
    field = ".".join(str(part) for part in first["loc"])
    return field, first["msg"].removeprefix("Value error, ")

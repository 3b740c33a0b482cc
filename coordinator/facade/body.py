"""Bodies in JSON, read strictly: the first fault is told, with the name of its field."""

from __future__ import annotations

import gc
import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TypeVar

import msgspec

from pdserve.errors import ErrorReason, RejectedError

_MAX_TOLD_CHARS = 300
_PLACE = re.compile(r"(?P<fault>.*?)(?: - at (?:`key` in )?`\$(?P<path>[^`]*)`)?", re.DOTALL)
_NAMED = re.compile(r".* field `(?P<name>.*)`", re.DOTALL)

Body = TypeVar("Body", bound=msgspec.Struct)


def decode(kind: type[Body], data: bytes) -> Body:
    """Raises RejectedError INVALID_ARGUMENT that names the first field at fault."""
    try:
        with _uncollected():
            return msgspec.json.decode(data, type=kind)
    except msgspec.ValidationError as error:
        raise _field_at_fault(str(error)) from None
    except msgspec.DecodeError as error:
        raise rejected(f"the body is not valid JSON: {error}") from None
    except RecursionError:
        raise rejected("the body is nested too deeply") from None


@contextmanager
def _uncollected() -> Iterator[None]:
    """Nothing that a body holds is garbage, but with a million lists in it the collector would
    look through them again and again: six times the work."""
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def rejected(message: str, param: str | None = None) -> RejectedError:
    return RejectedError(ErrorReason.INVALID_ARGUMENT, message[:_MAX_TOLD_CHARS], param=param)


def _field_at_fault(told: str) -> RejectedError:
    """From msgspec's words, such as "Expected `int`, got `str` - at `$.stop_token_ids[0]`"."""
    place = _PLACE.fullmatch(told)
    fault, path = (told, "") if place is None else place.group("fault", "path")
    parts = [re.sub(r"\[(.*?)\]", r".\1", path or "").lstrip(".")]
    if named := _NAMED.fullmatch(fault):  # unknown or missing: the path is that of its parent
        parts.append(named["name"])
    param = ".".join(part for part in parts if part)[:_MAX_TOLD_CHARS]
    return rejected(f"{param}: {fault}" if param else fault, param or None)

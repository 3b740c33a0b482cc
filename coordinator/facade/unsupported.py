"""OpenAI fields that are known here and cannot be honoured yet: refused, never ignored."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from pdserve.errors import ErrorReason, RejectedError


def _is_falsy(value: Any) -> bool:
    return not value


def _is_one(value: Any) -> bool:
    return value is None or value == 1


# Field, and whether a value asks for nothing that is missing here.
_NEUTRAL: tuple[tuple[str, Callable[[Any], bool]], ...] = (
    ("best_of", _is_one),
    ("suffix", _is_falsy),
    ("chat_template", _is_falsy),
)


def refuse_unsupported(body: object) -> None:
    """Raises RejectedError INVALID_ARGUMENT for the first field that cannot be honoured."""
    for field, is_neutral in _NEUTRAL:
        if not is_neutral(getattr(body, field, None)):
            raise _rejected(field)


def _rejected(param: str) -> RejectedError:
    return RejectedError(
        ErrorReason.INVALID_ARGUMENT, f"{param}: this value is not supported yet", param=param
    )

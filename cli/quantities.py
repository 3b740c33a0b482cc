"""PURE: what people write for rates and durations."""

from __future__ import annotations

import math
import re

from cli.failure import CliError

_SECONDS = {"ms": 1e-3, "s": 1.0, "min": 60.0, "h": 3600.0}
_UNITS = "|".join(_SECONDS)
_RATE = re.compile(rf"([0-9.]+)\s*/\s*({_UNITS})")
_DURATION = re.compile(rf"([0-9.]+)\s*({_UNITS})")


def rate(text: str) -> float:
    """Of `50/s`, `1000/min` or `3/h`, a second. Raises CliError."""
    number, unit = _parsed(_RATE, text, "a rate, like 50/s or 1000/min")
    return number / _SECONDS[unit]


def duration(text: str) -> float:
    """Of `50ms`, `2s` or `10min`, in seconds. Raises CliError."""
    number, unit = _parsed(_DURATION, text, "a duration, like 50ms or 2s")
    return number * _SECONDS[unit]


def _parsed(pattern: re.Pattern[str], text: str, wanted: str) -> tuple[float, str]:
    if (found := pattern.fullmatch(text.strip())) is not None:
        try:
            number = float(found[1])
        except ValueError:
            number = 0.0
        if 0 < number < math.inf:
            return number, found[2]
    raise CliError(f"{text!r} is not {wanted}")

"""The highest rate at which something still holds, by bisection. Pure."""

from __future__ import annotations

from collections.abc import Callable
from math import sqrt

STEP = 1.25
PRECISION = 1.03
"""Rates are looked for by steps of the one factor, and told apart by the other."""
LEAST = 1 / 16
"""Of the rate at which the search begins: below, there is said to be none."""


def highest(attains: Callable[[float], bool], start: float) -> float:
    """The highest rate that is attained, and so is all below it; 0 where it is below LEAST."""
    low = high = start
    if attains(start):
        while attains(high := high * STEP):
            low = high
    else:
        while not attains(low := low / STEP):
            high = low
            if low < start * LEAST:
                return 0.0
    while high > low * PRECISION:
        middle = sqrt(low * high)
        if attains(middle):
            low = middle
        else:
            high = middle
    return low

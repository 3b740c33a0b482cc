"""The highest rate at which something still holds, by bisection. Pure."""

from __future__ import annotations

from collections.abc import Callable, Generator
from math import sqrt

STEP = 1.25
PRECISION = 1.03
"""Rates are looked for by steps of the one factor, and told apart by the other."""
LEAST = 1 / 16
"""Of the rate at which the search begins: below, there is said to be none."""


def search(start: float) -> Generator[float, bool, float]:
    """Asks of one rate after another whether it is attained; returns the highest that is, as all
    below it are taken to be, or 0 where it is below LEAST."""
    low = high = start
    if (yield start):
        while (yield (high := high * STEP)):
            low = high
    else:
        while not (yield (low := low / STEP)):
            high = low
            if low < start * LEAST:
                return 0.0
    while high > low * PRECISION:
        middle = sqrt(low * high)
        if (yield middle):
            low = middle
        else:
            high = middle
    return low


def highest(attains: Callable[[float], bool], start: float) -> float:
    """The same, of a test that is at hand."""
    asking = search(start)
    rate = next(asking)
    while True:
        try:
            rate = asking.send(attains(rate))
        except StopIteration as found:
            return float(found.value)

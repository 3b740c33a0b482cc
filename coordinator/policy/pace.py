"""How fast something goes on, as it was seen: exponentially weighted, for predictions. Pure."""

from __future__ import annotations

import math

MEMORY_S = 20.0
"""Seconds that count after which what was measured counts for a third."""
EXPECTED_S = 1.0
"""Seconds that an expected rate counts for beside what was measured."""


class Pace:
    """What was done, over the seconds of those at it. Only time in which some are at it counts."""

    def __init__(self, done: float = 0.0, memory_s: float = MEMORY_S) -> None:
        """`done` is taken to have been done before the first second."""
        self._done = done
        self._memory_s = memory_s
        self._seconds = 0.0
        self._now = 0.0

    def go_on(self, now: float, at_it: float) -> None:
        """Time has passed, all of it with so many at it."""
        if at_it and now > self._now:
            kept = math.exp((self._now - now) / self._memory_s)
            self._done *= kept
            self._seconds = self._seconds * kept + at_it * self._memory_s * (1 - kept)
        self._now = now

    def add(self, done: float) -> None:
        self._done += done

    @property
    def rate(self) -> float:
        """What one of them does in a second; 0 while none was at it."""
        return self._done / self._seconds if self._seconds else 0.0

    def seconds(self, amount: float, expected: float = 0.0) -> float:
        """How long so much takes one of them; `expected` is the rate that was to be expected, 0
        where none is known. 0 while nothing was done and nothing is expected."""
        counts_s = EXPECTED_S if expected else 0.0
        done = self._done + counts_s * expected
        return amount * (self._seconds + counts_s) / done if done else 0.0

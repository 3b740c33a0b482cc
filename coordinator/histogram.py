"""Latencies in buckets that are narrow enough for quantiles. Pure."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from itertools import accumulate, takewhile

ITL_BUCKETS = (0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.2, 0.4, 0.8, 1.6, 3.2)
"""Seconds between two deltas of one answer, as metrics tell them."""

_GROWTH = 1.1
_LONGEST_S = 600.0

_steps = accumulate(iter(lambda: _GROWTH, 0.0), float.__mul__, initial=0.0005)
FINE_BUCKETS = tuple(sorted({*takewhile(lambda bound: bound < _LONGEST_S, _steps), *ITL_BUCKETS}))
"""Upper bounds in seconds, each within a tenth of the next, those of ITL_BUCKETS among them."""


def empty() -> list[int]:
    """No observation in any of the fine buckets, nor beyond the last."""
    return [0] * (len(FINE_BUCKETS) + 1)


def add(counts: list[int], seconds: float) -> None:
    counts[bisect_left(FINE_BUCKETS, seconds)] += 1


def quantile(counts: Sequence[int], share: float) -> float | None:
    """In seconds, as if each bucket's observations were spread evenly over it; of those beyond
    the last, its bound. None without an observation."""
    if not any(counts):
        return None
    rank = share * sum(counts)
    below = 0
    for place, count in enumerate(counts[:-1]):
        if count and below + count >= rank:
            low = FINE_BUCKETS[place - 1] if place else 0.0
            return low + (FINE_BUCKETS[place] - low) * (rank - below) / count
        below += count
    return FINE_BUCKETS[-1]

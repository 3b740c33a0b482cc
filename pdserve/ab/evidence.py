"""Always-valid inference on a difference between two arms, from one difference a block. Pure.

Were there no difference, the order of the two slots of a block, which is drawn at random, would
decide the sign of the block's difference d, and nothing else would: given all blocks before it and
its own size, d is as probably negative as positive. So, for each rate r, the product over the
blocks of

    exp(r d) / cosh(r d)

is a martingale that begins at 1, whatever the distribution and however the queue connects one slot
to the next, and by Ville's inequality it ever reaches 1/p with probability p at most. (De la Peña,
"A general class of exponential inequalities for martingales and ratios", Annals of Probability
27(1), 1999, for symmetric variables; Ramdas, Ruf, Larsson and Koolen, "Admissible anytime-valid
sequential inference must rely on nonnegative martingales", arXiv:2009.03167; Vovk and Wang,
"Nonparametric e-tests of symmetry", 2024.) A mean of such products over several rates is one, too.

A difference of x is refuted in the same way by d - x. The values that are not refuted are an
interval, for the products fall in x where r > 0 and rise where r < 0. All of this holds at every
moment at once, for any number of blocks: a confidence sequence (Howard, Ramdas, McAuliffe and
Sekhon, "Time-uniform, nonparametric, nonasymptotic confidence sequences", Annals of Statistics
49(2), 2021).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import log

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[np.float64]

RATES = 4.0 ** np.arange(-1, 5)
"""The best one for blocks of mean m and variance v is m/v; to take the mean over a few powers of
four costs a factor of six at most."""

_STEPS = 50
"""Halvings of a search: far below what is shown."""


@dataclass(frozen=True, slots=True)
class Interval:
    """All differences that are not refuted; `middle` is the one that least speaks against."""

    low: float
    middle: float
    high: float

    @property
    def excludes_none(self) -> bool:
        """Whether no difference at all is refuted."""
        return self.low > 0 or self.high < 0


def interval(differences: Sequence[float] | Array, alpha: float) -> Interval:
    """Of differences from -1 to 1, one a block, in any number. It misses the true difference at
    any moment ever with probability `alpha` at most."""
    values = np.asarray(differences, dtype=np.float64)
    if not values.size:
        return Interval(-1.0, 0.0, 1.0)
    bar = log(2 / alpha)  # either side has half of it

    def above(difference: float) -> float:
        return evidence(values - difference)

    def below(difference: float) -> float:
        return evidence(difference - values)

    return Interval(
        low=_last(lambda value: above(value) >= bar),
        middle=_last(lambda value: above(value) >= below(value)),
        high=-_last(lambda value: below(-value) >= bar),
    )


def evidence(differences: Array) -> float:
    """Logarithm of the martingale against "no difference", for a positive one."""
    return float(_mean(_logs(differences).sum(axis=0)))


def evidence_after_each(differences: Array) -> Array:
    """As `evidence`, after each block; blocks are the last axis."""
    return _mean(_logs(differences).cumsum(axis=-2))


def times_as_many(differences: Sequence[float] | Array, alpha: float) -> float:
    """How many times as many blocks like these will exclude no difference; infinite where
    they point nowhere."""
    values = np.asarray(differences, dtype=np.float64)
    best = np.inf
    for side in (values, -values):
        logs = _logs(side).sum(axis=0)
        if logs.max() <= 0:
            continue
        low, high = 0.0, (log(2 / alpha) + log(len(RATES))) / float(logs.max())
        for _ in range(_STEPS):
            between = (low + high) / 2
            enough = _mean(between * logs) >= log(2 / alpha)
            low, high = (low, between) if enough else (between, high)
        best = min(best, high)
    return float(best)


def _logs(differences: Array) -> Array:
    """Of each factor, by λ on a new last axis."""
    bets = differences[..., None] * RATES
    size = np.abs(bets)
    logs: Array = bets - (size + np.log1p(np.exp(-2 * size)) - log(2))
    return logs


def _mean(logs: Array) -> Array:
    """Logarithm of the mean over the rates, which are the last axis."""
    most = logs.max(axis=-1, keepdims=True)
    mean: Array = most[..., 0] + np.log(np.exp(logs - most).mean(axis=-1))
    return mean


def _last(holds: Callable[[float], bool]) -> float:
    """Where in -1 to 1 a condition ends that holds below and not above."""
    low, high = -1.0, 1.0
    for _ in range(_STEPS):
        between = (low + high) / 2
        low, high = (between, high) if holds(between) else (low, between)
    return low

"""Statistics of samples within a run, and of one figure over repeated runs. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

import numpy as np
import numpy.typing as npt


@dataclass(frozen=True, slots=True)
class Quantiles:
    """Median and 99th percentile, in the unit of the samples."""

    p50: float
    p99: float

    def __sub__(self, other: Quantiles) -> Quantiles:
        return Quantiles(self.p50 - other.p50, self.p99 - other.p99)


def quantiles(samples: Sequence[float]) -> Quantiles:
    """Needs at least one sample."""
    p50, p99 = np.percentile(np.asarray(samples), (50, 99))
    return Quantiles(float(p50), float(p99))


@dataclass(frozen=True, slots=True)
class Percentiles:
    """In the unit of the samples."""

    p50: float
    p90: float
    p99: float


def percentiles(samples: npt.ArrayLike) -> Percentiles | None:
    """None of nothing."""
    values = np.asarray(samples, dtype=np.float64)
    if not values.size:
        return None
    return Percentiles(*map(float, np.percentile(values, (50, 90, 99))))


def deviations(gaps: Sequence[float], pace: float) -> Quantiles:
    """How far gaps are from the pace, either way; all in one unit."""
    return quantiles([abs(gap - pace) for gap in gaps])


@dataclass(frozen=True, slots=True)
class Repeated:
    """One figure over all runs of a scenario."""

    median: float
    lowest: float
    highest: float


def repeated(values: Sequence[float]) -> Repeated:
    """Needs at least one value."""
    return Repeated(median(values), min(values), max(values))

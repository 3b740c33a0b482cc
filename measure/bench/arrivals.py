"""When requests are due, and how long they are. Pure."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from random import Random

from measure.simulation.traces import Arrival, faster

BURSTINESS = 4.0
"""Squared coefficient of variation of the times between bursty arrivals; 1 is Poisson."""

Lengths = tuple[int, int]
"""From and to, in tokens, all equally likely."""

Arrivals = Callable[[float, float, int], list[Arrival]]
"""(requests a second, seconds, seed) to arrivals within these seconds, in order."""


def gamma(burstiness: float, prompt: Lengths, answer: Lengths) -> Arrivals:
    """Times between arrivals are of a gamma distribution, exponential (Poisson) where
    `burstiness`, their squared coefficient of variation, is 1."""

    def arrivals(rate: float, seconds: float, seed: int) -> list[Arrival]:
        random = Random(seed)

        def gap_s() -> float:
            return random.gammavariate(1 / burstiness, burstiness / rate)

        found: list[Arrival] = []
        at_s = gap_s()
        while at_s < seconds:
            found.append(Arrival(at_s, random.randint(*prompt), random.randint(*answer)))
            at_s += gap_s()
        return found

    return arrivals


def replayed(trace: Sequence[Arrival]) -> Arrivals:
    """A trace, faster or slower, from its beginning; at most all of it. At least two arrivals,
    which do not all come at once."""
    own_rate = len(trace) / trace[-1].at_s

    def arrivals(rate: float, seconds: float, _: int) -> list[Arrival]:
        return [it for it in faster(list(trace), rate / own_rate) if it.at_s < seconds]

    return arrivals

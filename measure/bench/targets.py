"""Several targets under the same load, in alternation, and the rate at which each is saturated."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field
from random import SystemRandom
from typing import Protocol, TypeVar

from measure.bench.arrivals import Arrivals
from measure.bench.document import Run, Saturation
from measure.bench.drive import Target, drive
from measure.bench.judge import judge
from measure.highest import search
from measure.plan.slo import Slo
from measure.processes import BenchError

T = TypeVar("T")


class Watch(Protocol):
    """Is told how far it is."""

    def begins(self, words: str, requests: int) -> None:
        """A run of so many requests."""

    def answered(self) -> None:
        """One of them, well or not."""


@dataclass(frozen=True, slots=True)
class Load:
    """Each run lasts `seconds`, the first `warm_up_s` of which count for nothing. Arrivals are
    those of `seed` in the first round, of the next seed in the next."""

    arrivals: Arrivals
    rate: float
    seconds: float
    warm_up_s: float
    slo: Slo
    seed: int = 0


@dataclass(slots=True)
class Measured:
    """Of one target: at the asked rate, in the search for its saturation, and what that is."""

    target: Target
    runs: list[Run] = field(default_factory=list)
    search: list[Run] = field(default_factory=list)
    saturation: Saturation | None = None


def measure(
    targets: Sequence[Target], load: Load, rounds: int, *, saturate: bool, watch: Watch
) -> list[Measured]:
    """Raises BenchError where nothing is due after the warm-up."""
    found = [Measured(target) for target in targets]
    for number in range(rounds):
        for one in _turns(found, number):
            words = f"{one.target.name}: round {number + 1} of {rounds}, {load.rate:.3g}/s"
            one.runs.append(_run(one.target, load, load.rate, number, watch, words))
    going = [_Search(one, load) for one in found] if saturate else []
    number = 0
    while going:
        for it in _turns(going, number):
            it.step(watch)
        going = [it for it in going if it.one.saturation is None]
        number += 1
    return found


def _turns(items: Sequence[T], number: int) -> list[T]:
    """In order, but whoever comes first in one round comes later in the next."""
    first = number % len(items)
    return [*items[first:], *items[:first]]


class _Search:
    """For the rate at which one target is saturated, a run at a time."""

    def __init__(self, one: Measured, load: Load) -> None:
        self.one = one
        self._load = load
        self._asking = search(load.rate)
        self._rate = next(self._asking)
        self._tried: dict[float, Run] = {}

    def step(self, watch: Watch) -> None:
        target, number = self.one.target, len(self._tried)
        words = f"{target.name}: is it saturated at {self._rate:.3g}/s?"
        run = _run(target, self._load, self._rate, number, watch, words)
        self.one.search.append(run)
        self._tried[self._rate] = run
        try:
            self._rate = self._asking.send(run.broken is None and not run.client_limited)
        except StopIteration as found:
            self.one.saturation = self._saturation(found.value)

    def _saturation(self, rate: float) -> Saturation:
        beyond = self._tried[min(it for it in self._tried if it > rate)]
        return Saturation(rate, beyond.broken, beyond.client_limited)


def _run(target: Target, load: Load, rate: float, number: int, watch: Watch, words: str) -> Run:
    coming = load.arrivals(rate, load.seconds, load.seed + number)
    if not any(it.at_s >= load.warm_up_s for it in coming):
        raise BenchError(f"at {rate:.3g}/s nothing is due between warm-up and end: make it longer")
    watch.begins(words, len(coming))
    # Words that nobody was asked before: targets may share a fleet, and its prefix caches.
    words_seed = SystemRandom().getrandbits(64)
    answers = asyncio.run(drive(target, coming, words_seed, watch.answered))
    due_s = [it.at_s for it in coming]
    return judge(due_s, answers, load.seconds, load.warm_up_s, load.slo)

"""Several targets under the same load, in alternation, and the rate at which each is saturated."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from measure.bench.arrivals import Arrivals
from measure.bench.document import Run, Saturation
from measure.bench.drive import Target, drive
from measure.bench.judge import judge
from measure.highest import highest
from measure.plan.slo import Slo
from measure.processes import BenchError

Report = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Load:
    """Each run lasts `seconds`, the first `warm_up_s` of which count for nothing."""

    arrivals: Arrivals
    rate: float
    seconds: float
    warm_up_s: float
    slo: Slo


@dataclass(slots=True)
class Measured:
    """Of one target: at the asked rate, in the search for its saturation, and what that is."""

    target: Target
    runs: list[Run] = field(default_factory=list)
    search: list[Run] = field(default_factory=list)
    saturation: Saturation | None = None


def measure(
    targets: Sequence[Target], load: Load, rounds: int, *, saturate: bool, report: Report
) -> list[Measured]:
    """`report` is told how far it is. Raises BenchError where nothing is due after the warm-up."""
    found = [Measured(target) for target in targets]
    for number in range(rounds):
        for place in range(len(found)):
            # Whoever comes first in one round comes later in the next.
            one = found[(place + number) % len(found)]
            report(f"{one.target.name}: round {number + 1} of {rounds}, {load.rate:.3g}/s")
            one.runs.append(_run(one.target, load, load.rate, number))
    if saturate:
        for one in found:
            one.saturation = _saturation(one, load, report)
    return found


def _saturation(one: Measured, load: Load, report: Report) -> Saturation:
    limits: dict[float, Run] = {}

    def attains(rate: float) -> bool:
        report(f"{one.target.name}: is it saturated at {rate:.3g}/s?")
        run = _run(one.target, load, rate, len(one.search))
        one.search.append(run)
        limits[rate] = run
        return run.broken is None and not run.client_limited

    rate = highest(attains, load.rate)
    beyond = limits[min(it for it in limits if it > rate)]
    return Saturation(rate, beyond.broken, beyond.client_limited)


def _run(target: Target, load: Load, rate: float, seed: int) -> Run:
    coming = load.arrivals(rate, load.seconds, seed)
    if not any(it.at_s >= load.warm_up_s for it in coming):
        raise BenchError(f"at {rate:.3g}/s nothing is due between warm-up and end: make it longer")
    answers = asyncio.run(drive(target, coming, seed))
    due_s = [it.at_s for it in coming]
    return judge(due_s, answers, load.seconds, load.warm_up_s, load.slo)

"""Many simulated runs of faults, one after the other, and what came of them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from measure.simulation.fault_run import Result, play
from measure.simulation.fault_script import script


@dataclass(slots=True)
class Tally:
    """Of all runs so far; `broken` counts invariants, `ends` and `faults` are by their names."""

    runs: int = 0
    requests: int = 0
    broken: int = 0
    failed_seeds: list[int] = field(default_factory=list)
    ends: Counter[str] = field(default_factory=Counter)
    faults: Counter[str] = field(default_factory=Counter)

    def add(self, result: Result, faults: Iterable[str]) -> None:
        self.runs += 1
        self.requests += sum(result.ended.values())
        self.ends.update(result.ended)
        self.faults.update(faults)
        self.broken += len(result.broken)
        if result.broken:
            self.failed_seeds.append(result.seed)


def play_all(seeds: Iterable[int], told: Callable[[Result], None]) -> Tally:
    """Plays each seed; `told` hears of each result."""
    tally = Tally()
    for seed in seeds:
        written = script(seed)
        result = play(written)
        tally.add(result, (fault.kind.value for fault in written.faults))
        told(result)
    return tally

"""Many simulated runs of faults, and what came of them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from itertools import islice
from multiprocessing import get_context

from measure.simulation.fault_run import Result, play
from measure.simulation.fault_script import script

_AHEAD = 25
"""Runs given to each process at a time."""


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


def play_all(seeds: Iterable[int], told: Callable[[Result], None], processes: int) -> Tally:
    """Plays each seed in one of so many processes; `told` hears of each result, in order.

    Seeds are asked for as they are needed, some dozens ahead.
    """
    tally = Tally()
    given = iter(seeds)
    with ProcessPoolExecutor(processes, mp_context=get_context("forkserver")) as pool:
        while ahead := list(islice(given, processes * _AHEAD)):
            for result, faults in pool.map(_play, ahead):
                tally.add(result, faults)
                told(result)
    return tally


def _play(seed: int) -> tuple[Result, list[str]]:
    written = script(seed)
    return play(written), [fault.kind.value for fault in written.faults]

"""CPU time of other processes, and the busy part of cores. Linux only."""

from __future__ import annotations

import time
from collections.abc import Sequence

import psutil


def process_cpu_s(pids: Sequence[int]) -> float:
    """User and system seconds of all threads, living and ended, to the nanosecond.

    The kernel's clock of a process, its number made as in clock_getcpuclockid(3); /proc counts
    in steps of 10 ms, which is all that a single stream uses in a second.
    """
    return sum(time.clock_gettime((~pid << 3) | 2) for pid in pids)


class BusyMeter:
    """The busy part of cores since it was made, 0 to 1."""

    def __init__(self, cores: Sequence[int]) -> None:
        self._cores = cores
        self._before = _total_and_idle(cores)

    def busy(self) -> tuple[float, ...]:
        """In the order of the cores given."""
        return tuple(
            1 - (idle - idle_before) / (total - total_before) if total > total_before else 0.0
            for (total_before, idle_before), (total, idle) in zip(
                self._before, _total_and_idle(self._cores), strict=True
            )
        )


def _total_and_idle(cores: Sequence[int]) -> list[tuple[float, float]]:
    every = psutil.cpu_times(percpu=True)
    # Guest time is part of user time, and would be counted twice.
    return [
        (sum(times) - times.guest - times.guest_nice, times.idle + times.iowait)
        for times in (every[core] for core in cores)
    ]

"""Runs cases on several fleets at once: most of a case is waiting for silence to be noticed."""

from __future__ import annotations

import asyncio
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from tests.faults.driver import Trial
from tests.faults.fleet import FaultFleet, fault_fleet
from tests.faults.scenarios import TRANSPORTS, Case

CASE_S = 90.0
"""What no case may take, whatever goes wrong in it."""


@dataclass(frozen=True)
class Result:
    """`found` are the invariants that were broken, in words."""

    case: Case
    found: list[str]
    took_s: float

    def __str__(self) -> str:
        broken = "".join(f"\n  {each}" for each in self.found)
        return f"{self.case.name} (repeat: {repeat_command(self.case)}){broken}"


def repeat_command(case: Case) -> str:
    return f"python -m tests.faults --case {case.name}"


async def run_cases(
    cases: dict[str, Iterator[Case]], fleets_each: int, told: Callable[[Result], None]
) -> None:
    """Runs the cases of each transport on so many fleets of its own, until there are no more."""
    async with asyncio.TaskGroup() as lanes:
        for transport in TRANSPORTS:
            for _ in range(fleets_each):
                lanes.create_task(_lane(transport, cases[transport], told))


async def _lane(transport: str, cases: Iterator[Case], told: Callable[[Result], None]) -> None:
    more = True
    while more:
        with tempfile.TemporaryDirectory(prefix="pdserve-faults-") as folder:
            async with fault_fleet(Path(folder), transport) as fleet:
                more = await _until_spoiled(fleet, cases, told)


async def _until_spoiled(
    fleet: FaultFleet, cases: Iterator[Case], told: Callable[[Result], None]
) -> bool:
    """False when there are no more cases; True when the fleet cannot be used for another one."""
    for case in cases:
        begun = time.monotonic()
        try:
            async with asyncio.timeout(CASE_S):
                found = await Trial(fleet, case).run()
        except Exception:  # a finding too: whatever it is, it belongs to this case
            found = [traceback.format_exc()]
        told(Result(case, found, time.monotonic() - begun))
        if found:
            return True
    return False

"""Which measurements a run makes, in which order, and what came of them."""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import dataclass

import msgspec

from measure.processes import child, python
from measure.token_path.jobs import Cores, Job, Outcome, Target, Timing
from measure.token_path.systems import System

PACED_STREAMS = (1, 64, 256)
FLAT_OUT_STREAMS = (64, 256)
_CLIENT_SPARE_S = 60.0


@dataclass(frozen=True, slots=True)
class Scenario:
    """So many streams at once, at 50 tokens per second each or flat out."""

    streams: int
    paced: bool

    def __str__(self) -> str:
        pace = "paced" if self.paced else "flat out"
        return f"{self.streams} stream{'s' if self.streams > 1 else ''}, {pace}"


SCENARIOS = (
    *(Scenario(streams, paced=True) for streams in PACED_STREAMS),
    *(Scenario(streams, paced=False) for streams in FLAT_OUT_STREAMS),
)


@dataclass(frozen=True, slots=True)
class Plan:
    """Every scenario on every system, `repeats` times over, the systems in turn."""

    systems: tuple[System, ...]
    repeats: int
    timing: Timing

    @property
    def measurements(self) -> int:
        return len(self.systems) * self.repeats * len(SCENARIOS)


FULL_TIMING = Timing(ramp_s=1.0, warmup_s=2.0, window_s=10.0, probe_s=5.0)
QUICK_TIMING = Timing(ramp_s=1.0, warmup_s=1.0, window_s=3.0, probe_s=2.0)


@dataclass(frozen=True, slots=True)
class Measured:
    """One outcome, and where it belongs."""

    system: str
    scenario: Scenario
    outcome: Outcome


@dataclass(frozen=True, slots=True)
class Upcoming:
    """What is done next, in words."""

    step: str


async def measure(plan: Plan, cores: Cores) -> AsyncIterator[Upcoming | Measured]:
    """Raises BenchError when a system does not start, or an answer is not whole."""
    for repeat in range(plan.repeats):
        for system in plan.systems:
            which = f"{system.name}, run {repeat + 1} of {plan.repeats}"
            yield Upcoming(f"{which}: starting")
            async with system.start(cores) as target:
                for scenario in SCENARIOS:
                    yield Upcoming(f"{which}: {scenario}")
                    outcome = await _one(scenario, target, plan.timing, cores)
                    yield Measured(system.name, scenario, outcome)


async def _one(scenario: Scenario, target: Target, timing: Timing, cores: Cores) -> Outcome:
    job = Job(target, scenario.streams, scenario.paced, timing, cores)
    program = python("measure.token_path.client", msgspec.json.encode(job).decode())
    lasting = timing.ramp_s + timing.warmup_s + timing.window_s + timing.probe_s
    async with child(f"load client ({scenario})", cores.others, program) as client:
        output = await client.output(lasting + _CLIENT_SPARE_S)
    return msgspec.json.decode(output, type=Outcome)

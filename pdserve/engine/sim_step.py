"""One step of the simulated engine, or several like it that are taken together."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from dataclasses import dataclass

from pdserve.clock import Clock
from pdserve.engine.sim_sequence import SimSequence
from pdserve.engine.sim_timing import StepWork, Timing
from pdserve.types import EngineWork

_TOGETHER_S = 0.25
"""Steps that are taken together last no longer."""


@dataclass(frozen=True, slots=True)
class Step:
    """A step under way: (sequence, prompt tokens read), sequences that write, what that is.

    `most` like it may follow at once, itself included, before anything but time has changed.
    """

    reading: list[tuple[SimSequence, int]]
    writing: list[SimSequence]
    work: StepWork
    most: int

    def done(self, steps: int, seconds: float, kv_usage: float) -> EngineWork:
        """What so many of it did, which took `seconds` in all."""
        work = self.work
        return EngineWork(
            steps,
            seconds,
            work.read_tokens,
            work.read_pairs,
            work.writing * steps,
            kv_usage * steps if work.writing else 0.0,
        )

    async def pass_together(
        self, timing: Timing, clock: Clock, wake: asyncio.Event
    ) -> tuple[int, float]:
        """Lets equal steps pass until `wake` is set; how many have passed, and their seconds.

        The one under way is always taken to its end.
        """
        began = clock.now()
        # What changes from step to step is the context, by as much each time.
        last_s = timing.step_s(self.work.after(self.most))
        mean_s = (timing.step_s(self.work) + last_s) / 2
        most = max(1, min(self.most, int(_TOGETHER_S / mean_s)))
        with suppress(TimeoutError):
            async with asyncio.timeout(most * mean_s):
                await wake.wait()
        steps = min(most, int((clock.now() - began) / mean_s) + 1)
        await clock.sleep(max(0.0, began + steps * mean_s - clock.now()))
        return steps, steps * mean_s

"""A crowd of requests from a seed, and what becomes of each: drives any fleet, on any clock."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from pdserve.errors import PdserveError
from pdserve.types import Mode


@dataclass(frozen=True)
class Job:
    """One request: seconds from the crowd's begin, and from its arrival until its client
    leaves, None for one that stays."""

    number: int
    arrives_s: float
    leaves_s: float | None
    mode: Mode
    prompt_tokens: int
    max_tokens: int


@dataclass(frozen=True)
class Ending:
    """`outcome` is "finished", "left" or the label of an error's reason."""

    job: Job
    outcome: str
    took_s: float


def crowd(
    seed: int,
    number: int,
    within_s: float,
    *,
    prompt_tokens: tuple[int, int],
    max_tokens: tuple[int, int],
    leavers: float,
) -> list[Job]:
    """Both modes alike, arriving evenly at random; of each hundred, `leavers` times a hundred
    leave at a random moment. Sizes are drawn from the ranges, both ends included."""
    dice = random.Random(seed)
    return [
        Job(
            number=each,
            arrives_s=dice.uniform(0, within_s),
            leaves_s=dice.expovariate(0.5) if dice.random() < leavers else None,
            mode=dice.choice((Mode.COLOCATED, Mode.DISAGGREGATED)),
            prompt_tokens=dice.randint(*prompt_tokens),
            max_tokens=dice.randint(*max_tokens),
        )
        for each in range(number)
    ]


async def drive(jobs: list[Job], ask: Callable[[Job], Awaitable[object]]) -> list[Ending]:
    """Asks for each job when it arrives, cancels it when it leaves; returns when all have ended."""

    async def one(job: Job) -> Ending:
        await asyncio.sleep(job.arrives_s)
        loop = asyncio.get_running_loop()
        begun, outcome = loop.time(), "finished"
        try:
            async with asyncio.timeout(job.leaves_s):
                await ask(job)
        except TimeoutError:
            outcome = "left"
        except PdserveError as error:
            outcome = error.reason.label
        return Ending(job, outcome, loop.time() - begun)

    return list(await asyncio.gather(*map(one, jobs)))

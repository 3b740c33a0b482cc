"""What an answer takes of its workers' GPUs, and what that costs. Pure.

A worker serves many at once, so the time for which an answer runs says little of what it
takes. It is charged its part in the engine's steps, by what steps of that pool were learnt to
take (`coordinator.policy.estimate`): all of what they take longer for it, and an equal part of
what they take in any case. Over all requests of a worker these parts add up to what its steps
were expected to take. Neither waiting nor an idle GPU is charged to anybody.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from coordinator.policy.estimate import Timings

NANO = 1_000_000_000
"""Money is counted in whole billionths of its currency, so that sums are exact."""
HOUR_S = 3600.0


@dataclass(frozen=True, slots=True)
class Seat:
    """A request's place on a worker: `gpus` of it step together, by `timings`, for `sharing`
    requests (1 or more, the mean over its stay). `reads_only` says which price is its."""

    timings: Timings
    gpus: int
    chunk_tokens: int
    sharing: float
    reads_only: bool


def reading_gpu_s(seat: Seat, prompt_tokens: int, cached_tokens: int) -> float:
    """GPU seconds of reading a prompt whose first `cached_tokens` were in the prefix cache.

        gpus · (token_s · uncached + pair_s · pairs + step_s · chunks / sharing)

    where `pairs` adds up the tokens that each uncached one comes after, and `chunks` are the
    steps that it is read in. The last token is always read.
    """
    cached = min(cached_tokens, prompt_tokens - 1)
    uncached = prompt_tokens - cached
    pairs = (prompt_tokens**2 - cached**2) / 2
    chunks = math.ceil(uncached / seat.chunk_tokens)
    timings = seat.timings
    return seat.gpus * (timings.reading_s(uncached, pairs) + timings.step_s * chunks / seat.sharing)


def writing_gpu_s(seat: Seat, prompt_tokens: int, steps: int) -> float:
    """GPU seconds of so many steps that each write a token of an answer.

        gpus · steps · (sequence_s + context_s · context + step_s / sharing)

    where `context` is the mean of the prompt with what has been written.
    """
    timings = seat.timings
    context = prompt_tokens + steps / 2
    a_step = timings.sequence_s + timings.context_s * context + timings.step_s / seat.sharing
    return seat.gpus * steps * a_step


def cost_nano(gpu_s: float, hour: float) -> int:
    """What `gpu_s` cost at a price of `hour` for each GPU hour, in billionths."""
    return round(gpu_s * hour / HOUR_S * NANO)

"""Which copies a run makes, in which order, and what came of them."""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import dataclass

import msgspec

from measure.kv_transfer.cache import SPARE
from measure.kv_transfer.jobs import LLAMA_8B, LLAMA_70B, SMOLLM2, Copied, Job, Model, Way
from measure.processes import child, python

NUM_TOKENS = (128, 512, 2048, 8192)
PACED_TOKENS = (512, 2048, 8192)
MODELS = (SMOLLM2, LLAMA_8B, LLAMA_70B)

_SIDES = 2 * SPARE + 1
"""Both caches, and what memcpy copies from, over the bytes of the longest prompt."""
_KEPT_FREE = 0.25


@dataclass(frozen=True, slots=True)
class Measured:
    """One copy, and whose shape it had."""

    model: Model
    copied: Copied


def fitting(model: Model, num_tokens: tuple[int, ...], available: int) -> tuple[int, ...]:
    """The prompts that this much free memory is enough for, some of it left."""
    limit = available * (1 - _KEPT_FREE)
    return tuple(each for each in num_tokens if model.num_bytes(each) * _SIDES <= limit)


async def measure(
    model: Model, num_tokens: tuple[int, ...], repeats: int, cores: tuple[int, int]
) -> AsyncIterator[Measured]:
    """On `cores`, the holder's first. Raises BenchError when a process ends, or a copy is wrong."""
    paced = tuple(each for each in PACED_TOKENS if each in num_tokens)
    shape = msgspec.json.encode(model).decode()
    holder_program = python("measure.kv_transfer.holder", shape, str(max(num_tokens)))
    async with child("holder", cores[0], holder_program) as holder:
        ready = await holder.event("ready")
        job = Job(model, tuple(Way), num_tokens, paced, repeats, ready["address"], holder.pids[0])
        reader_program = python("measure.kv_transfer.reader", msgspec.json.encode(job).decode())
        async with child("reader", cores[1], reader_program) as reader:
            for _ in range(job.copies):
                event = await reader.event("copied")
                yield Measured(model, msgspec.convert(event["copied"], Copied))

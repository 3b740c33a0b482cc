"""A simulated engine on virtual time, and what it is asked."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from pdserve.clock import RealClock
from pdserve.config import SimConfig
from pdserve.engine.base import Admitted, Prefilled, StepStats
from pdserve.engine.sim import SimEngine
from pdserve.types import (
    Delta,
    EngineRequest,
    SamplingParams,
    SimDescriptor,
)

CONFIG = SimConfig(
    prefill_token_s=0.001,
    decode_step_s=0.1,
    decode_sequence_s=0.01,
    transfer_token_s=0.002,
    chunk_tokens=100,
)


def request(num_tokens: int = 50, max_tokens: int = 3, first: int = 1) -> EngineRequest:
    sampling = SamplingParams(max_tokens=max_tokens, temperature=0.0, ignore_eos=True)
    return EngineRequest("r", tuple(range(first, first + num_tokens)), sampling)


@asynccontextmanager
async def started(
    config: SimConfig = CONFIG, steps: list[StepStats] | None = None
) -> AsyncIterator[SimEngine]:
    engine = SimEngine(config, "revision", RealClock())
    await engine.start(([] if steps is None else steps).append)
    yield engine
    assert engine.load.running == engine.load.waiting == 0
    assert engine.load.kv_usage == 0
    await engine.close()


async def timed(
    engine: SimEngine, asked: EngineRequest, kv: SimDescriptor | None = None
) -> list[tuple[float, Delta]]:
    """The deltas with their times, in seconds from the call on."""
    now = asyncio.get_running_loop().time
    begun = now()
    return [(now() - begun, delta) async for delta in engine.generate(asked, kv)]


def sim_descriptor(event: Admitted | Prefilled) -> SimDescriptor:
    assert isinstance(event.descriptor, SimDescriptor)
    return event.descriptor


def times(deltas: list[tuple[float, Delta]]) -> list[float]:
    return [time for time, _ in deltas]

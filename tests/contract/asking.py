"""Requests to an engine of the contract, and what comes of them."""

from __future__ import annotations

from dataclasses import replace

import pytest

from pdserve.engine.base import Engine, StepStats
from pdserve.types import Delta, EngineRequest, KvDescriptor, SamplingParams

Prompt = tuple[int, ...]
Watched = tuple[Engine, list[StepStats]]
"""An engine, and what its listener was given."""
LEASE_S = 30.0
_STEPS_TO_IDLE = 5


def request(prompt: Prompt, max_tokens: int = 8, **sampling: object) -> EngineRequest:
    """A greedy request that runs to `max_tokens` unless `sampling` says otherwise."""
    params = SamplingParams(max_tokens=max_tokens, temperature=0.0, ignore_eos=True)
    return EngineRequest("contract", prompt, replace(params, **sampling))  # type: ignore[arg-type]


async def run(engine: Engine, asked: EngineRequest, kv: KvDescriptor | None = None) -> list[Delta]:
    return [delta async for delta in engine.generate(asked, kv)]


def text_of(deltas: list[Delta]) -> str:
    return "".join(delta.text for delta in deltas)


def tokens_of(deltas: list[Delta]) -> list[int]:
    return [token for delta in deltas for token in delta.token_ids]


async def until_idle(engine: Engine, prompt: Prompt) -> None:
    """Engines may report only when a step ends: short requests make steps."""
    for _ in range(_STEPS_TO_IDLE):
        if engine.load.running == engine.load.waiting == engine.load.kv_usage == 0:
            return
        await run(engine, request(prompt[:4], max_tokens=2))
    pytest.fail(f"the engine is not idle: {engine.load}")

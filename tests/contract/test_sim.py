"""The simulated engine is an Engine."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest
import pytest_asyncio

from pdserve.clock import RealClock
from pdserve.config import SimConfig
from pdserve.engine.base import Engine, StepStats
from pdserve.engine.sim import SimEngine
from tests.contract.asking import Prompt, Watched
from tests.contract.engine_contract import EngineContract

FAST = SimConfig(prefill_token_s=0.00001, decode_step_s=0.0005, kv_capacity_tokens=16_384)
UNHURRIED = FAST.model_copy(update={"decode_step_s": 0.1})


class TestSimEngine(EngineContract):
    @pytest_asyncio.fixture(loop_scope="class")
    async def prefill_engine(self) -> AsyncIterator[Engine]:
        engine = SimEngine(FAST, "revision", RealClock())
        await engine.start(lambda _: None)
        yield engine
        await engine.close()

    @pytest.fixture
    def decode_steps(self) -> list[StepStats]:
        return []

    @pytest_asyncio.fixture(loop_scope="class")
    async def decode_engine(self, decode_steps: list[StepStats]) -> AsyncIterator[Engine]:
        engine = SimEngine(FAST, "revision", RealClock())
        await engine.start(decode_steps.append)
        yield engine
        await engine.close()

    @pytest_asyncio.fixture(loop_scope="class")
    async def unhurried(self) -> AsyncIterator[Watched]:
        steps: list[StepStats] = []
        engine = SimEngine(UNHURRIED, "revision", RealClock())
        await engine.start(steps.append)
        yield engine, steps
        await engine.close()

    @pytest.fixture(params=["nixl", "grpc"])
    def transport(self, request: pytest.FixtureRequest) -> str:
        name: str = request.param
        return name

    @pytest.fixture
    def prompt(self) -> Prompt:
        return tuple(range(100, 250))

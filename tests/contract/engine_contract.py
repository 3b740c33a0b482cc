"""What every Engine must do: one suite of several rooms, run by a subclass for each engine.

A subclass provides the fixtures `prefill_engine` and `decode_engine` (started; one engine may
be both), `decode_steps` (what the decode engine's listener was given, in order), `prompt`
(token ids, several KV blocks long) and `transport` (the name of each that both have). Real
engines are slow to start: fixtures may be shared by all tests of a class, which share an event
loop, so every test leaves the engines idle.
"""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest
import pytest_asyncio

from pdserve.engine.base import Engine
from tests.contract.answers import Answers
from tests.contract.asking import Prompt, until_idle
from tests.contract.caches import Caches
from tests.contract.hand_off import HandOff
from tests.contract.replays import Replays
from tests.contract.sampling import Sampling
from tests.contract.steps import Steps


@pytest.mark.asyncio(loop_scope="class")
class EngineContract(Steps, Caches, Sampling, Replays, HandOff, Answers):
    """The last room's tests run first."""

    @pytest_asyncio.fixture(autouse=True, loop_scope="class")
    async def leaves_idle(
        self, prefill_engine: Engine, decode_engine: Engine, prompt: Prompt
    ) -> AsyncIterator[None]:
        yield
        for engine in (prefill_engine, decode_engine):
            await engine.check()
            await until_idle(engine, prompt)

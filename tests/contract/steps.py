"""What an engine tells of its steps."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest

from pdserve.engine.base import Engine, StepStats
from pdserve.types import EngineWork
from tests.contract.asking import Prompt, Watched, request, run


class Steps:
    async def test_a_step_is_heard_of_with_its_load(
        self, decode_engine: Engine, decode_steps: list[StepStats], prompt: Prompt
    ) -> None:
        decode_steps.clear()
        await run(decode_engine, replace(request(prompt), cache_salt="heard"))
        assert any(stats.load.running for stats in decode_steps)
        assert any(stats.load.kv_usage > 0 for stats in decode_steps)
        assert sum(stats.prefix_queries for stats in decode_steps) >= len(prompt)

    @pytest.fixture
    def unhurried(self, decode_engine: Engine, decode_steps: list[StepStats]) -> Watched:
        """An engine whose steps take long beside what a busy machine adds to them."""
        return decode_engine, decode_steps

    async def test_a_step_tells_what_it_did_and_how_long_it_took(
        self, unhurried: Watched, prompt: Prompt
    ) -> None:
        engine, steps = unhurried
        steps.clear()
        began = asyncio.get_running_loop().time()
        await run(engine, replace(request(prompt, max_tokens=4), cache_salt="worked"))
        took_s = asyncio.get_running_loop().time() - began
        work = sum((stats.work for stats in steps), EngineWork())
        assert work.prefill_tokens == len(prompt)
        # The step that ends the prompt writes too; an engine may count it among these or not.
        assert work.sequences in (3, 4)
        assert work.steps >= 4
        assert took_s / 4 < work.seconds <= took_s
        assert 0 < work.kv_usage < work.sequences
        assert work.prefill_pairs == pytest.approx(len(prompt) ** 2 / 2, rel=0.1)

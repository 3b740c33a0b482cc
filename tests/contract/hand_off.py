"""A prompt that one engine reads and another one answers."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest

from pdserve.engine.base import Engine, Prefilled, StepStats
from tests.contract.asking import LEASE_S, Prompt, request, run, text_of, tokens_of, until_idle
from tests.support.prefilling import read


class HandOff:
    async def test_handed_over_kv_gives_the_colocated_answer(
        self,
        prefill_engine: Engine,
        decode_engine: Engine,
        decode_steps: list[StepStats],
        prompt: Prompt,
        transport: str,
    ) -> None:
        colocated = await run(decode_engine, request(prompt))
        # Salted, so that the decode side's own prefix cache cannot stand in for the transfer.
        asked = replace(request(prompt), cache_salt=f"handed over {transport}")
        prefilled = await read(prefill_engine, asked, transport, LEASE_S)
        assert prefilled.queue_s >= 0
        assert prefilled.prefill_s >= 0
        decode_steps.clear()
        handed = await run(decode_engine, asked, prefilled.descriptor)
        await prefill_engine.release(prefilled.descriptor)
        await until_idle(decode_engine, prompt)

        assert tokens_of(handed) == tokens_of(colocated)
        assert text_of(handed) == text_of(colocated)
        transfers = [transfer for stats in decode_steps for transfer in stats.transfers]
        assert transfers
        assert all(transfer.num_bytes > 0 and transfer.seconds >= 0 for transfer in transfers)
        assert {transfer.transport for transfer in transfers} == {transport}

    async def test_a_prefill_reports_what_its_cache_saved(
        self, prefill_engine: Engine, prompt: Prompt, transport: str
    ) -> None:
        results: list[Prefilled] = []
        for _ in range(2):
            asked = replace(request(prompt, max_tokens=1), cache_salt=f"saved {transport}")
            results.append(await read(prefill_engine, asked, transport, LEASE_S))
        for prefilled in results:
            await prefill_engine.release(prefilled.descriptor)
        assert results[0].cached_tokens == 0
        assert 0 < results[1].cached_tokens < len(prompt)

    async def test_releasing_twice_is_no_error(
        self, prefill_engine: Engine, prompt: Prompt, transport: str
    ) -> None:
        asked = request(prompt, max_tokens=1)
        prefilled = await read(prefill_engine, asked, transport, LEASE_S)
        await prefill_engine.release(prefilled.descriptor)
        await prefill_engine.release(prefilled.descriptor)

    async def test_cancelling_a_prefill_frees_its_blocks(
        self, prefill_engine: Engine, prompt: Prompt, transport: str
    ) -> None:
        asked = replace(request(prompt, max_tokens=1), cache_salt="cancelled")
        reading = asyncio.create_task(read(prefill_engine, asked, transport, LEASE_S))
        await asyncio.sleep(0)
        reading.cancel()
        with pytest.raises(asyncio.CancelledError):
            await reading

"""What an engine tells of its prefix cache."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import replace

from pdserve.cache_reports import cache_reports
from pdserve.cached_blocks import CachedBlocks
from pdserve.clock import RealClock
from pdserve.engine.base import Engine
from pdserve.prefix import chain
from tests.contract.asking import LEASE_S, Prompt, request, run, tokens_of
from tests.support.prefilling import read

_NEWS_S = 30.0


def cache_of(engine: Engine) -> CachedBlocks:
    """What an engine tells of its prefix cache; the engines of this suite do."""
    assert engine.cached is not None
    return engine.cached


async def until(cached: CachedBlocks, true: Callable[[], bool]) -> None:
    """Waits for the cache to be told as it must be."""
    async with asyncio.timeout(_NEWS_S):
        async for _ in cache_reports(cached, RealClock(), 0.01):
            if true():
                return


class Caches:
    async def test_a_salt_parts_the_prefix_cache_but_not_the_answer(
        self, decode_engine: Engine, prompt: Prompt
    ) -> None:
        plain = await run(decode_engine, request(prompt))
        warm = await run(decode_engine, request(prompt))
        salted = await run(decode_engine, replace(request(prompt), cache_salt="salt"))
        assert warm[-1].usage is not None
        assert 0 < warm[-1].usage.cached_tokens < len(prompt)
        assert salted[-1].usage is not None
        assert salted[-1].usage.cached_tokens == 0
        assert tokens_of(salted) == tokens_of(plain)

    async def test_the_blocks_of_a_prompt_are_told_apart_by_its_salt(
        self, decode_engine: Engine, prompt: Prompt
    ) -> None:
        cached = cache_of(decode_engine)
        size = decode_engine.info.fingerprint.block_size
        names = chain(prompt, "told", size)
        assert not any(name in cached for name in names)
        await run(decode_engine, replace(request(prompt, max_tokens=1), cache_salt="told"))
        await until(cached, lambda: all(name in cached for name in names))
        assert not any(name in cached for name in chain(prompt, "untold", size))

    async def test_a_prompt_that_is_cached_tells_nothing_new(
        self, decode_engine: Engine, prompt: Prompt
    ) -> None:
        cached = cache_of(decode_engine)
        asked = replace(request(prompt, max_tokens=1), cache_salt="again")
        other = replace(request(prompt, max_tokens=1), cache_salt="other")
        size = decode_engine.info.fingerprint.block_size
        names = chain(prompt, "again", size)
        await run(decode_engine, asked)
        await until(cached, lambda: names[-1] in cached)
        before = len(cached)
        await run(decode_engine, asked)
        await run(decode_engine, other)
        after = chain(prompt, "other", size)
        await until(cached, lambda: after[-1] in cached)
        assert len(cached) == before + len(after)

    async def test_blocks_that_are_read_for_others_are_told(
        self, prefill_engine: Engine, prompt: Prompt, transport: str
    ) -> None:
        cached = cache_of(prefill_engine)
        asked = replace(request(prompt, max_tokens=1), cache_salt=f"read {transport}")
        prefilled = await read(prefill_engine, asked, transport, LEASE_S)
        await prefill_engine.release(prefilled.descriptor)
        names = chain(prompt, asked.cache_salt, prefill_engine.info.fingerprint.block_size)
        await until(cached, lambda: all(name in cached for name in names))

    async def test_blocks_that_are_handed_over_are_told(
        self, prefill_engine: Engine, decode_engine: Engine, prompt: Prompt, transport: str
    ) -> None:
        cached = cache_of(decode_engine)
        asked = replace(request(prompt, max_tokens=1), cache_salt=f"arrived {transport}")
        prefilled = await read(prefill_engine, asked, transport, LEASE_S)
        await run(decode_engine, asked, prefilled.descriptor)
        await prefill_engine.release(prefilled.descriptor)
        names = chain(prompt, asked.cache_salt, decode_engine.info.fingerprint.block_size)
        await until(cached, lambda: all(name in cached for name in names))

    async def test_what_is_evicted_is_told_and_saves_nothing(
        self, decode_engine: Engine, prompt: Prompt
    ) -> None:
        cached, info = cache_of(decode_engine), decode_engine.info
        names = chain(prompt, "evicted", info.fingerprint.block_size)
        asked = replace(request(prompt, max_tokens=1), cache_salt="evicted")
        await run(decode_engine, asked)
        await until(cached, lambda: all(name in cached for name in names))
        length = min(1_024, info.context_length // 2)
        for turn in range(1 + info.kv_capacity_tokens // length):
            filler = tuple(1 + (turn * 31 + at * 7) % 900 for at in range(length))
            await run(decode_engine, request(filler, max_tokens=1))
        await until(cached, lambda: not any(name in cached for name in names))
        anew = await run(decode_engine, asked)
        assert anew[-1].usage is not None
        assert anew[-1].usage.cached_tokens == 0

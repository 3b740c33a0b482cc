"""What an answer is, and how it is ended early."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import aclosing

import pytest

from pdserve.engine.base import Engine
from pdserve.types import FinishReason
from tests.contract.asking import Prompt, request, run, text_of, tokens_of


class Answers:
    async def test_a_pair_can_exchange_kv(
        self, prefill_engine: Engine, decode_engine: Engine
    ) -> None:
        ours, theirs = decode_engine.info, prefill_engine.info
        assert ours.fingerprint == theirs.fingerprint
        assert ours.weights == theirs.weights == "bfloat16"
        assert set(ours.transports) & set(theirs.transports)
        assert ours.context_length > 0
        assert ours.kv_capacity_tokens > 0

    async def test_an_answer_ends_once_with_usage_and_begins_with_timings(
        self, decode_engine: Engine, prompt: Prompt
    ) -> None:
        deltas = await run(decode_engine, request(prompt, max_tokens=6))
        last = deltas[-1]
        assert last.finish_reason is FinishReason.LENGTH
        assert last.usage is not None
        assert (last.usage.prompt_tokens, last.usage.completion_tokens) == (len(prompt), 6)
        assert all(d.finish_reason is None and d.usage is None for d in deltas[:-1])
        assert len(tokens_of(deltas)) == 6
        first = next(d for d in deltas if d.token_ids)
        assert first.timings is not None
        assert first.timings.queue_s >= 0
        assert first.timings.first_step_s >= 0
        assert sum(d.timings is not None for d in deltas) == 1

    async def test_greedy_answers_repeat(self, decode_engine: Engine, prompt: Prompt) -> None:
        first = await run(decode_engine, request(prompt))
        again = await run(decode_engine, request(prompt))
        assert tokens_of(again) == tokens_of(first)
        assert text_of(again) == text_of(first)

    async def test_closing_the_iterator_aborts(self, decode_engine: Engine, prompt: Prompt) -> None:
        deltas = decode_engine.generate(request(prompt, max_tokens=400), None)
        assert isinstance(deltas, AsyncGenerator)
        async with aclosing(deltas):
            async for _ in deltas:
                break

    async def test_cancelling_the_reader_aborts(
        self, decode_engine: Engine, prompt: Prompt
    ) -> None:
        begun = asyncio.Event()

        async def read() -> None:
            async for _ in decode_engine.generate(request(prompt, max_tokens=400), None):
                begun.set()

        reader = asyncio.create_task(read())
        await begun.wait()
        reader.cancel()
        with pytest.raises(asyncio.CancelledError):
            await reader

    async def test_a_stop_string_ends_the_answer_and_nothing_of_it_leaks(
        self, decode_engine: Engine, prompt: Prompt
    ) -> None:
        whole = text_of(await run(decode_engine, request(prompt, max_tokens=16)))
        middle = len(whole) // 2
        stop = whole[middle : middle + 5]
        deltas = await run(decode_engine, request(prompt, max_tokens=16, stop=(stop,)))
        assert deltas[-1].finish_reason is FinishReason.STOP
        assert deltas[-1].stop_reason == stop
        assert text_of(deltas) == whole[: whole.index(stop)]
        with_it = request(prompt, max_tokens=16, stop=(stop,), include_stop_str_in_output=True)
        assert text_of(await run(decode_engine, with_it)).endswith(stop)

    async def test_a_stop_token_ends_the_answer_and_is_counted(
        self, decode_engine: Engine, prompt: Prompt
    ) -> None:
        tokens = tokens_of(await run(decode_engine, request(prompt)))
        stop = tokens[3]
        end = tokens.index(stop) + 1
        deltas = await run(decode_engine, request(prompt, stop_token_ids=(stop,)))
        assert deltas[-1].finish_reason is FinishReason.STOP
        assert deltas[-1].stop_reason == stop
        assert tokens_of(deltas) == tokens[:end]
        assert deltas[-1].usage is not None
        assert deltas[-1].usage.completion_tokens == end

    async def test_a_prompt_extended_by_part_of_its_answer_is_answered_with_the_rest(
        self, decode_engine: Engine, prompt: Prompt
    ) -> None:
        tokens = tokens_of(await run(decode_engine, request(prompt, max_tokens=12)))
        extended = prompt + tuple(tokens[:5])
        assert tokens_of(await run(decode_engine, request(extended, max_tokens=7))) == tokens[5:]

    async def test_many_at_once_all_end(self, decode_engine: Engine, prompt: Prompt) -> None:
        asked = [request((*prompt, extra), max_tokens=5) for extra in range(1, 9)]
        answers = await asyncio.gather(*(run(decode_engine, one) for one in asked))
        assert [len(tokens_of(deltas)) for deltas in answers] == [5] * 8

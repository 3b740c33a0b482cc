"""What every Engine must do: one suite, run by a subclass for each engine.

A subclass provides the fixtures `prefill_engine` and `decode_engine` (started; one engine may
be both), `decode_steps` (what the decode engine's listener was given, in order), `prompt`
(token ids, several KV blocks long) and `transport` (the name of each that both have). Real
engines are slow to start: fixtures may be shared by all tests of a class, which share an event
loop, so every test leaves the engines idle.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextlib import aclosing
from dataclasses import replace
from math import exp

import pytest
import pytest_asyncio

from pdserve.cache_reports import cache_reports
from pdserve.cached_blocks import CachedBlocks
from pdserve.clock import RealClock
from pdserve.engine.base import Engine, Prefilled, StepStats
from pdserve.prefix import chain
from pdserve.replay import Replay
from pdserve.types import (
    Delta,
    EngineRequest,
    EngineWork,
    FinishReason,
    KvDescriptor,
    PositionLogprobs,
    SamplingParams,
)
from tests.support.prefilling import read

Prompt = tuple[int, ...]
Watched = tuple[Engine, list[StepStats]]
"""An engine, and what its listener was given."""
LEASE_S = 30.0
_STEPS_TO_IDLE = 5
_NEWS_S = 30.0


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


def positions_of(deltas: list[Delta]) -> list[PositionLogprobs]:
    """One for each token, whatever delta it came in."""
    for delta in deltas:
        assert len(delta.logprobs or ()) == len(delta.token_ids)
    return [position for delta in deltas for position in delta.logprobs or ()]


def resumed_at(asked: EngineRequest, whole: list[Delta], sent: int) -> EngineRequest:
    """The request for the rest of an answer of which so many tokens were sent."""
    given = tokens_of(whole)[:sent]
    chars = 0
    for delta in whole:
        sent -= len(delta.token_ids)
        if sent < 0:
            break
        chars += len(delta.text)
    return replace(asked, replay=Replay(tuple(given), chars)) if given else asked


async def check_continued(
    engine: Engine, asked: EngineRequest, whole: list[Delta], sent: int
) -> None:
    """The rest is that of the whole answer: text, tokens, end and counts."""
    again = resumed_at(asked, whole, sent)
    assert again.replay is not None
    rest = await run(engine, again)
    assert tokens_of(rest) == tokens_of(whole)[sent:]
    assert text_of(rest) == text_of(whole)[again.replay.num_chars :]
    assert rest[-1].finish_reason is whole[-1].finish_reason
    assert rest[-1].usage is not None
    assert whole[-1].usage is not None
    assert rest[-1].usage.completion_tokens == whole[-1].usage.completion_tokens
    assert rest[-1].usage.prompt_tokens == whole[-1].usage.prompt_tokens
    assert rest[0].timings is not None


async def until_idle(engine: Engine, prompt: Prompt) -> None:
    """Engines may report only when a step ends: short requests make steps."""
    for _ in range(_STEPS_TO_IDLE):
        if engine.load.running == engine.load.waiting == engine.load.kv_usage == 0:
            return
        await run(engine, request(prompt[:4], max_tokens=2))
    pytest.fail(f"the engine is not idle: {engine.load}")


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


@pytest.mark.asyncio(loop_scope="class")
class EngineContract:
    @pytest_asyncio.fixture(autouse=True, loop_scope="class")
    async def leaves_idle(
        self, prefill_engine: Engine, decode_engine: Engine, prompt: Prompt
    ) -> AsyncIterator[None]:
        yield
        for engine in (prefill_engine, decode_engine):
            await engine.check()
            await until_idle(engine, prompt)

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

    async def test_cancelling_a_prefill_frees_its_blocks(
        self, prefill_engine: Engine, prompt: Prompt, transport: str
    ) -> None:
        asked = replace(request(prompt, max_tokens=1), cache_salt="cancelled")
        reading = asyncio.create_task(read(prefill_engine, asked, transport, LEASE_S))
        await asyncio.sleep(0)
        reading.cancel()
        with pytest.raises(asyncio.CancelledError):
            await reading

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

    @pytest.mark.parametrize("sent", [1, 5, 14])
    async def test_an_answer_whose_beginning_is_replayed_goes_on_as_it_did(
        self, decode_engine: Engine, prompt: Prompt, sent: int
    ) -> None:
        asked = request(prompt, max_tokens=16)
        whole = await run(decode_engine, asked)
        await check_continued(decode_engine, asked, whole, sent)

    async def test_replayed_tokens_are_those_that_are_given(
        self, decode_engine: Engine, prompt: Prompt
    ) -> None:
        own = tokens_of(await run(decode_engine, request(prompt, max_tokens=6)))
        other = tuple(token + 1 for token in own[:3])
        asked = replace(request(prompt, max_tokens=6), replay=Replay(other, 0))
        read = request(prompt + other, max_tokens=3)
        expected = tokens_of(await run(decode_engine, read))
        assert tokens_of(await run(decode_engine, asked)) == expected

    @pytest.mark.parametrize("cut", [-2, 2])
    async def test_a_stop_string_is_met_across_what_is_replayed(
        self, decode_engine: Engine, prompt: Prompt, cut: int
    ) -> None:
        plain = await run(decode_engine, request(prompt, max_tokens=16))
        text = text_of(plain)
        middle = len(text) // 2
        asked = request(prompt, max_tokens=16, stop=(text[middle - 6 : middle + 6],))
        whole = await run(decode_engine, asked)
        assert whole[-1].finish_reason is FinishReason.STOP
        await check_continued(decode_engine, asked, whole, len(tokens_of(whole)) - abs(cut))

    @pytest.mark.parametrize(
        "sampling",
        [
            {"presence_penalty": 1.5},
            {"frequency_penalty": 1.5},
            {"repetition_penalty": 1.3},
            {"temperature": 1.0, "seed": 7},
            {"temperature": 0.9, "seed": 8, "top_p": 0.9, "top_k": 40, "min_p": 0.01},
            {"min_tokens": 12, "ignore_eos": False},
        ],
        ids=lambda sampling: next(iter(sampling)),
    )
    async def test_what_the_sampler_remembers_is_as_it_was(
        self, decode_engine: Engine, prompt: Prompt, sampling: dict[str, object]
    ) -> None:
        asked = request(prompt, max_tokens=16, **sampling)
        whole = await run(decode_engine, asked)
        await check_continued(decode_engine, asked, whole, 7)

    async def test_answers_are_replayed_beside_others(
        self, decode_engine: Engine, prompt: Prompt
    ) -> None:
        """Each with a token of its own, which is never in doubt: what others in a step are forced
        to would be seen, and what a batch does to logits is not."""
        own = list(range(20, 26))
        asked = [request(prompt, max_tokens=12, logit_bias=((token, 100.0),)) for token in own]
        wholes = await asyncio.gather(*(run(decode_engine, one) for one in asked))
        assert [tokens_of(whole) for whole in wholes] == [[token] * 12 for token in own]
        pairs = list(zip(asked, wholes, strict=True))
        resumed = [resumed_at(one, whole, 2 * i) for i, (one, whole) in enumerate(pairs)]
        rests = await asyncio.gather(*(run(decode_engine, one) for one in resumed))
        assert [tokens_of(rest) for rest in rests] == [
            [token] * (12 - 2 * i) for i, token in enumerate(own)
        ]

    async def test_many_at_once_all_end(self, decode_engine: Engine, prompt: Prompt) -> None:
        asked = [request((*prompt, extra), max_tokens=5) for extra in range(1, 9)]
        answers = await asyncio.gather(*(run(decode_engine, one) for one in asked))
        assert [len(tokens_of(deltas)) for deltas in answers] == [5] * 8

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

    async def test_logprobs_come_with_their_tokens_and_change_none(
        self,
        prefill_engine: Engine,
        decode_engine: Engine,
        prompt: Prompt,
        transport: str,
    ) -> None:
        plain = tokens_of(await run(decode_engine, request(prompt)))
        asked = request(prompt, logprobs=3)
        colocated = positions_of(await run(decode_engine, asked))
        assert [position[0].token_id for position in colocated] == plain
        for position in colocated:
            assert len(position) == 3
            assert [one.rank for one in position] == [1, 2, 3]
            chances = [one.logprob for one in position]
            assert chances == sorted(chances, reverse=True)
            assert sum(exp(chance) for chance in chances) <= 1.001

        salted = replace(asked, cache_salt=f"likely {transport}")
        prefilled = await read(prefill_engine, salted, transport, LEASE_S)
        handed = positions_of(await run(decode_engine, salted, prefilled.descriptor))
        await prefill_engine.release(prefilled.descriptor)
        assert [position[0].token_id for position in handed] == plain
        assert [position[0].logprob for position in handed] == pytest.approx(
            [position[0].logprob for position in colocated], abs=0.15
        )

    async def test_logprobs_of_a_prompt_are_of_each_token_but_the_first(
        self, decode_engine: Engine, prompt: Prompt
    ) -> None:
        await run(decode_engine, request(prompt))  # a cached prompt has them, too
        deltas = await run(decode_engine, request(prompt, prompt_logprobs=2))
        positions = [position for delta in deltas for position in delta.prompt_logprobs or ()]
        assert [position[0].token_id for position in positions] == list(prompt[1:])
        assert all(len(position) >= 2 for position in positions)
        assert tokens_of(deltas) == tokens_of(await run(decode_engine, request(prompt)))

    async def test_logprobs_of_the_tokens_alone(
        self, decode_engine: Engine, prompt: Prompt
    ) -> None:
        positions = positions_of(await run(decode_engine, request(prompt, logprobs=0)))
        assert [len(position) for position in positions] == [1] * 8

    async def test_a_bias_bans_a_token_and_makes_another_certain(
        self, decode_engine: Engine, prompt: Prompt
    ) -> None:
        first = tokens_of(await run(decode_engine, request(prompt)))[0]
        banned = await run(decode_engine, request(prompt, logit_bias=((first, -100.0),)))
        assert first not in tokens_of(banned)
        certain = await run(decode_engine, request(prompt, logit_bias=((5, 100.0),)))
        assert tokens_of(certain) == [5] * 8

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

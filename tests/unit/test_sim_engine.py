"""The simulated engine's schedule and clock, on virtual time."""

from __future__ import annotations

import asyncio

import pytest

from pdserve.engine.base import StepStats
from pdserve.errors import DecodeError, PrefillError
from pdserve.types import (
    FinishReason,
)
from tests.support.prefilling import read
from tests.support.sim_engine import (
    CONFIG,
    request,
    started,
    timed,
    times,
)
from tests.support.virtual_time import on_virtual_time


@on_virtual_time
async def test_a_step_takes_its_prompt_tokens_its_base_and_its_sequences() -> None:
    async with started() as engine:
        alone = await timed(engine, request(50))
        # 50 prompt tokens in the first step; then decoding alone.
        assert times(alone) == pytest.approx([0.05 + 0.11, 0.27, 0.38])
        timings = alone[0][1].timings
        assert timings is not None
        assert (timings.queue_s, timings.first_step_s) == pytest.approx((0, 0.16))


@on_virtual_time
async def test_a_long_prompt_is_read_in_chunks_while_others_decode() -> None:
    async with started() as engine:
        short = asyncio.create_task(timed(engine, request(10, max_tokens=4)))
        long = asyncio.create_task(timed(engine, request(250, max_tokens=1, first=1_000)))
        # Chunks of 90, 100 and 60; the last brings the long prompt's first token too.
        assert times(await short) == pytest.approx([0.21, 0.42, 0.42 + 0.06 + 0.12, 0.71])
        assert times(await long) == pytest.approx([0.60])


@on_virtual_time
async def test_steps_tell_what_they_did() -> None:
    steps: list[StepStats] = []
    async with started(steps=steps) as engine:
        await timed(engine, request(250, max_tokens=2))
    worked = [stats.work for stats in steps if stats.work.steps]
    assert [(it.prefill_tokens, it.prefill_pairs, it.sequences) for it in worked] == [
        (100, 5_000, 0),
        (100, 100 * 100 + 5_000, 0),
        (50, 200 * 50 + 1_250, 1),
        (0, 0, 1),
    ]
    assert [it.seconds for it in worked] == pytest.approx([0.1, 0.1, 0.05 + 0.11, 0.11])
    usage = [it.kv_usage * CONFIG.kv_capacity_tokens for it in worked]
    assert usage == pytest.approx([0, 0, 250, 251])


@on_virtual_time
async def test_all_sequences_of_a_step_are_delivered_in_one_iteration_of_the_loop() -> None:
    flat_out = CONFIG.model_copy(
        update={"prefill_token_s": 0.0, "decode_step_s": 0.0, "decode_sequence_s": 0.0}
    )
    async with started(flat_out) as engine:
        iteration = 0
        heard: list[int] = []

        async def read(first: int) -> None:
            async for _ in engine.generate(request(1, max_tokens=5, first=first), None):
                heard.append(iteration)

        readers = asyncio.gather(*(read(first) for first in range(20)))
        while not readers.done():
            iteration += 1
            await asyncio.sleep(0)
    assert [heard.count(number) for number in sorted(set(heard))] == [20] * 5


@on_virtual_time
async def test_a_slow_reader_gets_its_tokens_merged() -> None:
    async with started() as engine:
        deltas = engine.generate(request(max_tokens=6), None)
        whole = [delta for _, delta in await timed(engine, request(max_tokens=6))]
        got = [await anext(deltas)]
        await asyncio.sleep(10)
        got += [delta async for delta in deltas]
        assert len(got) == 2
        assert [t for d in got for t in d.token_ids] == [t for d in whole for t in d.token_ids]
        assert "".join(d.text for d in got) == "".join(d.text for d in whole)
        assert got[-1].finish_reason is FinishReason.LENGTH


@on_virtual_time
async def test_no_more_than_max_num_seqs_run() -> None:
    steps: list[StepStats] = []
    async with started(CONFIG.model_copy(update={"max_num_seqs": 2}), steps) as engine:
        await asyncio.gather(*(timed(engine, request(5, first=10 * i)) for i in range(5)))
    assert max(stats.load.running for stats in steps) == 2
    assert max(stats.load.waiting for stats in steps) == 3


@on_virtual_time
async def test_prompts_wait_in_order_for_room() -> None:
    async with started(CONFIG.model_copy(update={"kv_capacity_tokens": 120})) as engine:
        answers = await asyncio.gather(
            *(timed(engine, request(60, max_tokens=2, first=100 * i)) for i in range(3))
        )
    firsts = [times(answer)[0] for answer in answers]
    assert firsts == sorted(set(firsts))


@on_virtual_time
async def test_an_overflow_sends_the_last_admitted_back_and_loses_nothing() -> None:
    async with started() as roomy:
        expected = [await timed(roomy, request(40, 40, first)) for first in (1, 101)]
    async with started(CONFIG.model_copy(update={"kv_capacity_tokens": 100})) as engine:
        answers = await asyncio.gather(*(timed(engine, request(40, 40, f)) for f in (1, 101)))
    for answer, wanted in zip(answers, expected, strict=True):
        assert [d.token_ids for _, d in answer] == [d.token_ids for _, d in wanted]
    assert times(answers[1])[-1] > times(answers[0])[-1]


@on_virtual_time
async def test_dying_fails_every_sequence_and_all_later_ones() -> None:
    async with started(CONFIG.model_copy(update={"max_num_seqs": 1})) as engine:
        running = [asyncio.create_task(timed(engine, request(max_tokens=100))) for _ in range(2)]
        reading = asyncio.create_task(read(engine, request(), "nixl", 1))
        await asyncio.sleep(1)
        engine.fail("the engine died")
        for task in running:
            with pytest.raises(DecodeError, match="the engine died"):
                await task
        with pytest.raises(PrefillError, match="the engine died"):
            await reading
        with pytest.raises(DecodeError, match="the engine died"):
            await timed(engine, request())
        with pytest.raises(DecodeError, match="the engine died"):
            await engine.check()


@on_virtual_time
async def test_a_prompt_that_can_never_fit_is_refused() -> None:
    async with started(CONFIG.model_copy(update={"kv_capacity_tokens": 100})) as engine:
        with pytest.raises(DecodeError, match="does not fit: 1 to 99 do"):
            await timed(engine, request(100))
        with pytest.raises(PrefillError, match="does not fit"):
            await read(engine, request(0), "nixl", 1)


@on_virtual_time
async def test_an_answer_ends_with_the_context() -> None:
    async with started(CONFIG.model_copy(update={"context_length": 60})) as engine:
        answer = await timed(engine, request(50, max_tokens=100))
    assert len(answer) == 10
    assert answer[-1][1].finish_reason is FinishReason.LENGTH

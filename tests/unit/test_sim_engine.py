"""The simulated engine's schedule and clock, on virtual time."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace

import pytest

from pdserve.channel import HOLDER_SILENCE_S
from pdserve.clock import RealClock
from pdserve.config import SimConfig
from pdserve.engine.base import Admitted, Prefilled, StepStats
from pdserve.engine.sim import SimEngine
from pdserve.engine.sim_model import BLOCK_SIZE, EOS, Answer, PrefixCache
from pdserve.errors import DecodeError, ErrorReason, PrefillError
from pdserve.prefix import chain
from pdserve.types import (
    Delta,
    EngineRequest,
    FinishReason,
    LeaseEnd,
    NixlDescriptor,
    SamplingParams,
    SimDescriptor,
)
from tests.support.prefilling import read
from tests.support.virtual_time import on_virtual_time

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
async def test_handed_over_kv_waits_for_its_transfer_and_reads_nothing() -> None:
    steps: list[StepStats] = []
    async with started() as holder, started(steps=steps) as engine:
        prefilled = await read(holder, request(50), "nixl", 50)
        assert isinstance(prefilled.descriptor, SimDescriptor)
        answer = await timed(engine, request(50), prefilled.descriptor)
        assert times(answer)[0] == pytest.approx(0.1 + 0.11)
        timings = answer[0][1].timings
        assert timings is not None
        assert timings.queue_s == pytest.approx(0.1)
    (transfer,) = [transfer for stats in steps for transfer in stats.transfers]
    num_bytes = 50 * CONFIG.kv_bytes_per_token
    assert (transfer.transport, transfer.num_bytes) == ("nixl", num_bytes)
    assert transfer.seconds == pytest.approx(0.1)
    assert sum(stats.prefix_queries for stats in steps) == 0


@on_virtual_time
async def test_kv_of_another_kind_cannot_be_fetched() -> None:
    async with started() as engine:
        with pytest.raises(DecodeError) as caught:
            async for _ in engine.generate(request(), NixlDescriptor("e", "r", (), "h", 1, 1)):
                pass
    assert caught.value.reason is ErrorReason.KV_TRANSFER_FAILED


@on_virtual_time
async def test_a_prefill_holds_its_blocks_until_its_lease_ends() -> None:
    async with started() as engine:
        prefilled = await read(engine, request(50), "nixl", 5)
        assert prefilled.prefill_s == pytest.approx(0.05)
        assert engine.load.kv_usage == 50 / CONFIG.kv_capacity_tokens
        await asyncio.sleep(4.9)
        assert engine.load.kv_usage > 0
        await asyncio.sleep(0.2)


@on_virtual_time
async def test_held_blocks_keep_others_waiting_until_they_are_released() -> None:
    async with started(CONFIG.model_copy(update={"kv_capacity_tokens": 100})) as engine:
        one = await read(engine, request(60), "nixl", 100)
        waiting = asyncio.create_task(timed(engine, request(60, first=500)))
        await asyncio.sleep(20)
        assert not waiting.done()
        await engine.release(one.descriptor)
        assert len(await waiting) == 3


@on_virtual_time
async def test_blocks_pass_from_being_read_to_being_held_with_nothing_in_between() -> None:
    async with started(CONFIG.model_copy(update={"kv_capacity_tokens": 100})) as engine:
        reading = asyncio.create_task(read(engine, request(60), "nixl", 100))
        await asyncio.sleep(0.01)
        waiting = asyncio.create_task(timed(engine, request(60, first=500)))
        descriptor = (await reading).descriptor
        await asyncio.sleep(20)
        assert (engine.load.running, engine.load.waiting) == (0, 1)
        await engine.release(descriptor)
        assert len(await waiting) == 3


@on_virtual_time
async def test_a_hold_can_be_renewed_until_it_is_over() -> None:
    async with started() as engine:
        descriptor = (await read(engine, request(50), "nixl", 5)).descriptor
        await asyncio.sleep(4)
        assert await engine.renew(descriptor, 5) is None
        await asyncio.sleep(4.9)
        assert engine.load.kv_usage > 0
        await asyncio.sleep(0.2)
        assert engine.load.kv_usage == 0
        assert await engine.renew(descriptor, 5) is LeaseEnd.EXPIRED
        assert await engine.release(descriptor) is LeaseEnd.EXPIRED


@on_virtual_time
async def test_over_grpc_blocks_can_be_asked_for_from_admission_and_come_as_they_are_read() -> None:
    async with started() as reader, started() as writer:
        busy = asyncio.create_task(timed(reader, request(200, 1, 1000)))
        await asyncio.sleep(0)
        events = reader.prefill(request(150), 5, "grpc")
        admitted = await anext(events)
        assert admitted.descriptor is not None
        answer = asyncio.create_task(timed(writer, request(150), sim_descriptor(admitted)))
        prefilled = await anext(events)
        assert prefilled.descriptor is admitted.descriptor
        # 350 tokens are read, and one is written, before the last block is there; the last 100
        # travel after that.
        assert times(await answer)[0] == pytest.approx(0.35 + 0.11 + 0.2 + 0.11)
        assert await reader.release(prefilled.descriptor) is LeaseEnd.FETCHED
        await busy


@on_virtual_time
async def test_blocks_are_released_once_and_apart() -> None:
    async with started() as engine:
        one = await read(engine, request(50), "nixl", 5)
        two = await read(engine, request(50), "nixl", 5)
        assert await engine.release(one.descriptor) is LeaseEnd.RELEASED
        assert await engine.release(one.descriptor) is LeaseEnd.RELEASED
        assert engine.load.kv_usage == 50 / CONFIG.kv_capacity_tokens
        assert await engine.release(two.descriptor) is LeaseEnd.RELEASED
        assert engine.load.kv_usage == 0


@on_virtual_time
async def test_blocks_that_were_fetched_are_free() -> None:
    async with started() as holder, started() as engine:
        descriptor = sim_descriptor(await read(holder, request(50), "nixl", 50))
        await timed(engine, request(50), descriptor)
        assert holder.load.kv_usage == 0
        assert await holder.renew(descriptor, 5) is LeaseEnd.FETCHED
        assert await holder.release(descriptor) is LeaseEnd.FETCHED


async def refusal(engine: SimEngine, descriptor: SimDescriptor) -> ErrorReason:
    with pytest.raises(DecodeError) as caught:
        await timed(engine, request(50), descriptor)
    return caught.value.reason


@on_virtual_time
async def test_a_holder_refuses_what_it_does_not_hold_and_says_why() -> None:
    async with started() as holder, started() as other, started() as engine:
        descriptor = sim_descriptor(await read(holder, request(50), "nixl", 50))
        theirs = sim_descriptor(await read(other, request(50), "nixl", 5))
        foreign = replace(descriptor, transfer_id=theirs.transfer_id)
        assert await refusal(engine, foreign) is ErrorReason.KV_FOREIGN
        stale = replace(descriptor, epoch=theirs.epoch)
        assert await refusal(engine, stale) is ErrorReason.KV_STALE_EPOCH
        await asyncio.sleep(6)
        assert await refusal(engine, theirs) is ErrorReason.KV_EXPIRED
        await timed(engine, request(50), descriptor)
        assert await refusal(engine, descriptor) is ErrorReason.KV_REUSED


@on_virtual_time
async def test_a_lease_that_ends_in_mid_transfer_voids_it() -> None:
    async with started() as holder, started() as engine:
        descriptor = sim_descriptor(await read(holder, request(50), "nixl", 0.05))
        assert await refusal(engine, descriptor) is ErrorReason.KV_EXPIRED


@on_virtual_time
async def test_a_holder_that_dies_in_mid_transfer_fails_it() -> None:
    async with started() as holder, started() as engine:
        descriptor = sim_descriptor(await read(holder, request(50), "nixl", 50))
        fetching = asyncio.create_task(refusal(engine, descriptor))
        await asyncio.sleep(0.05)
        await holder.close()
        assert await fetching is ErrorReason.KV_TRANSFER_FAILED
        assert await refusal(engine, descriptor) is ErrorReason.KV_TRANSFER_FAILED


@on_virtual_time
@pytest.mark.parametrize("said", [b"", b"read\n", b"wait\n"])
async def test_a_holder_that_is_silent_in_mid_transfer_is_taken_for_dead(said: bytes) -> None:
    async def say(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writers.append(writer)
        writer.write(said)

    writers: list[asyncio.StreamWriter] = []
    async with await asyncio.start_server(say, "127.0.0.1", 0) as holder, started() as engine:
        port = holder.sockets[0].getsockname()[1]
        now = asyncio.get_running_loop().time
        begun = now()
        silent = SimDescriptor(1, "nixl", "transfer", "epoch", "127.0.0.1", port)
        assert await refusal(engine, silent) is ErrorReason.KV_TRANSFER_FAILED
        # After the 50 tokens have come, where it said that they would.
        assert now() - begun == pytest.approx(
            HOLDER_SILENCE_S + (0.1 if said == b"read\n" else 0.0)
        )
        for writer in writers:
            writer.close()


@on_virtual_time
async def test_a_holder_that_reads_for_long_is_waited_for() -> None:
    slow = CONFIG.model_copy(update={"prefill_token_s": 1.0})
    async with started(slow) as holder, started() as engine:
        events = holder.prefill(request(50), 50, "grpc")
        admitted = await anext(events)
        answer = asyncio.create_task(timed(engine, request(50), sim_descriptor(admitted)))
        await anext(events)
        assert times(await answer)[0] == pytest.approx(50 + 0.1 + 0.11)


@on_virtual_time
async def test_a_prompt_whose_reading_is_aborted_is_not_handed_over() -> None:
    async with started() as holder, started() as engine:
        events = holder.prefill(request(150), 5, "grpc")
        admitted = await anext(events)
        fetching = asyncio.create_task(refusal(engine, sim_descriptor(admitted)))
        await asyncio.sleep(0.05)
        await events.aclose()
        assert await fetching is ErrorReason.KV_TRANSFER_FAILED


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


def answer_of(prompt: tuple[int, ...], **sampling: object) -> tuple[list[int], str, FinishReason]:
    params = replace(SamplingParams(max_tokens=400, temperature=0.0), **sampling)  # type: ignore[arg-type]
    answer = Answer(prompt, params, params.max_tokens or 0)
    tokens, text = [], ""
    while True:
        token, piece, finish = answer.next()
        tokens.append(token)
        text += piece
        if finish is not None:
            return tokens, text, finish


def test_some_answers_end_by_themselves_and_go_on_when_told() -> None:
    ends = [answer_of((prompt,)) for prompt in range(50)]
    stopped = [(tokens, text) for tokens, text, finish in ends if finish is FinishReason.STOP]
    assert 10 < len(stopped) < 50
    assert all(tokens[-1] == EOS and EOS not in tokens[:-1] for tokens, _ in stopped)
    ignoring = answer_of((0,), ignore_eos=True)
    assert (len(ignoring[0]), ignoring[2]) == (400, FinishReason.LENGTH)


def test_min_tokens_come_before_any_end() -> None:
    ends = [answer_of((prompt,), min_tokens=300) for prompt in range(20)]
    assert all(len(tokens) > 300 for tokens, _, _ in ends)


def test_only_sampling_with_a_seed_changes_the_answer() -> None:
    greedy = answer_of((1, 2))
    assert answer_of((1, 2), temperature=1.0) == greedy
    assert answer_of((1, 2), seed=7) == greedy
    sampled = answer_of((1, 2), temperature=1.0, seed=7)
    assert sampled != greedy
    assert answer_of((1, 2), temperature=1.0, seed=7) == sampled
    assert answer_of((1, 2), temperature=1.0, seed=8) != sampled


@pytest.mark.parametrize("cut", [1, 3, 7])
def test_a_stop_string_across_tokens_is_cut_and_never_shown(cut: int) -> None:
    whole = answer_of((5,), ignore_eos=True, max_tokens=30)[1]
    stop = whole[len(whole) // 2 :][: 3 * cut]
    tokens, text, finish = answer_of((5,), ignore_eos=True, max_tokens=30, stop=(stop,))
    assert finish is FinishReason.STOP
    assert text == whole[: whole.index(stop)]
    assert len(tokens) < 30


def test_held_back_text_comes_with_the_end() -> None:
    whole = answer_of((5,), ignore_eos=True, max_tokens=30)[1]
    stops = ("never there at all", whole[-6:] + "!")
    assert answer_of((5,), ignore_eos=True, max_tokens=30, stop=stops)[1] == whole


def test_stop_strings_inside_min_tokens_do_not_end_the_answer() -> None:
    whole = answer_of((5,), ignore_eos=True, max_tokens=30)[1]
    first = whole.split()[0]
    tokens, _, _ = answer_of((5,), ignore_eos=True, max_tokens=30, stop=(first,), min_tokens=10)
    assert len(tokens) > 10


def test_the_prefix_cache_finds_whole_blocks_but_never_the_last_token() -> None:
    cache = PrefixCache(1_000)
    prompt = tuple(range(96))
    whole = chain(prompt, "", BLOCK_SIZE)
    assert cache.lookup(whole, 96) == 0
    cache.insert(whole)
    assert cache.lookup(whole, 96) == 64
    assert cache.lookup(chain((*prompt, 1), "", BLOCK_SIZE), 97) == 96
    assert cache.lookup(chain((*prompt[:40], 7), "", BLOCK_SIZE), 41) == 32
    assert cache.lookup(chain(prompt, "salt", BLOCK_SIZE), 96) == 0


def test_the_prefix_cache_drops_what_was_used_longest_ago() -> None:
    cache = PrefixCache(64)
    one, two, three = (chain((n,) * 33, "", BLOCK_SIZE) for n in (1, 2, 3))
    cache.insert(one)
    cache.insert(two)
    assert cache.lookup(one, 33) == 32
    cache.insert(three)
    assert [cache.lookup(names, 33) for names in (one, two, three)] == [32, 0, 32]

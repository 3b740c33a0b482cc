"""An answer that its decode worker cuts off goes on with another one."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import pytest

from coordinator.fleet import RECONNECT_S, SILENCE_S
from coordinator.lifecycle import State
from coordinator.response import ResponseStream
from pdserve.errors import DecodeError, ErrorReason, PdserveError, PrefillError
from pdserve.replay import Replay
from pdserve.types import Delta, EngineRequest, Mode, SamplingParams, Usage
from pdserve.worker_service import HEARTBEAT_S
from tests.support.core import Answer, Core, assert_complete, running
from tests.support.fake_script import (
    ANSWER_TOKENS,
    CACHED_AT_PREFILL,
    FIRST_STEP_S,
    Gate,
    Script,
    answer,
)
from tests.support.fake_worker import FakeWorker, decodes, prefills
from tests.support.virtual_time import on_virtual_time, settle

MODES = [Mode.COLOCATED, Mode.DISAGGREGATED]
PROMPT = tuple(byte + 3 for byte in b"hello")
PLAIN = SamplingParams(max_tokens=ANSWER_TOKENS, temperature=0.0)
WITH_STATE = SamplingParams(max_tokens=ANSWER_TOKENS, temperature=0.0, presence_penalty=1.0)


def said(number: int) -> list[Delta]:
    """The first deltas of the answer to "hello"."""
    return answer(EngineRequest("", PROMPT, PLAIN))[:number]


def cut_off(number: int) -> Script:
    """An answer that comes no further than so many tokens."""
    return [*said(number), Gate()]


def lost() -> DecodeError:
    return DecodeError(ErrorReason.DECODE_FAILED, "the writer broke")


async def read(stream: ResponseStream) -> Answer:
    try:
        return Answer(stream.route, [delta async for delta in stream])
    finally:
        await stream.aclose()


async def begun(core: Core, **fields: Any) -> ResponseStream:
    """A stream that has been read as far as its worker goes."""
    return await core.open(**{"sampling": PLAIN, "max_tokens": None, **fields})


def at_work(core: Core) -> FakeWorker:
    return core.fakes_by_id[core.record.decode_worker]


def recoveries(core: Core, outcome: str, reason: str = "decode_failed") -> float | None:
    labels = {"model": "tiny", "reason": reason, "outcome": outcome}
    return core.registry.get_sample_value("pdserve_recoveries_total", labels)


@pytest.mark.parametrize("number", [1, 2])
@pytest.mark.parametrize("mode", MODES)
@on_virtual_time
async def test_a_plain_answer_goes_on_from_the_tokens_that_were_sent(
    mode: Mode, number: int
) -> None:
    writers = decodes(2)
    async with running(*prefills(), *writers) as core:
        writers[0].starts.append(cut_off(number))
        stream = await begun(core, mode=mode)
        await settle()
        first = at_work(core)
        first.stop()
        given = await read(stream)
        assert_complete(given)
        cached = CACHED_AT_PREFILL if mode is Mode.DISAGGREGATED else 0
        assert given.usage == Usage(5, ANSWER_TOKENS, cached)
        assert [t for delta in given.deltas for t in delta.token_ids] == [
            t for delta in answer(EngineRequest("", PROMPT, PLAIN)) for t in delta.token_ids
        ]
        second = at_work(core)
        assert second is not first
        again = second.requests[-1]
        assert again.token_ids == (*PROMPT, *(t for delta in said(number) for t in delta.token_ids))
        assert again.sampling.max_tokens == ANSWER_TOKENS - number
        assert again.replay is None
        assert core.record.state is State.FINISHED
        (entry,) = core.access
        assert (entry["outcome"], entry["recoveries"]) == ("ok", ["decode_failed"])
        assert entry["mode"] == mode.value
        assert (recoveries(core, "continued"), recoveries(core, "failed")) == (1, None)


@pytest.mark.parametrize("mode", MODES)
@on_virtual_time
async def test_an_answer_with_state_is_replayed(mode: Mode) -> None:
    writers = decodes(2)
    async with running(*prefills(), *writers) as core:
        writers[0].starts.append(cut_off(2))
        stream = await begun(core, mode=mode, sampling=WITH_STATE)
        await settle()
        at_work(core).stop()
        given = await read(stream)
        assert_complete(given)
        assert given.usage is not None
        assert given.usage.completion_tokens == ANSWER_TOKENS
        again = at_work(core).requests[-1]
        sent = said(2)
        assert again.replay == Replay(
            tuple(t for delta in sent for t in delta.token_ids), sum(len(d.text) for d in sent)
        )
        assert (again.token_ids, again.sampling) == (PROMPT, WITH_STATE)


@on_virtual_time
async def test_a_text_that_ends_within_a_character_is_replayed() -> None:
    writers = decodes(2)
    async with running(*writers) as core:
        core.encoder.is_whole = lambda token_ids: False  # type: ignore[method-assign]
        writers[0].starts.append(cut_off(1))
        stream = await begun(core)
        at_work(core).stop()
        assert_complete(await read(stream))
        assert at_work(core).requests[-1].replay is not None


@on_virtual_time
async def test_text_that_went_past_the_reader_is_not_sent_again() -> None:
    writers, gate = decodes(2), Gate()
    async with running(*writers) as core:
        writers[0].starts.append([*said(1), gate])
        stream = await begun(core)
        written: list[str] = []

        stream.forward(lambda text: not written.append(text))
        reading = asyncio.create_task(read(stream))
        await settle()
        # As a session does with text that comes alone.
        (sequence,) = at_work(core).sequences
        second = said(2)[1]
        assert sequence.take is not None
        assert sequence.take(second.text, time.monotonic())
        sequence.token_ids += second.token_ids
        sequence.num_chars += len(second.text)
        at_work(core).stop()
        given = await reading
        whole = "".join(delta.text for delta in answer(EngineRequest("", PROMPT, PLAIN)))
        first, rest = given.deltas[0].text, "".join(d.text for d in given.deltas[1:])
        assert first + "".join(written) + rest == whole


@on_virtual_time
async def test_a_second_death_is_recovered_from_too_and_a_third_is_told() -> None:
    writers = decodes(4)
    async with running(*writers, max_recoveries=2) as core:
        sampling = SamplingParams(max_tokens=4, temperature=0.0)
        for _ in range(3):
            writers[0].starts.append(cut_off(1))
        stream = await begun(core, sampling=sampling)
        for _ in range(2):
            await anext(stream)
            at_work(core).stop()
        await anext(stream)
        at_work(core).stop()
        with pytest.raises(DecodeError):
            await anext(stream)
        await stream.aclose()
        assert core.record.recoveries == ["decode_failed"] * 2
        assert core.access[0]["outcome"] == "decode_failed"
        assert (recoveries(core, "continued"), recoveries(core, "failed")) == (2, 1)


@on_virtual_time
async def test_an_attempt_that_fails_on_the_way_is_no_second_recovery() -> None:
    writers = decodes(3)
    async with running(*prefills(), *writers, max_recoveries=1) as core:
        writers[0].starts.extend([cut_off(1), [lost()]])
        stream = await begun(core)
        at_work(core).stop()
        assert_complete(await read(stream))
        assert core.record.recoveries == ["decode_failed"]
        assert core.record.fallbacks == ["decode: decode_failed"]


@on_virtual_time
async def test_the_ladder_holds_for_the_rest_of_an_answer() -> None:
    (reader,), writers = prefills(), decodes(2)
    async with running(reader, *writers) as core:
        writers[0].starts.append(cut_off(1))
        stream = await begun(core, mode=Mode.DISAGGREGATED)
        reader.prefills.append([PrefillError(ErrorReason.PREFILL_FAILED, "the reader broke")])
        at_work(core).stop()
        assert_complete(await read(stream))
        assert core.record.fallbacks == ["colocated: prefill_failed"]


@pytest.mark.parametrize("number", [0, 1])
@on_virtual_time
async def test_a_restart_of_the_only_worker_is_waited_for(number: int) -> None:
    (writer,) = decodes()
    async with running(writer) as core:
        writer.starts.append(cut_off(number))
        asking = asyncio.create_task(core.ask(sampling=PLAIN))
        await settle()
        writer.stop()
        await asyncio.sleep(4)
        assert not asking.done()
        writer.restart()
        assert_complete(await asking)


@pytest.mark.parametrize("number", [0, 1])
@on_virtual_time
async def test_a_worker_that_does_not_come_back_is_waited_for_no_longer_than_said(
    number: int,
) -> None:
    (writer,) = decodes()
    async with running(writer, recovery_wait_s=5.0) as core:
        writer.starts.append(cut_off(number))
        asking = asyncio.create_task(core.ask(sampling=PLAIN))
        await settle()
        writer.stop()
        began = time.monotonic()
        with pytest.raises(DecodeError) as failure:
            await asking
        assert failure.value.reason is ErrorReason.DECODE_FAILED
        assert time.monotonic() - began == pytest.approx(5, abs=0.1)
        if number:
            assert recoveries(core, "failed") == 1


@on_virtual_time
async def test_a_worker_that_was_only_silent_goes_on_itself() -> None:
    (writer,) = decodes()
    async with running(writer) as core:
        writer.starts.append(cut_off(1))
        asking = asyncio.create_task(core.ask(sampling=PLAIN))
        await settle()
        writer.silent = True
        await asyncio.sleep(SILENCE_S + 1)
        assert not asking.done()
        writer.silent = False
        assert_complete(await asking)


@on_virtual_time
async def test_the_only_worker_gets_another_chance_where_it_broke_one_answer() -> None:
    (writer,) = decodes()
    async with running(writer) as core:
        writer.starts.append([*said(2), lost()])
        assert_complete(await core.ask(sampling=PLAIN))


@on_virtual_time
async def test_what_the_request_itself_is_to_blame_for_is_not_recovered() -> None:
    writers = decodes(2)
    async with running(*writers) as core:
        cause = DecodeError(ErrorReason.INVALID_ARGUMENT, "nonsense")
        writers[0].starts.append([*said(1), cause])
        with pytest.raises(DecodeError, match="nonsense"):
            await core.ask(sampling=PLAIN)
        assert core.record.recoveries == []


@on_virtual_time
async def test_the_deadline_ends_the_wait_for_a_worker() -> None:
    (writer,) = decodes()
    async with running(writer) as core:
        writer.starts.append(cut_off(1))
        stream = await begun(core, deadline=time.monotonic() + 3)
        writer.stop()
        with pytest.raises(PdserveError) as failure:
            await read(stream)
        assert failure.value.reason is ErrorReason.DEADLINE_EXCEEDED
        assert core.access[0]["outcome"] == "deadline_exceeded"


@on_virtual_time
async def test_the_deadline_holds_for_the_rest_of_the_answer() -> None:
    writers = decodes(2)
    async with running(*writers) as core:
        writers[0].starts.extend([cut_off(1), cut_off(1)])
        stream = await begun(core, deadline=time.monotonic() + 3)
        at_work(core).stop()
        with pytest.raises(PdserveError) as failure:
            await read(stream)
        assert failure.value.reason is ErrorReason.DEADLINE_EXCEEDED


@on_virtual_time
async def test_an_answer_that_is_read_after_its_deadline_is_not_continued() -> None:
    writers = decodes(2)
    async with running(*writers) as core:
        writers[0].starts.append(cut_off(1))
        stream = await begun(core, deadline=time.monotonic() + 3)
        await anext(stream)
        at_work(core).stop()
        await asyncio.sleep(5)  # the client takes nothing
        with pytest.raises(PdserveError) as failure:
            await read(stream)
        assert failure.value.reason is ErrorReason.DEADLINE_EXCEEDED
        assert not any(writer.sequences for writer in writers)


@on_virtual_time
async def test_a_client_may_leave_while_its_answer_waits() -> None:
    (writer,) = decodes()
    async with running(writer) as core:
        writer.starts.append(cut_off(1))
        asking = asyncio.create_task(core.ask(sampling=PLAIN))
        await settle()
        writer.stop()
        await asyncio.sleep(1)
        asking.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asking
        assert core.access[0]["outcome"] == "cancelled"
        assert recoveries(core, "failed") is None


@on_virtual_time
async def test_a_worker_that_cannot_go_on_with_an_answer_is_not_the_client_s_fault() -> None:
    writers = decodes(2)
    refusal = DecodeError(ErrorReason.INVALID_ARGUMENT, "cannot replay")
    async with running(*writers) as core:
        writers[0].starts.extend([cut_off(1), [refusal]])
        stream = await begun(core, sampling=WITH_STATE)
        at_work(core).stop()
        with pytest.raises(DecodeError) as failure:
            await read(stream)
        assert failure.value.reason is ErrorReason.DECODE_FAILED
        assert core.access[0]["outcome"] == "decode_failed"
        assert recoveries(core, "failed") == 1


@pytest.mark.parametrize(("max_recoveries", "met"), [(0, 2), (1, 2), (2, 3)])
@pytest.mark.parametrize("begins", [0, 1])
@on_virtual_time
async def test_a_request_that_kills_its_workers_does_not_meet_them_all(
    begins: int, max_recoveries: int, met: int
) -> None:
    writers = decodes(6)
    async with running(*writers, max_recoveries=max_recoveries) as core:
        writers[0].starts.extend([cut_off(begins), *[cut_off(0)] * 6])
        asking = asyncio.create_task(core.ask(sampling=PLAIN))
        for _ in range(6):
            await settle()
            at_work(core).stop()
        with pytest.raises(DecodeError):
            await asking
        dead = sum(not writer.up for writer in writers)
        assert dead == (1 if begins and not max_recoveries else met)


@on_virtual_time
async def test_running_answers_can_be_moved_and_it_costs_no_attempt() -> None:
    writers = decodes(2)
    async with running(*writers, max_recoveries=1) as core:
        writers[0].starts.extend([cut_off(1), cut_off(1)])
        stream = await begun(core)
        for _ in range(2):
            await anext(stream)
            assert core.fleet.move(core.worker(core.record.decode_worker))
        given = await read(stream)
        assert given.finish_reason is not None
        assert core.record.recoveries == ["draining", "draining"]
        assert recoveries(core, "continued", "draining") == 2


@on_virtual_time
async def test_an_answer_that_has_no_attempt_left_can_be_moved() -> None:
    writers = decodes(2)
    async with running(*writers, max_recoveries=1) as core:
        writers[0].starts.extend([cut_off(1), cut_off(1)])
        stream = await begun(core)
        await anext(stream)
        at_work(core).stop()
        await anext(stream)
        next(writer for writer in writers if not writer.up).restart()
        await asyncio.sleep(RECONNECT_S + HEARTBEAT_S)
        assert core.fleet.move(core.worker(core.record.decode_worker))
        given = await read(stream)
        assert given.finish_reason is not None
        assert core.record.recoveries == ["decode_failed", "draining"]


@on_virtual_time
async def test_many_answers_of_a_dead_worker_go_on_at_once() -> None:
    writers = decodes(2)
    async with running(*writers) as core:
        writers[0].starts.extend([cut_off(1)] * 20)
        asking = [asyncio.create_task(core.ask(sampling=PLAIN)) for _ in range(20)]
        await settle()
        writers[0].stop()
        writers[0].starts.clear()
        await settle()
        moved = [record for record in core.records if record.recoveries]
        assert len(moved) == 10
        writers[1].stop()
        writers[0].restart()
        for given in await asyncio.gather(*asking):
            assert_complete(given)


# Its timeline.


@on_virtual_time
async def test_what_the_way_to_another_worker_took_is_a_phase_of_its_own() -> None:
    writers = decodes(2)
    async with running(*writers) as core:
        writers[0].starts.append([2.0, *said(2), 3.0, lost()])
        writers[0].starts.append([5.0])
        began = time.monotonic()
        await core.ask(sampling=PLAIN, max_tokens=None)
        segments = [(name, pytest.approx(spent)) for name, spent in core.record.segments]
        assert segments == [
            ("tokenise", 0),
            ("queue", 0),
            ("decode_queue", 2 - FIRST_STEP_S),
            ("first_step", FIRST_STEP_S),
            ("decode", 0),
            ("recovery", 3 + 5),
            ("decode", 0),
        ]
        (found,) = core.timelines.find(core.record.request_id)
        assert sum(spent for _, spent in found.segments) == pytest.approx(time.monotonic() - began)

"""What a request does when a worker fails it: another one, another way, or an error."""

from __future__ import annotations

import asyncio

import pytest

from coordinator.climb import MAX_ATTEMPTS
from coordinator.fleet import RECONNECT_S
from coordinator.lifecycle import State
from coordinator.worker import SUSPICION_S
from pdserve.errors import DecodeError, ErrorReason, PdserveError, PrefillError
from pdserve.types import Fallback, Mode
from pdserve.worker_service import HEARTBEAT_S
from tests.support.core import assert_complete, running
from tests.support.fake_script import Gate, decode_error, first_delta, prefill_error
from tests.support.fake_worker import MODEL, decodes, prefills
from tests.support.virtual_time import on_virtual_time, settle

DISAGGREGATED = Mode.DISAGGREGATED
BOTH = ("nixl", "grpc")
KV_REASONS = [reason for reason in ErrorReason if reason.name.startswith("KV_")]


# The prefill side fails.


@pytest.mark.parametrize(
    "reason",
    [
        ErrorReason.PREFILL_FAILED,
        ErrorReason.NO_ROOM,
        ErrorReason.DRAINING,
        ErrorReason.KV_INCOMPATIBLE,
        ErrorReason.INTERNAL,
    ],
    ids=lambda reason: reason.label,
)
@on_virtual_time
async def test_another_prefill_worker_is_tried(reason: ErrorReason) -> None:
    readers = prefills(2)
    async with running(*readers, *decodes()) as core:
        readers[0].prefills.append([prefill_error(reason)])
        given = await core.ask(mode=DISAGGREGATED)
        assert_complete(given)
        assert given.route.mode is DISAGGREGATED
        assert given.route.reason.endswith("; tried another prefill worker: the reader broke")
        assert sorted(core.asked("prefill")) == ["p1", "p2"]
        assert core.record.fallbacks == [f"prefill: {reason.label}"]


@on_virtual_time
async def test_after_two_prefill_workers_the_request_is_colocated() -> None:
    readers = prefills(5)
    async with running(*readers, *decodes()) as core:
        readers[0].prefills.extend([[prefill_error()]] * 5)
        given = await core.ask(mode=DISAGGREGATED)
        readers[0].prefills.clear()
        assert_complete(given)
        assert given.route.mode is Mode.COLOCATED
        assert given.route.reason == (
            "disaggregated: asked for by the request; "
            "tried another prefill worker: the reader broke; "
            "fell back to colocated: the reader broke"
        )
        assert core.verbs == ["colocated", "prefill", "prefill"]
        assert core.record.fallbacks == ["prefill: prefill_failed", "colocated: prefill_failed"]
        for step in ("prefill", "colocated"):
            labels = {"model": MODEL, "step": step, "reason": "prefill_failed"}
            assert core.registry.get_sample_value("pdserve_fallbacks_total", labels) == 1


@on_virtual_time
async def test_a_prefill_worker_that_dies_is_left_at_once() -> None:
    (reader,), gate = prefills(), Gate()
    async with running(reader, *decodes()) as core:
        reader.prefills.append([gate])
        asking = asyncio.create_task(core.ask(mode=DISAGGREGATED))
        await gate.reached.wait()
        reader.stop()
        gate.open()  # its call ends as a broken connection does
        given = await asking
        assert_complete(given)
        assert given.route.reason.endswith("fell back to colocated: the prefill worker was lost")


@on_virtual_time
async def test_a_handle_of_a_process_that_was_restarted_is_not_decoded_from() -> None:
    (reader,), gate = prefills(), Gate()
    async with running(reader, *decodes()) as core:
        reader.prefills.append([gate])
        asking = asyncio.create_task(core.ask(mode=DISAGGREGATED))
        await gate.reached.wait()
        reader.restart()
        await asyncio.sleep(2 * RECONNECT_S)
        gate.open()
        given = await asking
        assert_complete(given)
        assert core.verbs == ["colocated", "prefill"]
        assert core.record.fallbacks == ["colocated: prefill_failed"]


@on_virtual_time
async def test_a_prefill_worker_that_falls_silent_is_left_with_its_call() -> None:
    (reader,), gate = prefills(), Gate()
    async with running(reader, *decodes()) as core:
        reader.prefills.append([gate])
        asking = asyncio.create_task(core.ask(mode=DISAGGREGATED))
        await gate.reached.wait()
        reader.silent = True
        begun = asyncio.get_running_loop().time()
        given = await asking  # the gate was never opened
        assert asyncio.get_running_loop().time() - begun <= HEARTBEAT_S + SUSPICION_S
        assert_complete(given)
        assert given.route.reason.endswith("fell back to colocated: the prefill worker is silent")


@pytest.mark.parametrize("mode", [Mode.COLOCATED, DISAGGREGATED])
@on_virtual_time
async def test_a_decode_worker_that_falls_silent_is_replaced(mode: Mode) -> None:
    writers, gate = decodes(2), Gate()
    async with running(*prefills(), *writers) as core:
        writers[0].starts.append([gate])
        asking = asyncio.create_task(core.ask(mode=mode))
        await gate.reached.wait()
        core.fakes_by_id[core.record.decode_worker].silent = True
        assert_complete(await asking)
        assert core.record.fallbacks == ["decode: decode_failed"]


@pytest.mark.parametrize(
    "reason", [ErrorReason.INVALID_ARGUMENT, ErrorReason.CONTEXT_LENGTH_EXCEEDED]
)
@on_virtual_time
async def test_what_a_prefill_worker_refuses_for_good_is_the_answer(reason: ErrorReason) -> None:
    readers = prefills(2)
    async with running(*readers, *decodes()) as core:
        readers[0].prefills.append([prefill_error(reason)])
        with pytest.raises(PrefillError, match="the reader broke") as refusal:
            await core.ask(mode=DISAGGREGATED)
        assert refusal.value.reason is reason
        assert core.verbs == ["prefill"]


@on_virtual_time
async def test_without_fallback_the_prefill_worker_s_own_error_is_the_answer() -> None:
    readers = prefills(2)
    async with running(*readers, *decodes(), fallback=Fallback.FAIL) as core:
        readers[0].prefills.extend([[prefill_error()], [prefill_error(ErrorReason.DRAINING)]])
        with pytest.raises(PrefillError, match="the reader broke") as failure:
            await core.ask(mode=DISAGGREGATED)
        assert failure.value.reason is ErrorReason.DRAINING
        assert core.verbs == ["prefill", "prefill"]
        assert core.access[-1]["outcome"] == "draining"


@on_virtual_time
async def test_an_error_is_not_its_own_cause() -> None:
    """Those who print chains of causes would never end."""
    (reader,) = prefills()
    async with running(reader, *decodes(), fallback=Fallback.FAIL) as core:
        reader.prefills.append([prefill_error()])
        with pytest.raises(PrefillError) as failure:
            await core.ask(mode=DISAGGREGATED)
        chain: list[BaseException] = []
        link: BaseException | None = failure.value
        while link is not None:
            assert link not in chain
            chain.append(link)
            link = link.__cause__ or link.__context__


# The hand-off fails.


@pytest.mark.parametrize("reason", KV_REASONS, ids=lambda reason: reason.label)
@on_virtual_time
async def test_a_refused_hand_off_falls_back_to_the_same_decode_worker(
    reason: ErrorReason,
) -> None:
    (reader,), (writer,) = prefills(), decodes()
    async with running(reader, writer) as core:
        writer.starts.append([decode_error(reason)])
        given = await core.ask(mode=DISAGGREGATED)
        assert_complete(given)
        assert given.route.reason.endswith("fell back to colocated: the writer broke")
        assert core.verbs == ["colocated", "decode", "prefill"]
        assert core.record.fallbacks == [f"colocated: {reason.label}"]


@pytest.mark.parametrize("reason", KV_REASONS, ids=lambda reason: reason.label)
@on_virtual_time
async def test_a_refused_hand_off_is_the_answer_without_fallback(reason: ErrorReason) -> None:
    (writer,) = decodes()
    async with running(*prefills(), writer, fallback=Fallback.FAIL) as core:
        writer.starts.append([decode_error(reason)])
        with pytest.raises(DecodeError) as failure:
            await core.ask(mode=DISAGGREGATED)
        assert failure.value.reason is reason
        assert core.verbs == ["decode", "prefill"]


@on_virtual_time
async def test_a_failed_transfer_is_tried_by_the_next_transport_of_the_same_pair() -> None:
    (reader, _), writers = prefills(2, transports=BOTH), decodes(2, transports=BOTH)
    async with running(reader, _, *writers) as core:
        writers[0].starts.append([decode_error(ErrorReason.KV_TRANSFER_FAILED)])
        given = await core.ask(mode=DISAGGREGATED)
        assert_complete(given)
        assert given.route.mode is DISAGGREGATED
        assert given.route.reason == (
            "disaggregated: asked for by the request; tried again over grpc: the writer broke"
        )
        assert core.fakes_by_id[core.record.prefill_worker].transports[-2:] == ["nixl", "grpc"]
        assert len(set(core.asked("prefill"))) == len(set(core.asked("decode"))) == 1
        assert core.record.fallbacks == ["transport: kv_transfer_failed"]


@on_virtual_time
async def test_the_whole_ladder_is_climbed_down_step_by_step() -> None:
    readers, (writer,) = prefills(2, transports=BOTH), decodes(transports=BOTH)
    async with running(*readers, writer) as core:
        writer.starts.extend([[decode_error(ErrorReason.KV_TRANSFER_FAILED)]] * 4)
        given = await core.ask(mode=DISAGGREGATED)
        assert_complete(given)
        assert given.route.reason == (
            "disaggregated: asked for by the request; "
            "tried again over grpc: the writer broke; "
            "tried another prefill worker: the writer broke; "
            "tried again over grpc: the writer broke; "
            "fell back to colocated: the writer broke"
        )
        assert core.record.fallbacks == [
            f"{step}: kv_transfer_failed"
            for step in ("transport", "prefill", "transport", "colocated")
        ]


@on_virtual_time
async def test_the_ladder_ends_at_the_deadline() -> None:
    readers, (writer,) = prefills(2, transports=BOTH), decodes(transports=BOTH)
    async with running(*readers, writer) as core:
        writer.starts.extend([[0.4, decode_error(ErrorReason.KV_TRANSFER_FAILED)]] * 3)
        begun = asyncio.get_running_loop().time()
        with pytest.raises(PdserveError) as failure:
            await core.ask(mode=DISAGGREGATED, deadline=begun + 1)
        assert failure.value.reason is ErrorReason.DEADLINE_EXCEEDED
        assert asyncio.get_running_loop().time() - begun == pytest.approx(1, abs=0.01)
        assert len(core.record.fallbacks) == 2
        writer.starts.clear()


# The decode side fails before the first token.


@pytest.mark.parametrize("mode", [Mode.COLOCATED, DISAGGREGATED])
@pytest.mark.parametrize(
    "reason",
    [ErrorReason.DECODE_FAILED, ErrorReason.DRAINING, ErrorReason.INTERNAL],
    ids=lambda reason: reason.label,
)
@on_virtual_time
async def test_another_decode_worker_is_tried(reason: ErrorReason, mode: Mode) -> None:
    writers = decodes(2)
    async with running(*prefills(), *writers) as core:
        writers[0].starts.append([decode_error(reason)])
        given = await core.ask(mode=mode)
        assert_complete(given)
        assert given.route.mode is mode
        assert given.route.reason.endswith("; tried another decode worker: the writer broke")
        assert len(set(core.asked(core.verbs[0]))) == 2


@pytest.mark.parametrize("mode", [Mode.COLOCATED, DISAGGREGATED])
@on_virtual_time
async def test_a_decode_worker_that_dies_before_the_first_token_is_replaced(mode: Mode) -> None:
    writers, gate = decodes(2), Gate()
    async with running(*prefills(), *writers) as core:
        writers[0].starts.append([gate])
        asking = asyncio.create_task(core.ask(mode=mode))
        await gate.reached.wait()
        core.fakes_by_id[core.record.decode_worker].stop()
        assert_complete(await asking)
        assert core.record.fallbacks == ["decode: decode_failed"]


@on_virtual_time
async def test_a_prompt_is_not_read_on_for_a_decode_worker_that_died() -> None:
    (reader,), writers, gate = prefills(), decodes(2), Gate()
    async with running(reader, *writers) as core:
        reader.prefills.append([gate])
        asking = asyncio.create_task(core.ask(mode=DISAGGREGATED))
        await gate.reached.wait()
        core.fakes_by_id[core.record.decode_worker].stop()
        assert_complete(await asking)  # the gate was never opened
        assert core.verbs == ["decode", "prefill", "prefill"]


@on_virtual_time
async def test_the_last_decode_worker_s_own_error_is_the_answer() -> None:
    (writer,) = decodes()
    async with running(writer) as core:
        writer.starts.append([decode_error()])
        with pytest.raises(DecodeError, match="the writer broke"):
            await core.ask()
        assert core.record.state is State.FAILED


@on_virtual_time
async def test_attempts_are_bounded() -> None:
    writers = decodes(MAX_ATTEMPTS + 1)
    async with running(*writers) as core:
        writers[0].starts.extend([[decode_error()]] * MAX_ATTEMPTS)
        with pytest.raises(DecodeError, match="the writer broke"):
            await core.ask()
        assert len(set(core.asked("colocated"))) == MAX_ATTEMPTS


@on_virtual_time
async def test_a_decode_worker_without_room_sends_the_hand_off_to_another() -> None:
    writers = decodes(2)
    async with running(*prefills(), *writers) as core:
        writers[0].reservations.append([decode_error(ErrorReason.NO_ROOM)])
        given = await core.ask(mode=DISAGGREGATED)
        assert_complete(given)
        assert core.verbs == ["decode", "prefill"]


@on_virtual_time
async def test_where_no_decode_worker_has_room_the_request_waits_there_colocated() -> None:
    (writer,) = decodes()
    async with running(*prefills(), writer) as core:
        writer.reservations.append([decode_error(ErrorReason.NO_ROOM)])
        given = await core.ask(mode=DISAGGREGATED)
        assert_complete(given)
        assert given.route.mode is Mode.COLOCATED
        assert core.record.fallbacks == ["colocated: no_room"]


@on_virtual_time
async def test_where_no_decode_worker_has_room_that_is_the_answer_without_fallback() -> None:
    (writer,) = decodes()
    async with running(*prefills(), writer, fallback=Fallback.FAIL) as core:
        writer.reservations.append([decode_error(ErrorReason.NO_ROOM)])
        with pytest.raises(DecodeError) as failure:
            await core.ask(mode=DISAGGREGATED)
        assert failure.value.reason is ErrorReason.NO_ROOM


@on_virtual_time
async def test_a_colocated_request_that_can_never_fit_is_told_so() -> None:
    (writer,) = decodes()
    async with running(writer) as core:
        writer.starts.append([decode_error(ErrorReason.NO_ROOM)])
        with pytest.raises(DecodeError) as failure:
            await core.ask()
        assert failure.value.reason is ErrorReason.NO_ROOM


# After the first token.


@pytest.mark.parametrize("mode", [Mode.COLOCATED, DISAGGREGATED])
@on_virtual_time
async def test_without_recoveries_a_death_in_mid_stream_is_told_once(mode: Mode) -> None:
    writers, gate = decodes(2), Gate()
    async with running(*prefills(), *writers, max_recoveries=0) as core:
        writers[0].starts.append([first_delta(), gate])
        stream = await core.open(mode=mode)
        assert (await anext(stream)).text == "first "
        core.fakes_by_id[core.record.decode_worker].stop()
        with pytest.raises(DecodeError) as failure:
            await anext(stream)
        assert failure.value.reason is ErrorReason.DECODE_FAILED
        with pytest.raises(StopAsyncIteration):
            await anext(stream)
        await stream.aclose()
        assert len(core.asked(core.verbs[0])) == 1, "tried again with tokens out"
        assert [entry["outcome"] for entry in core.access] == ["decode_failed"]


@on_virtual_time
async def test_what_was_written_before_the_death_is_still_read() -> None:
    (writer,), gate = decodes(), Gate()
    async with running(writer, max_recoveries=0) as core:
        writer.starts.append([first_delta("a"), first_delta("b"), gate])
        stream = await core.open()
        await gate.reached.wait()
        writer.stop()
        await settle()
        assert [(await anext(stream)).text for _ in range(2)] == ["a", "b"]
        with pytest.raises(DecodeError):
            await anext(stream)
        await stream.aclose()


@on_virtual_time
async def test_a_prefill_worker_that_dies_in_mid_stream_is_not_noticed() -> None:
    (reader,), (writer,), gate = prefills(), decodes(), Gate()
    async with running(reader, writer) as core:
        writer.starts.append([first_delta(""), gate])
        asking = asyncio.create_task(core.ask(mode=DISAGGREGATED))
        await gate.reached.wait()
        reader.stop()
        await settle()
        gate.open()
        assert_complete(await asking)

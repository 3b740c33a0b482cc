"""Plans carried out where nothing breaks: what goes where, and what is held for how long."""

from __future__ import annotations

import asyncio

from coordinator.lifecycle import State
from pdserve.errors import ErrorReason
from pdserve.types import Load, Mode, Usage
from tests.support.core import assert_complete, running
from tests.support.fake_script import (
    ANSWER_TOKENS,
    CACHED_AT_PREFILL,
    Gate,
    decode_error,
    first_delta,
)
from tests.support.fake_worker import MODEL, decodes, prefills
from tests.support.virtual_time import on_virtual_time, settle

DISAGGREGATED = Mode.DISAGGREGATED


@on_virtual_time
async def test_a_colocated_request_goes_to_the_decode_worker_alone() -> None:
    async with running(*prefills(), *decodes()) as core:
        given = await core.ask()
        assert_complete(given)
        assert given.route.mode is Mode.COLOCATED
        assert core.verbs == ["colocated"]
        assert core.record.state is State.FINISHED


@on_virtual_time
async def test_a_disaggregated_request_is_read_by_one_and_written_by_the_other() -> None:
    async with running(*prefills(), *decodes()) as core:
        given = await core.ask(mode=DISAGGREGATED)
        assert_complete(given)
        assert given.route.mode is DISAGGREGATED
        assert core.verbs == ["decode", "prefill"]
        assert (core.record.prefill_worker, core.record.decode_worker) == ("p1", "d1")


@on_virtual_time
async def test_room_is_reserved_for_prompt_and_answer() -> None:
    (writer,) = decodes()
    async with running(*prefills(), writer) as core:
        await core.ask("12345", max_tokens=8, mode=DISAGGREGATED)
        assert writer.reserved[-1] == 13


@on_virtual_time
async def test_no_prompt_is_read_before_there_is_room() -> None:
    (reader,), (writer,), gate = prefills(), decodes(), Gate()
    async with running(reader, writer) as core:
        writer.reservations.append([gate])
        asking = asyncio.create_task(core.ask(mode=DISAGGREGATED))
        await gate.reached.wait()
        assert core.verbs == []
        gate.open()
        assert_complete(await asking)


@on_virtual_time
async def test_a_prompt_counts_where_it_will_be_read_before_there_is_room() -> None:
    """Else all that come at once would be planned for the same reader."""
    (writer,), gate = decodes(), Gate()
    async with running(*prefills(), writer) as core:
        writer.reservations.append([gate])
        asking = asyncio.create_task(core.ask("12345", mode=DISAGGREGATED))
        await gate.reached.wait()
        (reader,) = core.fleet.snapshot(MODEL).prefill
        assert (reader.outstanding_prompts, reader.outstanding_tokens) == (1, 5)
        gate.open()
        await asking
        (reader,) = core.fleet.snapshot(MODEL).prefill
        assert (reader.outstanding_prompts, reader.outstanding_tokens) == (0, 0)


@on_virtual_time
async def test_the_lease_ends_with_the_first_token() -> None:
    (reader,), (writer,), gate = prefills(), decodes(), Gate()
    async with running(reader, writer) as core:
        writer.starts.append([gate])
        opening = asyncio.create_task(core.open(mode=DISAGGREGATED))
        await gate.reached.wait()
        assert len(reader.leases) == 1
        gate.open()
        stream = await opening
        await settle()
        assert not reader.leases
        await stream.aclose()


@on_virtual_time
async def test_the_cached_tokens_of_a_hand_off_are_the_prefill_worker_s() -> None:
    async with running(*prefills(), *decodes()) as core:
        given = await core.ask("12345", mode=DISAGGREGATED)
        assert given.usage == Usage(5, ANSWER_TOKENS, CACHED_AT_PREFILL)
        assert core.record.usage == given.usage


@on_virtual_time
async def test_the_cached_tokens_after_a_fall_back_are_the_decode_worker_s() -> None:
    (writer,) = decodes()
    async with running(*prefills(), writer) as core:
        writer.starts.append([decode_error(ErrorReason.KV_EXPIRED)])
        given = await core.ask("12345", mode=DISAGGREGATED)
        assert given.usage == Usage(5, ANSWER_TOKENS, 0)


@on_virtual_time
async def test_closing_again_changes_nothing() -> None:
    async with running(*decodes()) as core:
        stream = await core.open()
        for _ in range(2):
            await stream.aclose()
        assert core.record.state is State.CANCELLED


@on_virtual_time
async def test_a_closed_answer_has_nothing_more_to_read() -> None:
    async with running(*decodes()) as core:
        stream = await core.open()
        await stream.aclose()
        assert [delta async for delta in stream] == []


@on_virtual_time
async def test_draining_workers_keep_what_they_have() -> None:
    (writer,), gate = decodes(), Gate()
    async with running(writer) as core:
        writer.starts.append([first_delta(""), gate])
        asking = asyncio.create_task(core.ask())
        await gate.reached.wait()
        writer.report(Load(draining=True))
        await settle()
        gate.open()
        assert_complete(await asking)

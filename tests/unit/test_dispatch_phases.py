"""Where the time of a request went, phase by phase."""

from __future__ import annotations

import asyncio

import pytest

from pdserve.config import GatewayConfig
from pdserve.types import Mode
from tests.support.core import running
from tests.support.fake_script import prefill_error
from tests.support.fake_worker import decodes, prefills
from tests.support.virtual_time import on_virtual_time

DISAGGREGATED = Mode.DISAGGREGATED


@on_virtual_time
async def test_the_phases_of_a_hand_off_add_up_to_the_time_of_its_first_token() -> None:
    (reader,), (writer,) = prefills(), decodes()
    async with running(reader, writer) as core:
        writer.reservations.append([1.0])
        reader.prefills.append([2.0])
        writer.starts.append([4.0])
        await core.ask(mode=DISAGGREGATED)
        record = core.record
        assert record.phases == pytest.approx(
            {
                "queue": 0,
                "tokenise": 0,
                "reserve": 1,
                "prefill_queue": 1.75,
                "prefill": 0.25,
                "decode_queue": 3.375,
                "transfer": 0.5,
                "first_step": 0.125,
                "decode": 0,
            }
        )
        assert record.first_token is not None
        assert sum(record.phases.values()) == pytest.approx(record.first_token - record.received)


@on_virtual_time
async def test_the_time_of_failed_attempts_is_a_phase_of_its_own() -> None:
    (reader,), (writer,) = prefills(), decodes()
    async with running(reader, writer) as core:
        reader.prefills.append([3.0, prefill_error()])
        writer.starts.append([1.0])
        await core.ask(mode=DISAGGREGATED)
        record = core.record
        assert record.phases["failed_attempts"] == pytest.approx(3)
        assert record.phases["decode_queue"] == pytest.approx(0.875)
        assert record.first_token is not None
        assert sum(record.phases.values()) == pytest.approx(record.first_token - record.received)


@on_virtual_time
async def test_the_wait_for_a_place_is_a_phase() -> None:
    async with running(*decodes(), gateway=GatewayConfig(max_running=1)) as core:
        first = await core.open()
        asking = asyncio.create_task(core.ask())
        await asyncio.sleep(5)
        await first.aclose()
        await asking
        assert core.record.phases["queue"] == pytest.approx(5)

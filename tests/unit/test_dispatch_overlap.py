"""Over gRPC the blocks of a prompt travel while others of it are read."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import pytest

from pdserve.errors import ErrorReason
from pdserve.types import Mode, Usage
from tests.support.core import assert_complete, running
from tests.support.fake_script import (
    ANSWER_TOKENS,
    CACHED_AT_PREFILL,
    Gate,
    decode_error,
    prefill_error,
)
from tests.support.fake_worker import decodes, prefills
from tests.support.virtual_time import on_virtual_time, settle

DISAGGREGATED = Mode.DISAGGREGATED
OVER_GRPC: dict[str, Any] = {"transports": ("grpc",)}


@on_virtual_time
async def test_over_grpc_the_sequence_starts_while_its_prompt_is_read() -> None:
    (reader,), writers, gate = prefills(**OVER_GRPC), decodes(**OVER_GRPC), Gate()
    async with running(reader, *writers) as core:
        reader.prefills.append([gate])
        asking = asyncio.create_task(core.ask("12345", mode=DISAGGREGATED))
        await gate.reached.wait()
        await settle()
        assert core.verbs == ["decode", "prefill"]
        assert not asking.done()
        gate.open()
        given = await asking
        assert_complete(given, "12345")
        assert given.usage == Usage(5, ANSWER_TOKENS, CACHED_AT_PREFILL)
        assert core.verbs == ["decode", "prefill"]


@on_virtual_time
async def test_over_nixl_the_sequence_starts_when_its_prompt_is_read() -> None:
    (reader,), gate = prefills(), Gate()
    async with running(reader, *decodes()) as core:
        reader.prefills.append([gate])
        asking = asyncio.create_task(core.ask(mode=DISAGGREGATED))
        await gate.reached.wait()
        await settle()
        assert core.verbs == ["prefill"]
        gate.open()
        assert_complete(await asking)


@on_virtual_time
async def test_a_sequence_whose_prompt_cannot_be_read_is_aborted() -> None:
    (reader,), (writer,), gate = prefills(**OVER_GRPC), decodes(**OVER_GRPC), Gate()
    async with running(reader, writer) as core:
        reader.prefills.append([gate, prefill_error()])
        writer.starts.append([Gate()])
        asking = asyncio.create_task(core.ask(mode=DISAGGREGATED))
        await gate.reached.wait()
        await settle()
        assert len(writer.sequences) == 1
        gate.open()
        given = await asking
        assert_complete(given)
        assert given.route.reason.endswith("fell back to colocated: the reader broke")
        assert core.record.fallbacks == ["colocated: prefill_failed"]


@pytest.mark.parametrize(
    ("prefill", "cause"),
    [
        ([0.2, prefill_error()], "prefill_failed"),
        ([prefill_error()], "prefill_failed"),
        ([3600.0], "kv_transfer_failed"),
        ([0.2], "kv_transfer_failed"),
    ],
)
@on_virtual_time
async def test_the_prefill_worker_knows_best_why_its_blocks_do_not_come(
    prefill: list[Any], cause: str
) -> None:
    (reader,), (writer,) = prefills(**OVER_GRPC), decodes(**OVER_GRPC)
    async with running(reader, writer) as core:
        reader.prefills.append(prefill)
        writer.starts.append([decode_error(ErrorReason.KV_TRANSFER_FAILED)])
        began = time.monotonic()
        assert_complete(await core.ask(mode=DISAGGREGATED))
        assert core.record.fallbacks == [f"colocated: {cause}"]
        assert time.monotonic() - began < 1


@on_virtual_time
async def test_a_decode_worker_that_refuses_at_once_stops_the_prefill() -> None:
    (reader,), (writer,) = prefills(**OVER_GRPC), decodes(**OVER_GRPC)
    async with running(reader, writer) as core:
        reader.prefills.append([3600.0])
        writer.starts.append([decode_error(ErrorReason.KV_ALTERED)])
        began = time.monotonic()
        assert_complete(await core.ask(mode=DISAGGREGATED))
        assert core.record.fallbacks == ["colocated: kv_altered"]
        assert time.monotonic() - began < 0.1

"""Pairs are taken out of traffic by failures in a row, and come back by a probe."""

from __future__ import annotations

import asyncio

import pytest

from coordinator.policy.pairs import RETRY_S
from pdserve.errors import DecodeError, ErrorReason, PdserveError, PrefillError
from pdserve.types import Mode
from tests.support.core import Core, running
from tests.support.fake_script import Gate
from tests.support.proving import PROVEN, decode, prefill, verdicts
from tests.support.virtual_time import on_virtual_time, settle


async def fail(core: Core, error: PrefillError | DecodeError) -> None:
    """One disaggregated request that fails so, and is answered colocated."""
    reader, writer = core.fakes_by_id["p"], core.fakes_by_id["d"]
    if isinstance(error, PrefillError):
        reader.prefills.append([error])
    elif error.reason is ErrorReason.NO_ROOM:
        writer.reservations.append([error])
    else:
        writer.starts.append([error])
    assert (await core.ask(mode=Mode.DISAGGREGATED)).route.mode is Mode.COLOCATED


TRANSFER_FAILED = DecodeError(ErrorReason.KV_TRANSFER_FAILED, "it broke")


@pytest.mark.parametrize(
    "error", [TRANSFER_FAILED, PrefillError(ErrorReason.PREFILL_FAILED, "it broke")]
)
@on_virtual_time
async def test_failures_in_a_row_quarantine_a_pair_until_a_probe_goes_through(
    error: PrefillError | DecodeError,
) -> None:
    async with running(prefill(), decode(), quarantine_after=2) as core:
        await fail(core, error)
        await core.ask(mode=Mode.DISAGGREGATED)  # goes through, so that counting begins anew
        await fail(core, error)
        assert verdicts(core) == {("p", "d"): PROVEN}
        await fail(core, error)
        words = "2 requests failed in a row, the last one: it broke"
        assert verdicts(core) == {("p", "d"): ("quarantined", words)}
        shown = core.ops.fleet()["pairs"][0]
        assert (shown["state"], shown["failures"], shown["next_probe_s"]) == ("quarantined", 2, 2)
        assert b'pdserve_kv_pair_quarantines_total{transport="nixl"} 1.0' in core.ops.metrics()
        assert b'pdserve_kv_pairs{state="quarantined",transport="nixl"} 1.0' in core.ops.metrics()
        given = await core.ask(mode=Mode.DISAGGREGATED)
        assert given.route.reason == (
            "disaggregated: asked for by the request; fell back to colocated: "
            "no proven pair of prefill and decode workers is ready"
        )
        assert core.record.fallbacks == ["colocated: no_worker"]
        await asyncio.sleep(RETRY_S)
        await settle()
        assert verdicts(core) == {("p", "d"): PROVEN}
        assert (await core.ask(mode=Mode.DISAGGREGATED)).route.mode is Mode.DISAGGREGATED


@on_virtual_time
async def test_a_quarantined_pair_is_probed_ever_more_rarely() -> None:
    reader = prefill()
    async with running(reader, decode(), quarantine_after=1) as core:
        reader.prefills.extend([[PrefillError(ErrorReason.PREFILL_FAILED, "it broke")]] * 4)
        await core.ask(mode=Mode.DISAGGREGATED)
        # Probes after 2, 4, 8 s fail, that after 16 s goes through.
        await asyncio.sleep(29.9)
        assert not core.fleet.snapshot("tiny").pairs
        assert not reader.prefills
        await asyncio.sleep(0.2)
        assert core.fleet.snapshot("tiny").pairs


@pytest.mark.parametrize(
    "error",
    [
        DecodeError(ErrorReason.NO_ROOM, "it is full"),
        PrefillError(ErrorReason.DRAINING, "it drains"),
    ],
)
@on_virtual_time
async def test_a_busy_worker_quarantines_nothing(error: PrefillError | DecodeError) -> None:
    async with running(prefill(), decode(), quarantine_after=1) as core:
        await fail(core, error)
        assert verdicts(core) == {("p", "d"): PROVEN}


@on_virtual_time
async def test_what_is_the_client_s_own_quarantines_nothing() -> None:
    reader = prefill()
    async with running(reader, decode(), quarantine_after=1) as core:
        reader.prefills.append([PrefillError(ErrorReason.INVALID_ARGUMENT, "no")])
        with pytest.raises(PrefillError):
            await core.ask(mode=Mode.DISAGGREGATED)
        gate = Gate()
        reader.prefills.append([gate])
        asking = asyncio.create_task(core.ask(mode=Mode.DISAGGREGATED))
        await gate.reached.wait()
        asking.cancel()
        await asyncio.wait([asking])
        reader.prefills.append([Gate()])
        deadline = asyncio.get_running_loop().time() + 1
        with pytest.raises(PdserveError, match="deadline"):
            await core.ask(mode=Mode.DISAGGREGATED, deadline=deadline)
        assert verdicts(core) == {("p", "d"): PROVEN}

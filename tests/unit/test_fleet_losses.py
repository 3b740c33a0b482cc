"""Workers that are lost, silent or fail, and come back."""

from __future__ import annotations

import asyncio

import pytest

from coordinator.fleet import RECONNECT_S
from coordinator.policy.health import WorkerState
from coordinator.policy.pairs import RETRY_S, Pair
from coordinator.worker import SILENCE_S, SUSPICION_S
from pdserve.errors import DecodeError, ErrorReason, PrefillError, RejectedError
from pdserve.types import Mode
from pdserve.worker_service import HEARTBEAT_S
from tests.support.core import running
from tests.support.fake_script import Gate, first_delta
from tests.support.fleet_view import BLOCK_TOKENS, LONG_TEXT, cached, decode, prefill, ready
from tests.support.virtual_time import VirtualTimeLoop, on_virtual_time, settle

RECONNECTED_S = RECONNECT_S + 0.01
BROKEN = DecodeError(ErrorReason.DECODE_FAILED, "it broke")
PREFILL_BROKEN = PrefillError(ErrorReason.PREFILL_FAILED, "it broke")


# Losing and finding workers.


@on_virtual_time
async def test_a_lost_worker_leaves_at_once_with_its_pairs() -> None:
    worker = prefill()
    async with running(worker, decode()) as core:
        lost = core.worker("p")
        worker.stop()
        await settle()
        assert lost.state is WorkerState.LOST
        assert ready(core) == ([], ["d"], set())
        assert not list(core.fleet.pairs)
        assert core.fleet.by_id("p") is None


@on_virtual_time
async def test_a_broken_session_alone_is_a_lost_worker() -> None:
    worker = decode()
    async with running(worker) as core:
        for session in list(worker._sessions):
            session.broken.set()
        await settle()
        assert core.worker("d").state is WorkerState.LOST
        await asyncio.sleep(RECONNECTED_S)
        assert core.worker("d").state is WorkerState.READY


@on_virtual_time
async def test_a_worker_that_is_away_at_first_is_found_later() -> None:
    worker = decode()
    worker.stop()
    async with running(worker) as core:
        (entry,) = core.fleet.workers()
        assert entry.state is WorkerState.CONNECTING
        assert entry.tried
        assert entry.detail == "the worker cannot be reached"
        worker.restart()
        await asyncio.sleep(RECONNECTED_S)
        assert ready(core)[1] == ["d"]


@on_virtual_time
async def test_a_restarted_worker_must_prove_itself_anew() -> None:
    worker, gate = decode(), Gate()
    async with running(prefill(), worker) as core:
        worker.restart()
        worker.starts.append([gate])
        await gate.reached.wait()
        assert core.worker("d").state is WorkerState.LIVE
        assert ready(core) == (["p"], [], set())
        gate.open()
        await settle()
        assert ready(core) == (["p"], ["d"], {("p", "d")})


@on_virtual_time
async def test_a_restarted_prefill_worker_is_in_no_proven_pair() -> None:
    worker, gate = prefill(), Gate()
    async with running(worker, decode()) as core:
        worker.restart()
        worker.prefills.append([gate])
        await gate.reached.wait()
        assert ready(core) == ([], ["d"], set())
        gate.open()
        await settle()
        assert ready(core) == (["p"], ["d"], {("p", "d")})


@on_virtual_time
async def test_a_verdict_on_a_process_that_is_gone_is_dropped() -> None:
    worker = prefill()
    async with running(worker, decode()) as core:
        (old,) = core.fleet.pairs
        worker.restart()
        await asyncio.sleep(RECONNECTED_S)
        core.fleet.pairs.probe_passed(old, "")
        assert set(core.fleet.pairs) == {Pair(("p", "2"), ("d", "1"), "nixl")}


@on_virtual_time
async def test_a_worker_that_only_lost_its_network_must_prove_itself_anew_too() -> None:
    worker = decode()
    async with running(worker) as core:
        worker.stop()
        await settle()
        worker.up = True
        await asyncio.sleep(RECONNECTED_S)
        assert core.worker("d").proven
        assert len(worker.served) == 2


@on_virtual_time
async def test_a_worker_that_only_lost_its_network_keeps_its_prefixes() -> None:
    worker = decode()
    async with running(worker) as core:
        await core.ask(LONG_TEXT)
        worker.stop()
        await settle()
        worker.up = True
        await asyncio.sleep(RECONNECTED_S)
        assert cached(core, LONG_TEXT) == {"d": 3 * BLOCK_TOKENS}


# Silence.


@on_virtual_time
async def test_a_worker_that_is_silent_is_suspected_then_lost_and_comes_back() -> None:
    worker = decode()
    async with running(prefill(), worker) as core:
        await asyncio.sleep(60)
        assert ready(core) == (["p"], ["d"], {("p", "d")})
        worker.silent = True
        await asyncio.sleep(HEARTBEAT_S + SUSPICION_S / 2)
        assert core.worker("d").state is WorkerState.READY
        await asyncio.sleep(SUSPICION_S / 2 + 0.25)
        assert core.worker("d").state is WorkerState.SILENT
        assert ready(core)[1] == []
        await asyncio.sleep(SILENCE_S - SUSPICION_S)
        assert core.worker("d").state is WorkerState.LOST
        assert core.worker("d").detail == "nothing was heard of the worker for 5 s"
        assert ready(core) == (["p"], [], set())
        worker.silent = False
        await asyncio.sleep(RECONNECTED_S + HEARTBEAT_S)
        assert ready(core) == (["p"], ["d"], {("p", "d")})
        assert worker.served.count(worker.served[0]) == 1, "proven anew, by new probes"


@on_virtual_time
async def test_what_runs_on_a_worker_that_is_heard_again_in_time_goes_on() -> None:
    worker, gate = decode(), Gate()
    async with running(worker) as core:
        worker.starts.append([first_delta(), gate])
        stream = await core.open()
        await gate.reached.wait()
        worker.silent = True
        await asyncio.sleep(HEARTBEAT_S + SUSPICION_S + 0.5)
        assert core.worker("d").state is WorkerState.SILENT
        with pytest.raises(RejectedError, match="no decode worker is ready"):
            await core.ask()
        worker.silent = False
        await asyncio.sleep(2 * HEARTBEAT_S)
        assert core.worker("d").state is WorkerState.READY
        gate.open()
        assert [delta async for delta in stream][-1].finish_reason is not None
        await stream.aclose()
        assert len(worker.served) == 2, "the probe of the start and this request, and no new probe"


@on_virtual_time
async def test_prompts_that_silence_sends_elsewhere_count_against_nobody() -> None:
    reader = prefill()
    async with running(reader, decode(), quarantine_after=2) as core:
        reader.prefills.extend([[Gate()]] * 3)
        asking = [asyncio.create_task(core.ask(mode=Mode.DISAGGREGATED)) for _ in range(3)]
        reader.silent = True
        await asyncio.sleep(HEARTBEAT_S + SUSPICION_S + 0.5)
        await asyncio.gather(*asking)
        reader.silent = False
        await asyncio.sleep(2 * HEARTBEAT_S)
        assert ready(core) == (["p"], ["d"], {("p", "d")})
        assert reader.served.count(("prefill", core.record.request_id)) == 1


# Quarantine.


@on_virtual_time
async def test_a_decode_worker_that_fails_in_a_row_is_quarantined_until_a_probe_passes() -> None:
    worker = decode("d1")
    async with running(worker, decode("d2"), quarantine_after=2) as core:
        for _ in range(2):
            worker.starts.append([BROKEN])
        while worker.starts:
            await core.ask()
        assert core.worker("d1").state is WorkerState.QUARANTINED
        assert core.worker("d1").detail == "2 requests failed in a row, the last one: it broke"
        assert ready(core)[1] == ["d2"]
        await asyncio.sleep(RETRY_S)
        await settle()
        assert core.worker("d1").state is WorkerState.READY
        assert core.worker("d1").detail == ""


@on_virtual_time
async def test_a_prefill_worker_that_fails_over_all_pairs_is_quarantined_with_them() -> None:
    reader = prefill()
    async with running(reader, decode("d1"), decode("d2"), quarantine_after=2) as core:
        reader.prefills.extend([[PREFILL_BROKEN], [PREFILL_BROKEN], [PREFILL_BROKEN]])
        for _ in range(2):
            await core.ask(mode=Mode.DISAGGREGATED)
        assert core.worker("p").state is WorkerState.QUARANTINED
        assert ready(core) == ([], ["d1", "d2"], set())
        await asyncio.sleep(RETRY_S)
        await settle()
        assert core.worker("p").state is WorkerState.READY, "one of its pairs went through"


@on_virtual_time
async def test_what_a_client_did_wrong_counts_against_nobody() -> None:
    worker = decode()
    async with running(worker, quarantine_after=1) as core:
        worker.starts.append([DecodeError(ErrorReason.INVALID_ARGUMENT, "no such thing")])
        with pytest.raises(DecodeError):
            await core.ask()
        assert core.worker("d").state is WorkerState.READY


@on_virtual_time
async def test_requests_that_end_with_their_session_quarantine_nobody() -> None:
    worker, gates = decode(), [Gate(), Gate()]
    async with running(worker, quarantine_after=2) as core:
        worker.starts.extend([gate] for gate in gates)
        asking = [asyncio.create_task(core.ask(str(gate))) for gate in gates]
        for gate in gates:
            await gate.reached.wait()
        for session in list(worker._sessions):
            session.broken.set()
        await asyncio.wait(asking)
        assert all(task.exception() is None for task in asking), "waits, and is tried again"
        assert not [entry for entry in core.logs if "quarantined" in entry["event"]]


@on_virtual_time
async def test_a_coordinator_that_stood_still_takes_nobody_for_silent() -> None:
    async with running(decode()) as core:
        loop = asyncio.get_running_loop()
        assert isinstance(loop, VirtualTimeLoop)
        loop.stand_still(10 * SILENCE_S)
        await asyncio.sleep(SILENCE_S)
        assert core.worker("d").state is WorkerState.READY
        assert [entry["event"] for entry in core.logs].count("worker connected") == 1

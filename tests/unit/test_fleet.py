"""Who may be given work, and what is known of them, as workers come, go and change."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest

from coordinator.fleet import RECONNECT_S
from coordinator.policy.health import WorkerState
from coordinator.policy.prefix import AGES_TO_CONFIRM
from pdserve.cached_blocks import CacheChange
from pdserve.config import ModelConfig
from pdserve.types import EngineWork, Load, Mode, Role, WorkerInfo
from pdserve.worker_service import HEARTBEAT_S
from tests.support.core import running
from tests.support.fake_script import Gate
from tests.support.fake_worker import MODEL, FakeWorker
from tests.support.fleet_view import (
    BLOCK_TOKENS,
    LONG_TEXT,
    blocks_of,
    cached,
    decode,
    prefill,
    ready,
)
from tests.support.virtual_time import on_virtual_time, settle

RECONNECTED_S = RECONNECT_S + 0.01


# What a snapshot holds.


@on_virtual_time
async def test_proven_workers_are_in_the_snapshot() -> None:
    async with running(prefill(), decode()) as core:
        assert ready(core) == (["p"], ["d"], {("p", "d")})


@on_virtual_time
async def test_a_worker_of_both_roles_is_in_both_pools() -> None:
    async with running(FakeWorker("w", Role.PREFILL, Role.DECODE)) as core:
        assert ready(core) == (["w"], ["w"], set())


@on_virtual_time
async def test_an_unproven_decode_worker_is_not() -> None:
    worker, gate = decode(), Gate()
    worker.starts.append([gate])
    async with running(worker) as core:
        assert core.worker("d").state is WorkerState.LIVE
        assert ready(core) == ([], [], set())
        gate.open()


@on_virtual_time
async def test_an_unproven_pair_is_not() -> None:
    worker, gate = prefill(), Gate()
    worker.prefills.append([gate])
    async with running(worker, decode()) as core:
        assert ready(core) == ([], ["d"], set())
        assert core.worker("p").state is WorkerState.LIVE
        gate.open()
        await settle()
        assert ready(core) == (["p"], ["d"], {("p", "d")})


@on_virtual_time
async def test_a_worker_of_another_model_is_not() -> None:
    models = (ModelConfig(name=MODEL), ModelConfig(name="other"))
    async with running(decode(), decode("d2", model="other"), models=models) as core:
        assert ready(core) == ([], ["d"], set())
        assert [view.worker_id for view in core.fleet.snapshot("other").decode] == ["d2"]


@on_virtual_time
async def test_how_much_a_worker_reads_is_in_the_snapshot_and_forgotten() -> None:
    worker = decode()
    async with running(worker) as core:

        async def reading(after_s: float, work: EngineWork) -> float:
            await asyncio.sleep(after_s)
            worker.report(Load(work=work))
            await settle()
            (view,) = core.fleet.snapshot(MODEL).decode
            return view.reading

        # 10,000 tokens of the 0.1 ms that a GPU is taken to need: 1 s, with a memory of 5 s.
        read = EngineWork(steps=1, seconds=1.01, prefill_tokens=10_000)
        assert await reading(60.0, read) == pytest.approx(1 / 5, rel=0.02)
        assert await reading(5.0, read) == pytest.approx(1 / 5 / 2.718, rel=0.02)


@on_virtual_time
async def test_a_draining_worker_is_not_until_it_stays_after_all() -> None:
    worker = decode()
    async with running(worker) as core:
        worker.report(Load(draining=True))
        await settle()
        assert core.worker("d").state is WorkerState.DRAINING
        assert ready(core)[1] == []
        worker.report(Load())
        await settle()
        assert ready(core)[1] == ["d"]


@on_virtual_time
async def test_the_load_is_the_last_one_reported() -> None:
    worker = decode()
    async with running(worker) as core:
        worker.report(Load(kv_usage=0.25))
        worker.report(Load(kv_usage=0.5))
        await settle()
        (view,) = core.fleet.snapshot(MODEL).decode
        assert view.context_tokens == 5_000


@on_virtual_time
async def test_what_is_outstanding_is_counted() -> None:
    worker, gate = decode(), Gate()
    async with running(worker) as core:
        worker.starts.append([gate])
        asking = asyncio.create_task(core.ask("12345"))
        await gate.reached.wait()
        (view,) = core.fleet.snapshot(MODEL).decode
        assert (view.outstanding_sequences, view.outstanding_tokens) == (1, 5)
        gate.open()
        await asking


@on_virtual_time
async def test_turns_are_taken_by_each_model_alone() -> None:
    models = (ModelConfig(name=MODEL), ModelConfig(name="other"))
    workers = decode("d1"), decode("d2"), decode("o1", model="other"), decode("o2", model="other")
    async with running(*workers, models=models) as core:
        for model in (MODEL, "other", MODEL, "other"):
            await core.ask(model=model)
        assert {record.decode_worker for record in core.records} == {"d1", "d2", "o1", "o2"}


# Names.


@on_virtual_time
async def test_a_second_worker_of_the_same_name_is_refused() -> None:
    first, second = decode(), decode()
    async with running(first, second) as core:
        entries = list(core.fleet.workers())
        assert [entry.state for entry in entries] == [WorkerState.READY, WorkerState.CONNECTING]
        assert entries[1].detail == "another worker is called 'd' too; give each its own id"
        await core.ask()
        assert second.served == []


@on_virtual_time
async def test_a_second_worker_of_the_same_name_takes_over_when_the_first_is_lost() -> None:
    first, second = decode(), decode()
    async with running(first, second) as core:
        first.stop()
        await asyncio.sleep(RECONNECTED_S)
        await core.ask()
        assert second.served[-1] == ("colocated", "r1")


# What is known of the model.


@on_virtual_time
async def test_the_shortest_context_of_the_model_s_workers_counts() -> None:
    workers = decode(context_length=500), prefill(context_length=400), decode("d3", model="other")
    async with running(*workers) as core:
        assert core.fleet.context_length(MODEL) == 400
        assert core.fleet.context_length("unheard-of") is None


@on_virtual_time
async def test_a_decode_worker_is_believed_to_hold_the_prompts_that_it_answered() -> None:
    async with running(decode()) as core:
        assert cached(core, LONG_TEXT) == {"d": 0}
        await core.ask(LONG_TEXT, cache_salt="mine")
        assert cached(core, LONG_TEXT, "mine") == {"d": 3 * BLOCK_TOKENS}
        assert cached(core, LONG_TEXT, "yours") == {"d": 0}


@on_virtual_time
async def test_a_hand_off_leaves_the_prompt_with_both_workers() -> None:
    async with running(prefill(), decode(), decode("d2")) as core:
        await core.ask(LONG_TEXT, mode=Mode.DISAGGREGATED)
        held = cached(core, LONG_TEXT)
        assert (held["p"], held["d"] + held["d2"]) == (3 * BLOCK_TOKENS, 3 * BLOCK_TOKENS)
        assert 0 in held.values()


@on_virtual_time
async def test_a_restarted_worker_holds_nothing() -> None:
    worker = decode()
    async with running(worker) as core:
        await core.ask(LONG_TEXT)
        worker.restart()
        await settle()
        assert cached(core, LONG_TEXT) == {}
        await asyncio.sleep(RECONNECTED_S)
        assert cached(core, LONG_TEXT) == {"d": 0}


# Faults.


class NonsenseWorker(FakeWorker):
    """Answers with what no version understands."""

    async def info(self) -> WorkerInfo:
        raise ValueError("no such enum")


@on_virtual_time
async def test_a_worker_that_talks_nonsense_ends_nothing_but_itself() -> None:
    async with running(NonsenseWorker("n", Role.DECODE), decode()) as core:
        await asyncio.sleep(RECONNECTED_S)
        entry = next(core.fleet.workers())
        assert (entry.tried, entry.connected, entry.detail) == (True, False, "internal error")
        await core.ask()


class SilentWorker(FakeWorker):
    """Never says how busy it is."""

    async def watch_load(self) -> AsyncIterator[Load]:
        await asyncio.Event().wait()
        yield Load()


@on_virtual_time
async def test_a_worker_gets_no_work_before_its_first_load_report() -> None:
    async with running(SilentWorker("s", Role.DECODE)) as core:
        (entry,) = core.fleet.workers()
        assert not entry.connected
        assert ready(core)[1] == []


# The end.


@on_virtual_time
async def test_the_clients_are_closed_when_the_fleet_ends() -> None:
    workers = prefill(), decode()
    async with running(*workers):
        pass
    assert all(worker.closed for worker in workers)


# What a worker tells of its cache.


@on_virtual_time
async def test_a_worker_that_tells_is_believed_and_what_it_does_not_confirm_is_dropped() -> None:
    worker = decode(tells_cache=True)
    async with running(worker) as core:
        await core.ask(LONG_TEXT)
        assert cached(core, LONG_TEXT) == {"d": 3 * BLOCK_TOKENS}, "until it has told"
        names = blocks_of(LONG_TEXT).chain(BLOCK_TOKENS)
        worker.tell(CacheChange(False, names[:2], ()))
        worker.tell(CacheChange(False, (), names[1:2]))
        await asyncio.sleep(AGES_TO_CONFIRM * HEARTBEAT_S + 0.01)
        assert cached(core, LONG_TEXT) == {"d": BLOCK_TOKENS}


@on_virtual_time
async def test_a_worker_that_tells_begins_anew_when_it_is_back() -> None:
    worker = decode(tells_cache=True)
    async with running(worker) as core:
        worker.tell(CacheChange(False, blocks_of(LONG_TEXT).chain(BLOCK_TOKENS), ()))
        await settle()
        assert cached(core, LONG_TEXT) == {"d": 3 * BLOCK_TOKENS}
        worker.stop()
        await settle()
        worker.up = True
        await asyncio.sleep(RECONNECTED_S)
        assert cached(core, LONG_TEXT) == {"d": 0}

"""What a fleet can take, summed up for admission; values worked out by hand."""

from __future__ import annotations

import pytest

from coordinator.capacity import FRESH_S, FleetCapacity
from pdserve.config import SimConfig
from pdserve.types import Load, Role
from tests.support.local_fleet import MODEL, LocalWorker, local_fleet
from tests.support.virtual_time import on_virtual_time

SIM = SimConfig()


@on_virtual_time
async def test_it_is_that_of_the_ready_workers_as_of_a_moment_ago() -> None:
    workers = [LocalWorker("p", Role.PREFILL, sim=SIM), LocalWorker("d", Role.DECODE, sim=SIM)]
    async with local_fleet(*workers, mode="auto") as fleet:
        model = fleet.dispatcher.models[MODEL]
        now = 0.0
        capacity = FleetCapacity(fleet.fleet, model, lambda: now)
        first = capacity()
        reader, writer = (fleet.fleet.by_id(id_) for id_ in "pd")
        assert reader is not None and reader.info is not None
        assert writer is not None and writer.info is not None
        assert first.sequences == writer.info.max_sequences
        assert first.free_kv_tokens == writer.info.kv_capacity_tokens
        estimates = fleet.fleet.estimators[MODEL].estimates
        for role, worker in ((Role.PREFILL, reader), (Role.DECODE, writer)):
            assert worker.info is not None
            pool, timings = first.pool(role), estimates.of(worker.pool)
            chunk = worker.info.chunk_tokens
            assert (pool.workers, pool.chunk_tokens) == (1, chunk)
            # One step of nothing but prompts, as many as it takes.
            step_s = timings.step_s + chunk * timings.token_s
            assert pool.tokens_per_s == pytest.approx(chunk / step_s)

        writer.report(Load(kv_usage=0.5))
        reader.suspect()
        assert capacity() is first
        now = FRESH_S
        assert capacity().free_kv_tokens == writer.info.kv_capacity_tokens // 2
        assert capacity().pool(Role.PREFILL).workers == 0


@on_virtual_time
async def test_what_one_reader_has_beyond_its_part_of_the_window_is_piled_up() -> None:
    workers = [LocalWorker(name, Role.DECODE, sim=SIM) for name in ("d1", "d2")]
    async with local_fleet(*workers) as fleet:
        capacity = FleetCapacity(fleet.fleet, fleet.dispatcher.models[MODEL], lambda: 0.0)
        crowded = fleet.fleet.by_id("d1")
        assert crowded is not None and crowded.info is not None
        chunk = crowded.info.chunk_tokens
        # Its part is four steps, of which a long prompt counts two: the third is too much.
        for _ in range(3):
            crowded.give_prompt(10 * chunk, 0, 0.0)
        assert capacity().pool(Role.DECODE).piled_tokens == 2 * chunk

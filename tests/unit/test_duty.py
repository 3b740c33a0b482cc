"""What elastic workers do, as a table; and workers that move as the traffic does."""

from __future__ import annotations

import asyncio
import time
from uuid import uuid4

import pytest

from coordinator.lifecycle import State
from coordinator.policy.duty import Duty, DutyPolicy, Move, OnDuty, move, pressures
from pdserve.config import ElasticConfig, SimConfig
from pdserve.types import Mode, Role, SamplingParams, TextPrompt
from tests.support.local_fleet import LocalWorker, local_fleet
from tests.support.virtual_time import on_virtual_time

POLICY = DutyPolicy(prefill_tokens=1000, sequences=10, dwell_s=30.0)
LATER = 100.0
C, P, D = Duty.COLOCATED, Duty.PREFILL, Duty.DECODE


def worker(
    worker_id: str, duty: Duty, tokens: int, sequences: int, *, fixed: bool = False
) -> OnDuty:
    return OnDuty(worker_id, duty, not fixed, tokens, sequences)


@pytest.mark.parametrize(
    ("workers", "full"),
    [
        ([], (0.0, 0.0)),
        # 600 + 1800 tokens for two readers of 1000 each, 3 + 6 sequences for two writers of 10.
        ([worker("a", C, 600, 3), worker("b", C, 1800, 6)], (1.2, 0.45)),
        # One reads, one writes.
        ([worker("a", P, 600, 0), worker("b", D, 300, 6)], (0.9, 0.6)),
        # Prompts wait, and nobody is there to read them for others.
        ([worker("a", D, 600, 5)], (2.0, 0.5)),
    ],
)
def test_how_full_the_pools_are(workers: list[OnDuty], full: tuple[float, float]) -> None:
    assert pressures(workers, POLICY) == pytest.approx(full)


PROMPTS = "prompts wait: prefill 150% full, decode 20%"
ANSWERS = "answers crowd: prefill 10% full, decode 150%"
ROOM = "both have room: prefill 10% full, decode 20%"


@pytest.mark.parametrize(
    ("workers", "expected"),
    [
        # Prompts wait: the one with the least to do reads for the others.
        ([worker("a", C, 1500, 3), worker("b", C, 1500, 1)], Move("b", P, PROMPTS)),
        # Whoever is tied to writing is set free first.
        (
            [worker("a", C, 1500, 1), worker("b", D, 0, 3)],
            Move("b", C, PROMPTS),
        ),
        # Somebody must stay who writes.
        ([worker("a", C, 1500, 2), worker("b", P, 1500, 0)], None),
        # A worker of one service stays where it is.
        ([worker("a", P, 1500, 0, fixed=True), worker("b", D, 0, 2, fixed=True)], None),
        # ... and counts: an elastic one may leave all writing to it.
        (
            [worker("a", C, 1500, 2), worker("b", D, 0, 2, fixed=True)],
            Move("a", P, PROMPTS),
        ),
        # Answers crowd.
        ([worker("a", C, 100, 20), worker("b", C, 100, 10)], Move("b", D, ANSWERS)),
        ([worker("a", P, 100, 0), worker("b", C, 100, 15)], Move("a", C, ANSWERS)),
        ([worker("a", C, 100, 15), worker("b", D, 0, 15)], None),
        # Both are full, or one is full and the other has no room to give.
        ([worker("a", C, 1500, 15), worker("b", C, 1500, 15)], None),
        ([worker("a", C, 1500, 5), worker("b", C, 1500, 5)], None),
        ([worker("a", C, 600, 15), worker("b", C, 400, 15)], None),
        # Neither is full: as without this.
        ([worker("a", P, 100, 0), worker("b", D, 0, 2)], Move("a", C, ROOM)),
        ([worker("a", C, 100, 2), worker("b", C, 100, 2)], None),
        # Between half and full nothing moves.
        ([worker("a", P, 700, 0), worker("b", D, 0, 7)], None),
        ([], None),
    ],
)
def test_the_next_move(workers: list[OnDuty], expected: Move | None) -> None:
    assert move(workers, POLICY, last_move=0.0, now=LATER) == expected


@pytest.mark.parametrize(
    ("workers", "expected"),
    [
        ([worker("a", P, 0, 0), worker("b", P, 5000, 0)], Move("a", C, "nobody else writes")),
        ([worker("a", D, 0, 50), worker("b", D, 0, 9)], Move("b", C, "nobody else reads")),
        (
            [worker("a", P, 0, 0, fixed=True), worker("b", P, 0, 0)],
            Move("b", C, "nobody else writes"),
        ),
        ([worker("a", P, 0, 0, fixed=True)], None),
        ([worker("a", D, 0, 0, fixed=True)], None),
        ([worker("a", P, 0, 0), worker("b", D, 0, 0)], None),
        ([], None),
    ],
)
def test_a_pool_that_has_lost_its_last_worker_gets_one_at_once(
    workers: list[OnDuty], expected: Move | None
) -> None:
    assert move(workers, POLICY, last_move=LATER - 1, now=LATER) == expected


def test_nobody_moves_soon_after_a_move() -> None:
    workers = [worker("a", C, 1500, 3), worker("b", C, 1500, 1)]
    assert move(workers, POLICY, last_move=LATER - 29.9, now=LATER) is None
    assert move(workers, POLICY, last_move=LATER - 30, now=LATER) is not None


# Over time.

READS_FAST = SimConfig(prefill_token_s=0.0005, decode_step_s=0.02, chunk_tokens=256)
ELASTIC = ElasticConfig(prefill_tokens=2000, sequences=10, dwell_s=5)
NAMES = ("a", "b", "c")


@on_virtual_time
async def test_workers_move_as_the_traffic_does_and_no_request_is_lost() -> None:
    workers = [LocalWorker(name, Role.PREFILL, Role.DECODE, sim=READS_FAST) for name in NAMES]
    async with local_fleet(
        *workers, mode=Mode.AUTO, decider="threshold", min_prefill_tokens=512, elastic=ELASTIC
    ) as fleet:

        async def ask(prompt_tokens: int, max_tokens: int, until: float) -> None:
            while time.monotonic() < until:
                text = await fleet.ask(
                    prompt=TextPrompt("x" * prompt_tokens),
                    sampling=SamplingParams(max_tokens=max_tokens, ignore_eos=True),
                    cache_salt=uuid4().hex,
                )
                assert text

        async def crowd(askers: int, prompt_tokens: int, max_tokens: int) -> list[Duty]:
            """Everybody's duty after a minute of it."""
            until = time.monotonic() + 60
            async with asyncio.TaskGroup() as group:
                for _ in range(askers):
                    group.create_task(ask(prompt_tokens, max_tokens, until))
                await asyncio.sleep(until - time.monotonic())
                return sorted(worker.duty for worker in fleet.fleet.workers())

        assert {worker.duty for worker in fleet.fleet.workers()} == {C}
        assert await crowd(askers=24, prompt_tokens=2000, max_tokens=2) == [C, P, P]
        assert await crowd(askers=60, prompt_tokens=20, max_tokens=400) == [C, D, D]
        await asyncio.sleep(3 * ELASTIC.dwell_s)
        assert {worker.duty for worker in fleet.fleet.workers()} == {C}
        assert all(record.state is State.FINISHED for record in fleet.records)
        fleet.assert_idle()


@on_virtual_time
async def test_without_the_setting_nobody_moves() -> None:
    workers = [LocalWorker(name, Role.PREFILL, Role.DECODE, sim=READS_FAST) for name in NAMES]
    async with (
        local_fleet(*workers, mode=Mode.DISAGGREGATED) as fleet,
        asyncio.TaskGroup() as group,
    ):
        for number in range(30):
            prompt = TextPrompt(f"{number}" + "x" * 2000)
            sampling = SamplingParams(max_tokens=2)
            group.create_task(fleet.ask(prompt=prompt, sampling=sampling))
        await asyncio.sleep(5)
        assert {worker.duty for worker in fleet.fleet.workers()} == {C}

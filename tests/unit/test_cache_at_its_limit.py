"""KV caches at their limit for minutes: prefill, decode and transfer never wait in a circle."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from unittest import mock

import pytest
import structlog

from pdserve.config import SimConfig
from pdserve.types import Mode, Role, SamplingParams, TextPrompt
from tests.support.crowd import Job, crowd, drive
from tests.support.local_fleet import LocalFleet, LocalWorker, local_fleet
from tests.support.virtual_time import on_virtual_time, run

TINY = SimConfig(
    kv_capacity_tokens=2_000,
    context_length=1_600,
    prefill_token_s=0.0002,
    decode_step_s=0.02,
    transfer_token_s=0.00002,
    chunk_tokens=128,
    max_num_seqs=64,
)
"""Four of a crowd's requests fill it."""

CROWD_S = 120.0
LONGEST_S = 20.0
"""Of a request; a circle would last until a lease ends, which is 30 s at least."""

BOTH = (Role.PREFILL, Role.DECODE)
FLEETS = {
    "one pair": {"p": (Role.PREFILL,), "d": (Role.DECODE,)},
    "two pairs": {
        "p1": (Role.PREFILL,),
        "p2": (Role.PREFILL,),
        "d1": (Role.DECODE,),
        "d2": (Role.DECODE,),
    },
    "both roles": {"w1": BOTH, "w2": BOTH},
}


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    """Thousands of lines that nobody reads would take longer than the rest of a test."""
    critical = structlog.get_logger(wrapper_class=structlog.make_filtering_bound_logger(50))
    with (
        mock.patch("coordinator.observer.access_log", critical),
        mock.patch("coordinator.climb.log", critical),
    ):
        yield


def workers(name: str, sim: SimConfig = TINY) -> list[LocalWorker]:
    return [LocalWorker(each, *roles, sim=sim) for each, roles in FLEETS[name].items()]


async def ask(fleet: LocalFleet, job: Job) -> None:
    """No two prompts have a block in common."""
    await fleet.ask(
        prompt=TextPrompt(f"{job.number:05} ".ljust(job.prompt_tokens, "x")),
        sampling=SamplingParams(max_tokens=job.max_tokens, ignore_eos=True, temperature=0),
        mode=job.mode,
    )


@pytest.mark.parametrize(("seed", "name"), list(enumerate(FLEETS)))
def test_every_request_ends_in_time_and_leaves_nothing(seed: int, name: str) -> None:
    async def main() -> None:
        async with local_fleet(*workers(name)) as fleet:
            number = 150 * sum(Role.DECODE in roles for roles in FLEETS[name].values())
            jobs = crowd(
                seed, number, CROWD_S, prompt_tokens=(50, 700), max_tokens=(5, 150), leavers=0.2
            )
            endings = await drive(jobs, lambda job: ask(fleet, job))
            assert {ending.outcome for ending in endings} == {"finished", "left"}
            assert max(ending.took_s for ending in endings) < LONGEST_S
            # Else the limit was not reached, and nothing is proven.
            steps = [step for record in fleet.records for step in record.fallbacks]
            waited = sum(record.phases.get("queue", 0.0) > 0 for record in fleet.records)
            assert steps.count("colocated: no_room") + waited > number / 20
            await asyncio.sleep(1)
            fleet.assert_idle()

    run(main())


@pytest.mark.parametrize("transport", ["nixl", "grpc"])
@on_virtual_time
async def test_two_workers_of_both_roles_do_not_fill_each_other_s_caches(transport: str) -> None:
    """Each cache has room for one of the two prompts: to be held, or to be decoded from."""
    sim = TINY.model_copy(update={"kv_capacity_tokens": 1_500})
    async with local_fleet(*workers("both roles", sim), transport=transport) as fleet:
        jobs = [Job(number, 0.0, None, Mode.DISAGGREGATED, 1_000, 10) for number in (1, 2)]
        endings = await drive(jobs, lambda job: ask(fleet, job))
        assert {ending.outcome for ending in endings} == {"finished"}
        assert max(ending.took_s for ending in endings) < 2
        await asyncio.sleep(1)
        fleet.assert_idle()


@pytest.mark.parametrize("transport", ["nixl", "grpc"])
@on_virtual_time
async def test_colocated_sequences_do_not_stand_before_promised_ones_in_a_circle(
    transport: str,
) -> None:
    """While each worker reads a prompt for the other, a colocated one comes to each that does
    not fit beside it: there it must not stand before the sequence that fetches the other's."""
    async with local_fleet(*workers("both roles"), transport=transport) as fleet:
        jobs = [Job(number, 0.0, None, Mode.DISAGGREGATED, 700, 10) for number in (1, 2)]
        jobs += [Job(number, 0.05, None, Mode.COLOCATED, 1_400, 10) for number in (3, 4)]
        endings = await drive(jobs, lambda job: ask(fleet, job))
        assert {ending.outcome for ending in endings} == {"finished"}
        assert max(ending.took_s for ending in endings) < 2
        assert not any(record.fallbacks for record in fleet.records)
        await asyncio.sleep(1)
        fleet.assert_idle()

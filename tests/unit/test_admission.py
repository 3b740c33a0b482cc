from __future__ import annotations

import asyncio
import random

import pytest

from coordinator.gateway.admission import Admission, Permit
from coordinator.gateway.gateway import Gateway
from coordinator.gateway.keys import KeyRing
from pdserve.config import GatewayConfig
from pdserve.errors import ErrorReason, RejectedError


async def settle() -> None:
    """Lets every task run as far as it can."""
    for _ in range(5):
        await asyncio.sleep(0)


def counts(admission: Admission) -> tuple[int, int]:
    return admission.running, admission.queued


async def test_places_are_given_in_order_of_arrival() -> None:
    admission = Admission(max_running=1, max_queued=10)
    served: list[int] = []

    async def request(number: int) -> None:
        permit = await admission.acquire()
        served.append(number)
        await settle()
        permit.release()

    await asyncio.gather(*(request(number) for number in range(5)))
    assert served == [0, 1, 2, 3, 4]
    assert counts(admission) == (0, 0)


async def test_a_newcomer_does_not_overtake_the_queue() -> None:
    admission = Admission(max_running=1, max_queued=2)
    first = await admission.acquire()
    waiting = asyncio.create_task(admission.acquire())
    await settle()
    first.release()  # the place is the waiter's, although its task has not run yet
    assert admission.running == 1
    newcomer = asyncio.create_task(admission.acquire())
    await settle()
    assert waiting.done()
    assert not newcomer.done()
    (await waiting).release()
    (await newcomer).release()
    assert counts(admission) == (0, 0)


async def test_full_queue_is_refused_at_once() -> None:
    admission = Admission(max_running=1, max_queued=1)
    permit = await admission.acquire()
    waiting = asyncio.create_task(admission.acquire())
    await settle()
    with pytest.raises(RejectedError) as caught:
        await admission.acquire()
    assert caught.value.reason is ErrorReason.QUEUE_FULL
    assert caught.value.retry_after_s == 1.0
    assert counts(admission) == (1, 1)
    permit.release()
    (await waiting).release()


async def test_no_queue_at_all() -> None:
    admission = Admission(max_running=1, max_queued=0)
    permit = await admission.acquire()
    with pytest.raises(RejectedError):
        await admission.acquire()
    permit.release()
    (await admission.acquire()).release()


async def test_releasing_twice_frees_one_place() -> None:
    admission = Admission(max_running=2, max_queued=0)
    first, second = await admission.acquire(), await admission.acquire()
    first.release()
    first.release()
    assert admission.running == 1
    second.release()
    assert admission.running == 0


async def test_cancelled_while_queued_leaves_no_trace() -> None:
    admission = Admission(max_running=1, max_queued=2)
    permit = await admission.acquire()
    left, stays = (asyncio.create_task(admission.acquire()) for _ in range(2))
    await settle()
    left.cancel()
    await settle()
    assert counts(admission) == (1, 1)
    permit.release()
    (await stays).release()
    assert counts(admission) == (0, 0)


@pytest.mark.parametrize("release_first", [True, False])
async def test_cancelled_in_the_instant_of_its_turn(release_first: bool) -> None:
    admission = Admission(max_running=1, max_queued=2)
    permit = await admission.acquire()
    left, stays = (asyncio.create_task(admission.acquire()) for _ in range(2))
    await settle()
    if release_first:
        permit.release()
        left.cancel()
    else:
        left.cancel()
        permit.release()
    await settle()
    assert left.cancelled()
    (await stays).release()
    assert counts(admission) == (0, 0)


async def test_deadline_in_the_queue() -> None:
    admission = Admission(max_running=1, max_queued=1, now=lambda: 100.0)
    permit = await admission.acquire()
    with pytest.raises(RejectedError) as caught:
        await admission.acquire(deadline=99.0)
    assert caught.value.reason is ErrorReason.DEADLINE_EXCEEDED
    assert counts(admission) == (1, 0)
    permit.release()
    (await admission.acquire(deadline=99.0)).release()  # a free place needs no wait


class Crowd:
    """Requests that come, leave the queue and end, in any order."""

    def __init__(self, seed: int) -> None:
        self.admission = Admission(max_running=3, max_queued=5)
        self.held: list[Permit] = []
        self.waiting: list[asyncio.Task[Permit]] = []
        self.rng = random.Random(seed)

    def act(self) -> None:
        match self.rng.randrange(4):
            case 0 | 1:
                self.waiting.append(asyncio.create_task(self.admission.acquire()))
            case 2 if self.held:
                self.held.pop(self.rng.randrange(len(self.held))).release()
            case 3 if self.waiting:
                self.rng.choice(self.waiting).cancel()

    async def settle(self) -> None:
        await settle()
        for task in [task for task in self.waiting if task.done()]:
            self.waiting.remove(task)
            if not task.cancelled() and task.exception() is None:
                self.held.append(task.result())


@pytest.mark.parametrize("seed", range(20))
async def test_nothing_is_lost_in_any_order_of_events(seed: int) -> None:
    crowd = Crowd(seed)
    for _ in range(300):
        crowd.act()
        if crowd.rng.random() < 0.5:
            await crowd.settle()
            assert counts(crowd.admission) == (len(crowd.held), len(crowd.waiting))
            assert len(crowd.held) <= 3
            assert len(crowd.waiting) <= 5
    for task in crowd.waiting:
        task.cancel()
    await crowd.settle()
    for permit in crowd.held:
        permit.release()
    assert counts(crowd.admission) == (0, 0)


async def test_gateway_counts_the_rate_before_it_gives_a_place() -> None:
    config = GatewayConfig(rate="1/hour", max_running=1, max_queued=0)
    gateway = Gateway(config, KeyRing.open_to_all(), ["tiny"])
    caller = gateway.authenticate(None)
    permit = await gateway.enter(caller, "tiny", None)
    with pytest.raises(RejectedError) as caught:
        await gateway.enter(caller, "tiny", None)
    assert caught.value.reason is ErrorReason.RATE_LIMITED
    permit.release()
    assert gateway.admissions["tiny"].running == 0

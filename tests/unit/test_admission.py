"""The waiting of admission; what is decided is in test_admission_policy."""

from __future__ import annotations

import asyncio
import random
import time
from dataclasses import dataclass, field

import pytest

from coordinator.gateway.admission import LOOK_S, Admission, Permit
from coordinator.policy.ticket import Asked, Capacity, Limits, Pool, Priority, Work
from pdserve.errors import ErrorReason, RejectedError
from pdserve.types import Role
from tests.support.virtual_time import on_virtual_time, settle

WORK = Work(prompt_tokens=10, max_tokens=10, reader=Role.DECODE)


@dataclass
class Told:
    """An AdmissionListener."""

    waits: list[float] = field(default_factory=list)
    refusals: list[ErrorReason] = field(default_factory=list)

    def let_in(self, priority: Priority, waited_s: float) -> None:
        self.waits.append(waited_s)

    def refused(self, priority: Priority, reason: ErrorReason) -> None:
        self.refusals.append(reason)


class Model:
    """One model's admission; without a `capacity` the limits alone count."""

    def __init__(
        self,
        max_running: int | None = 1,
        max_queued: int = 10,
        max_ttft_s: float = 60.0,
        capacity: Capacity | None = None,
    ) -> None:
        self.capacity = capacity or Capacity()
        self.told = Told()
        self.admission = Admission(
            Limits(max_running, max_queued, max_ttft_s),
            lambda: self.capacity,
            self.told,
            time.monotonic,
        )

    @property
    def counts(self) -> tuple[int, int]:
        return self.admission.running, self.admission.queued

    def arrive(self, deadline: float | None = None) -> Permit:
        return self.admission.arrive(
            Asked("acme", Priority.NORMAL, 1.0, time.monotonic(), deadline)
        )

    async def enter(self, deadline: float | None = None) -> Permit:
        """As dispatch does."""
        permit = self.arrive(deadline)
        try:
            await permit.admit(WORK)
        except BaseException:
            permit.release()
            raise
        return permit


@on_virtual_time
async def test_places_are_given_in_order_of_arrival() -> None:
    model = Model()
    served: list[int] = []

    async def request(number: int) -> None:
        permit = await model.enter()
        served.append(number)
        await asyncio.sleep(1)
        permit.release()

    await asyncio.gather(*(request(number) for number in range(5)))
    assert served == [0, 1, 2, 3, 4]
    assert model.counts == (0, 0)
    assert model.told.waits == [0, 1, 2, 3, 4]


@on_virtual_time
async def test_a_newcomer_does_not_overtake_the_queue() -> None:
    model = Model()
    first = await model.enter()
    waiting = asyncio.create_task(model.enter())
    await settle()
    first.release()  # the place is the waiter's, although its task has not run yet
    assert model.counts == (1, 0)
    newcomer = asyncio.create_task(model.enter())
    await settle()
    assert waiting.done()
    assert not newcomer.done()
    (await waiting).release()
    (await newcomer).release()
    assert model.counts == (0, 0)


@on_virtual_time
async def test_a_full_queue_refuses_on_arrival() -> None:
    model = Model(max_queued=1)
    permit = await model.enter()
    waiting = asyncio.create_task(model.enter())
    await settle()
    with pytest.raises(RejectedError) as caught:
        model.arrive()
    assert caught.value.reason is ErrorReason.QUEUE_FULL
    assert model.told.refusals == [ErrorReason.QUEUE_FULL]
    permit.release()
    (await waiting).release()


@on_virtual_time
async def test_releasing_twice_frees_one_place() -> None:
    model = Model(max_running=2)
    first, second = await model.enter(), await model.enter()
    first.release()
    first.release()
    assert model.counts == (1, 0)
    second.release()
    assert model.counts == (0, 0)


@on_virtual_time
async def test_cancelled_while_queued_leaves_no_trace() -> None:
    model = Model()
    permit = await model.enter()
    left, stays = (asyncio.create_task(model.enter()) for _ in range(2))
    await settle()
    left.cancel()
    await settle()
    assert model.counts == (1, 1)
    permit.release()
    (await stays).release()
    assert model.counts == (0, 0)


@pytest.mark.parametrize("release_first", [True, False])
@on_virtual_time
async def test_cancelled_in_the_instant_of_its_turn(release_first: bool) -> None:
    model = Model()
    permit = await model.enter()
    left, stays = (asyncio.create_task(model.enter()) for _ in range(2))
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
    assert model.counts == (0, 0)


@on_virtual_time
async def test_a_deadline_passes_in_the_queue() -> None:
    model = Model()
    permit = await model.enter()
    began = time.monotonic()
    with pytest.raises(RejectedError) as caught:
        await model.enter(deadline=began + 3)
    assert caught.value.reason is ErrorReason.DEADLINE_EXCEEDED
    assert time.monotonic() - began == pytest.approx(3)
    assert model.counts == (1, 0)
    permit.release()
    (await model.enter(deadline=began)).release()  # a free place needs no wait


@on_virtual_time
async def test_without_a_deadline_a_place_is_kept_however_long_it_takes() -> None:
    model = Model(max_ttft_s=2)
    permit = await model.enter()
    waiting = asyncio.create_task(model.enter())
    await asyncio.sleep(1_000)
    assert model.counts == (1, 1)
    permit.release()
    (await waiting).release()
    assert model.told.refusals == []


@on_virtual_time
async def test_a_read_prompt_lets_the_next_in() -> None:
    # A window of 40 tokens, of which a prompt takes at most 20.
    reads = Capacity(10, 1_000, {Role.DECODE: Pool(1, 10)})
    model = Model(max_running=None, capacity=reads)
    permits = [model.arrive() for _ in range(3)]
    turns = [asyncio.create_task(permit.admit(Work(100, 10, Role.DECODE))) for permit in permits]
    await settle()
    assert [turn.done() for turn in turns] == [True, True, False]
    permits[0].read()
    await turns[2]
    for permit in permits:
        permit.release()
    assert model.admission.window_tokens == 0


@on_virtual_time
async def test_those_that_wait_notice_when_the_fleet_grows() -> None:
    model = Model(max_running=None, capacity=Capacity(1, 1_000))
    first = await model.enter()
    waiting = asyncio.create_task(model.enter())
    await settle()
    model.capacity = Capacity(2, 1_000)
    await asyncio.sleep(LOOK_S)
    assert waiting.done()
    first.release()
    (await waiting).release()


class Crowd:
    """Requests that come, leave the queue and end, in any order."""

    def __init__(self, seed: int) -> None:
        self.model = Model(max_running=3, max_queued=5)
        self.held: list[Permit] = []
        self.waiting: list[asyncio.Task[Permit]] = []
        self.rng = random.Random(seed)

    def act(self) -> None:
        match self.rng.randrange(5):
            case 0 | 1:
                self.waiting.append(asyncio.create_task(self.model.enter()))
            case 2 if self.held:
                self.held.pop(self.rng.randrange(len(self.held))).release()
            case 3 if self.waiting:
                self.rng.choice(self.waiting).cancel()
            case 4 if self.held:
                self.rng.choice(self.held).read()

    async def settle(self) -> None:
        await settle()
        for task in [task for task in self.waiting if task.done()]:
            self.waiting.remove(task)
            if not task.cancelled() and task.exception() is None:
                self.held.append(task.result())


@pytest.mark.parametrize("seed", range(20))
@on_virtual_time
async def test_nothing_is_lost_in_any_order_of_events(seed: int) -> None:
    crowd = Crowd(seed)
    for _ in range(300):
        crowd.act()
        if crowd.rng.random() < 0.5:
            await crowd.settle()
            assert crowd.model.counts == (len(crowd.held), len(crowd.waiting))
            assert len(crowd.held) <= 3
            assert len(crowd.waiting) <= 5
    for task in crowd.waiting:
        task.cancel()
    await crowd.settle()
    for permit in crowd.held:
        permit.release()
    assert crowd.model.counts == (0, 0)
    assert crowd.model.admission.window_tokens == 0

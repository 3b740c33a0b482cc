from __future__ import annotations

import pytest

from coordinator.gateway.keys import Caller, KeyRing
from coordinator.policy.ticket import Priority, Work
from pdserve.config import GatewayConfig
from pdserve.errors import ErrorReason, RejectedError
from pdserve.types import GenerateSpec, Role, SamplingParams, TextPrompt
from tests.support.fake_dispatch import MODEL, gateway_without_fleet, served

WORK = Work(1, 1, Role.DECODE)


def spec(priority: int = 0) -> GenerateSpec:
    return GenerateSpec("r", MODEL, TextPrompt("x"), SamplingParams(), priority=priority)


async def test_the_rate_counts_before_a_place_is_given() -> None:
    config = GatewayConfig(rate="1/hour", max_running=1, max_queued=0)
    gateway = gateway_without_fleet(config, KeyRing.open_to_all(), served())
    caller = gateway.authenticate(None)
    permit = await gateway.enter(caller, spec())
    await permit.admit(WORK)
    with pytest.raises(RejectedError) as caught:
        await gateway.enter(caller, spec())
    assert caught.value.reason is ErrorReason.RATE_LIMITED
    permit.release()
    assert gateway.admissions[MODEL].running == 0


@pytest.mark.parametrize(
    ("asked", "most", "got"),
    [
        (0, Priority.NORMAL, Priority.NORMAL),
        (0, Priority.HIGH, Priority.NORMAL),
        (0, Priority.LOW, Priority.LOW),
        (-5, Priority.HIGH, Priority.HIGH),
        (7, Priority.HIGH, Priority.LOW),
    ],
)
async def test_a_request_is_of_the_class_that_it_asks_for_where_its_key_may(
    asked: int, most: Priority, got: Priority
) -> None:
    gateway = gateway_without_fleet(GatewayConfig(max_running=1), KeyRing.open_to_all(), served())
    admission = gateway.admissions[MODEL]
    caller = Caller("acme", "k1", admin=False, may_choose_mode=True, rate=None, max_priority=most)
    first = await gateway.enter(caller, spec())
    await first.admit(WORK)
    permit = await gateway.enter(caller, spec(asked))
    waiting = permit.admit(WORK)
    waiting.send(None)  # runs until it waits
    assert [p for p in Priority if admission.waiting(p) == (1, 1)] == [got]
    waiting.close()
    permit.release()
    first.release()

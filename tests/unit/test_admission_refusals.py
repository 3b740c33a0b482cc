"""Who is refused rather than made to wait in vain, with values worked out by hand."""

from __future__ import annotations

import pytest

from coordinator.policy.ticket import Capacity, Pool
from pdserve.errors import ErrorReason, RejectedError
from tests.support.admission_model import DECODE, Model


def test_a_full_queue_refuses_on_arrival_and_says_when_to_come_back() -> None:
    model = Model(max_running=1, max_queued=3)
    model.paced(tokens=100)
    for _ in range(4):
        model.ask(tokens=600)
    refusal = model.refusal()
    assert refusal.reason is ErrorReason.QUEUE_FULL
    # 1,800 tokens at 100 a second (measured with memory: in about one second); half of that.
    assert refusal.retry_after_s == pytest.approx(9, rel=0.1)


def test_what_is_being_tokenised_has_a_place() -> None:
    model = Model(max_running=1, max_queued=1)
    tickets = [model.arrive(), model.arrive()]
    with pytest.raises(RejectedError):
        model.arrive()
    model.queue.leave(tickets[0], 0.0)
    model.arrive()


def test_a_tenant_leaves_places_to_others() -> None:
    model = Model(max_running=1, max_queued=90)
    model.ask()
    for _ in range(80):
        model.ask()
    assert model.refusal().reason is ErrorReason.QUEUE_FULL  # 80 wait, 10 are left
    for i in range(10):
        model.ask(tenant=f"t{i}")
    assert model.refusal(tenant="late").reason is ErrorReason.QUEUE_FULL


def test_who_would_wait_too_long_is_refused_at_once() -> None:
    model = Model(max_running=1, max_ttft_s=10)
    model.paced(tokens=100)
    model.ask(tokens=1)
    model.ask(tokens=450)
    model.ask(tokens=450)
    refusal = model.refusal(tokens=450)
    # 900 tokens at about 100 a second are 9 s, and 0.8 of 10 s may be waited.
    assert refusal.reason is ErrorReason.OVERLOADED
    assert refusal.retry_after_s == pytest.approx(1, abs=0.5)
    assert model.queue.queued == 2


def test_a_deadline_rules_where_there_is_one() -> None:
    model = Model(max_running=1, max_ttft_s=10)
    model.paced(tokens=100)
    model.ask(tokens=1)
    model.ask(tokens=450)
    model.ask(tokens=450)
    model.ask(tokens=450, deadline=model.now + 100)
    refusal = model.refusal(tokens=450, deadline=model.now + 16)  # 13.5 s > 0.8 * 16 s
    assert refusal.reason is ErrorReason.OVERLOADED


def test_what_it_takes_by_itself_is_part_of_a_deadline() -> None:
    model = Model(max_running=1)
    model.paced(tokens=100)
    model.ask(tokens=1)
    model.ask(tokens=450)
    model.ask(tokens=450, deadline=model.now + 10)  # 4.5 s of wait <= 0.8 * 10 s
    model.refusal(tokens=450, deadline=model.now + 20, own_s=10)  # 9 s > 0.8 * 10 s


def test_whoever_would_wait_too_long_on_its_worker_is_refused_though_there_is_room() -> None:
    model = Model(max_ttft_s=10)
    model.ask("a", own_s=4.0, behind_s=4.8)  # 0.8 * (10 - 4) s
    refusal = model.refusal(own_s=4.0, behind_s=4.9)
    assert refusal.reason is ErrorReason.OVERLOADED
    model.now = 1.0
    model.refusal(own_s=4.0, behind_s=4.8, deadline=10.0)
    assert model.let_in == ["a"]


def test_a_seat_is_waited_for_as_long_as_those_there_may_be_expected_to_stay() -> None:
    model = Model(capacity=Capacity(2, 10**9, {DECODE: Pool(1, 10**6)}))
    tickets = [model.ask(), model.ask()]
    model.now = 4.0
    # In 7.25 s of theirs, with a memory of 20 s, one is taken to have ended, which has become
    # 0.82: they stay for 8.86 s. One leaves every 4.43 s, but the first in no less than 4.86 s.
    refusal = model.refusal(deadline=model.now + 6.0)  # 4.86 s > 0.8 * 6 s
    assert refusal.reason is ErrorReason.OVERLOADED
    waits = model.ask("waits", deadline=model.now + 6.2)
    until_both_left = model.queue.wait_s(model.now, model.capacity)
    assert until_both_left == pytest.approx(8.86, abs=0.01)
    for ticket in (*tickets, waits):
        model.end(ticket)
    model.ask("has a seat", deadline=model.now + 0.1)
    assert model.let_in[-2:] == ["waits", "has a seat"]


def test_seats_of_a_worker_that_is_lost_are_lacking() -> None:
    model = Model(capacity=Capacity(4, 10**9, {DECODE: Pool(2, 10**6)}))
    for _ in range(4):
        model.ask()
    model.now = 1.0
    # In 3.90 s of theirs 0.95 have ended: they stay for 4.10 s, and the first of them leaves in
    # 3.10 s. With two seats, three must leave: one in 2.05 s.
    assert model.queue.wait_s(model.now, model.capacity) == pytest.approx(3.10, abs=0.01)
    model.capacity = Capacity(2, 10**9, {DECODE: Pool(1, 10**6)})
    assert model.queue.wait_s(model.now, model.capacity) == pytest.approx(6.15, abs=0.01)


def test_a_fleet_that_was_not_measured_is_taken_to_read_as_fast_as_is_expected() -> None:
    model = Model(
        max_running=1, capacity=Capacity(10, 10**9, {DECODE: Pool(2, 10**6, tokens_per_s=100.0)})
    )
    model.ask(tokens=1)
    model.ask(tokens=450)
    model.ask(tokens=450, deadline=6.0)  # 4.5 s of wait <= 0.8 * 6 s
    refusal = model.refusal(tokens=450, deadline=11.0)  # 9 s > 0.8 * 11 s
    assert refusal.retry_after_s == 1  # the least


def test_a_light_tenant_is_not_refused_for_a_heavy_one() -> None:
    model = Model(max_running=1, max_ttft_s=10)
    model.paced(tokens=100)
    model.ask(tokens=1)
    model.ask(tokens=450, tenant="heavy")
    model.ask(tokens=450, tenant="heavy")
    assert model.refusal(tokens=450, tenant="heavy").reason is ErrorReason.OVERLOADED
    model.ask(tokens=450, tenant="light")


def test_a_prompt_that_takes_long_by_itself_is_not_refused_for_that() -> None:
    model = Model(max_running=1, max_ttft_s=10)
    model.paced(tokens=100)
    model.ask(tokens=1)
    model.ask(tokens=350)
    # 3.5 s of wait; half of the bound is always there for waiting, 0.8 * 5 s of it to be used.
    model.ask(tokens=350, own_s=1_000)


def test_a_hopeless_prompt_is_refused_before_it_is_tokenised() -> None:
    capacity = Capacity(1_000, 10**9, {DECODE: Pool(1, 10**6)})
    model = Model(max_running=1, max_ttft_s=10, capacity=capacity)
    model.paced(tokens=100)
    model.ask(tokens=1)
    for _ in range(2):
        model.ask(tokens=450, chars=1_800)
    with pytest.raises(RejectedError) as caught:
        model.arrive(chars=1_600)
    assert caught.value.reason is ErrorReason.OVERLOADED
    # One that is longer is in a line of its own, which is empty.
    model.arrive(chars=10_000)


def test_without_a_measured_pace_nobody_is_refused_for_it() -> None:
    model = Model(max_running=1, max_ttft_s=0.001)
    for _ in range(10):
        model.ask(tokens=10_000)
    assert model.queue.wait_s(model.now, model.capacity) == 0

"""Who is let in at once, with values worked out by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest

from coordinator.policy.ticket import Capacity, Pool
from tests.support.admission_model import DECODE, PREFILL, Model


def test_no_more_run_than_the_decode_workers_hold() -> None:
    model = Model(capacity=Capacity(2, 10**9, {DECODE: Pool(1, 10**6)}))
    tickets = [model.ask(name) for name in "abc"]
    assert model.let_in == ["a", "b"]
    assert model.end(tickets[0]) == ["c"]


def test_two_more_are_let_in_for_each_worker_that_reads_for_others() -> None:
    pools = {DECODE: Pool(1, 10**6), PREFILL: Pool(1, 10**6)}
    model = Model(capacity=Capacity(2, 10**9, pools))
    for name in "abcde":
        model.ask(name, reader=PREFILL)
    assert model.let_in == ["a", "b", "c", "d"]


def test_a_configured_bound_holds_below_that() -> None:
    model = Model(max_running=1)
    for name in "ab":
        model.ask(name)
    assert model.let_in == ["a"]


def test_prompts_on_their_way_are_four_steps_of_each_worker_and_one_counts_two_at_most() -> None:
    # Two workers of 100 tokens a step: a window of 800, a prompt counts 200 at most.
    model = Model(capacity=Capacity(100, 10**9, {DECODE: Pool(2, 200)}))
    tickets = [model.ask(name, tokens) for name, tokens in (("a", 5_000), ("b", 150), ("c", 150))]
    model.ask("d", 300)
    assert model.queue.window_tokens == 700
    model.ask("e", 101)
    assert model.let_in == ["a", "b", "c", "d"]
    model.queue.read(tickets[1], 0.0)
    assert model.admit() == ["e"]


def test_what_is_piled_up_on_one_worker_keeps_nothing_from_the_others() -> None:
    # As above, but the window's 800 are three long prompts and a short one, all on one worker,
    # whose own part is 400.
    pool = Pool(2, 200)
    model = Model(capacity=Capacity(100, 10**9, {DECODE: pool}))
    for name, tokens in (("a", 5_000), ("b", 5_000), ("c", 5_000), ("d", 200), ("e", 200)):
        model.ask(name, tokens)
    assert "e" not in model.let_in
    piled = replace(pool, piled_tokens=400)
    model.capacity = replace(model.capacity, pools={DECODE: piled})
    model.admit()
    assert model.let_in == ["a", "b", "c", "d", "e"]


def test_a_wait_is_predicted_for_each_pool_before_it_is_chosen() -> None:
    pools = {DECODE: Pool(1, 100, 1_000.0), PREFILL: Pool(1, 100, 1_000.0)}
    model = Model(capacity=Capacity(100, 10**9, pools))
    for _ in range(4):
        model.ask(tokens=300, reader=PREFILL)
    # Two are on their way, two wait before it: 600 tokens at 1,000 a second.
    waits_s = model.queue.waits_s(model.arrive(), 300, model.now, model.capacity)
    assert waits_s == {DECODE: 0.0, PREFILL: pytest.approx(0.6)}


def test_pools_have_windows_of_their_own() -> None:
    pools = {DECODE: Pool(1, 100), PREFILL: Pool(1, 100)}
    model = Model(capacity=Capacity(100, 10**9, pools))
    for name in ("p1", "p2", "p3"):
        model.ask(name, 5_000, reader=PREFILL)
    model.ask("d1", 5_000)
    assert model.let_in == ["p1", "p2", "d1"]


def test_what_one_pool_reads_cannot_keep_the_other_from_the_cache_for_ever() -> None:
    pools = {DECODE: Pool(1, 10**6), PREFILL: Pool(1, 10**6)}
    model = Model(capacity=Capacity(100, 1_000, pools))
    reading = [model.ask("d0", 500)]
    model.ask("large", 900, reader=PREFILL)  # must begin by 60
    while "large" not in model.let_in and model.now < 40:
        model.now += 1
        reading.append(model.ask(f"d{model.now:.0f}", 500))
        model.queue.read(reading.pop(0), model.now)
        model.admit()
    # From 30 on it has waited longer than it can still wait: nobody else takes any cache.
    assert model.let_in[-2:] == ["d29", "large"]
    assert model.now == 30


def test_what_is_being_read_must_fit_the_free_cache() -> None:
    model = Model(capacity=Capacity(100, 1_000, {DECODE: Pool(1, 10**6)}))
    first = model.ask("a", 600)
    model.ask("b", 600)
    assert model.let_in == ["a"]
    # From now on the workers' own reports tell of a, which has taken 600 of 2,000.
    model.queue.read(first, 0.0)
    model.capacity = Capacity(100, 1_400, {DECODE: Pool(1, 10**6)})
    assert model.admit() == ["b"]


def test_answers_take_room_as_long_as_they_are_expected_to_be() -> None:
    model = Model(capacity=Capacity(100, 1_000, {DECODE: Pool(1, 10**6)}))
    model.end(model.ask(answer=500), answer_tokens=500)  # a tenth is learned: 50 tokens
    model.ask("a", 500, answer=400)
    model.ask("b", 451, answer=400)  # 550 + 501
    model.ask("c", 1, answer=0)  # behind b
    assert model.let_in == ["", "a"]


def test_one_request_is_let_in_whatever_it_takes() -> None:
    model = Model(capacity=Capacity(1, 10, {DECODE: Pool(1, 1)}))
    model.ask("a", 10**6)
    assert model.let_in == ["a"]


def test_nobody_waits_for_a_fleet_that_is_away() -> None:
    model = Model(capacity=Capacity())
    for name in "abc":
        model.ask(name)
    assert model.let_in == ["a", "b", "c"]


@pytest.mark.parametrize("state", ["arrived", "queued", "reading", "writing"])
def test_a_request_leaves_nothing_in_whatever_state(state: str) -> None:
    model = Model(max_running=1)
    other = model.ask() if state == "queued" else None
    ticket = model.arrive() if state == "arrived" else model.ask()
    if state == "writing":
        model.queue.read(ticket, 0.0)
    assert ticket.state.value == state
    for _ in range(2):
        model.queue.leave(ticket, 0.0)
    if other is not None:
        model.end(other)
    queue = model.queue
    assert (queue.running, queue.queued, queue.window_tokens, queue._reading_kv) == (0, 0, 0, 0)
    assert not queue._waiting
    assert queue._arrived == 0

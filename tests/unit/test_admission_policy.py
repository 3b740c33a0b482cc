"""Who is let in, who waits and who is refused, with values worked out by hand."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import replace
from itertools import cycle

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from coordinator.policy.admission import AdmissionQueue, size_of
from coordinator.policy.pace import Pace
from coordinator.policy.ticket import (
    Asked,
    Capacity,
    Limits,
    Pool,
    Priority,
    Ticket,
    Work,
    priority_of,
)
from pdserve.errors import ErrorReason, RejectedError
from pdserve.types import Role

DECODE, PREFILL = Role.DECODE, Role.PREFILL
NORMAL = Priority.NORMAL
PLENTY = Capacity(1_000, 10**9, {DECODE: Pool(1, 10**6), PREFILL: Pool(1, 10**6)})


class Model:
    """An admission queue, its clock, and the order in which requests were let in."""

    def __init__(
        self,
        *,
        max_running: int | None = None,
        max_queued: int = 1_000,
        max_ttft_s: float = 60.0,
        capacity: Capacity = PLENTY,
    ) -> None:
        self.queue = AdmissionQueue(Limits(max_running, max_queued, max_ttft_s))
        self.capacity = capacity
        self.now = 0.0
        self.names: dict[Ticket, str] = {}
        self.let_in: list[str] = []

    def arrive(
        self,
        tenant: str = "acme",
        priority: Priority = NORMAL,
        *,
        weight: float = 1.0,
        deadline: float | None = None,
        chars: int = 0,
    ) -> Ticket:
        asked = Asked(tenant, priority, weight, self.now, deadline, chars)
        return self.queue.arrive(asked, self.now, self.capacity)

    def ask(
        self,
        name: str = "",
        tokens: int = 100,
        *,
        answer: int = 0,
        reader: Role = DECODE,
        own_s: float = 0.0,
        behind_s: float = 0.0,
        **asked: object,
    ) -> Ticket:
        ticket = self.arrive(**asked)  # type: ignore[arg-type]
        self.names[ticket] = name
        try:
            work = Work(tokens, answer, reader, own_s, behind_s)
            self.queue.enqueue(ticket, work, self.now, self.capacity)
        except RejectedError:
            self.queue.leave(ticket, self.now)
            raise
        self.admit()
        return ticket

    def admit(self) -> list[str]:
        names = [self.names[t] for t in self.queue.admit(self.now, self.capacity)]
        self.let_in += names
        return names

    def end(self, ticket: Ticket, answer_tokens: int | None = 0) -> list[str]:
        self.queue.read(ticket, self.now)
        self.queue.leave(ticket, self.now, answer_tokens)
        return self.admit()

    def refusal(self, **asked: object) -> RejectedError:
        with pytest.raises(RejectedError) as caught:
            self.ask(**asked)  # type: ignore[arg-type]
        return caught.value

    def paced(self, tokens: int) -> None:
        """So many tokens are seen to leave the queue in one second; at most one runs."""
        first = self.ask(tokens=1)
        second = self.ask(tokens=tokens)
        self.now += 1
        self.end(first)
        self.end(second)


# What is let in at once.


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


# Order.


def test_of_one_tenant_and_size_the_first_that_must_begin_goes_first() -> None:
    model = Model(max_running=1)
    first = model.ask("first")
    model.ask("by 50", deadline=50.0)
    model.ask("by 20", deadline=20.0)
    model.ask("by 30, but takes 15", deadline=30.0, own_s=15.0)
    model.ask("by 40, but waits 22 there", deadline=40.0, behind_s=22.0)
    model.ask("no deadline")  # by 60
    model.now = 1.0
    for _ in range(5):
        model.end(first)
        first = next(t for t, name in model.names.items() if name == model.let_in[-1])
    assert model.let_in[1:] == [
        "by 30, but takes 15", "by 40, but waits 22 there", "by 20", "by 50", "no deadline",
    ]  # fmt: skip


def test_who_has_a_deadline_must_begin_the_sooner_the_longer_its_answer_takes() -> None:
    model = Model()
    first = model.ask(answer=100)
    model.queue.read(first, 0.0)
    model.now = 100.0
    model.queue.leave(first, model.now, 100)  # a tenth is learned: 10 tokens, of 0.1 s each
    model.ask("by 150.5", answer=0, deadline=150.5)
    model.ask("by 151, with an answer of 1 s", answer=100, deadline=151.0)
    model.ask("by 101, nothing left for its answer", answer=100, deadline=101.0)
    assert [t.latest for t, name in model.names.items() if name.startswith("by")] == [
        *(150.5, pytest.approx(150.0)),
        100.5,  # half of its time may always be waited
    ]


def drained(model: Model) -> list[str]:
    """The order in which the rest is let in, one at a time."""
    done = 0
    while done < len(model.let_in):
        name = model.let_in[done]
        model.end(next(t for t, it in model.names.items() if it == name))
        done += 1
    return model.let_in


def test_tenants_take_turns_by_tokens_and_weight() -> None:
    model = Model(max_running=1)
    model.ask("x", 1, tenant="other")
    for i in range(4):
        model.ask(f"big{i}", 200, tenant="big")
    for i in range(4):
        model.ask(f"small{i}", 100, tenant="small")
    for i in range(4):
        model.ask(f"double{i}", 100, tenant="double", weight=2.0)
    assert drained(model)[1:8] == [
        *("big0", "small0", "double0"),  # all begin at 0
        *("double1", "small1", "double2", "double3"),  # 50, 100, 100, 150
    ]


def test_classes_share_sixteen_to_four_to_one() -> None:
    model = Model(max_running=1)
    model.ask("x", 1)
    for priority in Priority:
        for i in range(60):
            model.ask(f"{priority.value}{i}", 100, priority=priority)
    first = Counter(name.rstrip("0123456789") for name in drained(model)[1:43])
    assert first == {"high": 32, "normal": 8, "low": 2}


def test_a_short_prompt_does_not_wait_for_the_long_ones_of_its_own_tenant() -> None:
    model = Model(max_running=1)
    model.ask("x", 1)
    for i in range(20):
        model.ask(f"long{i}", 8_000)
    model.ask("short", 40)
    assert drained(model).index("short") == 2


SIZES = (40, 1_000, 4_000, 16_000, 100_000)


@settings(max_examples=60, deadline=None)
@given(
    crowd=st.lists(
        st.tuples(st.sampled_from(SIZES), st.sampled_from(["a", "b", "c"])), min_size=1, max_size=40
    ),
    tokens=st.sampled_from(SIZES),
    more=st.lists(
        st.tuples(st.sampled_from(SIZES), st.sampled_from(["a", "b", "c"])), min_size=1, max_size=8
    ),
)
def test_nobody_waits_for_ever(
    crowd: list[tuple[int, str]], tokens: int, more: list[tuple[int, str]]
) -> None:
    """Whatever goes on coming of other sizes and tenants: a request is let in after as many
    tokens as its tenant's and its size's parts let the others have."""
    model = Model(max_running=1, max_ttft_s=1e9)
    model.ask("x", 1)
    for size, tenant in crowd:
        model.ask("crowd", size, tenant=tenant)
    mine = model.ask("mine", tokens, tenant="a")
    of_mine = [size for size, tenant in crowd if tenant == "a" and size == tokens]
    # What is before it in its line, as often as there are lines; and in each line two longest
    # prompts, for parts are kept to within one of them on either side.
    bound = (sum(of_mine) + 2 * max(SIZES)) * len(SIZES) * 3
    served = 0
    new = cycle(more)
    while mine.admitted == 0.0:
        model.now += 1
        size, tenant = next(new)
        if (size, tenant) != (tokens, "a"):
            model.ask("more", size, tenant=tenant)
        running = [t for t, name in model.names.items() if t.state.value == "reading"]
        for ticket in running:
            served += ticket.work.prompt_tokens
            del model.names[ticket]
            model.end(ticket)
        assert served <= bound


# Refusals.


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


def test_answers_are_charged_to_their_tenant() -> None:
    model = Model(max_running=1)
    talker = model.ask("talker", tenant="talker", answer=1_000)
    for i in range(2):
        model.ask(f"talker{i}", tenant="talker")
        model.ask(f"quiet{i}", tenant="quiet")
    model.end(talker, answer_tokens=1_000)
    assert drained(model)[1:4] == ["quiet0", "quiet1", "talker0"]


# What is learned.


def test_pace_counts_only_the_time_in_which_some_are_at_it() -> None:
    pace = Pace()
    assert pace.seconds(100) == 0
    assert pace.rate == 0
    pace.go_on(10.0, at_it=0)
    pace.go_on(12.0, at_it=1)
    pace.add(200)
    # Two seconds, with a memory of 20: 20 * (1 - exp(-0.1)) = 1.903
    assert pace.seconds(100) == pytest.approx(1.903 / 2, abs=1e-3)
    assert pace.rate == pytest.approx(200 / 1.903, rel=1e-3)
    pace.go_on(1_000.0, at_it=0)
    assert pace.seconds(100) == pytest.approx(1.903 / 2, abs=1e-3)


def test_pace_forgets() -> None:
    pace = Pace()
    for second in range(1, 200):
        pace.go_on(float(second), at_it=1)
        pace.add(100 if second < 100 else 50)
    assert pace.seconds(50) == pytest.approx(1, rel=0.05)


def test_what_is_expected_counts_as_one_second() -> None:
    pace = Pace()
    assert pace.seconds(100, expected=50) == 2
    pace.go_on(2.0, at_it=1)
    pace.add(400)
    # 400 in 1.903 s, and 50 in one.
    assert pace.seconds(100, expected=50) == pytest.approx(100 * 2.903 / 450, abs=1e-3)


@pytest.mark.parametrize(
    ("tokens", "size"), [(0, 0), (511, 0), (512, 1), (2_047, 1), (2_048, 2), (8_192, 3)]
)
def test_sizes_are_powers_of_four(tokens: int, size: int) -> None:
    assert size_of(tokens) == size


@pytest.mark.parametrize(
    ("number", "priority"), [(-3, Priority.HIGH), (0, NORMAL), (2, Priority.LOW)]
)
def test_priorities_are_those_of_vllm(number: int, priority: Priority) -> None:
    assert priority_of(number) is priority
    assert math.isfinite(priority.weight)

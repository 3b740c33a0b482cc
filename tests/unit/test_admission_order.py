"""Who of those that wait is let in first, with values worked out by hand."""

from __future__ import annotations

import math
from collections import Counter
from itertools import cycle

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from coordinator.policy.admission import size_of
from coordinator.policy.ticket import Priority, priority_of
from tests.support.admission_model import NORMAL, Model, drained


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


def test_answers_are_charged_to_their_tenant() -> None:
    model = Model(max_running=1)
    talker = model.ask("talker", tenant="talker", answer=1_000)
    for i in range(2):
        model.ask(f"talker{i}", tenant="talker")
        model.ask(f"quiet{i}", tenant="quiet")
    model.end(talker, answer_tokens=1_000)
    assert drained(model)[1:4] == ["quiet0", "quiet1", "talker0"]


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

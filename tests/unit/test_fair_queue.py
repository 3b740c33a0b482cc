"""Whose turn it is, by hand and by the bound that start-time fair queueing is proven to keep."""

from __future__ import annotations

from collections import Counter, defaultdict

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from coordinator.policy.fair_queue import FairQueue, Place, Share


def drain(queue: FairQueue[str]) -> list[str]:
    out = []
    while (place := queue.head()) is not None:
        queue.take(place)
        out.append(place.item)
    return out


def test_one_flow_is_served_by_order_and_then_by_arrival() -> None:
    queue: FairQueue[str] = FairQueue()
    for order, item in ((2.0, "late"), (1.0, "first"), (1.0, "second")):
        queue.push((Share("a"),), 10, order, item)
    assert drain(queue) == ["first", "second", "late"]
    assert (len(queue), queue.tokens) == (0, 0)


def test_equal_flows_take_turns_by_tokens() -> None:
    queue: FairQueue[str] = FairQueue()
    for i in range(2):
        queue.push((Share("long"),), 300, i, f"L{i}")
    for i in range(6):
        queue.push((Share("short"),), 100, i, f"s{i}")
    # Starts: L at 0, 300; s at 0, 100, 200, 300, ...
    assert drain(queue) == ["L0", "s0", "s1", "s2", "L1", "s3", "s4", "s5"]


def test_twice_the_weight_is_twice_the_tokens() -> None:
    queue: FairQueue[str] = FairQueue()
    for i in range(4):
        queue.push((Share("a", 2.0),), 100, i, "a")
    for i in range(4):
        queue.push((Share("b", 1.0),), 100, i, "b")
    # Starts: a at 0, 50, 100, 150; b at 0, 100, 200, 300.
    assert drain(queue) == ["a", "b", "a", "b", "a", "a", "b", "b"]


def test_a_flow_that_was_away_has_saved_nothing_up() -> None:
    queue: FairQueue[str] = FairQueue()
    for i in range(10):
        queue.push((Share("busy"),), 100, i, f"busy{i}")
    for _ in range(5):
        place = queue.head()
        assert place is not None
        queue.take(place)
    for i in range(3):
        queue.push((Share("back"),), 100, i, f"back{i}")
    # Time is at 400: back starts there and at 500, 600; busy goes on at 500.
    assert drain(queue)[:5] == ["back0", "busy5", "back1", "busy6", "back2"]


def test_what_an_item_cost_besides_is_paid_for_later() -> None:
    queue: FairQueue[str] = FairQueue()
    answered = queue.push((Share("a"),), 100, 0, "a0")
    queue.take(answered)
    for i in (1, 2):
        queue.push((Share("a"),), 100, i, f"a{i}")
        queue.push((Share("b"),), 100, i, f"b{i}")
    queue.charge(answered, 1_000)
    assert drain(queue) == ["b1", "b2", "a1", "a2"]


def test_who_leaves_costs_its_flow_nothing() -> None:
    queue: FairQueue[str] = FairQueue()
    left = queue.push((Share("a"),), 1_000, 0, "left")
    queue.push((Share("a"),), 100, 1, "a")
    queue.push((Share("b"),), 100, 0, "b")
    queue.remove(left)
    assert (len(queue), queue.tokens) == (2, 200)
    assert drain(queue) == ["a", "b"]


def test_flows_below_one_share_its_part() -> None:
    queue: FairQueue[str] = FairQueue()
    for flow in "ab":
        for i in range(2):
            queue.push((Share("one"), Share(flow)), 100, i, flow)
    for i in range(4):
        queue.push((Share("other"), Share("c")), 100, i, "c")
    served = drain(queue)
    assert served == ["a", "c", "b", "c", "a", "c", "b", "c"]


@pytest.mark.parametrize(
    ("path", "ahead"),
    [
        # Its own 300 go before, and meanwhile as much of the other's: 300 of 500.
        ((Share("x"),), 600),
        # The other has 500 before it, and x has only 300 in all.
        ((Share("y"),), 800),
        # A newcomer starts now.
        ((Share("z"),), 0),
        # With three times the weight, a third as much of the others goes before its own.
        ((Share("new", 3.0),), 0),
    ],
)
def test_what_goes_before_a_newcomer(path: tuple[Share, ...], ahead: float) -> None:
    queue: FairQueue[str] = FairQueue()
    queue.push((Share("x"),), 300, 0, "x")
    queue.push((Share("y"),), 500, 0, "y")
    assert queue.ahead(path) == ahead


def test_what_goes_before_a_newcomer_of_a_flow_in_a_flow() -> None:
    queue: FairQueue[str] = FairQueue()
    queue.push((Share("x"), Share("long")), 1_000, 0, "")
    queue.push((Share("x"), Share("short")), 100, 0, "")
    queue.push((Share("y"), Share("short")), 5_000, 0, "")
    # 100 of its own, 100 of the long ones beside it, and 200 of y meanwhile.
    assert queue.ahead((Share("x"), Share("short"))) == 400
    # 1000 and 100 of x, and as much of y.
    assert queue.ahead((Share("x"), Share("long"))) == 2_200


FLOWS = ("a", "b", "c")
weights = st.sampled_from([0.5, 1.0, 2.0, 8.0])


@settings(max_examples=200, deadline=None)
@given(
    weight=st.fixed_dictionaries({flow: weights for flow in FLOWS}),
    steps=st.lists(
        st.one_of(
            st.tuples(st.just("push"), st.sampled_from(FLOWS), st.integers(1, 5_000)),
            st.tuples(st.just("serve"), st.just(""), st.just(0)),
            st.tuples(st.just("drop"), st.sampled_from(FLOWS), st.just(0)),
        ),
        max_size=80,
    ),
)
def test_flows_that_wait_get_their_parts_within_one_item_each(
    weight: dict[str, float], steps: list[tuple[str, str, int]]
) -> None:
    """Goyal, Vin, Cheng, theorem 1: while two flows both wait, what they got, over their
    weights, differs by no more than one longest item of each, over its weight."""
    queue: FairQueue[str] = FairQueue()
    waiting: defaultdict[str, list[Place[str]]] = defaultdict(list)
    together: dict[tuple[str, str], Counter[str]] = {}
    for what, flow, tokens in steps:
        if what == "push":
            place = queue.push((Share(flow, weight[flow]),), tokens, 0.0, flow)
            waiting[flow].append(place)
        elif what == "drop" and waiting[flow]:
            queue.remove(waiting[flow].pop())
        elif what == "serve" and (head := queue.head()) is not None:
            queue.take(head)
            waiting[head.item].remove(head)
            for got in together.values():
                got[head.item] += head.tokens
            for (one, other), got in together.items():
                longest = 5_000 / weight[one] + 5_000 / weight[other]
                assert abs(got[one] / weight[one] - got[other] / weight[other]) <= longest
        pairs = [
            (one, other)
            for one in FLOWS
            for other in FLOWS
            if one < other and waiting[one] and waiting[other]
        ]
        together = {pair: together.get(pair, Counter()) for pair in pairs}
        assert len(queue) == sum(map(len, waiting.values()))
        assert queue.tokens == sum(p.tokens for places in waiting.values() for p in places)


def test_those_that_left_are_not_remembered() -> None:
    queue: FairQueue[bytes] = FairQueue()
    queue.push((Share("a"),), 1, 0.0, b"stays")
    for i in range(10_000):
        queue.remove(queue.push((Share("a"),), 1, float(i + 1), b"left"))
    assert len(queue) == 1
    # Entries of those that left are dropped as soon as they are more than the others.
    assert len(queue._root.children["a"].items._entries) < 200

"""Which worker each balance policy takes; and that no pool is ever led to one worker."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from coordinator.policy.balance import POLICIES
from coordinator.policy.balance.pick import Need
from coordinator.policy.choose import choose
from coordinator.policy.estimate import Estimates, HandOver, Timings
from coordinator.policy.snapshot import ModelPolicy, RequestFacts, Snapshot, WorkerView
from pdserve.types import Mode

TIMINGS = Timings(
    step_s=0.01,
    token_s=1e-3,
    pair_s=0.0,
    sequence_s=1e-3,
    context_s=0.0,
    reads_learnt=True,
    writes_learnt=True,
)
ESTIMATES = Estimates({"": TIMINGS}, HandOver(0.1, 1e-5, learnt=True), answer_tokens=100)


def need(turn: int = 0, cost: Mapping[str, float] | None = None) -> Need:
    costs = cost or {}
    return Need(lambda view: costs.get(view.worker_id, 0.0), {}, turn)


def pool(count: int) -> tuple[WorkerView, ...]:
    return tuple(WorkerView(f"w{number}") for number in range(count))


def picks(name: str, views: tuple[WorkerView, ...], turns: int) -> Counter[str]:
    return Counter(POLICIES[name](views, need(turn)).worker_id for turn in range(turns))


def test_least_outstanding_goes_by_tokens_then_by_sequences() -> None:
    views = (WorkerView("a", 0, 20), WorkerView("b", 9, 10), WorkerView("c", 8, 10))
    assert picks("least-outstanding", views, 3) == {"c": 3}


def test_round_robin_looks_at_no_load() -> None:
    views = (WorkerView("a", 9, 900), WorkerView("b"), WorkerView("c"))
    assert picks("round-robin", views, 6) == {"a": 2, "b": 2, "c": 2}


def test_power_of_two_never_takes_the_busiest_and_spreads_over_the_others() -> None:
    views = (WorkerView("a", 9, 900), *pool(4))
    met = picks("power-of-two", views, 1_000)
    assert met["a"] == 0
    assert min(met[f"w{number}"] for number in range(4)) > 150


def test_prefix_aware_takes_the_least_cost() -> None:
    costs = {"w0": 3.0, "w1": 1.0, "w2": 2.0}
    assert POLICIES["prefix-aware"](pool(3), need(cost=costs)).worker_id == "w1"


def test_prefix_aware_takes_none_that_is_crowded() -> None:
    # The mean is 10: more than 1.5 * 10 + 4 are a crowd.
    views = (WorkerView("hot", writing=20), WorkerView("a", writing=5), WorkerView("b", writing=5))
    cost = {"a": 2.0, "b": 1.0}
    assert POLICIES["prefix-aware"](views, need(cost=cost)).worker_id == "b"
    views = (replace(views[0], writing=18), *views[1:])  # the mean is 9.3 now
    assert POLICIES["prefix-aware"](views, need(cost=cost)).worker_id == "hot"


def test_prefix_aware_finds_who_holds_the_prompt_in_a_large_pool() -> None:
    views = pool(200)
    held = Need(lambda view: view.worker_id != "w123", {"w123": 64}, 0)
    assert POLICIES["prefix-aware"](views, held).worker_id == "w123"


@pytest.mark.parametrize("name", sorted(POLICIES))
@pytest.mark.parametrize("count", [1, 2, 7, 100])
def test_equals_all_get_their_turn(name: str, count: int) -> None:
    assert len(picks(name, pool(count), 40 * count)) == count


@given(
    name=st.sampled_from(sorted(POLICIES)),
    loads=st.lists(st.tuples(*[st.integers(0, 1000)] * 3), min_size=1, max_size=40),
    turn=st.integers(0, 2**40),
)
def test_a_policy_takes_one_of_the_pool(
    name: str, loads: list[tuple[int, int, int]], turn: int
) -> None:
    views = tuple(
        WorkerView(f"w{i}", sequences, tokens, writing=writing)
        for i, (sequences, tokens, writing) in enumerate(loads)
    )
    assert POLICIES[name](views, need(turn)) in views


@pytest.mark.parametrize("name", sorted(POLICIES))
@settings(max_examples=20)
@given(workers=st.integers(2, 12), cached=st.integers(0, 2_000))
def test_a_hot_prefix_never_takes_all_to_one_worker(name: str, workers: int, cached: int) -> None:
    """However cheap the cached prompt is: requests that stay are spread."""
    sequences = [0] * workers
    policy = ModelPolicy(decode_balance=name)
    facts = RequestFacts(2_000, cached_tokens={"w0": cached})
    for turn in range(20 * workers):
        views = tuple(
            WorkerView(f"w{i}", count, writing=count) for i, count in enumerate(sequences)
        )
        plan = choose(Snapshot((), views, {}, turn, ESTIMATES), policy, facts)
        sequences[int(plan.decode[1:])] += 1
    assert max(sequences) <= 1.5 * 20 + 5 if name == "prefix-aware" else max(sequences) < 40
    assert min(sequences) > 0


@given(load=st.integers(0, 5_000), more=st.integers(1, 5_000))
def test_a_worker_with_more_to_read_is_never_taken_for_that(load: int, more: int) -> None:
    for name in ("prefix-aware", "least-outstanding"):
        policy = ModelPolicy(mode=Mode.COLOCATED, decode_balance=name)

        def chosen(tokens: int, policy: ModelPolicy = policy) -> str:
            views = WorkerView("a", 0, tokens), WorkerView("b", 0, 2_500)
            snapshot = Snapshot((), views, {}, 0, ESTIMATES)
            return choose(snapshot, policy, RequestFacts(100)).decode

        assert not (chosen(load) == "b" and chosen(load + more) == "a")

"""Which arm a request belongs to."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from coordinator.policy.experiment import assign, order, place
from pdserve.config_experiment import Arm, Experiment
from pdserve.types import Mode

ARMS = (
    Arm(name="a", mode=Mode.COLOCATED, weight=1),
    Arm(name="b", mode=Mode.DISAGGREGATED, weight=2),
    Arm(name="c", mode=Mode.AUTO, weight=5),
)
KEYS = [f"user-{number}" for number in range(4000)]
EVEN = tuple(arm.model_copy(update={"weight": 1.0}) for arm in ARMS)


def experiment(assignment: Any, arms: tuple[Arm, ...] = EVEN[:2]) -> Experiment:
    return Experiment(name="e", model="m", assignment=assignment, arms=arms, slot_s=10, washout_s=2)


def test_arms_get_their_share() -> None:
    met = Counter(assign("share", ARMS, key).name for key in KEYS)
    total = sum(arm.weight for arm in ARMS)
    expected = {arm.name: len(KEYS) * arm.weight / total for arm in ARMS}
    chi_square = sum((met[name] - want) ** 2 / want for name, want in expected.items())
    assert chi_square < 13.8  # p = 0.001 at two degrees of freedom


@given(st.text())
def test_a_key_always_meets_the_same_arm(key: str) -> None:
    assert assign("stable", ARMS, key) is assign("stable", ARMS, key)


def test_experiments_split_independently() -> None:
    both = Counter((assign("one", ARMS, key).name, assign("two", ARMS, key).name) for key in KEYS)
    same = sum(count for (one, two), count in both.items() if one == two)
    assert same / len(KEYS) == pytest.approx((1 + 4 + 25) / 64, abs=0.03)


@pytest.mark.parametrize("position", [0, 1, 2])
def test_an_arm_of_weight_0_gets_nothing(position: int) -> None:
    arms = [
        arm.model_copy(update={"weight": 0.0 if i == position else arm.weight})
        for i, arm in enumerate(ARMS)
    ]
    assert arms[position].name not in {assign("zero", arms, key).name for key in KEYS}


def test_a_sticky_key_keeps_its_arm_for_a_slot_and_draws_another_in_the_next() -> None:
    sticky = experiment("sticky")
    for key in KEYS[:20]:
        assert place(sticky, 1, 2.0, key, ()).arm == place(sticky, 1, 9.9, key, ()).arm
    met = Counter(place(sticky, 1, 10.0 * block, "one user", ()).arm for block in range(400))
    assert 160 < met["a"] < 240  # 200, and four standard deviations


@given(st.integers(0, 2**32), st.integers(0, 1000))
def test_each_arm_has_one_turn_in_each_block(seed: int, block: int) -> None:
    taking_turns = experiment("interleaved", EVEN)
    places = [
        place(taking_turns, seed, (block * 3 + turn) * 10 + 5, "any", ()) for turn in range(3)
    ]
    assert {found.block for found in places} == {block}
    assert [found.arm for found in places] == [arm.name for arm in order(EVEN, seed, block)]
    assert sorted(found.arm for found in places) == ["a", "b", "c"]


def test_all_orders_of_a_block_are_as_probable() -> None:
    met = Counter(tuple(arm.name for arm in order(EVEN, 5, block)) for block in range(6000))
    assert len(met) == 6
    assert sum((count - 1000) ** 2 / 1000 for count in met.values()) < 20.5  # p = 0.001


@pytest.mark.parametrize("assignment", ["sticky", "interleaved", "shadow"])
def test_what_arrives_in_the_washout_does_not_count(assignment: str) -> None:
    counted = [place(experiment(assignment), 1, at_s, "k", ()).counts for at_s in (0, 1.9, 2, 9.9)]
    assert counted == [False, False, True, True]


def test_a_stopped_arm_leaves_everything_to_the_other() -> None:
    for assignment in ("sticky", "interleaved"):
        for at_s in range(0, 400, 5):
            assert place(experiment(assignment), 1, at_s, f"{at_s}", {"b"}).arm == "a"


def test_turns_taken_for_a_stopped_arm_do_not_count() -> None:
    counted = [place(experiment("interleaved"), 1, at + 5, "", {"b"}).counts for at in (0, 10)]
    assert sorted(counted) == [False, True]


def test_a_shadow_gets_no_request_of_its_own() -> None:
    assert {place(experiment("shadow"), 1, 5, key, ()).arm for key in KEYS[:50]} == {"a"}

"""Verdicts on differences between arms: never false too often, and found where there is one."""

from __future__ import annotations

from dataclasses import replace
from math import cosh, exp, inf, isfinite, log

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from measure.ab import synthetic
from measure.ab.demo import slot_of
from measure.ab.load import Alone, Mix, alone
from measure.ab.words import render
from measure.bench.answer import Answer
from measure.bench.summary import Targets
from pdserve.ab import evidence
from pdserve.ab.evidence import Interval, interval, times_as_many
from pdserve.ab.report import Comparison, Row, compare
from pdserve.ab.slots import Arm, Experiment, Slot, experiment
from pdserve.types import Mode

differences = st.lists(st.floats(-1, 1), min_size=1, max_size=30)


# Evidence.


@settings(max_examples=25, deadline=None)
@given(differences)
def test_evidence_is_the_mean_of_the_products_over_the_rates(values: list[float]) -> None:
    products = [
        np.prod([exp(rate * d) / cosh(rate * d) for d in values]) for rate in evidence.RATES
    ]
    assert evidence.evidence(np.array(values)) == pytest.approx(log(sum(products) / len(products)))


def test_over_all_orders_of_the_arms_its_mean_is_one() -> None:
    """What makes it a martingale: eight blocks, each with either sign."""
    sizes = np.array([0.5, 0.02, 1.0, 0.1, 0.1, 0.003, 0.3, 0.7])
    signs = np.array([[1 if n >> bit & 1 else -1 for bit in range(8)] for n in range(256)])
    told = evidence.evidence_after_each(signs * sizes)[:, -1]
    assert np.exp(told).mean() == pytest.approx(1.0)


@settings(max_examples=25, deadline=None)
@given(differences)
def test_an_interval_holds_what_is_not_refuted(values: list[float]) -> None:
    found = interval(values, 0.05)
    assert -1 <= found.low <= found.middle <= found.high <= 1
    for inside in (found.low + 1e-6, found.high - 1e-6):
        left = np.array(values) - inside
        assert max(evidence.evidence(left), evidence.evidence(-left)) < log(40) + 1e-3


@settings(max_examples=25, deadline=None)
@given(differences)
def test_turned_arms_turn_the_interval(values: list[float]) -> None:
    found, turned = interval(values, 0.05), interval([-value for value in values], 0.05)
    assert (turned.low, turned.high) == pytest.approx((-found.high, -found.low), abs=1e-6)
    assert turned.middle == pytest.approx(-found.middle, abs=1e-6)


def test_without_a_block_everything_is_possible() -> None:
    assert interval([], 0.05) == Interval(-1, 0, 1)


def test_blocks_of_equal_difference_decide_when_their_signs_could_not_be_chance() -> None:
    """Each doubles the evidence, but for rates that are too low for so small a difference."""
    assert not interval([0.1] * 6, 0.05).excludes_none
    assert interval([0.1] * 8, 0.05).excludes_none


def test_how_many_times_as_many_blocks_is_what_then_decides() -> None:
    values = np.array([0.1, 0.05, 0.12, -0.03])
    times = times_as_many(values, 0.05)
    whole = int(np.ceil(times))
    assert interval(np.tile(values, whole), 0.05).excludes_none
    assert not interval(np.tile(values, whole - 1), 0.05).excludes_none


def test_blocks_that_point_nowhere_will_never_decide() -> None:
    assert times_as_many(np.array([0.1, -0.1]), 0.05) == inf


# Made-up experiments, looked at after each block.


def decided(made: synthetic.Made, seed: int = 7) -> np.float64:
    """The part of the runs that came to a verdict."""
    return np.isfinite(synthetic.decided_by_blocks(synthetic.play(made, seed), 0.05)).mean()


QUICK = synthetic.Made(200, 40, load=0.8, per_slot=60)


@pytest.mark.parametrize("together", [False, True])
def test_equal_arms_of_one_queue_get_a_verdict_in_one_experiment_of_twenty_at_most(
    together: bool,
) -> None:
    made = synthetic.Made(200, 40, load=0.8, per_slot=60, together=together)
    assert decided(made) <= 0.05


def test_who_takes_requests_for_units_finds_a_difference_between_equal_arms() -> None:
    outcome = synthetic.play(QUICK, 7)
    by_requests = synthetic.decided_by_requests(outcome, 0.05)
    assert np.isfinite(by_requests).mean() > 0.5


def test_who_looks_after_each_block_must_not_use_an_interval_for_one_look() -> None:
    outcome = synthetic.play(QUICK, 7)
    assert np.isfinite(synthetic.decided_by_peeking(outcome)).mean() > 0.08


def test_a_tenth_less_is_found_where_both_arms_have_every_slot() -> None:
    made = synthetic.Made(200, 40, load=0.8, per_slot=60, worse=0.1, together=True)
    assert decided(made) > 0.8


def test_the_queue_of_one_request_is_what_is_left_of_those_before_it() -> None:
    """Little's law for M/M/1: the mean time there is one service over the idle part, 5 of them,
    and that is exponential, so that one in e takes longer."""
    outcome = synthetic.play(synthetic.Made(100, 40, load=0.8, target=5.0), 3)
    assert outcome.good.sum() / outcome.asked.sum() == pytest.approx(1 - exp(-1), abs=0.02)


# Reports.

COLOCATED = Arm("colocated", Mode.COLOCATED, 2)
SPLIT = Arm("split", Mode.DISAGGREGATED, 2)


def slot(block: int, arm: str, good: int, **fields: object) -> Slot:
    values: dict[str, object] = {
        "asked": 100,
        "good_tokens": good * 1000,
        "seconds": 50.0,
        "ttft_s": (0.1, 0.2, 0.4),
        "itl_s": (0.02, 0.03, 0.04),
        **fields,
    }
    return Slot(block, arm, good=good, **values)  # type: ignore[arg-type]


def compared(
    good: tuple[int, int], blocks: int, arms: tuple[Arm, Arm] = (COLOCATED, SPLIT), **fields: object
) -> Comparison:
    """Blocks that are all alike."""
    slots = [slot(n, arm.name, each) for n in range(blocks) for arm, each in zip(arms, good)]  # noqa: B905
    made = {"assignment": "interleaved", "arms": arms, "slots": slots, **fields}
    [found] = compare(Experiment("e", "m", **made), 3.6)  # type: ignore[arg-type]
    return found


@pytest.mark.parametrize(
    ("good", "verdict"), [((50, 90), "disaggregate"), ((90, 50), "stay colocated")]
)
def test_a_clear_difference_has_a_verdict(good: tuple[int, int], verdict: str) -> None:
    assert compared(good, 12).verdict == verdict


def test_few_blocks_tell_how_many_more_requests_it_takes() -> None:
    """Eight blocks decide when all are alike, as above; of these three one had 200 requests."""
    found = compared((50, 90), 3)
    assert found.verdict.startswith("not yet known, about ")
    assert found.verdict.endswith(" more requests")


def test_equal_arms_are_not_told_apart() -> None:
    assert compared((90, 90), 50).verdict == "not yet known, and no difference in sight"


def test_arms_of_one_mode_are_told_by_name() -> None:
    old, new = Arm("old", Mode.AUTO, 2), Arm("new", Mode.AUTO, 2)
    assert compared((50, 90), 12, (old, new)).verdict == "take new"
    assert compared((90, 50), 12, (old, new)).verdict == "keep old"


BROKEN = Arm("split", Mode.DISAGGREGATED, 2, stopped="it broke its SLO")


@pytest.mark.parametrize("stopped", [0, 1])
def test_a_guard_rail_makes_no_verdict(stopped: int) -> None:
    """Of equal arms that both meet their targets half of the time, it stops one or the other:
    by its few requests, whose probability of a false verdict nobody knows."""
    arms = [COLOCATED, SPLIT]
    arms[stopped] = replace(arms[stopped], stopped="it broke its SLO")
    equal = compared((50, 50), 5, (arms[0], arms[1]))
    assert equal.verdict == "not known; stopped: it broke its SLO"
    clear = compared((90, 50), 12, (arms[0], arms[1]))
    assert clear.verdict == "stay colocated; stopped: it broke its SLO"


@pytest.mark.parametrize("fields", [{"assignment": "shadow"}, {"equal_weights": False}])
@pytest.mark.parametrize("second", [SPLIT, BROKEN])
def test_what_is_not_comparable_has_no_verdict(second: Arm, fields: dict[str, object]) -> None:
    found = compared((50, 90), 12, (COLOCATED, second), **fields)
    assert found.verdict.startswith("no verdict: ")


def cost(arms: tuple[Arm, Arm], gpu_hour: float | None) -> Row:
    slots = [slot(n, arm.name, 50) for n in range(20) for arm in arms]
    [found] = compare(Experiment("e", "m", "interleaved", arms, slots), gpu_hour)
    return next(row for row in found.rows if row.name == "cost")


def test_costs_are_those_of_the_arms_own_gpus_unless_a_price_is_said() -> None:
    """50,000 good tokens in 50 s: a million take 1,000 s."""
    dear = replace(COLOCATED, hour=7.2), replace(SPLIT, hour=14.4)
    row = cost(dear, None)
    assert row.unit == "per million good tokens"
    assert (row.first, row.other) == pytest.approx((2.0, 4.0))
    assert row.change.middle == pytest.approx(1.0, abs=1e-6)
    said = cost(dear, 3.6)
    assert (said.first, said.other) == pytest.approx((2.0, 2.0))
    assert said.change.middle == pytest.approx(0.0, abs=1e-6)
    assert cost(dear, 0.0).first == 0
    hours = cost((dear[0], SPLIT), None)  # half a price is none
    assert hours.unit == "GPU hours per million good tokens"
    assert (hours.first, hours.other) == pytest.approx((2 / 3.6, 2 / 3.6))


def test_capacity_counts() -> None:
    """As many good answers, from twice as many GPUs."""
    big = Arm("split", Mode.DISAGGREGATED, 4)
    assert compared((90, 90), 12, (COLOCATED, big)).verdict == "stay colocated"


def test_a_figure_is_that_of_all_blocks_and_its_change_relative_to_the_first_arm() -> None:
    found = compared((50, 100), 30)
    assert (found.blocks, found.requests) == (30, 6000)
    # 100 requests in 50 s on two GPUs: one a second and GPU, half of them good.
    assert (found.goodput.first, found.goodput.other) == (0.5, 1.0)
    assert found.goodput.change.middle == pytest.approx(1.0, abs=1e-6)
    rows = {row.name: row for row in found.rows}
    assert (rows["SLO attainment"].first, rows["SLO attainment"].other) == (50, 100)
    assert rows["SLO attainment"].change.middle == pytest.approx(0.5, abs=1e-6)
    assert (rows["TTFT p99"].first, rows["ITL p50"].other) == (0.4, 20)
    # 100 GPU-seconds a slot for 0.1: a million tokens from 20 slots, or from 10.
    assert (rows["cost"].first, rows["cost"].other) == pytest.approx((2.0, 1.0))
    assert rows["cost"].change.middle == pytest.approx(-0.5, abs=1e-6)


def test_only_whole_blocks_count() -> None:
    slots = [slot(0, "colocated", 90), slot(1, "split", 90), slot(2, "split", 0, asked=0)]
    slots.append(slot(2, "colocated", 90))
    [found] = compare(Experiment("e", "m", "interleaved", [COLOCATED, SPLIT], slots), 1.0)
    assert (found.blocks, found.verdict) == (0, "not yet known, for no block is complete")
    assert "| - |" in render(
        Experiment("e", "m", "interleaved", [COLOCATED, SPLIT], slots), [found]
    )


def test_a_slot_without_a_token_has_no_latency_but_counts() -> None:
    slots = [slot(n, "colocated", 90) for n in range(12)]
    slots += [slot(n, "split", 0, ttft_s=None, itl_s=None) for n in range(12)]
    [found] = compare(Experiment("e", "m", "interleaved", [COLOCATED, SPLIT], slots), 1.0)
    assert found.verdict == "stay colocated"
    assert all(row.other is None for row in found.rows if row.name.startswith("TTFT"))


def test_several_arms_share_the_probability_of_a_false_verdict() -> None:
    """Each is compared with the first, at half of it: eight blocks decide one, not two."""
    third = Arm("auto", Mode.AUTO, 2)
    slots = [slot(n, "colocated", 50) for n in range(7)]
    slots += [slot(n, name, 90) for n in range(7) for name in ("split", "auto")]
    made = Experiment("e", "m", "interleaved", [COLOCATED, SPLIT, third], slots)
    two = compare(Experiment("e", "m", "interleaved", [COLOCATED, SPLIT], slots), 1.0)
    three = compare(made, 1.0)
    assert [one.verdict for one in two] == ["disaggregate"]
    assert all(one.verdict.startswith("not yet known") for one in three)


def test_a_coordinators_words_are_read() -> None:
    told = {
        "name": "e",
        "model": "m",
        "assignment": "sticky",
        "arms": [
            {"name": "a", "mode": "auto", "gpus": 2, "weight": 1.0, "stopped": "", "hour": 5.5},
            {"name": "b", "mode": "auto", "gpus": 0, "weight": 2.0, "stopped": "no", "hour": 0},
        ],
        "slots": [
            {
                "block": 3, "arm": "a", "asked": 1, "good": 1, "good_tokens": 5, "seconds": 9.0,
                "ttft_s": [1, 2, 3], "itl_s": None,
            }
        ],
    }  # fmt: skip
    read = experiment(told)
    assert read.slots == [Slot(3, "a", 1, 1, 5, 9.0, (1, 2, 3), None)]
    assert read.arms == [Arm("a", Mode.AUTO, 2, "", 5.5), Arm("b", Mode.AUTO, 1, "no", 0)]
    assert not read.equal_weights


def test_a_report_shows_verdict_capacity_and_intervals() -> None:
    found = compared((50, 90), 12)
    text = render(Experiment("e", "m", "sticky", [COLOCATED, SPLIT], []), [found])
    assert "**colocated or split: disaggregate**" in text
    assert "equal capacity: 2 GPUs" in text
    assert "share the queues" in text
    assert "| SLO attainment, % | 50.00 | 90.00 | +40.0 points |" in text
    assert isfinite(found.goodput.change.low)


@pytest.mark.parametrize(
    ("goods", "blocks", "goodput", "attainment"),
    [
        # One block of equal arms refutes nothing at all.
        ((50, 50), 1, "| +0.0 % | no bound yet |", "| +0.0 points | no bound yet |"),
        # A good answer from the other arm alone: any number of times as many.
        ((0, 90), 12, "| over 1,000 times | 785 times or more |", "points to +"),
    ],
)
def test_a_side_on_which_nothing_is_known_yet_is_told_as_such(
    goods: tuple[int, int], blocks: int, goodput: str, attainment: str
) -> None:
    found = compared(goods, blocks)
    text = render(Experiment("e", "m", "interleaved", [COLOCATED, SPLIT], []), [found])
    (told,) = (line for line in text.splitlines() if line.startswith("| goodput"))
    assert goodput in told
    assert "-100.0 %" not in told
    (told,) = (line for line in text.splitlines() if line.startswith("| SLO attainment"))
    assert attainment in told


# Real workers.


def test_a_slot_is_what_clients_saw_of_it() -> None:
    quick = Answer(100, first_s=0.5, end_s=1.5, gaps_s=[0.25] * 4, answer_tokens=5)
    late = Answer(200, first_s=8.0, end_s=8.0, answer_tokens=1)
    failed = Answer(300, failure="HTTP 503")
    found = slot_of(3, "auto", [quick, late, failed], Targets(6.0, 0.3), 8.0)
    assert (found.block, found.arm, found.asked, found.good) == (3, "auto", 3, 1)
    assert (found.good_tokens, found.seconds) == (105, 8.0)
    assert found.ttft_s == pytest.approx((4.25, 7.25, 7.925))
    assert found.itl_s == (0.25, 0.25, 0.25)
    assert slot_of(3, "auto", [failed], Targets(6.0, 0.3), 8.0).ttft_s is None


def test_a_load_and_its_targets_are_in_units_of_the_machine() -> None:
    def answer(first_s: float, end_s: float, tokens: int) -> Answer:
        return Answer(10, first_s=first_s, end_s=end_s, answer_tokens=tokens)

    machine = alone([answer(0.1, 2.0, 20)], [answer(1.5, 4.0, 6)])
    assert machine == Alone(2.0, pytest.approx(0.1), 4.0, 1.5)
    assert machine.targets == Targets(6.0, pytest.approx(0.15))

    coming = Mix("both", chats=4.0, longs=2.0).arrivals(machine, 1_000.0, seed=1)
    longs = [arrival for arrival in coming if arrival.prompt_tokens >= 1_200]
    # Poisson: 2,000 and 500 are expected, with standard deviations of 45 and 22.
    assert abs(len(coming) - len(longs) - 2_000) < 200
    assert abs(len(longs) - 500) < 100
    assert [arrival.at_s for arrival in coming] == sorted(arrival.at_s for arrival in coming)
    assert coming == Mix("both", chats=4.0, longs=2.0).arrivals(machine, 1_000.0, seed=1)
    chats = Mix("chats", chats=4.0).arrivals(machine, 100.0, seed=1)
    assert not [arrival for arrival in chats if arrival.prompt_tokens >= 1_200]

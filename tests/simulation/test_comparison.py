"""How goodput is found, and what counts as good."""

from __future__ import annotations

from array import array
from pathlib import Path

import pytest

from measure.highest import PRECISION, highest
from measure.simulation import comparison
from measure.simulation.comparison import Bench, Best, Result, Traffic, attained
from measure.simulation.trace_run import Seen, Setup, Targets
from measure.simulation.traces import Arrival
from pdserve.types import Mode

TARGETS = Targets(ttft_s=1.0, tpot_s=0.1)
ARRIVALS = [Arrival(0.5 * number, 100, 2) for number in range(1, 21)]
"""Two a second."""


@pytest.mark.parametrize("limit", [0.9, 7.0, 10.0, 12.9, 140.0])
def test_the_highest_rate_is_found_from_anywhere(limit: float) -> None:
    rate = highest(lambda rate: rate <= limit, 10.0)
    assert rate <= limit < rate * PRECISION


def test_what_is_never_attained_has_no_goodput() -> None:
    assert highest(lambda rate: False, 10.0) == 0.0


def seen(bad: int, *, long_bad: int, asked: int = 20) -> Seen:
    """18 short requests and two long ones, so many of which came late."""
    late = [number < bad for number in range(18)] + [number < long_bad for number in range(2)]
    return Seen(
        asked=asked,
        prompt_tokens=array("l", [100] * 18 + [9_000] * 2),
        ttft_s=array("d", [2.0 if each else 0.5 for each in late]),
        tpot_s=array("d", [0.05] * 20),
    )


def test_the_longest_prompts_are_judged_by_themselves() -> None:
    assert attained(seen(0, long_bad=0), TARGETS) == (1.0, 1.0)
    assert attained(seen(1, long_bad=1), TARGETS) == (0.9, 0.5)


def test_who_was_not_answered_was_not_served_well() -> None:
    assert attained(seen(0, long_bad=0, asked=40), TARGETS) == (0.5, 1.0)
    assert attained(Seen(asked=3), TARGETS) == (0.0, 0.0)


def test_a_mode_is_judged_by_its_best_split(monkeypatch: pytest.MonkeyPatch) -> None:
    """One of four workers can serve 4 requests a second by reading, two 16, and three 9."""
    limits = {1: 4.0, 2: 16.0, 3: 9.0}
    runs: list[int] = []

    def simulate(arrivals: list[Arrival], setup: Setup) -> Seen:
        runs.append(setup.prefill)
        rate = len(arrivals) / arrivals[-1].at_s
        return seen(0 if rate <= limits[setup.prefill] else 18, long_bad=0)

    monkeypatch.setattr(comparison, "simulate", simulate)
    traffic = Traffic("steady", lambda _: ARRIVALS, 2.0)
    bench = Bench(traffic, Path(), TARGETS, lambda _: None)
    best = bench.best(Mode.DISAGGREGATED, 8.0)
    assert best.prefill == 2
    assert best.goodput <= 16.0 < best.goodput * PRECISION
    # Those that are worse are tried once, and nothing is run again.
    assert (runs.count(1), runs.count(3)) == (1, 1)
    before = len(runs)
    assert bench.best(Mode.DISAGGREGATED, 8.0) == best
    assert len(runs) == before


def test_without_goodput_a_mode_is_judged_by_those_that_it_serves_well(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Of 20 requests, with one worker that reads, ten are late at any rate, with two four."""
    late = {1: 10, 2: 4, 3: 18}
    monkeypatch.setattr(
        comparison, "simulate", lambda _, setup: seen(late[setup.prefill], long_bad=0)
    )
    bench = Bench(Traffic("steady", lambda _: ARRIVALS, 2.0), Path(), TARGETS, lambda _: None)
    assert bench.best(Mode.DISAGGREGATED, 8.0) == Best(Mode.DISAGGREGATED, 2, 0.0)


@pytest.mark.parametrize(
    ("goodputs", "late", "gain"),
    [
        pytest.param((2.0, 4.0, 5.0), (0, 0, 0), "+25%", id="goodput"),
        # 16 of 20 and 15, against 18.
        pytest.param((0.0, 0.0, 0.0), (4, 5, 2), "+12% good ones", id="none"),
    ],
)
def test_what_auto_gains_is_over_the_better_fixed_mode(
    goodputs: tuple[float, ...], late: tuple[int, ...], gain: str
) -> None:
    best = tuple(Best(mode, 0, rate) for mode, rate in zip(Mode, goodputs, strict=True))
    equal = tuple(seen(bad, long_bad=0) for bad in late)
    assert Result("steady", TARGETS, best, equal).gain == gain

"""How fast work leaves a fleet, as it is learned."""

from __future__ import annotations

import pytest

from coordinator.policy.pace import Pace


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

"""The short form of the fault suite; `make soak` runs it for an hour."""

from __future__ import annotations

import pytest

from tests.faults.runner import Result, run_cases
from tests.faults.scenarios import EXPECTED, TRANSPORTS, Event, Moment, short_form

SEED = 1
FLEETS_EACH = 2


def test_the_table_says_what_is_to_happen_in_every_cell() -> None:
    assert EXPECTED.keys() == {(event, moment) for event in Event for moment in Moment}


@pytest.mark.slow
async def test_whatever_happens_to_a_request_at_any_moment_breaks_no_invariant() -> None:
    print(f"seed {SEED}")
    results: list[Result] = []
    cases = short_form(SEED)
    each = {name: iter([c for c in cases if c.transport == name]) for name in TRANSPORTS}
    await run_cases(each, FLEETS_EACH, results.append)
    broken = [result for result in results if result.found]
    assert not broken, "\n".join(map(str, broken))
    assert len(results) == len(cases)

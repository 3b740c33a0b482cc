"""The lease table, on a clock that the test sets."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdserve.types import LeaseEnd, LeaseSnapshot
from prefill_svc.leases import LeaseTable

NO_TOKENS = {"0-1s": 0, "1-10s": 0, "10-60s": 0, "60s-": 0}
NO_ENDS = {"fetched": 0, "abandoned": 0, "released": 0, "expired": 0, "lost": 0}


def table(*leases: tuple[str, int, float, float]) -> LeaseTable:
    """Of (handle id, tokens, opened at, seconds)."""
    made = LeaseTable()
    for handle_id, num_tokens, now, lease_s in leases:
        made.open(handle_id, num_tokens, now, lease_s)
    return made


def test_a_lease_runs_for_its_time_from_when_it_was_opened_or_renewed() -> None:
    leases = table(("a", 1, 5, 10))
    assert leases.left_s("a", 5) == 10
    assert leases.left_s("a", 15) == 0
    leases.renew("a", 12, 10)
    assert leases.left_s("a", 15) == 7
    assert leases.left_s("a", 23) == -1


def test_an_open_id_cannot_be_opened_again() -> None:
    leases = table(("a", 1, 0, 10))
    with pytest.raises(ValueError, match="lease a is open"):
        leases.open("a", 1, 1, 20)
    assert leases.left_s("a", 0) == 10


@pytest.mark.parametrize("end", LeaseEnd)
def test_a_lease_ends_once_and_its_end_is_counted(end: LeaseEnd) -> None:
    leases = table(("a", 7, 0, 10))
    leases.end("a", end)
    leases.end("a", LeaseEnd.LOST)
    leases.end("unknown", LeaseEnd.LOST)
    assert leases.snapshot(5) == LeaseSnapshot(0, 0.0, NO_TOKENS, {**NO_ENDS, end.value: 1})


def test_a_snapshot_tells_what_is_held_by_age_and_the_oldest() -> None:
    leases = table(("a", 1, 40, 9), ("b", 20, 90, 9), ("c", 300, 99.5, 9), ("d", 4_000, 99, 9))
    held = {"0-1s": 300, "1-10s": 4_000, "10-60s": 20, "60s-": 1}
    snapshot = leases.snapshot(100)
    assert snapshot == LeaseSnapshot(4, 60.0, held, NO_ENDS)
    assert snapshot.tokens == 4_321


def test_renewing_makes_a_lease_no_younger() -> None:
    leases = table(("a", 5, 0, 9))
    leases.renew("a", 8, 9)
    assert leases.snapshot(12).oldest_s == 12


def test_an_empty_table_holds_nothing() -> None:
    assert table().snapshot(5) == LeaseSnapshot(0, 0.0, NO_TOKENS, NO_ENDS)


@given(st.lists(st.tuples(st.integers(1, 9), st.sampled_from([None, *LeaseEnd])), max_size=30))
def test_what_was_opened_is_open_or_has_ended(plan: list[tuple[int, LeaseEnd | None]]) -> None:
    leases = table(*((str(i), tokens, 0.0, 9.0) for i, (tokens, _) in enumerate(plan)))
    for i, (_, end) in enumerate(plan):
        if end is not None:
            leases.end(str(i), end)
    snapshot = leases.snapshot(1.0)
    assert snapshot.open + sum(snapshot.ended.values()) == len(plan)
    assert snapshot.tokens == sum(tokens for tokens, end in plan if end is None)
    assert all(
        snapshot.ended[end] == sum(given_end is end for _, given_end in plan) for end in LeaseEnd
    )

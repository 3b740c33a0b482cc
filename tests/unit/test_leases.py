"""The lease table, on a clock that the test sets."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdserve.types import SimDescriptor
from prefill_svc.leases import LeaseSnapshot, LeaseTable

KV = SimDescriptor(1, "nixl")


def table(*leases: tuple[str, float, float]) -> LeaseTable:
    """Of (handle id, opened at, seconds)."""
    made = LeaseTable()
    for handle_id, now, lease_s in leases:
        made.open(handle_id, KV, now, lease_s)
    return made


def test_a_released_lease_is_given_back_once() -> None:
    leases = table(("a", 0, 10))
    released = leases.release("a")
    assert released is not None
    assert released.descriptor is KV
    assert leases.release("a") is None
    assert len(leases) == 0


def test_an_unknown_lease_cannot_be_released() -> None:
    assert table().release("a") is None


def test_leases_expire_in_order_at_their_time_and_not_before() -> None:
    leases = table(("late", 0, 20), ("early", 5, 5), ("other", 0, 30))
    assert leases.expire(9.99) == []
    assert [lease.handle_id for lease in leases.expire(20)] == ["early", "late"]
    assert len(leases) == 1


def test_a_released_lease_does_not_expire() -> None:
    leases = table(("a", 0, 10), ("b", 0, 20))
    leases.release("a")
    assert leases.next_expiry() == 20
    assert leases.expire(15) == []


def test_an_expired_lease_cannot_be_released() -> None:
    leases = table(("a", 0, 10))
    leases.expire(10)
    assert leases.release("a") is None


def test_the_next_expiry_is_the_earliest_of_the_open_ones() -> None:
    assert table().next_expiry() is None
    assert table(("a", 0, 20), ("b", 0, 10)).next_expiry() == 10


def test_an_open_id_cannot_be_opened_again() -> None:
    leases = table(("a", 0, 10))
    with pytest.raises(ValueError, match="lease a is open"):
        leases.open("a", KV, 1, 10)
    assert leases.next_expiry() == 10


def test_a_snapshot_counts_and_tells_the_oldest() -> None:
    assert table().snapshot(5) == LeaseSnapshot(0, 0)
    assert table(("a", 1, 10), ("b", 3, 10)).snapshot(5) == LeaseSnapshot(2, 4)


@given(st.lists(st.tuples(st.floats(0, 100), st.booleans()), max_size=30), st.floats(0, 200))
def test_every_lease_ends_exactly_once(plan: list[tuple[float, bool]], now: float) -> None:
    leases = table(*((str(i), 0.0, lease_s) for i, (lease_s, _) in enumerate(plan)))
    released = {str(i) for i, (_, release) in enumerate(plan) if release and leases.release(str(i))}
    expired = {lease.handle_id for lease in leases.expire(now)}
    rest = {lease.handle_id for lease in leases.expire(float("inf"))}
    assert not released & expired
    assert expired == {str(i) for i, (s, release) in enumerate(plan) if not release and s <= now}
    assert released | expired | rest == {str(i) for i in range(len(plan))}
    assert leases.next_expiry() is None

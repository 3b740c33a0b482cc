"""The ladder as a table: whom each failure is blamed on, and what comes next."""

from __future__ import annotations

from dataclasses import replace

import pytest

from coordinator.policy.ladder import (
    Fault,
    Rung,
    avoiding,
    fault_of,
    is_infrastructure,
    rung,
    words,
)
from coordinator.policy.snapshot import Plan, RequestFacts
from pdserve.errors import ErrorReason

SPLIT = Plan("p1", "d1", "", "", "nixl")
ALONE = Plan(None, "d1", "", "")
FACTS = RequestFacts(100)

PREFILL_SIDE = {
    ErrorReason.PREFILL_FAILED: Fault.PREFILL,
    ErrorReason.NO_ROOM: Fault.PREFILL,
    ErrorReason.DRAINING: Fault.PREFILL,
    ErrorReason.INTERNAL: Fault.PREFILL,
    ErrorReason.INVALID_ARGUMENT: None,
    ErrorReason.CONTEXT_LENGTH_EXCEEDED: None,
    ErrorReason.CANCELLED: None,
    ErrorReason.DEADLINE_EXCEEDED: None,
}
DECODE_SIDE = {
    ErrorReason.DECODE_FAILED: Fault.DECODE,
    ErrorReason.DRAINING: Fault.DECODE,
    ErrorReason.INTERNAL: Fault.DECODE,
    ErrorReason.NO_ROOM: Fault.ROOM,
    ErrorReason.KV_TRANSFER_FAILED: Fault.TRANSPORT,
    ErrorReason.KV_EXPIRED: Fault.PREFILL,
    ErrorReason.KV_REUSED: Fault.PREFILL,
    ErrorReason.KV_DIGEST_MISMATCH: Fault.PREFILL,
    ErrorReason.KV_INCOMPATIBLE: Fault.PREFILL,
    ErrorReason.KV_ALTERED: Fault.PREFILL,
    ErrorReason.KV_FOREIGN: Fault.PREFILL,
    ErrorReason.KV_STALE_EPOCH: Fault.PREFILL,
    ErrorReason.INVALID_ARGUMENT: None,
    ErrorReason.CANCELLED: None,
    ErrorReason.DEADLINE_EXCEEDED: None,
}
COLOCATED = {
    ErrorReason.DECODE_FAILED: Fault.DECODE,
    ErrorReason.NO_ROOM: Fault.DECODE,
    ErrorReason.DRAINING: Fault.DECODE,
    ErrorReason.INTERNAL: Fault.DECODE,
    ErrorReason.CONTEXT_LENGTH_EXCEEDED: None,
}
ROWS = [
    *((SPLIT, True, reason, fault) for reason, fault in PREFILL_SIDE.items()),
    *((SPLIT, False, reason, fault) for reason, fault in DECODE_SIDE.items()),
    *((ALONE, False, reason, fault) for reason, fault in COLOCATED.items()),
]


@pytest.mark.parametrize(
    ("plan", "prefill_side", "reason", "fault"),
    ROWS,
    ids=[f"{row[0].mode}-{'prefill' if row[1] else 'decode'}-{row[2].label}" for row in ROWS],
)
def test_whom_a_failure_is_blamed_on(
    plan: Plan, *, prefill_side: bool, reason: ErrorReason, fault: Fault | None
) -> None:
    assert fault_of(plan, prefill_side=prefill_side, reason=reason) is fault


@pytest.mark.parametrize("reason", [r for r in ErrorReason if r.concerns_kv])
def test_no_reason_of_a_hand_off_is_blamed_on_the_decode_worker(reason: ErrorReason) -> None:
    fault = fault_of(SPLIT, prefill_side=False, reason=reason)
    assert fault in (Fault.TRANSPORT, Fault.PREFILL)


@pytest.mark.parametrize("reason", list(ErrorReason), ids=lambda reason: reason.label)
def test_what_counts_against_a_pair(reason: ErrorReason) -> None:
    broke = {ErrorReason.PREFILL_FAILED, ErrorReason.DECODE_FAILED, ErrorReason.INTERNAL}
    if not reason.touched_no_worker:
        assert is_infrastructure(reason) is (reason in broke or reason.concerns_kv)


def test_what_failed_is_avoided() -> None:
    assert avoiding(FACTS, SPLIT, Fault.PREFILL, "it broke") == replace(
        FACTS, failed_prefill=frozenset({"p1"}), failure="it broke"
    )
    assert avoiding(FACTS, SPLIT, Fault.DECODE, "it broke") == replace(
        FACTS, failed_decode=frozenset({"d1"}), failure="it broke"
    )
    assert avoiding(FACTS, SPLIT, Fault.ROOM, "it broke") == replace(
        FACTS, full_decode=frozenset({"d1"}), failure="it broke"
    )


def test_a_broken_transport_leaves_the_pair_its_others() -> None:
    once = avoiding(FACTS, SPLIT, Fault.TRANSPORT, "it broke")
    assert once == replace(
        FACTS,
        failed_prefill=frozenset({"p1"}),
        stay=("p1", "d1"),
        tried_transports=frozenset({"nixl"}),
        failure="it broke",
    )
    twice = avoiding(once, replace(SPLIT, transport="grpc"), Fault.TRANSPORT, "this too")
    assert twice.stay == ("p1", "d1")
    assert twice.tried_transports == {"nixl", "grpc"}


def test_another_pair_begins_with_its_best_transport() -> None:
    once = avoiding(FACTS, SPLIT, Fault.TRANSPORT, "it broke")
    again = avoiding(once, replace(SPLIT, prefill="p2"), Fault.TRANSPORT, "this too")
    assert again.stay == ("p2", "d1")
    assert again.tried_transports == {"nixl"}


@pytest.mark.parametrize("fault", [Fault.PREFILL, Fault.DECODE, Fault.ROOM])
def test_a_pair_that_failed_otherwise_is_left(fault: Fault) -> None:
    once = avoiding(FACTS, SPLIT, Fault.TRANSPORT, "it broke")
    again = avoiding(once, replace(SPLIT, transport="grpc"), fault, "this too")
    assert again.stay is None
    assert not again.tried_transports
    assert "p1" in again.failed_prefill


@pytest.mark.parametrize(
    ("failed", "fault", "plan", "step"),
    [
        (SPLIT, Fault.TRANSPORT, replace(SPLIT, transport="grpc"), Rung.TRANSPORT),
        (SPLIT, Fault.TRANSPORT, replace(SPLIT, prefill="p2"), Rung.PREFILL),
        (SPLIT, Fault.PREFILL, replace(SPLIT, prefill="p2"), Rung.PREFILL),
        (SPLIT, Fault.PREFILL, replace(SPLIT, prefill="p2", decode="d2"), Rung.PREFILL),
        (SPLIT, Fault.PREFILL, ALONE, Rung.COLOCATED),
        (SPLIT, Fault.DECODE, replace(SPLIT, decode="d2"), Rung.DECODE),
        (SPLIT, Fault.ROOM, replace(SPLIT, decode="d2"), Rung.DECODE),
        (SPLIT, Fault.ROOM, ALONE, Rung.COLOCATED),
        (ALONE, Fault.DECODE, replace(ALONE, decode="d2"), Rung.DECODE),
    ],
)
def test_the_step_from_one_plan_to_the_next(
    failed: Plan, fault: Fault, plan: Plan, step: Rung
) -> None:
    assert rung(failed, fault, plan) is step


@pytest.mark.parametrize(
    ("step", "said"),
    [
        (Rung.TRANSPORT, "tried again over nixl: it broke"),
        (Rung.PREFILL, "tried another prefill worker: it broke"),
        (Rung.DECODE, "tried another decode worker: it broke"),
        (Rung.COLOCATED, "fell back to colocated: it broke"),
    ],
)
def test_the_client_reads_each_step_in_words(step: Rung, said: str) -> None:
    assert words(step, SPLIT, "it broke") == said

"""The decision, branch by branch."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from coordinator.policy.candidates import MAX_PREFILL_WORKERS
from coordinator.policy.choose import choose
from coordinator.policy.snapshot import (
    ModelPolicy,
    Plan,
    RequestFacts,
    Snapshot,
    WorkerView,
)
from pdserve.errors import ErrorReason, RejectedError
from pdserve.types import Fallback, Mode

COLOCATED = ModelPolicy(mode=Mode.COLOCATED)
DISAGGREGATED = ModelPolicy(mode=Mode.DISAGGREGATED)
AUTO = ModelPolicy(mode=Mode.AUTO, decider="threshold", min_prefill_tokens=512)
STRICT = ModelPolicy(mode=Mode.DISAGGREGATED, fallback=Fallback.FAIL)
ONE_ARM = replace(DISAGGREGATED, experiment="split", arm="split-arm")
SHORT = RequestFacts(prompt_tokens=100)
LONG = RequestFacts(prompt_tokens=2000)


def fleet(
    prefill: tuple[WorkerView, ...] | str = "p1 p2",
    decode: tuple[WorkerView, ...] | str = "d1 d2",
    pairs: str = "p1-d1 p1-d2 p2-d1 p2-d2",
    transports: tuple[str, ...] = ("nixl", "grpc"),
    turn: int = 0,
) -> Snapshot:
    """By names, or by views where the load matters."""
    return Snapshot(
        _views(prefill),
        _views(decode),
        {(pair[:2], pair[3:]): transports for pair in pairs.split()},
        turn,
    )


def _views(given: tuple[WorkerView, ...] | str) -> tuple[WorkerView, ...]:
    return tuple(map(WorkerView, given.split())) if isinstance(given, str) else given


NOBODY = fleet("", "", "")


@dataclass(frozen=True)
class Row:
    name: str
    snapshot: Snapshot
    policy: ModelPolicy
    facts: RequestFacts
    prefill: str | None
    decode: str
    reason: str
    arm: str = ""
    transport: str = "nixl"


def without_prefill(*worker_ids: str) -> RequestFacts:
    return replace(SHORT, failed_prefill=frozenset(worker_ids), failure="it broke")


def without_decode(*worker_ids: str) -> RequestFacts:
    return replace(SHORT, failed_decode=frozenset(worker_ids), failure="it died")


def without_room(*worker_ids: str) -> RequestFacts:
    return replace(SHORT, full_decode=frozenset(worker_ids), failure="it is full")


def after_transports(*tried: str) -> RequestFacts:
    """After the pair p1, d1 failed by these."""
    return replace(without_prefill("p1"), stay=("p1", "d1"), tried_transports=frozenset(tried))


ROWS = [
    # Whose word counts.
    Row("the model's mode", fleet(), COLOCATED, LONG, None, "d1", "colocated: set for the model"),
    Row(
        "the model's mode, split", fleet(), DISAGGREGATED, SHORT, "p1", "d1",
        "disaggregated: set for the model",
    ),
    Row(
        "what a request needs comes before its wish", fleet(), ONE_ARM,
        replace(LONG, asked=Mode.DISAGGREGATED, colocated_because="it must be"),
        None, "d1", "colocated: it must be",
    ),
    Row(
        "the request's wish comes first", fleet(), ONE_ARM, replace(SHORT, asked=Mode.COLOCATED),
        None, "d1", "colocated: asked for by the request",
    ),
    Row(
        "an arm before the model's mode", fleet(), ONE_ARM, SHORT, "p1", "d1",
        "disaggregated: experiment split, arm split-arm", arm="split-arm",
    ),
    # Auto.
    Row(
        "auto, short", fleet(), AUTO, SHORT, None, "d1",
        "auto: set for the model; 100 uncached prompt tokens < 512",
    ),
    Row(
        "auto, at the threshold", fleet(), AUTO, RequestFacts(512), "p1", "d1",
        "auto: set for the model; 512 uncached prompt tokens >= 512",
    ),
    Row(
        "auto, what is cached does not count", fleet(), AUTO,
        replace(LONG, cached_tokens={"d1": 1600, "d2": 0}), None, "d1",
        "auto: set for the model; 400 uncached prompt tokens < 512",
    ),
    Row(
        "auto, only the decode worker's own cache counts", fleet(),
        replace(AUTO, decode_balance="least-outstanding"),
        replace(LONG, cached_tokens={"d2": 1600}), "p1", "d1",
        "auto: set for the model; 2000 uncached prompt tokens >= 512",
    ),
    Row(
        "auto, asked for", fleet(),
        replace(COLOCATED, decider="threshold"), replace(LONG, asked=Mode.AUTO), "p1", "d1",
        "auto: asked for by the request; 2000 uncached prompt tokens >= 512",
    ),
    Row(
        "auto, long, but nobody to read it", fleet("", "d1", ""), AUTO, LONG, None, "d1",
        "auto: set for the model; 2000 uncached prompt tokens >= 512; fell back to colocated: "
        "no proven pair of prefill and decode workers is ready",
    ),
    # Which workers.
    Row(
        "fewest outstanding tokens",
        fleet(decode=(WorkerView("d1", 0, 900), WorkerView("d2", 9, 100))),
        replace(COLOCATED, decode_balance="least-outstanding"), SHORT,
        None, "d2", "colocated: set for the model",
    ),
    Row(
        "then fewest sequences", fleet(decode=(WorkerView("d1", 3), WorkerView("d2", 2))),
        replace(COLOCATED, decode_balance="least-outstanding"), SHORT, None, "d2",
        "colocated: set for the model",
    ),
    Row(
        "equals take turns", fleet(turn=1), COLOCATED, SHORT, None, "d2",
        "colocated: set for the model",
    ),
    Row(
        "the lightest prefill worker too",
        fleet(prefill=(WorkerView("p1", 0, 50), WorkerView("p2"))), DISAGGREGATED, SHORT,
        "p2", "d1", "disaggregated: set for the model",
    ),
    Row(
        "only a proven pair", fleet(pairs="p2-d2"), DISAGGREGATED, SHORT, "p2", "d2",
        "disaggregated: set for the model",
    ),
    Row(
        "a loaded proven pair before an idle unproven one",
        fleet(decode=(WorkerView("d1"), WorkerView("d2", 9, 999)), pairs="p1-d2"),
        DISAGGREGATED, SHORT, "p1", "d2", "disaggregated: set for the model",
    ),
    Row(
        "a pair whose prefill worker is not ready is none", fleet("p2", pairs="p1-d1"),
        DISAGGREGATED, SHORT, None, "d1",
        "disaggregated: set for the model; fell back to colocated: "
        "no proven pair of prefill and decode workers is ready",
    ),
    # By which transport.
    Row(
        "the transport that is set is not proven", fleet(pairs=""),
        replace(DISAGGREGATED, transport="grpc"), SHORT, None, "d1",
        "disaggregated: set for the model; fell back to colocated: "
        "no pair of prefill and decode workers proven over grpc is ready",
    ),
    Row(
        "the best proven transport", fleet(transports=("grpc", "nixl")), DISAGGREGATED, SHORT,
        "p1", "d1", "disaggregated: set for the model", transport="grpc",
    ),
    Row(
        "the pair's next transport", fleet(turn=1), DISAGGREGATED, after_transports("nixl"),
        "p1", "d1", "disaggregated: set for the model", transport="grpc",
    ),
    Row(
        "no transport left: another prefill worker", fleet(), DISAGGREGATED,
        after_transports("nixl", "grpc"), "p2", "d1", "disaggregated: set for the model",
    ),
    Row(
        "the next transport is not proven: another prefill worker", fleet(transports=("nixl",)),
        DISAGGREGATED, after_transports("nixl"), "p2", "d1", "disaggregated: set for the model",
    ),
    Row(
        "the pair was lost meanwhile", fleet("p2"), DISAGGREGATED, after_transports("nixl"),
        "p2", "d1", "disaggregated: set for the model",
    ),
    Row(
        "the next transport comes before the third prefill worker", fleet(), DISAGGREGATED,
        replace(after_transports("nixl"), failed_prefill=frozenset({"p1", "p2"})),
        "p1", "d1", "disaggregated: set for the model", transport="grpc",
    ),
    # After a failure.
    Row(
        "another prefill worker", fleet(), DISAGGREGATED, without_prefill("p1"),
        "p2", "d1", "disaggregated: set for the model",
    ),
    Row(
        "no prefill worker left", fleet("p1"), DISAGGREGATED, without_prefill("p1"),
        None, "d1", "disaggregated: set for the model",
    ),
    Row(
        "no third prefill worker", fleet("p1 p2 p3", pairs="p1-d1 p2-d1 p3-d1"), DISAGGREGATED,
        without_prefill("p1", "p2"), None, "d1", "disaggregated: set for the model",
    ),
    Row(
        "another decode worker", fleet(), DISAGGREGATED, without_decode("d1"),
        "p1", "d2", "disaggregated: set for the model",
    ),
    Row(
        "another decode worker, colocated", fleet(), COLOCATED, without_decode("d1"),
        None, "d2", "colocated: set for the model",
    ),
    Row(
        "a decode worker with room", fleet(), DISAGGREGATED, without_room("d1"),
        "p1", "d2", "disaggregated: set for the model",
    ),
    Row(
        "none has room: wait for one, colocated", fleet(decode="d1", pairs="p1-d1"),
        DISAGGREGATED, without_room("d1"), None, "d1", "disaggregated: set for the model",
    ),
    Row(
        "fallback=fail still tries another prefill worker", fleet(), STRICT,
        without_prefill("p1"), "p2", "d1", "disaggregated: set for the model",
    ),
]  # fmt: skip


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.name)
def test_choose(row: Row) -> None:
    plan = choose(row.snapshot, row.policy, row.facts)
    transport = row.transport if row.prefill else ""
    fell_back = "fell back" in row.reason
    assert plan == Plan(row.prefill, row.decode, row.arm, row.reason, transport, fell_back)


REFUSALS = [
    ("nobody at all", NOBODY, COLOCATED, SHORT, "no decode worker is ready"),
    ("prefill workers alone", fleet(decode=""), DISAGGREGATED, SHORT, "no decode worker is ready"),
    (
        "every decode worker failed", fleet(decode="d1"), DISAGGREGATED,
        without_decode("d1"), "no decode worker is ready",
    ),
    ("fallback=fail without a pair", fleet(""), STRICT, SHORT, "no proven pair"),
    (
        "fallback=fail after the prefill workers", fleet("p1"), STRICT,
        without_prefill("p1"), "it broke",
    ),
    (
        "fallback=fail without room", fleet(decode="d1", pairs="p1-d1"), STRICT,
        without_room("d1"), "it is full",
    ),
]  # fmt: skip


@pytest.mark.parametrize(
    ("snapshot", "policy", "facts", "words"),
    [row[1:] for row in REFUSALS],
    ids=[row[0] for row in REFUSALS],
)
def test_choose_refuses(
    snapshot: Snapshot, policy: ModelPolicy, facts: RequestFacts, words: str
) -> None:
    with pytest.raises(RejectedError, match=words) as refusal:
        choose(snapshot, policy, facts)
    assert refusal.value.reason is ErrorReason.NO_WORKER
    assert refusal.value.retry_after_s


def test_equal_pairs_all_get_their_turn() -> None:
    plans = [choose(fleet(turn=turn), DISAGGREGATED, SHORT) for turn in range(8)]
    assert Counter(plan.decode for plan in plans) == {"d1": 4, "d2": 4}
    assert Counter(plan.prefill for plan in plans) == {"p1": 4, "p2": 4}


names = st.lists(st.sampled_from("abc"), unique=True)


@given(
    prefill=names,
    decode=names,
    pairs=st.dictionaries(
        st.tuples(st.sampled_from("abc"), st.sampled_from("abc")),
        st.permutations(["nixl", "grpc"]).map(tuple),
    ),
    failed_prefill=st.frozensets(st.sampled_from("abc")),
    failed_decode=st.frozensets(st.sampled_from("abc")),
    full_decode=st.frozensets(st.sampled_from("abc")),
    mode=st.sampled_from(Mode),
    fallback=st.sampled_from(Fallback),
    tokens=st.integers(1, 1000),
    turn=st.integers(0, 100),
)
def test_a_plan_names_only_workers_that_may_be_used(
    *,
    prefill: list[str],
    decode: list[str],
    pairs: dict[tuple[str, str], tuple[str, ...]],
    failed_prefill: frozenset[str],
    failed_decode: frozenset[str],
    full_decode: frozenset[str],
    mode: Mode,
    fallback: Fallback,
    tokens: int,
    turn: int,
) -> None:
    snapshot = Snapshot(
        tuple(map(WorkerView, prefill)), tuple(map(WorkerView, decode)), pairs, turn
    )
    policy = ModelPolicy(mode=mode, fallback=fallback)
    facts = RequestFacts(
        tokens,
        failed_prefill=failed_prefill,
        failed_decode=failed_decode,
        full_decode=full_decode,
    )
    try:
        plan = choose(snapshot, policy, facts)
    except RejectedError:
        assert fallback is Fallback.FAIL or not set(decode) - failed_decode
        return
    assert plan.decode in set(decode) - failed_decode
    if plan.prefill is not None:
        assert plan.prefill in set(prefill) - failed_prefill
        assert plan.transport == pairs[plan.prefill, plan.decode][0]
        assert plan.decode not in full_decode
        assert len(failed_prefill) < MAX_PREFILL_WORKERS
